"""Does a run that is killed again and again end as one that was left alone?

    python benchmarks/evidence/kills.py --kills 20 --out benchmarks/results/attacks/kills.json
    python benchmarks/evidence/kills.py --kills 5 qmix --env predator_prey --seeds 2 --total-steps 2e5

What follows the options is for train.py. Of four kills two come after the first row of metrics that a process has
written, at a random moment of its training, one while a save is under way, and one before the first row. Where each
fell is counted by what it left behind. Parameters, the whole saved state and all metrics, without the clock, must be
equal in the end.
"""

import argparse
import collections
import csv
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jmarl

TRAIN = Path(__file__).parents[1] / "train.py"
SMALL = "mappo --env MPE_simple_spread_v3 --seeds 2 --num-envs 8 --rollout-length 32 --total-steps 1e6 --log-every 2"
SMALL += " --hidden-sizes 32 --eval-episodes 8"


def main(argv: Sequence[str] | None = None) -> bool:
    """Prints what happened, and returns whether the two runs ended equal."""
    parser = argparse.ArgumentParser(description="Kills a run, resumes it, compares its end.", allow_abbrev=False)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="decides the moments")
    parser.add_argument("--checkpoint-every", type=float, default=0.2, help="seconds between two checkpoints")
    parser.add_argument("--folder", type=Path, default=Path("runs/kills"), help="a new one, for both runs")
    parser.add_argument("--out", type=Path, help="where to write the counts, as JSON")
    options, words = parser.parse_known_args(argv)
    jmarl.logging.run_folder(options.folder)
    words = [*(words or SMALL.split()), "--no-gif", "--checkpoint-every", str(options.checkpoint_every)]

    whole, killed = options.folder / "whole", options.folder / "killed"
    begin = time.monotonic()
    with start([*words, "--run-dir", str(whole)]) as process:
        until(process, lambda: num_rows(whole) > 0)
        startup_s = time.monotonic() - begin
    if process.returncode:
        raise SystemExit(f"error: the run left alone failed, see {whole}.log.")
    print(f"A run left alone took {time.monotonic() - begin:.0f} s, {startup_s:.0f} until its first row.", flush=True)

    rng, fell = random.Random(options.seed), collections.Counter[str]()
    while True:
        is_begun = (killed / "config.json").exists()
        if killed.exists() and not is_begun:  # killed before it wrote anything
            shutil.rmtree(killed)
        begin, saves, rows = time.monotonic(), saves_under_way(killed), Rows(killed)
        with start(["--resume", str(killed)] if is_begun else [*words, "--run-dir", str(killed)]) as process:
            if fell.total() < options.kills:
                kind = fell.total() % 4
                latest = begin + rng.uniform(0, startup_s) if kind == 3 else float("inf")
                until(process, lambda rows=rows, latest=latest: rows.are_written() or time.monotonic() > latest)
                is_training = rows.are_written()
                if kind != 3:
                    time.sleep(rng.uniform(0, 2))
                if kind == 2:
                    now = saves_under_way(killed)
                    until(process, lambda now=now: bool(saves_under_way(killed) - now))
                process.send_signal(signal.SIGKILL)
        if process.returncode != -signal.SIGKILL:
            break
        where = "in start-up" if not is_training else "in a save" if saves_under_way(killed) - saves else "in training"
        fell[where] += 1
        moment = f"{time.monotonic() - begin:.1f} s after the start, {where}"
        print(f"Kill {fell.total()}, {moment}: {num_rows(killed)} rows written.", flush=True)
    if process.returncode:
        raise SystemExit(f"error: a resumed run failed, see {killed}.log.")

    if fell.total() < options.kills:
        raise SystemExit(f"error: the run was complete after {fell.total()} of {options.kills} kills: make it longer.")
    different = [name for name, value in result(whole).items() if value != result(killed)[name]]
    counts = ", ".join(f"{num} {where}" for where, num in sorted(fell.items()))
    print(f"{fell.total()} kills: {counts}. " + (f"Different: {', '.join(different)}." if different else "Equal ends."))
    if options.out is not None:
        facts = {"command": words, "kills": dict(fell), "different": different, "system": jmarl.logging.system_facts()}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(facts, indent=2) + "\n")
    return not different


def start(words: Sequence[str]) -> subprocess.Popen[bytes]:
    """train.py, with what it prints in a file beside the run folder."""
    with Path(f"{words[-1]}.log").open("ab") as log:
        return subprocess.Popen([sys.executable, TRAIN, *words], stdout=log, stderr=subprocess.STDOUT)


def until(process: subprocess.Popen[bytes], is_so: Callable[[], bool]) -> None:
    """Returns at that moment, or when the process has ended."""
    while process.poll() is None and not is_so():
        time.sleep(0.001)


class Rows:
    """Looks whether a process writes rows: it makes the file anew as it starts, and then the file grows."""

    def __init__(self, folder: Path):
        self._path, self._size = folder / "metrics.csv", 0
        self._old = self._path.stat().st_ino if self._path.exists() else None

    def are_written(self) -> bool:
        if not self._path.exists() or (facts := self._path.stat()).st_ino == self._old:
            return False
        self._size = self._size or facts.st_size
        return facts.st_size > self._size


def saves_under_way(folder: Path) -> set[str]:
    """Also those that a process left so when it was killed."""
    return {path.name for path in (folder / "checkpoints").glob("*.orbax-checkpoint-tmp*")}


def num_rows(folder: Path) -> int:
    """Of metrics, whole or not."""
    path = folder / "metrics.csv"
    return max(0, path.read_bytes().count(b"\n") - 1) if path.exists() else 0


def result(folder: Path) -> dict[str, Any]:
    """All that a run leaves behind, without the clock."""
    with (folder / "metrics.csv").open(newline="") as file:
        table = [{name: cell for name, cell in row.items() if name != "wall_s"} for row in csv.DictReader(file)]
    series = json.loads((folder / "metrics.json").read_text())
    del series["wall_s"]
    saved = jmarl.checkpoint.describe(folder / "checkpoints")
    return {
        "parameters": (folder / "params.safetensors").read_bytes(),
        "the saved state": (saved["step"], saved["leaves"]),  # with a checksum of each array
        "metrics.csv": table,
        "metrics.json": series,
    }


if __name__ == "__main__":
    raise SystemExit(not main())
