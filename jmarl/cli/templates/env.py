"""OwnEnv: say in a sentence what agents see, do and earn. As it stands: two that are to meet on a line.

jmarl train mappo --env own_env.py:own_env --env-kwargs num_steps=30
"""

import jax
import jax.numpy as jnp
from jax import Array

from jmarl.types import Env, EnvSpec, Observation, Outcome, zero_observation


def own_env(num_steps: int = 20, speed: float = 0.1) -> Env:
    """The environment; its arguments are what --env-kwargs gives.

    Args:
      num_steps: of an episode, at most.
      speed: of an agent that moves.
    """
    spec = EnvSpec(
        name="own_env",
        agents=("ann", "bob"),
        obs_shape=(2,),
        state_shape=(2,),
        num_actions=3,
        max_steps=num_steps,
        always_act=True,  # nobody dies or waits
    )

    def observe(position: Array) -> Observation:
        # In a zero_observation every action is legal and everybody alive. Here each agent sees itself first.
        return zero_observation(spec).replace(agents=jnp.stack([position, position[::-1]]), state=position)

    def reset(key: Array) -> tuple[tuple[Array, Array], Observation]:
        position = jax.random.uniform(key, (2,), minval=-1.0)
        return (position, jnp.int32(0)), observe(position)

    def step(state: tuple[Array, Array], action: Array, key: Array):
        position, time = state
        position, time = position + speed * (action - 1), time + 1  # action [N]: left, stay, right
        distance = jnp.abs(position[0] - position[1])
        met = distance < speed
        # Terminated: the task is done, nothing follows. Last: the episode ends, also by its time limit.
        outcome = Outcome(
            reward=jnp.full(2, -distance),
            terminated=jnp.full(2, met),
            last=met | (time == num_steps),
            info={"met": met},
        )
        return (position, time), observe(position), outcome

    return Env(reset, step, spec)
