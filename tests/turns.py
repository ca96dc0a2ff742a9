"""An environment in which agents take turns, and what its steps are worth: for tests of what waiting agents teach."""

import jax
import jax.numpy as jnp
import numpy as np

from jmarl import envs, training
from jmarl.types import Env, EnvSpec, Learner, Outcome, zero_observation

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


def assert_the_dead_teach_nothing(env: Env, learner: Learner) -> None:
    """One of three agents is dead half of the time: what it then sees, does and is paid changes no parameter."""
    run = jax.jit(lambda key: training.start(env, learner, key, num_envs=3))(jax.random.key(0))
    run, batch, _ = jax.jit(lambda run: training.rollout(env, learner, run, length=4))(run)
    state, update, acts = run.train_state, jax.jit(learner.update), np.ones((4, 3, 3), bool)
    acts[2:, 0, 1] = False

    def update_with(seen, done, paid):
        steps = batch.steps
        spoil = lambda x, value: jnp.where(acts.reshape(*acts.shape, *[1] * (x.ndim - 3)), x, value)  # noqa: E731
        obs = steps.obs.replace(agents=spoil(steps.obs.agents, seen), agent_mask=jnp.asarray(acts))
        steps = steps.replace(obs=obs, action=spoil(steps.action, done), reward=spoil(steps.reward, paid))
        return update(state, batch.replace(steps=steps, weight=jnp.asarray(acts)), jax.random.key(3))[0]

    one = update_with(0.0, 0, 0.0)
    for other in (update_with(9.0, 1, 0.0), update_with(jnp.nan, 1, jnp.nan)):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), one.params, other.params)
    moved = jax.tree.map(lambda x, y: not np.array_equal(x, y), state.params, one.params)
    assert all(jax.tree.leaves(moved)), moved
