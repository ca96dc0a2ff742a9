"""How does an iteration grow with the number of agents, where critics read what all of them see?

    python benchmarks/speed/many_agents.py --out benchmarks/results/throughput/many_agents.json

MPE's simple_spread with as many landmarks as agents, whose views grow with them, beside itself with 3 agents, in turn:
16 environments x 64 steps, and with replay 16 x 26 steps, 8 batches of 64 and 5,000 transitions. One seed.
"""

import in_turn
import jmarl

AGENTS = 3, 24, 48
LAYERS = {"hidden_sizes": (64, 64)}
OFF_POLICY = {
    "maddpg": (jmarl.maddpg, jmarl.DDPGConfig(**LAYERS)),
    "matd3": (jmarl.matd3, jmarl.TD3Config(**LAYERS)),
    "masac": (jmarl.masac, jmarl.SACConfig(**LAYERS)),
    "qmix": (jmarl.qmix, jmarl.QMIXConfig(**LAYERS)),
}
ON_POLICY = {
    "ippo": (jmarl.ippo, jmarl.PPOConfig(**LAYERS)),
    "mappo": (jmarl.mappo, jmarl.PPOConfig(**LAYERS)),
    "mappo, state_id": (jmarl.mappo, jmarl.PPOConfig(**LAYERS, critic_view="state_id")),
}


def loop_of(name: str, num_agents: int):
    """The loop of a name above, and its config."""
    kind = "Discrete" if name in ("qmix", *ON_POLICY) else "Continuous"
    size = {"num_agents": num_agents, "num_landmarks": num_agents}
    env = jmarl.make("MPE_simple_spread_v3", action_type=kind, **size)
    if name in ON_POLICY:
        algorithm, cfg = ON_POLICY[name]
        loop = jmarl.on_policy(env, algorithm, num_envs=16, rollout_length=64)
    else:
        algorithm, cfg = OFF_POLICY[name]
        buffer = jmarl.buffers.uniform(capacity=5000, batch_size=64)
        loop = jmarl.off_policy(env, algorithm, buffer=buffer, num_envs=16, rollout_length=26, num_updates=8)
    return loop, jmarl.training.with_horizon(loop, cfg, 1000)


def main() -> None:
    """Prints and writes milliseconds of an iteration, and how many times those with 3 agents they are."""
    arguments = in_turn.parser(__doc__, (), 2.0).parse_args()
    rows = []
    for name in (*ON_POLICY, *OFF_POLICY):
        names = {num: f"{name}, {num} agents" for num in AGENTS}
        loops = {names[num]: loop_of(name, num) for num in AGENTS}
        rows += in_turn.iterations_beside(loops, {names[num]: names[3] for num in AGENTS[1:]}, arguments)
    in_turn.write(rows, arguments.out)


if __name__ == "__main__":
    main()
