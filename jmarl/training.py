"""From an environment and an algorithm to a trained policy, in pure functions: rollouts, loops, whole runs, sweeps."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from jmarl import configs, evaluation, exploration, keys, masks, metrics, parallel
from jmarl.deprecation import renamed_arguments
from jmarl.envs.flags import usual_promotion
from jmarl.learners import checks
from jmarl.types import (
    Algorithm,
    Buffer,
    Config,
    Env,
    EnvSpec,
    EpisodeStats,
    Learner,
    Loop,
    Metrics,
    Observation,
    RunState,
    TrainState,
    Trajectory,
    Transition,
)

__all__ = [
    "data_parallel",
    "init_state",
    "make_train",
    "off_policy",
    "on_policy",
    "rollout",
    "start",
    "sweep",
    "where_last",
    "with_horizon",
]

_SHORT = 8  # steps of an episode; of shorter ones each has a start state of its own

# ------------------------------------------------------------------------------------------------------ rollouts


@usual_promotion
def start(env: Env, learner: Learner, key: PRNGKeyArray, *, num_envs: int) -> RunState:
    """A run before its first step: a fresh learner in `num_envs` fresh environments, and a count of their steps."""
    key, key_learner, key_env = jax.random.split(keys.as_key(key), 3)
    begun = _first_episodes(env, learner, key_env, num_envs)
    return RunState(train_state=init_state(learner, key_learner), key=key, **begun)


def _first_episodes(env: Env, learner: Learner, key: PRNGKeyArray, num_envs: int) -> dict[str, Any]:
    env_state, obs = jax.vmap(env.reset)(jax.random.split(key, num_envs))
    return {
        "env_state": env_state,
        "obs": masks.readable(obs),
        "first": jnp.ones(num_envs, bool),
        "carry": learner.init_carry((num_envs,)),
        "episodes": EpisodeStats(
            returns=jnp.zeros((num_envs, env.spec.num_agents)),
            length=jnp.zeros(num_envs, jnp.int32),
            is_over=jnp.zeros((num_envs, env.spec.num_agents), bool),
        ),
    }


@usual_promotion
def begin_anew(loop: Loop, run: RunState, cfg: Any) -> RunState:
    """A run that goes on with what it has learnt, in new episodes: those under way were not kept."""
    key, key_env = jax.random.split(run.key)
    learner = loop.algorithm(loop.env.spec, cfg)
    return run.replace(key=key, **_first_episodes(loop.env, learner, key_env, len(run.first)))


def init_state(learner: Learner, key: PRNGKeyArray) -> TrainState:
    """What a learner knows before its first step, with a count of environment steps, on which exploration depends."""
    return learner.init(keys.as_key(key)).replace(env_steps=jnp.int32(0))


@usual_promotion
def rollout(
    env: Env, learner: Learner, run: RunState, *, length: int, num_resets: int | None = None
) -> tuple[RunState, Trajectory, Metrics]:
    """Acts for `length` steps in every environment; episodes that end are reset, and their true last view is kept.

    Args:
      env: the environment.
      learner: acts with `run.train_state`.
      run: where to go on.
      length: T, steps in each environment.
      num_resets: start states drawn in advance for each environment, which uses them in turn where it needs more. By
        default as many as episodes of `EnvSpec.min_steps` need, but of 8 steps at least where `max_steps` is larger.

    Returns:
      The run after the rollout (nothing learnt yet); its steps `[T, B, ..]`, with what was remembered before each and
      whose step counts (see `jmarl.masks`); and metrics of the episodes that finished: NaN if none did.
    """
    num_envs = run.first.shape[0]
    if num_resets is not None:
        require_positive(length=length, num_resets=num_resets)
    num_resets = _enough_resets(env.spec, length) if num_resets is None else num_resets
    if env.restart is not None:
        num_resets = 0
    # All keys and start states are drawn at once, outside the scan: many small draws are slow to compile and to run.
    sizes = 1, length, length * num_envs, num_resets * num_envs
    drawn = jax.random.split(run.key, sum(sizes))
    key, keys_act, keys_env, keys_reset = jnp.split(drawn, np.cumsum(sizes)[:-1])
    next_start = _next_start(env, keys_reset.reshape(num_resets, num_envs))
    keys_of_steps = keys_act, keys_env.reshape(length, num_envs)

    def as_known(obs):
        everybody = jnp.ones(obs.agent_mask.shape, bool)
        return dataclasses.replace(obs, agent_mask=everybody) if env.spec.always_act else obs

    def step(state, keys_of_step):
        env_state, obs, first, carry, num_ended = state
        key_act, keys_env = keys_of_step
        action, next_carry, measured = learner.act(run.train_state, carry, obs, first, key_act)
        next_env_state, next_obs, outcome = jax.vmap(env.step)(env_state, action, keys_env)
        next_obs = masks.readable(as_known(next_obs))
        transition = Transition(
            obs=obs,
            carry=carry,
            first=first,
            action=action,
            reward=outcome.reward,
            terminated=outcome.terminated,
            last=outcome.last,
            shaped_reward=outcome.shaped_reward,
            next_obs=next_obs,
            measured=measured,
        )
        env_state, obs = where_last(outcome.last, next_start(num_ended, next_env_state), (next_env_state, next_obs))
        return (env_state, obs, outcome.last, next_carry, num_ended + outcome.last), (transition, outcome.info)

    state = run.env_state, run.obs, run.first, run.carry, jnp.zeros(num_envs, jnp.int32)
    (env_state, obs, first, carry, _), (steps, info) = jax.lax.scan(step, state, keys_of_steps)
    # Once more, since a mask that went through the scan is no longer a constant to the compiler.
    steps = dataclasses.replace(steps, obs=as_known(steps.obs), next_obs=as_known(steps.next_obs))
    counts, is_over = steps.obs.agent_mask, run.episodes.is_over
    may_wait = env.spec.may_wait and not env.spec.always_act
    if may_wait:
        was_over, is_over = masks.over(is_over, counts, steps.terminated, steps.first, steps.last)
        counts = counts | ~was_over
    reward = jnp.where(counts | jnp.isfinite(steps.reward), steps.reward, 0.0)
    steps = dataclasses.replace(steps, reward=reward)
    returns, steps_so_far, measured = _count_episodes(
        run.episodes, steps.reward, steps.last, info, env.spec.agents if env.spec.teams else ()
    )
    trajectory = Trajectory(steps=steps, carry=run.carry, next_carry=carry, weight=counts if may_wait else None)
    env_steps = _count_on(exploration.count(run.train_state), length * num_envs)
    run = dataclasses.replace(
        run,
        train_state=dataclasses.replace(run.train_state, env_steps=env_steps),
        env_state=env_state,
        obs=obs,
        first=first,
        carry=carry,
        episodes=EpisodeStats(returns=returns, length=steps_so_far, is_over=is_over),
        key=key[0],
    )
    return run, trajectory, {**measured, **_faults(steps, counts)}


def _enough_resets(spec: EnvSpec, length: int) -> int:
    """Start states for `length` steps. One for each step often takes longer than all steps, thrice in Hanabi."""
    is_short = spec.max_steps is not None and spec.max_steps <= _SHORT
    return math.ceil(length / (spec.min_steps if is_short else max(spec.min_steps, _SHORT)))


def _next_start(env: Env, keys_reset: Array) -> Callable[[Array, Any], tuple[Any, Observation]]:
    """`(num_ended, ended_state) -> (env_state, obs)`: what each environment goes on with after its episode's end."""
    if env.restart is not None:
        restart = jax.vmap(env.restart)
        return lambda num_ended, ended_state: restart(ended_state)
    num_resets, num_envs = keys_reset.shape
    starts = jax.vmap(jax.vmap(env.reset))(keys_reset)

    def drawn(num_ended, ended_state):
        if num_resets == 1:
            return jax.tree.map(lambda x: x[0], starts)
        index = num_ended % num_resets, jnp.arange(num_envs)
        return jax.tree.map(lambda x: x.at[index].get(mode="promise_in_bounds"), starts)

    return drawn


