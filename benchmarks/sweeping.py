"""`train.py --sweep NAME=VALUE,VALUE ...`: every combination of the values, each with all seeds.

    python benchmarks/train.py mappo --sweep learning-rate=1e-4,1e-3 gamma=0.9,0.95 --seeds 8
    python benchmarks/train.py ippo --env CartPole-v1 --sweep hidden-sizes=64+64,128 recurrent=false,true

Any option of train.py can be swept. Combinations that differ only in numeric hyperparameters are trained together, in
one compilation; the others one after another. Each leaves a run folder of its own, with the numbers that `train.py`
would have left there without --sweep, to float rounding. `train.py --resume FOLDER` goes on with a sweep.
"""

import dataclasses
import itertools
import json
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import jmarl
import plotting
import train
from command_line import UsageError, env_kwargs_of, make_loop, parse
from jmarl.logging import Sink

WORDS = ".sweep.json"  # the command line, by which a sweep is resumed; hidden, since `report.py FOLDER/*` is for runs
CHECKPOINTS = ".checkpoints"  # until the sweep is complete


class Setting(NamedTuple):
    """One combination of values: what its command line says."""

    name: str
    words: list[str]
    algorithm: str
    options: Any
    config: Any


def take_words(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The NAME=VALUES after --sweep, and the other words."""
    begin = argv.index("--sweep")
    swept = list(itertools.takewhile(lambda word: not word.startswith("-"), argv[begin + 1 :]))
    return swept, [*argv[:begin], *argv[begin + 1 + len(swept) :]]


def sweep(argv: Sequence[str], resumed: Path | None = None) -> Path:
    """Trains all combinations, those of a folder if one is `resumed`, and returns the folder of their run folders."""
    swept, rest = take_words(argv)
    settings = _settings(swept, rest)
    options = settings[0].options
    if options.distributed:
        raise UsageError("--sweep and --distributed do not go together: start a sweep for each machine.")
    train.use_devices(options.devices, False, len(settings) * options.seeds)
    folder = resumed or options.run_dir or train._new_folder(f"sweep-{settings[0].algorithm}", options.env)
    if resumed is None:
        try:
            jmarl.logging.run_folder(folder)
        except FileExistsError as error:
            raise UsageError(str(error)) from error
        train._write_whole(folder / WORDS, lambda path: path.write_text(json.dumps(list(argv)) + "\n"))
    groups = [list(group) for _, group in itertools.groupby(sorted(settings, key=_compilation), key=_compilation)]
    print(f"{len(settings)} settings of {options.seeds} seeds in {len(groups)} compilations, results in {folder}")
    for group in groups:
        if not _train_together(group, folder):
            if options.checkpoint_every:
                print(f"To go on: python benchmarks/train.py --resume {shlex.quote(str(folder))}")
            return folder
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    _print_table(settings, folder)
    return folder


def resume(folder: Path) -> Path:
    """Goes on with a sweep that was stopped or killed."""
    return sweep(json.loads((folder / WORDS).read_text()), folder)


def _settings(swept: Sequence[str], rest: Sequence[str]) -> list[Setting]:
    choices = []
    for word in swept:
        name, equals, values = word.partition("=")
        if not equals or not name or not values:
            raise UsageError(f"--sweep takes NAME=VALUE,VALUE, such as learning-rate=1e-4,1e-3, not {word!r}.")
        choices.append([(name.replace("_", "-"), value) for value in values.split(",")])
    if not choices:
        raise UsageError("--sweep takes NAME=VALUE,VALUE, such as learning-rate=1e-4,1e-3, and there is none.")
    settings = []
    for values in itertools.product(*choices):
        words = [*rest, *itertools.chain.from_iterable(itertools.starmap(as_option, values))]
        name = "-".join(f"{name}={value}" for name, value in values).replace("/", "_")
        settings.append(setting_of(words, name))
    return settings


def setting_of(words: Sequence[str], name: str = "") -> Setting:
    """What these words of train.py's command line say."""
    does = "Trains {algorithm} on {env} with each of several settings."
    return Setting(name, list(words), *parse(words, train._options, script="train.py", does=does))


def as_option(name: str, value: str) -> list[str]:
    """The words of the command line that say NAME=VALUE."""
    if value.lower() in ("true", "false"):
        return [f"--{name}" if value.lower() == "true" else f"--no-{name}"]
    return [f"--{name}", *value.split("+")]


def _compilation(setting: Setting) -> str:
    """What settings must have in common to be compiled as one: all but numbers."""
    fields = setting.config.__dataclass_fields__.values()
    values = {field.name: getattr(setting.config, field.name) for field in fields}
    numbers = {field.name for field in fields if field.metadata.get("pytree_node", True)}
    return repr((setting.options, {k: "a number" if k in numbers and v is not None else v for k, v in values.items()}))


def _train_together(group: Sequence[Setting], folder: Path) -> bool:
    """One run of all seeds of settings that differ in numbers only. Returns whether it came to its end."""
    algorithm, options = group[0].algorithm, group[0].options
    env_kwargs = env_kwargs_of(algorithm, options)
    try:
        env, eval_env = train.make_envs(options.env, env_kwargs)
        loop = make_loop(algorithm, env, options, num_envs=options.num_envs)
        num_steps = max(1, round(options.total_steps / loop.env_steps_per_step))
        configs = [jmarl.training.with_horizon(loop, setting.config, num_steps) for setting in group]
        loop.algorithm(env.spec, configs[0])
    except (ValueError, TypeError, ImportError) as error:
        raise UsageError(f"{group[0].name}: {error}") from error
    names = [field.name for field in dataclasses.fields(configs[0])]
    values = {name: [getattr(config, name) for config in configs] for name in names}
    differing = {name: x for name, x in values.items() if any(value != x[0] for value in x)}
    config, axes = jmarl.sweep(configs[0], **differing) if differing else (configs[0], None)

    sinks = [jmarl.logging.terminal()]
    for i, (setting, own) in enumerate(zip(group, configs, strict=True)):
        own_folder = folder / setting.name
        own_folder.mkdir(exist_ok=True)  # it is there if the sweep is resumed
        # No checkpoints of its own, so it cannot be resumed.
        own_options = dataclasses.replace(options, run_dir=own_folder, checkpoint_every=0.0)
        facts = train.facts_of(algorithm, own_options, own, env_kwargs, own_folder, setting.words)
        text = json.dumps(facts, indent=2) + "\n"
        train._write_whole(own_folder / "config.json", lambda path, text=text: path.write_text(text))
        files = jmarl.logging.csv_file(own_folder / "metrics.csv"), jmarl.logging.json_file(own_folder / "metrics.json")
        part = slice(i * options.seeds, (i + 1) * options.seeds)
        sinks += [_of_part(sink, part) for sink in files]
    checkpoints = folder / CHECKPOINTS / group[0].name
    checkpoints.parent.mkdir(exist_ok=True)
    checkpoint = jmarl.Checkpointing(checkpoints, options.checkpoint_every, keep=1, resume=checkpoints.exists())
    state = jmarl.run(
        loop,
        jax.random.split(jax.random.key(options.seed))[0],  # as in train.py
        config,
        sweep_axes=axes,
        num_steps=num_steps,
        steps_per_chunk=options.log_every,
        num_seeds=options.seeds,
        sinks=sinks,
        devices=options.devices,
        split=options.split,
        evaluation=jmarl.Evaluation(options.eval_episodes, options.eval_every, eval_env)
        if options.eval_episodes
        else None,
        checkpoint=checkpoint if options.checkpoint_every else None,
    )
    for i, setting in enumerate(group):
        part = slice(i * options.seeds, (i + 1) * options.seeds)
        params = jax.tree.map(lambda x, part=part: np.asarray(x[part]), state.learner.params)
        jmarl.export.save_parameters(params, folder / setting.name / "params.safetensors")
    return int(state.env_steps[0]) == num_steps * loop.env_steps_per_step


def _of_part(sink: Sink, part: slice) -> Sink:
    """A sink that gets the rows of one setting."""

    def write(env_steps, wall_s, metrics):
        sink.write(env_steps, wall_s, {name: values[part] for name, values in metrics.items()})

    return sink._replace(start=lambda info: sink.start({**info, "num_seeds": part.stop - part.start}), write=write)


def _print_table(settings: Sequence[Setting], folder: Path) -> None:
    """Each setting's last return: mean over seeds, the 95 % interval of that mean, and the extremes."""
    table = Table(title="return_sum at the end", title_justify="left", title_style="")
    table.add_column("setting", overflow="fold")
    for heading in ("mean", "95 % interval", "lowest", "highest"):
        table.add_column(heading, justify="right", no_wrap=True)
    for setting in settings:
        _, metrics = plotting.load_metrics(folder / setting.name)
        name = "eval/return_sum" if "eval/return_sum" in metrics else "train/return_sum"
        values = train._latest(metrics[name])
        mean, low, high = plotting.mean_and_interval(values)
        interval = f"{low:.2f} to {high:.2f}" if np.isfinite(low) else "needs two seeds"
        table.add_row(setting.name, f"{mean:.2f}", interval, f"{np.nanmin(values):.2f}", f"{np.nanmax(values):.2f}")
    Console().print(table)
