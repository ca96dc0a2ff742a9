"""Environments as stacked arrays that never reset themselves."""

from typing import Any

from jmarl.envs import gymnax_adapter, jaxmarl_adapter
from jmarl.envs.games import matrix_game
from jmarl.envs.stacked import stack
from jmarl.types import Env

__all__ = ["make", "matrix_game"]


def make(
    name: str, *, agent_ids: bool = False, time_limit: str = "truncated", flatten: bool = False, **options: Any
) -> Env:
    """Any environment of JaxMARL or gymnax, by its name there."""
    if name in jaxmarl_adapter.names():
        dicts = jaxmarl_adapter.agent_dicts(name, options)
    else:
        dicts = gymnax_adapter.agent_dicts(name, options)
    return stack(name, dicts, agent_ids=agent_ids, time_limit=time_limit, flatten=flatten)
