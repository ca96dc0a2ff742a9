"""OwnAlgorithm learns what is best in a game of one step, and discounts as it should."""

import jax
import jax.numpy as jnp
import numpy as np
from own_algorithm import OwnAlgorithmConfig, own_algorithm, own_targets

import jmarl


def test_it_learns_a_matrix_game():
    env = jmarl.envs.matrix_game([[1.0, 0.0], [0.0, 0.5]])
    cfg = OwnAlgorithmConfig(hidden_sizes=(16,))
    loop = jmarl.on_policy(env, own_algorithm, num_envs=32, rollout_length=8)
    run, _ = jax.jit(jmarl.make_train(loop, 100))(jax.random.key(0), cfg)
    metrics = jmarl.evaluate(env, own_algorithm(env.spec, cfg), run.train_state, jax.random.key(1), num_episodes=2)
    assert metrics["eval/return_mean"] == 1.0


def test_returns_by_hand():
    env, cfg = jmarl.envs.probe("time_limit", num_steps=2), OwnAlgorithmConfig(gamma=0.5, hidden_sizes=(4,))
    learner = own_algorithm(env.spec, cfg)
    run = jmarl.training.start(env, learner, jax.random.key(0), num_envs=1)
    _, batch, _ = jmarl.rollout(env, learner, run, length=3)
    steps = batch.steps.replace(reward=jnp.array([1.0, 2.0, 4.0]).reshape(3, 1, 1))
    np.testing.assert_allclose(own_targets(batch.replace(steps=steps), cfg=cfg).ravel(), [2.0, 2.0, 4.0])
