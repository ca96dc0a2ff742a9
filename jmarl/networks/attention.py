"""Attention of several heads, and the block of a transformer's encoder. R are rows: steps, sequences, agents.

References:
  Vaswani et al., 2017, Attention Is All You Need, sec. 3 (https://arxiv.org/abs/1706.03762).
"""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jmarl.networks.initializers import orthogonal
from jmarl.networks.torsos import Output

__all__ = ["Attention", "EncoderBlock"]


class Attention(nn.Module):
    """Attention of several heads, softmax(q kᵀ / √d) v for each, joined and projected.

    Attributes:
      size: E, of what comes in and goes out.
      num_heads: each has d = E / num_heads features.
    """

    size: int
    num_heads: int = 1

    def setup(self) -> None:
        dense = functools.partial(nn.Dense, self.size, kernel_init=orthogonal(1.0))
        self.query, self.key, self.value, self.out = dense(), dense(), dense(), dense()

    def keys_and_values(self, x: Float[Array, "R N E"]) -> tuple[Float[Array, "R N E"], Float[Array, "R N E"]]:
        """What others find here."""
        return self.key(x), self.value(x)

    def attend(
        self,
        x: Float[Array, "R K E"],
        found: tuple[Float[Array, "R N E"], Float[Array, "R N E"]],
        is_seen: Bool[Array, "#R K N"],
        bias: Float[Array, "H K N"] | float = 0.0,
    ) -> Float[Array, "R K E"]:
        """From each row of `x` to those keys and values that it sees, of which there must be one.

        `bias` is added to the scores of each head, as it may depend on who looks where.
        """
        query, key, value = (y.reshape(*y.shape[:2], self.num_heads, -1) for y in (self.query(x), *found))
        scores = jnp.einsum("rkhd,rnhd->rhkn", query, key) / math.sqrt(self.size // self.num_heads)
        scores = scores + bias
        lowest = jnp.asarray(jnp.finfo(scores.dtype).min, scores.dtype)
        weights = jax.nn.softmax(jnp.where(is_seen[:, None], scores, lowest), axis=-1)
        return self.out(jnp.einsum("rhkn,rnhd->rkhd", weights, value).reshape(x.shape))

    def __call__(
        self,
        x: Float[Array, "R K E"],
        source: Float[Array, "R N E"],
        is_seen: Bool[Array, "#R K N"],
        bias: Float[Array, "H K N"] | float = 0.0,
    ) -> Float[Array, "R K E"]:
        """From each row of `x` to those of `source` that it sees."""
        return self.attend(x, self.keys_and_values(source), is_seen, bias)


class EncoderBlock(nn.Module):
    """Attention between rows, such as agents, then a layer for each; both are added to what came in, and normalised.

    `x` are the rows that look, at those of `source` that they see; at each other where there is no `source`.
    """

    size: int
    num_heads: int

    def setup(self) -> None:
        self.attention = Attention(self.size, self.num_heads)
        self.layers = Output(self.size, (self.size,), "gelu")
        self.norms = [nn.LayerNorm() for _ in range(2)]

    def __call__(
        self, x: Float[Array, "R K E"], is_seen: Bool[Array, "#R K N"], source: Float[Array, "R N E"] | None = None
    ) -> Float[Array, "R K E"]:
        x = self.norms[0](x + self.attention(x, x if source is None else source, is_seen))
        return self.norms[1](x + self.layers(x))
