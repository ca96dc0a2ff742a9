"""Replay: a ring of sequences that carry their start state and never cross an episode's end.

A rollout is taken apart as it is added: every episode starts a sequence, and so does every step after a full one. What
a sequence lacks in length is padding, of weight 0. With `sequence_length=1` these are transitions.

Every step keeps one view, its own. Its successor's is the next step's, of the same sequence or of its environment's
next one; or, where an episode ended, one in the sequence's padding, or in a spare place if it has none. There are as
many spare places as episodes of `EnvSpec.min_steps` or more can need, so an environment whose episodes may end at once
takes two views for each transition. A `state` that is all views joined is not kept at all, but made when it is read.

So rollouts are to follow each other: a step that is not `first` begins where the one before it led.
All state is arrays of fixed shape; `add` writes in place where the state is donated or carried through a `scan`.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jmarl import sum_tree
from jmarl.envs import views
from jmarl.types import Buffer, Carry, EnvSpec, Numeric, Observation, Trajectory, Transition, static

__all__ = ["Replay", "memory", "prioritized", "uniform"]


@struct.dataclass(kw_only=True)
class Replay:
    """What a buffer holds.

    Attributes:
      steps: transitions `[C, L, ..]`, without observations and what was remembered before them.
      counts: whose step counts, `[C, L, N]`, as the rollout's weight says.
      obs: the views of the steps, by the fields of an `Observation`, sequence after sequence, `[C L, ..]`. Behind these
        are spare places: one for each environment's newest successor, then E for successors in which episodes ended.
      carry: what the networks remembered before each sequence, `[C, ..]`.
      length: steps written of each sequence; the rest is padding.
      successor: place of the view after step L of each sequence.
      owner: which sequence each of the E spare places serves. One that has been taken for another sequence is seen by
        this, and then the last step before it counts nothing.
      num_ends: spare places taken so far, modulo E.
      count: sequences begun so far, from 2 C on less a multiple of C, so that it never overflows. Number i lies at i
        modulo C.
      open: number of the sequence that each environment is writing.
      position: where in it its next step goes.
      priority: p^α of each sequence, a `jmarl.sum_tree`; () for uniform sampling.
      blocks: of each agent's view in the state, if that is made of views, see `jmarl.envs.views.own_blocks`; () if not.
    """

    steps: Transition
    counts: Float[Array, "*batch C L N"] | Bool[Array, "*batch C L N"]
    obs: dict[str, Any]
    carry: Carry
    length: Int[Array, "*batch C"]
    successor: Int[Array, "*batch C"]
    owner: Int[Array, "*batch E"]
    num_ends: Int[Array, "*batch"]
    count: Int[Array, "*batch"]
    open: Int[Array, "*batch B"]
    position: Int[Array, "*batch B"]
    priority: Any = ()
    blocks: tuple[tuple[int, int], ...] = static(())


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

    def of(spec: EnvSpec | None) -> Buffer:
        init = lambda rollout: _init(rollout, capacity, sequence_length, spec)  # noqa: E731
        return Buffer(init, _add, sample, settings=settings, for_env=of)

    return of(None)


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

    def of(spec: EnvSpec | None) -> Buffer:
        def init(rollout):
            state = _init(rollout, capacity, sequence_length, spec)
            return dataclasses.replace(state, priority=sum_tree.init(capacity))

        return Buffer(init, _add, sample, set_priority, settings, for_env=of)

    return of(None)


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


def _init(rollout: Trajectory, capacity: int, sequence_length: int, spec: EnvSpec | None = None) -> Replay:
    length, num_envs = rollout.steps.first.shape
    if capacity < length * num_envs:
        raise ValueError(
            f"capacity={capacity} is smaller than one addition: a rollout of {length} steps in {num_envs} environments "
            f"can begin {length * num_envs} sequences. Raise capacity or shorten the rollout."
        )
    # Of each episode, all sequences but the last are full, and at most one ends with it. Before the first of those that
    # lie between two ends as a whole, each environment may have one that does not.
    num_ends = math.ceil(capacity / math.ceil((1 if spec is None else spec.min_steps) / sequence_length)) + num_envs
    num_spare_rows = math.ceil((num_envs + num_ends) / sequence_length)
    if (capacity + num_spare_rows) * sequence_length > np.iinfo(np.int32).max:
        raise ValueError(
            f"capacity={capacity} of sequence_length={sequence_length} has more places for views than int32 can count: "
            f"lower capacity."
        )
    _require_masks(rollout)
    blocks = views.own_blocks(spec) if spec is not None and spec.state_is_views else ()

    def empty(tree: Any, *axes: int) -> Any:
        return jax.tree.map(lambda x: jnp.zeros((*axes, *x.shape[2:]), x.dtype), tree)

    steps, counts, obs, _, carry = jax.eval_shape(lambda rollout: _parts(rollout, blocks), rollout)
    return Replay(
        steps=empty(steps, capacity, sequence_length),
        counts=empty(counts, capacity, sequence_length),
        obs=empty(obs, (capacity + num_spare_rows) * sequence_length),
        carry=empty(carry, capacity),
        length=jnp.zeros(capacity, jnp.int32),
        successor=jnp.zeros(capacity, jnp.int32),
        owner=jnp.full(num_spare_rows * sequence_length - num_envs, -1, jnp.int32),
        num_ends=jnp.int32(0),
        count=jnp.int32(0),
        open=jnp.full(num_envs, -1, jnp.int32),
        position=jnp.full(num_envs, sequence_length, jnp.int32),
        blocks=blocks,
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


def _parts(
    rollout: Trajectory, blocks: tuple[tuple[int, int], ...]
) -> tuple[Transition, Any, dict[str, Any], dict[str, Any], Carry]:
    """Steps, whose step counts, views, successors' views and what was remembered: they are kept apart."""
    steps: Any = rollout.steps
    counts = steps.obs.agent_mask if rollout.weight is None else rollout.weight

    def kept(obs: Any) -> dict[str, Any]:
        names = [field.name for field in dataclasses.fields(obs) if not (blocks and field.name == "state")]
        return {name: getattr(obs, name) for name in names}

    return steps.replace(obs=None, next_obs=None, carry=()), counts, kept(steps.obs), kept(steps.next_obs), steps.carry


