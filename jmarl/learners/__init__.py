"""Algorithms: one file per family, each a function `(spec, cfg) -> Learner`."""

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
from jmarl.learners.wqmix import WQMIXConfig, WQMIXNets, cw_qmix, ow_qmix, wqmix_loss

__all__ = [
    "A2CConfig",
    "PPOConfig",
    "PPOTargets",
    "PQNConfig",
    "PQNNets",
    "QConfig",
    "QMIXConfig",
    "QNets",
    "VDNConfig",
    "WQMIXConfig",
    "WQMIXNets",
    "cw_qmix",
    "ia2c",
    "ippo",
    "iql",
    "maa2c",
    "mappo",
    "ow_qmix",
    "ppo_loss",
    "ppo_targets",
    "pqn_loss",
    "pqn_targets",
    "pqn_vdn",
    "q_loss",
    "qmix",
    "values_and_targets",
    "vdn",
    "wqmix_loss",
]
