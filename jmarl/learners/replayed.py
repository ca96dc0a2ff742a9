"""What learners from replay share: which steps count, burn-in, target networks, actions as critics see them."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from jmarl import losses, networks, optim, parallel
from jmarl.networks import actor_critic
from jmarl.types import Carry, EnvSpec, Network, Numeric, Observation, Params, Trajectory, Transition


def update_target(target_params: Params, params: Params, step: Array, interval: int, tau: Numeric) -> Params:
    """θ⁻ ← θ⁻ + τ (θ - θ⁻) after every `interval` optimiser steps; a copy for τ = 1."""
    moved = optax.incremental_update(params, target_params, tau)
    if interval == 1:
        return moved
    return jax.tree.map(lambda new, old: jnp.where(step % interval == 0, new, old), moved, target_params)


def weights(batch: Trajectory, burn_in: int = 0) -> Array:
    """Weights of steps, `[L, M]`: 0 for padding, for what follows an episode's end and for the burn-in.

    The first `burn_in` steps of a sequence that starts inside an episode only warm up its memory. The memory of one
    that starts an episode is exact from its first step on, so it needs none.
    """
    first, last = batch.steps.first, batch.steps.last
    if burn_in >= len(first):
        raise ValueError(
            f"burn_in={burn_in} leaves nothing to learn from in sequences of {len(first)} steps: lower it, or raise "
            f"the buffer's sequence_length."
        )
    ended = jnp.cumsum(last, axis=0) - last > 0
    warms_up = (jnp.arange(len(first)) < burn_in)[:, None] & ~first[0]
    return jnp.where(ended | warms_up, 0.0, 1.0 if batch.weight is None else batch.weight)


def blank_or_recorded(net: Network, batch: Trajectory) -> Carry:
    """What a network remembers before each sequence: nothing, where the batch does not say."""
    recorded = jax.tree.leaves(batch.carry)
    return batch.carry if recorded else net.init_carry((batch.steps.first.shape[1],))


def unroll(
    net: Network, params: Params, carry: Carry, x: Any, first: Array, *, burn_in: int = 0, time_axis: int = 0
) -> Any:
    """Outputs of a network at each step of `x` `[L, M, ..]`; no gradient flows back into a burn-in, see `weights`."""
    if not burn_in or not jax.tree.leaves(carry):
        return net.apply(params, carry, x, first)[1]
    carry, warm = net.apply(params, carry, *jax.tree.map(lambda leaf: leaf[:burn_in], (x, first)))

    def cut(leaf):
        starts_episode = first[0].reshape(-1, *[1] * (leaf.ndim - 1))
        return jnp.where(starts_episode, leaf, jax.lax.stop_gradient(leaf))

    _, out = net.apply(params, jax.tree.map(cut, carry), *jax.tree.map(lambda leaf: leaf[burn_in:], (x, first)))
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=time_axis), warm, out)


def with_successors(x: Any, next_x: Any, first: Array) -> tuple[Any, Array]:
    """x_0, x'_0, x'_1, ... `[L + 1, M, ..]`, and where a memory starts anew: one pass for networks that have one.

    Inside an episode, a step's successor is the next step.
    """
    sequence = jax.tree.map(lambda x, y: jnp.concatenate([x[:1], y]), x, next_x)
    return sequence, jnp.concatenate([first[:1], jnp.zeros_like(first)])


def priority(td_error: Array, mask: Array) -> Array:
    """Mean absolute error of each sequence, `[M]`."""
    is_real = mask > 0
    return jax.lax.stop_gradient(
        jnp.sum(jnp.abs(td_error) * is_real, axis=(0, 2)) / jnp.maximum(jnp.sum(is_real, axis=(0, 2)), 1)
    )


# ------------------------------------------------------------------------------------- off-policy actors and critics


class ActionCode(NamedTuple):
    """How critics read actions: one-hot, or scaled so that -1 and 1 are the bounds. Padding is 0.

    Attributes:
      encode: actions `[.., N]` or `[.., N, A]` to `[.., N, A]`.
      decode: the inverse.
      is_discrete: one-hot.
      is_real: `[N, A]`, False for padding.
    """

    encode: Callable[[Array], Array]
    decode: Callable[[Array], Array]
    is_discrete: bool
    is_real: np.ndarray


def action_code(spec: EnvSpec) -> ActionCode:
    """The code of an environment's actions."""
    size = spec.num_actions or spec.action_size or 0
    sizes = spec.action_sizes or (size,) * spec.num_agents
    is_real = np.arange(size) < np.asarray(sizes)[:, None]
    if spec.is_discrete:
        return ActionCode(
            encode=lambda action: jax.nn.one_hot(action, size),
            decode=lambda code: jnp.argmax(code, axis=-1).astype(jnp.int32),
            is_discrete=True,
            is_real=is_real,
        )
    low, high = actor_critic.action_bounds(spec)
    # Strongly typed in the precision of the moment.
    centre, half = jnp.asarray((low + high) / 2, float), jnp.asarray((high - low) / 2, float)
    return ActionCode(
        encode=lambda action: jnp.where(is_real, (action - centre) / half, 0.0),
        decode=lambda code: centre + half * code,
        is_discrete=False,
        is_real=is_real,
    )


