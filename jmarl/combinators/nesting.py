"""States within states: how a combinator keeps those of what it combines."""

import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jmarl import configs
from jmarl.types import Config, TrainState


def join(parts: Mapping[str, TrainState]) -> TrainState:
    """One state of several, by name. Each keeps its own count of optimiser steps; the joint one is the highest."""
    return TrainState(
        params={name: state.params for name, state in parts.items()},
        target_params={name: state.target_params for name, state in parts.items()},
        opt_state={name: {"opt_state": state.opt_state, "step": state.step} for name, state in parts.items()},
        step=functools.reduce(jnp.maximum, [state.step for state in parts.values()]),
        env_steps=next(iter(parts.values())).env_steps,
        moments={f"{name}/{of}": x for name, state in parts.items() for of, x in state.moments.items()},
    )


def part(state: TrainState, name: str) -> TrainState:
    """The state that was joined under this name, with today's count of environment steps.

    >>> two = join({"a": TrainState(params=1.0, step=jnp.int32(2)), "b": TrainState(params=3.0, step=jnp.int32(4))})
    >>> int(two.step), int(part(two, "a").step), part(two, "b").params
    (4, 2, 3.0)
    """
    return TrainState(
        params=state.params[name],
        target_params=state.target_params[name],
        opt_state=state.opt_state[name]["opt_state"],
        step=state.opt_state[name]["step"],
        env_steps=state.env_steps,
        moments={of.removeprefix(f"{name}/"): x for of, x in state.moments.items() if of.startswith(f"{name}/")},
    )


def of_innermost(cfg: Config, name: str) -> Any:
    """The field of the learner's config, below all configs of combinators."""
    while hasattr(cfg, "inner"):
        cfg = cfg.inner
    if not hasattr(cfg, name):
        kind = "a dict of teams" if isinstance(cfg, dict) else type(cfg).__name__
        raise ValueError(f"{name} is wanted of the inner config, and {kind} has none: combine within each team.")
    return configs.get(cfg, name)
