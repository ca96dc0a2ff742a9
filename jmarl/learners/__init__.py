"""Algorithms: one file per family, each a function `(spec, cfg) -> Learner`."""

from jmarl.learners.baselines import RandomConfig, random_policy, scripted
from jmarl.learners.coma import COMAConfig, COMATargets, coma, coma_loss, coma_targets
from jmarl.learners.critics import critic_loss
from jmarl.learners.ddpg import (
    DDPGConfig,
    TD3Config,
    ddpg_actor_loss,
    ddpg_targets,
    iddpg,
    itd3,
    maddpg,
    matd3,
)
from jmarl.learners.ppo import (
    A2CConfig,
    PPOConfig,
    PPOTargets,
    ia2c,
    ippo,
    maa2c,
    mappo,
    ppo_loss,
    ppo_targets,
)
from jmarl.learners.sac import SACConfig, isac, masac, sac_actor_loss, sac_alpha_loss, sac_targets

__all__ = [
    "A2CConfig",
    "COMAConfig",
    "COMATargets",
    "DDPGConfig",
    "PPOConfig",
    "PPOTargets",
    "RandomConfig",
    "SACConfig",
    "TD3Config",
    "coma",
    "coma_loss",
    "coma_targets",
    "critic_loss",
    "ddpg_actor_loss",
    "ddpg_targets",
    "ia2c",
    "iddpg",
    "ippo",
    "isac",
    "itd3",
    "maa2c",
    "maddpg",
    "mappo",
    "masac",
    "matd3",
    "ppo_loss",
    "ppo_targets",
    "random_policy",
    "sac_actor_loss",
    "sac_alpha_loss",
    "sac_targets",
    "scripted",
]
