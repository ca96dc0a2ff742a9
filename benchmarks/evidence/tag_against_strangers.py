"""Adversaries of simple_tag against opponents that were never in their training, beside random adversaries.

    python benchmarks/evidence/tag_against_strangers.py runs/maddpg-tag

The prey is random, or flees from the nearest adversary. Catches are the adversaries' return over 10, their reward for
each; every seed of the run plays `EPISODES` episodes. One JSON line per opponent.
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jmarl
from jmarl.cli.errors import usage_errors
from jmarl.cli.run_folders import load_run
from jmarl.evaluation import evaluate, teams

EPISODES = 200
REWARD = 10.0  # of each adversary, whoever makes the catch


def fleeing(obs: jmarl.types.Observation) -> jax.Array:
    """Away from the nearest adversary, and towards the middle near the border of the field; continuous actions.

    The prey, the last agent, sees its velocity and place, and two landmarks and the adversaries relative to itself.
    """
    view = obs.agents[:, -1]
    place, adversaries = view[:, 2:4], view[:, 8:14].reshape(-1, 3, 2)
    distance = jnp.linalg.norm(adversaries, axis=-1)
    weight = 1.0 / jnp.maximum(distance, 1e-2) ** 2
    away = -jnp.sum(adversaries * (weight / distance)[..., None], axis=1)
    inwards = -jnp.sign(place) * jnp.maximum(jnp.abs(place) - 0.8, 0.0)
    direction = away / jnp.linalg.norm(away, axis=-1, keepdims=True) + 10.0 * inwards
    direction = direction / jnp.maximum(jnp.linalg.norm(direction, axis=-1, keepdims=True), 1e-6)
    return jnp.broadcast_to(_pushed(direction)[:, None], (*obs.agent_mask.shape, 5))


def chasing_and_fleeing(obs: jmarl.types.Observation) -> jax.Array:
    """Adversaries head for the prey, which flees; continuous actions. For `jmarl tournament --scripted`.

    An adversary sees its velocity and place, and relative to itself two landmarks, the others and the prey, the last.
    """
    towards = obs.agents[:, :-1, 12:14]
    towards = towards / jnp.maximum(jnp.linalg.norm(towards, axis=-1, keepdims=True), 1e-6)
    return jnp.concatenate([_pushed(towards), fleeing(obs)[:, -1:]], axis=1)


def _pushed(direction: jax.Array) -> jax.Array:
    """The action that pushes so: nothing, left, right, down, up."""
    x, y = direction[..., :1], direction[..., 1:]
    return jnp.concatenate([0 * x, *(jnp.maximum(force, 0) for force in (-x, x, -y, y))], axis=-1)


def main(argv: list[str] | None = None) -> None:
    """Plays the matches of a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of a run on simple_tag with continuous actions")
    with usage_errors():
        env, learner, states = load_run(parser.parse_args(argv).folder)
    random = jmarl.random_policy(env.spec, jmarl.RandomConfig())
    prey = {"random": random, "fleeing": jmarl.scripted(fleeing)}
    adversaries, num_seeds = [[0, 1, 2], [3]], len(jax.tree.leaves(states)[0])

    for name, opponent in prey.items():

        def catches(state, hunter, key, opponent=opponent):
            match = teams([hunter, opponent], adversaries)
            key_opponent, key_play = jax.random.split(key)
            states = (state, opponent.init(key_opponent))
            metrics = evaluate(env, match, states, key_play, num_episodes=EPISODES)
            return metrics[f"eval/return/{env.spec.agents[0]}"] / REWARD

        keys = jax.random.split(jax.random.key(0), num_seeds)
        trained = jax.jit(jax.vmap(lambda s, k: catches(s, learner, k)))(states, keys)
        beside = jax.jit(jax.vmap(lambda k: catches(random.init(k), random, k)))(keys)
        result = {
            "prey": name,
            "catches_per_episode": np.round(trained, 2).tolist(),
            "of_random_adversaries": np.round(beside, 2).tolist(),
            "factor": round(float(np.mean(trained) / np.mean(beside)), 2),
        }
        print(json.dumps(result))


if __name__ == "__main__":
    main()
