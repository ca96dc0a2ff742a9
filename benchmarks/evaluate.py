"""Evaluates the policies of a run: `jmarl evaluate`."""

import sys

from jmarl.cli.main import main

if __name__ == "__main__":
    main(["evaluate", *sys.argv[1:]])
