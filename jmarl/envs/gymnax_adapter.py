"""Single-agent environments of gymnax: N = 1."""

import dataclasses
import inspect
from typing import Any

import jax
from jaxtyping import Array

from jmarl.envs.stacked import AgentDicts

AGENT = "agent_0"


def names() -> list[str]:
    """Every environment that gymnax knows, the user's own registrations included."""
    import gymnax  # 3 s: only for those who use it

    return list(gymnax.registered_envs)


def options(name: str) -> list[str]:
    """What `make` may be told about an environment: its constructor's arguments and its parameters' fields."""
    import gymnax.registration

    factory = gymnax.registration._registry[name]
    arguments = [p for p in inspect.signature(factory).parameters if p not in ("args", "kwargs")]
    return arguments + [field.name for field in dataclasses.fields(gymnax.make(name)[1])]


def agent_dicts(name: str, options: dict[str, Any]) -> AgentDicts:
    """gymnax's environment `name` with one agent, "agent_0"."""
    import gymnax

    fields = {field.name for field in dataclasses.fields(gymnax.make(name)[1])}
    env, params = gymnax.make(name, **{k: v for k, v in options.items() if k not in fields})
    params = params.replace(**{k: v for k, v in options.items() if k in fields})

    def reset(key: Array) -> Any:
        obs, state = env.reset_env(key, params)
        return {AGENT: obs}, state

    def step(key: Array, state: Any, actions: dict[str, Array]) -> Any:
        obs, state, reward, terminated, _ = env.step_env(key, state, actions[AGENT], params)
        # Since gymnax 1.0 `step_env` tells only of the task's own end; the time limit is a question of its own.
        last = terminated | env.is_truncated(state, params)
        return {AGENT: obs}, state, {AGENT: reward}, terminated, last, {}

    return AgentDicts(
        agents=(AGENT,),
        action_spaces={AGENT: env.action_space(params)},
        reset=reset,
        step=step,
        max_steps=int(params.max_steps_in_episode),
        unwrapped=env,
    )
