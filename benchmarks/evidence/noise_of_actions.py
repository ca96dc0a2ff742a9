"""What a run on a robot earns, and how long it stands, with less or more of the noise that it was trained with.

    jmarl train ippo --env hopper_3x1 --seeds 4 --num-envs 32 --total-steps 2e6 --run-dir runs/hopper
    python benchmarks/evidence/noise_of_actions.py runs/hopper benchmarks/results/noise_of_actions

Every seed plays `EPISODES` episodes with a share of its actions' deviation: 0 is greedy, 1 as in training.
"""

import argparse
import json
from pathlib import Path

import jax
import numpy as np
from matplotlib.figure import Figure

from jmarl.cli.errors import usage_errors
from jmarl.cli.evaluate import as_in_training, evaluate
from jmarl.cli.run_folders import load_run, read_config
from jmarl.types import Learner

EPISODES = 64
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25)


def noisy(learner: Learner, share: float) -> Learner:
    """A player whose actions lie so much of the way from the greedy ones to those of training, or beyond."""
    exploring = as_in_training(learner, jax.random.key(1))

    def greedy(state, carry, obs, first):
        mean, _ = learner.greedy(state, carry[0], obs, first)
        sample, carry = exploring.greedy(state, carry, obs, first)
        return mean + share * (sample - mean), carry

    return exploring._replace(greedy=greedy)


def main(argv: list[str] | None = None) -> None:
    """Plays the episodes of a run; writes noise.json and noise.png."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of a run with Gaussian actions")
    parser.add_argument("out", type=Path, help="a folder to write")
    arguments = parser.parse_args(argv)
    with usage_errors():
        env, learner, states = load_run(arguments.folder)
    found = {}
    for share in SHARES:
        metrics = evaluate(env, noisy(learner, share), states, jax.random.key(0), num_episodes=EPISODES)
        found[str(share)] = {
            name: np.asarray(metrics[f"eval/{name}"], float).round(1).tolist()
            for name in ("return_mean", "episode_length")
        }
        print(f"{share}: {json.dumps(found[str(share)])}", flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    facts = read_config(arguments.folder)
    result = {
        "command": facts["command"],
        "env_steps": np.asarray(states.env_steps).tolist(),
        "episodes_per_seed": EPISODES,
        "device": facts["system"],
        "shares": found,
    }
    (arguments.out / "noise.json").write_text(json.dumps(result, indent=1) + "\n")
    figure = Figure(figsize=(7.0, 3.0), layout="constrained")
    all_axes = figure.subplots(1, 2)
    for axes, name, label in zip(all_axes, ("return_mean", "episode_length"), ("return", "steps"), strict=True):
        values = np.array([found[str(share)][name] for share in SHARES])
        axes.plot(SHARES, values, color="tab:gray", linewidth=0.8)
        axes.plot(SHARES, values.mean(axis=1), color="tab:blue", label="mean of the seeds")
        axes.set_xlabel("share of the deviation")
        axes.set_ylabel(f"{label} of an episode")
    all_axes[0].legend(frameon=False)
    figure.savefig(arguments.out / "noise.png", dpi=150)


if __name__ == "__main__":
    main()
