"""A campaign: the runs that a file names, one after the other, until all are done; what was begun goes on.

    jmarl campaign benchmarks/evidence/campaign.toml --minutes 90 --only "*overcooked*"

The file is what is claimed. Each of its runs is a table of TOML, the most valuable first:

    [[run]]
    train = "ippo --env overcooked --env-kwargs layout=forced_coord --seeds 4 --total-steps 5e6"
    name = "ippo-forced_coord"            # of its folder
    metric = "eval/return_sum"            # what counts; the default
    published = 251.0                     # the best number known, if there is one
    source = "IPPO, 5e6 steps: who says so"

A run that is done leaves config.json, metrics.json and its curve in RESULTS/NAME, and the campaign a table of all of
them in RESULTS/FILE.md. Where RESULTS/NAME is complete, nothing is trained.
"""

import fnmatch
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.markdown import Markdown

from jmarl.cli import experiment, run_folders, statistics_of_runs, train
from jmarl.cli.errors import UsageError, usage_errors
from jmarl.cli.options import canonical, parse

KEPT = ("config.json", "metrics.json", "learning_curve.png")


class Entry(NamedTuple):
    """One run of a campaign, as its file says."""

    train: str
    name: str
    metric: str = "eval/return_sum"
    published: float | None = None
    source: str = ""


def read(path: Path) -> list[Entry]:
    """The runs of a file."""
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is no TOML: {error}.") from error
    tables = content.pop("run", [])
    if content or not isinstance(tables, list) or not tables:
        raise UsageError(f"{path} must hold tables [[run]] and nothing else, one for each run.")
    entries = [_entry(table, f"{path}, run {i + 1}") for i, table in enumerate(tables)]
    names = [entry.name for entry in entries]
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise UsageError(f"{path} has two runs called {twice[0]}: give each a name of its own.")
    return entries


def _entry(table: Any, where: str) -> Entry:
    kinds = {"train": str, "name": str, "metric": str, "published": float, "source": str}
    for name, value in table.items():
        if name not in kinds:
            raise UsageError(f"{where}: {name} is unknown, choose from {', '.join(kinds)}.")
        is_number = kinds[name] is float and isinstance(value, int | float) and not isinstance(value, bool)
        if not isinstance(value, kinds[name]) and not is_number:
            raise UsageError(f"{where}: {name} = {value!r} must be {'a number' if kinds[name] is float else 'text'}.")
    for name in ("train", "name"):
        if not table.get(name):
            raise UsageError(f"{where} has no {name}.")
    if Path(table["name"]).name != table["name"]:
        raise UsageError(f"{where}: name = {table['name']!r} must be the name of a folder, without a path.")
    return Entry(**table)


def words_of(entry: Entry, options: str) -> list[str]:
    """The words after "jmarl train"; the campaign's own options come last, and so win."""
    words = [*shlex.split(entry.train), *shlex.split(options)]
    given = {canonical(word) for word in words}
    for option in ("--run-dir", "--sweep", "--resume", "--dry-run"):
        if option in given:
            raise UsageError(
                f"{entry.name}: leave {option} out of {entry.train!r}: a run of a campaign is one, in NAME."
            )
    return words


def require_possible(entry: Entry, words: Sequence[str]) -> None:
    """Refuses what `jmarl train` refuses, before anything is trained."""
    try:
        arguments = parse(words, experiment.options_of, prog="jmarl train", does=train.DOES)
        experiment.build(*arguments[:4])
    except (UsageError, ValueError, TypeError) as error:
        raise UsageError(f"{entry.name}: {error}") from error
    except SystemExit as stop:  # of the command line's own parser, which has said why
        raise UsageError(f"{entry.name}: jmarl train refuses {entry.train!r}, as said above.") from stop


# ------------------------------------------------------------------------------------------------------- the state


def progress(folder: Path) -> tuple[int, int]:
    """Environment steps that a run has done, and is to do: (0, 0) where none was begun."""
    try:
        facts = run_folders.read_config(folder)
        done = int(run_folders.load_metrics(folder)[0].max(initial=0))
    except UsageError:
        return 0, 0
    per_iteration = facts["num_envs"] * facts["rollout_length"]
    return done, max(1, round(facts["total_steps"] / per_iteration)) * per_iteration


def is_done(folder: Path) -> bool:
    """Whether a run's metrics reach its end, and all is there that is kept: its last games may have failed."""
    done, asked = progress(folder)
    return 0 < asked <= done and all((folder / name).exists() for name in KEPT)


def row(entry: Entry, folder: Path) -> list[str]:
    """What the table says of a run: steps, seeds, its last evaluation, the published number and whose, its device."""
    facts = run_folders.read_config(folder)
    metrics = run_folders.load_metrics(folder)[1]
    if entry.metric not in metrics:
        raise UsageError(f"{folder} has no {entry.metric}: choose one of {', '.join(sorted(metrics))}.")
    last = run_folders.latest(metrics[entry.metric])
    mean, low, high = statistics_of_runs.summary(last, interval="mean")
    return [
        entry.name,
        f"{progress(folder)[0]:.1e}",
        str(len(last)),
        f"{mean:.4g} ({low:.4g} to {high:.4g})" if len(last) > 1 else f"{mean:.4g}",
        f"{np.min(last):.4g} to {np.max(last):.4g}",
        "" if entry.published is None else f"{entry.published:.4g}",
        entry.source,
        str(facts.get("system", {}).get("device", "")),
    ]


