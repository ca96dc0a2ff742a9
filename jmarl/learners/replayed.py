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


def after_burn_in(batch: Trajectory, burn_in: int) -> tuple[Any, Array]:
    """Steps to learn from, and their weights `[L, M]`: 0 for padding and for what follows an episode's end."""
    ended = jnp.cumsum(batch.steps.last, axis=0) - batch.steps.last > 0
    weight = jnp.where(ended, 0.0, 1.0 if batch.weight is None else batch.weight)
    return jax.tree.map(lambda x: x[burn_in:], (batch.steps, weight))


def split(tree: Any, index: int) -> tuple[Any, Any]:
    """The first `index` time steps, and the rest."""
    return jax.tree.map(lambda x: x[:index], tree), jax.tree.map(lambda x: x[index:], tree)


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
    bounds = np.asarray([spec.action_low, spec.action_high], float)
    if not np.isfinite(bounds).all():
        raise ValueError(
            f"{spec.name} has infinite action bounds, {spec.action_low} to {spec.action_high}: give its spec finite "
            f"ones, since actors end in a tanh that is stretched to them."
        )
    # Strongly typed in the precision of the moment.
    centre, half = jnp.asarray(bounds.mean(0), float), jnp.asarray((bounds[1] - bounds[0]) / 2, float)
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
    """A batch as the losses of actors and critics read it: steps to learn from, and what comes before them.

    Attributes:
      steps, obs, next_obs: `[L, M, ..]`, burn-in left out.
      action: coded actions `[L, M, N, A]`, as critics see them.
      mask: weights `[L, M, N]`, 0 for padding and inactive agents.
      networks, carry: actor and critic by name, and what they remember before the burn-in.
      head, head_first: the burn-in.
    """

    steps: Transition
    obs: Observation
    next_obs: Observation
    action: Array
    mask: Array
    networks: dict[str, Network]
    carry: dict[str, Carry]
    head: dict[str, Any]
    head_first: Array

    @staticmethod
    def of(batch: Trajectory, nets: Any, cfg: Any, features: Callable[[Any, Array, Array], Array] = action_features):
        """From a batch; `features` are what critics read of the actions taken."""
        steps, weight = after_burn_in(batch, cfg.burn_in)
        action = visible(cfg, nets.code.encode(batch.steps.action), batch.steps.obs)
        head, tail = split((batch.steps.obs, batch.steps.first, action), cfg.burn_in)
        named = {"actor": nets.actor, "critic": nets.critic}
        carry = batch.carry
        if carry == ():
            carry = {name: net.init_carry((batch.steps.first.shape[1],)) for name, net in named.items()}
        return Inputs(
            steps=steps,
            obs=steps.obs,
            next_obs=steps.next_obs,
            action=tail[2],
            mask=weight[..., None] * steps.obs.agent_mask,
            networks=named,
            carry=carry,
            head={"actor": head[0], "critic": (head[0], features(cfg, head[2], head[2]))},
            head_first=head[1],
        )

    def _memory(self, name: str, params: Params) -> Carry:
        """After the burn-in, without gradient."""
        carry = self.carry[name]
        if not len(self.head_first) or not jax.tree.leaves(carry):
            return carry
        carry, _ = self.networks[name].apply(params[name], carry, self.head[name], self.head_first)
        return jax.lax.stop_gradient(carry)

    def now(self, name: str, params: Params, x: Any) -> Any:
        """Outputs of a network at each step."""
        return self.networks[name].apply(params[name], self._memory(name, params), x, self.steps.first)[1]

    def next(self, name: str, params: Params, x: Any, next_x: Any) -> Any:
        """Outputs of a network at each step's true successor."""
        net, carry, first = self.networks[name], self._memory(name, params), self.steps.first
        if not jax.tree.leaves(carry):
            return net.apply(params[name], carry, next_x, first)[1]
        sequence, starts = with_successors(x, next_x, first)
        out = net.apply(params[name], carry, sequence, starts)[1]
        time_axis = 1 if name == "critic" else 0  # several critics come first
        return jax.tree.map(lambda leaf: jax.lax.slice_in_dim(leaf, 1, None, axis=time_axis), out)


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


def rewards(steps: Transition, kind: str | None) -> Array:
    """Rewards of the agents, or with "sum" and "mean" those of the team for each, `[L, M, N]`."""
    if kind in (None, "individual"):
        return steps.reward
    return jnp.broadcast_to(losses.team_reward(steps.reward, kind)[..., None], steps.reward.shape)


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


_AT_LEAST_ONE = (
    "cell_size",
    "n_step",
    "num_critics",
    "num_epochs",
    "num_minibatches",
    "policy_delay",
    "recurrent_length",
)


def validate(spec: EnvSpec, cfg: Any, options: dict[str, tuple[Any, ...]]) -> None:
    """Static facts of a config, and numbers that are not tracers; `options` are the learner's own."""
    options = {
        "other_actions": ("stored", "current", "joint"),
        "critic_view": ("obs", "state", "state_obs"),
        "team_reward": ("individual", "sum", "mean"),
        "activation": tuple(networks.ACTIVATIONS),
        "kernel_init": tuple(networks.INITIALIZERS),
        "cell": tuple(networks.CELLS),
        "sharing": networks.SHARING,
        **options,
    }
    for name in cfg.__dataclass_fields__:
        value = getattr(cfg, name)
        if value is not None and value not in options.get(name, (value,)):
            raise ValueError(f"{name}={value!r} is unknown here: choose one of {', '.join(options[name])}.")
        if name in ("hidden_sizes", "head_sizes", "critic_sizes") and any(size < 1 for size in value):
            raise ValueError(f"{name}={value} must hold positive widths.")
        if name in _AT_LEAST_ONE and value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
        if (
            name in ("tau", "gamma", "epsilon_start", "epsilon_end")
            and not isinstance(value, jax.Array)
            and not 0 <= value <= 1
        ):
            raise ValueError(f"{name}={value} must lie in [0, 1].")
        if "noise_" in name and isinstance(value, int | float) and value < 0:
            raise ValueError(f"{name}={value} must not be negative: choose 0 for no noise.")
    burn_in = getattr(cfg, "burn_in", 0)
    if burn_in < 0 or (burn_in and not cfg.recurrent):
        raise ValueError(f"burn_in={burn_in} warms up recurrent networks: set recurrent=True, or burn_in=0.")
