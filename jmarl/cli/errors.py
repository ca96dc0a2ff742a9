"""What the user can put right, in one sentence: no traceback, exit code 2."""

import contextlib
import difflib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

LARGEST = 2**31 - 1  # that the arrays of jax count to


class UsageError(Exception):
    """What the user can put right: one sentence, no traceback."""


class Interrupted(UsageError):
    """Ctrl-C, where there was nothing to keep."""


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Ends the command with exit code 2 and one sentence on a `UsageError`."""
    try:
        yield
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def require_free(out: Path, overwrite: bool, option: str = "--out") -> None:
    """Refuses what exists, unless it may be replaced."""
    if out.exists() and not overwrite:
        raise UsageError(f"{out} exists already: give another {option}, or --overwrite.")


def require_free_file(out: Path, overwrite: bool, option: str = "--out") -> None:
    """Refuses a place where no file can be made, before anything is computed for it."""
    require_free(out, overwrite, option)
    if out.is_dir():
        raise UsageError(f"{out} is a folder: give {option} a file.")
    if not out.parent.is_dir():
        raise UsageError(f"{out} has no place, since {out.parent} is no folder: make it, or give another {option}.")


def new_folder(out: Path, overwrite: bool) -> None:
    """Makes a folder for results."""
    require_free(out, overwrite)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{out} cannot be a folder: {error.strerror}.") from error


def require_seed(seed: int) -> None:
    """Refuses what would be another seed in silence: jax keeps 32 bits."""
    if not 0 <= seed < 2**32:
        raise UsageError(f"--seed {seed} must be at least 0 and less than 2**32.")


def require_at_least_one(**options: int) -> None:
    """Refuses what is counted and is not there, or is more than can be counted."""
    for name, value in options.items():
        if value < 1:
            raise UsageError(f"{as_words(name)} {value} must be at least 1.")
        require_countable(**{name: value})


def require_countable(**options: int) -> None:
    """Refuses more than the arrays of jax count to."""
    for name, value in options.items():
        if value > LARGEST:
            raise UsageError(f"{as_words(name)} {value} must be less than 2**31.")


def as_words(name: str) -> str:
    """A field as the command line calls it."""
    return f"--{name.replace('_', '-')}"


def nearest(name: str, names: Iterable[str]) -> str:
    """What a sentence about an unknown name ends with."""
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"choose one of {', '.join(names)}."
