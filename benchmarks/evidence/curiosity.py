"""Does curiosity find what chance does not? PPO alone, with ICM and with RND, where rewards are far away.

    python benchmarks/evidence/curiosity.py --out benchmarks/results/curiosity

Tasks: `key_door`, a grid on which a key opens a door in the other corner (best return 1), and gymnax's DeepSea-bsuite
with 16 rows, of which one way in 2^16 leads to the treasure, each right step of it at a cost (best return 0.99). All
seeds of a method train side by side, with normalised observations. A seed has solved its task if its last tenth of rows
has a mean return of at least 0.9. Leaves `curiosity.json` and `curiosity.png`.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jmarl
from jmarl import combinators
from jmarl.cli import drawing

PPO = jmarl.PPOConfig(hidden_sizes=(64,), learning_rate=1e-3, ent_coef=0.01)
TASKS: dict[str, dict[str, Any]] = {
    "key_door": {
        "env": lambda: jmarl.envs.key_door(8),
        "metric": "train/return_mean",
        "is_solved": lambda x: x >= 0.9,
        "rollout_length": 64,
        "steps": 300_000,
        "eta": 0.1,
    },
    "DeepSea-bsuite": {
        "env": lambda: jmarl.make("DeepSea-bsuite", size=16),
        "metric": "train/return_mean",
        "is_solved": lambda x: x >= 0.9,
        "rollout_length": 64,
        "steps": 300_000,
        "eta": 1.0,
    },
}


def methods(eta: float) -> dict[str, tuple[Any, Any]]:
    """Algorithms and configs by name, all of them behind the same normalisation."""
    curious = {"model_steps": 4, "inner": PPO}
    inner = {
        "PPO": (jmarl.ippo, PPO),
        "PPO and ICM": (combinators.icm(jmarl.ippo), combinators.ICMConfig(eta=eta, **curious)),
        "PPO and RND": (combinators.rnd(jmarl.ippo), combinators.RNDConfig(bonus_start=0.5, **curious)),
    }
    normalized = combinators.NormalizedConfig
    return {name: (combinators.normalized(a), normalized(inner=cfg)) for name, (a, cfg) in inner.items()}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Trains, prints a line for each method and task, and leaves numbers and curves."""
    parser = argparse.ArgumentParser(description="PPO with and without curiosity.", allow_abbrev=False)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--share", type=float, default=1.0, help="of the steps: less for a look")
    parser.add_argument("--out", type=Path, help="a folder for curiosity.json and curiosity.png")
    options = parser.parse_args(argv)
    keys, results = jax.random.split(jax.random.key(0), options.seeds), {}
    for task in options.tasks:
        about = TASKS[task]
        env = about["env"]()
        for name, (algorithm, cfg) in methods(about["eta"]).items():
            loop = jmarl.on_policy(env, algorithm, num_envs=16, rollout_length=about["rollout_length"])
            num_iterations = max(1, int(options.share * about["steps"]) // loop.env_steps_per_iteration)
            begin = time.perf_counter()
            _, metrics = jax.jit(jax.vmap(jmarl.make_train(loop, num_iterations), (0, None)))(keys, cfg)
            curve = np.asarray(metrics[about["metric"]])
            last = np.nanmean(curve[:, -max(1, num_iterations // 10) :], axis=1)
            solved = int(np.sum(about["is_solved"](last)))
            steps = num_iterations * loop.env_steps_per_iteration
            results.setdefault(task, {})[name] = {
                "metric": about["metric"],
                "solved": solved,
                "seeds": options.seeds,
                "steps": steps,
                "seconds": round(time.perf_counter() - begin, 1),
                "last": np.round(last, 3).tolist(),
                "curve": [[None if np.isnan(x) else round(float(x), 3) for x in row] for row in _thinned(curve)],
            }
            print(f"{task}: {name} solved {solved} of {options.seeds} seeds in {steps:,} steps each", flush=True)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        facts = {"device": jax.devices()[0].device_kind, "config": str(PPO), "results": results}
        (options.out / "curiosity.json").write_text(json.dumps(facts, indent=1) + "\n")
        _draw(results, options.out / "curiosity.png")
    return results


def _thinned(curve: np.ndarray, points: int = 60) -> np.ndarray:
    """Means of stretches, about as many as `points`: rows without a finished episode count for nothing."""
    stretches = np.array_split(curve, min(points, curve.shape[1]), axis=1)
    with np.errstate(all="ignore"):
        return np.stack([_nanmean(part) for part in stretches], axis=1)


def _nanmean(x: np.ndarray) -> np.ndarray:
    known = ~np.isnan(x)
    return np.where(known.any(1), np.where(known, x, 0).sum(1) / np.maximum(known.sum(1), 1), np.nan)


def _draw(results: dict[str, Any], path: Path) -> None:
    """A panel for each task, with a thin line for each seed."""
    figure = drawing.Figure(figsize=(5.2 * len(results), 3.4), layout="constrained")
    axes = figure.subplots(1, len(results), squeeze=False)[0]
    colours = dict(zip(methods(1.0), ("tab:gray", "tab:orange", "tab:blue"), strict=True))
    for panel, (task, by_method) in zip(axes, results.items(), strict=True):
        for name, result in by_method.items():
            curve = np.array(result["curve"], float)
            steps = np.linspace(0, result["steps"], curve.shape[1]) / 1e3
            panel.plot(steps, curve.T, color=colours[name], alpha=0.25, linewidth=0.8)
            label = f"{name}: {result['solved']} of {result['seeds']} solve it"
            panel.plot(steps, np.nanmean(curve, axis=0), color=colours[name], label=label)
        panel.set_title(task, fontsize="medium")
        panel.set_xlabel("thousand environment steps of each seed")
        panel.set_ylabel(next(iter(by_method.values()))["metric"].split("/")[1].replace("_", " "))
        panel.legend(fontsize="small", frameon=False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
