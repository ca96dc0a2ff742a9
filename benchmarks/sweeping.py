"""`train.py --sweep NAME=VALUE,VALUE ...`: every combination of the values, each with all seeds.

    python benchmarks/train.py mappo --sweep learning-rate=1e-4,1e-3 gamma=0.9,0.95 --seeds 8
    python benchmarks/train.py ippo --env CartPole-v1 --sweep hidden-sizes=64+64,128 recurrent=false,true

Any option of train.py can be swept. Combinations that differ only in numeric hyperparameters are trained together, in
one compilation; the others one after another. Each leaves a run folder of its own, with the numbers that `train.py`
would have left there without --sweep, to float rounding, but for checkpoints, pictures and the absolute metric.
`train.py --resume FOLDER` goes on with a sweep.
"""

import collections
import dataclasses
import itertools
import json
import secrets
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
from jmarl.types import Env, Loop
from runs import read_config

STATUS = ".sweep.json"  # the command line and whether all is done; hidden, since `report.py FOLDER/*` is for runs
CHECKPOINTS = ".checkpoints"  # until the sweep is complete


class Setting(NamedTuple):
    """One combination of values: what its command line says."""

    name: str
    words: list[str]
    algorithm: str
    options: Any
    config: Any


class Group(NamedTuple):
    """Settings that are trained together, the config of each, and what they have in common."""

    settings: list[Setting]
    configs: list[Any]
    options: Any
    env_kwargs: dict[str, Any]
    loop: Loop
    eval_env: Env
    num_iterations: int