def table(entries: Sequence[Entry], results: Path) -> str:
    """The runs that are done, in Markdown."""
    heads = [
        "run",
        "steps per seed",
        "seeds",
        "mean (95 %, Student's t)",
        "seeds from, to",
        "published",
        "by",
        "device",
    ]
    rows = [row(entry, results / entry.name) for entry in entries if is_done(results / entry.name)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [heads, ["---"] * len(heads), *rows]) + "\n"


# ------------------------------------------------------------------------------------------------------ the command


def campaign(
    file: tyro.conf.Positional[Path],
    runs: Path = Path("runs"),
    results: Path = Path("benchmarks/results"),
    only: str = "*",
    minutes: float | None = None,
    options: str = "",
    dry_run: bool = False,
) -> int:
    """Trains what a file asks for and is not there yet, and writes a table of all that is.

    Args:
      file: of the campaign, in TOML.
      runs: where run folders are, with checkpoints; what was stopped there goes on.
      results: where those that are done leave what is worth keeping.
      only: runs whose names are like this, such as "*overcooked*".
      minutes: after which the run under way is stopped, with a checkpoint, and no other is begun; None: never.
      options: of jmarl train for all runs, such as "--devices 1".
      dry_run: say what there is to do, and refuse what cannot be trained; train nothing.
    """
    entries = [entry for entry in read(file) if fnmatch.fnmatch(entry.name, only)]
    if not entries:
        raise UsageError(f"--only {only} is like no run of {file}.")
    if minutes is not None and not minutes > 0:
        raise UsageError(f"--minutes {minutes} must be more than 0.")
    todo = {entry: words_of(entry, options) for entry in entries if not is_done(results / entry.name)}
    for entry, words in todo.items():
        require_possible(entry, words)
    end = None if minutes is None else time.monotonic() + 60 * minutes
    failed = [] if dry_run else work_off(todo, runs, results, end)
    for entry in entries:
        folders = results / entry.name, runs / entry.name
        done = max(progress(folder)[0] for folder in folders)
        state = "failed" if entry.name in failed else "done" if any(map(is_done, folders)) else f"{done:,} steps done"
        print(f"{entry.name}: {state}")
    if not dry_run and (text := table(entries, results)).count("\n") > 2:
        path = results / f"{file.stem}.md"
        path.write_text(table(read(file), results))
        Console().print(Markdown(text))
        print(f"This table is in {path}")
    return 1 if failed else 0


def work_off(todo: dict[Entry, list[str]], runs: Path, results: Path, end: float | None) -> list[str]:
    """Trains one run after the other, each in a process of its own; the names of those that failed."""
    failed = []
    for entry, words in todo.items():
        folder = runs / entry.name
        if not is_done(folder):
            seconds = None if end is None else end - time.monotonic()
            if seconds is not None and seconds <= 0:
                break
            begun = folder.exists()
            if begun:
                require_same_command(entry, words, folder)
            print(f"{entry.name}: {'goes on' if begun else 'begins'}", flush=True)
            code = run_train(["--resume", str(folder)] if begun else [*words, "--run-dir", str(folder)], seconds)
            if code:
                failed.append(entry.name)
                continue
        if is_done(folder):
            (results / entry.name).mkdir(parents=True, exist_ok=True)
            for name in KEPT:
                shutil.copy(folder / name, results / entry.name / name)
    return failed


def require_same_command(entry: Entry, words: Sequence[str], folder: Path) -> None:
    """Refuses to go on with a run that was begun with other words than the file has now."""
    begun = shlex.split(str(run_folders.read_config(folder).get("command", "")))[2:]
    asked = [*words, "--run-dir", str(folder)]
    if begun != asked:
        raise UsageError(
            f"{folder} was begun with {shlex.join(begun)!r}, but the file asks for {shlex.join(asked)!r}: remove the "
            f"folder, or give the run another name than {entry.name}."
        )


def run_train(words: Sequence[str], seconds: float | None) -> int:
    """`jmarl train` in a process of its own, stopped after a time, or with us, with a checkpoint; its exit code."""
    # Of a session of its own, so that Ctrl-C reaches it once, through us.
    child = subprocess.Popen([sys.executable, "-m", "jmarl", "train", *words], start_new_session=True)
    try:
        return child.wait(seconds)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as stop:
        child.terminate()  # SIGINT is ignored in the background of a shell
        child.wait()
        if isinstance(stop, KeyboardInterrupt):
            raise
        return 0  # it did as it was asked


def main(argv: Sequence[str] | None = None, prog: str = "jmarl campaign") -> int:
    """The command line."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    jax.config.update("jax_platforms", "cpu")  # devices are for the runs, in processes of their own
    before = signal.signal(signal.SIGTERM, stop)
    try:
        with usage_errors():
            return tyro.cli(campaign, prog=prog, args=argv)
    except KeyboardInterrupt:
        print("Stopped. The same command goes on.", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
