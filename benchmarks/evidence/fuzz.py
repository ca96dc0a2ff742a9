"""Does any option or argument end in a traceback?

    python benchmarks/evidence/fuzz.py --cases 3000 --out benchmarks/results/attacks/fuzz.json

Options: `jmarl train` is given one or two options with hostile values, drawn at random for every algorithm, and builds
and traces what it would train. Arguments: a config is given a hostile value from Python, and the algorithm a spec.
What comes out is counted: "refused" in a sentence, or "accepted"; "error" is anything else, and its first cases are
printed and kept. What is accepted is not trained.
"""

import argparse
import collections
import contextlib
import dataclasses
import io
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

import jmarl
from jmarl.cli import experiment, own, train
from jmarl.types import EnvSpec

WORDS = ("nan", "inf", "-inf", "-1", "0", "1", "1e-320", "1e308", "1e30", "0.5", "2147483648", "1e400", "", "none", "'",
         "true", "False", "banana", "1 2", "-0.0", "1_000", "٣", "0x10", "../x", "a=b", "64 0", "64 -1")  # fmt: skip
VALUES = (math.nan, math.inf, -math.inf, -1, 0, 1, 1e308, 1e30, 0.5, 2**31, 2**70, None, True, False, "False", "1e-3",
          "banana", "", (), (0,), (64, -1), [1, 2, 3], {}, object(), 1j, b"1")  # fmt: skip
ENVS = ("MPE_simple_spread_v3", "CartPole-v1", "Pendulum-v1")
KEPT = 20  # errors that are kept, of each kind


def of_command(rng: random.Random) -> tuple[str, Callable[[], Any]]:
    """A random command line, and a function that builds and traces what it describes."""
    algorithm, env = rng.choice(sorted(own.ALGORITHMS)), rng.choice(ENVS)
    config = type(own.default_config(algorithm))
    fields = [field.name for cls in (experiment.Options, config) for field in dataclasses.fields(cls)]
    names = rng.sample(
        [name for name in fields if name not in ("env", "distributed", "devices")], rng.choice((1, 1, 2))
    )
    words = [algorithm, "--env", env, "--dry-run"]
    for name in names:
        words += [f"--{name.replace('_', '-')}", *rng.choice(WORDS).split(" ")]
    return " ".join(words), lambda: train.main(words)


def of_python(rng: random.Random) -> tuple[str, Callable[[], Any]]:
    """A random field and value of an algorithm's config, and a function that makes its learner."""
    algorithm = rng.choice(sorted(set(own.ALGORITHMS) - {"random"}))  # which has nothing to choose
    default = own.default_config(algorithm)
    name, value = rng.choice([field.name for field in dataclasses.fields(default)]), rng.choice(VALUES)
    spec = rng.choice([EnvSpec("e", ("a", "b"), (2,), (4,), num_actions=3), _continuous()])

    def make():
        learner = own.find_algorithm(algorithm)(spec, dataclasses.replace(default, **{name: value}))
        return jax.eval_shape(learner.init, jax.random.key(0))

    kind = "discrete" if spec.is_discrete else "continuous"
    return f"{algorithm}, {kind} actions, {name}={value!r:.60}", make


def _continuous() -> EnvSpec:
    bounds = ((-1.0, -1.0),) * 2, ((1.0, 1.0),) * 2
    return EnvSpec("e", ("a", "b"), (2,), (4,), action_size=2, action_low=bounds[0], action_high=bounds[1])


def outcome(call: Callable[[], Any]) -> tuple[str, str]:
    """What came out of a call, and its words."""
    told = io.StringIO()
    try:
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
            call()
    except SystemExit as stop:
        is_sentence = stop.code == 2 and "Traceback" not in told.getvalue() and told.getvalue().strip()
        return ("refused" if is_sentence else "error"), told.getvalue()
    except (ValueError, TypeError) as error:
        # Ours are a sentence; jax's and flax's tell of tracers, shapes and lines of their own.
        is_ours = Path(jmarl.__file__).parent in Path(_file_of(error)).parents
        return ("refused" if is_ours else "error"), f"{type(error).__name__}: {error}"
    except Exception as error:  # whatever it is, it is what we are looking for
        return "error", f"{type(error).__name__}: {error}"
    return "accepted", ""


def _file_of(error: BaseException) -> str:
    """Where an error was raised."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return "" if last is None else last.tb_frame.f_code.co_filename


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, int]]:
    """Prints and returns how often what came out."""
    parser = argparse.ArgumentParser(description="Hostile options and arguments.", allow_abbrev=False)
    parser.add_argument("--cases", type=int, default=1000, help="of options, and as many of arguments")
    parser.add_argument("--seed", type=int, default=0, help="decides which")
    parser.add_argument("--out", type=Path, help="where to write the counts and the errors, as JSON")
    options = parser.parse_args(argv)
    counts: dict[str, dict[str, int]] = {}
    errors: dict[str, list[list[str]]] = {}
    for kind, draw in {"options": of_command, "arguments": of_python}.items():
        rng, found, failed = random.Random(options.seed), collections.Counter[str](), list[list[str]]()
        for _ in range(options.cases):
            case, call = draw(rng)
            result, words = outcome(call)
            found[result] += 1
            if result == "error":
                failed.append([case, words[-300:]])
                print(f"{kind}: {case}\n    {words[-300:]}", flush=True)
        counts[kind], errors[kind] = dict(found), failed[:KEPT]
        print(f"{kind}: {', '.join(f'{num} {name}' for name, num in sorted(found.items()))}", flush=True)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        facts = {"cases": options.cases, "outcomes": counts, "errors": errors, "system": jmarl.logging.system_facts()}
        options.out.write_text(json.dumps(facts, indent=2) + "\n")
    return counts


if __name__ == "__main__":
    main()
