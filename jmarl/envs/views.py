"""What agents see, in the form that learners read: dicts of arrays as one vector, ids before each view."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from jmarl.types import Action, EntityLayout, Env, EnvSpec, Observation, Outcome


def flatten_views(views: Mapping[str, Any]) -> Float[Array, "N O"]:
    """One vector for each agent, from a dict of what all of them see.

    The parts stand in the order of their sorted names, those of a dict inside the dict at its name's place; each is
    read row by row, in float32.

    Args:
      views: arrays `[N, ...]` of any kind of number, by name, or dicts of them.

    Example:
      >>> flatten_views({"pose": jnp.ones((2, 3)), "map": jnp.zeros((2, 2, 2), bool), "time": jnp.arange(2)})
      Array([[0., 0., 0., 0., 1., 1., 1., 0.],
             [0., 0., 0., 0., 1., 1., 1., 1.]], dtype=float32)
    """
    parts = [jnp.asarray(x, jnp.float32) for x in jax.tree.leaves(dict(views))]  # jax sorts the keys of dicts
    if len({x.shape[:1] for x in parts}) != 1 or parts[0].ndim == 0:
        raise ValueError(
            f"views has parts of the shapes {[x.shape for x in parts]}: each needs an axis of agents first, N long."
        )
    return jnp.concatenate([x.reshape(x.shape[0], math.prod(x.shape[1:])) for x in parts], axis=1)


def with_agent_ids(env: Env) -> Env:
    """`env` with a one-hot id before each agent's features, or N constant channels before an image's.

    Agents of different kinds that share one network need it to tell which of them they are. `obs.state` stays as it is.

    Example:
      >>> from jmarl import envs
      >>> env = with_agent_ids(envs.probe("action", num_agents=3))
      >>> env.reset(jax.random.key(0))[1].agents
      Array([[1., 0., 0., 1.],
             [0., 1., 0., 1.],
             [0., 0., 1., 1.]], dtype=float32)
    """

    def reset(key: Array) -> tuple[Any, Observation]:
        state, obs = env.reset(key)
        return state, identified(obs)

    def step(state: Any, action: Action, key: Array) -> tuple[Any, Observation, Outcome]:
        state, obs, outcome = env.step(state, action, key)
        return state, identified(obs), outcome

    def restart(state: Any) -> tuple[Any, Observation]:
        state, obs = env.restart(state)  # type: ignore[misc]
        return state, identified(obs)

    spec = env.spec
    *image, width = spec.obs_shape
    sizes = tuple(size + spec.num_agents for size in spec.obs_sizes)
    layout = spec.entities and _moved(spec.entities, spec.num_agents)
    spec = spec._replace(obs_shape=(*image, width + spec.num_agents), obs_sizes=sizes, has_ids=True, entities=layout)
    return env._replace(reset=reset, step=step, spec=spec, restart=env.restart and restart)


def _moved(layout: EntityLayout, by: int) -> EntityLayout:
    """The layout of views before which an id of so many features was put. It is the agent's own."""

    def moved(blocks: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        return tuple((start + by, width) for start, width in blocks)

    kinds = tuple(kind._replace(blocks=moved(kind.blocks)) for kind in layout.kinds)
    return EntityLayout(own=((0, by), *moved(layout.own)), kinds=kinds)


def identified(obs: Observation) -> Observation:
    """What `with_agent_ids` makes of an observation; leading axes are kept."""
    *batch, num = obs.agent_mask.shape
    *image, _ = obs.agents.shape[len(batch) + 1 :]
    # The id comes first, so that it has one place for agents of all widths and `obs_sizes` still counts from the left.
    ids = np.eye(num, dtype=np.float32).reshape(num, *(1 for _ in image), num)
    ids = np.broadcast_to(ids, (*batch, num, *image, num))
    return dataclasses.replace(obs, agents=jnp.concatenate([ids.astype(obs.agents.dtype), obs.agents], axis=-1))


def own_blocks(spec: EnvSpec) -> tuple[tuple[int, int], ...]:
    """Where each agent's own features begin and end in its view, between id and padding.

    >>> from jmarl import envs
    >>> own_blocks(with_agent_ids(envs.probe("action", num_agents=3)).spec)
    ((3, 4), (3, 4), (3, 4))
    """
    start = spec.num_agents if spec.has_ids else 0
    return tuple((start, size) for size in spec.obs_sizes or spec.obs_shape[-1:] * spec.num_agents)


def joined(agents: Shaped[Array, "..."], axis: int, blocks: tuple[tuple[int, int], ...]) -> Shaped[Array, "..."]:
    """The state that `EnvSpec.state_is_views` speaks of: these blocks of all agents' views, whose axis is `axis`."""
    if agents.ndim == axis + 2 and len(set(blocks)) == 1:
        start, end = blocks[0]
        return agents[..., start:end].reshape(*agents.shape[:axis], -1)
    own = [jnp.take(agents, i, axis)[..., start:end] for i, (start, end) in enumerate(blocks)]
    return jnp.concatenate(own, axis=-1)
