"""Drawing in proportion to shares that change: a tree of sums, in which a draw and a change cost O(log n).

Each node has `WIDTH` children, so the tree of four million shares has six levels, and each step down is one pass over
a short row. Sums are computed anew from what is below them, so no error builds up.

>>> tree = put(init(1000), jnp.array([2, 700]), jnp.array([1.0, 3.0]))
>>> index, probability = draw(tree, jax.random.key(0), 8)
>>> index.tolist(), probability.tolist()
([2, 2, 700, 700, 700, 700, 700, 700], [0.25, 0.25, 0.75, 0.75, 0.75, 0.75, 0.75, 0.75])
"""

import math

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, PRNGKeyArray

__all__ = ["SumTree", "draw", "highest", "init", "put"]

WIDTH = 16


@struct.dataclass(kw_only=True)
class SumTree:
    """Shares, and what they come to.

    Attributes:
      shares: none is negative; what has none is never drawn. Padded with zeros to a multiple of `WIDTH`.
      sums: of each `WIDTH` shares, of each `WIDTH` of these, and so on, padded alike.
      highest: the highest share of each, likewise.
    """

    shares: Float[Array, "*batch n"]
    sums: tuple[Float[Array, "*batch _"], ...]
    highest: tuple[Float[Array, "*batch _"], ...]


def init(size: int) -> SumTree:
    """A tree of `size` shares of 0."""
    sizes = [math.ceil(size / WIDTH)]
    while sizes[-1] > 1:
        sizes.append(math.ceil(sizes[-1] / WIDTH))
    levels = tuple(jnp.zeros(WIDTH * num) for num in sizes)
    return SumTree(shares=levels[0], sums=levels[1:], highest=levels[1:])


def put(tree: SumTree, index: Int[Array, "m"], shares: Float[Array, "m"]) -> SumTree:
    """The tree with new shares at `index`: a place named twice has one share; what lies beyond the end is left out."""
    leaves = tree.shares.at[index].set(shares, mode="drop")
    is_there = index < len(leaves)
    sums, tops, below, best = [], [], leaves, leaves
    for old_sums, old_tops in zip(tree.sums, tree.highest, strict=True):
        index = jnp.where(is_there, index // WIDTH, len(old_sums))  # levels are padded: a place may be in the padding
        groups, num = (below.reshape(-1, WIDTH), best.reshape(-1, WIDTH)), len(below) // WIDTH
        if len(index) < num:
            of_groups, of_best = (x.at[index].get(mode="clip") for x in groups)
            below = old_sums.at[index].set(of_groups.sum(-1), mode="drop")
            best = old_tops.at[index].set(of_best.max(-1), mode="drop")
        else:  # most of them have changed
            below, best = old_sums.at[:num].set(groups[0].sum(-1)), old_tops.at[:num].set(groups[1].max(-1))
        sums.append(below)
        tops.append(best)
    return SumTree(shares=leaves, sums=tuple(sums), highest=tuple(tops))


def highest(tree: SumTree) -> Float[Array, ""]:
    """The highest share."""
    return jnp.max((tree.shares, *tree.highest)[-1])


def draw(tree: SumTree, key: PRNGKeyArray, num: int) -> tuple[Int[Array, "num"], Float[Array, "num"]]:
    """Draws in proportion to shares, one from each `num`-th of the distribution, in order.

    Args:
      tree: with a share that is positive.
      key: source of randomness.
      num: how many, with replacement.

    Returns:
      Places, and the probability of each. Among `WIDTH` neighbours no positive share has less than 2.4e-7, the
      resolution of floats: however small it is, it can be drawn.
    """
    levels = (tree.shares, *tree.sums)[::-1]
    resolution = jnp.finfo(tree.shares.dtype).eps
    random = jax.random.uniform(key, (1 + len(levels), num))
    index, probability = jnp.zeros(num, jnp.int32), jnp.ones(num)
    u = (jnp.arange(num) + random[0]) / num
    up_to = jnp.triu(jnp.ones((WIDTH, WIDTH)))
    for level, fresh in zip(levels, random[1:], strict=True):
        share = level.reshape(-1, WIDTH)[index]
        share = jnp.where(share > 0, jnp.maximum(share, 2 * resolution * share.sum(-1, keepdims=True)), 0.0)
        end = jnp.matmul(share, up_to, precision="highest")  # running sums; `cumsum` is slow on XLA's CPU
        whole = end[:, -1]
        # The first whose end lies beyond u; rounding may leave none, and then it is the last that has a share.
        is_passed = (end <= (u * whole)[:, None]) & (end < whole[:, None])
        child = jnp.sum(is_passed, axis=-1, dtype=jnp.int32)
        own, own_end = (jnp.take_along_axis(x, child[:, None], axis=-1)[:, 0] for x in (share, end))
        index, probability = index * WIDTH + child, probability * own / whole
        # What is left of u, stretched to 0..1, has lost digits: fresh ones take their place.
        u = jnp.clip((u * whole - (own_end - own)) / own + fresh * resolution / probability, 0.0, 1.0)
    return index, probability
