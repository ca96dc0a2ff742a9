"""Single-agent environments of gymnax: N = 1."""

import dataclasses
import inspect
from typing import Any

from jaxtyping import Array

from jmarl.envs.stacked import AgentDicts, unknown

AGENT = "agent_0"


def names() -> list[str]:
    """Every environment that gymnax knows, the user's own registrations included."""
    import gymnax  # takes a second: only for those who use it

    return list(gymnax.registered_envs)


def agent_dicts(name: str, options: dict[str, Any]) -> AgentDicts:
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
