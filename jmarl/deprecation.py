"""Old names, for one minor release: they work, and warn."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

__all__ = ["renamed_arguments", "renamed_attribute"]


def renamed_arguments(**new_names: str) -> Callable[[Callable], Callable]:
    """A decorator by which a function takes keyword arguments by their old names, too.

    >>> @renamed_arguments(num_steps="num_iterations")
    ... def train(*, num_iterations):
    ...     return num_iterations
    >>> with warnings.catch_warnings(action="ignore"):
    ...     train(num_steps=3)
    3
    """

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            for old in new_names.keys() & kwargs.keys():
                new = new_names[old]
                if new in kwargs:
                    raise TypeError(f"{new} is given twice, also by its old name {old}: leave {old} out.")
                _warn(old, new)
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return wrapper

    return decorate


def renamed_attribute(owner: Any, old: str, new: str) -> Any:
    """What a property of an old name returns."""
    _warn(old, new)
    return getattr(owner, new)


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is called {new} now; the old name goes with jmarl 0.2.", DeprecationWarning, stacklevel=4)
