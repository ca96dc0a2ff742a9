"""An environment in which agents take turns, and what its steps are worth: for tests of what waiting agents teach."""

import jax
import jax.numpy as jnp
import numpy as np

from jmarl import envs
from jmarl.types import Env, EnvSpec, Outcome, zero_observation

GAMMA = 0.9
VALUES = [GAMMA**3, GAMMA**2, GAMMA, 1.0]  # of the agent that acts at t


def turns(*, continuous: bool = False) -> Env:
    """Agent i acts where t % 2 == i; both are paid 1 on the 4th and last step, whatever they do."""
    one = ((1.0,),) * 2
    kind = {"action_size": 1, "action_low": ((-1.0,),) * 2, "action_high": one} if continuous else {"num_actions": 2}
    spec = EnvSpec("turns", ("a", "b"), (4,), (4,), max_steps=4, min_steps=4, **kind)

    def observe(t):
        view = jax.nn.one_hot(t, 4, dtype=jnp.float32)
        acts = t % 2 == jnp.arange(2)
        return zero_observation(spec).replace(agents=jnp.stack([view, view]), state=view, agent_mask=acts)

    def reset(key):
        return jnp.int32(0), observe(jnp.int32(0))

    def step(t, action, key):
        end = t == 3
        paid = jnp.full(2, end, jnp.float32)
        return t + 1, observe(t + 1), Outcome(reward=paid, terminated=jnp.full(2, end), last=end)

    return envs.check_env(Env(reset, step, spec))


def of_those_who_act(value: jax.Array) -> list[float]:
    """From values `[4, N]` at the four steps, those of the agent that acts."""
    return [round(float(np.asarray(value)[t, t % 2]), 2) for t in range(4)]
