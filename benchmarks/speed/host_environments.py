"""Environments in Python and C++: steps per second through compiled rollouts, and of a loop in Python around `act`.

    python benchmarks/speed/host_environments.py --out host_environments.json

The policy is IPPO's, two layers of 64. `callback` is `jmarl.rollout`, whose compiled program calls back once a step;
`loop` is a loop in Python that calls a compiled `act` and steps the same environments directly, as a user would write
it, with neither true last views nor trajectories to learn from; `environment` is its environment alone, with one action
again and again. All are timed in turn, in several rounds, and medians are told. CartPole is EnvPool's, simple_spread is
MPE2's with three agents through PettingZoo, whose steps count as one for all agents.

`processes` and `ray` are `callback` with the environments shared out to two workers: processes of this machine, or
actors of Ray in the cluster that it belongs to, where Ray is installed. `--only` measures cases whose names hold
a word.
"""

import argparse
import importlib.util
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jmarl
from jmarl.types import Observation

LENGTH = 64  # steps of a rollout
WORKERS = 2
CASES = [("envpool:CartPole-v1", 8), ("envpool:CartPole-v1", 64), ("pettingzoo:mpe2.simple_spread_v3", 8)]


def of_callbacks(name: str, num_envs: int, **options: Any) -> Callable[[], Any]:
    """One compiled rollout after the other."""
    env = jmarl.make(name, **options)
    learner = jmarl.ippo(env.spec, jmarl.PPOConfig())
    run = jax.jit(lambda key: jmarl.training.start(env, learner, key, num_envs=num_envs))(jax.random.key(0))
    roll = jax.jit(lambda run: jmarl.rollout(env, learner, run, length=LENGTH)[:2])

    def play() -> None:
        nonlocal run
        run, batch = roll(run)
        jax.block_until_ready(batch)

    return play


def of_loop(name: str, num_envs: int, *, acts: bool) -> Callable[[], Any]:
    """Steps in Python, with the actions of a compiled `act` or with the first ones again and again."""
    spec = jmarl.make(name).spec
    learner = jmarl.ippo(spec, jmarl.PPOConfig())
    state, key = learner.init(jax.random.key(0)), jax.random.key(1)
    first = jnp.zeros(num_envs, bool)
    carry = learner.init_carry((num_envs,))
    mask = jnp.ones((num_envs, spec.num_agents, spec.num_actions or 1), bool)
    alive = jnp.ones((num_envs, spec.num_agents), bool)

    @jax.jit
    def act(views: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        key, key_act = jax.random.split(key)
        flat = views.reshape(num_envs, -1)
        obs = Observation(agents=views, state=flat, action_mask=mask, agent_mask=alive)
        return learner.act(state, carry, obs, first, key_act)[0], key

    step = _pool(name, num_envs) if name.startswith("envpool:") else _particles(name, num_envs)
    views = step(None)
    action = np.asarray(act(jnp.asarray(views), key)[0])

    def play() -> None:
        nonlocal views, action, key
        for _ in range(LENGTH):
            if acts:
                chosen, key = act(jnp.asarray(views), key)
                action = np.asarray(chosen)
            views = step(action)

    return play


def _pool(name: str, num_envs: int) -> Callable[[Any], np.ndarray]:
    import envpool

    pool = envpool.make_gymnasium(name.partition(":")[2], num_envs=num_envs, seed=0)
    return lambda action: (pool.reset()[0] if action is None else pool.step(action[:, 0])[0])[:, None]


def _particles(name: str, num_envs: int) -> Callable[[Any], np.ndarray]:
    import importlib

    module = importlib.import_module(name.partition(":")[2])
    games = [module.parallel_env() for _ in range(num_envs)]

    def step(action: Any) -> np.ndarray:
        rows = []
        for i, game in enumerate(games):
            if action is None or not game.agents:
                views, _ = game.reset(seed=i)
            else:
                chosen = dict(zip(game.possible_agents, action[i].tolist(), strict=True))
                views, *_ = game.step(chosen)
            rows.append([views[agent] for agent in game.possible_agents])
        return np.array(rows, np.float32)

    return step


def measure(name: str, num_envs: int, rounds: int, seconds: float) -> dict[str, Any]:
    """Medians of steps per second, and those of all rounds."""
    ways = {
        "callback": of_callbacks(name, num_envs),
        "loop": of_loop(name, num_envs, acts=True),
        "environment": of_loop(name, num_envs, acts=False),
    }
    if not name.startswith("envpool:"):
        places = ["processes"] + ["ray"] * (importlib.util.find_spec("ray") is not None)
        ways |= {place: of_callbacks(name, num_envs, workers=WORKERS, on=place) for place in places}
    for play in ways.values():
        play()
    told: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, play in ways.items():
            count, start = 0, time.perf_counter()
            while time.perf_counter() - start < seconds:
                play()
                count += 1
            told[way].append(count * LENGTH * num_envs / (time.perf_counter() - start))
    return {"env": name, "num_envs": num_envs, **{way: statistics.median(x) for way, x in told.items()}, "rounds": told}


def main() -> None:
    """Measures all cases, prints them and writes a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for name, num_envs in [case for case in CASES if options.only in case[0]]:
        rows.append(row := measure(name, num_envs, options.rounds, options.seconds))
        numbers = ", ".join(f"{way} {row[way]:,.0f}" for way in row["rounds"])
        print(f"{name}, {num_envs} environments, steps/s: {numbers}", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps({"system": jmarl.logging.system_facts(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
