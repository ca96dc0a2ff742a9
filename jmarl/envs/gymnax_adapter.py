"""Single-agent environments of gymnax: N = 1."""

import dataclasses
import inspect
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jmarl.envs.flags import in_usual_bits, usual_flags
from jmarl.envs.stacked import AgentDicts, scalars, stack, unknown
from jmarl.types import Env

AGENT = "agent_0"


def names() -> list[str]:
    """Every environment that gymnax knows, the user's own registrations included."""
    import gymnax  # takes a second: only for those who use it

    return list(gymnax.registered_envs)


@usual_flags
def make(name: str, options: dict[str, Any], **views: Any) -> Env:
    """gymnax's environment `name`. Options are its constructor's arguments or fields of its parameters."""
    from gymnax import registration

    factory = registration._registry[name]
    arguments = {k: v for k, v in options.items() if k in inspect.signature(factory).parameters}
    env, params = registration.make(name, **arguments)
    fields = [field.name for field in dataclasses.fields(params)]
    for option in options:
        if option not in arguments and option not in fields:
            raise unknown(f"option of {name}", option, [*inspect.signature(factory).parameters, *fields], TypeError)
    params = params.replace(**{k: v for k, v in options.items() if k not in arguments})
    return stack(name, _agent_dicts(env, params), **views)


@usual_flags
def from_gymnax(
    env: object,
    params: Any = None,
    *,
    agent_ids: bool = False,
    time_limit: str = "truncated",
    flatten: bool = False,
) -> Env:
    """Any object with gymnax's interface: `reset_env`, `step_env`, `is_truncated`, `action_space`, `default_params`.

    `step_env` tells of the task's own end, a termination, and `is_truncated` of the time limit, as since gymnax 1.0.
    The longest episode is `params.max_steps_in_episode`; scalars of gymnax's `info` are told at an episode's last step.

    Args:
      env: the environment itself, without wrappers.
      params: its parameters; `env.default_params` if None.
      agent_ids, time_limit, flatten: see `jmarl.make`.

    Example:
      >>> import gymnax
      >>> env, params = gymnax.make("CartPole-v1")
      >>> from_gymnax(env, params.replace(max_steps_in_episode=50)).spec.max_steps
      50
    """
    raw: Any = env
    for attribute in ("reset_env", "step_env", "is_truncated", "action_space", "default_params"):
        if not hasattr(raw, attribute):
            raise TypeError(f"{type(env).__name__} has no {attribute}, which gymnax's environments have since 1.0.")
    raw, params = in_usual_bits((raw, params))
    dicts = _agent_dicts(raw, raw.default_params if params is None else params)
    name = str(getattr(raw, "name", type(env).__name__))
    return stack(name, dicts, agent_ids=agent_ids, time_limit=time_limit, flatten=flatten)


def _agent_dicts(env: Any, params: Any) -> AgentDicts:
    # Maps of what is where, which gymnax shows as floats.
    seen = (lambda x: x.astype(jnp.uint8)) if "MinAtar" in str(getattr(env, "name", "")) else (lambda x: x)

    def reset(key: Array) -> Any:
        obs, state = env.reset_env(key, params)
        return {AGENT: seen(obs)}, state

    def step(key: Array, state: Any, actions: dict[str, Array]) -> Any:
        obs, state, reward, terminated, info = env.step_env(key, state, actions[AGENT], params)
        # Since gymnax 1.0 `step_env` tells only of the task's own end; the time limit is a question of its own.
        last = terminated | env.is_truncated(state, params)
        told = {name: x for name, x in scalars(info).items() if name != "discount"}  # 1 - terminated, in all of them
        return {AGENT: seen(obs)}, state, {AGENT: reward}, None, terminated, last, told

    limit = getattr(params, "max_steps_in_episode", None)
    return AgentDicts(
        agents=(AGENT,),
        action_spaces={AGENT: env.action_space(params)},
        reset=reset,
        step=step,
        max_steps=None if limit is None else int(limit),
        unwrapped=env,
    )
