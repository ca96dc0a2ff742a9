"""Lets the players of runs meet, on both sides of a game: `jmarl tournament`."""

import sys

from jmarl.cli.main import main

if __name__ == "__main__":
    main(["tournament", *sys.argv[1:]])
