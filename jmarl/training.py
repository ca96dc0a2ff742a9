"""From an environment and an algorithm to a trained policy, in pure functions: rollouts, loops, whole runs, sweeps."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from jmarl import evaluation, parallel
from jmarl.types import Algorithm, Buffer, Env, EpisodeStats, Learner, Loop, Metrics, RunState, Trajectory, Transition

__all__ = ["make_train", "off_policy", "on_policy", "rollout", "start", "sweep", "where_last"]

# ------------------------------------------------------------------------------------------------------ rollouts


def start(env: Env, learner: Learner, key: PRNGKeyArray, *, num_envs: int) -> RunState:
    """A run before its first step: a fresh learner in `num_envs` fresh environments."""
    key, key_learner, key_env = jax.random.split(key, 3)
    env_state, obs = jax.vmap(env.reset)(jax.random.split(key_env, num_envs))
    return RunState(
        train_state=learner.init(key_learner),
        env_state=env_state,
        obs=obs,
        first=jnp.ones(num_envs, bool),
        carry=learner.init_carry((num_envs,)),
        episodes=EpisodeStats(
            returns=jnp.zeros((num_envs, env.spec.num_agents)), length=jnp.zeros(num_envs, jnp.int32)
        ),
        key=key,
    )


def rollout(
    env: Env, learner: Learner, run: RunState, *, length: int, num_resets: int | None = None
) -> tuple[RunState, Trajectory, Metrics]:
    """Acts for `length` steps in every environment; episodes that end are reset, and their true last view is kept.

    Args:
      env: the environment.
      learner: acts with `run.train_state`.
      run: where to go on.
      length: T, steps in each environment.
      num_resets: start states drawn in advance for each environment. The default suffices for the shortest possible
        episodes; where resets are dear, draw a few: an environment that needs more uses them in turn.

    Returns:
      The run after the rollout (nothing learnt yet), its steps `[T, B, ..]` with the carry before them, and metrics of
      the episodes that finished: NaN if none did.
    """
    num_envs = run.first.shape[0]
    if num_resets is not None:
        require_positive(length=length, num_resets=num_resets)
    num_resets = math.ceil(length / env.spec.min_steps) if num_resets is None else num_resets
    # All keys and start states are drawn at once, outside the scan: many small draws are slow to compile and to run.
    sizes = 1, length, length * num_envs, num_resets * num_envs
    drawn = jax.random.split(run.key, sum(sizes))
    key, keys_act, keys_env, keys_reset = jnp.split(drawn, np.cumsum(sizes)[:-1])
    starts = jax.vmap(env.reset)(keys_reset)
    starts = jax.tree.map(lambda x: x.reshape(num_resets, num_envs, *x.shape[1:]), starts)
    keys = keys_act, keys_env.reshape(length, num_envs)

    def fresh(num_ended):
        """Each environment's next start state."""
        if num_resets == 1:
            return jax.tree.map(lambda x: x[0], starts)
        index = num_ended % num_resets, jnp.arange(num_envs)
        return jax.tree.map(lambda x: x.at[index].get(mode="promise_in_bounds"), starts)

    def step(state, keys):
        env_state, obs, first, carry, num_ended = state
        key_act, keys_env = keys
        action, carry, extras = learner.act(run.train_state, carry, obs, first, key_act)
        next_env_state, next_obs, outcome = jax.vmap(env.step)(env_state, action, keys_env)
        transition = Transition(
            obs=obs,
            first=first,
            action=action,
            reward=outcome.reward,
            terminated=outcome.terminated,
            last=outcome.last,
            next_obs=next_obs,
            extras=extras,
        )
        env_state, obs = where_last(outcome.last, fresh(num_ended), (next_env_state, next_obs))
        return (env_state, obs, outcome.last, carry, num_ended + outcome.last), (transition, outcome.info)

    state = run.env_state, run.obs, run.first, run.carry, jnp.zeros(num_envs, jnp.int32)
    (env_state, obs, first, carry, _), (steps, info) = jax.lax.scan(step, state, keys)
    episodes, metrics = _count_episodes(run.episodes, steps.reward, steps.last, info)
    trajectory = Trajectory(steps=steps, carry=run.carry)
    run = dataclasses.replace(
        run,
        train_state=dataclasses.replace(run.train_state, env_steps=_count_on(run.env_steps, length * num_envs)),
        env_state=env_state,
        obs=obs,
        first=first,
        carry=carry,
        episodes=episodes,
        key=key[0],
    )
    return run, trajectory, metrics


def _count_on(count: Array, num: int) -> Array:
    """count + num, but never past the largest int32: schedules of exploration would begin anew."""
    return jnp.minimum(count, jnp.iinfo(count.dtype).max - num) + num


