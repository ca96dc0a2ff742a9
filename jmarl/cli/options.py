"""What commands share: `ALGORITHM --env NAME`, the preset of the two as defaults, flat options grouped by subject."""

import collections
import dataclasses
import itertools
import json
import math
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args

import jax
import numpy as np
import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from jmarl import configs, presets
from jmarl.cli import composed, own, run_folders
from jmarl.cli.errors import LARGEST, UsageError, as_words, nearest

_SUBJECTS = ("algorithm", "networks", "optimiser", "exploration")  # in the order of --help
_SIGNED = (
    "target_entropy",
    "log_std_min",
    "log_std_max",
    "shaping_start",
    "shaping_end",
)  # hyperparameters that may be negative


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mode:
    """What to do."""

    config: Path | None = None  # start from this config.json of any run: options on the command line win
    sweep: tuple[str, ...] = ()  # NAME=VALUE,VALUE ..: every combination, with all seeds; lists as 64+64
    resume: Path | None = None  # go on with this run or sweep; --total-steps MORE trains a finished run longer
    dry_run: bool = False  # build everything and say what it takes, but train nothing
    quiet: bool = False  # print nothing but the run folder


class Arguments(NamedTuple):
    """What a command line says."""

    algorithm: str
    options: Any
    config: Any
    env_kwargs: dict[str, Any]
    mode: Mode = Mode()


def parse(
    argv: Sequence[str],
    options: Callable[[presets.Preset], Any],
    *,
    prog: str,
    does: str,
    given: Collection[str] | None = None,
    has_mode: bool = True,
) -> Arguments:
    """Reads the words of a command that begins with an algorithm.

    Args:
      argv: words; the algorithm comes first, or --config names a run that has one.
      options: the command's own options, a dataclass with a field `env`, as they are for a preset.
      prog: the command, for --help.
      does: its first sentence there, with {algorithm} and {env}.
      given: names of own functions that the user typed, where `argv` comes from a file; None: `argv` was typed.
      has_mode: the options of `Mode` are among the command's.
    """
    argv = composed.take_options(argv)
    wants_help = not argv or argv[0] in ("-h", "--help")
    _require_once(argv)
    start = value_of("--config", argv)
    facts = None if start is None else run_folders.read_config(Path(start))
    if facts is not None and argv[0].startswith("-"):
        argv = [own.require_named(facts["algorithm"], [], "the algorithm as the first word"), *argv]
    algorithm = "mappo" if wants_help else argv[0]
    if algorithm.startswith("-"):
        raise UsageError(f"name an algorithm before {algorithm}: {nearest(algorithm, own.ALGORITHMS)}")
    if facts is not None and algorithm != facts["algorithm"] and not own.is_own(algorithm):
        raise UsageError(f"{start} is of {facts['algorithm']}, not {algorithm}: leave one of them out.")
    algorithm = own.require_named(algorithm, given, "it as the algorithm")
    typed_env = value_of("--env", argv)
    env = typed_env or (facts and own.require_named(facts["env"], [], f"--env {facts['env']}"))
    env = own.require_named(env or "MPE_simple_spread_v3", given, f"--env {env}")
    preset = preset_of(algorithm, env, value_of("--preset", argv) or (facts or {}).get("preset", "default"))
    defaults, config, env_kwargs = options(preset), preset.config, preset.env_kwargs
    if facts is not None:
        defaults, config = run_folders.restore(defaults, facts), run_folders.restore_config(config, facts)
        if run_folders.is_filled_in(facts):
            config = run_folders.without_horizon(config)
        is_same = typed_env in (None, facts["env"])
        env_kwargs = facts["env_kwargs"] if is_same else env_kwargs
        defaults = dataclasses.replace(
            defaults, env=env, env_kwargs=show_key_values(env_kwargs), run_dir=None, distributed=False
        )
    _require_distinct(algorithm, defaults, config)
    everything = side_by_side(defaults, config, has_mode=has_mode)
    with numbers():
        parsed = tyro.cli(
            type(everything),
            prog=f"{prog} {{{','.join(own.ALGORITHMS)}}}" if wants_help else f"{prog} {algorithm}",
            description=f"{does.format(algorithm=algorithm, env=env)} The defaults shown are for these two.\n\n"
            f"{composed.HELP}",
            default=everything,
            args=["--help"] if wants_help else argv[1:],
            config=(tyro.conf.OmitArgPrefixes,),
        )
    chosen, *by_subject = (getattr(parsed, field.name) for field in dataclasses.fields(parsed))
    mode = by_subject.pop() if has_mode else Mode()
    values = {_dotted(name): value for group in by_subject for name, value in vars(group).items()}
    config = configs.replace(config, {name: x for name, x in values.items() if x is not configs.get(config, name)})
    if given is not None:
        chosen = dataclasses.replace(chosen, env=env)
    require_sensible_numbers(chosen, config)
    return Arguments(algorithm, chosen, config, env_kwargs | key_values(chosen.env_kwargs), mode)


