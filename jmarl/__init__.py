"""jmarl: multi-agent reinforcement learning as pure JAX functions."""

from jmarl import batching, envs, evaluation, learners, logging, losses, networks, normalize, optim, training, types
from jmarl.envs import make
from jmarl.evaluation import evaluate
from jmarl.learners import PPOConfig, ippo, mappo, ppo_loss
from jmarl.training import Evaluation, make_train, on_policy, rollout, run, sweep

__version__ = "0.1.0"

__all__ = [
    "Evaluation",
    "PPOConfig",
    "batching",
    "envs",
    "evaluate",
    "evaluation",
    "ippo",
    "learners",
    "logging",
    "losses",
    "make",
    "make_train",
    "mappo",
    "networks",
    "normalize",
    "on_policy",
    "optim",
    "ppo_loss",
    "rollout",
    "run",
    "sweep",
    "training",
    "types",
]
