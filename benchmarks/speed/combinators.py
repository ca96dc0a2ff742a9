"""What do combinators cost? Each beside the algorithm within, in turn, in one process.

    python benchmarks/speed/combinators.py --out benchmarks/results/throughput/combinators.json

One iteration of MAPPO or IPPO on simple_tag: `teams` of the same algorithm twice beside one learner with a network
for each group; `self_play` with a pool of 16 beside none; curiosity and normalisation beside none. Compilation comes
before.
"""

import statistics
import time
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

import in_turn
import jmarl
from jmarl import combinators

PPO = jmarl.PPOConfig(sharing="per_group", hidden_sizes=(64, 64))
WAYS: dict[str, tuple[str, Any, Any]] = {
    "ippo": ("", jmarl.ippo, PPO),
    "mappo": ("", jmarl.mappo, PPO),
    "teams of mappo": (
        "mappo",
        combinators.teams({"adversary": jmarl.mappo, "agent": jmarl.mappo}),
        {"adversary": PPO, "agent": PPO},
    ),
    "self_play": ("ippo", combinators.self_play(jmarl.ippo), combinators.SelfPlayConfig(inner=PPO, pool_size=16)),
    "icm": ("ippo", combinators.icm(jmarl.ippo), combinators.ICMConfig(inner=PPO)),
    "rnd": ("ippo", combinators.rnd(jmarl.ippo), combinators.RNDConfig(inner=PPO)),
    "normalized": ("ippo", combinators.normalized(jmarl.ippo), combinators.NormalizedConfig(inner=PPO)),
}


def main() -> None:
    """Prints and writes milliseconds per iteration and their ratio to those of the algorithm within."""
    options = in_turn.parser(__doc__, (), 1.0).parse_args()
    env = jmarl.make("MPE_simple_tag_v3")
    runs, steps = {}, {}
    for name, (_, algorithm, cfg) in WAYS.items():
        loop = jmarl.on_policy(env, algorithm, num_envs=64, rollout_length=52)
        cfg = jmarl.training.with_horizon(loop, cfg, 1000)
        steps[name] = jax.jit(lambda run, loop=loop, cfg=cfg: loop.step(run, cfg)[0], donate_argnums=0)
        runs[name] = jax.jit(loop.init)(jax.random.key(0), cfg)
        runs[name] = jax.block_until_ready(steps[name](runs[name]))
    taken: dict[str, list[float]] = {name: [] for name in WAYS}
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
            "beside": within,
            "ratio": round(statistics.median(x / y for x, y in zip(taken[name], taken[within], strict=True)), 3),
        }
        for name, (within, _, _) in WAYS.items()
        if within
    ]
    table = Table("combinator", "beside", "ratio of time", "milliseconds")
    for row in rows:
        table.add_row(row["way"], row["beside"], f"{row['ratio']:.2f}", str(row["milliseconds"]))
    Console().print(table)
    in_turn.write(rows, options.out)


if __name__ == "__main__":
    main()
