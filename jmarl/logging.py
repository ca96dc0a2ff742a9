"""Sinks: where the metrics of a run go. `run` calls them from Python, between compiled chunks.

A sink is three functions; write your own in a few lines and pass it to `jmarl.run(..., sinks=[...])`. Arrays keep the
seed axis: averaging over seeds is the reader's business, not the file's.
"""

import contextlib
import csv
import io
import itertools
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jmarl import files

__all__ = [
    "History",
    "Sink",
    "csv_file",
    "json_file",
    "memory",
    "run_folder",
    "system_facts",
    "tensorboard",
    "terminal",
    "wandb",
]


class Sink(NamedTuple):
    """Where metrics go.

    Attributes:
      start: `(info) -> None`, once, before anything is compiled. `info` holds `num_seeds` and `total_env_steps` (of one
        seed) and may hold more. Where `info.get("resumed_at")` is not None, a run goes on from that many `env_steps`:
        rows after them, of the process that was killed, will be written again. `rows_until_then` were written before.
      write: `(env_steps, wall_s, metrics) -> None`, after each chunk. `env_steps` are one seed's so far, `wall_s`
        the seconds since `start`, compilation included, `metrics` maps names to arrays `[num_seeds]`. NaN means that
        there was nothing to measure, e.g. no episode finished. Names may differ from call to call. A second call with
        the same `env_steps` adds to the row of the first. The warm-up of replay is not among these `env_steps`, though
        it is among those that the learner counts.
      close: `() -> None`, at the end, also after an exception or Ctrl-C.
      flush: `() -> None`, before each checkpoint: rows so far must survive the death of the process from now on.
      is_display: nothing is lost without it: if it fails, the run goes on.
    """

    start: Callable[[Mapping[str, Any]], None]
    write: Callable[[int, float, Mapping[str, np.ndarray]], None]
    close: Callable[[], None]
    flush: Callable[[], None] = lambda: None
    is_display: bool = False


def terminal(metrics: Sequence[str] = ("train/return_sum", "train/won"), *, every_s: float = 10.0) -> Sink:
    """A progress bar with steps per second, returns and time left; plain lines where stdout is no terminal.

    Args:
      metrics: names to show, averaged over the seeds; those that a run does not have are left out. Steps per second
        are those of all seeds together.
      every_s: seconds between plain lines.

    >>> sink = terminal()
    >>> sink.start({"num_seeds": 2, "total_env_steps": 1000})
    training 2 seeds for 1,000 environment steps each; compiling
    >>> sink.write(1000, 2.0, {"train/return_sum": np.array([1.0, 3.0])})
    100 %  1,000 steps  1,000 steps/s  return_sum 2.00  0:00:02 gone  0:00:00 left
    >>> sink.close()
    """
    interactive = sys.stdout.isatty()
    if interactive:
        try:
            from rich import progress
        except ImportError as error:
            raise ImportError(
                'The progress bar needs rich: pip install "jmarl[bench]", or leave jmarl.logging.terminal out of sinks.'
            ) from error
        bar = progress.Progress(
            progress.SpinnerColumn(), progress.BarColumn(24), progress.TextColumn("{task.description}"), expand=False
        )

    total, num_seeds = 1, 1
    first: tuple[int, float] | None = None
    last_printed = -math.inf
    shown: dict[str, Any] = {}
    task: Any = None

    def start(info: Mapping[str, Any]) -> None:
        nonlocal total, num_seeds, task
        total, num_seeds = info["total_env_steps"], info["num_seeds"]
        seeds = "1 seed" if num_seeds == 1 else f"{num_seeds} seeds"
        text = f"training {seeds} for {total:,} environment steps each; compiling"
        if resumed_at := info.get("resumed_at"):
            text = text.replace("; ", f", {resumed_at:,} of them done; ")
        if interactive:
            bar.start()
            task = bar.add_task(text, total=total, completed=resumed_at or 0)
        else:
            print(text, flush=True)

    def write(env_steps: int, wall_s: float, values: Mapping[str, np.ndarray]) -> None:
        nonlocal first, last_printed
        # The first chunk holds the compilation, so speed is counted from its end.
        steps, seconds = (env_steps, wall_s) if first is None else (env_steps - first[0], wall_s - first[1])
        speed = steps / max(seconds, 1e-9)
        is_known = first is not None or env_steps >= total
        first = first or (env_steps, wall_s)
        shown.update({name: np.nanmean(values[name]) for name in metrics if _measured(values.get(name))})
        text = "  ".join(
            [
                f"{100 * env_steps / total:3.0f} %",
                f"{env_steps:,} steps",
                *([f"{speed * num_seeds:,.0f} steps/s"] if is_known else []),
                *(f"{name.split('/')[-1]} {value:.2f}" for name, value in shown.items()),
                f"{_clock(wall_s)} gone",
                *([f"{_clock((total - env_steps) / max(speed, 1e-9))} left"] if is_known else []),
            ]
        )
        if interactive:
            bar.update(task, completed=env_steps, description=text)
        elif env_steps >= total or time.monotonic() - last_printed >= every_s:
            last_printed = time.monotonic()
            print(text, flush=True)

    def close() -> None:
        if interactive:
            bar.stop()

    return Sink(start, write, close, is_display=True)


