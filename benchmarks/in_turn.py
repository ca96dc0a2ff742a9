"""Measurements in turn, each in a process of its own, so that a machine that slows down slows them all."""

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jmarl


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


def write(rows: Sequence[Any], out: Path | None) -> None:
    """Prints the rows with what they were measured on, and writes them."""
    text = json.dumps({"rows": rows, "system": jmarl.logging.system_facts()}, indent=1)
    print(text)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")
