"""Actors and critics over observations: what each of them reads, and how one's outputs become a distribution."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jmarl import configs
from jmarl.networks import entities, heads, window
from jmarl.networks.sharing import groups_of, network, one_step, share
from jmarl.networks.torsos import Attended, Joined, Model, Output
from jmarl.types import EnvSpec, Network, Observation, Policy

# How a learner describes its networks: `model(outputs=.., is_image=..)` and `head(size, scale=..)` are
# `networks.Model` and `networks.Output` with everything else filled in.
Build = Callable[..., nn.Module]


class GaussianOutput(nn.Module):
    """Mean from the features, standard deviation from a parameter of its own: `[.., F] -> ([.., A], [.., A])`."""

    head: nn.Module
    size: int

    @nn.compact
    def __call__(self, x: Array | Attended) -> tuple[Array, Array]:
        mean = self.head(x)
        log_std = self.param("log_std", nn.initializers.zeros_init(), (self.size,))
        return mean, jnp.broadcast_to(log_std, mean.shape)


def from_config(cfg: configs.NetworkConfig, spec: EnvSpec | None = None) -> tuple[Build, Build]:
    """`model` and `head` as a learner's config describes them: cell, widths, activation, normalisation, initialiser.

    Args:
      cfg: `torso="entities"` is of networks that read agents' own views, and of no others.
      spec: of the environment, for a network that reads agents' own views; None for others.
    """
    common: dict[str, Any] = {
        "activation": cfg.activation,
        "layer_norm": cfg.layer_norm,
        "kernel_init": cfg.kernel_init,
    }
    model = functools.partial(
        Model,
        hidden_sizes=cfg.hidden_sizes,
        cell=cfg.cell if cfg.recurrent else None,
        cell_size=cfg.cell_size,
        cell_options=_cell_options(cfg),
        **common,
    )
    common["hidden_sizes"] = cfg.head_sizes
    if spec is None or cfg.torso != "entities":
        return model, functools.partial(Output, **common)
    layout = entities.layout_of(spec)
    if cfg.entity_size % cfg.entity_heads:
        raise ValueError(
            f"entity_heads={cfg.entity_heads} must divide entity_size={cfg.entity_size}, since heads share it equally: "
            f"choose another of the two."
        )
    torso = entities.EntityTorso(layout, cfg.entity_size, cfg.entity_heads, cfg.entity_blocks, cfg.kernel_init)
    common.update(targets=entities.target_actions(layout), num_actions=spec.num_actions)
    return functools.partial(model, entities=torso), functools.partial(entities.EntityOutput, **common)


def _cell_options(cfg: configs.NetworkConfig) -> dict[str, Any]:
    """What a cell of attention has besides its size, which its heads share."""
    if not cfg.recurrent or cfg.cell != "attention":
        return {}
    if cfg.cell_size % window.NUM_HEADS:
        raise ValueError(
            f"cell_size={cfg.cell_size} must be a multiple of {window.NUM_HEADS} with cell='attention', since as many "
            f"heads share it equally: choose {-(-cfg.cell_size // window.NUM_HEADS) * window.NUM_HEADS}."
        )
    if cfg.cell_window < 1:
        raise ValueError(f"cell_window={cfg.cell_window} must be at least 1: one step back.")
    return {"window": cfg.cell_window}


def policy_output(
    spec: EnvSpec, head: Build, name: str
) -> tuple[Callable[[int], nn.Module], Callable[[Any, Any], Any]]:
    """The actor's output layer for a number of actions, and the distribution that its output parametrises.

    Args:
      spec: of the environment.
      head: builds an output layer.
      name: "auto" (categorical or Gaussian), "categorical", "gaussian" or "tanh_normal".

    Returns:
      `(size) -> module`, and `(module's output, action_mask) -> distribution`. Gaussian actions are scaled so that
      mean 0 and standard deviation 1 are the middle and half the width of the action's range; they are not cut off
      at the bounds (environments do that), so that the log-probability is that of the sample.
    """
    known = ("auto", "categorical", "gaussian", "tanh_normal")
    if name not in known:
        raise ValueError(f"action_distribution={name!r} is unknown: choose one of {', '.join(known)}.")
    if name == "auto":
        name = "categorical" if spec.is_discrete else "gaussian"
    if spec.is_discrete != (name == "categorical"):
        kind, fitting = (
            ("discrete", "'categorical'") if spec.is_discrete else ("continuous", "'gaussian', 'tanh_normal'")
        )
        raise ValueError(
            f"action_distribution={name!r} does not fit the {kind} actions of {spec.name}: choose {fitting} or 'auto'."
        )
    if spec.is_discrete:
        return lambda size: head(size, scale=0.01), heads.categorical

    low, high = (bound.astype(np.float32) for bound in action_bounds(spec))
    centre, half = (low + high) / 2, (high - low) / 2
    # Padded dimensions get a distribution without parameters, which cancels in every probability ratio.
    is_real = np.arange(low.shape[1]) < np.asarray(_action_sizes(spec))[:, None]

    def distribution(output, action_mask):
        del action_mask
        mean, log_std = jax.tree.map(lambda x: jnp.where(is_real, x, 0.0), output)
        if name == "gaussian":
            return heads.gaussian(centre + half * mean, log_std + np.log(half))
        return heads.tanh_normal(mean, log_std, low, high)

    return lambda size: GaussianOutput(head(size, scale=0.01), size), distribution


def action_bounds(spec: EnvSpec) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and the highest value of each dimension of each agent's action, `[N, A]`, refused if not finite."""
    low, high = (np.asarray(bound, float) for bound in (spec.action_low, spec.action_high))
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise ValueError(
            f"{spec.name} has no finite action bounds, but {spec.action_low} to {spec.action_high}: give some to its "
            f"spec, since the actions of policies are stretched to them."
        )
    return low, high


