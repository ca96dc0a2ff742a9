"""Recurrent cells over whole sequences, time first, with resets inside the sequence.

The matrix products decide the speed, so they are as few and as large as the mathematics allows: the input projection
of all time steps is one product outside the scan, the gates of a step are one product inside it, and the backward pass
of the GRU forms the weight gradient in one product after its scan instead of adding it up step by step.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.initializers import zeros_init
from jaxtyping import Array, Bool, Float

from jmarl.networks.initializers import from_normal, lecun, orthogonalize
from jmarl.types import Carry


def _reset(first: Bool[Array, "R"], carry: Carry) -> Carry:
    return jax.tree.map(lambda c: jnp.where(first[:, None], jnp.zeros_like(c), c), carry)


@jax.custom_vjp
def gru_scan(
    kernel: Float[Array, "H 3*H"],
    bias_n: Float[Array, "H"],
    gates_x: Float[Array, "L R 3*H"],
    h0: Float[Array, "R H"],
    first: Bool[Array, "L R"],
) -> Float[Array, "L R H"]:
    """Hidden states of a gated recurrent unit, with its input projection already done.

    `r, z = σ(x_rz + h W_rz)`, `n = tanh(x_n + r (h W_n + b_n))`, `h' = (1 - z) n + z h`, as torch.nn.GRUCell.

    Args:
      kernel: recurrent weights of the gates r, z, n side by side.
      bias_n: bias inside the reset gate's product.
      gates_x: input projection, biases included.
      h0: state before the first step.
      first: the state is set to zero before this step.

    Returns:
      h after each step.

    References:
      Cho et al., 2014, Learning Phrase Representations using RNN Encoder-Decoder (https://arxiv.org/abs/1406.1078).
    """
    return _gru_forward(kernel, bias_n, gates_x, h0, first)[0]


def _gru_gates(kernel, bias_n, gates_x, h):
    """Reset gate r, update gate z, candidate n, and the candidate's recurrent part."""
    h_r, h_z, h_n = jnp.split(h @ kernel, 3, axis=-1)
    x_r, x_z, x_n = gates_x
    r, z, h_n = jax.nn.sigmoid(x_r + h_r), jax.nn.sigmoid(x_z + h_z), h_n + bias_n
    return r, z, jnp.tanh(x_n + r * h_n), h_n


def _gru_forward(kernel, bias_n, gates_x, h0, first):
    def step(h, inputs):
        *gates_x, start = inputs
        h = _reset(start, h)
        _, z, n, _ = _gru_gates(kernel, bias_n, gates_x, h)
        h = n + z * (h - n)
        return h, h

    # The gates are split here: a slice of a scan's input inside the scan takes 2.5 times as long on a CPU.
    _, out = jax.lax.scan(step, h0, (*jnp.split(gates_x, 3, axis=-1), first))
    return out, (kernel, bias_n, gates_x, h0, first, out)


def _gru_backward(saved, d_out):
    kernel, bias_n, gates_x, h0, first, out = saved
    # All gates once more, in one product: cheaper than writing them down step by step in the forward pass.
    h = jnp.where(first[..., None], 0, jnp.concatenate([h0[None], out[:-1]]))
    r, z, n, h_n = _gru_gates(kernel, bias_n, jnp.split(gates_x, 3, axis=-1), h)
    # What the gradient of h' is multiplied with on its way to each gate, before the tanh and the sigmoids.
    to_n = (1 - z) * (1 - n * n)
    to_r, to_z, to_h_n = to_n * h_n * r * (1 - r), (h - n) * z * (1 - z), to_n * r

    def step(d_h, inputs):
        d_out, start, z, to_r, to_z, to_h_n = inputs
        d_next = d_h + d_out
        d_gates = jnp.concatenate([d_next * to_r, d_next * to_z, d_next * to_h_n], axis=-1)
        return _reset(start, d_next * z + d_gates @ kernel.T), d_next

    d_h0, d_next = jax.lax.scan(step, jnp.zeros_like(h0), (d_out, first, z, to_r, to_z, to_h_n), reverse=True)
    d_r, d_z, d_n, d_h_n = d_next * to_r, d_next * to_z, d_next * to_n, d_next * to_h_n
    d_kernel = jnp.einsum("lrh,lrg->hg", h, jnp.concatenate([d_r, d_z, d_h_n], axis=-1))
    gradients = d_kernel, jnp.sum(d_h_n, axis=(0, 1)), jnp.concatenate([d_r, d_z, d_n], axis=-1), d_h0
    given = kernel, bias_n, gates_x, h0
    return *[x.astype(like.dtype) for x, like in zip(gradients, given, strict=True)], None


gru_scan.defvjp(_gru_forward, _gru_backward)


class GRU(nn.Module):
    """Gated recurrent unit over a sequence: `(carry [R, H], x [L, R, F], first [L, R]) -> (carry, out [L, R, H])`."""

    size: int

    @nn.compact
    def __call__(self, carry: Carry, x: Array, first: Array) -> tuple[Carry, Array]:
        kernel_x = self.param("input_kernel", lecun(), (x.shape[-1], 3 * self.size))
        bias_x = self.param("input_bias", zeros_init(), (3 * self.size,))
        kernel_h = self.param("hidden_kernel", _orthogonal_gates(3), (self.size, 3 * self.size))
        bias_n = self.param("candidate_bias", zeros_init(), (self.size,))
        gates_x = x @ kernel_x + bias_x
        # In the precision of the input, whatever that of the memory: they may differ where jax has 64 bits.
        out = gru_scan(kernel_h, bias_n, gates_x, carry.astype(gates_x.dtype), first)
        return out[-1].astype(carry.dtype), out

    @staticmethod
    def init_carry(batch_shape: tuple[int, ...], size: int) -> Carry:
        return jnp.zeros((*batch_shape, size))


class LSTM(nn.Module):
    """Long short-term memory over a sequence; as `GRU`, with the carry (c, h).

    References:
      Hochreiter & Schmidhuber, 1997, Long Short-Term Memory.
    """

    size: int

    @nn.compact
    def __call__(self, carry: Carry, x: Array, first: Array) -> tuple[Carry, Array]:
        kernel_x = self.param("input_kernel", lecun(), (x.shape[-1], 4 * self.size))
        kernel_h = self.param("hidden_kernel", _orthogonal_gates(4), (self.size, 4 * self.size))
        bias = self.param("bias", zeros_init(), (4 * self.size,))

        def step(carry, inputs):
            *gates_x, start = inputs
            c, h = _reset(start, carry)
            i, f, g, o = map(jnp.add, gates_x, jnp.split(h @ kernel_h, 4, axis=-1))
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (c, h), h

        gates_x = jnp.split(x @ kernel_x + bias, 4, axis=-1)
        inner = jax.tree.map(lambda c: c.astype(gates_x[0].dtype), carry)
        inner, out = jax.lax.scan(step, inner, (*gates_x, first))
        return jax.tree.map(lambda c, old: c.astype(old.dtype), inner, carry), out

    @staticmethod
    def init_carry(batch_shape: tuple[int, ...], size: int) -> Carry:
        return (jnp.zeros((*batch_shape, size)), jnp.zeros((*batch_shape, size)))


def _orthogonal_gates(num_gates: int):
    """Each gate's square block is orthogonal on its own."""
    return from_normal(lambda z: jnp.concatenate([orthogonalize(x) for x in jnp.split(z, num_gates, axis=-1)], axis=-1))


CELLS: dict[str, Any] = {"gru": GRU, "lstm": LSTM}