def preset_of(algorithm: str, env: str, name: str = "default") -> presets.Preset:
    """The preset, also of functions of the user's own: what is known where nothing is known."""
    known = "own" if own.is_own(env) else env
    if composed.is_composed(algorithm):
        return _preset_of_composed(algorithm, env, name)
    try:
        if not own.is_own(algorithm):
            own.find_algorithm(algorithm)
            return presets.for_environment(algorithm, known, name)._replace(env=env)
        config = own.default_config(algorithm)
        replay = presets.Replay() if own.learns_from(algorithm) == "replay" else None
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
    length = 16 if replay else 128
    return presets.Preset(env, config, presets.task(known), num_envs=32, rollout_length=length, replay=replay)


def _preset_of_composed(algorithm: str, env: str, name: str) -> presets.Preset:
    """That of the first algorithm within that learns, with the configs of all."""
    within = {inner: preset_of(inner, env, name) for inner in composed.innermost(algorithm)}
    learning = [preset for inner, preset in within.items() if inner != "random"] or list(within.values())
    # What `shaped` reads apart is not added to the reward as well.
    kwargs = {k: v for k, v in learning[0].env_kwargs.items() if "shaped(" not in algorithm or k != "shaped_reward"}
    config = composed.config(algorithm, lambda inner: within[inner].config, own.config_class)
    return learning[0]._replace(config=config, env_kwargs=kwargs)


def side_by_side(options: Any, config: Any, *, has_mode: bool = True) -> Any:
    """A dataclass of dataclasses: without their prefixes names are flat, and each keeps its own heading in --help."""
    split = list(_by_subject(config))
    groups = [options, *(instance for instance, _ in split), *([Mode()] if has_mode else [])]
    titles = ["experiment", *(title for _, title in split), *(["command"] if has_mode else [])]
    fields = [(title.replace(" ", "_"), type(group)) for title, group in zip(titles, groups, strict=True)]
    return dataclasses.make_dataclass("Arguments", fields)(*groups)


def _by_subject(config: Any) -> Iterator[tuple[Any, str]]:
    """The fields of a config, and of those that it holds, as one dataclass for each subject, with its title."""
    groups: dict[str, list[tuple[str, Any, Any]]] = collections.defaultdict(list)

    def collect(holder: Any, prefix: str) -> None:
        if isinstance(holder, dict):
            for name, inner in holder.items():
                collect(inner, f"{prefix}{name}.")
            return
        hints, texts = typing.get_type_hints(type(holder)), configs.explain(type(holder))
        for name, subject in configs.subjects(type(holder)).items():
            value = getattr(holder, name)
            if configs.is_config(value):
                collect(value, f"{prefix}{name}.")
                continue
            about = tyro.conf.arg(name=f"{prefix}{name}", help=texts[name] or None)
            title = f"{prefix.replace('.', ' ')}{subject}"
            groups[title].append((f"{prefix}{name}".replace(".", "__"), Annotated[hints[name], about], value))

    collect(config, "")
    for title in sorted(groups, key=lambda title: (title.count(" "), _SUBJECTS.index(title.split()[-1]))):
        names, kinds, values = zip(*groups[title], strict=True)
        cls = dataclasses.make_dataclass(title.replace(" ", "_"), list(zip(names, kinds, strict=True)))
        cls.__doc__ = ""
        yield cls(*values), title


def _dotted(name: str) -> str:
    return name.replace("__", ".")


