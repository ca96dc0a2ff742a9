"""What learners are made of: their networks, an optimiser step, losses averaged under a mask, rewards of a team."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jmarl import losses, masks, optim, parallel
from jmarl.learners import replay
from jmarl.types import EnvSpec, Learner, Params, Trajectory, Transition


def choose_nets(nets: Any, default_nets: Callable[[EnvSpec, Any], Any], spec: EnvSpec, cfg: Any) -> Any:
    """A user's own networks, or else those that a config describes; several devices share the work of either."""
    return parallel.split_networks(default_nets(spec, cfg) if nets is None else nets)


def improve(
    optimizer: optax.GradientTransformation,
    loss: Callable[[Params], tuple[Array, Any]],
    params: Params,
    opt_state: Any,
) -> tuple[Params, Any, Any, Array]:
    """One optimiser step on `loss(params) -> (scalar, aux)`: new parameters and state, aux, norm of the gradient."""
    grads, aux = jax.grad(loss, has_aux=True)(params)
    grads = parallel.averaged(grads)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, aux, optax.global_norm(grads)


def optimizer(cfg: Any, rate: optim.Schedule, *, is_of_team: bool = False) -> optax.GradientTransformation:
    """Clipped Adam, one for each agent where each has parameters of its own; one for those that are a team's."""
    shared = optim.optimizer(rate, eps=cfg.adam_eps, max_grad_norm=cfg.max_grad_norm)
    return optim.per_agent(shared) if cfg.sharing == "per_agent" and not is_of_team else shared


def mean_loss(x: Array, weight: Array, sharing: str = "shared") -> Array:
    """Weighted mean of `x` `[.., L, M, N]`, summed over axes before. A weight scales the error, not the count.

    Over all agents; where each has parameters of its own, the sum of each one's mean: then each learns as if alone.
    """
    weight = jnp.broadcast_to(weight, x.shape)
    axis = (-3, -2) if sharing == "per_agent" else (-3, -2, -1)
    return jnp.sum(losses.masked_mean(x * weight, weight > 0, axis=axis))


def rewards_and_ends(steps: Transition, kind: str) -> tuple[Array, Array]:
    """Rewards, and where returns end, `[L, M, N]`: each agent's own, or with "sum" and "mean" the team's for each.

    A team's return goes on while any agent does: what an agent's death brings the others counts for it too.
    """
    if kind == "individual":
        return steps.reward, steps.terminated
    team = losses.team_reward(steps.reward, kind), jnp.all(steps.terminated, axis=-1)
    reward, terminated = (jnp.broadcast_to(x[..., None], steps.reward.shape) for x in team)
    return reward, terminated


def of_team(batch: Trajectory, kind: str) -> Trajectory:
    """A batch in which everyone has the team's reward and return, and its weight: "sum" or "mean" is of rewards.

    A step of the team counts as long as one of its agents' does. Whose actions count is still said by `agent_mask`.
    """
    reward, terminated = rewards_and_ends(batch.steps, kind)
    weight = jnp.broadcast_to(replay.team_weight(masks.weight(batch))[..., None], reward.shape)
    return batch.replace(steps=batch.steps.replace(reward=reward, terminated=terminated), weight=weight)


def for_team(learner: Learner, kind: str) -> Learner:
    """A learner that learns from rewards of the team: `of_team` of each batch."""

    def update(state, batch, key):
        return learner.update(state, of_team(masks.readable_batch(batch), kind), key)

    return learner._replace(update=update)


def values_of_all(value: Array, counts: Array, kind: str) -> Array:
    """Values `[L, M, N]` to go on with: where agents share a reward, one that is gone has the mean of the others'.

    All value the return of the team, and only those of agents whose steps count are learnt. With none of them it is 0.
    """
    if kind == "individual":
        return value
    return jnp.where(counts, value, losses.masked_mean(value, counts, axis=-1)[..., None])


def as_metric(x: Any) -> Array:
    """A number as metrics have them."""
    return jnp.asarray(x, jnp.float32)


def with_critic_view(cfg: Any, view: str) -> Any:
    """The config with `view` in place of critic_view="auto"."""
    return dataclasses.replace(cfg, critic_view=view) if cfg.critic_view == "auto" else cfg


def with_central_critic(cfg: Any, name: str, independent: str) -> Any:
    """The config of an algorithm that is what it is by a critic of the state: one of the own view is refused."""
    if getattr(cfg, "critic_view", "obs") == "obs":
        raise ValueError(
            f"critic_view='obs' makes {independent} of {name}: leave it out for the state, or use {independent}."
        )
    return with_critic_view(cfg, "state")
