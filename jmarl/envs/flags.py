"""Environments are traced under the flags of jax that they were written for."""

import contextlib
from collections.abc import Iterator

import jax
import jax.experimental


@contextlib.contextmanager
def usual_flags() -> Iterator[None]:
    """Inside, jax's flags are its defaults: a context, or a decorator.

    Much code of environments fails in 64 bits, or under strict promotion of ranks and dtypes. So they run in 32 bits
    always, and a user's strict flags are about the user's code.
    """
    home = jax if hasattr(jax, "enable_x64") else jax.experimental  # before jax 0.8
    enable_x64 = home.enable_x64  # type: ignore[attr-defined]
    with enable_x64(False), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield
