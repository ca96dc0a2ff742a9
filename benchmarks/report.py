"""Compares runs: `jmarl report`."""

import sys

from jmarl.cli.main import main

if __name__ == "__main__":
    main(["report", *sys.argv[1:]])
