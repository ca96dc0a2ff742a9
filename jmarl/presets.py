"""Hyperparameters that are known to work, one function per family of environments.

A preset is a starting point: the command line shows it as its defaults, and a script changes it with `_replace`:

    preset = presets.mpe("mappo")
    preset = preset._replace(num_seeds=16, config=preset.config.replace(learning_rate=1e-3))
"""

import dataclasses
from typing import Any, NamedTuple

from jmarl.learners import (
    A2CConfig,
    COMAConfig,
    DDPGConfig,
    FACMACConfig,
    HAA2CConfig,
    HAPPOConfig,
    HASACConfig,
    HATD3Config,
    HATRPOConfig,
    MATConfig,
    PPOConfig,
    PQNConfig,
    PQNIQLConfig,
    PQNQMIXConfig,
    QConfig,
    QMIXConfig,
    QPLEXConfig,
    QTRANConfig,
    RandomConfig,
    SableConfig,
    SACConfig,
    TD3Config,
    VDACConfig,
    VDACMixConfig,
    VDNConfig,
    WQMIXConfig,
)

# with replay
VALUE_BASED = ("iql", "vdn", "qmix", "cw_qmix", "ow_qmix", "qplex", "qtran")
DETERMINISTIC: dict[str, Any] = {
    "iddpg": DDPGConfig,
    "maddpg": DDPGConfig,
    "itd3": TD3Config,
    "matd3": TD3Config,
    "facmac": FACMACConfig,
    "hatd3": HATD3Config,
}
PQN: dict[str, Any] = {"pqn_iql": PQNIQLConfig, "pqn_vdn": PQNConfig, "pqn_qmix": PQNQMIXConfig}
SOFT: dict[str, Any] = {"isac": SACConfig, "masac": SACConfig, "hasac": HASACConfig}
IN_PYTHON = ("envpool:", "football:", "gymnasium:", "pettingzoo:")
# of Jumanji
WAREHOUSE = ("rware", "RobotWarehouse")
FORAGING = ("lbf", "LevelBasedForaging")
# advantage actor-critic: whose preset of PPO it begins with, and its config
ONE_STEP: dict[str, tuple[str, Any]] = {
    "ia2c": ("ippo", A2CConfig),
    "maa2c": ("mappo", A2CConfig),
    "vdac_sum": ("ippo", VDACConfig),
    "vdac_mix": ("ippo", VDACMixConfig),
}


class Replay(NamedTuple):
    """What the off-policy loop adds to an experiment.

    Attributes:
      buffer_size: sequences kept, per seed.
      batch_size: sequences in a batch.
      sequence_length: steps of a sequence; 1 for single transitions.
      num_updates: batches learnt from between two rollouts.
      warmup_steps: environment steps before the first of them.
      prioritized: sequences of large errors are drawn more often.
    """

    buffer_size: int = 100_000
    batch_size: int = 128
    sequence_length: int = 1
    num_updates: int = 1
    warmup_steps: int = 10_000
    prioritized: bool = False


class Preset(NamedTuple):
    """A whole experiment.

    Attributes:
      env, env_kwargs: what `jmarl.make` is given.
      config: hyperparameters.
      num_envs: environments side by side, per seed.
      rollout_length: steps in each of them between two updates.
      total_steps: environment steps of each seed.
      num_seeds: independent repetitions, trained side by side.
      eval_episodes: greedy episodes per seed and evaluation.
      absolute_episodes: of each seed's best parameters at the end; None: 10 x eval_episodes.
      num_resets: start states drawn for each environment and rollout; None: see `jmarl.rollout`.
      replay: of off-policy algorithms.
    """

    env: str
    config: Any
    env_kwargs: dict[str, Any] = {}  # noqa: RUF012  (never changed in place)
    num_envs: int = 64
    rollout_length: int = 128
    total_steps: int = 5_000_000
    num_seeds: int = 4
    eval_episodes: int = 64
    absolute_episodes: int | None = None
    num_resets: int | None = None
    replay: Replay | None = None


def task(env: str) -> dict[str, Any]:
    """What an environment is made with, whoever learns in it."""
    if "SMAX" in env:
        return {"map_name": "3m"}
    if env.startswith("overcooked"):
        return {"layout": "cramped_room", "flatten": True, "shaped_reward": 1.0}
    if env.startswith(WAREHOUSE):
        return {"agent_ids": True}
    if env.startswith(FORAGING):  # the return is the share of the food that is eaten
        return {"agent_ids": True, "reward": "team"}
    if env.startswith("football:"):
        return {"shaped_reward": 1.0}
    if env.startswith("pgx:"):  # boards as vectors: small convolutions are slow on CPUs
        return {"flatten": True}
    return {}


