"""One experiment: trains an algorithm on an environment with many seeds, and fills a run folder."""

import contextlib
import dataclasses
import io
import math
import re
import secrets
import shlex
import shutil
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import safetensors  # noqa: F401, so that it is missed now rather than after the training
from rich.console import Console
from rich.table import Table

import jmarl
from jmarl import presets
from jmarl.cli import options as command_line
from jmarl.cli import own, plotting, rendering, run_folders, statistics_of_runs
from jmarl.cli.errors import (
    LARGEST,
    Interrupted,
    UsageError,
    require_at_least_one,
    require_countable,
    require_seed,
)
from jmarl.logging import Sink
from jmarl.types import Env, Learner, Loop, RunState, TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The experiment."""

    env: str  # one of `jmarl envs`, or a function of your own: module:function or file.py:function
    preset: str = "default"  # default, or quick: a policy in seconds (vdn on MPE_simple_spread_v3)
    env_kwargs: tuple[str, ...] = ()  # KEY=VALUE for the environment, added to the preset's: map_name=2s3z
    seeds: int = 4  # independent repetitions, trained side by side
    seed: int = 0  # decides all randomness
    total_steps: int = 5_000_000  # environment steps of each seed; the warm-up of replay comes before them
    num_envs: int = 64  # environments side by side, per seed
    rollout_length: int = 128  # steps in each environment between two updates
    num_resets: int | None = None  # start states drawn per environment and rollout; None: one for 8 steps, if not fewer
    parts: int = 1  # that share environments, replay and batches, and average their gradients, on devices of their own
    log_every: int | None = None  # iterations between two rows of metrics; None: a hundredth of the run
    eval_episodes: int = 64  # greedy episodes of each evaluation, per seed; 0: no evaluation
    eval_every: int = 10  # rows of metrics between two evaluations; the last row has one in any case
    max_eval_steps: int | None = None  # of an episode of evaluation; None: the environment's own limit
    absolute_episodes: int | None = None  # of each seed's best parameters at the end; None: 10 x eval_episodes; 0: none
    devices: int | None = None  # that share the seeds; of a CPU, its cores; None: all that can have equally many
    shard: Literal["seeds", "envs", "parts"] = "seeds"  # what devices share: seeds, or environments or parts of each
    distributed: bool = False  # one of several processes that share the seeds, as srun starts them; needs --run-dir
    run_dir: Path | None = None  # a new folder for the results; None: runs/ALGORITHM-ENV-TIME
    checkpoint_every: float = 60.0  # seconds between two checkpoints, from which --resume goes on; 0: none
    keep_checkpoints: int = 3  # the last ones; jmarl tournament RUN --checkpoints lets them meet
    gif: bool = True  # draw one greedy episode
    tensorboard: bool = False  # write TensorBoard's files, too
    wandb: str | None = None  # send metrics to this project of Weights & Biases, too; WANDB_MODE=offline: later


class Built(NamedTuple):
    """What a command line describes."""

    env: Env
    eval_env: Env
    loop: Loop
    num_iterations: int
    config: Any
    learner: Learner


def options_of(preset: presets.Preset) -> Options:
    """The options of a preset."""
    options = Options(
        env=preset.env,
        env_kwargs=command_line.show_key_values(preset.env_kwargs),
        seeds=preset.num_seeds,
        total_steps=preset.total_steps,
        num_envs=preset.num_envs,
        rollout_length=preset.rollout_length,
        num_resets=preset.num_resets,
        eval_episodes=preset.eval_episodes,
        absolute_episodes=preset.absolute_episodes,
    )
    return with_replay(options, preset)


def with_replay(options: Any, preset: presets.Preset) -> Any:
    """A command's options, with those of replay where the preset has some."""
    if preset.replay is None:
        return options
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Options(type(options)):  # type: ignore[misc]
        buffer_size: int  # sequences kept, per seed
        batch_size: int  # sequences in a batch
        sequence_length: int  # steps of a sequence; 1: single transitions
        num_updates: int  # batches learnt from between two rollouts
        warmup_steps: int  # environment steps, per seed, before the first of them
        prioritized: bool  # sequences of large errors are drawn more often

    replay = preset.replay._asdict()
    return Options(**given, num_updates=replay.pop("num_updates"), **replay)


