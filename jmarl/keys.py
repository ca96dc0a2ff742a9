"""Random keys as users have them."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

__all__: list[str] = []


def as_key(key: Any) -> PRNGKeyArray:
    """A typed key, also from the old kind, `jax.random.PRNGKey(0)`."""
    dtype = getattr(key, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and key.shape == ():
        return key
    if dtype == jnp.uint32 and key.shape == (2,):
        return jax.random.wrap_key_data(key)
    raise TypeError(f"key={key!r} is no random key: give one, such as jax.random.key(0).")
