"""Metrics that were not measured, such as a return where no episode ended.

They are NaN. Under `jax_debug_nans`, with which a NaN ends the program, they are the largest float instead; `run` makes
NaN of them before anybody reads them.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

__all__ = ["is_measured", "is_missing", "mean", "missing"]


def missing() -> float:
    """What a metric is that was not measured."""
    is_debugging: bool = jax.config.jax_debug_nans  # type: ignore[attr-defined]
    return float(jnp.finfo(jnp.float32).max) if is_debugging else float("nan")


def is_missing(x: Float[Array, "*batch"]) -> Bool[Array, "*batch"]:
    """Whether it was not measured."""
    return jnp.isnan(x) | (x == jnp.finfo(jnp.float32).max)


def is_measured(names: Sequence[str], values: Float[Array, "*batch K"]) -> Bool[Array, "*batch K"]:
    """Which values of these metrics a mean over some is of. A loss is always measured: NaN makes its mean NaN.

    >>> is_measured(["loss/actor", "train/return_sum"], jnp.full(2, jnp.nan))
    Array([ True, False], dtype=bool)
    """
    return jnp.array([name.startswith("loss/") for name in names]) | ~is_missing(values)


def mean(total: Array, num: Array) -> Float[Array, "*batch"]:
    """total / num, missing where there was nothing to count.

    >>> mean(jnp.array([6.0, 0.0]), jnp.array([2, 0]))
    Array([ 3., nan], dtype=float32)
    """
    return jnp.where(num > 0, total / jnp.maximum(num, 1), missing())
