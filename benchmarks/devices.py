"""Does a device for each core pay? Seeds in one `vmap` on one CPU device against the same seeds spread over the cores.

    python benchmarks/devices.py mappo_rnn qmix_rnn vdn_rnn --seeds 8 --rounds 3 --out results/devices/two-cores.json

The settings are those of whole_run.py. Each measurement is a process of its own, the two in turn. One JSON object comes
out: for each setting the ratio of the medians of all seeds' environment steps per second, the ratio of CPU seconds per
step (which other processes disturb less), and the cores that other processes used: above 0.1 the machine was not ours.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def measure(name: str, num_devices: int, num_seeds: int, seconds: float) -> dict[str, float]:
    """Speed of a run, without its start: to be called in a new process."""
    import jmarl

    jmarl.use_cores(num_devices)
    # Not before, since they start jax.
    from throughput import cpu_seconds
    from whole_run import SETTINGS

    loop, config, num_steps = SETTINGS[name]
    marks = []

    def mark(env_steps, metrics, state):
        marks.append((env_steps, time.perf_counter(), cpu_seconds()))
        return len(marks) > 3 and marks[-1][1] - marks[0][1] >= seconds

    import jax

    jmarl.run(
        loop,
        jax.random.key(0),
        config.replace(num_updates=100 * num_steps),
        num_steps=100 * num_steps,
        steps_per_chunk=max(1, num_steps // 10),
        num_seeds=num_seeds,
        devices=num_devices,
        callback=mark,
    )
    (first, begin, (machine, own)), (last, end, (machine_after, own_after)) = marks[0], marks[-1]
    steps, wall = num_seeds * (last - first), end - begin
    return {
        "num_devices": num_devices,
        "steps_per_s": steps / wall,
        "cpu_s_per_step": (own_after - own) / steps,
        "own_cores": (own_after - own) / wall,
        "other_processes_cores": (machine_after - machine - (own_after - own)) / wall,
    }


def compare(name: str, num_cores: int, num_seeds: int, rounds: int, seconds: float) -> dict[str, Any]:
    """Both in turn, `rounds` times."""
    results: dict[int, list[dict[str, float]]] = {1: [], num_cores: []}
    for _ in range(rounds):
        for num_devices, measured in results.items():
            words = [name, "--child", str(num_devices), "--seeds", str(num_seeds), "--seconds", str(seconds)]
            command = [sys.executable, __file__, *words]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            measured.append(json.loads(output.splitlines()[-1]))
            print(f"{name} {measured[-1]}", file=sys.stderr, flush=True)
    one, many = results.values()

    def median(rows, key):
        return statistics.median(row[key] for row in rows)

    return {
        "name": name,
        "speed_ratio": median(many, "steps_per_s") / median(one, "steps_per_s"),
        "speed_ratio_of_each_round": [b["steps_per_s"] / a["steps_per_s"] for a, b in zip(one, many, strict=True)],
        "cpu_s_per_step_ratio": median(many, "cpu_s_per_step") / median(one, "cpu_s_per_step"),
        "other_processes_cores": median(one + many, "other_processes_cores"),
        "one_device": one,
        "a_device_for_each_core": many,
    }


def main() -> None:
    """Compares, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", help="settings of whole_run.py")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)), help="by default all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement, at least")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.names[0], args.child, args.seeds, args.seconds)))
        return
    rows = [compare(name, args.cores, args.seeds, args.rounds, args.seconds) for name in args.names]
    import jmarl

    text = json.dumps({"num_seeds": args.seeds, "rows": rows, "system": jmarl.logging.system_facts()}, indent=1)
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
