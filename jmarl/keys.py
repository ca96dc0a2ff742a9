"""Random keys, as a user gives them."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

__all__ = ["as_key"]

_RAW = {(2,): "threefry2x32", (4,): "rbg"}  # keys of the old kind, by their shape


def as_key(key: Any) -> PRNGKeyArray:
    """A typed key; one of the old kind, `jax.random.PRNGKey(0)`, becomes one.

    >>> as_key(jax.random.PRNGKey(0)) == jax.random.key(0)
    Array(True, dtype=bool)
    """
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ():
        return key
    if dtype == jnp.uint32 and shape in _RAW:
        return jax.random.wrap_key_data(key, impl=_RAW[shape])
    what = f"{dtype} of shape {shape}" if dtype is not None else f"{type(key).__name__} {key!r}"
    raise TypeError(f"key is {what}: give a key, such as jax.random.key(0).")
