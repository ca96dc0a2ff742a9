"""Keys as callers give them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmarl import keys


def test_a_typed_key_is_itself():
    key = jax.random.key(3)
    assert keys.as_key(key) is key


def test_older_keys_draw_what_typed_ones_draw():
    many = jnp.stack([jax.random.PRNGKey(0), jax.random.PRNGKey(1)])
    for old in (jax.random.PRNGKey(1), np.asarray(jax.random.PRNGKey(1)), many[1]):
        drawn = jax.jit(lambda old: jax.random.uniform(keys.as_key(old)))(old)
        assert drawn == jax.random.uniform(jax.random.key(1))
        assert keys.as_key(old) == jax.random.key(1)


@pytest.mark.parametrize(
    ("key", "given"),
    [
        (0, "int 0"),
        (np.int64(7), r"int64 of shape \(\)"),
        (None, "NoneType None"),
        (jnp.zeros(2), "float32 of shape .2,."),
    ],
)
def test_anything_else_is_refused_in_a_sentence(key, given):
    with pytest.raises(TypeError, match=f"^key is {given}: give a key, such as jax.random.key\\(0\\).$"):
        keys.as_key(key)
