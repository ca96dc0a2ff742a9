"""Trains an algorithm: `jmarl train`."""

import sys

from jmarl.cli.main import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
