"""Search for hyperparameters with optuna; hopeless trials end early, by successive halving.

    jmarl search mappo --space learning-rate=1e-4:1e-2:log gamma=0.8:0.99 hidden-sizes=64+64,128+128 \\
        --trials 20 --seeds 4 --total-steps 5e5 --run-dir runs/search

A choice is LOW:HIGH, LOW:HIGH:log, or values with commas between them (as whole numbers need), the numbers of a list
with `+`; any option of `jmarl train` can be searched, and all others are as for it. Each trial leaves a run folder.
The study is in study.db, for optuna's own tools: the same command goes on with it, until there are as many trials as it
says.
"""

import argparse
import contextlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jmarl.cli import experiment
from jmarl.cli.errors import Interrupted, UsageError, usage_errors
from jmarl.cli.options import canonical, without
from jmarl.cli.sweeping import as_option, setting_of
from jmarl.logging import Sink

if TYPE_CHECKING:
    import optuna

# What a trial has no need of.
QUIET = {"--gif": ["--no-gif"], "--absolute-episodes": ["--absolute-episodes", "0"]}
QUIET |= {"--checkpoint-every": ["--checkpoint-every", "0"]}
SAMPLERS = {"random": "RandomSampler", "tpe": "TPESampler"}
AGAIN = "again"  # of a trial that repeats one of a process that was killed: its number


def main(argv: Sequence[str] | None = None, prog: str = "jmarl search") -> "optuna.Study":
    """Runs the trials that are missing and prints the best. Exits with 2 on what the user can put right."""
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--space", nargs="+", required=True, metavar="NAME=CHOICE", help="what is searched")
    parser.add_argument("--trials", type=int, default=20, help="in all, also of calls before this one (default: 20)")
    parser.add_argument("--sampler", choices=SAMPLERS, default="random", help="optuna's (default: random)")
    parser.add_argument("--metric", default="eval/return_sum", help="to be made large (default: eval/return_sum)")
    parser.add_argument("--halving", action=argparse.BooleanOptionalAction, default=True, help="end hopeless trials")
    parser.add_argument("--run-dir", type=Path, required=True, help="a folder for the study and its runs")
    args, rest = parser.parse_known_args(argv)
    with usage_errors():
        if importlib.util.find_spec("optuna") is None:
            raise UsageError('jmarl search needs optuna: pip install "jmarl[search]".')
        return search(args, rest)


def search(args: argparse.Namespace, rest: Sequence[str]) -> "optuna.Study":
    """What `main` does; `rest` are the words for `jmarl train`."""
    import optuna

    space = dict(map(_choice, args.space))
    rest = without(rest, {f"--{name}" for name in space})  # what is searched counts
    setting_of([*rest, *_words({name: choices[0] for name, choices in space.items()})])  # bad words are refused here
    quiet = [word for option, words in QUIET.items() if option not in set(map(canonical, rest)) for word in words]
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with _alone(args.run_dir):
        study = _study(args, {"space": sorted(args.space), "metric": args.metric, "words": list(rest)})
        while (number := _num_done(study)) < args.trials:
            trial = study.ask()
            values = {name: _suggest(trial, name, choices) for name, choices in space.items()}
            folder = args.run_dir / f"trial-{trial.number:03d}"
            print(f"\nTrial {number + 1} of {args.trials}: {_show(values)}")
            state = optuna.trial.TrialState
            try:
                words = [*rest, *_words(values), *quiet, "--run-dir", str(folder)]
                scores, is_pruned = _train(trial, words, args.metric)
                end = state.PRUNED if is_pruned else state.COMPLETE
            except Interrupted:
                raise
            except UsageError as error:  # some combinations are not possible: that is no reason to stop
                print(f"This trial failed: {error}")
                end, scores = state.FAIL, []
            if end == state.COMPLETE and not np.isfinite(scores[-1]):
                print(f"This trial failed: its {args.metric} is {scores[-1]}.")
                end = state.FAIL
            study.tell(trial, scores[-1] if end == state.COMPLETE else None, state=end)
        _print_table(study, args.metric)
    return study


def _num_done(study: "optuna.Study") -> int:
    """Trials that came to an end of their own: each that was killed waits to be repeated, or was."""
    return sum(trial.state.is_finished() for trial in study.trials) - sum(AGAIN in x.user_attrs for x in study.trials)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps a second search out of a folder. The system takes the lock back when a process ends, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR)
    except OSError as error:
        raise UsageError(f"{folder} cannot be the folder of a search: {error.strerror}.") from error
    try:
        import fcntl  # not on every system

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UsageError(f"{folder} is being searched by another process: wait for it, or stop it first.") from None
    except (ImportError, OSError):  # nor on every file system
        pass
    try:
        yield
    finally:
        os.close(descriptor)