def make_loop(algorithm: str, env: Env, options: Any, *, num_envs: int) -> Loop:
    """The loop that the options describe: off-policy where they are `with_replay`."""
    common = {"num_envs": num_envs, "rollout_length": options.rollout_length, "num_resets": options.num_resets}
    if not hasattr(options, "buffer_size"):
        return jmarl.on_policy(env, own.find_algorithm(algorithm), **common)
    longest = env.spec.max_steps
    if longest is not None and options.sequence_length > longest:
        raise ValueError(
            f"sequence_length={options.sequence_length} is longer than an episode of {env.spec.name}, {longest} "
            f"steps: the rest would be padding. Choose {longest} or less."
        )
    make_buffer = jmarl.buffers.prioritized if options.prioritized else jmarl.buffers.uniform
    return jmarl.off_policy(
        env,
        own.find_algorithm(algorithm),
        buffer=make_buffer(options.buffer_size, options.batch_size, options.sequence_length),
        num_updates=options.num_updates,
        warmup_steps=options.warmup_steps,
        **common,
    )


def _loop_of_parts(algorithm: str, env: Env, options: Options) -> Loop:
    """The same of `options.parts` parts, each with its share of environments, replay and batches."""
    require_at_least_one(parts=options.parts)
    if options.parts == 1:
        return make_loop(algorithm, env, options, num_envs=options.num_envs)
    part = _of_a_part(options)
    return jmarl.data_parallel(make_loop(algorithm, env, part, num_envs=part.num_envs), options.parts)


def _of_a_part(options: Any) -> Any:
    """The options of one of several parts: its share of all that they share."""
    shared = [name for name in ("num_envs", "buffer_size", "batch_size", "warmup_steps") if hasattr(options, name)]
    for name in shared:
        if getattr(options, name) % options.parts:
            option = name.replace("_", "-")
            raise UsageError(
                f"--{option} {getattr(options, name)} cannot be shared equally by --parts {options.parts}: choose a "
                f"multiple."
            )
    shares = {name: getattr(options, name) // options.parts for name in shared}
    return dataclasses.replace(options, parts=1, **shares)


def shard_of(options: Options) -> str:
    """What devices share: of a single seed, which leaves nothing else to share, its parts."""
    return "parts" if options.parts > 1 and options.seeds == 1 and options.shard == "seeds" else options.shard


def make_envs(options: Options, env_kwargs: dict[str, Any]) -> tuple[Env, Env]:
    """Of training and of evaluation."""
    env = own.make_env(options.env, env_kwargs)
    if env.spec.max_steps is not None and env.spec.max_steps < 1:
        raise ValueError(
            f"Episodes of {options.env} have {env.spec.max_steps} steps: give it a time limit of at least 1."
        )
    eval_env = run_folders.plain_env(options.env, env_kwargs, options.max_eval_steps)
    if eval_env.spec.max_steps is None and options.eval_episodes:
        raise UsageError(f"{options.env} has no time limit, so an evaluation may last for ever: give --max-eval-steps.")
    return env, eval_env


def build(algorithm: str, options: Options, config: Any, env_kwargs: dict[str, Any]) -> Built:
    """Everything that is trained, with nothing computed yet: what does not fit together is refused here."""
    try:
        env, eval_env = make_envs(options, env_kwargs)
        loop = _loop_of_parts(algorithm, env, options)
        num_iterations = max(1, round(options.total_steps / loop.env_steps_per_iteration))
        if num_iterations > LARGEST:
            raise UsageError(
                f"--total-steps {options.total_steps} are {num_iterations} iterations: 2**31 are too many."
            )
        # Now, so that this learner is the very one that is trained.
        config = jmarl.training.with_horizon(loop, config, num_iterations)
        learner = loop.algorithm(env.spec, config)
    except (ValueError, TypeError, ImportError) as error:
        raise UsageError(str(error)) from error
    return Built(env, eval_env, loop, num_iterations, config, learner)


def require_sensible(options: Options) -> None:
    """Refuses numbers that the library would not know as options, or not refuse."""
    require_at_least_one(seeds=options.seeds)
    if options.total_steps < 1:
        raise UsageError(f"--total-steps {options.total_steps} must be at least 1.")
    for name in ("log_every", "max_eval_steps"):
        if (value := getattr(options, name)) is not None:
            require_at_least_one(**{name: value})
    if options.eval_episodes < 0:
        raise UsageError(f"--eval-episodes {options.eval_episodes} must be positive, or 0 for no evaluation.")
    require_countable(eval_episodes=options.eval_episodes, absolute_episodes=options.absolute_episodes or 0)
    if options.eval_episodes:
        require_at_least_one(eval_every=options.eval_every)
    if not 0 <= options.checkpoint_every < math.inf:  # NaN is not, either
        raise UsageError(f"--checkpoint-every {options.checkpoint_every} must be positive, or 0 for no checkpoints.")
    require_at_least_one(keep_checkpoints=options.keep_checkpoints)
    require_seed(options.seed)


def require_memory(built: Built, options: Options) -> None:
    """Refuses an evaluation whose environments alone are more than the memory."""
    if not options.eval_episodes:
        return
    at_once = options.seeds if shard_of(options) == "seeds" else 1
    what = f"--eval-episodes {options.eval_episodes} of {at_once} seeds side by side"
    num_episodes = options.eval_episodes * at_once
    require_room(built.eval_env, built.learner, num_episodes, what, "evaluate fewer episodes")


def require_room(env: Env, learner: Learner, num_episodes: int, what: str, way_out: str) -> None:
    """Refuses episodes side by side whose environments alone are more than the memory."""
    one = jax.eval_shape(lambda key: (env.reset(key), learner.init_carry((1,))), jax.random.key(0))
    needed, device = _bytes(one) * num_episodes, jax.local_devices()[0]
    if needed > (available := jmarl.parallel.memory_of([device])):
        raise UsageError(
            f"{what} take {needed / 2**30:,.0f} GiB, but {device.device_kind} has {available / 2**30:,.0f}: {way_out}."
        )


def _bytes(tree: Any) -> int:
    """Of arrays, random keys aside."""
    arrays = (x for x in jax.tree.leaves(tree) if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended))
    return sum(x.size * x.dtype.itemsize for x in arrays)


