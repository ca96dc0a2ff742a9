"""Draws learning curves: `jmarl plot`."""

import sys

from jmarl.cli.main import main

if __name__ == "__main__":
    main(["plot", *sys.argv[1:]])
