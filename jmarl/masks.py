"""Who acts, who waits, whose return has ended; and that nothing of an agent that is not there reaches a gradient.

An agent acts where `obs.agent_mask` is True. One that does not waits for its turn, or to come, as long as its return
goes on: then its steps have a value, which the steps before are bootstrapped from, and which is learnt; but no action
is. Once its return has ended, and until it acts again, its steps count for nothing.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jmarl.types import Observation, Trajectory

__all__ = ["acting", "counting", "over", "readable", "readable_batch", "speaking", "weight"]


def over(
    is_over: Bool[Array, "*batch N"], acts: Bool[Array, "*batch N"], terminated: Bool[Array, "*batch N"]
) -> Bool[Array, "*batch N"]:
    """Whose return has ended after a step, and who has not acted since.

    Args:
      is_over: the same before the step.
      acts: who acted in it.
      terminated: whose return ended with it.

    >>> over(jnp.array([True, True, False]), jnp.array([True, False, False]), jnp.array([False, False, True])).tolist()
    [False, True, True]
    """
    return terminated | (is_over & ~acts)


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
