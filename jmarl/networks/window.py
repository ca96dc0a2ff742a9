"""Memory by attention: a cell that reads its last inputs again, in place of a state into which they were pressed.

References:
  Parisotto et al., 2020, Stabilizing Transformers for Reinforcement Learning, sec. 3 (https://arxiv.org/abs/1910.06764).
  Raffel et al., 2020, Exploring the Limits of Transfer Learning, sec. 2.1: a bias for each distance, learnt
  (https://arxiv.org/abs/1910.10683).
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.initializers import constant, zeros_init
from jaxtyping import Array, Bool, Float

from jmarl.networks.attention import Attention
from jmarl.networks.initializers import orthogonal
from jmarl.networks.recurrent import CELLS
from jmarl.networks.torsos import Output
from jmarl.types import Carry

__all__ = ["Gate", "WindowAttention"]

NUM_HEADS = 4


class Gate(nn.Module):
    """A gated sum of what came in and what was made of it; at first nearly all is what came in (eq. 4 to 6).

    `r, z = σ(y W + x U - b)` with b = (0, 2), `h = tanh(y W_h + (r x) U_h)`, and out comes `(1 - z) x + z h`.
    """

    @nn.compact
    def __call__(self, x: Float[Array, "L R E"], y: Float[Array, "L R E"]) -> Float[Array, "L R E"]:
        size = x.shape[-1]
        dense = functools.partial(nn.Dense, use_bias=False, kernel_init=orthogonal(1.0))
        r, z, h = jnp.split(dense(3 * size, name="of_new")(y), 3, axis=-1)
        from_r, from_z = jnp.split(dense(2 * size, name="of_old")(x), 2, axis=-1)
        z = jax.nn.sigmoid(z + from_z - self.param("bias", constant(2.0), (size,)))
        h = jnp.tanh(h + dense(size, name="of_reset")(jax.nn.sigmoid(r + from_r) * x))
        return x + z * (h - x)


class WindowAttention(nn.Module):
    """A gated transformer's layer over the present step and the last `window` ones of its episode.

    As `GRU`: `(carry [R, C], x [L, R, F], first [L, R]) -> (carry, out [L, R, E])`. The carry holds, oldest first, what
    came in at those steps, C = window (E + 1), each behind a number that is 1 where the episode had begun. Steps are
    told apart by how long ago they were, and whether a sequence is read at once or step by step makes no difference.

    One layer: its inputs pass a dense one, attention reads them normalised, and a gate adds what it found; a layer for
    each step follows, likewise. The paper stacks twelve, with sines in place of a bias for each distance.

    Attributes:
      size: E, a multiple of 4, the number of heads.
      window: steps back, besides the present one.
    """

    size: int
    window: int = 16

    @nn.compact
    def __call__(self, carry: Carry, x: Array, first: Bool[Array, "L R"]) -> tuple[Carry, Array]:
        length, rows = first.shape
        steps = nn.Dense(self.size, kernel_init=orthogonal(1.0), name="input")(x)
        before = carry.reshape(rows, self.window, 1 + self.size).astype(steps.dtype)
        known = jnp.concatenate([before[..., 1:], jnp.moveaxis(steps, 0, 1)], axis=1)  # [R, window + L, E]

        # Steps of one episode have the same number of starts before them; the window belongs to the first.
        episode = jnp.cumsum(first, axis=0).T
        of_known = jnp.concatenate([jnp.where(before[..., 0] > 0, 0, -1), episode], axis=1)
        age = self.window + jnp.arange(length)[:, None] - jnp.arange(self.window + length)
        is_seen = (of_known[:, None] == episode[..., None]) & (age >= 0) & (age <= self.window)

        bias = self.param("bias", zeros_init(), (NUM_HEADS, self.window + 1))
        of_age = jnp.take(bias, jnp.clip(age, 0, self.window), axis=1)
        normed = nn.LayerNorm(name="norm")(known)
        attention = Attention(self.size, NUM_HEADS, name="attention")
        found = attention(normed[:, self.window :], normed, is_seen, of_age)
        y = Gate(name="gate")(steps, jax.nn.relu(jnp.moveaxis(found, 1, 0)))
        layer = Output(self.size, (self.size,), "relu", name="layer")
        out = Gate(name="layer_gate")(y, jax.nn.relu(layer(nn.LayerNorm(name="layer_norm")(y))))

        is_kept = of_known == episode[:, -1:]
        kept = jnp.concatenate([is_kept[..., None], jnp.where(is_kept[..., None], known, 0.0)], axis=-1)
        return kept[:, length:].reshape(rows, -1).astype(carry.dtype), out

    @staticmethod
    def init_carry(batch_shape: tuple[int, ...], size: int, window: int = 16) -> Carry:
        return jnp.zeros((*batch_shape, window * (1 + size)))


CELLS["attention"] = WindowAttention
