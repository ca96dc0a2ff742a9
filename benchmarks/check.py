"""Trains a committed result again: `jmarl check`."""

import sys

from jmarl.cli.main import main

if __name__ == "__main__":
    main(["check", *sys.argv[1:]])