def use_devices(devices: int | None, distributed: bool, num_shared: int) -> None:
    """Joins processes, and makes a device of each core of a CPU, or of as many as --devices says."""
    if devices is not None:
        require_at_least_one(devices=devices)
    try:
        if distributed:
            jax.distributed.initialize()
    except (RuntimeError, ValueError) as error:
        raise UsageError(str(error)) from error
    if devices or num_shared > 1:
        with contextlib.suppress(RuntimeError):  # jax has started already: `jmarl.run` takes what is there
            jmarl.use_cores(devices)  # of no consequence where there is a GPU


def describe(algorithm: str, options: Options, config: Any, env_kwargs: dict[str, Any]) -> None:
    """What --dry-run prints: every setting, and what a run takes. Everything is built and traced, nothing trained."""
    require_sensible(options)
    num_absolute(options)
    built = build(algorithm, options, config, env_kwargs)
    require_memory(built, options)
    with refused():
        state = jax.eval_shape(built.loop.init, jax.random.key(0), built.config)
        jax.eval_shape(built.loop.step, state, built.config)
        how = {"length": options.rollout_length, "num_resets": options.num_resets}
        _, steps, _ = jax.eval_shape(lambda run: jmarl.rollout(built.env, built.learner, run, **how), state)
        if options.eval_episodes:
            jax.eval_shape(
                lambda state, key: jmarl.evaluate(
                    built.eval_env, built.learner, state, key, num_episodes=options.eval_episodes
                ),
                state.train_state,
                jax.random.key(0),
            )
    facts = run_folders.facts_of(algorithm, options, built.config, env_kwargs, Path(), "")
    settings = {k: v for k, v in facts.items() if k not in ("format", "command", "config", "system", "run_dir")}
    config = {name: jmarl.configs.get(built.config, name) for name, _ in jmarl.configs.fields(built.config)}
    for name, values in {"experiment": settings, "config": config}.items():
        width = max(24, 2 + max(map(len, values)))
        print(f"{name}\n" + "".join(f"  {key:{width}s}{value}\n" for key, value in values.items()))
    num_parameters = sum(x.size for x in jax.tree.leaves(state.train_state.params))
    per_iteration = built.loop.env_steps_per_iteration
    print(f"{num_parameters:,} parameters per seed")
    print(f"{_bytes(state) * options.seeds / 2**20:,.1f} MiB for the states of {options.seeds} seeds, replay included")
    print(f"{_bytes(steps) * options.seeds / 2**20:,.1f} MiB for a rollout of each, and intermediate results on top")
    print(f"{per_iteration:,} environment steps per iteration, {built.num_iterations:,} iterations")


