"""What an `Env` must keep to, checked without running it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmarl.types import Env, EnvSpec, Observation, Outcome


def check_env(env: Env) -> Env:
    """Raises one clear sentence at the first mistake in an environment; returns it if there is none.

    Only shapes and dtypes are traced, nothing runs: an environment that passes can still have wrong rewards.

    Example:
      >>> from jmarl import envs
      >>> env = check_env(envs.probe("delayed"))
      >>> check_env(env._replace(spec=env.spec._replace(obs_shape=(3,))))
      Traceback (most recent call last):
      ValueError: delayed: reset returns obs.agents of shape (1, 2); the spec asks for (1, 3).
    """
    spec = env.spec
    _check_spec(spec)
    key = jax.eval_shape(lambda: jax.random.key(0))
    action = jax.ShapeDtypeStruct(
        (spec.num_agents,) if spec.is_discrete else (spec.num_agents, spec.action_size or 0),
        jnp.int32 if spec.is_discrete else jnp.float32,
    )
    reset = jax.eval_shape(env.reset, key)
    if not (isinstance(reset, tuple) and len(reset) == 2):
        raise TypeError(f"{spec.name}: reset must return (env_state, obs), not {type(reset).__name__}.")
    state, obs = reset
    _check_observation("reset", obs, spec)
    step = jax.eval_shape(env.step, state, action, key)
    if not (isinstance(step, tuple) and len(step) == 3):
        raise TypeError(f"{spec.name}: step must return (env_state, obs, outcome), not {type(step).__name__}.")
    next_state, next_obs, outcome = step
    _check_observation("step", next_obs, spec)
    _check_outcome(outcome, spec)
    _check_same_avals(state, next_state, spec)
    return env


def _check_spec(spec: EnvSpec) -> None:
    if len(set(spec.agents)) != len(spec.agents) or not spec.agents:
        raise ValueError(f"{spec.name}: spec.agents={spec.agents} must be distinct names, at least one.")
    if (spec.num_actions is None) == (spec.action_size is None):
        raise ValueError(
            f"{spec.name}: spec needs num_actions (discrete) or action_size (continuous), and not both; "
            f"it has num_actions={spec.num_actions} and action_size={spec.action_size}."
        )
    for field in ("obs_sizes", "action_sizes"):
        sizes = getattr(spec, field)
        if sizes and len(sizes) != spec.num_agents:
            raise ValueError(
                f"{spec.name}: spec.{field}={sizes} needs one number for each of {spec.num_agents} agents."
            )
    if spec.is_discrete:
        return
    low, high = spec.action_low, spec.action_high
    shape = (spec.num_agents, spec.action_size)
    if low is None or high is None or np.shape(low) != shape or np.shape(high) != shape:
        raise ValueError(f"{spec.name}: spec.action_low and action_high need {shape[0]} tuples of {shape[1]} numbers.")
    if not (np.isfinite(low).all() and np.isfinite(high).all() and (np.array(low) < np.array(high)).all()):
        raise ValueError(f"{spec.name}: action bounds must be finite with low < high, not low={low} and high={high}.")


def _check_observation(where: str, obs: Any, spec: EnvSpec) -> None:
    if not isinstance(obs, Observation):
        raise TypeError(f"{spec.name}: {where} must return an Observation, not {type(obs).__name__}.")
    num_agents = spec.num_agents
    if spec.is_discrete and obs.action_mask is None:
        raise ValueError(f"{spec.name}: discrete actions need obs.action_mask; all True if everything is legal.")
    if not spec.is_discrete and obs.action_mask is not None:
        raise ValueError(f"{spec.name}: obs.action_mask must be None for continuous actions.")
    _check_array(where, "obs.agents", obs.agents, (num_agents, *spec.obs_shape), jnp.float32, spec)
    _check_array(where, "obs.state", obs.state, spec.state_shape, jnp.float32, spec)
    if spec.is_discrete:
        _check_array(where, "obs.action_mask", obs.action_mask, (num_agents, spec.num_actions), jnp.bool_, spec)
    _check_array(where, "obs.agent_mask", obs.agent_mask, (num_agents,), jnp.bool_, spec)


def _check_outcome(outcome: Any, spec: EnvSpec) -> None:
    if not isinstance(outcome, Outcome):
        raise TypeError(f"{spec.name}: step must return an Outcome third, not {type(outcome).__name__}.")
    _check_array("step", "reward", outcome.reward, (spec.num_agents,), jnp.float32, spec)
    _check_array("step", "terminated", outcome.terminated, (spec.num_agents,), jnp.bool_, spec)
    _check_array("step", "last", outcome.last, (), jnp.bool_, spec)
    for name, value in outcome.info.items():
        _check_array("step", f"info[{name!r}]", value, (), jnp.float32, spec)


def _check_array(where: str, name: str, value: Any, shape: tuple[Any, ...], dtype: Any, spec: EnvSpec) -> None:
    if value.shape != shape:
        raise ValueError(f"{spec.name}: {where} returns {name} of shape {value.shape}; the spec asks for {shape}.")
    if value.dtype != dtype or value.weak_type:
        weak = "weakly typed " if value.weak_type else ""
        raise TypeError(
            f"{spec.name}: {where} returns {name} as {weak}{value.dtype}; it must be {jnp.dtype(dtype)}: "
            f"use jnp.asarray(x, jnp.{jnp.dtype(dtype)})."
        )


def _check_same_avals(state: Any, next_state: Any, spec: EnvSpec) -> None:
    before, after = str(jax.tree.structure(state)), str(jax.tree.structure(next_state))
    if before != after:
        raise TypeError(f"{spec.name}: step returns an env_state of structure {after}; reset's is {before}.")
    for (path, a), b in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(next_state), strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype) or a.weak_type or b.weak_type:
            raise TypeError(
                f"{spec.name}: env_state{jax.tree_util.keystr(path)} is {_describe(a)} after reset and {_describe(b)} "
                f"after step; both must be the same and not weakly typed, or every caller compiles twice."
            )


def _describe(aval: Any) -> str:
    return f"{'weakly typed ' if aval.weak_type else ''}{aval.dtype}{list(aval.shape)}"
