"""What the scripts' command lines share: `ALGORITHM --env NAME`, the preset of the two as defaults, flat options."""

import contextlib
import dataclasses
import difflib
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

import jmarl
import presets

ALGORITHMS = {
    "ippo": jmarl.ippo,
    "mappo": jmarl.mappo,
    "iql": jmarl.iql,
    "vdn": jmarl.vdn,
    "qmix": jmarl.qmix,
    "cw_qmix": jmarl.cw_qmix,
    "ow_qmix": jmarl.ow_qmix,
    "pqn_vdn": jmarl.pqn_vdn,
    "iddpg": jmarl.iddpg,
    "maddpg": jmarl.maddpg,
    "itd3": jmarl.itd3,
    "matd3": jmarl.matd3,
    "isac": jmarl.isac,
    "masac": jmarl.masac,
    "coma": jmarl.coma,
    "ia2c": jmarl.ia2c,
    "maa2c": jmarl.maa2c,
    "random": jmarl.random_policy,
}


def with_replay(options: Any, preset: presets.Preset) -> Any:
    """A script's options, with those of replay where the preset has some."""
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


def make_loop(algorithm: str, env: jmarl.types.Env, options: Any, *, num_envs: int) -> jmarl.types.Loop:
    """The loop that the options describe: off-policy where they are `with_replay`."""
    common = {"num_envs": num_envs, "rollout_length": options.rollout_length, "num_resets": options.num_resets}
    if not hasattr(options, "buffer_size"):
        return jmarl.on_policy(env, ALGORITHMS[algorithm], **common)
    longest = env.spec.max_steps
    if longest is not None and options.sequence_length > longest:
        raise ValueError(
            f"sequence_length={options.sequence_length} is longer than an episode of {env.spec.name}, {longest} "
            f"steps: the rest would be padding. Choose {longest} or less."
        )
    make_buffer = jmarl.buffers.prioritized if options.prioritized else jmarl.buffers.uniform
    return jmarl.off_policy(
        env,
        ALGORITHMS[algorithm],
        buffer=make_buffer(options.buffer_size, options.batch_size, options.sequence_length),
        num_updates=options.num_updates,
        warmup_steps=options.warmup_steps,
        **common,
    )


class UsageError(Exception):
    """What the user can put right: one sentence, no traceback."""


class Interrupted(UsageError):
    """Ctrl-C, where there was nothing to keep."""


@contextlib.contextmanager
def usage_errors(*also: type[Exception]) -> Iterator[None]:
    """Ends the script with exit code 2 and one sentence on a `UsageError`, and on exceptions of the types `also`."""
    try:
        yield
    except (UsageError, *also) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def require_free(out: Path, overwrite: bool, option: str = "--out") -> None:
    """Refuses what exists, unless it may be replaced."""
    if out.exists() and not overwrite:
        raise UsageError(f"{out} exists already: give another {option}, or --overwrite.")


def require_free_file(out: Path, overwrite: bool, option: str = "--out") -> None:
    """Refuses a place where no file can be made, before anything is computed for it."""
    require_free(out, overwrite, option)
    if out.is_dir():
        raise UsageError(f"{out} is a folder: give {option} a file.")
    if not out.parent.is_dir():
        raise UsageError(f"{out} has no place, since {out.parent} is no folder: make it, or give another {option}.")


def new_folder(out: Path, overwrite: bool) -> None:
    """Makes a folder for results."""
    require_free(out, overwrite)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{out} cannot be a folder: {error.strerror}.") from error


def require_seed(seed: int) -> None:
    """Refuses what would be another seed in silence: jax keeps 32 bits."""
    if not 0 <= seed < 2**32:
        raise UsageError(f"--seed {seed} must be at least 0 and less than 2**32.")


def require_at_least_one(**options: int) -> None:
    """Refuses what is counted and is not there."""
    for name, value in options.items():
        if value < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value} must be at least 1.")


def parse(
    argv: Sequence[str], options: Callable[[presets.Preset], Any], *, script: str, does: str
) -> tuple[str, Any, Any]:
    """The algorithm's name, the options and the algorithm's config.

    Args:
      argv: words; the algorithm comes first.
      options: the script's own options, a dataclass with a field `env`, as they are for a preset.
      script: file name for --help.
      does: its first sentence, with {algorithm} and {env}.
    """
    wants_help = not argv or argv[0] in ("-h", "--help")
    algorithm = "mappo" if wants_help else argv[0]
    if algorithm not in ALGORITHMS:
        what = (
            f"name an algorithm before {argv[0]}" if argv[0].startswith("-") else f"no algorithm is called {argv[0]!r}"
        )
        raise UsageError(f"{what}: {nearest(algorithm, ALGORITHMS)}")
    env, name = _given("--env", argv) or "MPE_simple_spread_v3", _given("--preset", argv) or "default"
    try:
        preset = presets.for_environment(algorithm, env, name)
    except ValueError as error:
        raise UsageError(str(error)) from error
    defaults = options(preset)
    # Two dataclasses side by side, without their prefixes: flat names, and each keeps its own heading in --help.
    both = dataclasses.make_dataclass(
        "Arguments", [("experiment", type(defaults)), ("hyperparameter", type(preset.config))]
    )
    with _numbers():
        arguments = tyro.cli(
            both,
            prog=f"{script} {{{','.join(ALGORITHMS)}}}" if wants_help else f"{script} {algorithm}",
            description=f"{does.format(algorithm=algorithm, env=preset.env)} The defaults shown are for these two.",
            default=both(defaults, preset.config),
            args=["--help"] if wants_help else list(argv[1:]),
            config=(tyro.conf.OmitArgPrefixes,),
        )
    return algorithm, arguments.experiment, arguments.hyperparameter


def env_kwargs_of(algorithm: str, options: Any) -> dict[str, Any]:
    """The environment's arguments: those of the preset, and what --env-kwargs says."""
    return presets.for_environment(algorithm, options.env).env_kwargs | key_values(options.env_kwargs)


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


def nearest(name: str, names: Iterable[str]) -> str:
    """What a sentence about an unknown name ends with."""
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"choose one of {', '.join(names)}."


def _given(option: str, argv: Sequence[str]) -> str | None:
    """The value of an option that decides the defaults of all others."""
    for word, following in itertools.pairwise([*argv, None]):
        if word == option:
            return following
        if word.startswith(f"{option}="):
            return word.removeprefix(f"{option}=")
    return None


def _numbers() -> ConstructorRegistry:
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
