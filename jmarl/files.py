"""Files that are whole at any time, whatever stops the process."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

__all__: list[str] = []


def absolute(path: str | os.PathLike[str]) -> Path:
    """The very file or folder that is meant now: neither a later chdir nor a link that is moved changes it."""
    return Path(os.path.realpath(path))


def require_new(path: Path) -> None:
    if path.exists():
        raise FileExistsError(f"{path} exists already: give another path, or remove it.")


def replace(path: Path, parts: Iterable[str | bytes]) -> None:
    """Writes a file part by part: it is the old one until the new one is complete."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            for part in parts:
                file.write(part.encode() if isinstance(part, str) else part)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise _not_written(path, error) from error


def append(path: Path, data: bytes, size: int) -> int:
    """Writes behind the first `size` bytes; what a write that failed has left there is cut. Returns the new size."""
    try:
        with path.open("r+b", buffering=0) as file:
            if file.seek(0, os.SEEK_END) < size:
                raise OSError("it was cut by something else")
            file.truncate(size)
            file.seek(size)
            left = memoryview(data)
            while left:  # a disk that is nearly full takes a part
                left = left[file.write(left) :]
    except OSError as error:
        raise _not_written(path, error) from error
    return size + len(data)


def _not_written(path: Path, error: OSError) -> OSError:
    return OSError(f"Could not write {path}: {error.strerror or error}.")
