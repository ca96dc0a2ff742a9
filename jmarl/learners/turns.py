"""Learning one after the other: who moves in a turn, its parameters within those of all, and the order of turns.

Parameters are each agent's own. In equal shapes (`sharing="per_agent"`) the turns are one `lax.scan` over a permutation
of stacked parameters. Where shapes differ (`sharing="per_group"`), agents of a group share theirs and move at once, the
groups one after the other, and each turn passes through all groups; under `vmap` over seeds it computes the turns of
all of them and keeps one.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PRNGKeyArray

from jmarl import optim, parallel
from jmarl.networks import actor_critic
from jmarl.types import Carry, EnvSpec, Network, Params


class Players(NamedTuple):
    """All that move, by number: an agent each, or a group of agents that share parameters.

    A number may be traced where parameters are each agent's own, and is static otherwise: see `switch`.

    Attributes:
      num: how many.
      optimizer: `init` takes the parameters of all, `update` those of one player.
      take: `(of all, player) -> its own`, of parameters or of optimiser states.
      put: `(of all, its own, player) -> of all`.
      actor: `(parameters of all, player) -> Network` of its own parameters and memory, whose output is there for every
        agent, `[L, M, N, ..]`; that of its members is meant.
      memory: `(carry of all, player) -> its own`.
      members: `(player) -> bool [K, N]`, of each of its K members which agent it is.
      switch: `(what to do with a player, its number, which may be traced) -> what comes of it`.
    """

    num: int
    optimizer: optax.GradientTransformation
    take: Callable[[Any, Any], Any]
    put: Callable[[Any, Any, Any], Any]
    actor: Callable[[Params, Any], Network]
    memory: Callable[[Carry, Any], Carry]
    members: Callable[[Any], Array]
    switch: Callable[[Callable[[Any], Any], Array], Any]


def players(spec: EnvSpec, actor: Network, optimizer: optax.GradientTransformation, sharing: str) -> Players:
    """Those of `sharing`, see `require_apart`.

    Args:
      spec: of the environment.
      actor: a network over observations. Parameters of "per_agent" have a leading axis N, and the same function serves
        any number of agents; those of "per_group" are {"group_0": ..}.
      optimizer: of one player.
      sharing: "per_agent" or "per_group".
    """
    return (_own if sharing == "per_agent" else _groups)(spec, actor, optimizer)


def one_after_the_other(
    players: Players, turn: Callable[[Any, Any, Any], tuple[Any, Any]], start: Any, key: PRNGKeyArray, xs: Any = None
) -> tuple[Any, Any]:
    """`turn(player, carry, x) -> (carry, y)` of each player once, in an order drawn by `key`; `xs` are by turn.

    Returns:
      The last carry, and all `y`, by turn.
    """
    order = jax.random.permutation(parallel.common(key), players.num)
    return jax.lax.scan(
        lambda carry, x: players.switch(lambda player: turn(player, carry, x[1]), x[0]), start, (order, xs)
    )


def require_apart(sharing: str, instead: str) -> None:
    """Refuses one network for all, of whose agents none can learn after another; `instead` is an algorithm for it."""
    if sharing == "shared":
        raise ValueError(
            f"sharing='shared' leaves nobody to learn after another: choose 'per_agent', or 'per_group' for agents of "
            f"different sizes; with one network for all, use {instead}."
        )


def _own(spec: EnvSpec, actor: Network, optimizer: optax.GradientTransformation) -> Players:
    """Each agent by itself: parameters stacked along N, so that one function serves any agent."""
    num_agents = spec.num_agents

    def take(tree, i, axis=0):
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i, 1, axis), tree)

    def put(tree, own, i):
        return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, i, 0), tree, own)

    def one_actor(actors, i):
        def apply(params, carry, obs, first):
            seen = obs.replace(agents=take(obs.agents, i, 2), agent_mask=take(obs.agent_mask, i, 2))
            seen = seen.replace(action_mask=None if obs.action_mask is None else take(obs.action_mask, i, 2))
            carry, output = actor.apply(params, carry, seen, first)
            # For everyone, since distributions know agents by their place.
            shape = (*first.shape, num_agents)
            return carry, jax.tree.map(lambda x: jnp.broadcast_to(x, (*shape, x.shape[-1])), output)

        return actor._replace(
            apply=apply, init_carry=lambda batch_shape: memory(actor.init_carry(batch_shape), 0, len(batch_shape))
        )

    def memory(carry, i, axis=1):
        return take(carry, i, axis)

    return Players(
        num=num_agents,
        optimizer=optim.per_agent(optimizer),
        take=take,
        put=put,
        actor=one_actor,
        memory=memory,
        members=lambda i: (jnp.arange(num_agents) == i)[None],
        switch=lambda turn, i: turn(i),
    )


def _groups(spec: EnvSpec, actor: Network, optimizer: optax.GradientTransformation) -> Players:
    """Groups of agents, of parameters in different shapes: a branch for each of them."""
    groups = actor_critic.groups(spec)
    names = [f"group_{g}" for g in range(max(groups) + 1)]

    def one_actor(actors, g):
        return actor._replace(
            apply=lambda params, carry, obs, first: actor.apply({**actors, names[g]: params}, carry, obs, first)
        )

    def members(g):
        index = jnp.array([i for i, group in enumerate(groups) if group == g])
        return index[:, None] == jnp.arange(len(groups))

    return Players(
        num=len(names),
        optimizer=optax.GradientTransformation(
            lambda actors: {name: optimizer.init(actors[name]) for name in names}, optimizer.update
        ),
        take=lambda tree, g: tree[names[g]],
        put=lambda tree, own, g: {**tree, names[g]: own},
        actor=one_actor,
        memory=lambda carry, g: carry,
        members=members,
        switch=lambda turn, g: jax.lax.switch(g, [functools.partial(turn, g) for g in range(len(names))]),
    )