def where_last(last: Array, ended: Any, going_on: Any) -> Any:
    """Leaf by leaf, the rows of `ended` where `last` `[B]`, those of `going_on` elsewhere."""

    def select(x, y):
        return jnp.where(last.reshape(last.shape + (1,) * (y.ndim - last.ndim)), x, y)

    return jax.tree.map(select, ended, going_on)


def _count_episodes(episodes: EpisodeStats, reward: Array, last: Array, info: dict[str, Any]):
    """Means over the episodes that finished. No scan: a sum over finished episodes is one over the steps before."""
    over = jax.lax.cummax(last.astype(jnp.int8), axis=0, reverse=True) > 0  # a last step is here or still to come
    finished = over[0]
    returns = episodes.returns + jnp.sum(reward, axis=0)
    returns_over = jnp.where(finished[:, None], episodes.returns, 0) + jnp.sum(reward * over[..., None], axis=0)
    length = episodes.length + len(reward)
    length_over = jnp.where(finished, episodes.length, 0) + jnp.sum(over, axis=0)

    num = jnp.sum(last)
    mean = lambda total: jnp.where(num > 0, total / jnp.maximum(num, 1), jnp.nan)  # noqa: E731
    agent_returns = mean(jnp.sum(returns_over, axis=0))
    metrics = {
        "train/return_sum": jnp.sum(agent_returns),
        "train/return_mean": jnp.mean(agent_returns),
        "train/episode_length": mean(jnp.sum(length_over)),
        **{name: mean(jnp.sum(x * last)) for name, x in evaluation.info_metrics("train/", info).items()},
    }
    return EpisodeStats(returns=returns - returns_over, length=length - length_over), metrics


# --------------------------------------------------------------------------------------------------------- loops

_ENVS_OF_A_ROLLOUT = Trajectory(steps=1, carry=0)  # type: ignore[arg-type]  # axes


def on_policy(
    env: Env, algorithm: Algorithm, *, num_envs: int, rollout_length: int, num_resets: int | None = None
) -> Loop:
    """Act for `rollout_length` steps in `num_envs` environments, learn from them, throw them away.

    Args:
      env: the environment.
      algorithm: such as `jmarl.mappo`.
      num_envs: B, environments stepped side by side.
      rollout_length: T, steps in each of them between two updates.
      num_resets: see `rollout`.
    """
    require_positive(num_envs=num_envs, rollout_length=rollout_length)

    def init(key, cfg):
        learner = algorithm(env.spec, cfg)
        if learner.learns_from == "replay":
            raise ValueError(f"{_name(algorithm)} learns from replay: run it with off_policy and a buffer.")
        return start(env, learner, key, num_envs=num_envs)

    def step(run, cfg):
        learner = algorithm(env.spec, cfg)
        run, batch, metrics = rollout(env, learner, run, length=rollout_length, num_resets=num_resets)
        key, key_update = jax.random.split(run.key)
        update = parallel.together(learner.update, (None, _ENVS_OF_A_ROLLOUT, None))
        state, learning = update(run.train_state, batch, key_update)
        return run.replace(train_state=state, key=key), {**metrics, **learning}

    return Loop(init, step, env, algorithm, num_envs * rollout_length)


def off_policy(
    env: Env,
    algorithm: Algorithm,
    *,
    buffer: Buffer,
    num_envs: int,
    rollout_length: int,
    num_updates: int = 1,
    warmup_steps: int = 0,
    num_resets: int | None = None,
) -> Loop:
    """Act for `rollout_length` steps in `num_envs` environments, remember them, learn from what is remembered.

    Args:
      env: the environment.
      algorithm: such as `jmarl.qmix`.
      buffer: replay, such as `jmarl.buffers.uniform(capacity=5000, batch_size=32)`.
      num_envs: B, environments stepped side by side.
      rollout_length: T, steps in each of them between two rounds of learning.
      num_updates: batches learnt from in each round.
      warmup_steps: environment steps collected before the first round, by the untrained learner as it explores.
      num_resets: see `rollout`.
    """
    require_positive(num_envs=num_envs, rollout_length=rollout_length, num_updates=num_updates)
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps={warmup_steps} must not be negative: 0 is no warm-up.")
    steps_per_round = num_envs * rollout_length

    def act(learner, run):
        return rollout(env, learner, run, length=rollout_length, num_resets=num_resets)

    def collect(learner, run):
        run, trajectory, metrics = act(learner, run)
        return dataclasses.replace(run, buffer=buffer.add(run.buffer, trajectory)), metrics

    def init(key, cfg):
        learner = algorithm(env.spec, cfg)
        if learner.learns_from == "rollouts":
            raise ValueError(f"{_name(algorithm)} learns from rollouts that it has just made: run it with on_policy.")
        run = start(env, learner, key, num_envs=num_envs)
        _, example, _ = jax.eval_shape(lambda run: act(learner, run), run)
        run = dataclasses.replace(run, buffer=buffer.init(example))
        # Here rather than in `step`: a buffer that enters a `cond` is copied in every iteration.
        num_rounds = math.ceil(warmup_steps / steps_per_round)
        return jax.lax.fori_loop(0, num_rounds, lambda _, run: collect(learner, run)[0], run)

    def step(run, cfg):
        learner = algorithm(env.spec, cfg)
        run, trajectory, metrics = act(learner, run)
        keys = jax.random.split(run.key, 1 + 2 * num_updates)

        def learn(carry, keys):
            state, memory = carry
            batch: Any = buffer.sample(memory, keys[0])
            state, learning = learner.update(state, batch, keys[1])
            if buffer.set_priority is not None:
                memory = buffer.set_priority(memory, batch.index, learning["priority"])
            learning.pop("priority", None)
            return (state, memory), learning

        def remember_and_learn(state, memory, trajectory, keys):
            return jax.lax.scan(learn, (state, buffer.add(memory, trajectory)), keys)

        (state, memory), learning = parallel.together(remember_and_learn, (None, None, _ENVS_OF_A_ROLLOUT, None))(
            run.train_state, run.buffer, trajectory, keys[1:].reshape(num_updates, 2)
        )
        learning = jax.tree.map(lambda x: jnp.mean(x, axis=0), learning)
        return run.replace(train_state=state, buffer=memory, key=keys[0]), {**metrics, **learning}

    return Loop(init, step, env, algorithm, steps_per_round, num_updates)