class History(Sink):
    """A sink that keeps all rows in memory. `jmarl.logging.memory` makes one."""

    _rows: list[tuple[int, float, dict[str, np.ndarray]]]

    @property
    def env_steps(self) -> np.ndarray:
        """Of one seed, at each row."""
        return np.array([env_steps for env_steps, _, _ in self._rows], int)

    @property
    def wall_s(self) -> np.ndarray:
        """Seconds since the start, at each row."""
        return np.array([wall_s for _, wall_s, _ in self._rows], float)

    @property
    def metrics(self) -> dict[str, np.ndarray]:
        """Each metric by name, `[rows, num_seeds]`, NaN where nothing was measured."""
        names = {name: np.shape(values) for _, _, row in self._rows for name, values in row.items()}
        return {
            name: np.array([row.get(name, np.full(shape, np.nan)) for _, _, row in self._rows])
            for name, shape in names.items()
        }

    def plot(self, name: str, ax: Any = None) -> Any:
        """Draws a metric over environment steps, one line for each seed, with matplotlib. Returns the axes."""
        if name not in (metrics := self.metrics):
            raise ValueError(f"{name!r} was not measured: choose one of {', '.join(sorted(metrics))}.")
        if ax is None:
            try:
                from matplotlib import pyplot
            except ImportError as error:
                raise ImportError("To plot needs matplotlib: pip install matplotlib.") from error
            ax = pyplot.subplots()[1]
        for seed, values in enumerate(np.atleast_2d(metrics[name].T)):
            is_measured = ~np.isnan(values)
            ax.plot(self.env_steps[is_measured], values[is_measured], label=f"seed {seed}")
        ax.set(xlabel="environment steps", ylabel=name)
        return ax


def memory() -> History:
    """Keeps all metrics in memory, to look at in a notebook.

    >>> history = memory()
    >>> history.start({"num_seeds": 2, "total_env_steps": 20})
    >>> history.write(10, 1.0, {"train/return_sum": np.array([1.0, 2.0])})
    >>> history.write(20, 2.0, {"train/return_sum": np.array([3.0, 4.0])})
    >>> history.env_steps, history.metrics["train/return_sum"].mean(axis=1)  # or history.plot("train/return_sum")
    (array([10, 20]), array([1.5, 3.5]))
    """
    rows: list[tuple[int, float, dict[str, np.ndarray]]] = []

    def start(info: Mapping[str, Any]) -> None:
        resumed_at = info.get("resumed_at") or 0
        rows[:] = [row for row in rows if row[0] <= resumed_at]

    def write(env_steps: int, wall_s: float, metrics: Mapping[str, np.ndarray]) -> None:
        if rows and rows[-1][0] == env_steps:
            rows[-1][2].update(metrics)
        else:
            rows.append((int(env_steps), float(wall_s), dict(metrics)))

    history = History(start, write, lambda: None)
    history._rows = rows
    return history