def _add(state: Replay, rollout: Trajectory) -> Replay:
    """Each step goes to its place in its own sequence; the oldest sequences make room."""
    capacity, sequence_length = state.steps.first.shape
    steps, counts, obs, next_obs, carry = _parts(rollout, state.blocks)
    rows_of_views = jax.eval_shape(lambda: _in_rows(state.obs, sequence_length))
    kept = {"steps": state.steps, "weight": state.counts, "obs": rows_of_views}
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
    nowhere = len(state.obs["agent_mask"]) // sequence_length
    row = jnp.where(number >= count - capacity, number % capacity, nowhere)
    first_row = jnp.where(position == 0, row, nowhere)
    waits = (state.position == sequence_length) & (state.open >= jnp.maximum(count - capacity, 0))
    open_row = jnp.where(waits, state.open % capacity, nowhere)
    ends = _successors(state, open_row, row, position, steps.first)

    def write(tree, items, *index):
        return jax.tree.map(lambda x, y: x.at[index].set(y, mode="drop"), tree, items)

    def write_views(places, view, next_view):
        start = capacity * sequence_length
        places = places.at[ends.moved].set(places[start : start + len(open_row)], mode="drop")
        places = places.at[row * sequence_length + position].set(view, mode="drop")
        return places.at[ends.place].set(next_view, mode="drop")

    surplus = jnp.maximum(count // capacity - 1, 0) * capacity
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
        obs=jax.tree.map(write_views, state.obs, obs, next_obs),
        carry=write(state.carry, carry, first_row),
        length=state.length.at[first_row].set(0, mode="drop").at[row].max(position + 1, mode="drop"),
        successor=ends.successor,
        owner=ends.owner,
        num_ends=ends.num_ends,
        open=open_ - surplus,
        position=next_position,
        count=count - surplus,
        priority=priority,
    )


