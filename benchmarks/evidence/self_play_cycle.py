"""Does a pool of old selves help in a game with a cycle? Rock-paper-scissors with unequal stakes, with and without.

    python benchmarks/evidence/self_play_cycle.py --out benchmarks/results/self_play_cycle

PPO plays itself: as it is ("naive"), or an old self in half or all of its episodes. A strategy's exploitability is what
its best opponent wins on average; 0 is the equilibrium. It is that of the average over all strategies that were played
so far, which is what fictitious self-play converges to, and, for comparison, that of the present one. Leaves
`self_play_cycle.json` and `self_play_cycle.png`.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jmarl
from jmarl import combinators
from jmarl.cli import drawing
from jmarl.learners import ppo

STAKES = np.array([[0.0, -1.0, 2.0], [1.0, 0.0, -1.0], [-2.0, 1.0, 0.0]])  # of rock, paper, scissors
PPO = jmarl.PPOConfig(hidden_sizes=(16,), learning_rate=0.01, num_epochs=2, num_minibatches=1, ent_coef=0.1,
                      normalize_advantage="none")  # fmt: skip
POOL = {"pool_size": 64, "add_every": 5, "inner": PPO}
SETTINGS = {
    "naive": combinators.SelfPlayConfig(latest_share=1.0, **POOL),
    "half of episodes against the pool": combinators.SelfPlayConfig(latest_share=0.5, **POOL),
    "all episodes against the pool": combinators.SelfPlayConfig(latest_share=0.0, **POOL),
}


def strategies(cfg: combinators.SelfPlayConfig, key: jax.Array, num_iterations: int) -> jax.Array:
    """The probabilities of the three actions after each iteration, `[num_iterations, 3]`."""
    env = jmarl.envs.zero_sum_game(STAKES)
    loop = jmarl.on_policy(env, combinators.self_play(jmarl.ippo), num_envs=128, rollout_length=4)
    policy = ppo.default_policy(env.spec, PPO)

    def step(run, _):
        run, _ = loop.step(run, cfg)
        obs, first = jax.tree.map(lambda x: x[None, :1], (run.obs, run.first))
        params = combinators.part(run.train_state, "inner").params

        def log_prob(action):
            return policy.evaluate(params, policy.init_carry((1,)), obs, first, jnp.full((1, 1, 2), action))[0][0, 0, 0]

        return run, jnp.exp(jnp.stack([log_prob(action) for action in range(3)]))

    return jax.lax.scan(step, loop.init(key, cfg), length=num_iterations)[1]


def exploitability(strategy: np.ndarray) -> np.ndarray:
    """max_a Σ_b payoff[a, b] p_b of strategies `[.., 3]`.

    >>> float(exploitability(np.array([1.0, 0.0, 0.0])))
    1.0
    """
    return np.max(strategy @ STAKES.T, axis=-1)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Trains, prints a line for each setting, and leaves numbers and curves."""
    parser = argparse.ArgumentParser(description="Self-play with and without a pool.", allow_abbrev=False)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=1500)
    parser.add_argument("--out", type=Path, help="a folder for self_play_cycle.json and self_play_cycle.png")
    options = parser.parse_args(argv)
    keys, results, curves = jax.random.split(jax.random.key(0), options.seeds), {}, {}
    for name, cfg in SETTINGS.items():
        train = jax.jit(jax.vmap(lambda key, cfg=cfg: strategies(cfg, key, options.iterations)))
        played = np.asarray(train(keys), float)
        average = np.cumsum(played, axis=1) / np.arange(1, options.iterations + 1)[:, None]
        curves[name] = exploitability(average)
        now = exploitability(played)[:, -options.iterations // 10 :].mean(1)
        results[name] = {"average": np.round(curves[name][:, -1], 4).tolist(), "present": np.round(now, 4).tolist()}
        print(f"{name}: exploitability {curves[name][:, -1].mean():.3f} of the average strategy, "
              f"{now.mean():.3f} of the present one", flush=True)  # fmt: skip
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        facts = {"stakes": STAKES.tolist(), "iterations": options.iterations, "seeds": options.seeds}
        facts |= {"device": jax.devices()[0].device_kind, "exploitability": results}
        (options.out / "self_play_cycle.json").write_text(json.dumps(facts, indent=1) + "\n")
        _draw(curves, options.out / "self_play_cycle.png")
    return results


def _draw(curves: dict[str, np.ndarray], path: Path) -> None:
    figure, axes = drawing.new_figure(5.6, 3.6)
    for (name, curve), colour in zip(curves.items(), ("tab:gray", "tab:orange", "tab:blue"), strict=True):
        axes.plot(curve.T, color=colour, alpha=0.2, linewidth=0.8)
        axes.plot(curve.mean(0), color=colour, label=name)
    axes.set_xlabel("iterations of 512 episodes")
    axes.set_ylabel("exploitability of the average strategy")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small", frameon=False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
