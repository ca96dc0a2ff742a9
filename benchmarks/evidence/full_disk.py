"""Does a full disk end a run, or hide what went wrong?

    python benchmarks/evidence/full_disk.py --out benchmarks/results/attacks/full_disk.json

A run with every kind of file goes on while the disk is full: files may not grow beyond a limit, or a small file system
in memory is filled (which only the superuser can mount). Then there is room again. It must end as a run that was left
alone, in parameters and files; name each file that could not be written once, before all else; and lose no row.
"""

import argparse
import contextlib
import io
import json
import resource
import struct
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tensorboardX.proto.event_pb2 import Event

import jmarl

ENV = jmarl.envs.matrix_game([[1.0, 0.0], [0.0, 3.0]], num_steps=3)
LOOP = jmarl.on_policy(ENV, jmarl.mappo, num_envs=4, rollout_length=4)
CFG = jmarl.PPOConfig(hidden_sizes=(64, 64), num_epochs=1, num_minibatches=1)
NUM_ITERATIONS, FULL_FROM, FULL_UNTIL = 40, 10, 30


def main(argv: Sequence[str] | None = None) -> bool:
    """Prints what was found, and returns whether all is as it must be."""
    parser = argparse.ArgumentParser(description="Trains while the disk is full.", allow_abbrev=False)
    parser.add_argument("--out", type=Path, help="where to write the findings, as JSON")
    options = parser.parse_args(argv)
    findings: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        state, _ = train(whole)
        findings["size limit of files"] = found(whole, state, Path(folder) / "limited", limited)
        mount = Path(folder) / "mount"
        mount.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", "size=16m", "jmarl", str(mount)]
        if subprocess.run(words, capture_output=True).returncode == 0:
            try:
                findings["small file system"] = found(whole, state, mount / "run", filled(mount))
            finally:
                subprocess.run(["umount", str(mount)], check=True)
        else:
            findings["small file system"] = "not mounted: only the superuser can"
    print(json.dumps(findings, indent=2))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        facts = {"findings": findings, "system": jmarl.logging.system_facts()}
        options.out.write_text(json.dumps(facts, indent=2) + "\n")
    return all(x["as it must be"] for x in findings.values() if isinstance(x, dict))


def train(folder: Path, set_full: Callable[[bool], None] = lambda is_full: None) -> tuple[Any, list[str]]:
    """The state, and the lines that were printed; the disk is full in the middle."""

    def callback(env_steps, *_):
        done = env_steps // LOOP.env_steps_per_iteration
        if done in (FULL_FROM, FULL_UNTIL):
            set_full(done == FULL_FROM)

    files = [
        jmarl.logging.csv_file(folder / "metrics.csv"),
        jmarl.logging.json_file(folder / "metrics.json"),
        jmarl.logging.tensorboard(folder / "tensorboard"),
    ]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        state = jmarl.run(
            LOOP,
            jax.random.key(0),
            CFG,
            num_iterations=NUM_ITERATIONS,
            iterations_per_chunk=1,
            num_seeds=2,
            sinks=files,
            evaluation=jmarl.Evaluation(num_episodes=2, every=4),
            checkpoint=jmarl.Checkpointing(folder / "checkpoints", every_s=0),
            callback=callback,
        )
    return state, printed.getvalue().splitlines()


def found(whole: Path, state: Any, folder: Path, set_full: Callable[[bool], None]) -> dict[str, Any]:
    """How a run beside a full disk ended, compared with the one that was left alone."""
    try:
        again, lines = train(folder, set_full)
    finally:
        set_full(False)
    leaves = zip(jax.tree.leaves(again.train_state), jax.tree.leaves(state.train_state), strict=True)
    tables = [[_without_clock(line) for line in (x / "metrics.csv").read_text().splitlines()] for x in (whole, folder)]
    series = [json.loads((x / "metrics.json").read_text())["metrics"] for x in (whole, folder)]
    saved = [jmarl.checkpoint.describe(x / "checkpoints") for x in (whole, folder)]
    facts = {
        "parameters are equal": all(np.array_equal(x, y) for x, y in leaves),
        "last checkpoint is equal": saved[0]["leaves"] == saved[1]["leaves"],
        "rows of metrics.csv are equal": tables[0] == tables[1],
        "series of metrics.json are equal": series[0] == series[1],
        "events of TensorBoard are equal": _events(whole) == _events(folder),
        "the first failure names its path": bool(lines) and str(folder) in lines[0],
        "sentences": [line.replace(str(folder), "RUN") for line in lines],
    }
    return facts | {"as it must be": all(x for x in facts.values() if isinstance(x, bool)) and len(lines) <= 3}


def _events(folder: Path) -> dict[str, list[tuple[int, str, float]]]:
    """What TensorBoard would show of each seed: steps, tags, values."""
    shown: dict[str, list[tuple[int, str, float]]] = {}
    for path in sorted((folder / "tensorboard").glob("*/*")):
        content, events = path.read_bytes(), shown.setdefault(path.parent.name, [])
        while content:  # records: length, checksum, event, checksum
            size = struct.unpack("<Q", content[:8])[0]
            event = Event.FromString(content[12 : 12 + size])
            events += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            content = content[16 + size :]
    return shown


def limited(is_full: bool) -> None:
    """No file of this process may grow beyond 2 KiB."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048 if is_full else hard, hard))


def filled(mount: Path) -> Callable[[bool], None]:
    """Of a file system, all that is left but a few bytes."""

    def set_full(is_full: bool) -> None:
        (mount / "ballast").unlink(missing_ok=True)
        if is_full:
            with contextlib.suppress(OSError), (mount / "ballast").open("wb", buffering=0) as file:
                while file.write(bytes(4096)) == 4096:
                    pass

    return set_full


def _without_clock(line: str) -> list[str]:
    cells = line.split(",")
    return [cells[0], *cells[2:]]


if __name__ == "__main__":
    raise SystemExit(not main())
