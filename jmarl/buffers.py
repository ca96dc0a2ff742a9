"""Replay: a ring of sequences that carry their start state and never cross an episode's end.

A rollout is taken apart as it is added: every episode starts a sequence, and so does every step after a full one. What
a sequence lacks in length is padding, of weight 0. With `sequence_length=1` these are transitions.

A sequence of L steps keeps L + 1 observations, so a successor that is also the next step's observation is kept once.
All state is arrays of fixed shape; `add` writes in place where the state is donated or carried through a `scan`.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jmarl import sum_tree
from jmarl.types import Buffer, Carry, Numeric, Observation, Trajectory, Transition

__all__ = ["Replay", "memory", "prioritized", "uniform"]


@struct.dataclass(kw_only=True)
class Replay:
    """What a buffer holds.

    Attributes:
      steps: transitions `[C, L, ..]`, without observations and what was remembered before them.
      counts: whose step counts, `[C, L, N]`, as the rollout's weight says.
      obs: `[C, L + 1, ..]`, the last successor included.
      carry: what the networks remembered before each sequence, `[C, ..]`.
      length: steps written of each sequence; the rest is padding.
      count: sequences begun so far, from 2 C on less a multiple of C, so that it never overflows. Number i lies at i
        modulo C.
      open: number of the sequence that each environment is writing.
      position: where in it its next step goes.
      priority: p^α of each sequence, a `jmarl.sum_tree`; () for uniform sampling.
    """

    steps: Transition
    counts: Float[Array, "*batch C L N"] | Bool[Array, "*batch C L N"]
    obs: Observation
    carry: Carry
    length: Int[Array, "*batch C"]
    count: Int[Array, "*batch"]
    open: Int[Array, "*batch B"]
    position: Int[Array, "*batch B"]
    priority: Any = ()


def uniform(capacity: int, batch_size: int, sequence_length: int = 1) -> Buffer:
    """Every sequence is equally likely, with replacement.

    Args:
      capacity: C, sequences kept.
      batch_size: M, sequences in a sample.
      sequence_length: L, steps of a sequence; whole episodes if it is the longest one's length.

    >>> from jmarl import VDNConfig, envs, off_policy, vdn
    >>> replay = uniform(capacity=64, batch_size=8)
    >>> env = envs.matrix_game([[1.0, 0.0], [0.0, 0.0]])
    >>> loop = off_policy(env, vdn, buffer=replay, num_envs=4, rollout_length=1, warmup_steps=16)
    >>> run = jax.jit(loop.init)(jax.random.key(0), VDNConfig(hidden_sizes=(8,)))
    >>> int(run.buffer.count), replay.sample(run.buffer, jax.random.key(1)).steps.action.shape
    (16, (1, 8, 2))
    """
    _validate(capacity, batch_size, sequence_length)

    def sample(state, key):
        index = jax.random.randint(key, (batch_size,), 0, jnp.minimum(state.count, capacity))
        return _take(state, index)

    settings = {"buffer": "uniform", "capacity": capacity, "batch_size": batch_size, "sequence_length": sequence_length}
    return Buffer(lambda rollout: _init(rollout, capacity, sequence_length), _add, sample, settings=settings)


def prioritized(
    capacity: int,
    batch_size: int,
    sequence_length: int = 1,
    *,
    priority_exponent: Numeric = 0.6,
    importance_exponent: Numeric = 0.4,
) -> Buffer:
    """Sequence i is drawn with P(i) = pᵢ^α / Σ p^α and counts (N P(i))^-β, relative to the largest weight in the batch.

    Whatever is added to a sequence gives it the highest priority among those kept. The sample is stratified: one from
    each M-th of the distribution. Adding, drawing and new priorities cost O(log C). However small a priority, its
    sequence can be drawn: see `jmarl.sum_tree.draw`.

    Args:
      capacity: C, sequences kept.
      batch_size: M, sequences in a sample.
      sequence_length: L, steps of a sequence.
      priority_exponent: α; 0 is uniform.
      importance_exponent: β; 1 corrects the bias in full.

    References:
      Schaul et al., 2016, Prioritized Experience Replay, sec. 3.3 and 3.4 (https://arxiv.org/abs/1511.05952).
    """
    _validate(capacity, batch_size, sequence_length)
    exponents = {"priority_exponent": priority_exponent, "importance_exponent": importance_exponent}
    for name, value in exponents.items():
        if isinstance(value, int | float) and value < 0:
            raise ValueError(f"{name}={value} must not be negative: choose 0 for none of its effect.")

    def init(rollout):
        return dataclasses.replace(_init(rollout, capacity, sequence_length), priority=sum_tree.init(capacity))

    def sample(state, key):
        index, probability = sum_tree.draw(state.priority, key, batch_size)
        importance = (jnp.minimum(state.count, capacity) * probability) ** -importance_exponent
        return _take(state, index, importance / jnp.max(importance))

    def set_priority(state, index, priority):
        # 0 is for what was never written, and sums must be finite.
        share = jnp.clip(jnp.maximum(priority, 1e-6) ** priority_exponent, 1e-37, 1e30)
        return state.replace(priority=sum_tree.put(state.priority, index, share))

    settings = {"buffer": "prioritized", "capacity": capacity, "batch_size": batch_size}
    settings |= {"sequence_length": sequence_length, **{name: str(value) for name, value in exponents.items()}}
    return Buffer(init, _add, sample, set_priority, settings)


def memory(state: Any) -> int:
    """Bytes that a buffer's state takes; `state` may be abstract."""
    return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(state))


