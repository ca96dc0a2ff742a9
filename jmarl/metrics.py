"""Metrics that were not measured: NaN, unless jax looks for NaN."""

import jax
import jax.numpy as jnp

__all__: list[str] = []


def missing():
    """In place of a metric that was not measured: NaN, or the largest float32 under `jax_debug_nans`."""
    return jnp.finfo(jnp.float32).max if jax.config.jax_debug_nans else jnp.nan  # type: ignore[attr-defined]


def is_missing(x):
    return jnp.isnan(x) | (x == jnp.finfo(jnp.float32).max)