def _choice(word: str) -> tuple[str, tuple[Any, ...]]:
    """NAME=LOW:HIGH[:log] as (low, high, is_log), NAME=VALUE,VALUE as the words."""
    name, _, choice = word.partition("=")
    name, bounds = name.replace("_", "-"), choice.split(":")
    if len(bounds) == 1 and choice and name:
        return name, tuple(choice.split(","))
    try:
        low, high = map(float, bounds[:2])
        if bounds[2:] not in ([], ["log"]) or not (0 < low < high if bounds[2:] else low < high):
            raise ValueError
    except ValueError:
        raise UsageError(
            f"--space takes NAME=LOW:HIGH, NAME=LOW:HIGH:log (of positive numbers) or NAME=VALUE,VALUE, not {word!r}."
        ) from None
    return name, (low, high, bool(bounds[2:]))


def _suggest(trial: "optuna.Trial", name: str, choices: tuple[Any, ...]) -> Any:
    if isinstance(choices[0], str):
        return trial.suggest_categorical(name, choices)
    low, high, is_log = choices
    return trial.suggest_float(name, low, high, log=is_log)


def _words(values: Mapping[str, Any]) -> list[str]:
    return [word for name, value in values.items() for word in as_option(name, str(value))]


def _show(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in values.items())


def _study(args: argparse.Namespace, question: dict[str, Any]) -> "optuna.Study":
    """A new study, or the one in the folder if it asks the same."""
    import optuna

    study = optuna.create_study(
        study_name="jmarl",
        storage=f"sqlite:///{args.run_dir / 'study.db'}",
        load_if_exists=True,
        direction="maximize",
        pruner=optuna.pruners.SuccessiveHalvingPruner() if args.halving else optuna.pruners.NopPruner(),
    )
    # A search is repeatable, and goes on to new trials.
    study.sampler = getattr(optuna.samplers, SAMPLERS[args.sampler])(seed=len(study.trials))
    for name, value in question.items():
        asked = study.user_attrs.get(name, value)
        if asked != value:
            raise UsageError(
                f"{args.run_dir} holds a search with {name} {asked}, not {value}: choose another --run-dir."
            )
        study.set_user_attr(name, value)
    states = optuna.trial.TrialState
    for trial in study.get_trials(states=[states.RUNNING]):  # of a process that was killed, since nobody else is here
        study.tell(trial.number, state=states.FAIL)
        study.enqueue_trial(trial.params, user_attrs={AGAIN: trial.number})
    return study


def _train(trial: "optuna.Trial", words: Sequence[str], metric: str) -> tuple[list[float], bool]:
    """The score of each evaluation, a mean over seeds, and whether the trial was ended early as hopeless."""
    setting = setting_of(words)
    info: dict[str, Any] = {}
    scores: list[float] = []

    def report(env_steps, metrics, state):
        is_last = env_steps == info["total_env_steps"]
        if metric in metrics:
            scores.append(float(np.mean(metrics[metric])))
            if np.isfinite(scores[-1]):
                trial.report(scores[-1], len(scores))
            info["is_pruned"] = not is_last and trial.should_prune()
        elif is_last and not scores:
            raise SystemExit(f"error: --metric {metric} is not measured: choose one of {', '.join(sorted(metrics))}.")
        info["is_whole"] = is_last
        return info.get("is_pruned", False)

    watch = Sink(start=info.update, write=lambda *_: None, close=lambda: None)
    command = shlex.join(["jmarl", "train", *words])
    experiment.train(*setting[2:6], command=command, callback=report, sinks=[watch], is_quiet=setting.is_quiet)
    if not info.get("is_pruned") and not info["is_whole"]:
        raise SystemExit("Stopped. The same command goes on with this trial, from its beginning.")
    return scores, bool(info.get("is_pruned"))


def _print_table(study: "optuna.Study", metric: str) -> None:
    """All trials, the best first."""
    table = Table(title=f"{metric}, mean over seeds", title_justify="left", title_style="")
    for heading in ("trial", "score", "state", "hyperparameters"):
        table.add_column(heading, overflow="fold")
    score = {trial.number: -np.inf if trial.value is None else trial.value for trial in study.trials}
    for trial in sorted(study.trials, key=lambda trial: score[trial.number], reverse=True):
        shown = "" if trial.value is None else f"{trial.value:.2f}"
        table.add_row(f"{trial.number:03d}", shown, trial.state.name.lower(), _show(trial.params))
    Console().print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
