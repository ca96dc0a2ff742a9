"""Lets the seeds of a run play with each other: `jmarl crossplay`."""

import sys

from jmarl.cli.main import main

if __name__ == "__main__":
    main(["crossplay", *sys.argv[1:]])
