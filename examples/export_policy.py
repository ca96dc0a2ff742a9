"""Train, write the policy to a file, act with it as someone would who has no jmarl: python examples/export_policy.py

What `policy.jax` holds is read by `jmarl.export.load_policy`, or by plain jax, see `jmarl.export`.
"""

import tempfile

import jax
import numpy as np

import jmarl


def main(num_iterations=100, num_envs=32):
    """Returns the mean return of the policy in the file, and of the learner it was made of."""
    env = jmarl.make("MPE_simple_spread_v3")
    cfg = jmarl.PPOConfig(gamma=0.9, learning_rate=2e-3)
    loop = jmarl.on_policy(env, jmarl.mappo, num_envs=num_envs, rollout_length=50)
    run, _ = jax.jit(jmarl.make_train(loop, num_iterations))(jax.random.key(0), cfg)

    learner, path = jmarl.mappo(env.spec, cfg), f"{tempfile.mkdtemp()}/policy.jax"
    jmarl.export.export_policy(learner, run.train_state, env.spec, path)
    policy = jmarl.export.load_policy(path)

    def greedy(state, carry, obs, first):
        read = {"agents": obs.agents, "action_mask": obs.action_mask}
        return policy.greedy(carry, {name: read[name] for name in policy.reads}, first)

    from_file = learner._replace(init_carry=policy.init_carry, greedy=greedy)
    key = jax.random.key(1)
    scores = [
        float(jmarl.evaluate(env, who, run.train_state, key, num_episodes=64)["eval/return_sum"])
        for who in (from_file, learner)
    ]
    print(f"return of the file {scores[0]:.2f}, of the learner {scores[1]:.2f}; {path}")
    assert np.isclose(*scores)
    return scores


if __name__ == "__main__":
    main()
