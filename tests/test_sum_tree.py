"""The tree of sums: it draws what a sum over everything would draw, whatever its size, and loses nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmarl import sum_tree

NUMBERS = st.floats(0, 100, width=32, allow_subnormal=False)
put, draw = jax.jit(sum_tree.put), jax.jit(sum_tree.draw, static_argnums=2)


def tree_of(shares):
    return put(sum_tree.init(len(shares)), jnp.arange(len(shares)), jnp.asarray(shares, jnp.float32))


@pytest.mark.parametrize("size", [1, 3, 64, 65, 5_000, 300_000])
def test_shares_are_drawn_in_proportion(size):
    """In strata, so that each comes as often as its share says, give or take its neighbours' edges."""
    shares = np.random.default_rng(0).exponential(size=size)
    num = min(40 * size, 60_000)
    index, probability = draw(tree_of(shares), jax.random.key(1), num)
    expected = shares / shares.sum()
    np.testing.assert_allclose(probability, expected[index], rtol=1e-4)
    drawn = np.bincount(index, minlength=size).cumsum()
    np.testing.assert_allclose(drawn, num * expected.cumsum(), atol=1.5 + 1e-5 * num)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 9_999), NUMBERS), max_size=8), max_size=4),
    st.sampled_from([len(sum_tree.init(10_000).shares), 20_000]),
)
def test_sums_and_the_highest_are_those_of_the_shares(history, nowhere):
    tree, shares = tree_of(np.zeros(10_000)), np.zeros(10_000, np.float32)
    for changes in history:
        named = dict(changes)
        index = np.full(8, nowhere)  # beyond the end
        values = np.zeros(8, np.float32)
        index[: len(named)], values[: len(named)] = list(named), list(named.values())
        tree = put(tree, jnp.asarray(index), jnp.asarray(values))
        shares[list(named)] = list(named.values())
    below = np.zeros(len(tree.shares), np.float32)
    below[:10_000] = shares
    np.testing.assert_array_equal(tree.shares, below)
    for sums in tree.sums:
        below = below.reshape(-1, sum_tree.WIDTH).sum(-1)
        np.testing.assert_allclose(sums[: len(below)], below, rtol=1e-6)
        assert not sums[len(below) :].any()
        below = np.asarray(sums)
    assert float(sum_tree.highest(tree)) == shares.max()


def test_what_has_no_share_is_never_drawn():
    shares = np.zeros(10_000)
    shares[[77, 4_000, 9_999]] = 1e-30, 2.0, 1.0
    index, _ = draw(tree_of(shares), jax.random.key(0), 60_000)
    assert set(np.asarray(index).tolist()) <= {77, 4_000, 9_999}


def test_nothing_is_lost_by_a_share_near_zero():
    """Among 15 neighbours of share 1, where a sum in single precision moves in steps of 1e-6."""
    tree = tree_of(np.where(np.arange(16) == 3, 1e-20, 1.0))
    end = 3 / 15
    us = jnp.linspace(end - 1e-6, end + 1e-6, 5_000)  # where its draws must be
    index, probability = jax.vmap(lambda u: _drawn_at(tree, u))(us)
    assert (index == 3).sum() > 0 and float(probability[index == 3][0]) == pytest.approx(2.4e-7, rel=0.1)


def _drawn_at(tree, u, fresh=(0.0,)):
    """What is drawn where the only stratum's number is u, and these are the digits for each level."""
    random = jnp.stack([u, *jnp.broadcast_to(jnp.asarray(fresh), 1 + len(tree.sums))])[:, None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.random, "uniform", lambda key, shape: random)
        index, probability = sum_tree.draw(tree, jax.random.key(0), 1)
    return index[0], probability[0]


def test_digits_that_a_descent_uses_up_are_replaced():
    """One of 8,192 draws is among the second half: one number in single precision stands for 16 of its places."""
    half = 32**3
    tree = tree_of(np.concatenate([[8_191 * half], np.zeros(half - 1), np.ones(half)]))
    fresh = jax.random.uniform(jax.random.key(0), (1_000, 1 + len(tree.sums)))
    index, _ = jax.vmap(lambda x: _drawn_at(tree, jnp.float32(1 - 2**-14), x))(fresh)
    assert len(np.unique(index)) >= 16


def test_several_trees_side_by_side():
    trees = jax.vmap(lambda x: sum_tree.put(sum_tree.init(130), jnp.array([129]), x[None]))(jnp.array([1.0, 2.0]))
    assert jax.vmap(sum_tree.highest)(trees).tolist() == [1.0, 2.0]
    index, _ = jax.vmap(lambda tree: sum_tree.draw(tree, jax.random.key(0), 4))(trees)
    assert (index == 129).all()
