"""Reads the run folders of benchmarks/train.py: what was trained, where, and what it learnt."""

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jmarl
import presets
from command_line import ALGORITHMS, UsageError
from jmarl.types import Env, Learner, TrainState


def read_config(folder: Path) -> dict[str, Any]:
    """A run's config.json."""
    try:
        return json.loads((folder / "config.json").read_text())
    except OSError:
        raise UsageError(f"{folder} is no run folder of train.py: it has no config.json that can be read.") from None
    except json.JSONDecodeError as error:
        raise UsageError(f"{folder}/config.json is damaged: {error}.") from error


def load_run(folder: Path, *, best: bool = False) -> tuple[Env, Learner, TrainState]:
    """The environment of evaluation, the learner and what it learnt, seeds first.

    That is the last checkpoint. A run without checkpoints has parameters only: its optimiser and statistics are fresh,
    so the state is for playing.

    Args:
      folder: of a run.
      best: each seed as it was when it scored best in an evaluation, rather than as it is at the end.
    """
    facts = read_config(folder)
    try:
        default = presets.for_environment(facts["algorithm"], facts["env"]).config
        settings = {name: as_tuple(value) for name, value in facts["config"].items()}
        env = jmarl.make(facts["env"], **{k: v for k, v in facts["env_kwargs"].items() if k != "shaped_reward"})
        learner = ALGORITHMS[facts["algorithm"]](env.spec, default.replace(**settings))
        num_seeds = facts["seeds"]
    except (ImportError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{folder}/config.json does not fit this version of jmarl: {error}.") from error

    init = jax.jit(jax.vmap(learner.init))
    keys = jax.random.split(jax.random.key(0), num_seeds)
    checkpoints = folder / "checkpoints"
    try:
        if checkpoints.is_dir() and jmarl.checkpoint.steps(checkpoints):
            if best and "best" not in jmarl.checkpoint.describe(checkpoints)["info"]["parts"]:
                raise UsageError(f"{folder} has no best learner: it was never evaluated.")
            part = "best.train_state" if best else "run.train_state"
            return env, learner, jmarl.checkpoint.restore(checkpoints, jax.eval_shape(init, keys), part=part)
        if best:
            raise UsageError(f"{folder} has no best learner: checkpoints hold it, and there are none.")
        state = init(keys)
        params = jmarl.export.load_parameters(folder / "params.safetensors", state.params)
    except FileNotFoundError:
        raise UsageError(f"{folder} holds nothing learnt: neither checkpoints nor params.safetensors.") from None
    except (ImportError, OSError, ValueError) as error:
        raise UsageError(f"{folder}: {error}") from error
    return (
        env,
        learner,
        state.replace(params=params, env_steps=jnp.full_like(state.env_steps, _env_steps(folder, facts))),
    )


def _env_steps(folder: Path, facts: dict[str, Any]) -> int:
    """How long a run has trained, its warm-up included, on which exploration depends; 0 where it does not say."""
    try:
        env_steps = json.loads((folder / "metrics.json").read_text())["env_steps"][-1]
        per_round = facts["num_envs"] * facts["rollout_length"]
    except (OSError, ValueError, KeyError, IndexError):
        return 0
    return env_steps + math.ceil(facts.get("warmup_steps", 0) / per_round) * per_round


def as_tuple(value: Any) -> Any:
    """Lists of a JSON file are tuples in a config."""
    return tuple(map(as_tuple, value)) if isinstance(value, list) else value
