"""Algorithms: one file per family, each a function `(spec, cfg) -> Learner`."""

from jmarl.learners.baselines import RandomConfig, random_policy, scripted
from jmarl.learners.coma import COMAConfig, coma, coma_loss
from jmarl.learners.ddpg import DDPGConfig, TD3Config, ddpg_actor_loss, ddpg_critic_loss, iddpg, itd3, maddpg, matd3
from jmarl.learners.ppo import A2CConfig, PPOConfig, ia2c, ippo, maa2c, mappo, ppo_loss
from jmarl.learners.pqn import PQNConfig, pqn_loss, pqn_vdn
from jmarl.learners.q_learning import QConfig, iql, q_loss, qmix, vdn
from jmarl.learners.sac import SACConfig, isac, masac, sac_actor_loss, sac_alpha_loss, sac_critic_loss
from jmarl.learners.wqmix import WQMIXConfig, cw_qmix, ow_qmix, wqmix_loss

__all__ = [
    "A2CConfig",
    "COMAConfig",
    "DDPGConfig",
    "PPOConfig",
    "PQNConfig",
    "QConfig",
    "RandomConfig",
    "SACConfig",
    "TD3Config",
    "WQMIXConfig",
    "coma",
    "coma_loss",
    "cw_qmix",
    "ddpg_actor_loss",
    "ddpg_critic_loss",
    "ia2c",
    "iddpg",
    "ippo",
    "iql",
    "isac",
    "itd3",
    "maa2c",
    "maddpg",
    "mappo",
    "masac",
    "matd3",
    "ow_qmix",
    "ppo_loss",
    "pqn_loss",
    "pqn_vdn",
    "q_loss",
    "qmix",
    "random_policy",
    "sac_actor_loss",
    "sac_alpha_loss",
    "sac_critic_loss",
    "scripted",
    "vdn",
    "wqmix_loss",
]
