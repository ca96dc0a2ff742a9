"""Greedy evaluation over a fixed number of finished episodes, also of one team against another."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jmarl import keys, masks, metrics
from jmarl.envs.flags import usual_promotion
from jmarl.types import Env, EnvSpec, Learner, Metrics, Replaceable, TrainState

# The first parts of names that jmarl itself measures, or keeps for those that clash with them.
_MEASURED = ("return_sum", "return_mean", "return", "episode_length", "info")


@struct.dataclass(kw_only=True)
class Episodes(Replaceable):
    """What each of `E` episodes gave.

    Attributes:
      returns: of each agent.
      length: in steps.
      has_ended: False where an episode was cut off at `max_steps`.
      info: the environment's own, as told at the last step; not known where an episode has not ended.
    """

    returns: Float[Array, "*batch E N"]
    length: Int[Array, "*batch E"]
    has_ended: Bool[Array, "*batch E"]
    info: dict[str, Any]


@usual_promotion
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
      state: what it has learnt, a `TrainState`, or that of `teams`; not changed. Where its parameters are not finite,
        every metric is NaN: the greedy action of NaN is action 0, which may score well. With a leading axis of seeds,
        as `jmarl.run` returns it, each seed plays its own episodes, and metrics have that axis, too.
      key: source of start states and of the environment's chance.
      num_episodes: episodes, all of them counted.
      max_steps: of an episode; by default `env.spec.max_steps`. What an episode that is cut off earned counts, and
        its length; its info is not known, and is left out, as is NaN.

    Returns:
      Means over the episodes: "eval/return_sum" and "eval/return_mean" over agents, "eval/return/NAME" of each
      agent, "eval/episode_length", and the environment's own info, such as "eval/won", named as by `info_metrics`.
    """
    key = keys.as_key(key)
    if isinstance(state, TrainState) and state.step.ndim == 1:

        def of_one_seed(state, key):
            return evaluate(env, learner, state, key, num_episodes=num_episodes, max_steps=max_steps)

        return jax.vmap(of_one_seed)(state, jax.random.split(key, len(state.step)))
    episodes = play_episodes(env, learner, state, key, num_episodes=num_episodes, max_steps=max_steps)
    is_finite = all_finite(state)
    return {name: jnp.where(is_finite, x, metrics.missing()) for name, x in mean_metrics(env.spec, episodes).items()}


@usual_promotion
def play_episodes(
    env: Env,
    learner: Learner,
    state: Any,
    key: PRNGKeyArray,
    *,
    num_episodes: int = 32,
    max_steps: int | None = None,
) -> Episodes:
    """The episodes that `evaluate` takes the means of, one by one; the arguments are its own, but for one seed.

    >>> from jmarl import RandomConfig, envs, random_policy
    >>> env = envs.matrix_game([[1.0, 1.0], [1.0, 1.0]])
    >>> learner = random_policy(env.spec, RandomConfig())
    >>> play_episodes(env, learner, learner.init(jax.random.key(0)), jax.random.key(1), num_episodes=3).returns.shape
    (3, 2)
    """
    key = keys.as_key(key)
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
        action, carry = learner.greedy(state, carry, masks.readable(obs), jnp.full(num_episodes, t == 0))
        keys_env = jax.random.split(jax.random.fold_in(key, t), num_episodes)
        acts = obs.agent_mask
        env_state, obs, outcome = jax.vmap(env.step)(env_state, action, keys_env)
        # As in a rollout: what an agent that does not act is paid counts, unless it is no number.
        is_read = acts | jnp.isfinite(outcome.reward)
        return env_state, obs, carry, outcome.replace(reward=jnp.where(is_read, outcome.reward, 0.0))

    def step(play):
        t, env_state, obs, carry, going_on, returns, length, info = play
        env_state, obs, carry, outcome = play_step(t, env_state, obs, carry)
        returns = returns + jnp.where(going_on[:, None], outcome.reward, 0)
        ends = going_on & outcome.last
        info = jax.tree.map(lambda old, new: jnp.where(ends, new.astype(jnp.float32), old), info, outcome.info)
        length = length + going_on.astype(jnp.int32)
        return t + 1, env_state, obs, carry, going_on & ~outcome.last, returns, length, info

    carry = learner.init_carry((num_episodes,))
    outcome = jax.eval_shape(play_step, jnp.int32(0), env_state, obs, carry)[3]
    returns = jnp.zeros(outcome.reward.shape, outcome.reward.dtype)
    info = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), outcome.info)
    going_on, length = jnp.ones(num_episodes, bool), jnp.zeros(num_episodes, jnp.int32)
    play = jnp.int32(0), env_state, obs, carry, going_on, returns, length, info

    def is_unfinished(play):
        return play[4].any() & (play[0] < max_steps)

    _, env_state, _, _, going_on, returns, length, info = jax.lax.while_loop(is_unfinished, step, play)
    if env.release is not None:
        env.release(env_state)
    return Episodes(returns=returns, length=length, has_ended=~going_on, info=info)


