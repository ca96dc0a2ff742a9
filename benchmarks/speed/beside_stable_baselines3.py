"""PPO on CartPole: steps per second of jmarl and of Stable-Baselines3, in one process, in turn.

    pip install stable-baselines3 torch==2.13.0     # the CPU build
    python benchmarks/speed/beside_stable_baselines3.py --out beside_stable_baselines3.json

Equal settings: 8 environments, rollouts of 128 steps, 4 epochs of 4 minibatches, two layers of 64 units for each of
actor and critic, Adam. jmarl plays Gymnasium's environment one by one ("gymnasium:"), EnvPool's ("envpool:", where it
is installed) and gymnax's, which is compiled; Stable-Baselines3 plays Gymnasium's in its `DummyVecEnv`. A round is so
many iterations of each; the first, in which everything is compiled, is left out.
"""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import jmarl

NUM_ENVS, LENGTH, EPOCHS, MINIBATCHES = 8, 128, 4, 4


def of_jmarl(name: str, iterations: int) -> Callable[[], Any]:
    """So many iterations of IPPO, which is PPO where there is one agent."""
    cfg = jmarl.PPOConfig(hidden_sizes=(64, 64), num_epochs=EPOCHS, num_minibatches=MINIBATCHES)
    loop = jmarl.on_policy(jmarl.make(name), jmarl.ippo, num_envs=NUM_ENVS, rollout_length=LENGTH)
    run = jax.jit(loop.init)(jax.random.key(0), cfg)
    step = jax.jit(lambda run: loop.step(run, cfg)[0], donate_argnums=0)

    def learn() -> None:
        nonlocal run
        for _ in range(iterations):
            run = step(run)
        jax.block_until_ready(run.train_state.params)

    return learn


def of_stable_baselines3(iterations: int) -> Callable[[], Any]:
    """The same of its PPO."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    batch = NUM_ENVS * LENGTH // MINIBATCHES
    model = PPO(
        "MlpPolicy",
        make_vec_env("CartPole-v1", NUM_ENVS),
        n_steps=LENGTH,
        batch_size=batch,
        n_epochs=EPOCHS,
        device="cpu",
    )
    return lambda: model.learn(iterations * NUM_ENVS * LENGTH, reset_num_timesteps=False)


def main() -> None:
    """Measures all, prints them and writes a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    import torch

    ways: dict[str, Callable[[], Any]] = {"stable_baselines3": of_stable_baselines3(options.iterations)}
    for name in ("gymnasium:CartPole-v1", "envpool:CartPole-v1", "CartPole-v1"):
        try:
            ways[f"jmarl {name}"] = of_jmarl(name, options.iterations)
        except ImportError as error:
            print(error)
    for learn in ways.values():
        learn()
    told: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(options.rounds):
        for way, learn in ways.items():
            start = time.perf_counter()
            learn()
            told[way].append(options.iterations * NUM_ENVS * LENGTH / (time.perf_counter() - start))
    medians = {way: statistics.median(x) for way, x in told.items()}
    for way, speed in medians.items():
        print(f"{way}: {speed:,.0f} steps/s, {speed / medians['stable_baselines3']:.1f} times Stable-Baselines3")
    if options.out is not None:
        facts = {
            "system": jmarl.logging.system_facts(),
            "torch": torch.__version__,
            "torch_threads": torch.get_num_threads(),
        }
        options.out.write_text(json.dumps({**facts, "medians": medians, "rounds": told}, indent=1) + "\n")


if __name__ == "__main__":
    main()
