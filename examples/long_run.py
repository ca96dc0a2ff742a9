"""A run with files, evaluation and checkpoints, which goes on after it was stopped: python examples/long_run.py

Stop it with Ctrl-C and start it once more.
"""

import sys
from pathlib import Path

import jax

import jmarl


def main(folder="runs/long_run", num_iterations=200, num_seeds=2, num_envs=64):
    """Trains MASAC from replay, and returns the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    env = jmarl.make("MPE_simple_spread_v3", action_type="Continuous")
    loop = jmarl.off_policy(
        env,
        jmarl.masac,
        buffer=jmarl.buffers.uniform(20_000, 128),
        num_envs=num_envs,
        rollout_length=8,
        num_updates=8,
        warmup_steps=1024,
    )
    is_new = not (folder / "checkpoints").exists()
    jmarl.run(
        loop,
        jax.random.key(0),
        jmarl.SACConfig(learning_rate=1e-3, gamma=0.9),
        num_iterations=num_iterations,
        num_seeds=num_seeds,
        iterations_per_chunk=10,
        sinks=[jmarl.logging.terminal(), jmarl.logging.csv_file(folder / "metrics.csv")],
        evaluation=jmarl.Evaluation(num_episodes=32, every=5),
        checkpoint=jmarl.Checkpointing(folder / "checkpoints", every_s=20, resume=not is_new),
    )
    return folder


if __name__ == "__main__":
    main(*sys.argv[1:])