def mpe(algorithm: str, env: str = "MPE_simple_spread_v3") -> Preset:
    """Multi-particle environments. The reward depends on the present, so a short horizon learns fastest.

    Not from a paper: the published settings have gamma 0.99 and learn far more slowly on simple_spread.
    """
    roles = ("adversary", "crypto", "push", "speaker", "tag", "world_comm")
    config = PPOConfig(
        learning_rate=3e-3,
        learning_rate_schedule="linear",
        gamma=0.85,
        gae_lambda=0.9,
        ent_coef=0.003,
        num_epochs=8,
        num_minibatches=4,
        sharing="per_group" if any(role in env for role in roles) else "shared",
    )
    return Preset(env, config, num_envs=64, rollout_length=52)


def smax(algorithm: str, env: str = "HeuristicEnemySMAX") -> Preset:
    """Battles, by default three marines against three: JaxMARL's settings (Rutherford et al., 2024)."""
    config = PPOConfig(
        learning_rate=2e-3 if algorithm == "mappo" else 4e-3,
        learning_rate_schedule="linear",
        clip_eps=0.2 if algorithm == "mappo" else 0.05,
        ent_coef=0.0 if algorithm == "mappo" else 0.01,
        max_grad_norm=0.25,
        activation="relu",
        hidden_sizes=(128,),
        head_sizes=(128,),
        recurrent=True,
    )
    return Preset(env, config, task(env), num_envs=128, rollout_length=128, total_steps=3_000_000)


def overcooked(algorithm: str, env: str = "overcooked") -> Preset:
    """Two cooks, by default in a cramped room, views flattened, shaped reward in training."""
    config = PPOConfig(learning_rate=5e-4, learning_rate_schedule="linear", ent_coef=0.01)
    return Preset(env, config, task(env), num_envs=64, rollout_length=128, eval_episodes=16)


def hanabi(algorithm: str, env: str = "hanabi") -> Preset:
    """Two-player Hanabi: JaxMARL's settings. It goes on learning for 1e10 steps; these are a start."""
    config = PPOConfig(
        learning_rate=5e-4,
        learning_rate_schedule="linear" if algorithm == "mappo" else "constant",
        activation="relu",
        hidden_sizes=(512, 512),
    )
    return Preset(env, config, num_envs=1024, rollout_length=128, total_steps=100_000_000)


def gymnax(algorithm: str, env: str = "CartPole-v1") -> Preset:
    """Single-agent environments: PureJaxRL's settings, and those of RL Baselines3 Zoo for Pendulum and LunarLander."""
    config: Any = PPOConfig(learning_rate=2.5e-4, learning_rate_schedule="linear")
    if "MinAtar" in env:
        config = config.replace(learning_rate=5e-3, num_minibatches=8, activation="relu")
        return Preset(env, config, num_envs=64, rollout_length=128, total_steps=10_000_000)
    if env == "Pendulum-v1":
        config = config.replace(learning_rate=1e-3, gamma=0.9, ent_coef=0.0, num_epochs=10, num_minibatches=8)
        return Preset(env, config, num_envs=16, rollout_length=256, total_steps=500_000)
    if env.startswith("LunarLander-"):
        config = PPOConfig(learning_rate=3e-4, gamma=0.999, gae_lambda=0.98, ent_coef=0.01, num_minibatches=256)
        return Preset(env, config, num_envs=16, rollout_length=1024, total_steps=1_000_000)
    if env == "CartPole-v1":  # short rollouts: with 128 steps one seed in eight forgets what it knew
        config = config.replace(learning_rate=1e-3, gae_lambda=0.98, ent_coef=0.0)
        return Preset(env, config, num_envs=16, rollout_length=32, total_steps=500_000)
    return Preset(env, config, num_envs=16, rollout_length=128, total_steps=500_000)


def mabrax(algorithm: str, env: str = "ant_4x2") -> Preset:
    """Robots whose joints are agents: JaxMARL's settings."""
    config = PPOConfig(learning_rate=1e-3, learning_rate_schedule="linear", ent_coef=2e-6, vf_coef=4.5)
    return Preset(env, config, num_envs=64, rollout_length=300, total_steps=10_000_000)


