"""How should a CPU compute several seeds? Side by side, one after the other, or with a device for each core?

    python benchmarks/speed/seeds_on_a_cpu.py qmix_rnn mappo_rnn --seeds 1 2 4 8 --rounds 3 --out two-cores.json

The settings are those of whole_run.py. Each measurement is a process of its own, all ways in turn. One JSON object
comes out: for each setting and number of seeds the environment steps per second of all seeds together (medians of the
rounds), and for each round the CPU seconds per step and the cores that other processes used: above 0.1 the machine was
not ours.
"""

import json
import statistics
from typing import Any

import in_turn
from in_turn import Watch, measure_in_turn, write

# Devices (None: one for each core) and `seed_axis` of `jmarl.run`.
WAYS: dict[str, tuple[int | None, str | None]] = {"vmap": (1, "vmap"), "map": (1, "map"), "cores": (None, None)}


def measure(name: str, way: str, num_seeds: int, seconds: float) -> dict[str, float]:
    """Speed of a run, without its start: to be called in a new process."""
    import jmarl

    num_devices, seed_axis = WAYS[way]
    jmarl.use_cores(num_devices)
    from whole_run import SETTINGS  # not before, since it starts jax

    loop, config, num_iterations = SETTINGS[name]()
    watch = Watch(seconds)

    import jax

    jmarl.run(
        loop,
        jax.random.key(0),
        config.replace(horizon=100 * num_iterations),
        num_iterations=100 * num_iterations,
        iterations_per_chunk=max(1, num_iterations // 10),
        num_seeds=num_seeds,
        seed_axis=seed_axis,
        callback=watch,
    )
    return watch.speed(num_seeds)


def compare(name: str, num_seeds: int, rounds: int, seconds: float) -> dict[str, Any]:
    """All ways in turn, `rounds` times. A single seed has one core."""
    ways = WAYS if num_seeds > 1 else ["vmap", "map"]
    results = measure_in_turn(__file__, [name, "--seeds", str(num_seeds), "--seconds", str(seconds)], ways, rounds)

    def median(key):
        return {way: statistics.median(row[key] for row in rows) for way, rows in results.items()}

    return {
        "name": name,
        "num_seeds": num_seeds,
        "steps_per_s": median("steps_per_s"),
        "other_processes_cores": median("other_processes_cores"),
        "rounds": results,
    }


def main() -> None:
    """Compares, prints and writes."""
    parser = in_turn.parser(__doc__, WAYS, seconds=10.0)
    parser.add_argument("names", nargs="+", help="settings of whole_run.py")
    parser.add_argument("--seeds", type=int, nargs="+", default=[8])
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.names[0], args.child, args.seeds[0], args.seconds)))
        return
    write([compare(name, num, args.rounds, args.seconds) for name in args.names for num in args.seeds], args.out)


if __name__ == "__main__":
    main()
