"""jmarl: multi-agent reinforcement learning as pure JAX functions."""

from jmarl import (
    batching,
    buffers,
    checkpoint,
    combinators,
    configs,
    envs,
    evaluation,
    exploration,
    export,
    keys,
    learners,
    logging,
    losses,
    masks,
    metrics,
    networks,
    normalize,
    optim,
    parallel,
    presets,
    running,
    sum_tree,
    tournament,
    training,
    types,
)
from jmarl.envs import make
from jmarl.evaluation import evaluate
from jmarl.learners import *  # noqa: F403  # its __all__: every algorithm, config, loss and target
from jmarl.learners import __all__ as _learners
from jmarl.parallel import use_cores
from jmarl.running import Checkpointing, Evaluation, run
from jmarl.training import data_parallel, make_train, off_policy, on_policy, rollout, sweep

__version__ = "0.1.0"

__all__ = [
    "Checkpointing",
    "Evaluation",
    "batching",
    "buffers",
    "checkpoint",
    "combinators",
    "configs",
    "data_parallel",
    "envs",
    "evaluate",
    "evaluation",
    "exploration",
    "export",
    "keys",
    "learners",
    "logging",
    "losses",
    "make",
    "make_train",
    "masks",
    "metrics",
    "networks",
    "normalize",
    "off_policy",
    "on_policy",
    "optim",
    "parallel",
    "presets",
    "rollout",
    "run",
    "running",
    "sum_tree",
    "sweep",
    "tournament",
    "training",
    "types",
    "use_cores",
]
__all__ = sorted([*__all__, *_learners])
