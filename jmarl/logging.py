"""Sinks: where the metrics of a run go. `run` calls them from Python, between compiled chunks.

A sink is three functions; write your own in a few lines and pass it to `jmarl.run(..., sinks=[...])`. Arrays keep the
seed axis: averaging over seeds is the reader's business, not the file's.
"""

import csv
import io
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Sink", "csv_file", "json_file", "run_folder", "system_facts", "tensorboard", "terminal", "wandb"]


class Sink(NamedTuple):
    """Where metrics go.

    Attributes:
      start: `(info) -> None`, once, before anything is compiled. `info` holds `num_seeds` and `total_env_steps` (of one
        seed) and may hold more. Where `info.get("resumed_at")` is not None, a run goes on from that many `env_steps`:
        rows after them, of the process that was killed, will be written again.
      write: `(env_steps, wall_s, metrics) -> None`, after each chunk. `env_steps` are one seed's so far, `wall_s`
        the seconds since `start`, compilation included, `metrics` maps names to arrays `[num_seeds]`. NaN means that
        there was nothing to measure, e.g. no episode finished. Names may differ from call to call. A second call with
        the same `env_steps` adds to the row of the first. The warm-up of replay is not among these `env_steps`, though
        it is among those that the learner counts.
      close: `() -> None`, at the end, also after an exception or Ctrl-C.
      flush: `() -> None`, before each checkpoint: rows so far must survive the death of the process from now on.
    """

    start: Callable[[Mapping[str, Any]], None]
    write: Callable[[int, float, Mapping[str, np.ndarray]], None]
    close: Callable[[], None]
    flush: Callable[[], None] = lambda: None


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

    return Sink(start, write, close)


