"""Environments and loops are traced under the flags of jax that they were written for."""

import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental
import numpy as np


def usual_flags(function: Callable) -> Callable:
    """`function` with jax's flags at their defaults: a decorator.

    Much code of environments fails in 64 bits, or under strict promotion of ranks and dtypes. So they run in 32 bits
    always, and a user's strict flags are about the user's code.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        home = jax if hasattr(jax, "enable_x64") else jax.experimental  # before jax 0.8
        enable_x64 = home.enable_x64  # type: ignore[attr-defined]
        with enable_x64(False), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return wrapper


def in_usual_bits(x: Any) -> Any:
    """What somebody made in 64 bits, in 32 bits: arrays, or an environment that holds some, which is copied then."""
    return jax.tree.map(_narrowed, x)


def _narrowed(x: Any) -> Any:
    if not _is_wide(x):
        return x
    if isinstance(x, jax.Array):
        return x.astype(x.dtype.name.replace("64", "32"))
    narrow = object.__new__(type(x))
    for name, value in vars(x).items():
        is_own_method = isinstance(value, types.MethodType) and value.__self__ is x
        value = types.MethodType(value.__func__, narrow) if is_own_method else in_usual_bits(value)
        narrow.__dict__[name] = value
    return narrow


def _is_wide(x: Any) -> bool:
    """Of an array, or of an environment: whether it holds one, or another environment that does."""
    if isinstance(x, jax.Array):
        return x.dtype in (np.float64, np.int64, np.uint64)
    held = vars(x) if hasattr(x, "action_space") and hasattr(x, "__dict__") else {}
    return any(map(_is_wide, jax.tree.leaves(held)))


def usual_promotion(function: Callable) -> Callable:
    """`function` with jax's usual promotion of ranks and dtypes: a decorator. Strict flags are about a user's code."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return wrapper
