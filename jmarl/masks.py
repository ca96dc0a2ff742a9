"""Who acts, who waits, whose return has ended; and that nothing of an agent that is not there reaches a gradient.

An agent acts where `obs.agent_mask` is True. One that does not waits for its turn, or to come, as long as its return
goes on: then its steps have a value, which the steps before are bootstrapped from, and which is learnt; but no action
is. Once its return has ended, and until it acts again, its steps count for nothing.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jmarl.types import Observation, Trajectory

__all__ = ["acting", "counting", "over", "readable", "readable_batch", "speaking", "weight"]


def over(
    is_over: Bool[Array, "B N"],
    acts: Bool[Array, "T B N"],
    terminated: Bool[Array, "T B N"],
    first: Bool[Array, "T B"],
    last: Bool[Array, "T B"],
) -> tuple[Bool[Array, "T B N"], Bool[Array, "B N"]]:
    """Whose return has ended before each step of a rollout, and who has not acted since; and the same after the last.

    Without a scan: each of its steps would cost more than all of this.

    Args:
      is_over: the same before the first step.
      acts: who acts.
      terminated: whose return ends with the step.
      first, last: where episodes begin and end.

    >>> acts, ends = (jnp.array(x, bool).reshape(4, 1, 1) for x in ([1, 0, 0, 1], [1, 0, 0, 0]))
    >>> nowhere = jnp.zeros((4, 1), bool)
    >>> before, _ = over(jnp.zeros((1, 1), bool), acts, ends, nowhere, nowhere)
    >>> before.ravel().tolist()  # it is gone after its end, and back in the fourth step
    [False, True, True, True]
    """
    # The latest time of each event, at or before a step; -1 is before the rollout, -2 never.
    time = jnp.arange(len(first), dtype=jnp.int32).reshape(-1, 1, 1)
    before = jnp.where(is_over, -1, -2).astype(jnp.int32)
    ended = jnp.maximum(jax.lax.cummax(jnp.where(terminated, time, -2), axis=0), before)
    acted = jax.lax.cummax(jnp.where(acts, time, -2), axis=0)
    began = jax.lax.cummax(jnp.where(first[..., None], time, -1), axis=0)

    def earlier(x: Array, start: Array) -> Array:
        return jnp.concatenate([start[None], x[:-1]])

    is_over = earlier(ended, before) >= jnp.maximum(earlier(acted, jnp.full_like(acted[0], -2)), began)
    return is_over, (terminated[-1] | (is_over[-1] & ~acts[-1])) & ~last[-1][:, None]


def weight(batch: Trajectory) -> Float[Array, "L M N"]:
    """Of each step in a loss of values: the batch's, or 1 for whoever acts."""
    given = batch.steps.obs.agent_mask if batch.weight is None else batch.weight
    return given.astype(batch.steps.reward.dtype)


def acting(batch: Trajectory) -> Float[Array, "L M N"]:
    """Of each step in a loss of policies: of those who act."""
    return jnp.where(batch.steps.obs.agent_mask, weight(batch), 0.0)


def counting(batch: Trajectory) -> Bool[Array, "L M N"]:
    """Whose value of the successor is there to go on with: of those who act then, or whose return goes on."""
    steps: Any = batch.steps
    return steps.next_obs.agent_mask | ((weight(batch) > 0) & ~steps.terminated)


def speaking(obs: Observation, goes_on: Bool[Array, "*batch N"]) -> Observation:
    """Whose values make up a team's, in `agent_mask`: of those who act, and where all wait, of whose return goes on."""
    somebody_acts = obs.agent_mask.any(-1, keepdims=True)
    return dataclasses.replace(obs, agent_mask=jnp.where(somebody_acts, obs.agent_mask, goes_on))


def readable(obs: Observation, counts: Bool[Array, "*batch N"] | None = None) -> Observation:
    """Zeros in place of what is no number in the views of agents that do not act, and in the state where one does not.

    With `counts`, also where an agent's step does not count.

    >>> from jmarl import envs
    >>> from jmarl.types import zero_observation
    >>> obs = zero_observation(envs.matrix_game([[1.0, 0.0], [0.0, 0.0]]).spec)
    >>> absent = obs.replace(agents=jnp.array([[1.0], [jnp.nan]]), agent_mask=jnp.array([True, False]))
    >>> readable(absent).agents.tolist()
    [[1.0], [0.0]]
    """
    acts = obs.agent_mask if counts is None else obs.agent_mask & counts

    def finite(x: Array, is_there: Array) -> Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):  # bytes are numbers
            return x
        is_there = is_there.reshape(*is_there.shape, *[1] * (x.ndim - is_there.ndim))
        return jnp.where(is_there | jnp.isfinite(x), x, jnp.zeros((), x.dtype))

    return dataclasses.replace(obs, agents=finite(obs.agents, acts), state=finite(obs.state, acts.all(-1)))


def readable_batch(batch: Trajectory) -> Trajectory:
    """A batch in which what does not count is finite: what is masked would else reach a gradient as 0 times NaN."""
    steps, counts = batch.steps, weight(batch) > 0
    reward = jnp.where(counts | jnp.isfinite(steps.reward), steps.reward, 0.0)
    next_obs = None if steps.next_obs is None else readable(steps.next_obs, counts & ~steps.terminated)
    steps = dataclasses.replace(steps, obs=readable(steps.obs, counts), next_obs=next_obs, reward=reward)
    return dataclasses.replace(batch, steps=steps)
