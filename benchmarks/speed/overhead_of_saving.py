"""What saving and writing cost: a run that is saved every 30 s and has every sink, against one that has neither.

    python benchmarks/speed/overhead_of_saving.py maddpg mappo --rounds 3 --out results/devices/overhead.json

Each is the preset's run on MPE simple_spread, in a process of its own, cut off after `--seconds` of training; all ways
in turn. All sinks: the extras tensorboard and wandb are needed. One JSON object comes out: for each algorithm and way
what it costs in wall time and in CPU time for each step (which other work on the machine disturbs less), in each round
and the median of them; and per round the cores that other processes used: W&B's are among them.
"""

import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import in_turn
from in_turn import Watch, measure_in_turn, write

WAYS = ("bare", "sinks", "saved", "saved and with all sinks")


def measure(algorithm: str, way: str, seconds: float) -> dict[str, float]:
    """Speed of a run, without its start and its end: to be called in a new process."""
    import jax

    import jmarl
    from jmarl.cli import experiment, options

    words = [algorithm, "--env", "MPE_simple_spread_v3"]
    of_run = options.parse(words, experiment.options_of, prog="overhead", does="Measures {algorithm} on {env}.")
    num_seeds = of_run.options.seeds
    experiment.use_devices(None, False, num_seeds)
    _, _, loop, num_iterations, config, _ = experiment.build(*of_run[:4])
    watch = Watch(seconds)
    with tempfile.TemporaryDirectory() as name:
        folder, log = Path(name), jmarl.logging
        os.environ["WANDB_MODE"] = "offline"
        kept: dict[str, Any] = {}
        if "sinks" in way:
            kept["sinks"] = [
                log.terminal(),
                log.csv_file(folder / "metrics.csv"),
                log.json_file(folder / "metrics.json"),
                log.tensorboard(folder / "tensorboard"),
                log.wandb(project="overhead", dir=name, config={}),
            ]
        if "saved" in way:
            kept["checkpoint"] = jmarl.Checkpointing(folder / "checkpoints", every_s=30.0)
        jmarl.run(
            loop,
            jax.random.key(0),
            config.replace(horizon=100 * num_iterations * loop.updates_per_iteration),
            num_iterations=100 * num_iterations,
            iterations_per_chunk=max(1, num_iterations // 100),
            num_seeds=num_seeds,
            callback=watch,
            **kept,
        )
    return watch.speed(num_seeds)


def compare(algorithm: str, rounds: int, seconds: float) -> dict[str, Any]:
    """All in turn, `rounds` times."""
    results = measure_in_turn(__file__, [algorithm, "--seconds", str(seconds)], WAYS, rounds)

    def cost(way: str) -> dict[str, Any]:
        """Against the same round's bare run: the machine's speed differs more between rounds than the ways do."""
        pairs = list(zip(results["bare"], results[way], strict=True))
        costs = {
            "wall": [bare["steps_per_s"] / row["steps_per_s"] - 1.0 for bare, row in pairs],
            "cpu": [row["cpu_s_per_step"] / bare["cpu_s_per_step"] - 1.0 for bare, row in pairs],
        }
        return {name: {"median": statistics.median(of), "rounds": of} for name, of in costs.items()}

    overhead = {way: cost(way) for way in WAYS[1:]}
    return {"algorithm": algorithm, "overhead": overhead, "rounds": results}


def main() -> None:
    """Compares, prints and writes."""
    parser = in_turn.parser(__doc__, WAYS, seconds=70.0)
    parser.add_argument("algorithms", nargs="+")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.algorithms[0], args.child, args.seconds)))
        return
    write([compare(algorithm, args.rounds, args.seconds) for algorithm in args.algorithms], args.out)


if __name__ == "__main__":
    main()
