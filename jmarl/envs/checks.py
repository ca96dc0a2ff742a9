"""What an `Env` must keep to: shapes and dtypes without running it, and what it does when it is played."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from jmarl import keys
from jmarl.envs import views
from jmarl.evaluation import flat_info
from jmarl.types import Env, EnvSpec, Observation, Outcome

_MOST_STEPS = 10_000  # played of an episode whose length the spec does not limit
_MOST_ENDS = 3  # steps in a row on which an agent may act and end its return: a respawned one may be unlucky


def check_env(env: Env, *, play: bool = False, key: PRNGKeyArray | None = None) -> Env:
    """Raises one clear sentence at the first mistake in an environment; returns it if there is none.

    Without `play` only shapes and dtypes are traced: an environment that passes can still have wrong rewards.

    Args:
      env: the environment.
      play: also plays one episode with random legal actions, and looks for padding that is legal, agents without a
        legal action, views and rewards that are not finite, returns that end again and again, and lengths that are not
        the spec's. Where the spec has no `max_steps`, an episode counts as endless after 10,000 steps.
      key: of that episode; `jax.random.key(0)` if None.

    Example:
      >>> from jmarl import envs
      >>> env = check_env(envs.probe("delayed"), play=True)
      >>> check_env(env._replace(spec=env.spec._replace(obs_shape=(3,))))
      Traceback (most recent call last):
      ValueError: delayed: reset returns obs.agents of shape (1, 2); the spec asks for (1, 3).
    """
    spec = env.spec
    _check_spec(spec)
    key_aval = jax.eval_shape(lambda: jax.random.key(0))
    action = jax.ShapeDtypeStruct(
        (spec.num_agents,) if spec.is_discrete else (spec.num_agents, spec.action_size or 0),
        jnp.int32 if spec.is_discrete else jnp.float32,
    )
    reset = jax.eval_shape(env.reset, key_aval)
    if not (isinstance(reset, tuple) and len(reset) == 2):
        raise TypeError(f"{spec.name}: reset must return (env_state, obs), not {type(reset).__name__}.")
    state, obs = reset
    _check_observation("reset", obs, spec)
    step = jax.eval_shape(env.step, state, action, key_aval)
    if not (isinstance(step, tuple) and len(step) == 3):
        raise TypeError(f"{spec.name}: step must return (env_state, obs, outcome), not {type(step).__name__}.")
    next_state, next_obs, outcome = step
    _check_observation("step", next_obs, spec)
    _check_outcome(outcome, spec)
    _check_same_avals("env_state", state, next_state, spec)
    _check_same_avals("obs", obs, next_obs, spec)
    if play:
        _play(env, jax.random.key(0) if key is None else keys.as_key(key))
    return env


# ---------------------------------------------------------------------------------------------- without running it


def _check_spec(spec: EnvSpec) -> None:
    if len(set(spec.agents)) != len(spec.agents) or not spec.agents:
        raise ValueError(f"{spec.name}: spec.agents={spec.agents} must be distinct names, at least one.")
    if (spec.num_actions is None) == (spec.action_size is None):
        raise ValueError(
            f"{spec.name}: spec needs num_actions (discrete) or action_size (continuous), and not both; "
            f"it has num_actions={spec.num_actions} and action_size={spec.action_size}."
        )
    if spec.obs_dtype not in ("float32", "uint8"):
        raise ValueError(f"{spec.name}: spec.obs_dtype={spec.obs_dtype!r} is neither 'float32' nor 'uint8'.")
    for field, letter in (("obs_shape", "O"), ("state_shape", "S")):
        shape = getattr(spec, field)
        if len(shape) not in (1, 3) or min(shape) < 1:
            raise ValueError(
                f"{spec.name}: spec.{field}={shape} must be ({letter},) for vectors or (H, W, C) for images, of "
                f"positive sizes: flatten what is neither, or give a grid an axis of channels."
            )
    name, widest = ("num_actions", spec.num_actions) if spec.is_discrete else ("action_size", spec.action_size)
    if not widest or widest < 1:
        raise ValueError(f"{spec.name}: spec.{name}={widest} must be at least 1.")
    _check_sizes("obs_sizes", spec.obs_sizes, "obs_shape[-1]", spec.obs_shape[-1], spec)
    _check_sizes("action_sizes", spec.action_sizes, name, widest, spec)
    if spec.obs_sizes and len(spec.obs_shape) == 3:
        raise ValueError(f"{spec.name}: spec.obs_sizes={spec.obs_sizes} must be () for images, which are not padded.")
    if spec.min_steps < 1 or (spec.max_steps is not None and spec.max_steps < spec.min_steps):
        raise ValueError(
            f"{spec.name}: spec needs 1 <= min_steps <= max_steps, not min_steps={spec.min_steps} and "
            f"max_steps={spec.max_steps}: leave out the first if episodes may end at once, the second if it is unknown."
        )
    if spec.is_discrete:
        return
    low, high = spec.action_low, spec.action_high
    bounds = (spec.num_agents, spec.action_size)
    if low is None or high is None or np.shape(low) != bounds or np.shape(high) != bounds:
        raise ValueError(
            f"{spec.name}: spec.action_low and action_high need {bounds[0]} tuples of {bounds[1]} numbers."
        )
    if not (np.isfinite(low).all() and np.isfinite(high).all() and (np.array(low) < np.array(high)).all()):
        raise ValueError(f"{spec.name}: action bounds must be finite with low < high, not low={low} and high={high}.")


def _check_sizes(field: str, sizes: tuple[int, ...], what: str, widest: int, spec: EnvSpec) -> None:
    if sizes and len(sizes) != spec.num_agents:
        raise ValueError(f"{spec.name}: spec.{field}={sizes} needs one number for each of {spec.num_agents} agents.")
    if sizes and (min(sizes) < 1 or max(sizes) > widest):
        raise ValueError(
            f"{spec.name}: spec.{field}={sizes} must be between 1 and {what}={widest}, which has room for the widest "
            f"agent, padding included."
        )


def _check_observation(where: str, obs: Any, spec: EnvSpec) -> None:
    if not isinstance(obs, Observation):
        raise TypeError(f"{spec.name}: {where} must return an Observation, not {type(obs).__name__}.")
    num_agents = spec.num_agents
    if spec.is_discrete and obs.action_mask is None:
        raise ValueError(f"{spec.name}: discrete actions need obs.action_mask; all True if everything is legal.")
    if not spec.is_discrete and obs.action_mask is not None:
        raise ValueError(f"{spec.name}: obs.action_mask must be None for continuous actions.")
    dtype = jnp.dtype(spec.obs_dtype)
    _check_array(where, "obs.agents", obs.agents, (num_agents, *spec.obs_shape), dtype, spec)
    _check_array(where, "obs.state", obs.state, spec.state_shape, dtype, spec)
    if spec.is_discrete:
        _check_array(where, "obs.action_mask", obs.action_mask, (num_agents, spec.num_actions), jnp.bool_, spec)
    _check_array(where, "obs.agent_mask", obs.agent_mask, (num_agents,), jnp.bool_, spec)


def _check_outcome(outcome: Any, spec: EnvSpec) -> None:
    if not isinstance(outcome, Outcome):
        raise TypeError(f"{spec.name}: step must return an Outcome third, not {type(outcome).__name__}.")
    _check_array("step", "reward", outcome.reward, (spec.num_agents,), jnp.float32, spec)
    _check_array("step", "terminated", outcome.terminated, (spec.num_agents,), jnp.bool_, spec)
    _check_array("step", "last", outcome.last, (), jnp.bool_, spec)
    if outcome.shaped_reward is not None:
        _check_array("step", "shaped_reward", outcome.shaped_reward, (spec.num_agents,), jnp.float32, spec)
    if not isinstance(outcome.info, Mapping):
        raise TypeError(f"{spec.name}: step returns info as {type(outcome.info).__name__}; it must be a dict by name.")
    told = flat_info(outcome.info)
    if len(told) < len(jax.tree.leaves(outcome.info)):
        raise ValueError(
            f"{spec.name}: step returns info with the names {sorted(told)}, dicts joined by /, and each must stand for "
            f"one number: two are the same, or one is a list."
        )
    for name, value in told.items():
        if getattr(value, "shape", None) != () or not (value.dtype == bool or jnp.issubdtype(value.dtype, jnp.number)):
            given = _describe(value) if hasattr(value, "dtype") else type(value).__name__
            raise ValueError(
                f"{spec.name}: step returns info[{name!r}] as {given}; it must be one number, as logs have one for an "
                f"episode: give a mean, or each agent's number under a name of its own."
            )


def _check_array(where: str, name: str, value: Any, shape: tuple[Any, ...], dtype: Any, spec: EnvSpec) -> None:
    if not hasattr(value, "shape"):
        raise TypeError(
            f"{spec.name}: {where} returns {name} as {type(value).__name__}; it must be one array of shape {shape}: "
            f"jmarl.envs.flatten_views makes one out of a dict of arrays."
        )
    if value.shape != shape:
        raise ValueError(f"{spec.name}: {where} returns {name} of shape {value.shape}; the spec asks for {shape}.")
    # Where jax computes in 64 bits, so does an environment that does not say otherwise.
    dtypes = (dtype, jnp.result_type(float)) if dtype == jnp.float32 else (dtype,)
    if value.dtype not in dtypes or value.weak_type:
        weak = "weakly typed " if value.weak_type else ""
        is_bytes = name.startswith("obs.") and value.dtype == jnp.uint8
        otherwise = ", or obs_dtype='uint8' in its spec" if is_bytes else ""
        raise TypeError(
            f"{spec.name}: {where} returns {name} as {weak}{value.dtype}; it must be {jnp.dtype(dtype)}: "
            f"use jnp.asarray(x, jnp.{jnp.dtype(dtype)}){otherwise}."
        )


def _check_same_avals(name: str, first: Any, following: Any, spec: EnvSpec) -> None:
    before, after = str(jax.tree.structure(first)), str(jax.tree.structure(following))
    if before != after:
        raise TypeError(f"{spec.name}: step returns an {name} of structure {after}; reset's is {before}.")
    for (path, a), b in zip(jax.tree.leaves_with_path(first), jax.tree.leaves(following), strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype) or a.weak_type or b.weak_type:
            raise TypeError(
                f"{spec.name}: {name}{jax.tree_util.keystr(path)} is {_describe(a)} after reset and {_describe(b)} "
                f"after step; both must be the same and not weakly typed, or every caller compiles twice."
            )


def _describe(aval: Any) -> str:
    return f"{'weakly typed ' if aval.weak_type else ''}{aval.dtype}{list(aval.shape)}"


# ------------------------------------------------------------------------------------------------------ playing it


def _play(env: Env, key: PRNGKeyArray) -> None:
    """One episode with random legal actions."""
    spec = env.spec
    step = jax.jit(env.step)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    state, obs = jax.jit(env.reset)(key)
    num_ends = np.zeros(spec.num_agents, int)  # of each agent's return, on the last steps on which it acted
    limit = _MOST_STEPS if spec.max_steps is None else spec.max_steps
    for t in range(1, limit + 1):
        seen = jax.device_get(obs)
        _check_values(seen, "reset" if t == 1 else f"step {t - 1}", spec)
        _check_nobody_is_stuck(seen, "reset" if t == 1 else f"step {t - 1}", spec)
        state, obs, outcome = step(state, jnp.asarray(_random_action(seen, spec, rng)), jax.random.fold_in(key, t))
        told = jax.device_get(outcome)
        if not np.isfinite(told.reward).all():
            rewards = dict(zip(spec.agents, told.reward.tolist(), strict=True))
            raise ValueError(f"{spec.name}: step {t} pays {rewards}; every reward must be finite.")
        if told.last:
            break
        num_ends = np.where(seen.agent_mask, np.where(told.terminated, num_ends + 1, 0), num_ends)
        if num_ends.max() >= _MOST_ENDS:
            agent = spec.agents[num_ends.argmax()]
            raise ValueError(
                f"{spec.name}: {agent} acted and was terminated on {_MOST_ENDS} steps in a row, up to step {t}: once "
                f"its return has ended for good, its obs.agent_mask must be False."
            )
    else:
        advice = "" if spec.max_steps is None else ", which is spec.max_steps: make it last there, or max_steps larger"
        raise ValueError(f"{spec.name}: an episode of random actions has not ended on step {limit}{advice}.")
    if t < spec.min_steps:
        raise ValueError(
            f"{spec.name}: an episode of random actions ended on step {t}, before spec.min_steps={spec.min_steps}."
        )
    _check_values(jax.device_get(obs), f"the last step, {t},", spec)


def _random_action(obs: Observation, spec: EnvSpec, rng: np.random.Generator) -> np.ndarray:
    if obs.action_mask is None:
        return rng.uniform(np.array(spec.action_low), np.array(spec.action_high)).astype(np.float32)
    # An agent that does not act may have no legal action; what it is given then should not matter.
    is_legal = np.asarray(obs.action_mask)
    return np.where(is_legal, rng.uniform(size=is_legal.shape), -1).argmax(axis=-1).astype(np.int32)


def _check_values(obs: Observation, when: str, spec: EnvSpec) -> None:
    for agent, view, acts in zip(spec.agents, obs.agents, obs.agent_mask, strict=True):
        if acts and not np.isfinite(view).all():
            raise ValueError(f"{spec.name}: after {when} the view of {agent}, which acts, is not finite everywhere.")
        if spec.always_act and not acts:
            raise ValueError(
                f"{spec.name}: after {when} {agent} does not act, but spec.always_act=True: leave that out."
            )
    if not np.isfinite(obs.state).all():
        raise ValueError(f"{spec.name}: after {when} obs.state is not finite everywhere.")
    blocks = views.own_blocks(spec)
    if spec.state_is_views and not np.array_equal(obs.state, views.joined(jnp.asarray(obs.agents), 0, blocks)):
        raise ValueError(
            f"{spec.name}: after {when} obs.state is not all views joined, but spec.state_is_views=True: leave it out."
        )
    if obs.action_mask is None or not spec.action_sizes:
        return
    for agent, size, legal in zip(spec.agents, spec.action_sizes, obs.action_mask, strict=True):
        if legal[size:].any():
            raise ValueError(
                f"{spec.name}: after {when} action {size + int(legal[size:].argmax())} of {agent} is legal, and it has "
                f"only {size}: obs.action_mask must be False for padding."
            )


def _check_nobody_is_stuck(obs: Observation, when: str, spec: EnvSpec) -> None:
    if obs.action_mask is None:
        return
    is_stuck = obs.agent_mask & ~obs.action_mask.any(axis=-1)
    if is_stuck.any():
        raise ValueError(
            f"{spec.name}: after {when} {spec.agents[is_stuck.argmax()]} acts and has no legal action: give it one, or "
            f"make its obs.agent_mask False."
        )