def action_critic(spec: EnvSpec, cfg: Any, code: ActionCode, counterfactual: bool = False) -> Network:
    """`cfg.num_critics` critics of `(obs, features)`: values `[C, L, M, N]` of `action_features`.

    If `counterfactual`, values `[C, L, M, N, A]` of each of an agent's own actions, and `counterfactual_features`.
    """
    size = code.is_real.shape[1]
    own = 0 if counterfactual else size
    critic = actor_critic.of_actions(
        spec,
        cfg,
        view=cfg.critic_view,
        num_features=own if cfg.critic_view == "obs" else size * spec.num_agents,
        num_outputs=size if counterfactual else None,
    )
    return networks.ensemble(parallel.split_network(critic), cfg.num_critics)


def centralized(cfg: Any) -> Any:
    """The same config with critics of the state and everyone's actions, unless it asks for "state_obs"."""
    return dataclasses.replace(cfg, critic_view="state") if cfg.critic_view == "obs" else cfg


def action_features(cfg: Any, own: Array, others: Array) -> Array:
    """What critics read of coded actions `[.., N, A]`: each agent's own, or with a centralised critic everyone's."""
    return own if cfg.critic_view == "obs" else actor_critic.joint_actions(own, others)


def visible(cfg: Any, action: Array, obs: Observation) -> Array:
    """Coded actions as critics see them: zeros for inactive agents, unless the config says otherwise."""
    return jnp.where(obs.agent_mask[..., None], action, 0.0) if cfg.mask_actions else action


def counterfactual_features(cfg: Any, own: Array, others: Array) -> Array:
    """What critics with a value for each own action read: the others' actions, with zeros in place of one's own."""
    return own[..., :0] if cfg.critic_view == "obs" else actor_critic.joint_actions(jnp.zeros_like(own), others)


def others_actions(cfg: Any, stored: Array, current: Array) -> Array:
    """The other agents' actions in an actor's loss, as `cfg.other_actions` says."""
    return {"stored": stored, "current": jax.lax.stop_gradient(current), "joint": current}[cfg.other_actions]


