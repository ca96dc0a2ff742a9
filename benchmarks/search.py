"""Search for hyperparameters with optuna; hopeless trials end early, by successive halving.

    python benchmarks/search.py mappo --space learning-rate=1e-4:1e-2:log gamma=0.8:0.99 hidden-sizes=64+64,128+128 \\
        --trials 20 --seeds 4 --total-steps 5e5 --run-dir runs/search

A choice is LOW:HIGH, LOW:HIGH:log, or values with commas between them (as whole numbers need), the numbers of a list
with `+`; any option of train.py can be searched, and all others are as for train.py. Each trial leaves a run folder.
The study is in study.db, for optuna's own tools: the same command goes on with it, until there are as many trials as it
says.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import train
from command_line import Interrupted, UsageError, env_kwargs_of, usage_errors
from jmarl.logging import Sink
from sweeping import as_option, setting_of

QUIET = ("--no-gif", "--absolute-episodes", "0", "--checkpoint-every", "0")  # what a trial has no need of
try:
    import optuna
    from optuna.trial import TrialState as State
except ImportError:
    sys.exit('search.py needs optuna: pip install "jmarl[search]"')

SAMPLERS = {"random": optuna.samplers.RandomSampler, "tpe": optuna.samplers.TPESampler}


def main(argv: Sequence[str] | None = None) -> optuna.Study:
    """Runs the trials that are missing and prints the best. Exits with 2 on what the user can put right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--space", nargs="+", required=True, metavar="NAME=CHOICE", help="what is searched")
    parser.add_argument("--trials", type=int, default=20, help="in all, also of calls before this one (default: 20)")
    parser.add_argument("--sampler", choices=SAMPLERS, default="random", help="optuna's (default: random)")
    parser.add_argument("--metric", default="eval/return_sum", help="to be made large (default: eval/return_sum)")
    parser.add_argument("--halving", action=argparse.BooleanOptionalAction, default=True, help="end hopeless trials")
    parser.add_argument("--run-dir", type=Path, required=True, help="a folder for the study and its runs")
    args, rest = parser.parse_known_args(argv)
    with usage_errors():
        return search(args, rest)


def search(args: argparse.Namespace, rest: Sequence[str]) -> optuna.Study:
    """What `main` does; `rest` are the words for train.py."""
    space = dict(map(_choice, args.space))
    setting_of([*rest, *_words({name: choices[0] for name, choices in space.items()})])  # bad words are refused here
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = _study(args, {"space": sorted(args.space), "metric": args.metric, "words": list(rest)})
    for number in range(len(study.trials), args.trials):
        trial = study.ask()
        values = {name: _suggest(trial, name, choices) for name, choices in space.items()}
        folder = args.run_dir / f"trial-{number:03d}"
        print(f"\nTrial {number + 1} of {args.trials}: {_show(values)}")
        try:
            scores, state = _train(trial, [*rest, *_words(values), *QUIET, "--run-dir", str(folder)], args.metric)
        except Interrupted:
            raise
        except UsageError as error:  # some combinations are not possible: that is no reason to stop
            print(f"This trial failed: {error}")
            scores, state = [], State.FAIL
        study.tell(trial, scores[-1] if state == State.COMPLETE else None, state=state)
    _print_table(study, args.metric)
    return study


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


def _suggest(trial: optuna.Trial, name: str, choices: tuple[Any, ...]) -> Any:
    if isinstance(choices[0], str):
        return trial.suggest_categorical(name, choices)
    low, high, is_log = choices
    return trial.suggest_float(name, low, high, log=is_log)


def _words(values: Mapping[str, Any]) -> list[str]:
    return [word for name, value in values.items() for word in as_option(name, str(value))]


def _show(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in values.items())


def _study(args: argparse.Namespace, question: dict[str, Any]) -> optuna.Study:
    """A new study, or the one in the folder if it asks the same."""
    args.run_dir.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        study_name="jmarl",
        storage=f"sqlite:///{args.run_dir / 'study.db'}",
        load_if_exists=True,
        direction="maximize",
        pruner=optuna.pruners.SuccessiveHalvingPruner() if args.halving else optuna.pruners.NopPruner(),
    )
    study.sampler = SAMPLERS[args.sampler](seed=len(study.trials))  # a search is repeatable, and goes on to new trials
    for name, value in question.items():
        asked = study.user_attrs.get(name, value)
        if asked != value:
            raise UsageError(
                f"{args.run_dir} holds a search with {name} {asked}, not {value}: choose another --run-dir."
            )
        study.set_user_attr(name, value)
    for trial in study.get_trials(states=[State.RUNNING]):  # of a process that was killed
        study.tell(trial.number, state=State.FAIL)
    return study


def _train(trial: optuna.Trial, words: Sequence[str], metric: str) -> tuple[list[float], State]:
    """The score of each evaluation, a mean over seeds, and how the trial ended."""
    setting, info, scores = setting_of(words), {}, []

    def report(env_steps, metrics, state):
        is_last = env_steps == info["total_env_steps"]
        if metric in metrics:
            scores.append(float(np.mean(metrics[metric])))
            trial.report(scores[-1], len(scores))
            info["is_pruned"] = not is_last and trial.should_prune()
        elif is_last and not scores:
            raise SystemExit(f"error: --metric {metric} is not measured: choose one of {', '.join(sorted(metrics))}.")
        info["is_whole"] = is_last
        return info.get("is_pruned", False)

    watch = Sink(start=info.update, write=lambda *_: None, close=lambda: None)
    kwargs = env_kwargs_of(setting.algorithm, setting.options)
    train.train(
        setting.algorithm, setting.options, setting.config, kwargs, command=words, callback=report, sinks=[watch]
    )
    if info.get("is_pruned"):
        return scores, State.PRUNED
    if not info["is_whole"]:
        raise SystemExit("Stopped. The same command goes on with the next trial.")
    return scores, State.COMPLETE


def _print_table(study: optuna.Study, metric: str) -> None:
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
