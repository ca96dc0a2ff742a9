"""Trains an algorithm on an environment with many seeds; leaves curves, numbers, checkpoints and a GIF in a run folder.

    python benchmarks/train.py mappo --env MPE_simple_spread_v3 --seeds 8 --total-steps 2e6 --learning-rate 1e-3
    python benchmarks/train.py ippo --env HeuristicEnemySMAX --env-kwargs map_name=2s3z --no-recurrent
    python benchmarks/train.py mappo --env overcooked --help
    python benchmarks/train.py mappo --sweep learning-rate=1e-4,1e-3 gamma=0.9,0.95 --seeds 8
    python benchmarks/train.py --resume runs/mappo-MPE_simple_spread_v3-20260101-120000

Every field of the algorithm's config is an option. Defaults come from benchmarks/presets.py, for the environment given.
A run that was stopped or killed goes on with --resume as if nothing had happened; its config.json says all the rest.
"""

import contextlib
import dataclasses
import json
import math
import os
import secrets
import shlex
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import safetensors  # noqa: F401, so that it is missed now rather than after the training
from rich.console import Console
from rich.table import Table

import jmarl
import plotting
import presets
import rendering
from command_line import (
    Interrupted,
    UsageError,
    env_kwargs_of,
    make_loop,
    parse,
    require_at_least_one,
    require_seed,
    show_key_values,
    usage_errors,
    with_replay,
)
from jmarl.logging import Sink
from jmarl.types import Env, Learner, RunState, TrainState
from runs import as_tuple, load_run, read_config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The experiment."""

    env: str  # an environment of JaxMARL or gymnax
    preset: str = "default"  # default, or quick: a policy in seconds (vdn on MPE_simple_spread_v3)
    env_kwargs: tuple[str, ...] = ()  # KEY=VALUE for jmarl.make, added to the preset's: map_name=2s3z
    seeds: int = 4  # independent repetitions, trained side by side
    seed: int = 0  # decides all randomness
    total_steps: int = 5_000_000  # environment steps of each seed; the warm-up of replay comes before them
    num_envs: int = 64  # environments side by side, per seed
    rollout_length: int = 128  # steps in each environment between two updates
    num_resets: int | None = None  # start states drawn per environment and rollout; None: as many as it can need
    log_every: int | None = None  # updates between two rows of metrics; None: a hundredth of the run
    eval_episodes: int = 64  # greedy episodes of each evaluation, per seed; 0: no evaluation
    eval_every: int = 10  # rows of metrics between two evaluations; the last row has one in any case
    absolute_episodes: int | None = None  # of each seed's best parameters at the end; None: 10 x eval_episodes; 0: none
    devices: int | None = (
        None  # among which seeds are shared, and of a CPU its cores; None: all that can have equally many
    )
    shard: Literal["seeds", "envs"] = "seeds"  # what devices share: seeds, or the environments of each
    distributed: bool = False  # one of several processes that share the seeds, as srun starts them; needs --run-dir
    run_dir: Path | None = None  # a new folder for the results; None: runs/ALGORITHM-ENV-TIME
    checkpoint_every: float = 60.0  # seconds between two checkpoints, from which --resume goes on; 0: none
    gif: bool = True  # draw one greedy episode
    tensorboard: bool = False  # write TensorBoard's files, too
    wandb: str | None = None  # send metrics to this project of Weights & Biases, too; WANDB_MODE=offline: later


def main(argv: Sequence[str] | None = None) -> Path:
    """Parses the command line, trains, and returns the run folder. Exits with 2 on what the user can put right."""
    argv = list(sys.argv[1:] if argv is None else argv)
    with usage_errors():
        if any(word.partition("=")[0] == "--resume" for word in argv):
            return _resume(argv)
        if "--sweep" in argv:
            import sweeping  # here, since it imports this module

            return sweeping.sweep(argv)
        algorithm, options, config = parse(
            argv,
            _options,
            script="train.py",
            does="Trains {algorithm} on {env} and leaves the results in a folder; --resume FOLDER goes on with a run.",
        )
        env_kwargs = env_kwargs_of(algorithm, options)
        return train(algorithm, options, config, env_kwargs, command=argv)


def _options(preset: presets.Preset) -> Options:
    options = Options(
        env=preset.env,
        env_kwargs=show_key_values(preset.env_kwargs),
        seeds=preset.num_seeds,
        total_steps=preset.total_steps,
        num_envs=preset.num_envs,
        rollout_length=preset.rollout_length,
        num_resets=preset.num_resets,
        eval_episodes=preset.eval_episodes,
        absolute_episodes=preset.absolute_episodes,
    )
    return with_replay(options, preset)


def _resume(argv: Sequence[str]) -> Path:
    """Goes on with a run: `--resume FOLDER`."""
    words = [part for word in argv for part in word.split("=", 1)] if len(argv) == 1 else list(argv)
    if len(words) != 2 or words[0] != "--resume":
        raise UsageError("--resume takes a run folder and stands alone: all options are read from its config.json.")
    folder = Path(words[1])
    if (folder / ".sweep.json").exists():
        import sweeping  # here, since it imports this module

        return sweeping.resume(folder)
    try:
        facts = json.loads((folder / "config.json").read_text())
        algorithm = facts["algorithm"]
        preset = presets.for_environment(algorithm, facts["env"], facts["preset"])
        options = _from_json(_options(preset), facts)
        config = _from_json(preset.config, facts["config"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{folder} holds no run to go on with: its config.json cannot be read ({error}).") from error
    if not options.checkpoint_every:
        raise UsageError(f"{folder} has no checkpoints, because of --checkpoint-every 0: start a new run.")
    require_checkpoints(folder, folder / "checkpoints")
    return train(algorithm, dataclasses.replace(options, run_dir=folder), config, facts["env_kwargs"], is_resumed=True)


def require_checkpoints(folder: Path, checkpoints: Path) -> None:
    """Refuses a run whose checkpoints are gone: it would begin anew, and so would its metrics."""
    # Their folder is made before metrics are written, and the first of them before the parameters.
    is_there = checkpoints.is_dir()
    is_saved = is_there and bool(jmarl.checkpoint.steps(checkpoints))
    has_metrics, has_parameters = ((folder / name).exists() for name in ("metrics.csv", "params.safetensors"))
    if (has_metrics and not is_there) or (has_parameters and not is_saved):
        raise UsageError(f"{folder} holds metrics, but no checkpoint to go on from: start a new run.")


def _from_json(default: Any, values: dict[str, Any]) -> Any:
    """A dataclass like `default`, with the fields that config.json has: lists there are tuples here."""
    names = [field.name for field in dataclasses.fields(default) if field.name in values]  # new options: as by default
    return dataclasses.replace(default, **{name: as_tuple(values[name]) for name in names})


def make_envs(name: str, env_kwargs: dict[str, Any]) -> tuple[Env, Env]:
    """Of training and of evaluation. Shaped rewards are for training; what counts is the return without them."""
    plain = {k: v for k, v in env_kwargs.items() if k != "shaped_reward"}
    env, eval_env = jmarl.make(name, **env_kwargs), jmarl.make(name, **plain)
    if env.spec.max_steps is not None and env.spec.max_steps < 1:
        raise ValueError(f"Episodes of {name} have {env.spec.max_steps} steps: give it a time limit of at least 1.")
    return env, eval_env


def require_sensible(options: Options) -> None:
    """Refuses numbers that the library would not know as options, or not refuse."""
    require_at_least_one(seeds=options.seeds, total_steps=options.total_steps)
    if options.log_every is not None:
        require_at_least_one(log_every=options.log_every)
    if options.eval_episodes < 0:
        raise UsageError(f"--eval-episodes {options.eval_episodes} must be positive, or 0 for no evaluation.")
    if options.eval_episodes:
        require_at_least_one(eval_every=options.eval_every)
    if not options.checkpoint_every >= 0:  # NaN is not, either
        raise UsageError(f"--checkpoint-every {options.checkpoint_every} must be positive, or 0 for no checkpoints.")
    require_seed(options.seed)


def use_devices(devices: int | None, distributed: bool, num_shared: int) -> None:
    """Joins processes, and makes a device of each core of a CPU, or of as many as --devices says."""
    if devices is not None and devices < 1:
        raise UsageError(f"--devices {devices} must be at least 1.")
    try:
        if distributed:
            jax.distributed.initialize()
    except (RuntimeError, ValueError) as error:
        raise UsageError(str(error)) from error
    if devices or num_shared > 1:
        with contextlib.suppress(RuntimeError):  # jax has started already: `jmarl.run` takes what is there
            jmarl.use_cores(devices)  # of no consequence where there is a GPU


def facts_of(
    algorithm: str, options: Options, config: Any, env_kwargs: dict[str, Any], folder: Path, command: Sequence[str]
) -> dict[str, Any]:
    """What config.json says."""
    return {
        "command": shlex.join(["python", "benchmarks/train.py", *command]),
        "algorithm": algorithm,
        **dataclasses.asdict(options),
        "env_kwargs": env_kwargs,
        "run_dir": str(folder),
        "config": {field.name: getattr(config, field.name) for field in dataclasses.fields(config)},
        "system": jmarl.logging.system_facts(),
    }


def train(
    algorithm: str,
    options: Options,
    config: Any,
    env_kwargs: dict[str, Any],
    *,
    command: Sequence[str] = (),
    is_resumed: bool = False,
    callback: Callable[[int, Mapping[str, np.ndarray], RunState], bool | None] | None = None,
    sinks: Sequence[Sink] = (),
) -> Path:
    """Trains and fills the run folder, also when Ctrl-C, or the callback of `jmarl.run`, ends the training early."""
    require_sensible(options)
    num_absolute = _num_absolute(options)
    num_shared = options.seeds if options.shard == "seeds" else options.num_envs
    use_devices(options.devices, options.distributed, num_shared)
    is_first = jax.process_index() == 0  # of several processes: the one that writes
    if options.distributed and options.run_dir is None:
        raise UsageError("--distributed needs --run-dir, on which all processes agree.")
    try:
        env, eval_env = make_envs(options.env, env_kwargs)
        loop = make_loop(algorithm, env, options, num_envs=options.num_envs)
        num_iterations = max(1, round(options.total_steps / loop.env_steps_per_iteration))
        config = jmarl.training.with_horizon(
            loop, config, num_iterations
        )  # now, so that this learner is the very one that is trained
        learner = loop.algorithm(env.spec, config)
    except (ValueError, TypeError, ImportError) as error:
        raise UsageError(str(error)) from error

    folder = options.run_dir or _new_folder(algorithm, options.env)
    facts = facts_of(algorithm, options, config, env_kwargs, folder, command)
    if options.wandb is not None:  # by which a resumed run finds what was sent
        facts["wandb_id"] = read_config(folder)["wandb_id"] if is_resumed else secrets.token_hex(4)
    try:
        files = _sinks(folder, options, facts) if is_first else []
        if not is_resumed and is_first:
            jmarl.logging.run_folder(folder)
    except (ImportError, OSError) as error:
        raise UsageError(str(error)) from error
    if not is_resumed and is_first:
        _write_whole(folder / "config.json", lambda path: path.write_text(json.dumps(facts, indent=2) + "\n"))
    if is_first:
        print(f"{algorithm} on {options.env}, {facts['system']['device']}, results in {folder}")

    key_run, key_rest = jax.random.split(jax.random.key(options.seed))
    key_gif, key_absolute = jax.random.split(key_rest)
    evaluation = jmarl.Evaluation(options.eval_episodes, options.eval_every, eval_env)
    # A run that was killed before it made the folder has left no metrics either, and begins anew: `_resume` saw to it.
    checkpoints = folder / "checkpoints"
    checkpoint = jmarl.Checkpointing(checkpoints, options.checkpoint_every, resume=checkpoints.exists())
    how_to_resume = f"To go on: python benchmarks/train.py --resume {shlex.quote(str(folder))}"
    total_env_steps = num_iterations * loop.env_steps_per_iteration
    in_words = one_sentence(
        folder, is_new=not is_resumed and is_first, how_to_resume=how_to_resume if options.checkpoint_every else ""
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
            shard=options.shard,
            sinks=[jmarl.logging.terminal(), *sinks, *(_kept_open(sink, at_the_end) for sink in files)],
            evaluation=evaluation if options.eval_episodes else None,
            checkpoint=checkpoint if options.checkpoint_every else None,
            callback=callback,
        )
        learners = jmarl.parallel.gather(run.train_state)
        if not is_first:
            return folder
        for sink in files:
            sink.flush()
        is_finished = is_complete(folder, total_env_steps)
        if is_finished and num_absolute:
            absolute = _absolute(*load_run(folder, best=True), key_absolute, num_absolute, options.eval_episodes)
            for sink in files:
                sink.write(total_env_steps, _seconds(folder), absolute)
    if options.checkpoint_every and not is_finished:
        print(how_to_resume)
    _write_whole(folder / "params.safetensors", lambda path: jmarl.export.save_parameters(learners.params, path))

    best = _report(folder, f"{algorithm} on {options.env}")
    if not options.gif or best is None:
        return folder
    state = jmarl.checkpoint.take_seed(learners, best)
    if rendering.render_episode(env, learner, state, key_gif, folder / "trained.gif"):
        print(f"trained.gif shows seed {best}, the one with the highest return.")
    else:
        print(f"No GIF: there is no picture of {options.env}.")
    return folder


@contextlib.contextmanager
def one_sentence(folder: Path, *, is_new: bool, how_to_resume: str) -> Iterator[None]:
    """Puts what the library refuses, and Ctrl-C, in words; a new folder in which nothing was measured goes again."""
    try:
        yield
    except (UsageError, ValueError, OSError) as error:
        if not isinstance(error, UsageError) and not _raised_by_jmarl(error):
            raise
        if is_new and not any(folder.rglob("metrics.csv")):
            shutil.rmtree(folder)
        raise UsageError(str(error)) from error
    except KeyboardInterrupt:  # while compiling, or the second Ctrl-C
        raise Interrupted(f"interrupted. {how_to_resume}".strip()) from None


def is_complete(folder: Path, total_env_steps: int) -> bool:
    """Whether metrics reach the end. The learner's own count would not say so: it has the warm-up, too."""
    return bool(plotting.load_metrics(folder)[0].max(initial=0) >= total_env_steps)


