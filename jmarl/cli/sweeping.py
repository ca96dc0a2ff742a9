"""`jmarl train --sweep NAME=VALUE,VALUE ...`: every combination of the values, each with all seeds.

    jmarl train mappo --sweep learning-rate=1e-4,1e-3 gamma=0.9,0.95 --seeds 8
    jmarl train ippo --env CartPole-v1 --sweep hidden-sizes=64+64,128 recurrent=false,true

Any option of `jmarl train` can be swept. Combinations that differ only in numeric hyperparameters are trained together,
in one compilation; the others one after another. Each leaves a run folder of its own, with the numbers that `jmarl
train` would have left there without --sweep, to float rounding, but for checkpoints, pictures and the absolute metric.
`jmarl train --resume FOLDER` goes on with a sweep.
"""

import collections
import contextlib
import dataclasses
import io
import itertools
import json
import secrets
import shlex
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import jmarl
from jmarl import configs
from jmarl.cli import experiment, run_folders
from jmarl.cli.errors import UsageError
from jmarl.cli.options import canonical, parse, without
from jmarl.logging import Sink

STATUS = ".sweep.json"  # the command line and whether all is done; hidden, since `report.py FOLDER/*` is for runs
CHECKPOINTS = ".checkpoints"  # until the sweep is complete


class Setting(NamedTuple):
    """One combination of values: what its command line says."""

    name: str
    words: list[str]
    algorithm: str
    options: Any
    config: Any
    env_kwargs: dict[str, Any]
    is_quiet: bool


class Group(NamedTuple):
    """Settings that are trained together, what is built for each, and the options that they share."""

    settings: list[Setting]
    built: list[experiment.Built]
    options: Any


