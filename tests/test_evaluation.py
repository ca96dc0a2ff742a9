"""Greedy evaluation: what counts, what is cut off, who plays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmarl
from jmarl import envs, evaluation
from jmarl.types import Env, EnvSpec, Outcome, zero_observation

SPEC = EnvSpec(name="drift", agents=("a",), obs_shape=(1,), state_shape=(1,), num_actions=2)


def endless(max_steps):
    """1 a step; half of the environments end after 3 steps, the others never."""

    def reset(key):
        return (jnp.int32(0), jax.random.bernoulli(key)), zero_observation(SPEC)

    def step(state, action, key):
        time, ends = state[0] + 1, state[1]
        last = ends & (time == 3)
        outcome = Outcome(reward=jnp.ones(1), terminated=last[None], last=last, info={"mark": jnp.float32(5.0)})
        return (time, ends), zero_observation(SPEC), outcome

    return Env(reset, step, SPEC._replace(max_steps=max_steps))


def play(env, **options):
    learner = jmarl.random_policy(env.spec, jmarl.RandomConfig())
    state = learner.init(jax.random.key(0))
    return evaluation.evaluate(env, learner, state, jax.random.key(1), num_episodes=32, **options)


def test_episodes_that_never_end_are_cut_off_at_the_specs_limit():
    metrics = play(endless(10))
    num_cut = (float(metrics["eval/episode_length"]) - 3.0) / 7.0
    assert 0 < num_cut < 1 and (num_cut * 32) % 1 == pytest.approx(0, abs=1e-4)
    np.testing.assert_allclose(metrics["eval/return_sum"], metrics["eval/episode_length"])
    assert metrics["eval/mark"] == 5.0  # of those that ended


def test_without_an_end_in_sight_a_limit_is_asked_for():
    with pytest.raises(ValueError, match=r"max_steps=None must be at least 1, .* spec of drift"):
        play(endless(None))
    with pytest.raises(ValueError, match="max_steps=-3 must be at least 1"):
        play(endless(None), max_steps=-3)
    assert jnp.isnan(play(endless(None), max_steps=2)["eval/mark"])  # nothing has ended


def test_teams_must_be_of_the_environments_agents():
    env = envs.probe("action", num_agents=3)
    random = jmarl.random_policy(env.spec, jmarl.RandomConfig())
    match = evaluation.teams([random, random], [[0], [1]])
    with pytest.raises(ValueError, match=r"members=\[\[0\], \[1\]\] must name every agent once, and there are 3"):
        evaluation.evaluate(env, match, match.init(jax.random.key(0)), jax.random.key(1), num_episodes=2)
