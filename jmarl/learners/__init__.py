"""Algorithms: one file per family, each a function `(spec, cfg) -> Learner`."""

from jmarl.learners.ppo import PPOConfig, ippo, mappo, ppo_loss

__all__ = ["PPOConfig", "ippo", "mappo", "ppo_loss"]
