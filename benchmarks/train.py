"""Trains an algorithm on an environment with many seeds; leaves curves, numbers, parameters and a GIF in a run folder.

    python benchmarks/train.py mappo --env MPE_simple_spread_v3 --seeds 8 --total-steps 2e6 --learning-rate 1e-3
    python benchmarks/train.py ippo --env HeuristicEnemySMAX --env-kwargs map_name=2s3z --no-recurrent
    python benchmarks/train.py mappo --env overcooked --help

Every field of the algorithm's config is an option. Defaults come from benchmarks/presets.py, for the environment given.
"""

import dataclasses
import difflib
import json
import shlex
import sys
import traceback
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
import plotting
import presets
import rendering
import tyro
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

import jmarl

ALGORITHMS = {"ippo": jmarl.ippo, "mappo": jmarl.mappo}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The experiment."""

    env: str  # an environment of JaxMARL or gymnax
    env_kwargs: tuple[str, ...] = ()  # KEY=VALUE for jmarl.make, added to those of the preset: map_name=3m
    seeds: int = 4  # independent repetitions, trained side by side
    seed: int = 0  # decides all randomness
    total_steps: int = 5_000_000  # environment steps of each seed
    num_envs: int = 64  # environments side by side, per seed
    rollout_length: int = 128  # steps in each environment between two updates
    log_every: int | None = None  # updates between two rows of metrics; None: a hundredth of the run
    eval_episodes: int = 64  # greedy episodes of each evaluation, per seed; 0: no evaluation
    eval_every: int = 10  # rows of metrics between two evaluations; the last row has one in any case
    run_dir: Path | None = None  # a new folder for the results; None: runs/ALGORITHM-ENV-TIME
    gif: bool = True  # draw one greedy episode


class UsageError(Exception):
    """What the user can put right: one sentence, no traceback."""


def main(argv: Sequence[str] | None = None) -> Path:
    """Parses the command line, trains, and returns the run folder. Exits with 2 on what the user can put right."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        algorithm, options, config = parse(argv)
        return train(algorithm, options, config, command=argv)
    except UsageError as error:
        print(f"train.py: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def parse(argv: Sequence[str]) -> tuple[str, Options, Any]:
    """Algorithm, options and config. The preset of algorithm and environment sets the defaults of all the rest."""
    algorithm = next((word for word in argv[:1] if not word.startswith("-")), None)
    wants_help = algorithm is None and bool({"-h", "--help"} & set(argv))
    if algorithm is None and not wants_help:
        raise UsageError(f"name an algorithm first, one of {', '.join(ALGORITHMS)}; --help tells the rest.")
    if not wants_help and algorithm not in ALGORITHMS:
        raise UsageError(f"there is no algorithm {algorithm!r}{_nearest(algorithm, ALGORITHMS)}.")
    rest = list(argv[0 if wants_help else 1 :])
    algorithm = algorithm or "mappo"
    preset = presets.for_environment(algorithm, _given_env(rest) or "MPE_simple_spread_v3")
    options = Options(
        env=preset.env,
        env_kwargs=tuple(f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in preset.env_kwargs.items()),
        seeds=preset.num_seeds,
        total_steps=preset.total_steps,
        num_envs=preset.num_envs,
        rollout_length=preset.rollout_length,
        eval_episodes=preset.eval_episodes,
    )
    # Two dataclasses side by side, without their prefixes: flat names, and each keeps its own heading in --help.
    both = dataclasses.make_dataclass("Arguments", [("experiment", Options), ("hyperparameter", type(preset.config))])
    with _numbers():
        arguments = tyro.cli(
            both,
            prog=f"train.py {{{','.join(ALGORITHMS)}}}" if wants_help else f"train.py {algorithm}",
            description=f"Trains {algorithm} on {preset.env}: these defaults are for the two.",
            default=both(options, preset.config),
            args=rest,
            config=(tyro.conf.OmitArgPrefixes,),
        )
    kwargs = {**preset.env_kwargs, **_key_values(arguments.experiment.env_kwargs)}
    options = dataclasses.replace(
        arguments.experiment, env_kwargs=tuple(f"{k}={json.dumps(v)}" for k, v in kwargs.items())
    )
    return algorithm, options, arguments.hyperparameter


def train(algorithm: str, options: Options, config: Any, *, command: Sequence[str] = ()) -> Path:
    """Trains and fills the run folder, also when Ctrl-C ends the training early."""
    try:
        env = jmarl.make(options.env, **_key_values(options.env_kwargs))
        loop = jmarl.on_policy(
            env, ALGORITHMS[algorithm], num_envs=options.num_envs, rollout_length=options.rollout_length
        )
        num_steps = max(1, round(options.total_steps / loop.env_steps_per_step))
        evaluation = jmarl.Evaluation(options.eval_episodes, options.eval_every) if options.eval_episodes else None
        if config.num_updates is None:
            config = config.replace(
                num_updates=num_steps
            )  # here too, so that the learner below is the one that trained
        learner = loop.algorithm(env.spec, config)
        folder = jmarl.logging.run_folder(options.run_dir or _new_folder(algorithm, options.env))
    except (ValueError, TypeError, ImportError, FileExistsError) as error:
        raise UsageError(str(error)) from error

    facts = {
        "command": shlex.join(["python", "benchmarks/train.py", *command]),
        "algorithm": algorithm,
        **dataclasses.asdict(options),
        "run_dir": str(folder),
        "config": {field.name: getattr(config, field.name) for field in dataclasses.fields(config)},
        "system": jmarl.logging.system_facts(),
    }
    (folder / "config.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(f"{algorithm} on {options.env}, {facts['system']['device']}, results in {folder}")

    key_run, key_gif = jax.random.split(jax.random.key(options.seed))
    try:
        run = jmarl.run(
            loop,
            key_run,
            config,
            num_steps=num_steps,
            steps_per_chunk=options.log_every,
            num_seeds=options.seeds,
            sinks=[
                jmarl.logging.terminal(),
                jmarl.logging.csv_file(folder / "metrics.csv"),
                jmarl.logging.json_file(folder / "metrics.json"),
            ],
            evaluation=evaluation,
        )
    except ValueError as error:
        if _raised_by_jmarl(error):
            raise UsageError(str(error)) from error
        raise
    save_parameters(run.learner.params, folder / "params.safetensors")
    _report(algorithm, options, env, learner, run, key_gif, folder)
    return folder


def save_parameters(params: Any, path: Path) -> None:
    """One array per parameter, named after its place in the tree, such as `actor/Dense_0/kernel`, seeds first."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    names = [jax.tree_util.keystr(place, simple=True, separator="/") for place, _ in leaves]
    save_file({name: np.ascontiguousarray(leaf) for name, (_, leaf) in zip(names, leaves, strict=True)}, path)


def _report(
    algorithm: str, options: Options, env: jmarl.types.Env, learner: Any, run: Any, key: jax.Array, folder: Path
) -> None:
    """Table, learning curve and GIF."""
    env_steps, metrics = plotting.load_metrics(folder)
    if not len(env_steps):
        print(f"Nothing was measured before the end. The parameters are in {folder}.")
        return
    latest = {name: _latest(series) for name, series in metrics.items() if name.startswith(("train/", "eval/"))}
    title = f"{algorithm} on {options.env}, {options.seeds} seeds, after {env_steps[-1]:,} steps each"
    print_table(latest, title)

    returns = [name for name in ("train/return_sum", "eval/return_sum") if name in metrics]
    plotting.plot_curves(
        [folder], folder / "learning_curve.png", metrics=returns, title=f"{algorithm} on {options.env}"
    )
    made = ["config.json", "metrics.csv", "metrics.json", "params.safetensors", "learning_curve.png"]
    if options.gif:
        best = int(np.nanargmax(np.nan_to_num(latest[returns[-1]], nan=-np.inf)))
        state = jax.tree.map(lambda x: x[best], run.learner)
        if rendering.render_episode(env, learner, state, key, folder / "trained.gif"):
            made.append(f"trained.gif (seed {best}, the one with the highest {returns[-1]})")
        else:
            print(f"No GIF: there is no picture of {options.env}.")
    print(f"In {folder}: {', '.join(made)}")


def print_table(latest: dict[str, np.ndarray], title: str) -> None:
    """Each metric's mean over seeds, the 95 % interval of that mean, and the extremes."""
    table = Table(title=title, title_justify="left", title_style="")
    for heading in ("metric", "mean", "95 % interval", "lowest", "highest"):
        table.add_column(heading, justify="left" if heading == "metric" else "right", no_wrap=True)
    for name in sorted(latest):
        values = latest[name]
        if not np.isfinite(values).any():
            continue
        mean, low, high = plotting.mean_and_interval(values)
        interval = f"{low:.2f} to {high:.2f}" if np.isfinite(low) else "needs two seeds"
        table.add_row(name, f"{mean:.2f}", interval, f"{np.nanmin(values):.2f}", f"{np.nanmax(values):.2f}")
    Console().print(table)


def _latest(series: np.ndarray) -> np.ndarray:
    """The last measured value of each seed."""
    return np.array([([np.nan, *row[np.isfinite(row)]])[-1] for row in series])


# ------------------------------------------------------------------------------------------------ the command line


def _numbers() -> ConstructorRegistry:
    """2e6 counts as a whole number, and a config's numeric leaves (numbers or arrays) are numbers here."""
    registry = ConstructorRegistry()

    def spec(kind: type, parse: Any, show: Any, is_optional: bool) -> PrimitiveConstructorSpec:
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar=f"{kind.__name__.upper()}|None" if is_optional else kind.__name__.upper(),
            instance_from_str=lambda words: None if is_optional and words[0].lower() == "none" else parse(words[0]),
            is_instance=lambda value: isinstance(value, (int, float)) or (is_optional and value is None),
            str_from_instance=lambda value: ["None" if value is None else show(value)],
        )

    @registry.primitive_rule
    def rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
        kinds = set(get_args(info.type))
        is_optional = type(None) in kinds
        if info.type is int or kinds == {int, type(None)}:
            return spec(int, _whole_number, str, is_optional)
        if jax.Array in kinds:
            return spec(float, float, "{:g}".format, is_optional)
        return None

    return registry


def _whole_number(word: str) -> int:
    number = float(word)
    if number != int(number):
        raise ValueError(f"{word} is not a whole number.")
    return int(number)


def _given_env(argv: Sequence[str]) -> str | None:
    """The value of --env, which decides the defaults of all others."""
    for word, following in zip(argv, [*argv[1:], None], strict=True):
        if word == "--env":
            return following
        if word.startswith("--env="):
            return word.removeprefix("--env=")
    return None


def _key_values(pairs: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE pairs; values are JSON where they can be read as such, words otherwise."""
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UsageError(f"--env-kwargs takes KEY=VALUE, such as map_name=3m, not {pair!r}.")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = {"True": True, "False": False}.get(value, value)
    return options


def _nearest(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f": choose one of {', '.join(names)}"


def _new_folder(algorithm: str, env: str) -> Path:
    base = Path("runs") / f"{algorithm}-{env}-{datetime.now():%Y%m%d-%H%M%S}"
    return next(p for i in range(1000) if not (p := Path(f"{base}-{i}" if i else base)).exists())


def _raised_by_jmarl(error: Exception) -> bool:
    """Whether the library itself refused something, rather than jax or a bug."""
    innermost = traceback.extract_tb(error.__traceback__)[-1]
    return Path(jmarl.__file__).parent in Path(innermost.filename).parents


if __name__ == "__main__":
    main()