def csv_file(path: str | os.PathLike[str]) -> Sink:
    """Writes one row per (env_steps, seed), flushed as it goes: what a killed run leaves behind reads back.

    Columns are `env_steps, wall_s, seed` and the metrics; a cell is empty where nothing was measured. When a metric
    appears later than others (evaluation, say) the file is rewritten once with the wider header. While a disk is full,
    rows wait in memory. A file that exists is refused, unless the run is resumed: then the rows after its checkpoint
    go, and rows that were lost come from the JSON file of the same name beside it.
    """
    path = files.absolute(path)
    columns = ["env_steps", "wall_s", "seed"]
    num_columns = 0  # in the file
    size = 0  # of the file without `rows`
    rows: list[dict[str, Any]] = []  # of the last step, and those that could not be written yet
    last_step: int | None = None
    is_known = False  # whether the file has the last step already, with fewer metrics

    def encode(rows: Sequence[Mapping[str, Any]]) -> bytes:
        text = io.StringIO(newline="")
        csv.DictWriter(text, columns, restval="").writerows(rows)
        return text.getvalue().encode()

    def rewrite(before: Sequence[Mapping[str, Any]]) -> None:
        nonlocal size, num_columns
        head = encode([dict(zip(columns, columns, strict=True)), *before])
        files.replace(path, [head, encode(rows)])
        size, num_columns = len(head), len(columns)

    def save() -> None:
        if num_columns < len(columns):
            rewrite(_csv_rows(path.read_bytes()[:size]))
        elif is_known:  # what was written stays, whatever happens
            files.replace(path, [path.read_bytes()[:size], encode(rows)])
        else:
            files.append(path, encode(rows), size)

    def start(info: Mapping[str, Any]) -> None:
        nonlocal last_step
        path.parent.mkdir(parents=True, exist_ok=True)
        content = _resumed(path, info)
        columns.extend(content.metrics)
        before = content.rows()
        if before:
            last_step = content.env_steps[-1]
            rows[:] = [row for row in before if row["env_steps"] == last_step]
        rewrite(before[: len(before) - len(rows)])

    def write(env_steps: int, wall_s: float, metrics: Mapping[str, np.ndarray]) -> None:
        nonlocal last_step, size, is_known
        table = {name: np.atleast_1d(values) for name, values in metrics.items()}
        num_seeds = len(next(iter(table.values()), ()))
        new: list[dict[str, Any]] = [
            {"env_steps": env_steps, "wall_s": round(wall_s, 3), "seed": seed}
            | {name: values[seed] for name, values in table.items() if not np.isnan(values[seed])}
            for seed in range(num_seeds)
        ]
        if env_steps == last_step:
            is_known = not pending.is_there
            same = zip(rows[-num_seeds:], new, strict=True)
            rows[-num_seeds:] = [{**old, **row, "wall_s": old["wall_s"]} for old, row in same]
        elif pending.is_there:
            rows.extend(new)
        else:
            size, is_known = size + len(encode(rows)), False
            rows[:] = new
        last_step = env_steps
        columns.extend(name for name in metrics if name not in columns)
        pending.is_there = True
        pending.attempt()

    pending = _Pending(save)
    return Sink(start, write, pending.close, pending.flush)


def json_file(path: str | os.PathLike[str], *, every_s: float = 5.0) -> Sink:
    """Writes one series per seed; the file is replaced as a whole, so it is complete JSON at any time.

    The file holds `{"env_steps": [t], "wall_s": [t], "metrics": {name: [seed][t]}}`, with null where nothing was
    measured. While a disk is full, rows wait in memory. A file that exists is refused, unless the run is resumed: then
    what follows its checkpoint goes, and rows that were lost come from the CSV file of the same name beside it.

    Args:
      path: where.
      every_s: seconds between two writings, more where they take more than a twentieth of that; the last one comes
        with `close`. 0: with each row.
    """
    path = files.absolute(path)
    content = _Content()  # the last row of the file, and those that it does not have yet
    num_before, num_names = 0, 0  # rows and metrics of the file, without that last row
    next_save = -math.inf

    def save() -> None:
        nonlocal content, num_before, num_names, next_save
        begin = time.monotonic()
        with contextlib.ExitStack() as at_the_end:
            old = at_the_end.enter_context(path.open(encoding="ascii")) if num_before else ()
            files.replace(path, content.in_json(iter(old), num_before, num_names))
        num_before, num_names = num_before + max(0, len(content.env_steps) - 1), len(content.metrics)
        content = content.part(slice(-1, None))
        end = time.monotonic()
        # Of a long run with many seeds the file is large: training must not wait for it most of the time.
        next_save = end + (max(every_s, 20 * (end - begin)) if every_s else 0.0)

    def start(info: Mapping[str, Any]) -> None:
        nonlocal content
        path.parent.mkdir(parents=True, exist_ok=True)
        content = _resumed(path, info)
        save()

    def write(env_steps: int, wall_s: float, metrics: Mapping[str, np.ndarray]) -> None:
        content.add(env_steps, wall_s, metrics)
        pending.is_there = True
        if time.monotonic() >= next_save:
            pending.attempt()

    pending = _Pending(save)
    return Sink(start, write, pending.close, pending.flush)


