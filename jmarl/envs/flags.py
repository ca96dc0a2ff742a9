"""Environments and loops are traced under the flags of jax that they were written for."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental


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


def usual_promotion(function: Callable) -> Callable:
    """`function` with jax's usual promotion of ranks and dtypes: a decorator. Strict flags are about a user's code."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return wrapper