# ----------------------------------------------------------------------------------------------------- the parts


def _validate(capacity: int, batch_size: int, sequence_length: int) -> None:
    for name, value in {"capacity": capacity, "batch_size": batch_size, "sequence_length": sequence_length}.items():
        if not isinstance(value, int | np.integer) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r} must be a whole number, such as {name}=8.")
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
    if capacity < batch_size:
        raise ValueError(
            f"capacity={capacity} is smaller than batch_size={batch_size}: a buffer must hold a batch. "
            f"Raise capacity or lower batch_size."
        )


def _init(rollout: Trajectory, capacity: int, sequence_length: int) -> Replay:
    length, num_envs = rollout.steps.first.shape
    if capacity < length * num_envs:
        raise ValueError(
            f"capacity={capacity} is smaller than one addition: a rollout of {length} steps in {num_envs} environments "
            f"can begin {length * num_envs} sequences. Raise capacity or shorten the rollout."
        )

    _require_masks(rollout)

    def empty(tree: Any, *axes: int) -> Any:
        return jax.tree.map(lambda x: jnp.zeros((capacity, *axes, *x.shape[2:]), x.dtype), tree)

    steps, counts, obs, carry = _parts(rollout)
    return Replay(
        steps=empty(steps, sequence_length),
        counts=empty(counts, sequence_length),
        obs=empty(obs, sequence_length + 1),
        carry=empty(carry),
        length=jnp.zeros(capacity, jnp.int32),
        count=jnp.int32(0),
        open=jnp.zeros(num_envs, jnp.int32),
        position=jnp.full(num_envs, sequence_length, jnp.int32),
    )


def _require_masks(rollout: Trajectory) -> None:
    """Refuses numbers in place of masks: ~ of them is no mask, and a buffer would keep them."""
    steps: Any = rollout.steps
    masks = {
        "obs.agent_mask": steps.obs.agent_mask,
        "obs.action_mask": steps.obs.action_mask,
        "first": steps.first,
        "terminated": steps.terminated,
        "last": steps.last,
    }
    for name, mask in masks.items():
        if mask is not None and mask.dtype != np.bool_:
            raise TypeError(f"steps.{name} is {mask.dtype} in the rollout, and a mask is bool: write x > 0 for x.")


