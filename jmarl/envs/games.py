"""Small environments with known solutions, for tests and demonstrations."""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jmarl.types import Env, EnvSpec, Observation, Outcome


def matrix_game(payoff: Any, *, num_steps: int = 1) -> Env:
    """A cooperative game in normal form: everybody sees a constant and receives `payoff[a_0, a_1, ...]`.

    Args:
      payoff: one axis per agent, as long as its number of actions.
      num_steps: rounds; the episode terminates after the last one.
    """
    table = np.asarray(payoff, np.float32)
    num_agents, sizes = table.ndim, table.shape
    most = max(sizes)
    obs = Observation(
        agents=jnp.ones((num_agents, 1)),
        state=jnp.ones(num_agents),
        action_mask=jnp.asarray(np.arange(most) < np.array(sizes)[:, None]),
        agent_mask=jnp.ones(num_agents, bool),
    )

    def reset(key: Array) -> tuple[Array, Observation]:
        return jnp.zeros((), jnp.int32), obs

    def step(state: Array, action: Array, key: Array) -> tuple[Array, Observation, Outcome]:
        state = state + 1
        last = state >= num_steps
        reward = jnp.asarray(table)[tuple(action)]
        outcome = Outcome(
            reward=jnp.broadcast_to(reward, (num_agents,)), terminated=jnp.broadcast_to(last, (num_agents,)), last=last
        )
        return state, obs, outcome

    spec = EnvSpec(
        name="matrix_game",
        agents=tuple(f"agent_{i}" for i in range(num_agents)),
        obs_shape=(1,),
        state_shape=(num_agents,),
        num_actions=most,
        obs_sizes=(1,) * num_agents,
        action_sizes=sizes,
        max_steps=num_steps,
    )
    return Env(reset, step, spec)
