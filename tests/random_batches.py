"""Random sequences for tests of learners, and what every learner must make of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jmarl.types import Trajectory, Transition, zero_observation


@functools.partial(jax.jit, static_argnames=("spec", "length", "batch_size"))
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


def with_true_successors(steps):
    """The same steps, where that of each is the next one's view, but for what an episode's end or the last leads to."""
    ends = steps.last.at[-1].set(True)

    def choose(x, y):
        return jnp.where(ends.reshape(*ends.shape, *[1] * (x.ndim - 2)), y, jnp.roll(x, -1, axis=0))

    return steps.replace(next_obs=jax.tree.map(choose, steps.obs, steps.next_obs))


def require_padding_and_inactive_agents_change_nothing(learner, spec, carry):
    """One update is the same whatever lies beyond a sequence's or a return's end; all parameters learn.

    Sequence 2 has a dead agent, sequence 3 ends in padding, sequence 4 in a terminal state. What is not to be read of
    them is changed to other numbers, and to NaN.

    Args:
      learner: of two agents.
      spec: of its environment.
      carry: what its networks remember before a batch of 6.
    """
    state, update = jax.jit(learner.init)(jax.random.key(0)), jax.jit(learner.update)
    is_dead = jnp.zeros((4, 6, 2), bool).at[:, 2, 1].set(True)
    is_padding = jnp.zeros((4, 6), bool).at[3, 3].set(True)  # not step 2: it is what step 1 leads to
    is_terminal = jnp.zeros((4, 6), bool).at[3, 4].set(True)

    def without_dead(obs):
        """Of a dead agent, nothing is in the state either: its part is the last feature."""
        return obs.replace(agent_mask=~is_dead, state=obs.state.at[:, 2, -1].set(0.0))

    def spoilt(batch, garbage):
        """A function of what is there and of other numbers, where nothing is to be read."""
        steps = batch.steps

        def views(obs, others, is_gone):
            of_agent = is_gone[..., None] | is_dead
            state = mix(obs.state, others.state, is_gone)
            return obs.replace(agents=mix(obs.agents, others.agents, of_agent), state=state)

        return batch.replace(
            steps=steps.replace(
                obs=views(steps.obs, garbage.obs, is_padding),
                action=mix(steps.action, garbage.action, is_padding[..., None] | is_dead),
                reward=mix(steps.reward, garbage.reward, is_padding),
                next_obs=views(steps.next_obs, garbage.next_obs, is_padding | is_terminal),
            )
        )

    def with_nan(batch):
        steps, nan = batch.steps, lambda obs: jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), obs)
        garbage = steps.replace(obs=nan(steps.obs), next_obs=nan(steps.next_obs), reward=nan(steps.reward))
        steps = spoilt(batch, garbage).steps
        last = lambda x: x.at[:, 2, -1].set(jnp.nan)  # noqa: E731
        obs, next_obs = steps.obs.replace(state=last(steps.obs.state)), steps.next_obs
        next_obs = next_obs.replace(state=last(next_obs.state))
        return batch.replace(steps=steps.replace(obs=obs, next_obs=next_obs, reward=last(steps.reward)))

    @jax.jit
    def batch_and_others(carry):
        batch = random_batch(spec, jax.random.key(1), carry=carry)
        steps = batch.steps.replace(
            obs=without_dead(batch.steps.obs),
            next_obs=without_dead(batch.steps.next_obs),
            reward=jnp.where(is_dead, 0.0, batch.steps.reward),
            terminated=jnp.broadcast_to(is_terminal[..., None], is_dead.shape),
            last=is_terminal,
        )
        weight = jnp.where(is_dead, 0.0, batch.weight).at[2:, 3].set(0.0)
        batch = batch.replace(steps=steps, weight=weight)
        return batch, spoilt(batch, random_batch(spec, jax.random.key(2)).steps), with_nan(batch)

    batch, *others = batch_and_others(carry)
    new, _ = update(state, batch, jax.random.key(3))
    for other in others:
        same, _ = update(state, other, jax.random.key(3))
        for x, y in zip(jax.tree.leaves(new.params), jax.tree.leaves(same.params), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)
    moved = jax.tree.map(lambda x, y: not np.array_equal(x, y), state.params, new.params)
    assert all(jax.tree.leaves(moved)), moved


def mix(ours, other, where):
    """`other` where a mask of fewer axes says so."""
    return jnp.where(where.reshape(where.shape + (1,) * (ours.ndim - where.ndim)), other, ours)