def train(
    algorithm: str,
    options: Options,
    config: Any,
    env_kwargs: dict[str, Any],
    *,
    command: str = "",
    is_resumed: bool = False,
    callback: Callable[[int, Mapping[str, np.ndarray], RunState], bool | None] | None = None,
    sinks: Sequence[Sink] = (),
    is_quiet: bool = False,
) -> Path:
    """Trains and fills the run folder, also when Ctrl-C, or the callback of `jmarl.run`, ends the training early."""
    with contextlib.redirect_stdout(io.StringIO()) if is_quiet else contextlib.nullcontext():
        folder = _train(algorithm, options, config, env_kwargs, command, is_resumed, callback, sinks)
    if is_quiet:
        print(folder)
    return folder


def _train(
    algorithm: str,
    options: Options,
    config: Any,
    env_kwargs: dict[str, Any],
    command: str,
    is_resumed: bool,
    callback: Callable[[int, Mapping[str, np.ndarray], RunState], bool | None] | None,
    sinks: Sequence[Sink],
) -> Path:
    require_sensible(options)
    num_absolute_episodes = num_absolute(options)
    shard = shard_of(options)
    num_shared = {"seeds": options.seeds, "envs": options.num_envs, "parts": options.parts}[shard]
    use_devices(options.devices, options.distributed, num_shared)
    is_first = jax.process_index() == 0  # of several processes: the one that writes
    if options.distributed and options.run_dir is None:
        raise UsageError("--distributed needs --run-dir, on which all processes agree.")
    built = build(algorithm, options, config, env_kwargs)
    env, eval_env, loop, num_iterations, config, learner = built
    require_memory(built, options)

    folder = options.run_dir or new_name(algorithm, options.env)
    facts = run_folders.facts_of(algorithm, options, config, env_kwargs, folder, command)
    before = run_folders.read_config(folder) if is_resumed else {}
    facts |= {name: before[name] for name in ("command", "system") if name in before}
    if options.wandb is not None:  # by which a resumed run finds what was sent
        facts["wandb_id"] = before.get("wandb_id") or secrets.token_hex(4)
    try:
        files = metric_files(folder, options, facts) if is_first else []
        if not is_resumed and is_first:
            jmarl.logging.run_folder(folder)
    except (ImportError, OSError) as error:
        raise UsageError(str(error)) from error
    if is_first and not is_resumed:
        run_folders.write_json(folder / "config.json", facts)
    if is_first:
        print(f"{algorithm} on {options.env}, {facts['system']['device']}, results in {folder}")

    key_run, key_rest = jax.random.split(jax.random.key(options.seed))
    key_gif, key_absolute = jax.random.split(key_rest)
    evaluation = jmarl.Evaluation(options.eval_episodes, options.eval_every, eval_env)
    # A run that was killed before it made the folder has left no metrics either, and begins anew: the caller saw to it.
    checkpoints = folder / "checkpoints"
    checkpoint = jmarl.Checkpointing(
        checkpoints, options.checkpoint_every, keep=options.keep_checkpoints, resume=checkpoints.exists()
    )
    to_resume = how_to_resume(folder, algorithm, options.env)
    total_env_steps = num_iterations * loop.env_steps_per_iteration
    is_longer = is_first and is_resumed and before.get("total_steps") != options.total_steps
    sinks = [*sinks, _config_file(folder, facts)] if is_longer else sinks
    in_words = one_sentence(
        folder, is_new=not is_resumed and is_first, how_to_resume=to_resume if options.checkpoint_every else ""
    )
    with contextlib.ExitStack() as at_the_end, in_words:
        run = jmarl.run(
            loop,
            key_run,
            config,
            num_iterations=num_iterations,
            iterations_per_chunk=options.log_every,
            num_seeds=options.seeds,
            devices=options.devices,
            shard=shard,
            sinks=[
                jmarl.logging.terminal(),
                *is_longer * [_config_file(folder, facts)],
                *sinks,
                *(_kept_open(sink, at_the_end) for sink in files),
            ],
            evaluation=evaluation if options.eval_episodes else None,
            checkpoint=checkpoint if options.checkpoint_every else None,
            callback=callback,
        )
        learners = jmarl.parallel.gather(run.train_state)
        if not is_first:
            return folder
        run_folders.write_whole(
            folder / "params.safetensors", lambda path: jmarl.export.save_parameters(learners.params, path)
        )
        for sink in files:
            sink.flush()
        is_finished = run_folders.is_complete(folder, total_env_steps)
        if lost := run_folders.diverged(learners.params, folder):
            run_folders.write_json(folder / "config.json", facts | {"diverged": lost})
        if is_finished and num_absolute_episodes:
            states = jmarl.checkpoint.restore(checkpoints, jax.eval_shape(lambda: learners), part="best.train_state")
            absolute = _absolute(eval_env, learner, states, key_absolute, num_absolute_episodes, options.eval_episodes)
            for sink in files:
                sink.write(total_env_steps, float(run_folders.read_metrics(folder)[1][-1]), absolute)
    if options.checkpoint_every and not is_finished:
        print(to_resume)

    best = _report(folder, f"{algorithm} on {options.env}", lost)
    if not options.gif or best is None:
        return folder
    state = jmarl.checkpoint.take_seed(learners, best)
    if rendering.render_episode(env, learner, state, key_gif, folder / "trained.gif"):
        print(f"trained.gif shows seed {best}, the one with the highest return.")
    else:
        print(rendering.no_picture(env, folder))
    return folder