class _Pending:
    """What a file does not have yet, and the attempts to write it: a failure is told, once until one succeeds."""

    def __init__(self, save: Callable[[], None]):
        self._save, self._is_told = save, False
        self.is_there = False

    def flush(self) -> None:
        """Writes it, if there is anything."""
        if self.is_there:
            self._save()
            self.is_there, self._is_told = False, False

    def attempt(self) -> None:
        try:
            self.flush()
        except OSError as error:
            if not self._is_told:
                print(f"{error} Its rows wait in memory until there is room.", flush=True)
            self._is_told = True

    def close(self) -> None:
        try:
            self.flush()
        except OSError as error:
            print(f"{error} Its last rows are lost.", flush=True)


class _Content:
    """Rows of metrics as the JSON file has them: `metrics[name][seed][t]`, None where nothing was measured."""

    def __init__(self) -> None:
        self.env_steps: list[int] = []
        self.wall_s: list[float] = []
        self.metrics: dict[str, list[list[float | None]]] = {}

    def add(self, env_steps: int, wall_s: float, metrics: Mapping[str, Any]) -> None:
        """A row, or more of the last one."""
        if self.env_steps[-1:] != [env_steps]:
            self.env_steps.append(int(env_steps))
            self.wall_s.append(round(float(wall_s), 3))
            for one_seed in (one_seed for by_seed in self.metrics.values() for one_seed in by_seed):
                one_seed.append(None)
        for name, values in metrics.items():
            by_seed = self.metrics.setdefault(name, [])
            for seed, value in enumerate(np.atleast_1d(values)):
                if seed == len(by_seed):
                    by_seed.append([None] * len(self.env_steps))
                if not np.isnan(value):
                    by_seed[seed][-1] = float(value)

    def part(self, steps: slice) -> "_Content":
        new = _Content()
        new.env_steps, new.wall_s = self.env_steps[steps], self.wall_s[steps]
        new.metrics = {name: [one_seed[steps] for one_seed in by_seed] for name, by_seed in self.metrics.items()}
        return new

    def rows(self) -> list[dict[str, Any]]:
        """As the CSV file has them: one for each step and seed."""
        num_seeds = max(map(len, self.metrics.values()), default=0)
        rows = []
        for t, env_steps in enumerate(self.env_steps):
            for seed in range(num_seeds):
                values = {name: by_seed[seed][t] for name, by_seed in self.metrics.items()}
                measured = {name: _in_single_precision(x) for name, x in values.items() if x is not None}
                rows.append({"env_steps": env_steps, "wall_s": self.wall_s[t], "seed": seed} | measured)
        return rows

    def in_json(self, old: Iterator[str], num_before: int, num_names: int) -> Iterator[str]:
        """The file, piece by piece: each series is a line, so that none has to be read into memory to grow.

        Args:
          old: lines of the file that it replaces, whose last row is the first one here.
          num_before: rows before that one.
          num_names: metrics that it has.
        """

        def series(values, is_old=True):
            new = [json.dumps(x) if x is not None and math.isfinite(x) else "null" for x in values]
            if not num_before:
                return ", ".join(new)
            if not is_old:
                return ", ".join(["null"] * num_before + new)
            next(old)  # what stands between two series
            line = next(old).rstrip("\n")
            if line.count(", ") != num_before:
                raise StopIteration
            return ", ".join([line.rpartition(", ")[0], *new])

        def pieces():
            yield '{"env_steps": [\n' + series(self.env_steps)
            yield '\n], "wall_s": [\n' + series(self.wall_s)
            yield '\n], "metrics": {'
            for i, (name, by_seed) in enumerate(self.metrics.items()):
                yield f"{', ' if i else ''}{json.dumps(name)}: ["
                for seed, values in enumerate(by_seed):
                    yield f"{', ' if seed else ''}[\n{series(values, i < num_names)}\n]"
                yield "]"
            yield "}}\n"

        try:
            yield from pieces()
        except RuntimeError as error:  # a StopIteration: there were other lines
            raise OSError("it was changed by something else") from error


def _resumed(path: Path, info: Mapping[str, Any]) -> _Content:
    """What a file of metrics holds of the run that goes on, or the other file beside it; of a new run nothing."""
    if (resumed_at := info.get("resumed_at")) is None:
        files.require_new(path)
        return _Content()
    other = path.with_suffix(".json" if path.suffix == ".csv" else ".csv")
    content, others = (_read(file, info["num_seeds"], resumed_at) for file in (path, other))
    has, expected = len(content.env_steps), info.get("rows_until_then", 0)
    if has >= expected:
        return content
    if has < len(others.env_steps):
        print(f"{path} has {has} of {expected} rows: it is made anew from {other.name}.", flush=True)
        return others
    print(f"{path} has {has} of {expected} rows: the others are lost.", flush=True)
    return content


