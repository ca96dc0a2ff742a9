"""A run of SMAX's 3m in battles of other sizes, without learning there, beside random play.

    jmarl train vdn --env HeuristicEnemySMAX --env-kwargs map_name=3m agent_ids=False --torso entities \\
        --hidden-sizes 64 --head-sizes 64 --entity-size 32 --entity-heads 2 --seeds 4 --total-steps 240000 \\
        --run-dir runs/vdn-3m
    python benchmarks/evidence/transfer_3m_5m.py runs/vdn-3m benchmarks/results/transfer_3m_5m

Every seed plays `EPISODES` battles of each size greedily; parameters are those at the end. The run needs
`torso="entities"` and views without ids, or nothing would fit.
"""

import argparse
import json
import time
from pathlib import Path

import jax
import numpy as np

import jmarl
from jmarl.cli.drawing import new_figure
from jmarl.cli.errors import usage_errors
from jmarl.cli.evaluate import evaluate
from jmarl.cli.run_folders import load_run, read_config

EPISODES = 200


# JaxMARL has no map "5m": without a map, units are marines, as in "3m".
BATTLES = {
    "3m": {"map_name": "3m"},
    "5m": {"map_name": None, "num_allies": 5, "num_enemies": 5},
    "8m": {"map_name": "8m"},
    "5m_vs_6m": {"map_name": "5m_vs_6m"},
}


def main(argv: list[str] | None = None) -> None:
    """Plays the battles of a run; writes transfer.json and transfer.png."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of a run on HeuristicEnemySMAX with torso=entities")
    parser.add_argument("out", type=Path, help="a folder to write")
    arguments = parser.parse_args(argv)
    folder, out = arguments.folder, arguments.out
    facts, shares = read_config(folder), {}
    for name, kwargs in BATTLES.items():
        start = time.time()
        with usage_errors():
            env, learner, states = load_run(folder, env_kwargs=kwargs)
        random = jmarl.random_policy(env.spec, jmarl.RandomConfig())
        chance = jax.vmap(random.init)(jax.random.split(jax.random.key(1), len(states.step)))
        share = {}
        for who, player, state in (("learnt on 3m", learner, states), ("random", random, chance)):
            metrics = evaluate(env, player, state, jax.random.key(0), num_episodes=EPISODES)
            share[who] = {
                "won": np.asarray(metrics["eval/won"], float).round(3).tolist(),
                "return_mean": np.asarray(metrics["eval/return_mean"], float).round(3).tolist(),
            }
        shares[name] = share
        print(f"{name}: {json.dumps(share)}, {time.time() - start:.0f} s", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    result = {
        "command": facts["command"],
        "algorithm": facts["algorithm"],
        "env_steps_on_3m": np.asarray(states.env_steps).tolist(),
        "episodes_per_seed": EPISODES,
        "device": facts["system"],
        "battles": shares,
    }
    (out / "transfer.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(shares, out / "transfer.png")


def draw(shares: dict, path: Path) -> None:
    """Bars of means, a dot for each seed."""
    figure, axes = new_figure(5.5, 3.2)
    for i, (who, colour) in enumerate({"learnt on 3m": "tab:blue", "random": "tab:gray"}.items()):
        for place, battle in enumerate(shares.values()):
            won, x = battle[who]["won"], place + 0.36 * (i - 0.5)
            axes.bar(x, np.mean(won), 0.34, color=colour, alpha=0.6, label=who if place == 0 else None)
            axes.plot([x] * len(won), won, "o", color=colour, markersize=4)
    axes.set_xticks(range(len(shares)), list(shares))
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of battles won")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
