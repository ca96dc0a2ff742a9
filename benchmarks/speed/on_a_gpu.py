"""What jmarl makes of a GPU, in one go of at most twelve minutes: speeds beside their aims, and beside others.

    python benchmarks/speed/on_a_gpu.py --out benchmarks/results/throughput/gpu.json
    python benchmarks/speed/on_a_gpu.py --theirs qmix_rnn="COMMAND OF THE OTHER" --theirs ippo_ff=".." --out gpu.json

First the rows of `throughput.py` that have an aim, then those of `whole_run.py` for which another library's command is
given, as `beside.py` measures them. Whatever would begin after `--minutes` is left out, and the file, which is written
after each row, names it. Each is a process of its own: one alone has a GPU's memory. `--small` tries all of it on a
CPU, where aims mean nothing.
"""

import argparse
import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SPREAD = ["--env", "MPE_simple_spread_v3"]
# name: (arguments of throughput.py; for each number of environments and seeds, the aim in environment steps per second)
ROWS: dict[str, tuple[list[str], dict[tuple[int, int], float | None]]] = {
    "ippo": (["ippo", *SPREAD], {(64, 1): None, (1024, 1): None, (4096, 1): 20e6}),
    "mappo_rnn": (["mappo", *SPREAD, "--recurrent"], {(1024, 1): 2.5e6}),
    "qmix": (["qmix", *SPREAD], {(8, 1): 80e3, (8, 64): 4e6}),
    "ippo_smax_2s3z": (["ippo", "--env", "HeuristicEnemySMAX", "--env-kwargs", "map_name=2s3z"], {(1024, 1): None}),
}
SMALL = ["--rollout-length", "26", "--seconds", "0.1", "--repeats", "1"]


def measured(script: str, what: str, *words: str) -> dict[str, Any]:
    """What a script of this folder writes about an algorithm or a row."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        subprocess.run(
            [sys.executable, str(HERE / script), what, "--out", str(out), *words], check=True, stdout=sys.stderr
        )
        return json.loads(out.read_text())


def throughput(name: str, small: bool) -> dict[str, Any]:
    """Rows for each number of environments and seeds, with their aims."""
    words, aims = ROWS[name]
    num_envs, num_seeds = (sorted(set(numbers)) for numbers in zip(*aims, strict=True))
    if small:
        num_envs, num_seeds, words = [8], [min(num, 2) for num in num_seeds], [*words, *SMALL]
    sizes = ["--num-envs", *map(str, num_envs), "--seeds", *map(str, num_seeds)]
    result = measured("throughput.py", *words, *sizes)
    for row in result["rows"]:
        row["aim"] = aims.get((row["num_envs"], row["num_seeds"]))
    return {"name": name, "rows": result["rows"], "system": result["system"]}


def main() -> None:
    """Measures while there is time, and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a JSON file to write")
    parser.add_argument("--theirs", action="append", default=[], metavar="ROW=COMMAND", help="a row of whole_run.py")
    parser.add_argument("--minutes", type=float, default=10.0, help="nothing begins later")
    parser.add_argument("--small", action="store_true", help="a trial without a GPU")
    options = parser.parse_args()
    if bad := [pair for pair in options.theirs if "=" not in pair]:
        parser.error(f"--theirs {bad[0]} must be a row of whole_run.py and a command: ROW=COMMAND.")
    theirs = dict(pair.split("=", 1) for pair in options.theirs)
    todo: dict[str, Callable[[], dict[str, Any]]] = {
        **{name: functools.partial(throughput, name, options.small) for name in ROWS},
        **{
            f"{name} beside another's": functools.partial(measured, "beside.py", name, "--", "bash", "-c", command)
            for name, command in theirs.items()
        },
    }
    begin, results, left_out = time.perf_counter(), [], []
    for name, measure in todo.items():
        if time.perf_counter() - begin > 60 * options.minutes:
            left_out.append(name)
        else:
            results.append(measure())
        minutes = round((time.perf_counter() - begin) / 60, 1)
        text = json.dumps({"minutes": minutes, "left_out": left_out, "results": results}, indent=1)
        options.out.write_text(text + "\n")
    for result in results:
        for row in result.get("rows", ()):
            size = f"{row['num_envs']} environments, {row['num_seeds']} seeds"
            if row["aim"]:
                print(f"{result['name']}, {size}: {row['step']['steps_per_s'] / row['aim']:.2f} of the aim")


if __name__ == "__main__":
    main()
