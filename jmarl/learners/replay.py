"""What learners from replay share: which steps count, burn-in, successors of sequences, target networks, priorities."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jmarl import masks
from jmarl.types import Carry, Network, Numeric, Params, Trajectory


def update_target(target_params: Params, params: Params, step: Array, interval: int, tau: Numeric) -> Params:
    """θ⁻ ← θ⁻ + τ (θ - θ⁻) after every `interval` optimiser steps; a copy for τ = 1."""
    moved = optax.incremental_update(params, target_params, tau)
    if interval == 1:
        return moved
    return jax.tree.map(lambda new, old: jnp.where(step % interval == 0, new, old), moved, target_params)


def weights(batch: Trajectory, burn_in: int = 0) -> Array:
    """Whose step counts, `[L, M, N]`: as the batch says, and 0 for what follows an episode's end and for the burn-in.

    The first `burn_in` steps of a sequence that starts inside an episode only warm up its memory. The memory of one
    that starts an episode is exact from its first step on, so it needs none.
    """
    first, last = batch.steps.first, batch.steps.last
    if burn_in >= len(first):
        raise ValueError(
            f"burn_in={burn_in} leaves nothing to learn from in sequences of {len(first)} steps: lower it, or raise "
            f"the buffer's sequence_length."
        )
    if len(first) == 1 and jax.tree.leaves(batch.carry):
        raise ValueError(
            "recurrent=True learns from sequences, and these are of one step, in which nothing is remembered: raise "
            "the buffer's sequence_length, or set recurrent=False."
        )
    ended = jnp.cumsum(last, axis=0) - last > 0
    warms_up = (jnp.arange(len(first)) < burn_in)[:, None] & ~first[0]
    return jnp.where((ended | warms_up)[..., None], 0.0, masks.weight(batch))


def team_weight(weight: Array) -> Array:
    """Of each step of a team, `[L, M]`: that of its agents, as long as any of theirs counts."""
    return jnp.max(weight, axis=-1)


def blank_or_recorded(net: Network, batch: Trajectory) -> Carry:
    """What a network remembers before each sequence: nothing, where the batch does not say."""
    recorded = jax.tree.leaves(batch.carry)
    return batch.carry if recorded else net.init_carry((batch.steps.first.shape[1],))


def unroll(
    net: Network, params: Params, carry: Carry, x: Any, first: Array, *, burn_in: int = 0, time_axis: int = 0
) -> Any:
    """Outputs of a network at each step of `x` `[L, M, ..]`; no gradient flows back into a burn-in, see `weights`."""
    if not burn_in or not jax.tree.leaves(carry):
        return net.apply(params, carry, x, first)[1]
    carry, warm = net.apply(params, carry, *jax.tree.map(lambda leaf: leaf[:burn_in], (x, first)))

    def cut(leaf):
        starts_episode = first[0].reshape(-1, *[1] * (leaf.ndim - 1))
        return jnp.where(starts_episode, leaf, jax.lax.stop_gradient(leaf))

    _, out = net.apply(params, jax.tree.map(cut, carry), *jax.tree.map(lambda leaf: leaf[burn_in:], (x, first)))
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=time_axis), warm, out)


def with_successors(x: Any, next_x: Any, first: Array) -> tuple[Any, Array]:
    """x_0, x'_0, x'_1, ... `[L + 1, M, ..]`, and where a memory starts anew: one pass for networks that have one.

    Inside an episode, a step's successor is the next step.
    """
    sequence = jax.tree.map(lambda x, y: jnp.concatenate([x[:1], y]), x, next_x)
    return sequence, jnp.concatenate([first[:1], jnp.zeros_like(first)])


def priority(td_error: Array, mask: Array) -> Array:
    """Mean absolute error of each sequence, `[M]`."""
    is_real = mask > 0
    return jax.lax.stop_gradient(
        jnp.sum(jnp.abs(td_error) * is_real, axis=(0, 2)) / jnp.maximum(jnp.sum(is_real, axis=(0, 2)), 1)
    )