def jumanji(algorithm: str, env: str = "rware tiny-4ag") -> Preset:
    """Robots in a warehouse and foragers: rewards are rare, so views hold ids and chance lasts. Not from a paper."""
    config = PPOConfig(
        learning_rate=5e-4, learning_rate_schedule="linear", ent_coef=0.01, hidden_sizes=(128, 128), activation="relu"
    )
    total_steps = 20_000_000 if env.startswith(WAREHOUSE) else 5_000_000
    return Preset(env, config, task(env), num_envs=64, rollout_length=128, total_steps=total_steps)


def in_python(algorithm: str, env: str) -> Preset:
    """Environments in Python are slow: the settings of their like in JAX, with fewer of everything that is played."""
    package, _, name = env.partition(":")
    like, kwargs = name, task(env)
    if package == "football":
        like = package
    for module, family in (("lbforaging:", FORAGING), ("rware:", WAREHOUSE)):
        if name.startswith(module):
            like, kwargs = family[0], {"agent_ids": True}
    if name.startswith("mpe2."):
        like = name.replace("mpe2.", "MPE_")
        kwargs = {"continuous_actions": True} if algorithm in (*DETERMINISTIC, *SOFT) else {}
    preset = for_environment(algorithm, like)
    return preset._replace(
        env=env,
        env_kwargs=kwargs,
        num_envs=min(preset.num_envs, 16),
        total_steps=min(preset.total_steps, 500_000),
        num_seeds=1,
        eval_episodes=16,
    )


def football(algorithm: str, env: str = "football:academy_3_vs_1_with_keeper") -> Preset:
    """Google Research Football with PPO: chance lasts, since a goal takes several players. Not from a paper."""
    config = PPOConfig(
        learning_rate=1e-3, gamma=0.99, ent_coef=0.005, num_epochs=10, hidden_sizes=(128, 128), activation="relu"
    )
    return Preset(env, config, task(env), num_envs=16, rollout_length=128)


def turns(env: str) -> Preset:
    """Games of Pgx with PPO: what a game pays comes at its end, undiscounted. Not from a paper."""
    config = PPOConfig(
        learning_rate=1e-3, learning_rate_schedule="linear", gamma=1.0, ent_coef=0.02, hidden_sizes=(128, 128)
    )
    return Preset(env, config, task(env), num_envs=128, rollout_length=32, total_steps=3_000_000)


def other(algorithm: str, env: str) -> Preset:
    """Where nothing is known: PPO's usual settings."""
    return Preset(env, PPOConfig(learning_rate_schedule="linear"))


def value_based(algorithm: str, env: str) -> Preset:
    """IQL, VDN, QMIX, weighted QMIX, QPLEX and QTRAN with feed-forward agents. Not from a paper: see each family.

    QTRAN has what its relatives have; nobody tuned it.
    """
    own_classes = {"iql": QConfig, "vdn": VDNConfig, "qmix": QMIXConfig, "qplex": QPLEXConfig, "qtran": QTRANConfig}
    config_class: Any = own_classes.get(algorithm, WQMIXConfig)
    if env.startswith("MPE_"):
        # A short horizon and an update for every 52 steps learn fastest; none of the published settings comes close.
        # At 3e-3 the values of QPLEX's mixer grow without end.
        config = config_class(
            learning_rate={"qmix": 2e-3, "qplex": 5e-4}.get(algorithm, 3e-3),
            learning_rate_schedule="linear",
            gamma=0.85,
            target_update_interval=1,
            tau=0.01,
            epsilon_steps=100_000,
        )
        if algorithm == "cw_qmix":
            # With the default of 0.1 most samples count for next to nothing, and it is as far behind QMIX.
            config = config.replace(suboptimal_weight=0.75)
        replay = Replay(num_updates=16, warmup_steps=5000)
        return Preset(env, config, num_envs=32, rollout_length=26, total_steps=2_000_000, replay=replay)
    if env == "predator_prey":
        config = config_class(
            learning_rate=1e-3,
            learning_rate_schedule="linear",
            target_update_interval=1,
            tau=0.01,
            epsilon_steps=100_000,
        )
        preset = Preset(env, config, {"agent_ids": True}, num_envs=16, rollout_length=32, total_steps=1_000_000)
        return preset._replace(num_resets=2, replay=Replay(buffer_size=50_000, num_updates=8, warmup_steps=5000))
    if "SMAX" in env:
        config = config_class(
            learning_rate=1e-3, learning_rate_schedule="linear", epsilon_steps=100_000, hidden_sizes=(128, 128)
        )
        if config_class is WQMIXConfig:  # Rashid et al. (2020), for SMAC
            config = config.replace(suboptimal_weight={"cw_qmix": 0.75, "ow_qmix": 0.5}[algorithm])
        # With one network for all, marines that do not know who they are win fewer battles.
        kwargs, replay = task(env) | {"agent_ids": True}, Replay(num_updates=8)
        return Preset(env, config, kwargs, num_envs=32, rollout_length=16, total_steps=2_000_000, replay=replay)
    # A rate that falls to 0, and copies of the target: without either CartPole is forgotten as often as it is learnt.
    config = config_class(
        learning_rate=5e-4,
        learning_rate_schedule="linear",
        target_update_interval=200,
        epsilon_steps=100_000,
        hidden_sizes=(120, 84),
    )
    replay = Replay(batch_size=128, num_updates=8, warmup_steps=1000)
    return Preset(env, config, task(env), num_envs=16, rollout_length=4, total_steps=500_000, replay=replay)