def _write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """A file that is there as a whole or not at all, whenever the script is killed."""
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    os.replace(temporary, path)


def _sinks(folder: Path, options: Options, facts: dict[str, Any]) -> list[Sink]:
    """Files, and what the options add. Those that may be refused come first: then there are no files yet."""
    log, sinks = jmarl.logging, []
    if options.wandb is not None:
        wandb = {"project": options.wandb, "name": folder.name, "id": facts["wandb_id"]}
        sinks += [log.wandb(**wandb, dir=str(folder), config=facts)]
    if options.tensorboard:
        sinks += [log.tensorboard(folder / "tensorboard")]
    return [*sinks, log.csv_file(folder / "metrics.csv"), log.json_file(folder / "metrics.json")]


def _kept_open(sink: Sink, at_the_end: contextlib.ExitStack) -> Sink:
    """The sink, but closed later than at the end of the run: for what is measured then."""

    def start(info):
        sink.start(info)
        at_the_end.callback(sink.close)

    return sink._replace(start=start, close=lambda: None)


def _num_absolute(options: Options) -> int:
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


def _seconds(folder: Path) -> float:
    """Until the last row of metrics."""
    return json.loads((folder / "metrics.json").read_text())["wall_s"][-1]


def _report(folder: Path, title: str) -> int | None:
    """Prints the table and draws the curve. Returns the best seed, None where nothing was measured."""
    env_steps, metrics = plotting.load_metrics(folder)
    shown = [name for name in metrics if name.startswith(("train/", "eval/", "absolute/"))]
    latest = {name: _latest(metrics[name]) for name in shown}
    returns = [name for name in ("train/return_sum", "eval/return_sum") if np.isfinite(latest.get(name, np.nan)).any()]
    print(f"Results, parameters included, are in {folder}")
    if not returns:
        print("No episode finished, so there is no curve.")
        return None
    num_seeds = len(latest[returns[0]])
    print_table(latest, f"{title}, {num_seeds} seeds, after {env_steps[-1]:,} steps each")
    plotting.plot_curves([folder], folder / "learning_curve.png", metrics=returns, title=title)
    return int(np.argmax(np.nan_to_num(latest[returns[-1]], nan=-np.inf)))


