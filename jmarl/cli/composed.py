"""Algorithms within algorithms, by name: `icm(shaped(mappo))`, `teams(adversary=mappo,agent=self_play(ippo))`.

Such a name is an algorithm's name like any other: on the command line, in a run folder, in reports. Options for
combinators stand for it, from the inside out:

    jmarl train mappo --normalize-observations --intrinsic icm --shaping linear:1:0:2e6 --self-play pool-size=16
    jmarl train --team adversary=mappo --team agent=random --env MPE_simple_tag_v3

A combinator may be a function of the user, `algorithm -> algorithm`, such as one that shapes rewards by a potential:

    jmarl train "potentials.py:near_the_goal(mappo)"
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jmarl import combinators, configs
from jmarl.cli.errors import UsageError, nearest
from jmarl.types import Algorithm

COMBINATORS: dict[str, tuple[Callable[[Algorithm], Algorithm], type]] = {
    "icm": (combinators.icm, combinators.ICMConfig),
    "normalized": (combinators.normalized, combinators.NormalizedConfig),
    "rnd": (combinators.rnd, combinators.RNDConfig),
    "self_play": (combinators.self_play, combinators.SelfPlayConfig),
    "shaped": (combinators.shaped, combinators.ShapedConfig),
}
OPTIONS = ("--intrinsic", "--normalize-observations", "--self-play", "--shaping", "--team")
HELP = (
    "Algorithms combine: --intrinsic icm or rnd, --shaping KIND:START:END:STEPS, --normalize-observations, --self-play "
    "[pool-size=16 ..], --team NAME=ALGORITHM for each team; or write it out, as in 'icm(shaped(mappo))'. What is "
    "within has dotted names: --inner.learning-rate."
)


def is_composed(name: str) -> bool:
    """Whether a name is of an algorithm within another."""
    return "(" in name


def parts(name: str) -> tuple[str, dict[str, str]]:
    """The outermost combinator of a name, and what is within: by team, or as "inner".

    >>> parts("icm(shaped(mappo))"), parts("teams(a=icm(ippo),b=iql)")
    (('icm', {'inner': 'shaped(mappo)'}), ('teams', {'a': 'icm(ippo)', 'b': 'iql'}))
    >>> parts("own/file.py:near(mappo)")
    ('own/file.py:near', {'inner': 'mappo'})
    """
    match = re.fullmatch(r"(\w+|[^(]+:\w+)\((.*)\)", name.replace(" ", ""), flags=re.DOTALL)
    if match is None:
        raise UsageError(f"{name!r} is no algorithm: write COMBINATOR(ALGORITHM), such as 'icm(mappo)'.")
    outer, within = match[1], match[2]
    if outer == "teams":
        pairs = [pair.partition("=") for pair in _split(within)]
        if not all(team and equals and algorithm for team, equals, algorithm in pairs):
            raise UsageError(f"{name!r} must give each team an algorithm: teams(adversary=mappo,agent=random).")
        return outer, {team: algorithm for team, _, algorithm in pairs}
    if outer not in COMBINATORS and ":" not in outer:
        raise UsageError(f"no combinator is called {outer!r}: {nearest(outer, [*COMBINATORS, 'teams'])}")
    return outer, {"inner": within}


def _split(words: str) -> list[str]:
    """At commas outside of parentheses."""
    pieces, depth = [""], 0
    for letter in words:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and not depth:
            pieces.append("")
        else:
            pieces[-1] += letter
    return pieces


def innermost(name: str) -> Iterator[str]:
    """The algorithms of a name, without combinators."""
    if not is_composed(name):
        yield name
        return
    for within in parts(name)[1].values():
        yield from innermost(within)


def algorithm(name: str, find: Callable[[str], Algorithm]) -> Algorithm:
    """The algorithm of a name; `find` knows those without parentheses."""
    if not is_composed(name):
        return find(name)
    outer, within = parts(name)
    inner = {key: algorithm(value, find) for key, value in within.items()}
    if outer == "teams":
        return combinators.teams(inner)
    if outer in COMBINATORS:
        return COMBINATORS[outer][0](inner["inner"])
    combined: Any = find(outer)(inner["inner"])  # type: ignore[call-arg, arg-type]
    if not callable(combined):
        raise UsageError(f"{outer} returned {type(combined).__name__}: a combinator returns an algorithm.")
    return combined


def config(name: str, config_of: Callable[[str], Any], class_of: Callable[[str], type]) -> Any:
    """The config of a name; `config_of` gives those of algorithms without parentheses, `class_of` the class of one."""
    if not is_composed(name):
        return config_of(name)
    outer, within = parts(name)
    inner = {key: config(value, config_of, class_of) for key, value in within.items()}
    if outer == "teams":
        return inner
    cls: Any = COMBINATORS[outer][1] if outer in COMBINATORS else class_of(name)
    return cls(inner=inner["inner"]) if "inner" in cls.__dataclass_fields__ else inner["inner"]


def take_options(argv: Sequence[str]) -> list[str]:
    """The words of a command line, with a composed name in place of the options for combinators.

    >>> take_options(["mappo", "--intrinsic", "rnd", "--shaping", "linear:1:0:2e6", "--seeds", "2"])[0]
    'shaped(rnd(mappo))'
    >>> take_options(["--team", "a=mappo", "--team", "b=random", "--seeds", "2"])
    ['teams(a=mappo,b=random)', '--seeds', '2']
    """
    given: dict[str, list[str]] = {}
    rest: list[str] = []
    taking: list[str] | None = None
    for word in argv:
        name, equals, value = word.partition("=")
        option = name.replace("_", "-")
        if option in OPTIONS:
            if option in given and option != "--team":
                raise UsageError(f"{option} is given twice: give it once.")
            taking = given.setdefault(option, [])
            taking += [value] if equals else []
        elif word.startswith("-"):
            taking = None
            rest.append(word)
        elif taking is not None:
            taking.append(word)
        else:
            rest.append(word)
    if not given:
        return rest
    return [*_composed(given, rest), *_values(given)]


def _composed(given: dict[str, list[str]], rest: list[str]) -> list[str]:
    """The words but for the options, whose first one is the whole algorithm."""
    if teams := given.get("--team"):
        if rest and not rest[0].startswith("-"):
            raise UsageError(f"--team says which algorithm each team has: leave {rest[0]} out, or --team.")
        rest = [f"teams({','.join(teams)})", *rest]
    if not rest or rest[0].startswith("-"):
        raise UsageError(f"name an algorithm before {', '.join(given)}: jmarl train mappo ..")
    name, *rest = rest
    if "--normalize-observations" in given:
        name = f"normalized({name})"
    for model in given.get("--intrinsic", []):
        if model not in ("icm", "rnd"):
            raise UsageError(f"--intrinsic {model} is unknown: choose icm or rnd.")
        name = f"{model}({name})"
    if "--shaping" in given:
        name = f"shaped({name})"
    if "--self-play" in given:
        name = f"self_play({name})"
    return [name, *rest]


def _values(given: dict[str, list[str]]) -> list[str]:
    """What options for combinators say beside the name, as options of their configs."""
    words = []
    if "--shaping" in given:
        kind, *numbers = (given["--shaping"] or [""])[0].split(":")
        names = ["start", "end", "steps"][: len(numbers)]
        if kind not in ("constant", "linear", "exponential") or len(numbers) > 3 or len(given["--shaping"]) != 1:
            raise UsageError(
                f"--shaping {' '.join(given['--shaping'])} is no schedule: write KIND:START:END:STEPS, such as "
                f"linear:1:0:2e6, or constant:0.5."
            )
        prefix = "--inner." if "--self-play" in given else "--"
        words += [f"{prefix}shaping-schedule", kind]
        for name, number in zip(names, numbers, strict=True):
            words += [f"{prefix}shaping-{name}", number]
    for pair in given.get("--self-play", []):
        name, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"--self-play takes NAME=VALUE, such as pool-size=16, not {pair!r}.")
        words += [f"--{name}", value]
    if "--intrinsic" in given and len(given["--intrinsic"]) != 1:
        raise UsageError("--intrinsic takes one model: icm or rnd.")
    return words


def as_dict(value: Any) -> Any:
    """A config, and those that it holds, as dicts of their fields."""
    if isinstance(value, dict):
        return {name: as_dict(inner) for name, inner in value.items()}
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {name: as_dict(inner) if configs.is_config(inner) else inner for name, inner in fields.items()}
