"""Algorithms: one file per family, each a function `(spec, cfg) -> Learner`."""

from jmarl.learners.ppo import PPOConfig, ippo, mappo, ppo_loss
from jmarl.learners.pqn import PQNConfig, pqn_loss, pqn_vdn
from jmarl.learners.q_learning import QConfig, iql, q_loss, qmix, vdn
from jmarl.learners.wqmix import WQMIXConfig, cw_qmix, ow_qmix, wqmix_loss

__all__ = [
    "PPOConfig",
    "PQNConfig",
    "QConfig",
    "WQMIXConfig",
    "cw_qmix",
    "ippo",
    "iql",
    "mappo",
    "ow_qmix",
    "ppo_loss",
    "pqn_loss",
    "pqn_vdn",
    "q_loss",
    "qmix",
    "vdn",
    "wqmix_loss",
]
