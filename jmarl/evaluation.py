"""Greedy evaluation over a fixed number of finished episodes, also of one team against another."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from jmarl.types import Env, Learner, Metrics


def evaluate(
    env: Env,
    learner: Learner,
    state: Any,
    key: PRNGKeyArray,
    *,
    num_episodes: int = 32,
    max_steps: int | None = None,
) -> Metrics:
    """Plays `num_episodes` greedy episodes side by side, each to its end, so that short ones do not count more.

    Args:
      env: the environment.
      learner: plays with its `greedy` policy.
      state: what it has learnt, a `TrainState`, or that of `teams`; not changed.
      key: source of start states and of the environment's chance.
      num_episodes: episodes, all of them counted.
      max_steps: of an episode; by default `env.spec.max_steps`. What an episode that is cut off earned counts, and
        its length; its info is not known, and is left out.

    Returns:
      Means over the episodes: "eval/return_sum" and "eval/return_mean" over agents, "eval/return/NAME" of each
      agent, "eval/episode_length", and the environment's own info, such as "eval/won".
    """
    if num_episodes < 1:
        raise ValueError(f"num_episodes={num_episodes} must be at least 1.")
    max_steps = env.spec.max_steps if max_steps is None else max_steps
    if max_steps is None or max_steps < 1:
        raise ValueError(
            f"max_steps={max_steps} must be at least 1, or a policy that never ends an episode plays for ever: give a "
            f"number to evaluate, or to the spec of {env.spec.name}."
        )
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
    returns = jnp.zeros(outcome.reward.shape, outcome.reward.dtype)
    info = jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan), outcome.info)
    going_on, length = jnp.ones(num_episodes, bool), jnp.zeros(num_episodes, jnp.int32)
    play = jnp.int32(0), env_state, obs, carry, going_on, returns, length, info

    def is_unfinished(play):
        return play[4].any() & (play[0] < max_steps)

    *_, returns, length, info = jax.lax.while_loop(is_unfinished, step, play)
    return {
        "eval/return_sum": jnp.mean(jnp.sum(returns, axis=-1)),
        "eval/return_mean": jnp.mean(returns),
        **{f"eval/return/{agent}": jnp.mean(returns[:, i]) for i, agent in enumerate(env.spec.agents)},
        "eval/episode_length": jnp.mean(length.astype(jnp.float32)),
        **{f"eval/{name}": jnp.nanmean(x) for name, x in info.items()},
    }


def teams(learners: Sequence[Learner], members: Sequence[Sequence[int]]) -> Learner:
    """One learner out of several, for matches: agent i acts as the learner does among whose `members` it is.

    Its state is a tuple of theirs, in their order, and so is its carry. It acts and is evaluated; it does not learn.

    Args:
      learners: all of one environment.
      members: the agents of each, every agent once.

    >>> from jmarl import PPOConfig, RandomConfig, envs, ippo, random_policy
    >>> env = envs.matrix_game([[1.0, 0.0], [0.0, 0.0]])
    >>> match = teams([ippo(env.spec, PPOConfig()), random_policy(env.spec, RandomConfig())], [[0], [1]])
    >>> metrics = evaluate(env, match, match.init(jax.random.key(0)), jax.random.key(1), num_episodes=4)
    >>> metrics["eval/episode_length"]
    Array(1., dtype=float32)
    """
    agents = sorted(agent for group in members for agent in group)
    if len(learners) != len(members) or agents != list(range(len(agents))):
        raise ValueError(
            f"members={members} must name every agent once, in one group for each of the {len(learners)} learners."
        )
    whose = np.zeros(len(agents), int)
    for i, group in enumerate(members):
        whose[list(group)] = i

    def choose(actions):
        # [K, B, N, ..] -> [B, N, ..]: for each agent the action of its own learner
        if (num := actions[0].shape[1]) != len(agents):
            raise ValueError(f"members={members} must name every agent once, and there are {num} agents here.")
        return jnp.stack([actions[k][:, agent] for agent, k in enumerate(whose)], axis=1)

    def init(key):
        keys = jax.random.split(key, len(learners))
        return tuple(learner.init(k) for learner, k in zip(learners, keys, strict=True))

    def init_carry(batch_shape):
        return tuple(learner.init_carry(batch_shape) for learner in learners)

    def act(state, carry, obs, first, key):
        keys = jax.random.split(key, len(learners))
        each = zip(learners, state, carry, keys, strict=True)
        actions, carry, extras = zip(*[learner.act(s, c, obs, first, k) for learner, s, c, k in each], strict=True)
        return choose(actions), carry, extras

    def greedy(state, carry, obs, first):
        each = zip(learners, state, carry, strict=True)
        actions, carry = zip(*[learner.greedy(s, c, obs, first) for learner, s, c in each], strict=True)
        return choose(actions), carry

    def update(state, batch, key):
        raise TypeError("teams play and do not learn: train each learner in its own loop.")

    return Learner(init, init_carry, act, greedy, update)
