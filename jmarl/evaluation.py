"""Greedy evaluation over a fixed number of finished episodes."""

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from jmarl.types import Env, Learner, Metrics, TrainState


def evaluate(
    env: Env,
    learner: Learner,
    state: TrainState,
    key: PRNGKeyArray,
    *,
    num_episodes: int = 32,
    max_steps: int | None = None,
) -> Metrics:
    """Plays `num_episodes` greedy episodes side by side, each to its end, so that short ones do not count more.

    Args:
      env: the environment.
      learner: plays with its `greedy` policy.
      state: what it has learnt; not changed.
      key: source of start states and of the environment's chance.
      num_episodes: episodes, all of them counted.
      max_steps: cuts episodes off, if any is longer; by default they all end.

    Returns:
      Means over the episodes: "eval/return_sum" and "eval/return_mean" over agents, "eval/return/NAME" of each
      agent, "eval/episode_length", and the environment's own info, such as "eval/won".
    """
    if num_episodes < 1:
        raise ValueError(f"num_episodes={num_episodes} must be at least 1.")
    key, key_reset = jax.random.split(key)
    env_state, obs = jax.vmap(env.reset)(jax.random.split(key_reset, num_episodes))

    def play_step(t, env_state, obs, carry):
        action, carry = learner.greedy(state, carry, obs, jnp.full(num_episodes, t == 0))
        keys = jax.random.split(jax.random.fold_in(key, t), num_episodes)
        env_state, obs, outcome = jax.vmap(env.step)(env_state, action, keys)
        return env_state, obs, carry, outcome

    def step(play):
        t, env_state, obs, carry, going_on, returns, length, info = play
        env_state, obs, carry, outcome = play_step(t, env_state, obs, carry)
        returns = returns + jnp.where(going_on[:, None], outcome.reward, 0)
        ends = going_on & outcome.last
        info = jax.tree.map(lambda old, new: jnp.where(ends, new, old), info, outcome.info)
        return t + 1, env_state, obs, carry, going_on & ~outcome.last, returns, length + going_on, info

    carry = learner.init_carry((num_episodes,))
    outcome = jax.eval_shape(play_step, jnp.int32(0), env_state, obs, carry)[3]
    returns, info = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (outcome.reward, outcome.info))
    going_on, length = jnp.ones(num_episodes, bool), jnp.zeros(num_episodes, jnp.int32)
    play = jnp.int32(0), env_state, obs, carry, going_on, returns, length, info

    def is_unfinished(play):
        return play[4].any() if max_steps is None else play[4].any() & (play[0] < max_steps)

    *_, returns, length, info = jax.lax.while_loop(is_unfinished, step, play)
    return {
        "eval/return_sum": jnp.mean(jnp.sum(returns, axis=-1)),
        "eval/return_mean": jnp.mean(returns),
        **{f"eval/return/{agent}": jnp.mean(returns[:, i]) for i, agent in enumerate(env.spec.agents)},
        "eval/episode_length": jnp.mean(length.astype(jnp.float32)),
        **{f"eval/{name}": jnp.mean(x) for name, x in info.items()},
    }