def take_words(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The NAME=VALUES after --sweep, and the other words."""
    begin = next(i for i, word in enumerate(argv) if canonical(word) == "--sweep")
    inline = [argv[begin].partition("=")[2]] if "=" in argv[begin] else []
    following = list(itertools.takewhile(lambda word: not word.startswith("-"), argv[begin + 1 :]))
    return [*inline, *following], [*argv[:begin], *argv[begin + 1 + len(following) :]]


def sweep(argv: Sequence[str], resumed: Path | None = None, typed: Collection[str] | None = None) -> Path:
    """Trains all combinations and returns the folder of their run folders.

    Args:
      argv: words of the command line.
      resumed: the folder of a sweep to go on with.
      typed: names of own functions that the user typed, where `argv` is read from that folder.
    """
    swept, rest = take_words(argv)
    settings = _settings(swept, rest, typed)
    for setting in settings:
        _require_possible(setting)
    if settings[0].is_quiet:
        with contextlib.redirect_stdout(io.StringIO()):
            folder = _sweep(settings, argv, resumed)
        print(folder)
        return folder
    return _sweep(settings, argv, resumed)


def _sweep(settings: list[Setting], argv: Sequence[str], resumed: Path | None) -> Path:
    options = settings[0].options
    if resumed is not None and not options.checkpoint_every:
        raise UsageError(f"{resumed} has no checkpoints, because of --checkpoint-every 0: start a new sweep.")
    experiment.use_devices(options.devices, False, len(settings) * options.seeds)
    folder = (
        resumed
        or options.run_dir
        or experiment.new_name(f"sweep-{settings[0].algorithm.rpartition('/')[2]}", options.env)
    )
    if resumed is None:
        try:
            jmarl.logging.run_folder(folder)
        except OSError as error:
            raise UsageError(str(error)) from error
        _write_status(folder, argv, is_complete=False)
    how_to_resume = experiment.how_to_resume(folder, settings[0].algorithm, options.env)
    how_to_resume = how_to_resume if options.checkpoint_every else ""
    with experiment.one_sentence(folder, is_new=resumed is None, how_to_resume=how_to_resume):
        by_compilation = itertools.groupby(sorted(settings, key=_compilation), key=_compilation)
        groups = [
            _group_of(list(group)) for _, group in by_compilation
        ]  # every setting is built, so its values checked
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


def resume(folder: Path, typed: Collection[str] = ()) -> Path:
    """Goes on with a sweep that was stopped or killed; one that is complete stays as it is."""
    try:
        status = json.loads((folder / STATUS).read_text())
        words, is_complete = status["words"], status["is_complete"]
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise TypeError("its words are none")
        take_words(words)
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise UsageError(f"{folder} holds no sweep to go on with: its {STATUS} cannot be read ({error}).") from error
    if is_complete:
        print(f"The sweep in {folder} is complete: there is nothing to go on with.")
        return folder
    return sweep(words, folder, typed)


def _write_status(folder: Path, argv: Sequence[str], *, is_complete: bool) -> None:
    run_folders.write_json(folder / STATUS, {"words": list(argv), "is_complete": is_complete})


def _settings(swept: Sequence[str], rest: Sequence[str], typed: Collection[str] | None) -> list[Setting]:
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
    rest = without(rest, {f"--{of_option[0][0]}" for of_option in choices})  # the values of the sweep count
    settings = []
    for combination in itertools.product(*choices):
        words = [*rest, *itertools.chain.from_iterable(itertools.starmap(as_option, combination))]
        name = "-".join(f"{option}={value}" for option, value in combination).replace("/", "_")
        settings.append(setting_of(words, name, typed))
    name, number = collections.Counter(setting.name for setting in settings).most_common(1)[0]
    if number > 1:
        raise UsageError(f"--sweep has the setting {name} {number} times: give each value once.")
    return settings


def _require_possible(setting: Setting) -> None:
    """Refuses options that a sweep has no use for, where they were given."""
    given = {canonical(word) for word in setting.words}
    options = setting.options
    if "--dry-run" in given:
        raise UsageError("--sweep and --dry-run do not go together: try one setting by itself.")
    if options.distributed:
        raise UsageError("--sweep and --distributed do not go together: start a sweep for each machine.")
    if ("--gif" in given and options.gif) or ("--absolute-episodes" in given and options.absolute_episodes):
        raise UsageError(
            "--sweep draws no GIF and plays no absolute episodes: leave out --gif and --absolute-episodes, and train "
            "the setting that you choose once more by itself."
        )


def setting_of(words: Sequence[str], name: str = "", typed: Collection[str] | None = None) -> Setting:
    """What these words of the command line say."""
    does = "Trains {algorithm} on {env} with each of several settings."
    said = parse(words, experiment.options_of, prog="jmarl train", does=does, given=typed)
    setting = Setting(name, list(words), said.algorithm, said.options, said.config, said.env_kwargs, said.mode.quiet)
    experiment.require_sensible(setting.options)
    return setting


def as_option(name: str, value: str) -> list[str]:
    """The words of the command line that say NAME=VALUE."""
    if value.lower() in ("true", "false"):
        return [f"--{name}" if value.lower() == "true" else f"--no-{name}"]
    return [f"--{name}", *value.split("+")]


def _compilation(setting: Setting) -> str:
    """What settings must have in common to be compiled as one: all but numbers."""
    numbers = configs.leaves(setting.config)
    values = {name: configs.get(setting.config, name) for name, _ in configs.fields(setting.config)}
    shapes = {k: "a number" if k in numbers and v is not None else v for k, v in values.items()}
    return repr((setting.options, setting.env_kwargs, shapes))


def _group_of(settings: list[Setting]) -> Group:
    built = []
    for setting in settings:
        try:
            built.append(experiment.build(setting.algorithm, setting.options, setting.config, setting.env_kwargs))
            experiment.require_memory(built[-1], setting.options)
        except UsageError as error:
            raise UsageError(f"{setting.name}: {error}") from error
    return Group(settings, built, settings[0].options)


def _trace(group: Group) -> None:
    """An iteration without numbers, by which all shapes are checked."""
    loop, config = group.built[0].loop, group.built[0].config
    state = jax.eval_shape(loop.init, jax.random.key(0), config)
    jax.eval_shape(loop.step, state, config)


def _train_together(group: Group, folder: Path) -> bool:
    """One run of all seeds of settings that differ in numbers only. Returns whether it came to its end."""
    settings, options = group.settings, group.options
    _, eval_env, loop, num_iterations, config, _ = group.built[0]
    values = {name: [configs.get(built.config, name) for built in group.built] for name in configs.leaves(config)}
    differing = {name: x for name, x in values.items() if any(value != x[0] for value in x)}
    config, axes = jmarl.sweep(config, **differing) if differing else (config, None)
    checkpoints = folder / CHECKPOINTS / settings[0].name
    for setting in settings:
        run_folders.require_checkpoints(folder / setting.name, checkpoints)
    checkpoint = jmarl.Checkpointing(checkpoints, options.checkpoint_every, keep=1, resume=checkpoints.exists())
    state = jmarl.run(
        loop,
        jax.random.split(jax.random.key(options.seed))[0],  # as of a run of its own
        config,
        sweep_axes=axes,
        num_iterations=num_iterations,
        iterations_per_chunk=options.log_every,
        num_seeds=options.seeds,
        sinks=[jmarl.logging.terminal(), *_sinks(group, folder)],
        devices=options.devices,
        shard=experiment.shard_of(options),
        evaluation=jmarl.Evaluation(options.eval_episodes, options.eval_every, eval_env)
        if options.eval_episodes
        else None,
        checkpoint=checkpoint if options.checkpoint_every else None,
    )
    for i, setting in enumerate(settings):
        part = slice(i * options.seeds, (i + 1) * options.seeds)
        params = jax.tree.map(lambda x, part=part: np.asarray(x[part]), state.train_state.params)
        own_folder = folder / setting.name
        jmarl.export.save_parameters(params, own_folder / "params.safetensors")
        if lost := run_folders.diverged(params, own_folder):
            facts = run_folders.read_config(own_folder) | {"diverged": lost}
            run_folders.write_json(own_folder / "config.json", facts)
    return run_folders.is_complete(folder / settings[0].name, num_iterations * loop.env_steps_per_iteration)


def _sinks(group: Group, folder: Path) -> list[Sink]:
    """Those that a run of its own would have, for each setting."""
    of_settings = []
    for i, (setting, built) in enumerate(zip(group.settings, group.built, strict=True)):
        path, num_seeds = folder / setting.name, group.options.seeds
        # It has no checkpoints of its own, so it cannot be resumed.
        unused = {"checkpoint_every": 0.0, "gif": False, "absolute_episodes": 0}
        options = dataclasses.replace(group.options, run_dir=path, **unused)
        command = shlex.join(["jmarl", "train", *setting.words])
        facts = run_folders.facts_of(setting.algorithm, options, built.config, setting.env_kwargs, path, command)
        if options.wandb is not None:  # by which a resumed sweep finds what was sent
            is_there = (path / "config.json").exists()
            facts["wandb_id"] = run_folders.read_config(path)["wandb_id"] if is_there else secrets.token_hex(4)
        try:
            sinks = [_folder(path, facts), *experiment.metric_files(path, options, facts)]
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
            run_folders.write_json(path / "config.json", facts)

    return Sink(start=start, write=lambda *_: None, close=lambda: None)


def _of_part(sink: Sink, part: slice) -> Sink:
    """A sink that gets the rows of one setting."""

    def write(env_steps, wall_s, metrics):
        sink.write(env_steps, wall_s, {name: values[part] for name, values in metrics.items()})

    return sink._replace(start=lambda info: sink.start({**info, "num_seeds": part.stop - part.start}), write=write)


def _print_table(settings: Sequence[Setting], folder: Path) -> None:
    """Each setting's last return: interquartile mean over seeds, its interval, the extremes, and who diverged."""
    table = Table(title="return_sum at the end", title_justify="left", title_style="")
    table.add_column("setting", overflow="fold")
    for heading in ("IQM", "95 % interval", "lowest", "highest"):
        table.add_column(heading, justify="right", no_wrap=True)
    for setting in settings:
        metrics = run_folders.load_metrics(folder / setting.name)[1]
        lost = ", ".join(run_folders.read_config(folder / setting.name).get("diverged", {}))
        name = f"{setting.name} (seeds diverged: {lost})" if lost else setting.name
        values = metrics["eval/return_sum" if "eval/return_sum" in metrics else "train/return_sum"]
        table.add_row(name, *(experiment.row_of_table(run_folders.latest(values)) or ["no episode finished"]))
    Console().print(table)
