"""What do combinators cost? Each beside the algorithm within, in turn, in one process.

    python benchmarks/speed/combinators.py --out benchmarks/results/throughput/combinators.json

One iteration of MAPPO or IPPO on simple_tag: `teams` of the same algorithm twice beside one learner with a network
for each group; `self_play` with a pool of 16 beside none; curiosity and normalisation beside none. Compilation comes
before.
"""

from typing import Any

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
    loops = {}
    for name, (_, algorithm, cfg) in WAYS.items():
        loop = jmarl.on_policy(env, algorithm, num_envs=64, rollout_length=52)
        loops[name] = loop, jmarl.training.with_horizon(loop, cfg, 1000)
    beside = {name: within for name, (within, _, _) in WAYS.items() if within}
    rows = in_turn.iterations_beside(loops, beside, options)
    in_turn.write(rows, options.out)


if __name__ == "__main__":
    main()
