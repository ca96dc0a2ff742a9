"""Retention of several heads: attention without a softmax, whose past is a matrix for each head.

Over steps t of N agents each, with queries q, keys k and values v of each agent, a head keeps

    S_t = κ S_{t-1} + Σ_n k_{t,n} v_{t,n}ᵀ,    and agent n reads    q_{t,n} S_t,

so that a step's share fades by κ with every step of time, and not from agent to agent. S is zero where an episode
starts. With `is_causal`, an agent reads of its own step what stands before it and itself; else all of that step.

A sequence is read in chunks (Sun et al., eq. 7): products of all pairs within a chunk, and S from chunk to chunk. With
chunks of one step this is the recurrent form, so acting step by step, or agent by agent, is the same function.

References:
  Sun et al., 2023, Retentive Network: A Successor to Transformer for Large Language Models, sec. 2
    (https://arxiv.org/abs/2307.08621).
  Mahjoub et al., 2024, Sable: a Performant, Efficient and Scalable Sequence Model for MARL, sec. 3
    (https://arxiv.org/abs/2410.01706).
"""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jmarl import batching
from jmarl.networks.initializers import orthogonal
from jmarl.types import Numeric, Replaceable

__all__ = ["Retention", "Steps", "decays", "position_code", "positions", "retain"]

# Rows of a chunk, steps times agents: of more, all pairs are more work than a scan with S saves.
CHUNK_ROWS = 64


@struct.dataclass(kw_only=True)
class Steps(Replaceable):
    """When the steps of sequences are, and who acts in them.

    Attributes:
      acts: whose keys and values are there; of others nothing is kept or read.
      first: S is set to zero before this step.
      code: of the time, see `position_code`; added to what queries, keys, values and gates are made of.
      decay: κ of each head.
    """

    acts: Bool[Array, "L R N"]
    first: Bool[Array, "L R"]
    code: Float[Array, "L R E"]
    decay: Float[Array, "H"]


def decays(num_heads: int, scale: Numeric = 1.0) -> Float[Array, "H"]:
    """κ of each head, between 31/32 and 511/512, times `scale`.

    >>> decays(2).tolist()
    [0.96875, 0.998046875]
    """
    log = np.linspace(math.log(1 / 32), math.log(1 / 512), num_heads)
    return jnp.asarray(scale, jnp.float32) * (1 - np.exp(log)).astype(np.float32)


def positions(step: Int[Array, "R"], first: Bool[Array, "L R"]) -> Int[Array, "L R"]:
    """The number of each step in its episode, where the first one would be number `step` if it went on with one.

    >>> positions(jnp.array([7]), jnp.array([[False], [False], [True], [False]])).ravel().tolist()
    [7, 8, 0, 1]
    """
    time = jnp.arange(len(first), dtype=jnp.int32)[:, None]
    began = jax.lax.cummax(jnp.where(first, time, jnp.int32(-1)), axis=0)
    return jnp.where(began < 0, step[None] + time, time - began)


def position_code(position: Int[Array, "*batch"], size: int) -> Float[Array, "*batch E"]:
    """Sines of the position with wavelengths from 2π to 20,000π, and their cosines (Vaswani et al., 2017, sec. 3.5)."""
    wavelength = 10_000.0 ** (np.arange(0, size, 2) / size)
    angle = position[..., None].astype(jnp.float32) / wavelength.astype(np.float32).reshape(*[1] * position.ndim, -1)
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)[..., :size]