def _parts(rollout: Trajectory) -> tuple[Transition, Any, Observation, Carry]:
    """Steps, whose step counts, views and what was remembered: they are kept apart."""
    steps: Any = rollout.steps
    counts = steps.obs.agent_mask if rollout.weight is None else rollout.weight
    return steps.replace(obs=None, next_obs=None, carry=()), counts, steps.obs, steps.carry


def _add(state: Replay, rollout: Trajectory) -> Replay:
    """Each step goes to its place in its own sequence; the oldest sequences make room."""
    capacity, sequence_length = state.steps.first.shape
    steps, counts, obs, carry = _parts(rollout)
    kept = {"steps": state.steps, "weight": state.counts, "obs": state.obs}
    _require_same(kept, {"steps": steps, "weight": counts, "obs": obs})

    def place(writing, first):
        """The number of the sequence and the position in it of one step in each environment."""
        number, position, count = writing
        begins = first | (position == sequence_length)
        number = jnp.where(begins, count + jnp.cumsum(begins, dtype=jnp.int32) - 1, number)
        position = jnp.where(begins, 0, position)
        return (number, position + 1, count + jnp.sum(begins, dtype=jnp.int32)), (number, position)

    writing, (number, position) = jax.lax.scan(place, (state.open, state.position, state.count), steps.first)
    open_, next_position, count = writing
    # Beyond the end means nowhere: for steps whose sequence has been overwritten meanwhile.
    row = jnp.where(number >= count - capacity, number % capacity, capacity)
    first_row = jnp.where(position == 0, row, capacity)

    def write(tree, items, *index):
        return jax.tree.map(lambda x, y: x.at[index].set(y, mode="drop"), tree, items)

    surplus = jnp.maximum(count // capacity - 1, 0) * capacity
    obs_kept = write(state.obs, rollout.steps.next_obs, row, position + 1)
    priority = state.priority
    if not isinstance(priority, tuple):
        highest = jnp.where(state.count > 0, sum_tree.highest(priority), 1.0)
        # At every step: what is appended to an open sequence is as new as a sequence of its own.
        places = jnp.where(row < capacity, row, len(priority.shares)).ravel()
        priority = sum_tree.put(priority, places, jnp.full(places.shape, highest))
    return dataclasses.replace(
        state,
        steps=write(state.steps, steps, row, position),
        counts=write(state.counts, counts, row, position),
        obs=write(obs_kept, obs, first_row, jnp.zeros_like(position)),
        carry=write(state.carry, carry, first_row),
        length=state.length.at[first_row].set(0, mode="drop").at[row].max(position + 1, mode="drop"),
        open=open_ - surplus,
        position=next_position,
        count=count - surplus,
        priority=priority,
    )


def _require_same(kept: Any, added: Any) -> None:
    """Same structure, dtypes and item shapes: `at[].set` would cast in silence."""

    def compare(path, x, y):
        if x.dtype != y.dtype or x.shape[2:] != y.shape[2:]:
            raise ValueError(
                f"{jax.tree_util.keystr(path, simple=True, separator='.')} is {y.dtype} of shape {y.shape[2:]} in the "
                f"rollout, but the buffer was made for {x.dtype} of shape {x.shape[2:]}."
            )

    jax.tree_util.tree_map_with_path(compare, kept, added)


def _take(state: Replay, index: Int[Array, "M"], importance: Float[Array, "M"] | None = None) -> Trajectory:
    """The sequences at `index`, time first."""
    kept = state.steps, state.counts, state.obs
    steps, counts, obs = jax.tree.map(lambda x: jnp.moveaxis(x[index], 0, 1), kept)
    is_written = jnp.arange(steps.first.shape[0])[:, None] < state.length[index]
    return Trajectory(
        steps=steps.replace(obs=jax.tree.map(lambda x: x[:-1], obs), next_obs=jax.tree.map(lambda x: x[1:], obs)),
        carry=jax.tree.map(lambda x: x[index], state.carry),
        weight=counts * (is_written * (1.0 if importance is None else importance))[..., None],
        index=index,
    )