def how_to_resume(folder: Path, algorithm: str, env: str) -> str:
    """The command that goes on: it names functions of the user's own once more, since a folder alone runs no code."""
    words = ["jmarl", "train", *([algorithm] if own.is_own(algorithm) else []), "--resume", str(folder)]
    return f"To go on: {shlex.join([*words, *(['--env', env] if own.runs_code(env) else [])])}"


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Puts what the library refuses in one sentence."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        if not _raised_by_jmarl(error):
            raise
        raise UsageError(str(error)) from error


@contextlib.contextmanager
def one_sentence(folder: Path, *, is_new: bool, how_to_resume: str) -> Iterator[None]:
    """Puts what the library refuses, and Ctrl-C, in words; a new folder in which nothing was measured goes again."""
    try:
        with refused():
            yield
    except UsageError:
        if is_new and not any(folder.rglob("metrics.csv")):
            shutil.rmtree(folder)
        raise
    except KeyboardInterrupt:  # while compiling, or the second Ctrl-C
        raise Interrupted(f"interrupted. {how_to_resume}".strip()) from None


def metric_files(folder: Path, options: Options, facts: dict[str, Any]) -> list[Sink]:
    """Files, and what the options add. Those that may be refused come first: then there are no files yet."""
    log, sinks = jmarl.logging, []
    if options.wandb is not None:
        wandb = {"project": options.wandb, "name": folder.name, "id": facts["wandb_id"]}
        sinks += [log.wandb(**wandb, dir=str(folder), config=facts)]
    if options.tensorboard:
        sinks += [log.tensorboard(folder / "tensorboard")]
    return [*sinks, log.csv_file(folder / "metrics.csv"), log.json_file(folder / "metrics.json")]


def _config_file(folder: Path, facts: dict[str, Any]) -> Sink:
    """Writes config.json once it is sure that there is a run: of one that is to be longer than it was begun."""
    write = lambda info: run_folders.write_json(folder / "config.json", facts)  # noqa: E731
    return Sink(start=write, write=lambda *_: None, close=lambda: None)


def _kept_open(sink: Sink, at_the_end: contextlib.ExitStack) -> Sink:
    """The sink, but closed later than at the end of the run: for what is measured then."""

    def start(info):
        sink.start(info)
        at_the_end.callback(sink.close)

    return sink._replace(start=start, close=lambda: None)


def num_absolute(options: Options) -> int:
    """How many episodes the best parameters play; checkpoints hold them, and evaluations choose them."""
    is_possible = bool(options.eval_episodes and options.checkpoint_every)
    if options.absolute_episodes is None:
        return 10 * options.eval_episodes * is_possible
    if options.absolute_episodes < 0 or (options.absolute_episodes and not is_possible):
        raise UsageError(
            f"--absolute-episodes {options.absolute_episodes} must be 0, or positive with evaluations and checkpoints."
        )
    return options.absolute_episodes


