"""`python -m jmarl` is the command `jmarl`."""

from jmarl.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
