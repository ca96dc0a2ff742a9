"""`python -m jmarl` is the command `jmarl`."""

from jmarl.cli.main import run

if __name__ == "__main__":
    run()