def separate(actor: Network, critic: Network, distribution: Callable[[Any, Any], Any]) -> Policy:
    """Actor and critic with networks of their own: params and carries are {"actor": .., "critic": ..}.

    Args:
      actor: from observations to what `distribution` reads.
      critic: from observations to a value for each agent, `[L, M, N]`.
      distribution: `(actor's output, action_mask) -> distribution` over actions.
    """
    nets = {"actor": actor, "critic": critic}

    def init(key):
        return {name: net.init(k) for (name, net), k in zip(nets.items(), jax.random.split(key), strict=True)}

    def init_carry(batch_shape):
        return {name: net.init_carry(batch_shape) for name, net in nets.items()}

    def apply(params, carry, obs, first):
        carry, out = zip(*[nets[k].apply(params[k], carry[k], obs, first) for k in nets], strict=True)
        return dict(zip(nets, carry, strict=True)), out

    actor_step = one_step(actor)

    def act(params, carry, obs, first):
        own, output = actor_step(params["actor"], carry["actor"], obs, first)
        return {**carry, "actor": own}, output

    return _policy(Network(init, apply, init_carry), act, distribution)


def shared_torso(net: Network, distribution: Callable[[Any, Any], Any]) -> Policy:
    """Actor and critic on one torso (and one recurrent cell), both reading the agent's own view.

    Args:
      net: from observations to what `distribution` reads and a value for each agent `[L, M, N, 1]`.
      distribution: as for `separate`.
    """

    def apply(params, carry, obs, first):
        carry, (output, value) = net.apply(params, carry, obs, first)
        return carry, (output, value[..., 0])

    step = one_step(net)

    def act(params, carry, obs, first):
        carry, (output, _) = step(params, carry, obs, first)
        return carry, output

    return _policy(net._replace(apply=apply), act, distribution)


def _policy(net: Network, act: Callable[..., Any], distribution: Callable[[Any, Any], Any]) -> Policy:
    """From a network of `(output, value)`, and one step of its actor alone."""
    step = one_step(net)

    def sample(params, carry, obs, first, key):
        carry, (output, value) = step(params, carry, obs, first)
        pi = distribution(output, obs.action_mask)
        action = pi.sample(seed=key)
        # Of the action as it is stored, rounded and cut to its bounds: so the update finds a ratio of 1 at first.
        return carry, action, {"log_prob": pi.log_prob(action), "value": value}

    def mode(params, carry, obs, first):
        carry, output = act(params, carry, obs, first)
        return carry, distribution(output, obs.action_mask).mode()

    def evaluate(params, carry, obs, first, action):
        _, (output, value) = net.apply(params, carry, obs, first)
        pi = distribution(output, obs.action_mask)
        return pi.log_prob(action), pi.entropy(), value

    return Policy(net.init, net.init_carry, sample, mode, evaluate)