def retain(
    query: Float[Array, "L R N H D"],
    key: Float[Array, "L R N H D"],
    value: Float[Array, "L R N H D"],
    state: Float[Array, "R H D D"],
    first: Bool[Array, "L R"],
    decay: Float[Array, "H"],
    *,
    is_causal: bool,
    chunk: int | None = None,
) -> tuple[Float[Array, "R H D D"], Float[Array, "L R N H D"]]:
    """What queries read of their own step and of those before it.

    Args:
      query, key, value: of each agent; a key of zeros is read by nobody.
      state: S after the step before the first.
      first: S is zero before this step.
      decay: κ of each head.
      is_causal: of its own step, an agent reads those before it and itself alone.
      chunk: steps that are read at once; divides L. By default the most that make 64 rows.

    Returns:
      S after the last step, and what was read.
    """
    length, num_rows, num_agents, num_heads, size = query.shape
    chunk = chunk or max(d for d in batching.divisors(length) if d * num_agents <= max(CHUNK_ROWS, num_agents))
    num_chunks = length // chunk

    def cut(x):  # [L, R, N, H, D] to [G, R, H, C, N, D]
        return jnp.transpose(x.reshape(num_chunks, chunk, *x.shape[1:]), (0, 2, 4, 1, 3, 5))

    query, key, value = cut(query), cut(key), cut(value)
    episode = jnp.cumsum(jnp.moveaxis(first.reshape(num_chunks, chunk, num_rows), 1, 2), axis=-1)  # [G, R, C]
    lag = np.arange(chunk)[:, None] - np.arange(chunk)[None]
    power = decay.reshape(-1, 1, 1) ** np.maximum(lag, 0).astype(np.float32)[None]
    is_read = (lag >= 0)[None, None] & (episode[..., :, None] == episode[..., None, :])
    fading = jnp.where(is_read[:, :, None], power[None, None], 0.0)  # [G, R, H, C, C]
    # Of what was before the chunk: up to the first start of an episode in it.
    since_before = decay.reshape(-1, 1) ** np.arange(1, chunk + 1, dtype=np.float32)[None]
    of_before = jnp.where((episode == 0)[:, :, None], since_before[None, None], 0.0)  # [G, R, H, C]

    scores = jnp.einsum("grhcnd,grhsmd->grhcnsm", query, key) * fading[..., :, None, :, None]
    if is_causal:
        is_later = np.arange(num_agents)[:, None, None] < np.arange(num_agents)  # [N, 1, N]
        is_ahead = (lag == 0)[:, None, :, None] & is_later
        scores = jnp.where(is_ahead[None, None, None], 0.0, scores)
    read = jnp.einsum("grhcnsm,grhsmd->grhcnd", scores, value)
    added = jnp.einsum("grhcnd,grhcne->grhde", key * fading[..., -1, :, None, None], value)

    def next_chunk(state, x):
        kept, added = x
        return kept[..., None, None] * state + added, state

    last, before = jax.lax.scan(next_chunk, state.astype(query.dtype), (of_before[..., -1], added))
    read = read + of_before[..., None, None] * jnp.einsum("grhcnd,grhde->grhcne", query, before)
    return last.astype(state.dtype), jnp.transpose(read, (0, 3, 1, 4, 2, 5)).reshape(
        length, num_rows, num_agents, num_heads, size
    )


class Retention(nn.Module):
    """Retention of several heads, each normalised, then gated and projected: `(swish(G) ⊙ GroupNorm(Y)) W`.

    Sun et al., eq. 8; the gate is made of what keys are made of, as in Sable's code. Rows are steps, sequences and
    agents, `[L R N]`.

    Attributes:
      size: E, of what comes in and goes out.
      num_heads: H; each has D = E / H features, of which there must be two or more: it would be normalised to nothing.
    """

    size: int
    num_heads: int

    def setup(self) -> None:
        dense = functools.partial(nn.Dense, self.size, use_bias=False, kernel_init=orthogonal(1.0))
        self.query, self.key, self.value, self.gate, self.out = (dense() for _ in range(5))
        self.norm = nn.GroupNorm(num_groups=self.num_heads, reduction_axes=(-1,))

    def __call__(
        self,
        state: Float[Array, "R H D D"],
        x: Float[Array, "rows E"],
        source: Float[Array, "rows E"],
        steps: Steps,
        *,
        is_causal: bool,
    ) -> tuple[Float[Array, "R H D D"], Float[Array, "rows E"]]:
        """S after the last step, and what each row of `x` reads of `source`."""
        leading = steps.acts.shape
        code = jnp.broadcast_to(steps.code[:, :, None], (*leading, self.size)).reshape(-1, self.size).astype(x.dtype)
        x, source = x + code, source + code

        def of_heads(rows):
            return rows.reshape(*leading, self.num_heads, -1)

        def of_those_who_act(rows):  # values, too: 0 times what is no number is none
            return jnp.where(steps.acts[..., None, None], of_heads(rows), 0.0)

        key = of_those_who_act(self.key(source)) / math.sqrt(self.size // self.num_heads)
        value = of_those_who_act(self.value(source))
        decay = steps.decay.astype(x.dtype)
        state, read = retain(of_heads(self.query(x)), key, value, state, steps.first, decay, is_causal=is_causal)
        return state, self.out(nn.silu(self.gate(source)) * self.norm(read.reshape(-1, self.size)))
