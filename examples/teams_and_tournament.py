"""Hunters and prey that learn, hunters that only hunt random prey, and all of them in one tournament.

python examples/teams_and_tournament.py
"""

import jax
import numpy as np

import jmarl
from jmarl import combinators, tournament


def main(num_iterations=60, num_envs=32, num_episodes=64):
    """Returns what a hunter of the column earns from prey of the row."""
    env = jmarl.make("MPE_simple_tag_v3")
    cfg = jmarl.PPOConfig(learning_rate=1e-3, gamma=0.95)
    both = combinators.teams({"adversary": jmarl.mappo, "agent": jmarl.ippo})
    against_random = combinators.teams({"adversary": jmarl.mappo, "agent": jmarl.random_policy})
    players = []
    for name, algorithm, of_prey in (
        ("both learn", both, cfg),
        ("hunters only", against_random, jmarl.RandomConfig()),
    ):
        cfgs = {"adversary": cfg, "agent": of_prey}
        loop = jmarl.on_policy(env, algorithm, num_envs=num_envs, rollout_length=50)
        run, _ = jax.jit(jmarl.make_train(loop, num_iterations))(jax.random.key(0), cfgs)
        players.append(tournament.Player(name, algorithm(env.spec, cfgs), run.train_state))

    matches = tournament.play(env, players, jax.random.key(1), num_episodes=num_episodes)
    earned = tournament.returns(matches).value[1]  # side 1 are the hunters
    print("a hunter of the column earns from prey of the row:", *matches.players, sep="\n  ")
    print(np.round(earned, 1))
    return earned


if __name__ == "__main__":
    main()
