"""Learning rates and seeds in one compiled call, and their curves: python examples/sweep.py"""

import itertools

import jax
import numpy as np

import jmarl


def main(num_iterations=60, num_seeds=3, num_envs=32, rates=(3e-4, 1e-3, 3e-3), lambdas=(0.8, 0.95)):
    """Returns the settings, and the return of each, averaged over the last iterations and the seeds."""
    env = jmarl.make("MPE_simple_spread_v3")
    loop = jmarl.on_policy(env, jmarl.ippo, num_envs=num_envs, rollout_length=50)
    settings = list(itertools.product(rates, lambdas))
    rate, gae_lambda = (list(values) for values in zip(*settings, strict=True))
    cfgs, axes = jmarl.sweep(jmarl.PPOConfig(gamma=0.9), learning_rate=rate, gae_lambda=gae_lambda)

    train = jmarl.make_train(loop, num_iterations)
    over_seeds = jax.vmap(train, (0, None))
    over_settings = jax.jit(jax.vmap(over_seeds, (None, axes)))
    _, metrics = over_settings(jax.random.split(jax.random.key(0), num_seeds), cfgs)

    last = np.nanmean(metrics["train/return_sum"][..., -10:], axis=-1)  # [settings, seeds]
    for (rate, gae_lambda), scores in sorted(zip(settings, last, strict=True), key=lambda row: -row[1].mean()):
        print(f"learning_rate {rate:g}, gae_lambda {gae_lambda:g}: {scores.mean():.1f}, by seed {np.round(scores, 1)}")
    return settings, last


if __name__ == "__main__":
    main()