def _faults(steps: Transition, counts: Array) -> Metrics:
    """How many rewards that count, and views of those who act, are no numbers: an environment's fault."""
    acts, views = steps.obs.agent_mask, steps.obs.agents
    is_seen = jnp.isfinite(views).all(tuple(range(acts.ndim, views.ndim)))
    return {
        "env/nonfinite_rewards": jnp.sum(counts & ~jnp.isfinite(steps.reward), dtype=jnp.float32),
        "env/nonfinite_views": jnp.sum(acts & ~is_seen, dtype=jnp.float32),
    }


def _count_on(count: Array, num: int) -> Array:
    """count + num, but never past the largest int32: schedules of exploration would begin anew."""
    return jnp.minimum(count, jnp.iinfo(count.dtype).max - num) + num


def where_last(last: Array, ended: Any, going_on: Any) -> Any:
    """Leaf by leaf, the rows of `ended` where `last` `[B]`, those of `going_on` elsewhere."""

    def select(x, y):
        return jnp.where(last.reshape(last.shape + (1,) * (y.ndim - last.ndim)), x, y)

    return jax.tree.map(select, ended, going_on)


def _count_episodes(
    episodes: EpisodeStats, reward: Array, last: Array, info: Mapping[str, Any], names: tuple[str, ...] = ()
) -> tuple[Array, Array, Metrics]:
    """Returns and lengths of the episodes under way, and means over those that finished; of each of `names`, too.

    No scan: a sum over finished episodes is one over the steps before. Each reward is added up where it belongs, so one
    that is huge, or no number, is gone with its episode.
    """
    over = jax.lax.cummax(last.astype(jnp.int8), axis=0, reverse=True) > 0  # a last step is here or still to come
    finished, of_finished = over[0], over[..., None]
    total = jnp.where(finished[:, None], episodes.returns, 0) + jnp.sum(jnp.where(of_finished, reward, 0), axis=0)
    returns = jnp.where(finished[:, None], 0, episodes.returns) + jnp.sum(jnp.where(of_finished, 0, reward), axis=0)
    length = episodes.length + len(reward)
    total_length = jnp.where(finished, episodes.length, 0) + jnp.sum(over, axis=0, dtype=jnp.int32)

    num = jnp.sum(last)
    measured = {
        "train/return_sum": metrics.mean(jnp.sum(total), num),
        "train/return_mean": metrics.mean(jnp.mean(jnp.sum(total, axis=0)), num),
        "train/episode_length": metrics.mean(jnp.sum(total_length), num),
    }
    measured |= {f"train/return/{name}": metrics.mean(jnp.sum(total[:, i]), num) for i, name in enumerate(names)}
    told = evaluation.info_metrics("train/", info)
    measured |= {name: metrics.mean(jnp.sum(jnp.where(last, x, 0)), num) for name, x in told.items()}
    return returns, length - total_length, measured