def _require_distinct(algorithm: str, options: Any, config: Any) -> None:
    """Refuses the config of an own algorithm with a field that is an option already."""
    taken = {field.name for holder in (options, Mode()) for field in dataclasses.fields(holder)}
    for field in () if isinstance(config, dict) else dataclasses.fields(config):
        if field.name in taken:
            raise UsageError(f"{algorithm} has a field {field.name} in its config, which is an option here: rename it.")


def require_sensible_numbers(options: Any, config: Any) -> None:
    """Refuses numbers that cannot be meant, and that the library would take, or fail on without a sentence."""
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if isinstance(value, int) and field.name not in ("seed", "total_steps") and value > LARGEST:
            raise UsageError(f"{as_words(field.name)} {value} must be less than 2**31.")
    is_ours = isinstance(config, dict) or type(config).__module__.startswith("jmarl.")
    for name, _ in configs.fields(config):
        values, last = configs.get(config, name), name.rpartition(".")[2]
        for value in values if isinstance(values, tuple) else (values,):
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            option = f"{as_words(name)} {value:g}" if isinstance(value, float) else f"{as_words(name)} {value}"
            if not math.isfinite(value) or abs(float(value)) > float(np.finfo(np.float32).max):
                raise UsageError(f"{option} must be a finite number.")
            if isinstance(value, int) and value > LARGEST:
                raise UsageError(f"{option} must be less than 2**31.")
            if is_ours and value < 0 and last not in _SIGNED:
                raise UsageError(f"{option} must not be negative.")
            if is_ours and value == 0 and last in ("max_grad_norm", "horizon", "epsilon_steps", "noise_steps"):
                raise UsageError(f"{option} must be positive.")


def key_values(pairs: Iterable[str]) -> dict[str, Any]:
    """KEY=VALUE pairs; values are JSON where they can be read as such, words otherwise."""
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UsageError(f"--env-kwargs takes KEY=VALUE, such as map_name=3m, not {pair!r}.")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = {"True": True, "False": False, "None": None}.get(value, value)
    return options


def show_key_values(options: dict[str, Any]) -> tuple[str, ...]:
    """The inverse of `key_values`."""
    return tuple(f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in options.items())


def value_of(option: str, argv: Sequence[str]) -> str | None:
    """The value of an option that decides the defaults of all others."""
    for word, following in itertools.pairwise([*argv, None]):
        if word is not None and canonical(word) == option:
            _, equals, value = word.partition("=")
            return value if equals else following
    return None


def canonical(word: str) -> str:
    """The option of a word, spelled with hyphens, without its value and without "no-"; "" for other words."""
    name = word.partition("=")[0].replace("_", "-")
    return f"--{name[2:].removeprefix('no-')}" if name.startswith("--") else ""


def without(words: Sequence[str], options: Collection[str]) -> list[str]:
    """The words without these options and their values."""
    kept, is_kept = [], True
    for word in words:
        is_kept = canonical(word) not in options if canonical(word) else is_kept
        kept += [word] if is_kept else []
    return kept


def _require_once(argv: Sequence[str]) -> None:
    """Refuses an option that is given twice: one of its values would count for nothing, in silence."""
    counts = collections.Counter(option for word in argv if (option := canonical(word)))
    for option, number in counts.items():
        if number > 1:
            raise UsageError(f"{option} is given {number} times: give it once.")


def numbers() -> ConstructorRegistry:
    """2e6 counts as a whole number, and a config's numeric leaves (numbers or arrays) are numbers here."""
    registry = ConstructorRegistry()

    def number(kind: type, parse: Callable[[str], Any], show: Callable[[Any], str], is_optional: bool) -> Any:
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar=kind.__name__.upper() + "|None" * is_optional,
            instance_from_str=lambda words: None if is_optional and words[0].lower() == "none" else parse(words[0]),
            is_instance=lambda value: isinstance(value, (int, float)) or (is_optional and value is None),
            str_from_instance=lambda value: ["None" if value is None else show(value)],
        )

    @registry.primitive_rule
    def rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
        kinds = set(get_args(info.type))
        is_optional = type(None) in kinds
        if info.type is int or kinds == {int, type(None)}:
            return number(int, _whole_number, str, is_optional)
        if jax.Array in kinds:
            return number(float, float, "{:g}".format, is_optional)
        return None

    return registry


def _whole_number(word: str) -> int:
    number = float(word)
    if not number.is_integer():  # nor are infinity and NaN
        raise ValueError(f"{word} is not a whole number.")
    return int(number)