def take_words(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The NAME=VALUES after --sweep, and the other words."""
    begin = argv.index("--sweep")
    swept = list(itertools.takewhile(lambda word: not word.startswith("-"), argv[begin + 1 :]))
    return swept, [*argv[:begin], *argv[begin + 1 + len(swept) :]]


def sweep(argv: Sequence[str], resumed: Path | None = None) -> Path:
    """Trains all combinations, those of a folder if one is `resumed`, and returns the folder of their run folders."""
    swept, rest = take_words(argv)
    settings = _settings(swept, rest)
    for setting in settings:
        _require_possible(setting)
    options = settings[0].options
    if resumed is not None and not options.checkpoint_every:
        raise UsageError(f"{resumed} has no checkpoints, because of --checkpoint-every 0: start a new sweep.")
    train.use_devices(options.devices, False, len(settings) * options.seeds)
    folder = resumed or options.run_dir or train._new_folder(f"sweep-{settings[0].algorithm}", options.env)
    if resumed is None:
        try:
            jmarl.logging.run_folder(folder)
        except OSError as error:
            raise UsageError(str(error)) from error
        _write_status(folder, argv, is_complete=False)
    how_to_resume = f"To go on: python benchmarks/train.py --resume {shlex.quote(str(folder))}"
    how_to_resume = how_to_resume if options.checkpoint_every else ""
    with train.one_sentence(folder, is_new=resumed is None, how_to_resume=how_to_resume):
        by_compilation = itertools.groupby(sorted(settings, key=_compilation), key=_compilation)
        groups = [_group_of(list(group)) for _, group in by_compilation]
        if len(groups) > 1:  # what only the last one refuses is refused before the first was trained
            for group in groups:
                _trace(group)
        print(f"{len(settings)} settings of {options.seeds} seeds in {len(groups)} compilations, results in {folder}")
        for group in groups:
            if not _train_together(group, folder):
                if how_to_resume:
                    print(how_to_resume)
                return folder
    _write_status(folder, argv, is_complete=True)  # first: without checkpoints there is no going on
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    _print_table(settings, folder)
    return folder


def resume(folder: Path) -> Path:
    """Goes on with a sweep that was stopped or killed; one that is complete stays as it is."""
    try:
        status = json.loads((folder / STATUS).read_text())
        words, is_complete = status["words"], status["is_complete"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{folder} holds no sweep to go on with: its {STATUS} cannot be read ({error}).") from error
    if is_complete:
        print(f"The sweep in {folder} is complete: there is nothing to go on with.")
        return folder
    return sweep(words, folder)


def _write_status(folder: Path, argv: Sequence[str], *, is_complete: bool) -> None:
    text = json.dumps({"words": list(argv), "is_complete": is_complete}) + "\n"
    train._write_whole(folder / STATUS, lambda path: path.write_text(text))


def _settings(swept: Sequence[str], rest: Sequence[str]) -> list[Setting]:
    choices = []
    for word in swept:
        name, equals, values = word.partition("=")
        if not equals or not name or not values:
            raise UsageError(f"--sweep takes NAME=VALUE,VALUE, such as learning-rate=1e-4,1e-3, not {word!r}.")
        choices.append([(name.replace("_", "-"), value) for value in values.split(",")])
    if not choices:
        raise UsageError("--sweep takes NAME=VALUE,VALUE, such as learning-rate=1e-4,1e-3, and there is none.")
    name, number = collections.Counter(of_option[0][0] for of_option in choices).most_common(1)[0]
    if number > 1:
        raise UsageError(f"--sweep names {name} {number} times: put all its values into one {name}=VALUE,VALUE.")
    settings = []
    for values in itertools.product(*choices):
        words = [*rest, *itertools.chain.from_iterable(itertools.starmap(as_option, values))]
        name = "-".join(f"{name}={value}" for name, value in values).replace("/", "_")
        settings.append(setting_of(words, name))
    name, number = collections.Counter(setting.name for setting in settings).most_common(1)[0]
    if number > 1:
        raise UsageError(f"--sweep has the setting {name} {number} times: give each value once.")
    return settings


def _require_possible(setting: Setting) -> None:
    """Refuses options that a sweep has no use for, where they were given."""
    given = {word.partition("=")[0].replace("_", "-") for word in setting.words}
    options = setting.options
    if options.distributed:
        raise UsageError("--sweep and --distributed do not go together: start a sweep for each machine.")
    if ("--gif" in given and options.gif) or ("--absolute-episodes" in given and options.absolute_episodes):
        raise UsageError(
            "--sweep draws no GIF and plays no absolute episodes: leave out --gif and --absolute-episodes, and train "
            "the setting that you choose once more by itself."
        )


def setting_of(words: Sequence[str], name: str = "") -> Setting:
    """What these words of train.py's command line say."""
    does = "Trains {algorithm} on {env} with each of several settings."
    setting = Setting(name, list(words), *parse(words, train._options, script="train.py", does=does))
    train.require_sensible(setting.options)
    return setting


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


def _group_of(settings: list[Setting]) -> Group:
    algorithm, options = settings[0].algorithm, settings[0].options
    env_kwargs = env_kwargs_of(algorithm, options)
    try:
        env, eval_env = train.make_envs(options.env, env_kwargs)
        loop = make_loop(algorithm, env, options, num_envs=options.num_envs)
        num_iterations = max(1, round(options.total_steps / loop.env_steps_per_iteration))
        configs = [jmarl.training.with_horizon(loop, setting.config, num_iterations) for setting in settings]
        loop.algorithm(env.spec, configs[0])
    except (ValueError, TypeError, ImportError) as error:
        raise UsageError(f"{settings[0].name}: {error}") from error
    return Group(settings, configs, options, env_kwargs, loop, eval_env, num_iterations)


def _trace(group: Group) -> None:
    """An iteration without numbers, by which all shapes are checked."""
    state = jax.eval_shape(group.loop.init, jax.random.key(0), group.configs[0])
    jax.eval_shape(group.loop.step, state, group.configs[0])


def _train_together(group: Group, folder: Path) -> bool:
    """One run of all seeds of settings that differ in numbers only. Returns whether it came to its end."""
    settings, configs, options, _, loop, eval_env, num_iterations = group
    names = [field.name for field in dataclasses.fields(configs[0])]
    values = {name: [getattr(config, name) for config in configs] for name in names}
    differing = {name: x for name, x in values.items() if any(value != x[0] for value in x)}
    config, axes = jmarl.sweep(configs[0], **differing) if differing else (configs[0], None)
    checkpoints = folder / CHECKPOINTS / settings[0].name
    for setting in settings:
        train.require_checkpoints(folder / setting.name, checkpoints)
    checkpoint = jmarl.Checkpointing(checkpoints, options.checkpoint_every, keep=1, resume=checkpoints.exists())
    state = jmarl.run(
        loop,
        jax.random.split(jax.random.key(options.seed))[0],  # as in train.py
        config,
        sweep_axes=axes,
        num_iterations=num_iterations,
        iterations_per_chunk=options.log_every,
        num_seeds=options.seeds,
        sinks=[jmarl.logging.terminal(), *_sinks(group, folder)],
        devices=options.devices,
        shard=options.shard,
        evaluation=jmarl.Evaluation(options.eval_episodes, options.eval_every, eval_env)
        if options.eval_episodes
        else None,
        checkpoint=checkpoint if options.checkpoint_every else None,
    )
    for i, setting in enumerate(settings):
        part = slice(i * options.seeds, (i + 1) * options.seeds)
        params = jax.tree.map(lambda x, part=part: np.asarray(x[part]), state.train_state.params)
        jmarl.export.save_parameters(params, folder / setting.name / "params.safetensors")
    return train.is_complete(folder / settings[0].name, num_iterations * loop.env_steps_per_iteration)


def _sinks(group: Group, folder: Path) -> list[Sink]:
    """Those that `train.py` would have, for each setting."""
    of_settings = []
    for i, (setting, config) in enumerate(zip(group.settings, group.configs, strict=True)):
        own, num_seeds = folder / setting.name, group.options.seeds
        # It has no checkpoints of its own, so it cannot be resumed.
        unused = {"checkpoint_every": 0.0, "gif": False, "absolute_episodes": 0}
        options = dataclasses.replace(group.options, run_dir=own, **unused)
        facts = train.facts_of(setting.algorithm, options, config, group.env_kwargs, own, setting.words)
        if options.wandb is not None:  # by which a resumed sweep finds what was sent
            is_there = (own / "config.json").exists()
            facts["wandb_id"] = read_config(own)["wandb_id"] if is_there else secrets.token_hex(4)
        try:
            sinks = [_folder(own, facts), *train._sinks(own, options, facts)]
        except ImportError as error:
            raise UsageError(str(error)) from error
        of_settings.append([_of_part(sink, slice(i * num_seeds, (i + 1) * num_seeds)) for sink in sinks])
    # All folders first, and all files of metrics last: when one of these is there, nothing is refused any more.
    return list(itertools.chain.from_iterable(zip(*of_settings, strict=True)))


def _folder(path: Path, facts: dict[str, Any]) -> Sink:
    """Makes a run folder once it is sure that there is a run; a resumed sweep finds it there."""

    def start(info):
        path.mkdir(exist_ok=True)
        if not (path / "config.json").exists():
            text = json.dumps(facts, indent=2) + "\n"
            train._write_whole(path / "config.json", lambda path: path.write_text(text))

    return Sink(start=start, write=lambda *_: None, close=lambda: None)


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
        if not np.isfinite(values).any():
            table.add_row(setting.name, "no episode finished")
            continue
        mean, low, high = plotting.mean_and_interval(values)
        interval = f"{low:.2f} to {high:.2f}" if np.isfinite(low) else "needs two seeds"
        table.add_row(setting.name, f"{mean:.2f}", interval, f"{np.nanmin(values):.2f}", f"{np.nanmax(values):.2f}")
    Console().print(table)