def of_own_view(spec: EnvSpec, outputs: Callable[[int], tuple[nn.Module, ...]], model: Build, sharing: str) -> Network:
    """A network that reads each agent's own view; `outputs(num_actions)` are its output layers."""

    def build(out):
        return model(outputs=outputs(out), is_image=len(spec.obs_shape) == 3)

    net = share(sharing, build, input_shapes=_view_shapes(spec), output_sizes=_action_sizes(spec))
    return net._replace(apply=lambda params, carry, obs, first: net.apply(params, carry, obs.agents, first))


def groups(spec: EnvSpec) -> tuple[int, ...]:
    """The group of each agent where `sharing="per_group"`: agents of equal views and actions are one."""
    return groups_of(list(zip(_view_shapes(spec), _action_sizes(spec), strict=True)))


def _require_readable(spec: EnvSpec, view: str, images: bool) -> None:
    """Refuses critics of a state that is not there, and of images beside vectors, or where there may be no `images`."""
    if view != "obs" and 0 in (spec.state_shape or (0,)):
        raise ValueError(
            f"Centralised critics read the global state, but {spec.name} has state_shape={spec.state_shape}: use "
            f"independent ones, or give it a state."
        )
    shapes = {"obs": [spec.obs_shape], "state_obs": [spec.state_shape, spec.obs_shape]}.get(view, [spec.state_shape])
    if not images and any(len(shape) == 3 for shape in shapes):
        raise ValueError(
            f"Critics with critic_view={view!r} read vectors here, but {spec.name} has images: make it with "
            f"flatten=True, or choose another view."
        )


def of_state_or_view(
    spec: EnvSpec, outputs: Callable[[int], tuple[nn.Module, ...]], model: Build, sharing: str, view: str
) -> Network:
    """A critic of observations, whose output is a value for each agent, `[L, M, N]`; `view` is what it reads."""
    num_agents = spec.num_agents
    is_image = len(spec.obs_shape if view == "obs" else spec.state_shape) == 3
    _require_readable(spec, view, images=view in ("obs", "state"))

    def build(out):
        return model(outputs=outputs(out), is_image=is_image)

    if view == "state":
        # One pass per environment serves all agents: an output for each.
        net = network(build(num_agents), spec.state_shape)
        return net._replace(apply=lambda params, carry, obs, first: net.apply(params, carry, obs.state, first))

    shapes: dict[str, list[tuple[int, ...]]] = {
        "obs": _view_shapes(spec),
        "state_id": [(spec.state_shape[0] + num_agents,)] * num_agents,
        "state_obs": [(spec.state_shape[0] + num_agents + spec.obs_shape[0],)] * num_agents,
    }
    net = share(sharing, build, input_shapes=shapes[view], output_sizes=(1,) * num_agents)

    def apply(params, carry, obs, first):
        read = obs.agents if view == "obs" else Joined(_critic_input(obs, view))
        carry, value = net.apply(params, carry, read, first)
        return carry, value[..., 0]

    return net._replace(apply=apply)