def print_table(latest: dict[str, np.ndarray], title: str) -> None:
    """Each metric's mean over seeds, the 95 % interval of that mean, and the extremes."""
    table = Table(title=title, title_justify="left", title_style="")
    for heading in ("metric", "mean", "95 % interval", "lowest", "highest"):
        table.add_column(heading, justify="left" if heading == "metric" else "right", no_wrap=True)
    for name in sorted(latest):
        values = latest[name]
        if np.isfinite(values).any():
            mean, low, high = plotting.mean_and_interval(values)
            interval = f"{low:.2f} to {high:.2f}" if np.isfinite(low) else "needs two seeds"
            table.add_row(name, f"{mean:.2f}", interval, f"{np.nanmin(values):.2f}", f"{np.nanmax(values):.2f}")
    Console().print(table)


def _latest(series: np.ndarray) -> np.ndarray:
    """The last measured value of each seed."""
    return np.array([[np.nan, *row[np.isfinite(row)]][-1] for row in series])


def _new_folder(algorithm: str, env: str) -> Path:
    base = f"{algorithm}-{env.replace('|', '_')}-{datetime.now():%Y%m%d-%H%M%S}"
    candidates = (Path("runs") / f"{base}{suffix}" for suffix in ("", *(f"-{i}" for i in range(2, 1000))))
    return next(path for path in candidates if not path.exists())


def _raised_by_jmarl(error: Exception) -> bool:
    """Whether the library itself refused something, rather than jax or a bug."""
    innermost = traceback.extract_tb(error.__traceback__)[-1]
    return Path(jmarl.__file__).parent in Path(innermost.filename).parents


if __name__ == "__main__":
    main()
