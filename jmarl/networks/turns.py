"""Agents that choose one after the other within a step: their turns, what each knows of those before it, and the scan.

Those who act come first, in the order of the agent axis or in one that is given, so nothing stands between their turns.
R are rows: steps, sequences.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jmarl import losses
from jmarl.networks.actor_critic import action_bounds
from jmarl.types import Action, EnvSpec, Observation

__all__ = [
    "by_agent",
    "exploring",
    "features",
    "in_turn",
    "num_features",
    "order_of",
    "play",
    "previous",
    "speaks",
    "values",
]

Distribution = Callable[[Any, Any], Any]  # `(a model's output, action_mask) -> distribution` over actions


def num_features(spec: EnvSpec) -> int:
    """Of an action, see `features`."""
    return (spec.num_actions if spec.is_discrete else spec.action_size) or 0


def features(spec: EnvSpec, action: Action) -> Float[Array, "*batch N F"]:
    """Of actions: one-hot, or scaled so that -1 and 1 are the bounds, with nothing in place of padding."""
    if spec.is_discrete:
        return jax.nn.one_hot(action, num_features(spec), dtype=jnp.float32)
    low, high = (bound.astype(np.float32) for bound in action_bounds(spec))
    sizes = np.asarray(spec.action_sizes or (spec.action_size,) * spec.num_agents)
    is_real = np.arange(low.shape[1]) < sizes[:, None]
    centre, half = (low + high) / 2, np.where(is_real, (high - low) / 2, 1.0).astype(np.float32)

    def for_all(x: np.ndarray) -> np.ndarray:  # axes are added by hand, where jax is strict about ranks
        return x.reshape(*[1] * (action.ndim - 2), *x.shape)

    return jnp.where(for_all(is_real), (action - for_all(centre)) / for_all(half), 0.0)


def previous(done: Float[Array, "R K F"]) -> Float[Array, "R K F1"]:
    """What was done in the turn before each, behind a feature that is 1 in the first turn, before which nothing was."""
    is_first = jnp.zeros_like(done[..., :1]).at[:, 0].set(1.0)
    before = jnp.concatenate([jnp.zeros_like(done[:, :1]), done[:, :-1]], axis=1)
    return jnp.concatenate([is_first, before], axis=-1)


def order_of(agent_mask: Bool[Array, "R N"], rank: Float[Array, "R N"] | None = None) -> Int[Array, "R N"]:
    """The agent of each turn: those that act, by their rank in [0, 1) or as they are listed, and then the others."""
    rank = jnp.zeros(agent_mask.shape, jnp.float32) if rank is None else rank
    return jnp.argsort(jnp.where(agent_mask, rank, 2.0), axis=-1, stable=True)


def _index(order: Int[Array, "R K"], x: Array) -> Array:
    return order.reshape(*order.shape, *[1] * (x.ndim - 2))


def in_turn(x: Array, order: Int[Array, "R N"] | None) -> Array:
    """`x[r, order[r]]`, from the order of agents to that of turns; None where they are the same."""
    return x if order is None else jnp.take_along_axis(x, _index(order, x), axis=1)


def by_agent(x: Array, order: Int[Array, "R N"] | None) -> Array:
    """The inverse of `in_turn`."""
    return x if order is None else in_turn(x, jnp.argsort(order, axis=-1))


def speaks(agent_mask: Bool[Array, "*batch N"]) -> Bool[Array, "*batch N"]:
    """Whose value is its own: those that act, and everybody where nobody does."""
    return agent_mask | ~agent_mask.any(-1, keepdims=True)


def values(spec: EnvSpec, agent_mask: Bool[Array, "*batch N"], value: Float[Array, "*batch N"]) -> Array:
    """Of all agents: one that does not act has the mean of those that do, since all values are of the team's return."""
    if spec.always_act:
        return value
    has_own = speaks(agent_mask)
    return jnp.where(has_own, value, losses.masked_mean(value, has_own, axis=-1)[..., None])


def exploring(spec: EnvSpec, num_rows: int, key: PRNGKeyArray) -> Callable[[Any], Action]:
    """`(distribution) -> actions [R, N]`, drawn with the same noise in every turn."""
    draw = jax.random.gumbel if spec.is_discrete else jax.random.normal
    noise = draw(key, (num_rows, spec.num_agents, num_features(spec)), jnp.float32)
    return lambda pi: pi.from_noise(noise)[0]


def play(
    spec: EnvSpec,
    decode: Callable[[Any, Array, Array, Any], tuple[Any, Any]],
    memory: Any,
    z: Float[Array, "R N E"],
    obs: Observation,
    order: Int[Array, "R N"] | None,
    distribution: Distribution,
    choose: Callable[[Any], Action],
) -> tuple[Any, Action, Any]:
    """One action after the other, in one scan over turns.

    Args:
      spec: of the environment.
      decode: `(memory, previous [R, 1, F1], z [R, 1, E], place) -> (memory, output)` of the turn `place`.
      memory: before the first turn.
      z: what each agent's action depends on beside those before it, by agent.
      obs: of the step, `[R, ..]`.
      order: of turns, see `order_of`; None for that of the agent axis.
      distribution: of outputs.
      choose: takes actions `[R, N]` from a distribution.

    Returns:
      The memory after the last turn; actions and outputs, by agent.
    """
    num_rows, num_agents = z.shape[:2]
    who = jnp.broadcast_to(jnp.arange(num_agents), (num_rows, num_agents)) if order is None else order

    def turn(state, x):
        memory, before = state
        place, z, who = x
        memory, output = decode(memory, before, z, place)
        # As if each agent were the one whose turn it is: distributions know agents by their place.
        everyone = jax.tree.map(lambda y: jnp.broadcast_to(y, (num_rows, num_agents, y.shape[-1])), output)
        actions = choose(distribution(everyone, obs.action_mask))
        told = features(spec, actions).astype(z.dtype)
        told = jnp.concatenate([jnp.zeros_like(told[..., :1]), told], axis=-1)
        action, done = (jnp.take_along_axis(y, _index(who, y), axis=1)[:, :1] for y in (actions, told))
        return (memory, done), (action, output)

    start = previous(jnp.zeros((num_rows, 1, num_features(spec)), z.dtype))
    xs = jnp.arange(num_agents), jnp.moveaxis(in_turn(z, order), 1, 0)[:, :, None], who.T[..., None]
    (memory, _), played = jax.lax.scan(turn, (memory, start), xs)
    action, output = jax.tree.map(lambda y: by_agent(jnp.moveaxis(y[:, :, 0], 0, 1), order), played)
    return memory, action, output