class Inputs(NamedTuple):
    """A batch as the losses of actors and critics read it.

    Attributes:
      steps, obs, next_obs: `[L, M, ..]`.
      action: coded actions `[L, M, N, A]`, as critics see them.
      mask: weights `[L, M, N]`, 0 for padding, burn-in and inactive agents.
      networks, carry: actor and critic by name, and what they remember before the first step.
      burn_in: as in the config.
    """

    steps: Transition
    obs: Observation
    next_obs: Observation
    action: Array
    mask: Array
    networks: dict[str, Network]
    carry: dict[str, Carry]
    burn_in: int

    @staticmethod
    def of(batch: Trajectory, nets: Any, cfg: Any) -> "Inputs":
        """From a batch."""
        steps: Any = batch.steps
        named = {"actor": nets.actor, "critic": nets.critic}
        carry = batch.carry
        if carry == ():
            carry = {name: blank_or_recorded(net, batch) for name, net in named.items()}
        return Inputs(
            steps=steps,
            obs=steps.obs,
            next_obs=steps.next_obs,
            action=visible(cfg, nets.code.encode(steps.action), steps.obs),
            mask=weights(batch, cfg.burn_in)[..., None] * steps.obs.agent_mask,
            networks=named,
            carry=carry,
            burn_in=cfg.burn_in,
        )

    def now(self, name: str, params: Params, x: Any) -> Any:
        """Outputs of a network at each step."""
        return self._unroll(name, params, x, self.steps.first)

    def next(self, name: str, params: Params, x: Any, next_x: Any) -> Any:
        """Outputs of a network at each step's true successor."""
        if not jax.tree.leaves(self.carry[name]):
            return self._unroll(name, params, next_x, self.steps.first)
        out = self._unroll(name, params, *with_successors(x, next_x, self.steps.first))
        return jax.tree.map(lambda leaf: jax.lax.slice_in_dim(leaf, 1, None, axis=_TIME_AXIS[name]), out)

    def _unroll(self, name: str, params: Params, x: Any, first: Array) -> Any:
        net, carry, axis = self.networks[name], self.carry[name], _TIME_AXIS[name]
        return unroll(net, params[name], carry, x, first, burn_in=self.burn_in, time_axis=axis)


_TIME_AXIS = {"actor": 0, "critic": 1}  # of outputs: several critics come first


def critic_memory(nets: Any, cfg: Any, features: Callable[[Any, Array, Array], Array] = action_features):
    """`(params, carry, obs, action, first) -> carry`: what critics remember after a step; nothing without memory."""
    if not jax.tree.leaves(jax.eval_shape(lambda: nets.critic.init_carry((1,)))):
        return lambda params, carry, obs, action, first: carry
    step = networks.one_step(nets.critic)

    def remember(params, carry, obs, action, first):
        coded = nets.code.encode(action)
        return step(params, carry, (obs, features(cfg, coded, coded)), first)[0]

    return remember


def improve(optimizer: optax.GradientTransformation, params: Params, opt_state: Any, loss: Any):
    """One optimiser step on `loss(params) -> (scalar, aux)`: new parameters and state, aux, norm of the gradient."""
    grads, aux = jax.grad(loss, has_aux=True)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, aux, optax.global_norm(grads)


def rewards_and_ends(steps: Transition, kind: str | None) -> tuple[Array, Array]:
    """Rewards, and where returns end, `[L, M, N]`: each agent's own, or with "sum" and "mean" the team's for each.

    A team's return goes on while any agent does: what an agent's death brings the others counts for it too.
    """
    if kind in (None, "individual"):
        return steps.reward, steps.terminated
    team = losses.team_reward(steps.reward, kind), jnp.all(steps.terminated, axis=-1)
    reward, terminated = (jnp.broadcast_to(x[..., None], steps.reward.shape) for x in team)
    return reward, terminated


def values_of_all(value: Array, agent_mask: Array, kind: str | None) -> Array:
    """Values `[L, M, N]` to go on with: where agents share a reward, an inactive one's is the mean of the active ones'.

    All value the return of the team, and only those of active agents are learnt. Where nobody is active it is 0.
    """
    if kind in (None, "individual"):
        return value
    return jnp.where(agent_mask, value, losses.masked_mean(value, agent_mask, axis=-1)[..., None])


def mean_loss(x: Array, mask: Array, sharing: str) -> Array:
    """Weighted mean of `x` `[.., L, M, N]`, summed over axes before; `mask` `[L, M, N]` holds the weights.

    Over all agents; where each has parameters of its own, the sum of each one's mean: then each learns as if alone.
    """
    mask = jnp.broadcast_to(mask, x.shape)
    axis = (-3, -2) if sharing == "per_agent" else (-3, -2, -1)
    return jnp.sum(losses.masked_mean(x * mask, mask > 0, axis=axis))


def optimizer(cfg: Any, rate: optim.Schedule) -> optax.GradientTransformation:
    """Clipped Adam, one for each agent where each has parameters of its own."""
    shared = optim.optimizer(rate, eps=cfg.adam_eps, max_grad_norm=cfg.max_grad_norm)
    return optim.per_agent(shared) if cfg.sharing == "per_agent" else shared
