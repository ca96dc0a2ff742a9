"""What replay takes for more and more agents: 5,000 transitions of MPE simple_spread, QMIX's. Nothing is allocated.

    python benchmarks/speed/replay_memory.py --out benchmarks/results/throughput/replay_memory.json

`step` is 5,000 times one view of each agent, its masks, action, reward, flags and what was measured; `kept` what
`jmarl.buffers.uniform` keeps; `twice` what it would be with two views and two states of each transition.
"""

import argparse
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

import in_turn
import jmarl

CAPACITY, AGENTS = 5_000, (3, 6, 12, 24, 48)


def measure(num_agents: int) -> dict[str, float]:
    """Megabytes, of so many agents."""
    env = jmarl.make("MPE_simple_spread_v3", num_agents=num_agents, num_landmarks=num_agents)
    learner = jmarl.qmix(env.spec, jmarl.QMIXConfig())
    start = lambda key: jmarl.training.start(env, learner, key, num_envs=8)  # noqa: E731
    roll = lambda run: jmarl.rollout(env, learner, run, length=26)[1]  # noqa: E731
    rollout = jax.eval_shape(roll, jax.eval_shape(start, jax.random.key(0)))
    steps = rollout.steps
    share = CAPACITY / (8 * 26) / 1e6
    twice = jmarl.buffers.memory(steps)
    once = jmarl.buffers.memory(steps.replace(next_obs=None, obs=steps.obs.replace(state=())))
    buffer = jmarl.buffers.uniform(CAPACITY, 32).for_env(env.spec)
    kept = jmarl.buffers.memory(jax.eval_shape(buffer.init, rollout)) / 1e6
    return {
        "agents": num_agents,
        "step": once * share,
        "kept": kept,
        "ratio": kept / (once * share),
        "twice": twice * share,
    }


def main() -> None:
    """Prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    out = parser.parse_args().out
    rows = [{name: round(x, 3) for name, x in measure(num).items()} for num in AGENTS]
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{x:,}" for x in row.values()))
    Console().print(table)
    in_turn.write(rows, out)


if __name__ == "__main__":
    main()
