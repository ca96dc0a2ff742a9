"""Random keys, as callers give them."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key


def as_key(key: Any) -> Key[Array, "..."]:
    """A typed key, also from the older kind, `jax.random.PRNGKey(0)`; many at once where the array has leading axes.

    >>> as_key(jax.random.PRNGKey(0)) == jax.random.key(0)
    Array(True, dtype=bool)
    >>> as_key(0)
    Traceback (most recent call last):
    TypeError: key=0 must be a typed key: jax.random.key(0).
    """
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", ())
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return key
    words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape
    if dtype == jnp.uint32 and shape[-1:] == words:
        return jax.random.wrap_key_data(jnp.asarray(key))
    given = f"{dtype}{list(shape)}" if shape else repr(key)
    raise TypeError(f"key={given} must be a typed key: jax.random.key(0).")
