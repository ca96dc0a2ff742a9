"""Searches for hyperparameters: `jmarl search`."""

import sys

from jmarl.cli.main import main

if __name__ == "__main__":
    main(["search", *sys.argv[1:]])