def _name(algorithm: Algorithm) -> str:
    return getattr(algorithm, "__name__", "this algorithm")


def make_train(loop: Loop, num_iterations: int):
    """`train(key, cfg) -> (RunState, Metrics [num_iterations])`: a whole run as one function, to be jitted and vmapped.

    >>> from jmarl import PPOConfig, envs, ippo
    >>> loop = on_policy(envs.matrix_game([[1.0, 0.0], [0.0, 0.0]]), ippo, num_envs=4, rollout_length=4)
    >>> run, metrics = jax.jit(make_train(loop, 3))(jax.random.key(0), PPOConfig(hidden_sizes=(8,)))
    >>> metrics["train/return_sum"].shape, int(run.env_steps)
    ((3,), 48)
    """
    require_positive(num_iterations=num_iterations)

    def train(key, cfg):
        cfg = with_horizon(loop, cfg, num_iterations)
        return jax.lax.scan(lambda run, _: loop.step(run, cfg), loop.init(key, cfg), length=num_iterations)

    return train


def with_horizon(loop: Loop, cfg: Any, num_iterations: int) -> Any:
    """Schedules end with the run unless the config says otherwise."""
    is_open = getattr(cfg, "horizon", 0) is None
    return cfg.replace(horizon=num_iterations * loop.updates_per_iteration) if is_open else cfg


def sweep(cfg: Any, **values: Any) -> tuple[Any, Any]:
    """A config whose named leaves hold one value for each run of a sweep, and the `in_axes` to vmap over it.

    Several names are swept together: run i takes the i-th value of each.

    >>> from jmarl import PPOConfig
    >>> cfgs, axes = sweep(PPOConfig(), learning_rate=[1e-4, 1e-3], gamma=[0.9, 0.99])
    >>> cfgs.learning_rate.shape, axes.learning_rate, axes.clip_eps
    ((2,), 0, None)
    """
    for name, value in values.items():
        if not np.ndim(value):
            raise ValueError(f"{name}={value} is one value, and a sweep is over several: give a list of them.")
    sizes = {name: len(value) for name, value in values.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"sweep needs equally many values of each hyperparameter, got {sizes}.")
    leaves = {field for field in cfg.__dataclass_fields__ if _is_leaf(cfg, field)}
    for name in values:
        if name not in leaves:
            raise ValueError(
                f"{name} is not a numeric hyperparameter of {type(cfg).__name__}, so it cannot vary inside one "
                f"compilation: sweep over it with a Python loop, or choose one of {', '.join(sorted(leaves))}."
            )
    arrays = {name: jnp.asarray(value) for name, value in values.items()}
    none = {name: None for name in leaves}
    return cfg.replace(**arrays), cfg.replace(**none).replace(**dict.fromkeys(values, 0))


def _is_leaf(cfg: Any, field: str) -> bool:
    return cfg.__dataclass_fields__[field].metadata.get("pytree_node", True)


def swept_values(cfg: Any, axes: Any) -> dict[str, Array]:
    """The values `[num_settings]` of each hyperparameter that `sweep` varies."""
    names = [] if axes is None else [name for name in cfg.__dataclass_fields__ if _is_leaf(cfg, name)]
    return {name: getattr(cfg, name) for name in names if getattr(axes, name) == 0}


def require_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
