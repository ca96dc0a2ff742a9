"""What many tests begin with, as one compiled function: op by op it would be a hundred, and take a second or two."""

import jax

import jmarl
from jmarl import training


def init(learner, key):
    """`learner.init`."""
    return jax.jit(learner.init)(key)


def start(env, learner, key, *, num_envs):
    """`training.start`."""
    return jax.jit(lambda key: training.start(env, learner, key, num_envs=num_envs))(key)


def rollout(env, learner, run, *, length):
    """`training.rollout`."""
    return jax.jit(lambda run: training.rollout(env, learner, run, length=length))(run)


def play(env, learner, key, *, num_envs, length):
    """`training.start`, then `training.rollout`."""

    @jax.jit
    def played(key):
        run = training.start(env, learner, key, num_envs=num_envs)
        return training.rollout(env, learner, run, length=length)

    return played(key)


def evaluate(env, learner, state, key, **options):
    """`jmarl.evaluate`."""
    return jax.jit(lambda state, key: jmarl.evaluate(env, learner, state, key, **options))(state, key)
