"""Kills a run again and again at random moments, resumes it each time, and compares its end with a run left alone.

    python benchmarks/evidence/kills.py --kills 20
    python benchmarks/evidence/kills.py --kills 5 qmix --env predator_prey --seeds 2 --total-steps 2e5

What follows the options is for `jmarl train`. Every second kill waits for a save to be under way; the others come at a
moment drawn between the start of the process and its first seconds of training. Parameters, the whole saved state and
all metrics, without the clock, must be equal in the end.
"""

import argparse
import csv
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jmarl

TRAIN = [sys.executable, "-m", "jmarl", "train"]
SMALL = "mappo --env MPE_simple_spread_v3 --seeds 2 --num-envs 8 --rollout-length 32 --total-steps 1e6 --log-every 2"
SMALL += " --hidden-sizes 32 --eval-episodes 8"


def main(argv: Sequence[str] | None = None) -> bool:
    """Prints what happened, and returns whether the two runs ended equal."""
    parser = argparse.ArgumentParser(
        description="Kills a run at random moments, resumes it, compares its end.", allow_abbrev=False
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="decides the moments")
    parser.add_argument("--checkpoint-every", type=float, default=0.2, help="seconds between two checkpoints")
    parser.add_argument("--folder", type=Path, default=Path("runs/kill_test"), help="a new one, for both runs")
    options, words = parser.parse_known_args(argv)
    jmarl.logging.run_folder(options.folder)
    words = [*(words or SMALL.split()), "--no-gif", "--checkpoint-every", str(options.checkpoint_every)]

    whole, killed = options.folder / "whole", options.folder / "killed"
    begin = time.monotonic()
    with start([*words, "--run-dir", str(whole)]) as process:
        pass
    if process.returncode:
        raise SystemExit(f"error: the run left alone failed, see {whole}.log.")
    print(f"A run left alone took {time.monotonic() - begin:.0f} s.", flush=True)

    num_kills, startup_s, rng = 0, 0.0, random.Random(options.seed)
    while True:
        is_begun = (killed / "config.json").exists()
        if killed.exists() and not is_begun:  # killed before it wrote anything
            shutil.rmtree(killed)
        begin, left = time.monotonic(), saves(killed)
        with start(["--resume", str(killed)] if is_begun else [*words, "--run-dir", str(killed)]) as process:
            if num_kills < options.kills:
                if num_kills % 2 == 0:
                    wait_for_save(process, killed, 1)
                    startup_s = time.monotonic() - begin
                    wait_for_save(process, killed, rng.randint(1, 10))
                    time.sleep(rng.uniform(0, 0.02))
                else:
                    time.sleep(rng.uniform(0, startup_s + 3))
                process.send_signal(signal.SIGKILL)
                moment = f"{time.monotonic() - begin:.1f} s after the start"
        if process.returncode != -signal.SIGKILL:
            break
        num_kills += 1
        is_half = " and in a save" if saves(killed) - left else ""
        print(f"Kill {num_kills}, {moment}{is_half}: {rows(killed)} rows written.", flush=True)
    if process.returncode:
        raise SystemExit(f"error: a resumed run failed, see {killed}.log.")

    if num_kills < options.kills:
        raise SystemExit(f"error: the run was complete after {num_kills} of {options.kills} kills: make it longer.")
    different = [name for name, value in result(whole).items() if value != result(killed)[name]]
    print(f"{num_kills} kills. " + (f"Different: {', '.join(different)}." if different else "Everything is equal."))
    return not different


def start(words: Sequence[str]) -> subprocess.Popen[bytes]:
    """`jmarl train`, with what it prints in a file beside the run folder."""
    with Path(f"{words[-1]}.log").open("ab") as log:
        return subprocess.Popen([*TRAIN, *words], stdout=log, stderr=subprocess.STDOUT)


def wait_for_save(process: subprocess.Popen[bytes], folder: Path, number: int) -> None:
    """Until that many more saves have begun, and the last of them is under way, or the process has ended."""
    old, begun = saves(folder), 0
    while process.poll() is None and begun < number:
        time.sleep(0.001)
        now = saves(folder)
        begun += len(now - old)
        old = now


def saves(folder: Path) -> set[str]:
    """Saves under way, or left so by a process that was killed."""
    return {path.name for path in (folder / "checkpoints").glob("*.orbax-checkpoint-tmp*")}


def rows(folder: Path) -> int:
    """Rows of metrics that a killed run left."""
    path = folder / "metrics.json"
    return len(json.loads(path.read_text())["env_steps"]) if path.exists() else 0


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