def _read(path: Path, num_seeds: int, last_step: int) -> _Content:
    """The rows until a step that can be read, whatever has happened to the file."""
    try:
        data = path.read_bytes()
        content = _of_csv(data, num_seeds) if path.suffix == ".csv" else _of_json(data, num_seeds)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, csv.Error):
        return _Content()
    return content.part(slice(sum(step <= last_step for step in content.env_steps)))


def _of_json(data: bytes, num_seeds: int) -> _Content:
    content = _Content()
    table = json.loads(data)
    content.env_steps, content.wall_s, content.metrics = table["env_steps"], table["wall_s"], table["metrics"]
    series = (x for by_seed in content.metrics.values() for x in by_seed)
    lengths = {len(content.env_steps), len(content.wall_s), *map(len, series)}
    if len(lengths) > 1 or not _is_rising(content.env_steps):
        raise ValueError("The series do not fit each other.")
    if any(len(by_seed) != num_seeds for by_seed in content.metrics.values()):
        raise ValueError("The seeds are others.")
    return content


def _of_csv(data: bytes, num_seeds: int) -> _Content:
    content, rows = _Content(), _csv_rows(data)
    for i in range(len(rows)):
        group = rows[i : i + num_seeds]
        try:
            if [int(row["seed"]) for row in group] != list(range(num_seeds)):
                continue
            cells = {name: [row[name] for row in group] for name in group[0]}
            steps, wall_s, _ = (cells.pop(name) for name in ("env_steps", "wall_s", "seed"))
            values = {name: np.array([_as_written(cell) for cell in column]) for name, column in cells.items()}
            if len(set(steps)) == 1 and _is_rising([*content.env_steps[-1:], int(steps[0])]):
                content.add(int(steps[0]), float(wall_s[0]), values)
        except (ValueError, TypeError):  # a torn row, or zeros
            continue
    return content


def _csv_rows(data: bytes) -> list[dict[str, str]]:
    """Whole rows: a process may have been killed while it wrote the last one."""
    text = data[: data.rfind(b"\n") + 1].decode(errors="replace")
    return list(csv.DictReader(io.StringIO(text, newline="")))


def _is_rising(steps: Sequence[int]) -> bool:
    return all(a < b for a, b in itertools.pairwise(steps))


def _in_single_precision(x: float) -> Any:
    """As metrics are, if nothing is lost: 0.1, not 0.10000000149011612."""
    with np.errstate(over="ignore"):
        single = np.float32(x)
    return single if float(single) == x else x


def _as_written(cell: str) -> float:
    """The number that is written in this way, in the precision that it had."""
    if not cell:
        return math.nan
    with np.errstate(over="ignore"):
        single = np.float32(cell)
    return float(single) if str(single) == cell else float(cell)


def tensorboard(folder: str | os.PathLike[str]) -> Sink:
    """Writes TensorBoard's event files, one of its runs for each seed: `tensorboard --logdir FOLDER`.

    Seeds are runs, `FOLDER/seed_0` and so on, and not parts of the tags: TensorBoard draws all runs of a tag into one
    chart, which shows the spread, and a metric has the same tag in every experiment. Steps are environment steps.
    While a disk is full, rows wait.
    """
    try:
        # Not its SummaryWriter, whose `flush` does not wait for the thread that writes.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary
    except ImportError as error:
        raise ImportError('The TensorBoard sink needs tensorboardX: pip install "jmarl[tensorboard]".') from error
    folder = files.absolute(folder)
    writers: list[Any] = []
    waiting: list[tuple[Any, Any]] = []  # writers, and what they have not written yet

    def start(info: Mapping[str, Any]) -> None:
        if (resumed_at := info.get("resumed_at")) is None:
            files.require_new(folder)
        # Files are named after seconds: without more, that of a process that resumes at once would replace its last.
        suffix = "" if resumed_at is None else f".from_{resumed_at}"
        for seed in range(info["num_seeds"]):
            of_seed = folder / f"seed_{seed}"
            of_seed.mkdir(parents=True, exist_ok=True)
            writer = EventsWriter(str(of_seed / "events"), suffix)
            if resumed_at is not None:
                # Rows after the checkpoint are written again: TensorBoard forgets those of the process that was killed.
                session = SessionLog(status=SessionLog.START)
                writer.write_event(Event(wall_time=time.time(), step=resumed_at + 1, session_log=session))
            writers.append(writer)

    def write(env_steps: int, wall_s: float, metrics: Mapping[str, np.ndarray]) -> None:
        for seed, writer in enumerate(writers):
            values = [Summary.Value(tag=name, simple_value=x) for name, x in _of_seed(metrics, seed).items()]
            waiting.append((writer, Event(wall_time=time.time(), step=env_steps, summary=Summary(value=values))))
        with contextlib.suppress(OSError):  # told before the next checkpoint
            flush()

    def flush() -> None:
        while waiting:
            writer, event = waiting[0]
            writer.flush()  # first: into an empty buffer an event goes as a whole, or not at all
            writer.write_event(event)
            del waiting[0]
        for writer in writers:
            writer.flush()

    def close() -> None:
        flush()
        for writer in writers:
            writer.close()

    return Sink(start, write, close, flush)