def quick(algorithm: str, env: str) -> Preset:
    """The shortest way to a policy on simple_spread: VDN with many small updates."""
    if (algorithm, env) != ("vdn", "MPE_simple_spread_v3"):
        raise ValueError(f"--preset quick is vdn on MPE_simple_spread_v3, not {algorithm} on {env}: leave it out.")
    preset = value_based(algorithm, env)
    return preset._replace(
        config=preset.config.replace(epsilon_steps=30_000),
        total_steps=210_000,
        num_seeds=1,
        absolute_episodes=0,
        replay=Replay(batch_size=64, num_updates=64, warmup_steps=5000),
    )


def pqn(algorithm: str, env: str) -> Preset:
    """PQN of IQL, VDN and QMIX: many environments side by side take the place of replay."""
    config: Any = PQN[algorithm](learning_rate=2e-3, learning_rate_schedule="linear", num_minibatches=8)
    if env.startswith("MPE_"):
        config = config.replace(gamma=0.85, lambda_=0.6, epsilon_end=0.05, epsilon_steps=100_000)
    return Preset(env, config, task(env), num_envs=64, rollout_length=26, total_steps=2_000_000)


def actor_critic(algorithm: str, env: str) -> Preset:
    """DDPG, TD3, SAC and their multi-agent forms, with continuous actions where the environment offers a choice.

    HATD3 and HASAC have the settings of MATD3 and MASAC with parameters of each agent's own; nobody tuned them.
    """
    roles = ("adversary", "crypto", "push", "speaker", "tag", "world_comm")
    is_soft = algorithm in SOFT
    config: Any = (SOFT if is_soft else DETERMINISTIC)[algorithm]()
    if env.startswith("MPE_"):
        # A short horizon learns fastest here, as it does for PPO and the value-based learners.
        config = config.replace(
            learning_rate=3e-3,
            learning_rate_schedule="linear",
            gamma=0.85,
            tau=0.01,
            random_steps=5000,
            hidden_sizes=(128, 128),
            sharing="per_group" if any(role in env for role in roles) else config.sharing,
        )
        if algorithm == "masac":
            # With discrete actions a critic of the state learns much faster where it reads them all in the same way.
            config = config.replace(own_action="input")
        if not is_soft:
            config = config.replace(noise_start=0.6, noise_end=0.2, noise_steps=500_000)
        replay = Replay(batch_size=256, num_updates=8, warmup_steps=5000)
        kwargs = {} if "facmac" in env else {"action_type": "Continuous"}  # its hunters have no others
        return Preset(env, config, kwargs, num_envs=32, rollout_length=26, total_steps=1_000_000, replay=replay)
    if "SMAX" in env:
        config = config.replace(learning_rate_schedule="linear", gamma=0.99, random_steps=5000, hidden_sizes=(128, 128))
        replay = Replay(num_updates=8)
        return Preset(env, config, task(env), num_envs=32, rollout_length=16, total_steps=1_000_000, replay=replay)
    # gymnax, MABrax, JaxNav: one update for each step, as the papers do, in rounds.
    config = config.replace(
        learning_rate=1e-3,
        gamma=0.98 if env == "Pendulum-v1" else 0.99,
        tau=0.005,
        random_steps=1000,
        max_grad_norm=None,
        hidden_sizes=(64, 64) if "-" in env else (256, 256),
    )
    replay = Replay(buffer_size=100_000, batch_size=128, num_updates=8, warmup_steps=1000)
    return Preset(env, config, task(env), num_envs=8, rollout_length=1, total_steps=60_000, replay=replay)