def _in_rows(obs: dict[str, Any], sequence_length: int) -> dict[str, Any]:
    """The places of views, a row for each sequence."""
    return jax.tree.map(lambda x: x.reshape(len(x) // sequence_length, sequence_length, *x.shape[1:]), obs)


class _Successors(NamedTuple):
    """Where successors go that are no step's own view, `place` `[T, B]`, and those of earlier steps, `moved` `[B]`."""

    place: Array
    moved: Array
    successor: Array
    owner: Array
    num_ends: Array


def _successors(state: Replay, open_row: Array, row: Array, position: Array, first: Array) -> _Successors:
    """Where the successors of a rollout are.

    A full sequence needs to know: one that the rollout before filled, at `open_row` `[B]`, too. What its environment
    does next says whether the view after it is the first one of the next sequence, or one in a spare place. Whatever
    comes last in the rollout has a place of its own, until more is known.
    """
    capacity, sequence_length = state.steps.first.shape
    num_envs, num_places, spare = len(open_row), len(state.owner), capacity * sequence_length
    nowhere = len(state.obs["agent_mask"]) // sequence_length
    is_kept = row < capacity
    is_full = position == sequence_length - 1

    # With the step before the rollout, `[1 + T, B]`.
    rows = jnp.concatenate([open_row[None], jnp.where(is_full, row, nowhere)])
    next_row = jnp.concatenate([row, row[-1:]])
    ended = jnp.concatenate([first, jnp.zeros_like(first[:1])])  # of the last one nobody knows
    takes = ended & (rows < capacity)
    rank = jnp.cumsum(takes.ravel(), dtype=jnp.int32).reshape(takes.shape) - 1
    num_taken = rank[-1, -1] + 1
    has_place = takes & (rank >= num_taken - num_places)  # more than there are: only if episodes are too short
    taken = (state.num_ends + rank) % num_places
    at_end = spare + num_envs + taken
    successor = jnp.where(ended, at_end, next_row * sequence_length)
    successor = successor.at[-1].set(spare + jnp.arange(num_envs))

    # What is in no step's view: successors at an episode's end, and the newest ones.
    has_place = has_place.at[-1].set(True)
    goes_on = ~ended.at[-1].set(True)
    padding = row * sequence_length + position + 1
    place = jnp.where(is_full, successor[1:], padding)
    is_written = is_kept & ~goes_on[1:] & (~is_full | has_place[1:])
    return _Successors(
        place=jnp.where(is_written, place, nowhere * sequence_length),
        moved=jnp.where(has_place[0], at_end[0], nowhere * sequence_length),
        successor=state.successor.at[rows].set(successor, mode="drop"),
        owner=state.owner.at[jnp.where(takes & has_place, taken, num_places)].set(rows, mode="drop"),
        num_ends=(state.num_ends + num_taken) % num_places,
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
    capacity, sequence_length = state.steps.first.shape
    kept = state.steps, state.counts, _in_rows(state.obs, sequence_length)
    steps, counts, obs = jax.tree.map(lambda x: jnp.moveaxis(x[index], 0, 1), kept)
    successor = state.successor[index]
    after = jax.tree.map(lambda x: x[successor], state.obs)
    next_obs = jax.tree.map(lambda x, y: jnp.concatenate([x[1:], y[None]]), obs, after)
    taken = successor - capacity * sequence_length - len(state.open)
    is_there = (taken < 0) | (state.owner[jnp.maximum(taken, 0)] == index)
    length = jnp.minimum(state.length[index], jnp.where(is_there, sequence_length, sequence_length - 1))
    is_written = jnp.arange(sequence_length)[:, None] < length

    def whole(obs: dict[str, Any]) -> Observation:
        made = {"state": views.joined(obs["agents"], obs["agent_mask"].ndim - 1, state.blocks)} if state.blocks else {}
        return Observation(**obs, **made)

    return Trajectory(
        steps=steps.replace(obs=whole(obs), next_obs=whole(next_obs)),
        carry=jax.tree.map(lambda x: x[index], state.carry),
        weight=counts * (is_written * (1.0 if importance is None else importance))[..., None],
        index=index,
    )