def wandb(**options: Any) -> Sink:
    """Sends metrics to Weights & Biases, one run for each seed, all in one group.

    Seeds are runs, and not parts of the names: W&B's own grouping then draws mean and spread, filters and tables work
    per seed, and a metric has the same name in every experiment. Steps are environment steps.

    Args:
      **options: of `wandb.init`: `project`, `config`, `mode="offline"`. `name` and `group`, one standing for the other,
        name the experiment: seed 0 of "mappo" is the run "mappo seed 0". With an `id`, the same in both processes, a
        resumed run goes on with the W&B runs of the one that was stopped; rows that W&B has already are not added.
    """
    try:
        import wandb as package
    except ImportError as error:
        raise ImportError('The W&B sink needs wandb: pip install "jmarl[wandb]".') from error
    name = options.pop("name", None) or options.get("group")
    id_, config = options.pop("id", None), options.pop("config", None)
    options = {"group": name, "settings": package.Settings(silent=True), **options}
    runs: list[Any] = []

    def start(info: Mapping[str, Any]) -> None:
        for seed in range(info["num_seeds"]):
            own: dict[str, Any] = {"config": {**(config or {}), "seed_index": seed}}
            if name is not None:
                own["name"] = f"{name} seed {seed}"
            if id_ is not None:
                own |= {"id": f"{id_}-{seed}", "resume": "allow"}
            try:
                runs.append(package.init(reinit="create_new", **own, **options))
            except package.Error as error:
                close()
                reason = str(error).strip().splitlines()[0]
                raise ValueError(
                    f'W&B does not start ({reason}): log in with `wandb login`, or use mode="offline", which the '
                    "environment variable WANDB_MODE=offline sets, too."
                ) from error
        where = f"offline in {runs[0].dir}" if runs[0].offline else f"at {runs[0].url}"
        print(f"W&B has a run for each seed, the first {where}", flush=True)

    def write(env_steps: int, wall_s: float, metrics: Mapping[str, np.ndarray]) -> None:
        for seed, run in enumerate(runs):
            run.log({"wall_s": wall_s, **_of_seed(metrics, seed)}, step=env_steps)

    def close() -> None:
        for run in runs:
            run.finish()

    return Sink(start, write, close)


def run_folder(path: str | os.PathLike[str]) -> Path:
    """Makes the folder of a run. A folder that exists is refused, so that no result is ever overwritten in silence."""
    path = files.absolute(path)
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        raise FileExistsError(f"{path} exists already: give the run another folder, or remove this one.") from None
    return path


def system_facts() -> dict[str, Any]:
    """What results depend on: versions, the git commit, device, cores. Written next to every result."""
    import jax

    import jmarl

    packages = ("jax", "jaxlib", "jaxmarl", "flax", "optax")
    return {
        "versions": {"jmarl": jmarl.__version__, **{name: _version(name) for name in packages}},
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "platform": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "num_devices": jax.device_count(),
        "num_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """Of the working directory, which is the user's project; "-dirty" says that files were changed since."""
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _of_seed(metrics: Mapping[str, np.ndarray], seed: int) -> dict[str, float]:
    """What was measured of one seed."""
    of_seed = {name: float(np.atleast_1d(values)[seed]) for name, values in metrics.items()}
    return {name: value for name, value in of_seed.items() if not math.isnan(value)}


def _measured(values: np.ndarray | None) -> bool:
    return values is not None and bool(np.any(np.isfinite(values)))


def _clock(seconds: float) -> str:
    seconds = round(seconds)
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