# --------------------------------------------------------------------------------------------------------- loops

_ENVS_OF_A_ROLLOUT = Trajectory(steps=1, carry=0, next_carry=0, weight=1)  # type: ignore[arg-type]  # axes


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

    @usual_promotion
    def init(key, cfg):
        learner = algorithm(env.spec, cfg)
        if learner.learns_from == "replay":
            raise ValueError(f"{_name(algorithm)} learns from replay: run it with off_policy and a buffer.")
        return start(env, learner, key, num_envs=num_envs)

    @usual_promotion
    def step(run, cfg):
        learner = algorithm(env.spec, cfg)
        run, batch, acting = rollout(env, learner, run, length=rollout_length, num_resets=num_resets)
        key, key_update = jax.random.split(run.key)
        update = parallel.together(learner.update, (None, _ENVS_OF_A_ROLLOUT, None))
        state, learning = update(run.train_state, batch, key_update)
        return run.replace(train_state=state, key=key), {**acting, **learning}

    settings = {"num_envs": num_envs, "rollout_length": rollout_length, "num_resets": num_resets}
    return Loop(init, step, env, algorithm, num_envs * rollout_length, settings=settings)


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
    buffer = buffer if buffer.for_env is None else buffer.for_env(env.spec)

    def act(learner, run):
        return rollout(env, learner, run, length=rollout_length, num_resets=num_resets)

    def collect(learner, run):
        run, trajectory, _ = act(learner, run)
        return dataclasses.replace(run, buffer=buffer.add(run.buffer, trajectory))

    @usual_promotion
    def init(key, cfg):
        learner = algorithm(env.spec, cfg)
        if learner.learns_from == "rollouts":
            raise ValueError(f"{_name(algorithm)} learns from rollouts that it has just made: run it with on_policy.")
        run = start(env, learner, key, num_envs=num_envs)
        _, example, _ = jax.eval_shape(lambda run: act(learner, run), run)
        run = dataclasses.replace(run, buffer=buffer.init(example))
        # Here rather than in `step`: a buffer that enters a `cond` is copied in every iteration.
        num_rounds = math.ceil(warmup_steps / steps_per_round)
        return jax.lax.fori_loop(0, num_rounds, lambda _, run: collect(learner, run), run)

    @usual_promotion
    def step(run, cfg):
        learner = algorithm(env.spec, cfg)
        run, trajectory, acting = act(learner, run)
        drawn = jax.random.split(run.key, 1 + 2 * num_updates)

        def learn(carry, keys_of_update):
            state, memory = carry
            batch: Any = buffer.sample(memory, keys_of_update[0])
            state, learning = learner.update(state, batch, keys_of_update[1])
            if buffer.set_priority is not None:
                memory = buffer.set_priority(memory, batch.index, learning["priority"])
            learning.pop("priority", None)
            return (state, memory), learning

        def remember_and_learn(state, memory, trajectory, keys_of_updates):
            return jax.lax.scan(learn, (state, buffer.add(memory, trajectory)), keys_of_updates)

        (state, memory), learning = parallel.together(remember_and_learn, (None, None, _ENVS_OF_A_ROLLOUT, None))(
            run.train_state, run.buffer, trajectory, drawn[1:].reshape(num_updates, 2)
        )
        learning = jax.tree.map(lambda x: jnp.mean(x, axis=0), learning)
        return run.replace(train_state=state, buffer=memory, key=drawn[0]), {**acting, **learning}

    settings = {"num_envs": num_envs, "rollout_length": rollout_length, "num_resets": num_resets}
    settings |= {"num_updates": num_updates, "warmup_steps": warmup_steps, **buffer.settings}
    return Loop(init, step, env, algorithm, steps_per_round, num_updates, settings)