def mean_metrics(spec: EnvSpec, episodes: Episodes) -> Metrics:
    """Means over episodes `[E]`, under the names that `evaluate` lists."""

    def mean_known(x):
        """Over the episodes that ended and told a number."""
        is_known = episodes.has_ended & ~jnp.isnan(x)
        return metrics.mean(jnp.sum(jnp.where(is_known, x, 0)), jnp.sum(is_known).astype(x.dtype))

    returns = episodes.returns
    return {
        "eval/return_sum": jnp.mean(jnp.sum(returns, axis=-1)),
        "eval/return_mean": jnp.mean(returns),
        **{f"eval/return/{agent}": jnp.mean(returns[:, i]) for i, agent in enumerate(spec.agents)},
        "eval/episode_length": jnp.mean(episodes.length.astype(jnp.float32)),
        **{name: mean_known(x) for name, x in info_metrics("eval/", episodes.info).items()},
    }


def info_metrics(prefix: str, info: Mapping[str, Any]) -> dict[str, Any]:
    """An environment's info under names of the log that are never those of what jmarl measures.

    "won" is PREFIXwon, and {"foe": {"lives": 2.0}} is PREFIXfoe/lives. A name whose first part is return_sum,
    return_mean, return, episode_length or info is kept below PREFIXinfo/.

    >>> sorted(info_metrics("eval/", {"won": 1, "return_sum": 2, "foe": {"lives": 3}}))
    ['eval/foe/lives', 'eval/info/return_sum', 'eval/won']
    """
    flat = flat_info(info)
    return {f"{prefix}{'info/' if name.split('/')[0] in _MEASURED else ''}{name}": x for name, x in flat.items()}


def flat_info(info: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of nested dicts, their names joined by "/".

    >>> flat_info({"foe": {"lives": 3, "armour": 0.5}, "won": True})
    {'foe/lives': 3, 'foe/armour': 0.5, 'won': True}
    """
    flat: dict[str, Any] = {}
    for name, value in info.items():
        inner = flat_info(value) if isinstance(value, Mapping) else {"": value}
        flat |= {f"{name}/{below}" if below else str(name): x for below, x in inner.items()}
    return flat


def all_finite(state: Any) -> Bool[Array, ""]:
    """Whether all parameters are finite, in a `TrainState` or in a tuple of them."""
    learnt = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, TrainState))
    params = [x for s in learnt for x in jax.tree.leaves(s.params if isinstance(s, TrainState) else s)]
    finite = [jnp.isfinite(x).all() for x in params if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    return jnp.stack(finite).all() if finite else jnp.bool_(True)


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
        each = zip(learners, jax.random.split(keys.as_key(key), len(learners)), strict=True)
        return tuple(learner.init(k) for learner, k in each)

    def init_carry(batch_shape):
        return tuple(learner.init_carry(batch_shape) for learner in learners)

    def act(state, carry, obs, first, key):
        each = zip(learners, state, carry, jax.random.split(key, len(learners)), strict=True)
        actions, carry, told = zip(*[learner.act(s, c, obs, first, k) for learner, s, c, k in each], strict=True)
        measured = {f"{i}/{name}": x for i, by_name in enumerate(told) for name, x in by_name.items()}
        return choose(actions), carry, measured

    def greedy(state, carry, obs, first):
        each = zip(learners, state, carry, strict=True)
        actions, carry = zip(*[learner.greedy(s, c, obs, first) for learner, s, c in each], strict=True)
        return choose(actions), carry

    def update(state, batch, key):
        raise TypeError("teams play and do not learn: train each learner in its own loop.")

    return Learner(init, init_carry, act, greedy, update)
