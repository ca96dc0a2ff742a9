"""Random sequences for tests of learners, and what every learner must make of them."""

import jax
import jax.numpy as jnp
import numpy as np

from jmarl.types import Trajectory, Transition, zero_observation


def random_batch(spec, key, length=4, batch_size=6, carry=()):
    """Random sequences of two agents, none of which ends."""
    keys = jax.random.split(key, 6)
    shape = (length, batch_size, spec.num_agents)

    def observation(key):
        obs = zero_observation(spec, shape[:2])
        views = jax.random.normal(key, obs.agents.shape)
        return obs.replace(agents=views, state=jax.random.normal(key, obs.state.shape))

    if spec.is_discrete:
        action = jax.random.randint(keys[1], shape, 0, spec.num_actions)
    else:
        action = jax.random.uniform(keys[1], (*shape, spec.action_size), minval=-1.0, maxval=1.0)
    return Trajectory(
        steps=Transition(
            obs=observation(keys[0]),
            first=jnp.zeros(shape[:2], bool).at[0].set(True),
            action=action,
            reward=jax.random.normal(keys[2], shape),
            terminated=jnp.zeros(shape, bool),
            last=jnp.zeros(shape[:2], bool),
            next_obs=observation(keys[3]),
        ),
        carry=carry,
        weight=jnp.ones(shape),
    )


def require_padding_and_inactive_agents_change_nothing(learner, spec, carry):
    """One update is the same whatever lies beyond a sequence's end or belongs to a dead agent; all parameters learn.

    Args:
      learner: of two agents.
      spec: of its environment.
      carry: what its networks remember before a batch of 6.
    """
    state, update = jax.jit(learner.init)(jax.random.key(0)), jax.jit(learner.update)
    batch = random_batch(spec, jax.random.key(1), carry=carry)
    steps = batch.steps
    dead = steps.obs.agent_mask.at[:, 2, 1].set(False)
    steps = steps.replace(obs=steps.obs.replace(agent_mask=dead), next_obs=steps.next_obs.replace(agent_mask=dead))
    batch = batch.replace(steps=steps, weight=batch.weight.at[2:, 3].set(0.0) * dead)

    garbage = random_batch(spec, jax.random.key(2)).steps
    padded = jnp.zeros((4, 6), bool).at[3, 3].set(True)  # step 3 of sequence 3; step 2 is what step 1 leads to

    def mix(ours, other, where):
        return jnp.where(where.reshape(where.shape + (1,) * (ours.ndim - where.ndim)), other, ours)

    spoilt = jax.tree.map(lambda x, y: mix(x, y, padded), steps, garbage.replace(first=steps.first))
    is_dead = jnp.zeros((4, 6, 2), bool).at[:, 2, 1].set(True)
    spoilt = spoilt.replace(
        action=mix(spoilt.action, garbage.action, is_dead),
        obs=spoilt.obs.replace(agents=mix(spoilt.obs.agents, garbage.obs.agents, is_dead)),
        next_obs=spoilt.next_obs.replace(agents=mix(spoilt.next_obs.agents, garbage.next_obs.agents, is_dead)),
    )
    new, _ = update(state, batch, jax.random.key(3))
    same, _ = update(state, batch.replace(steps=spoilt), jax.random.key(3))
    for x, y in zip(jax.tree.leaves(new.params), jax.tree.leaves(same.params), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)
    moved = jax.tree.map(lambda x, y: bool((x != y).any()), state.params, new.params)
    assert all(jax.tree.leaves(moved)), moved