def csv_file(path: str | os.PathLike[str]) -> Sink:
    """Writes one row per (env_steps, seed), flushed as it goes: what a killed run leaves behind reads back.

    Columns are `env_steps, wall_s, seed` and the metrics; a cell is empty where nothing was measured. When a metric
    appears later than others (evaluation, say) the file is rewritten once with the wider header. A file that exists is
    refused, unless the run is resumed: then the rows after its checkpoint go.
    """
    path = Path(path)
    columns = ["env_steps", "wall_s", "seed"]
    last_step: int | None = None

    def append(rows: Sequence[Mapping[str, Any]]) -> None:
        text = io.StringIO(newline="")
        csv.DictWriter(text, columns, restval="").writerows(rows)
        with path.open("ab", buffering=0) as file:  # in one piece
            file.write(text.getvalue().encode())

    def read() -> list[dict[str, str]]:
        """Whole rows: a process may have been killed while it wrote the last one."""
        whole = path.read_bytes().rpartition(b"\n")[0].decode() if path.exists() else ""
        return list(csv.DictReader(io.StringIO(whole, newline="")))

    def rewrite(rows: Sequence[Mapping[str, Any]]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
        _replace(path, text.getvalue())

    def start(info: Mapping[str, Any]) -> None:
        nonlocal last_step
        rows = []
        if (resumed_at := info.get("resumed_at")) is None:
            _require_new(path)
        else:
            rows = [row for row in read() if int(row["env_steps"]) <= resumed_at]
            columns.extend(name for name in (rows[0] if rows else ()) if name not in columns)
            last_step = int(rows[-1]["env_steps"]) if rows else None
        rewrite(rows)

    def write(env_steps: int, wall_s: float, metrics: Mapping[str, np.ndarray]) -> None:
        nonlocal last_step
        table = {name: np.atleast_1d(values) for name, values in metrics.items()}
        num_seeds = len(next(iter(table.values()), ()))
        rows: list[dict[str, Any]] = [
            {"env_steps": env_steps, "wall_s": round(wall_s, 3), "seed": seed}
            | {name: values[seed] for name, values in table.items() if not np.isnan(values[seed])}
            for seed in range(num_seeds)
        ]
        new = [name for name in metrics if name not in columns]
        if not new and env_steps != last_step:
            append(rows)
        else:
            before = read()
            if env_steps == last_step:
                same = before[-num_seeds:]
                before = before[:-num_seeds]
                rows = [{**old, **row, "wall_s": old["wall_s"]} for old, row in zip(same, rows, strict=True)]
            columns.extend(new)
            rewrite([*before, *rows])
        last_step = env_steps

    return Sink(start, write, lambda: None)


def json_file(path: str | os.PathLike[str], *, every_s: float = 5.0) -> Sink:
    """Writes one series per seed; the file is replaced as a whole, so it is complete JSON at any time.

    The file holds `{"env_steps": [t], "wall_s": [t], "metrics": {name: [seed][t]}}`, with null where nothing was
    measured. A file that exists is refused, unless the run is resumed: then what follows its checkpoint goes.

    Args:
      path: where.
      every_s: seconds between two writings, more where they take more than a twentieth of that; the last one comes
        with `close`. 0: with each row.
    """
    path = Path(path)
    env_steps_so_far: list[int] = []
    wall_so_far: list[float] = []
    series: dict[str, list[list[float | None]]] = {}
    next_save = -math.inf

    def save() -> None:
        nonlocal next_save
        begin = time.monotonic()
        content = {"env_steps": env_steps_so_far, "wall_s": wall_so_far, "metrics": series}
        _replace(path, json.dumps(content, allow_nan=False) + "\n")
        end = time.monotonic()
        # Of a long run with many seeds the file is large: training must not wait for it most of the time.
        next_save = end + (max(every_s, 20 * (end - begin)) if every_s else 0.0)

    def start(info: Mapping[str, Any]) -> None:
        if (resumed_at := info.get("resumed_at")) is None:
            _require_new(path)
        elif path.exists():
            content = json.loads(path.read_text())
            num = sum(env_steps <= resumed_at for env_steps in content["env_steps"])
            env_steps_so_far.extend(content["env_steps"][:num])
            wall_so_far.extend(content["wall_s"][:num])
            series.update({name: [seed[:num] for seed in by_seed] for name, by_seed in content["metrics"].items()})
        save()

    def write(env_steps: int, wall_s: float, metrics: Mapping[str, np.ndarray]) -> None:
        if env_steps_so_far[-1:] != [env_steps]:
            env_steps_so_far.append(int(env_steps))
            wall_so_far.append(round(float(wall_s), 3))
            for by_seed in series.values():
                for one_seed in by_seed:
                    one_seed.append(None)
        for name, values in metrics.items():
            by_seed = series.setdefault(name, [])
            for seed, value in enumerate(np.atleast_1d(values)):
                if seed == len(by_seed):
                    by_seed.append([None] * len(env_steps_so_far))
                if np.isfinite(value):
                    by_seed[seed][-1] = float(value)
        if time.monotonic() >= next_save:
            save()

    return Sink(start, write, save, save)


def tensorboard(folder: str | os.PathLike[str]) -> Sink:
    """Writes TensorBoard's event files, one of its runs for each seed: `tensorboard --logdir FOLDER`.

    Seeds are runs, `FOLDER/seed_0` and so on, and not parts of the tags: TensorBoard draws all runs of a tag into one
    chart, which shows the spread, and a metric has the same tag in every experiment. Steps are environment steps.
    """
    try:
        # Not its SummaryWriter, whose `flush` does not wait for the thread that writes.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary
    except ImportError as error:
        raise ImportError('The TensorBoard sink needs tensorboardX: pip install "jmarl[tensorboard]".') from error
    writers: list[Any] = []

    def start(info: Mapping[str, Any]) -> None:
        if (resumed_at := info.get("resumed_at")) is None:
            _require_new(Path(folder))
        # Files are named after seconds: without more, that of a process that resumes at once would replace its last.
        suffix = "" if resumed_at is None else f".from_{resumed_at}"
        for seed in range(info["num_seeds"]):
            of_seed = Path(folder) / f"seed_{seed}"
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
            writer.write_event(Event(wall_time=time.time(), step=env_steps, summary=Summary(value=values)))

    def flush() -> None:
        for writer in writers:
            writer.flush()

    def close() -> None:
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
    path = Path(path)
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


def _require_new(path: Path) -> None:
    if path.exists():
        raise FileExistsError(f"{path} exists already: give another path, or remove it.")


def _replace(path: Path, text: str) -> None:
    """Writes a file that is whole at any time: the old one until the new one is complete."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, newline="")
    os.replace(temporary, path)
