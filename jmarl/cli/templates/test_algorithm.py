"""OwnAlgorithm learns what is best in a game of one step, and discounts as it should."""

import jax
import jax.numpy as jnp
import numpy as np
from own_algorithm import OwnAlgorithmConfig, own_algorithm, returns

import jmarl


def test_it_learns_a_matrix_game():
    env = jmarl.envs.matrix_game([[1.0, 0.0], [0.0, 0.5]])
    cfg = OwnAlgorithmConfig()
    loop = jmarl.on_policy(env, own_algorithm, num_envs=32, rollout_length=8)
    run, _ = jax.jit(jmarl.make_train(loop, 100))(jax.random.key(0), cfg)
    metrics = jmarl.evaluate(env, own_algorithm(env.spec, cfg), run.train_state, jax.random.key(1), num_episodes=2)
    assert metrics["eval/return_mean"] == 1.0


def test_returns_by_hand():
    reward = jnp.array([1.0, 2.0, 4.0]).reshape(3, 1, 1)
    last = jnp.array([False, True, False]).reshape(3, 1)
    np.testing.assert_allclose(returns(reward, last, 0.5).ravel(), [2.0, 2.0, 4.0])
