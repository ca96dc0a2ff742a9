"""A door that opens with a key, and a reward behind it: PPO alone, and with curiosity: python examples/curiosity.py"""

import jax
import numpy as np

import jmarl
from jmarl import combinators


def main(num_iterations=150, num_seeds=4, num_envs=16, size=7):
    """Returns, for each learner, the return of each seed, averaged over the last iterations."""
    env = jmarl.envs.key_door(size)
    ppo = jmarl.PPOConfig(learning_rate=1e-3, ent_coef=0.01)
    learners = {
        "ppo": (jmarl.ippo, ppo),
        "ppo with RND": (combinators.rnd(jmarl.ippo), combinators.RNDConfig(inner=ppo, bonus_start=0.5)),
    }
    keys, scores = jax.random.split(jax.random.key(0), num_seeds), {}
    for name, (algorithm, cfg) in learners.items():
        loop = jmarl.on_policy(env, algorithm, num_envs=num_envs, rollout_length=64)
        train = jax.jit(jax.vmap(jmarl.make_train(loop, num_iterations), (0, None)))
        _, metrics = train(keys, cfg)
        scores[name] = np.nanmean(metrics["train/return_sum"][:, -10:], axis=-1)
        print(f"{name}: return by seed {np.round(scores[name], 2)}")
    return scores


if __name__ == "__main__":
    main()