def data_parallel(loop: Loop, num_parts: int) -> Loop:
    """A run of several parts that learn one thing, for `jmarl.run(..., shard="parts")`: each device has some of them.

    Each part has environments, rollouts, replay and minibatches of its own, those of `loop`. In every optimiser step
    the gradients of all parts are averaged, and so are moments by which advantages, values or views are normalised.
    So `num_parts` times as much is learnt from. It is not to the digit what `loop` makes of as many environments:
    minibatches are shuffled within a part, and a mean over what counts is taken in each part first. What comes out
    depends on the number of parts, but not on where they are: without `shard` all of them are on one device.

    Args:
      loop: of one part.
      num_parts: how many.

    Raises:
      ValueError: an environment outside of jax. Tracing raises it for an algorithm whose parts do not agree.

    >>> from jmarl import PPOConfig, envs, ippo
    >>> loop = on_policy(envs.matrix_game([[1.0, 0.0], [0.0, 0.0]]), ippo, num_envs=4, rollout_length=4)
    >>> run, _ = jax.jit(make_train(data_parallel(loop, 2), 3))(jax.random.key(0), PPOConfig(hidden_sizes=(8,)))
    >>> run.first.shape, int(run.env_steps)
    ((8,), 96)
    """
    require_positive(num_parts=num_parts)
    if loop.env.restart is not None:
        raise ValueError(
            f"{loop.env.spec.name} steps outside of jax, on one device: leave data_parallel, or --parts, out."
        )
    of_environments = "env_state", "obs", "first", "carry", "episodes"

    def reshaped(run, reshape):
        return run.replace(**{name: jax.tree.map(reshape, getattr(run, name)) for name in of_environments})

    def joined(run):
        return reshaped(run, lambda x: x.reshape(-1, *x.shape[2:]))

    @usual_promotion
    def init(key, cfg):
        key, key_learner, key_parts = jax.random.split(keys.as_key(key), 3)
        run = jax.vmap(lambda key: loop.init(key, cfg))(parallel.of_device(jax.random.split(key_parts, num_parts)))
        state = init_state(loop.algorithm(loop.env.spec, cfg), key_learner)
        warmup_steps = exploration.count(run.train_state)[0]  # of each part
        state = state.replace(env_steps=num_parts * warmup_steps)
        return joined(run).replace(train_state=state, key=key)

    @usual_promotion
    def step(run, cfg):
        key, key_parts = jax.random.split(run.key)
        keys_of_parts = parallel.of_device(jax.random.split(key_parts, num_parts))
        parts = reshaped(run, lambda x: x.reshape(len(keys_of_parts), -1, *x.shape[1:]))

        def part(mine, key):
            mine, measured = loop.step(mine.replace(train_state=run.train_state, key=key), cfg)
            return mine.train_state, mine.replace(train_state=(), key=()), measured

        learn = parallel.side_by_side(part, out_axes=(None, 0, 0))
        try:
            state, parts, measured = learn(parts.replace(train_state=(), key=()), keys_of_parts)
        except ValueError as error:
            if "out_axes" not in str(error):
                raise
            raise ValueError(
                f"{_name(loop.algorithm)} learns something on which parts do not agree, so it cannot be trained by "
                f"data_parallel: average it with jmarl.parallel.averaged, or choose shard='envs'."
            ) from error
        steps_of_others = (num_parts - 1) * loop.env_steps_per_iteration
        state = state.replace(env_steps=_count_on(exploration.count(state), steps_of_others))
        return joined(parts).replace(train_state=state, key=key), _mean_of_parts(measured)

    settings = loop.settings | {"num_parts": num_parts}
    steps = num_parts * loop.env_steps_per_iteration
    return loop._replace(init=init, step=step, env_steps_per_iteration=steps, settings=settings)


