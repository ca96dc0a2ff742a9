"""Measurements in turn, each in a process of its own, so that a machine that slows down slows them all."""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

import jmarl


class Watch:
    """The callback of `jmarl.run` that stops it `seconds` after its first chunk, and how fast it was since."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._marks: list[tuple] = []

    def __call__(self, env_steps: int, metrics: Any, state: Any) -> bool:
        from throughput import cpu_seconds  # here, since it starts jax

        self._marks.append((env_steps, time.perf_counter(), cpu_seconds()))
        return len(self._marks) > 3 and self._marks[-1][1] - self._marks[0][1] >= self._seconds

    def speed(self, num_seeds: int) -> dict[str, float]:
        """Of all seeds together, and the cores that this process and others used meanwhile."""
        (first, begin, (machine, own)), (last, end, (machine_after, own_after)) = self._marks[0], self._marks[-1]
        steps, wall, used = num_seeds * (last - first), end - begin, own_after - own
        return {
            "steps_per_s": steps / wall,
            "seconds": wall,
            "cpu_s_per_step": used / steps,
            "own_cores": used / wall,
            "other_processes_cores": (machine_after - machine - used) / wall,
        }


def parser(doc: str | None, ways: Iterable[str], seconds: float) -> argparse.ArgumentParser:
    """What the scripts' command lines share."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=seconds, help="of each measurement, at least")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    parser.add_argument("--child", choices=list(ways), help=argparse.SUPPRESS)
    return parser


def measure_in_turn(script: str, words: Sequence[str], ways: Iterable[str], rounds: int) -> dict[str, list[Any]]:
    """The last line, in JSON, of `script *words --child WAY` for each way, `rounds` times."""
    results: dict[str, list[Any]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, measured in results.items():
            command = [sys.executable, script, *words, "--child", way]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            measured.append(json.loads(output.splitlines()[-1]))
            print(f"{' '.join(words)}, {way}: {measured[-1]}", file=sys.stderr, flush=True)
    return results


def iterations_beside(
    loops: Mapping[str, tuple[Any, Any]], beside: Mapping[str, str], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Milliseconds of an iteration of each loop with its config, in this process, and the ratio to another's.

    Args:
      loops: by name. They are compiled before anything is timed.
      beside: the name of the other, for each that is to have a row.
      options: of `parser`.
    """
    runs, steps = {}, {}
    for name, (loop, cfg) in loops.items():
        steps[name] = jax.jit(lambda run, loop=loop, cfg=cfg: loop.step(run, cfg)[0], donate_argnums=0)
        runs[name] = jax.jit(loop.init)(jax.random.key(0), cfg)
        runs[name] = jax.block_until_ready(steps[name](runs[name]))
    taken: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(options.rounds):
        for name, step in steps.items():
            begin, count = time.perf_counter(), 0
            while time.perf_counter() - begin < options.seconds:
                runs[name] = jax.block_until_ready(step(runs[name]))
                count += 1
            taken[name].append(1e3 * (time.perf_counter() - begin) / count)
    rows = [
        {
            "way": name,
            "milliseconds": [round(x, 1) for x in taken[name]],
            "beside": other,
            "ratio": round(statistics.median(x / y for x, y in zip(taken[name], taken[other], strict=True)), 3),
            "env_steps_per_s": round(loops[name][0].env_steps_per_iteration / statistics.median(taken[name]) * 1e3),
        }
        for name, other in beside.items()
    ]
    table = Table("way", "beside", "ratio of time", "milliseconds")
    for row in rows:
        table.add_row(row["way"], row["beside"], f"{row['ratio']:.2f}", str(row["milliseconds"]))
    Console(stderr=True).print(table)
    return rows


def write(rows: Sequence[Any], out: Path | None) -> None:
    """Prints the rows with what they were measured on, and writes them."""
    text = json.dumps({"rows": rows, "system": jmarl.logging.system_facts()}, indent=1)
    print(text)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")
