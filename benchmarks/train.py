"""Trains an algorithm on an environment with many seeds; leaves curves, numbers, checkpoints and a GIF in a run folder.

    python benchmarks/train.py mappo --env MPE_simple_spread_v3 --seeds 8 --total-steps 2e6 --learning-rate 1e-3
    python benchmarks/train.py ippo --env HeuristicEnemySMAX --env-kwargs map_name=2s3z --no-recurrent
    python benchmarks/train.py mappo --env overcooked --help
    python benchmarks/train.py --resume runs/mappo-MPE_simple_spread_v3-20260101-120000

Every field of the algorithm's config is an option. Defaults come from benchmarks/presets.py, for the environment given.
A run that was stopped or killed goes on with --resume as if nothing had happened; its config.json says all the rest.
"""

import dataclasses
import json
import os
import shlex
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

import jmarl
import plotting
import presets
import rendering
from command_line import UsageError, key_values, make_loop, parse, show_key_values, usage_errors, with_replay


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The experiment."""

    env: str  # an environment of JaxMARL or gymnax
    preset: str = "default"  # default, or quick: a policy in seconds (vdn on MPE_simple_spread_v3)
    env_kwargs: tuple[str, ...] = ()  # KEY=VALUE for jmarl.make, added to the preset's: map_name=2s3z
    seeds: int = 4  # independent repetitions, trained side by side
    seed: int = 0  # decides all randomness
    total_steps: int = 5_000_000  # environment steps of each seed
    num_envs: int = 64  # environments side by side, per seed
    rollout_length: int = 128  # steps in each environment between two updates
    num_resets: int | None = None  # start states drawn per environment and rollout; None: as many as it can need
    log_every: int | None = None  # updates between two rows of metrics; None: a hundredth of the run
    eval_episodes: int = 64  # greedy episodes of each evaluation, per seed; 0: no evaluation
    eval_every: int = 10  # rows of metrics between two evaluations; the last row has one in any case
    run_dir: Path | None = None  # a new folder for the results; None: runs/ALGORITHM-ENV-TIME
    checkpoint_every: float = 60.0  # seconds between two checkpoints, from which --resume goes on; 0: none
    gif: bool = True  # draw one greedy episode


def main(argv: Sequence[str] | None = None) -> Path:
    """Parses the command line, trains, and returns the run folder. Exits with 2 on what the user can put right."""
    argv = list(sys.argv[1:] if argv is None else argv)
    with usage_errors():
        if any(word.partition("=")[0] == "--resume" for word in argv):
            return _resume(argv)
        algorithm, options, config = parse(
            argv,
            _options,
            script="train.py",
            does="Trains {algorithm} on {env} and leaves the results in a folder; --resume FOLDER goes on with a run.",
        )
        env_kwargs = presets.for_environment(algorithm, options.env).env_kwargs | key_values(options.env_kwargs)
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
    )
    return with_replay(options, preset)


def _resume(argv: Sequence[str]) -> Path:
    """Goes on with a run: `--resume FOLDER`."""
    words = [part for word in argv for part in word.split("=", 1)] if len(argv) == 1 else list(argv)
    if len(words) != 2 or words[0] != "--resume":
        raise UsageError("--resume takes a run folder and stands alone: all options are read from its config.json.")
    folder = Path(words[1])
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
    return train(algorithm, dataclasses.replace(options, run_dir=folder), config, facts["env_kwargs"], is_resumed=True)


def _from_json(default: Any, values: dict[str, Any]) -> Any:
    """A dataclass like `default`, with the fields that config.json has: lists there are tuples here."""
    names = [field.name for field in dataclasses.fields(default)]
    return dataclasses.replace(default, **{name: _as_tuple(values[name]) for name in names})


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def train(
    algorithm: str,
    options: Options,
    config: Any,
    env_kwargs: dict[str, Any],
    *,
    command: Sequence[str] = (),
    is_resumed: bool = False,
) -> Path:
    """Trains and fills the run folder, also when Ctrl-C ends the training early."""
    try:
        env = jmarl.make(options.env, **env_kwargs)
        # Shaped rewards are for training; what counts is the return without them.
        eval_env = jmarl.make(options.env, **{k: v for k, v in env_kwargs.items() if k != "shaped_reward"})
        loop = make_loop(algorithm, env, options, num_envs=options.num_envs)
        num_steps = max(1, round(options.total_steps / loop.env_steps_per_step))
        if config.num_updates is None:  # now, so that this learner is the very one that is trained
            config = config.replace(num_updates=num_steps * loop.updates_per_step)
        learner = loop.algorithm(env.spec, config)
        folder = options.run_dir or _new_folder(algorithm, options.env)
        if not is_resumed:
            jmarl.logging.run_folder(folder)
    except (ValueError, TypeError, ImportError, FileExistsError) as error:
        raise UsageError(str(error)) from error

    facts = {
        "command": shlex.join(["python", "benchmarks/train.py", *command]),
        "algorithm": algorithm,
        **dataclasses.asdict(options),
        "env_kwargs": env_kwargs,
        "run_dir": str(folder),
        "config": {field.name: getattr(config, field.name) for field in dataclasses.fields(config)},
        "system": jmarl.logging.system_facts(),
    }
    if not is_resumed:
        _write_whole(folder / "config.json", lambda path: path.write_text(json.dumps(facts, indent=2) + "\n"))
    print(f"{algorithm} on {options.env}, {facts['system']['device']}, results in {folder}")

    key_run, key_gif = jax.random.split(jax.random.key(options.seed))
    sinks = [
        jmarl.logging.terminal(),
        jmarl.logging.csv_file(folder / "metrics.csv"),
        jmarl.logging.json_file(folder / "metrics.json"),
    ]
    evaluation = jmarl.Evaluation(options.eval_episodes, options.eval_every, eval_env)
    # A run that was killed before it made the folder has left no metrics either, and begins anew.
    checkpoints = folder / "checkpoints"
    checkpoint = jmarl.Checkpointing(checkpoints, options.checkpoint_every, resume=checkpoints.exists())
    how_to_resume = f"To go on: python benchmarks/train.py --resume {shlex.quote(str(folder))}"
    try:
        run = jmarl.run(
            loop,
            key_run,
            config,
            num_steps=num_steps,
            steps_per_chunk=options.log_every,
            num_seeds=options.seeds,
            sinks=sinks,
            evaluation=evaluation if options.eval_episodes else None,
            checkpoint=checkpoint if options.checkpoint_every else None,
        )
    except (ValueError, OSError) as error:
        if not _raised_by_jmarl(error):
            raise
        if not is_resumed and not (folder / "metrics.csv").exists():  # refused before anything was written
            shutil.rmtree(folder)
        raise UsageError(str(error)) from error
    except KeyboardInterrupt:  # while compiling, or the second Ctrl-C
        raise UsageError(f"interrupted. {how_to_resume}" if options.checkpoint_every else "interrupted.") from None
    env_steps, _ = plotting.load_metrics(folder)
    if options.checkpoint_every and env_steps.max(initial=0) < num_steps * loop.env_steps_per_step:
        print(how_to_resume)
    _write_whole(folder / "params.safetensors", lambda path: save_parameters(run.learner.params, path))

    best = _report(folder, f"{algorithm} on {options.env}")
    if not options.gif or best is None:
        return folder
    state = jmarl.checkpoint.take_seed(run.learner, best)
    if rendering.render_episode(env, learner, state, key_gif, folder / "trained.gif"):
        print(f"trained.gif shows seed {best}, the one with the highest return.")
    else:
        print(f"No GIF: there is no picture of {options.env}.")
    return folder


def _write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """A file that is there as a whole or not at all, whenever the script is killed."""
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    os.replace(temporary, path)


def save_parameters(params: Any, path: Path) -> None:
    """One array per parameter, named after its place in the tree, such as `actor/Dense_0/kernel`, seeds first."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    names = [jax.tree_util.keystr(place, simple=True, separator="/") for place, _ in leaves]
    save_file({name: np.ascontiguousarray(leaf) for name, (_, leaf) in zip(names, leaves, strict=True)}, path)


def _report(folder: Path, title: str) -> int | None:
    """Prints the table and draws the curve. Returns the best seed, None where nothing was measured."""
    env_steps, metrics = plotting.load_metrics(folder)
    latest = {name: _latest(series) for name, series in metrics.items() if name.startswith(("train/", "eval/"))}
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