def _mean_of_parts(measured: Metrics) -> Metrics:
    """Over those in which a metric was measured."""
    names = sorted(measured)
    values = jnp.stack([measured[name] for name in names], axis=-1)
    is_measured = metrics.is_measured(names, values)
    total, num = parallel.summed((jnp.where(is_measured, values, 0).sum(0), is_measured.sum(0)))
    return dict(zip(names, metrics.mean(total, num), strict=True))


def _name(algorithm: Algorithm) -> str:
    return getattr(algorithm, "__name__", "this algorithm")


@renamed_arguments(num_steps="num_iterations")
def make_train(loop: Loop, num_iterations: int) -> Callable[[PRNGKeyArray, Config], tuple[RunState, Metrics]]:
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


def with_horizon(loop: Loop, cfg: Config, num_iterations: int) -> Any:
    """Schedules end with the run unless the config says otherwise."""
    if not configs.is_config(cfg):
        return cfg
    open_ends = [
        name for name, _ in configs.fields(cfg) if name.split(".")[-1] == "horizon" and configs.get(cfg, name) is None
    ]
    return configs.replace(cfg, dict.fromkeys(open_ends, num_iterations * loop.updates_per_iteration))


def sweep(cfg: Config, **values: Any) -> tuple[Any, Any]:
    """A config whose named leaves hold one value for each run of a sweep, and the `in_axes` to vmap over it.

    Several names are swept together: run i takes the i-th value of each. A config within a config has dotted names:
    `sweep(cfg, **{"inner.learning_rate": [1e-4, 1e-3]})`.

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
    leaves = configs.leaves(cfg)
    for name in values:
        if name not in leaves:
            raise ValueError(
                f"{name} is not a numeric hyperparameter of {type(cfg).__name__}, so it cannot vary inside one "
                f"compilation: sweep over it with a Python loop, or choose one of {', '.join(sorted(leaves))}."
            )
    known = {name: np.asarray(value) for name, value in values.items() if not isinstance(value, jax.core.Tracer)}
    for row in zip(*known.values(), strict=True):
        checks.validate(configs.replace(cfg, dict(zip(known, row, strict=True))))
    arrays = {name: jnp.asarray(value) for name, value in values.items()}
    axes = configs.replace(cfg, dict.fromkeys(leaves))
    return configs.replace(cfg, arrays), configs.replace(axes, dict.fromkeys(values, 0))


def swept_values(cfg: Config, axes: Any) -> dict[str, Array]:
    """The values `[num_settings]` of each hyperparameter that `sweep` varies, by dotted name."""
    names = [] if axes is None else [name for name, axis in configs.leaves(axes).items() if axis == 0]
    return {name: configs.get(cfg, name) for name in names}


def require_positive(**values: int) -> None:
    """Refuses what is counted and is not there, and what is no whole number."""
    for name, value in values.items():
        if not isinstance(value, int | np.integer) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r} must be a whole number, such as {name}=8.")
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
