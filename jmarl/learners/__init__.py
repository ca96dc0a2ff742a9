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
from jmarl.learners.pqn import PQNConfig, PQNNets, pqn_loss, pqn_targets, pqn_vdn
from jmarl.learners.q_learning import QConfig, QMIXConfig, QNets, VDNConfig, iql, q_loss, qmix, values_and_targets, vdn
from jmarl.learners.qplex import QPLEXConfig, qplex
from jmarl.learners.sac import SACConfig, isac, masac, sac_actor_loss, sac_alpha_loss, sac_targets
from jmarl.learners.vdac import VDACConfig, VDACMixConfig, vdac_mix, vdac_sum
from jmarl.learners.wqmix import WQMIXConfig, WQMIXNets, cw_qmix, ow_qmix, wqmix_loss

__all__ = [
    "A2CConfig",
    "COMAConfig",
    "COMATargets",
    "DDPGConfig",
    "PPOConfig",
    "PPOTargets",
    "PQNConfig",
    "PQNNets",
    "QConfig",
    "QMIXConfig",
    "QNets",
    "QPLEXConfig",
    "RandomConfig",
    "SACConfig",
    "TD3Config",
    "VDACConfig",
    "VDACMixConfig",
    "VDNConfig",
    "WQMIXConfig",
    "WQMIXNets",
    "coma",
    "coma_loss",
    "coma_targets",
    "critic_loss",
    "cw_qmix",
    "ddpg_actor_loss",
    "ddpg_targets",
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
    "ppo_targets",
    "pqn_loss",
    "pqn_targets",
    "pqn_vdn",
    "q_loss",
    "qmix",
    "qplex",
    "random_policy",
    "sac_actor_loss",
    "sac_alpha_loss",
    "sac_targets",
    "scripted",
    "values_and_targets",
    "vdac_mix",
    "vdac_sum",
    "vdn",
    "wqmix_loss",
]