def of_actions(
    spec: EnvSpec,
    cfg: Any,
    *,
    view: str,
    num_features: int,
    num_outputs: int | None = None,
) -> Network:
    """A critic of actions, such as a learner's config describes it: its input is `(obs, actions)`.

    Actions are `[L, M, N, K]` for a view of "obs", else `Joined`, see `joint_actions`.

    Args:
      spec: of the environment.
      cfg: `recurrent`, `sharing` and what `from_config` reads. Memory is of observations: actions join after the cell,
        and at least one layer follows, or values could not depend on both together.
      view: what else it reads: "obs" for each agent's own view, or "state", and the agent's id where parameters are
        shared.
      num_features: K, features of the actions.
      num_outputs: None for values `[L, M, N]`, else `[L, M, N, num_outputs]`.
    """
    views = ("obs", "state", "state_obs")
    if view not in views:
        raise ValueError(f"critic_view={view!r} is unknown: choose one of {', '.join(views)}.")
    _require_readable(spec, view, images=False)
    build = _critic_of_actions(cfg, num_features)
    num_agents = spec.num_agents
    has_ids = cfg.sharing != "per_agent"  # networks of one's own know whose they are
    kinds = list(zip(_view_shapes(spec), _action_sizes(spec), strict=True))
    if view == "obs":
        widths = [shape[0] for shape, _ in kinds]
    else:
        extra = num_agents * has_ids + spec.obs_shape[0] * (view == "state_obs")
        widths = [spec.state_shape[0] + extra] * num_agents

    net = share(
        cfg.sharing,
        build,
        input_shapes=[(num_features + width,) for width in widths],
        output_sizes=(num_outputs or 1,) * num_agents,
        kinds=kinds,
    )

    def apply(params, carry, x, first):
        obs, actions = x
        # Actions first: groups cut padding off at the end.
        if view == "obs":
            read = jnp.concatenate([actions, obs.agents], axis=-1)
        else:
            state = _critic_input(obs, "state_id" if view == "state" else view, has_ids)
            read = actions.replace(parts=(*actions.parts, *state))
        carry, out = net.apply(params, carry, read, first)
        return carry, out[..., 0] if num_outputs is None else out

    return net._replace(apply=apply)


def of_joint_action(spec: EnvSpec, cfg: Any, num_features: int) -> Network:
    """One critic of the team: its input is `(obs, joint action [L, M, K])`, its output a value `[L, M]`.

    It reads the state and what everyone does in one pass, with one set of parameters. Otherwise as `of_actions`.
    """
    _require_readable(spec, "state", images=False)
    net = network(_critic_of_actions(cfg, num_features)(1), (num_features + spec.state_shape[0],))

    def apply(params, carry, x, first):
        obs, actions = x
        carry, out = net.apply(params, carry, jnp.concatenate([actions, obs.state], axis=-1), first)
        return carry, out[..., 0]

    return net._replace(apply=apply)


def _critic_of_actions(cfg: Any, num_features: int) -> Callable[[int], nn.Module]:
    """`(num_outputs) -> module` of actions beside what is observed. Actions join after a memory, before a layer."""
    if cfg.recurrent and not cfg.head_sizes:
        cfg = dataclasses.replace(cfg, head_sizes=(cfg.cell_size,))
    model, head = from_config(cfg)
    num_late = num_features if cfg.recurrent else 0
    return lambda num_outputs: model(outputs=(head(num_outputs, scale=1.0),), num_late=num_late)


def joint_actions(own: Array | None, others: Array) -> Joined:
    """For each agent everyone's actions `[L, M, N, N A]`: its own as in `own` `[L, M, N, A]`, the rest as in `others`.

    Where `own` is None, its own are in `others`, too.

    >>> joint_actions(jnp.zeros((1, 1, 2, 1)), jnp.array([[[[1.0], [2.0]]]])).joined()[0, 0]
    Array([[0., 2.],
           [1., 0.]], dtype=float32)
    """
    num_agents, size = others.shape[-2:]
    return Joined((others.reshape(*others.shape[:-2], 1, num_agents * size),), own, tuple(range(num_agents)))


def _critic_input(obs: Observation, view: str, has_ids: bool = True) -> tuple[Array, ...]:
    """What is to be joined: the state, ids and views, as "state_id" or "state_obs" say."""
    ids = jnp.eye(obs.agents.shape[-2], dtype=obs.state.dtype)[None, None]
    return obs.state[..., None, :], *[ids] * has_ids, *[obs.agents] * (view == "state_obs")


def _view_shapes(spec: EnvSpec) -> list[tuple[int, ...]]:
    if len(spec.obs_shape) == 3:
        return [spec.obs_shape] * spec.num_agents
    return [(size,) for size in spec.obs_sizes or spec.obs_shape * spec.num_agents]


def _action_sizes(spec: EnvSpec) -> tuple[int, ...]:
    return spec.action_sizes or (spec.num_actions or spec.action_size or 0,) * spec.num_agents
