"""Does a committed result still come out? Trains it again with other seeds and compares the final evaluation.

    jmarl check benchmarks/results/vdn-MPE_simple_spread_v3 --seeds 2

Exit code 0: the new mean lies where that of so many seeds lies with 95 % probability, given the committed seeds. 1: it
lies outside, which happens by chance once in twenty times.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tyro

from jmarl.cli import experiment, report, train
from jmarl.cli import statistics_of_runs as statistics
from jmarl.cli.errors import UsageError, require_at_least_one, usage_errors
from jmarl.cli.options import parse, without


def command_of(facts: dict, *, seeds: int, seed: int, run_dir: Path | None) -> list[str]:
    """The words after "jmarl train" of a committed command, with other seeds and another folder."""
    try:
        words = shlex.split(facts["command"])[2:]
    except (KeyError, AttributeError, ValueError) as error:
        raise UsageError(f"config.json holds no command to repeat: {error}.") from error
    kept = without(words, {"--seeds", "--seed", "--run-dir", "--gif"})
    return [*kept, "--seeds", str(seeds), "--seed", str(seed), "--no-gif"] + (
        [] if run_dir is None else ["--run-dir", str(run_dir)]
    )


def verdict(committed: np.ndarray, new: np.ndarray) -> tuple[bool, str]:
    """Whether the mean of the new runs is one to expect, and a sentence."""
    low, high = statistics.prediction_interval(committed, len(new))
    # Runs that all reach the same best score leave no interval but that number, which rounding may miss.
    margin = 1e-6 * max(1.0, abs(low), abs(high))
    is_inside = bool(low - margin <= new.mean() <= high + margin)
    return is_inside, (
        f"The mean of the {len(new)} new seeds is {new.mean():.4g}: {'inside' if is_inside else 'OUTSIDE'} "
        f"{low:.4g} to {high:.4g}, where 95 % of such means lie given the {len(committed)} committed seeds "
        f"(mean {committed.mean():.4g})."
    )


def check(
    result: tyro.conf.Positional[Path],
    seeds: int = 2,
    seed: int | None = None,
    metric: str = "eval/return_sum",
    run_dir: Path | None = None,
    env: str | None = None,
    algorithm: str | None = None,
) -> int:
    """Trains a committed result again and says whether it comes out.

    Args:
      result: a run folder, such as those of benchmarks/results.
      seeds: how many.
      seed: decides them; None: the one after the committed one. The committed one repeats the committed runs.
      metric: what to compare.
      run_dir: a new folder for the new run; None: one in runs/.
      env: of a run in an environment of your own: its name, module:function or file.py:function, once more.
      algorithm: of a run whose algorithm is a function of your own: its name once more.
    """
    committed = report.read_run(result, metric)
    if committed.metrics[metric.split("/", 1)[-1]].shape[1] < 2:
        raise UsageError(f"{result} has one seed, so it has no interval.")
    require_at_least_one(seeds=seeds)
    seed = committed.facts["seed"] + 1 if seed is None else seed
    words = command_of(committed.facts, seeds=seeds, seed=seed, run_dir=run_dir)
    typed = [name for name in (env, algorithm) if name]
    arguments = parse(words, experiment.options_of, prog="jmarl train", does=train.DOES, given=typed)
    command = shlex.join(["jmarl", "train", *words])
    new = report.read_run(experiment.train(*arguments[:4], command=command), metric)
    before, now = (report.settings_of(run.facts) for run in (committed, new))
    changed = [f"{k} was {before[k]}, is {now.get(k)}" for k in before if before[k] != now.get(k)]
    if changed:
        print(f"Defaults have changed since: {'; '.join(changed)}.")
    is_inside, sentence = verdict(*(run.metrics[metric.split("/", 1)[-1]][-1] for run in (committed, new)))
    print(sentence)
    return 0 if is_inside else 1


def main(argv: Sequence[str] | None = None, prog: str = "jmarl check") -> int:
    """The command line."""
    with usage_errors():
        return tyro.cli(check, prog=prog, args=argv)


if __name__ == "__main__":
    sys.exit(main())
