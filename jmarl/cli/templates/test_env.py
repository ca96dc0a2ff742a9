"""OwnEnv keeps to what jmarl asks of an environment, and to its own rules."""

import jax
import jax.numpy as jnp
import numpy as np
from own_env import own_env

import jmarl


def test_shapes_and_dtypes_are_right():
    jmarl.envs.check_env(own_env())


def test_two_that_walk_towards_each_other_meet():
    env = own_env(speed=0.5)
    position = jnp.array([-1.0, 0.4])
    (position, time), obs, outcome = env.step((position, jnp.int32(0)), jnp.array([2, 1]), jax.random.key(0))
    np.testing.assert_allclose(position, [-0.5, 0.4])
    np.testing.assert_allclose(obs.agents, [[-0.5, 0.4], [0.4, -0.5]])
    np.testing.assert_allclose(outcome.reward, [-0.9, -0.9])
    assert not outcome.last
    *_, outcome = env.step((position, time), jnp.array([2, 1]), jax.random.key(0))
    assert outcome.last and outcome.terminated.all()


def test_an_episode_ends_after_its_steps_without_an_end_of_the_return():
    env = own_env(num_steps=1)
    *_, outcome = env.step((jnp.array([-1.0, 1.0]), jnp.int32(0)), jnp.array([1, 1]), jax.random.key(0))
    assert outcome.last and not outcome.terminated.any()
