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

__all__ = [
    "A2CConfig",
    "PPOConfig",
    "PPOTargets",
    "ia2c",
    "ippo",
    "maa2c",
    "mappo",
    "ppo_loss",
    "ppo_targets",
]