def counterfactual(env: str) -> Preset:
    """COMA: on-policy, several passes for the critic."""
    config: Any = COMAConfig(learning_rate=1e-3, learning_rate_schedule="linear", num_minibatches=4, num_epochs=4)
    if env.startswith("MPE_"):
        # With a value for each own action it hardly learns; with normalised advantages policies are soon of one mind.
        config = config.replace(
            own_action="input", critic_learning_rate=3e-3, gamma=0.85, team_reward="sum", ent_coef=0.05
        )
    return Preset(env, config, task(env), num_envs=64, rollout_length=26, total_steps=2_000_000)


def one_step(preset: Preset, config_class: Any = A2CConfig) -> Preset:
    """Advantage actor-critic: a preset of PPO with one step on each of its rollouts, which are shorter for that."""
    config = {name: getattr(preset.config, name) for name in PPOConfig.__dataclass_fields__}
    config |= {"num_epochs": 1, "num_minibatches": 1, "normalize_advantage": "none"}
    return preset._replace(config=config_class(**config), rollout_length=min(preset.rollout_length, 13))


def one_after_the_other(algorithm: str, preset: Preset) -> Preset:
    """HAPPO's family: a preset of MAPPO with parameters of their own, and what else they share.

    HAPPO with one minibatch, as its authors have it, is behind: on simple_speaker_listener -20.6 in place of -15.2. A
    trust region is of the whole rollout.
    """
    cls = {"happo": HAPPOConfig, "haa2c": HAA2CConfig, "hatrpo": HATRPOConfig}[algorithm]
    preset = one_step(preset) if algorithm == "haa2c" else preset
    whole = ("num_minibatches",) if algorithm == "hatrpo" else ()
    return _of_class(preset, cls, apart=("sharing", "critic_view", *whole))


def transformer(algorithm: str, preset: Preset) -> Preset:
    """MAT and Sable: a preset of MAPPO, as far as it is not of networks."""
    return _of_class(preset, {"mat": MATConfig, "sable": SableConfig}[algorithm], apart=("recurrent",))


def _of_class(preset: Preset, cls: Any, apart: tuple[str, ...] = ()) -> Preset:
    """With another class of config, which has the same values in the fields that both share, but those `apart`."""
    names = [{field.name for field in dataclasses.fields(x)} for x in (cls, PPOConfig)]
    shared = set.intersection(*names) - set(apart)
    return preset._replace(config=cls(**{name: getattr(preset.config, name) for name in shared}))


def for_environment(algorithm: str, env: str, name: str = "default") -> Preset:
    """The preset of the family that `env` belongs to. Environments are not checked here; `jmarl.make` does that."""
    if name not in ("default", "quick"):
        raise ValueError(f"--preset {name} is unknown: choose default or quick.")
    if name == "quick":
        return quick(algorithm, env)
    if env.startswith(IN_PYTHON):
        return in_python(algorithm, env)
    if algorithm in VALUE_BASED:
        return value_based(algorithm, env)
    if algorithm in PQN:
        return pqn(algorithm, env)
    if algorithm in DETERMINISTIC or algorithm in SOFT:
        return actor_critic(algorithm, env)
    if algorithm == "coma":
        return counterfactual(env)
    if algorithm in ONE_STEP:
        of_ppo, config_class = ONE_STEP[algorithm]
        return one_step(for_environment(of_ppo, env), config_class)
    if algorithm in ("happo", "haa2c", "hatrpo"):
        return one_after_the_other(algorithm, for_environment("mappo", env))
    if algorithm in ("mat", "sable"):
        return transformer(algorithm, for_environment("mappo", env))
    if algorithm == "random":
        return for_environment("ippo", env)._replace(config=RandomConfig(), total_steps=100_000)
    if env.startswith("MPE_"):
        return mpe(algorithm, env)
    if "SMAX" in env:
        return smax(algorithm, env)
    if env.startswith("overcooked"):
        return overcooked(algorithm, env)
    if env == "hanabi":
        return hanabi(algorithm, env)
    if env.startswith(("ant_", "halfcheetah_", "hopper_", "humanoid_", "walker2d_")):
        return mabrax(algorithm, env)
    if env.startswith((*WAREHOUSE, *FORAGING)):
        return jumanji(algorithm, env)
    if env == "football":
        return football(algorithm)
    if env.startswith("pgx:"):
        return turns(env)
    if "-" in env:  # every name of gymnax, and none of JaxMARL
        return gymnax(algorithm, env)
    return other(algorithm, env)