def _absolute(
    env: Env, learner: Learner, states: TrainState, key: jax.Array, num_episodes: int, at_once: int
) -> dict[str, np.ndarray]:
    """The metrics of `jmarl.evaluate` of each seed, named "absolute/.."; not more episodes at once than fit before."""
    num_rounds = math.ceil(num_episodes / at_once)

    def play(state, key):
        def play_round(key):
            return jmarl.evaluate(env, learner, state, key, num_episodes=math.ceil(num_episodes / num_rounds))

        rounds = jax.lax.map(play_round, jax.random.split(key, num_rounds))
        return jax.tree.map(lambda x: x.mean(0), rounds)

    # Compiling takes far longer than playing.
    play_all = jax.jit(jax.vmap(play), compiler_options=jmarl.rows.compiler_options(1))
    metrics = play_all(states, jax.random.split(key, len(states.step)))
    return {f"absolute/{name.removeprefix('eval/')}": np.asarray(values) for name, values in metrics.items()}


def _report(folder: Path, title: str, diverged: Mapping[int, int]) -> int | None:
    """Prints the table and draws the curve. Returns the best seed, None where nothing was measured."""
    env_steps, metrics = run_folders.load_metrics(folder)
    shown = [name for name in metrics if name.startswith(("train/", "eval/", "absolute/"))]
    latest = {name: run_folders.latest(metrics[name]) for name in shown}
    returns = [name for name in ("train/return_sum", "eval/return_sum") if np.isfinite(latest.get(name, np.nan)).any()]
    print(f"Results, parameters included, are in {folder}")
    if diverged:
        when = ", ".join(f"seed {seed} after {steps:,} steps" for seed, steps in diverged.items())
        print(f"Diverged, so that parameters are not finite: {when}. The table has what these seeds last measured.")
    if not returns:
        print("No episode finished, so there is no curve.")
        return None
    num_seeds = len(latest[returns[0]])
    print_table(latest, f"{title}, {num_seeds} seeds, after {env_steps[-1]:,} steps each")
    plotting.plot_curves([folder], folder / "learning_curve.png", metrics=returns, title=title)
    score = np.nan_to_num(latest[returns[-1]], nan=-np.inf)
    score[list(diverged)] = -np.inf
    return None if np.isneginf(score).all() else int(np.argmax(score))


def print_table(latest: Mapping[str, np.ndarray], title: str) -> None:
    """Of each metric, the interquartile mean over seeds, its interval, and the extremes."""
    table = Table(title=title, title_justify="left", title_style="")
    for heading in ("metric", "IQM", "95 % interval", "lowest", "highest"):
        table.add_column(heading, justify="left" if heading == "metric" else "right", no_wrap=True)
    for name in sorted(latest):
        if row := row_of_table(latest[name]):
            table.add_row(name, *row)
    Console().print(table)


def row_of_table(values: np.ndarray) -> list[str]:
    """The cells of one table's row, as a report computes them; [] where nothing was measured."""
    if not np.isfinite(values).any():
        return []
    centre, low, high = statistics_of_runs.summary(values)
    interval = f"{low:.2f} to {high:.2f}" if np.isfinite(low) else "needs two seeds"
    return [f"{centre:.2f}", interval, f"{np.nanmin(values):.2f}", f"{np.nanmax(values):.2f}"]


def new_name(algorithm: str, env: str) -> Path:
    """A folder that is not there yet."""
    short = [re.sub(r"[^\w.+-]+", "_", name.rpartition("/")[2]).strip("_") for name in (algorithm, env)]
    base = f"{short[0]}-{short[1]}-{datetime.now():%Y%m%d-%H%M%S}"
    candidates = (Path("runs") / f"{base}{suffix}" for suffix in ("", *(f"-{i}" for i in range(2, 1000))))
    return next(path for path in candidates if not path.exists())


def _raised_by_jmarl(error: Exception) -> bool:
    """Whether the library itself refused something, rather than jax or a bug."""
    innermost = traceback.extract_tb(error.__traceback__)[-1]
    return Path(jmarl.__file__).parent in Path(innermost.filename).parents
