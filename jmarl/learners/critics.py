"""Critics of actions: whose actions they read, what they remember, what they learn; and the learners that have them.

An independent critic reads its agent's own view and action, a centralised one the state and everyone's actions. A
counterfactual one has a value for each of its agent's own actions, beside the others'. `network` knows which
is which, and `Sequences` what actors and critics remember; a loss asks for outputs, values and targets.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from jmarl import configs, exploration, losses, masks, networks
from jmarl.configs import config
from jmarl.learners import parts, replay
from jmarl.networks import actor_critic, heads
from jmarl.types import (
    Carry,
    EnvSpec,
    Metrics,
    Network,
    Numeric,
    Observation,
    Params,
    TrainState,
    Trajectory,
    Transition,
    static,
)


@config
class CriticConfig(configs.OptimizerConfig, configs.NetworkConfig):
    """What actors that learn from replay, by critics of actions, share. Actions count in units of half their range.

    A critic of "obs" reads its agent's own view and action; one of the "state", or of "state_obs", everyone's actions.
    "auto" is obs, and the state for MADDPG, MATD3 and MASAC.
    """

    learning_rate: Numeric = 1e-3
    critic_learning_rate: Numeric | None = None  # of critics; None: learning_rate
    max_grad_norm: Numeric | None = 0.5
    gamma: Numeric = 0.99  # discount of future rewards
    tau: Numeric = 0.01  # share of the online networks in each update of the targets
    huber_delta: Numeric | None = None  # Huber loss of critics beyond this error; None: squared error
    num_critics: int = static(1)  # the lowest of so many values is the target
    critic_view: Literal["auto", "obs", "state", "state_obs"] = static(
        "auto"
    )  # what critics read; auto: as the algorithm's name says
    mask_actions: bool = static(True)  # critics read zeros in place of the actions of agents that do not act
    other_actions: Literal["stored", "current", "joint"] = static("stored")  # in actors' loss; joint: gradients to all
    team_reward: configs.Reward = static("individual")  # each agent's own reward, or sum or mean of all for each
    random_steps: Numeric = 0  # environment steps at the start with random actions
    burn_in: int = static(0)  # first steps that only warm up the memory, of sequences that start inside an episode


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


class ActorCritic(NamedTuple):
    """Actors, and critics of actions.

    Attributes:
      actor: a network over observations, to actions before tanh, logits, or what else `distribution` reads.
      critic: a network over `(obs, own, others)`, coded actions `[L, M, N, A]` of each agent and of those beside it.
        Its values are `[C, L, M, N]` of C critics, or `[C, L, M, N, A]`, one for each of an agent's own actions: of
        discrete ones with `own_action="output"`.
      code: how critics read actions.
      distribution: `(actor's output, action_mask) -> distribution`, over coded actions if they are continuous. A
        deterministic actor has one for discrete actions only.
    """

    actor: Network
    critic: Network
    code: ActionCode
    distribution: Callable[[Any, Array | None], heads.Distribution] = heads.categorical


OwnAction = Literal["output", "input"]  # of discrete actions: a value for each, or read as the others'


def network(spec: EnvSpec, cfg: Any, *, counterfactual: bool = False) -> Network:
    """One critic of `(obs, own, others)`, see `ActorCritic`, as `cfg.critic_view` and `cfg.mask_actions` say.

    A counterfactual one has a value for each own action, and does not read `own`.
    """
    size = spec.num_actions or spec.action_size or 0
    own_size, num_outputs = (0, size) if counterfactual else (size, None)
    is_central = cfg.critic_view != "obs"
    num_features = size * spec.num_agents if is_central else own_size
    net = actor_critic.of_actions(spec, cfg, view=cfg.critic_view, num_features=num_features, num_outputs=num_outputs)

    def apply(params, carry, x, first):
        obs, own, others = x
        is_same = own is others and not counterfactual
        if cfg.mask_actions:
            own, others = (jnp.where(obs.agent_mask[..., None], action, 0.0) for action in (own, others))
        if not is_central:
            return net.apply(params, carry, (obs, own[..., :own_size]), first)
        own = jnp.zeros_like(own) if counterfactual else own
        actions = actor_critic.joint_actions(None if is_same else own, others)
        return net.apply(params, carry, (obs, actions), first)

    return net._replace(apply=apply)


def of_each_action(value: Callable[[Array], Array], action: Float[Array, "L M N A"]) -> Array:
    """`value(own)` of each action in turn, as if all did it, `[.., A]`: a pass for each. `action` says the shape."""
    each = jnp.eye(action.shape[-1], dtype=action.dtype)
    return jax.vmap(lambda one: value(jnp.broadcast_to(one, action.shape)), out_axes=-1)(each)


def joint_network(spec: EnvSpec, cfg: Any) -> Network:
    """One critic of a team, of the state and its joint action, in the form of `network`.

    The joint action is `own`, each agent's part of it, and `others` are not read. Values are the same for each agent.
    """
    size = (spec.num_actions or spec.action_size or 0) * spec.num_agents
    net = actor_critic.of_joint_action(spec, cfg, size)

    def apply(params, carry, x, first):
        obs, action, _ = x
        if cfg.mask_actions:
            action = jnp.where(obs.agent_mask[..., None], action, 0.0)
        carry, value = net.apply(params, carry, (obs, action.reshape(*first.shape, size)), first)
        return carry, jnp.broadcast_to(value[..., None], obs.agent_mask.shape)

    return net._replace(apply=apply)


def memory(nets: ActorCritic) -> Callable[[Params, Carry, Observation, Array, Array], Carry]:
    """`(params, carry, obs, action, first) -> carry`: what critics remember after a step; nothing without memory."""
    if not jax.tree.leaves(jax.eval_shape(lambda: nets.critic.init_carry((1,)))):
        return lambda params, carry, obs, action, first: carry
    step = networks.one_step(nets.critic)

    def remember(params, carry, obs, action, first):
        coded = nets.code.encode(action)
        return step(params, carry, (obs, coded, coded), first)[0]

    return remember


# ----------------------------------------------------------------------------------------------------------- losses


class Sequences(NamedTuple):
    """A batch, and the networks that read it: what losses of actors and critics are made of.

    Attributes:
      steps: transitions `[L, M, ..]`, with `next_obs`.
      action: what was done, coded `[L, M, N, A]`.
      weight: whose step counts in losses of critics, `[L, M, N]`.
      acting: the same for those of actors.
      counting: whose value of the successor is there to go on with.
      carry: what "actor" and "critic" remember before the first step.
      nets, cfg: as in losses.
    """

    steps: Transition
    action: Array
    weight: Array
    acting: Array
    counting: Array
    carry: dict[str, Carry]
    nets: ActorCritic
    cfg: Any

    def output(self, params: Params) -> Any:
        """The actors', at each step."""
        return self._now("actor", params, self.steps.obs)

    def next_output(self, params: Params) -> Any:
        """The actors', at each step's true successor."""
        return self._next("actor", params, self.steps.obs, self.steps.next_obs)

    def values(self, params: Params, own: Array) -> Array:
        """The critics', of each agent's coded action `[L, M, N, A]`; the others' are as `cfg.other_actions` says."""
        return self._now("critic", params, (self.steps.obs, own, self._others(own)))

    def values_of_each(self, params: Params, own: Array) -> Array:
        """The critics', of each of an agent's own actions, beside the others' as in `values`."""
        if self.cfg.own_action == "output":
            return self.values(params, own)
        others = self._others(own)
        return of_each_action(lambda own: self._now("critic", params, (self.steps.obs, own, others)), own)

    def next_values(self, params: Params, action: Array) -> Array:
        """The critics', at each step's true successor, of everyone's coded actions there."""
        return self._next_values(params, action, action)

    def next_values_of_each(self, params: Params, action: Array) -> Array:
        """The critics', at each step's true successor, of each of an agent's own actions, beside the others' there."""
        if self.cfg.own_action == "output":
            return self.next_values(params, action)
        return of_each_action(lambda own: self._next_values(params, own, action), action)

    def target(self, next_value: Array) -> Array:
        """r + γ V(s') of each agent, `[L, M, N]`, or of the team as `cfg.team_reward` says. No gradient flows."""
        reward, terminated = parts.rewards_and_ends(self.steps, self.cfg.team_reward)
        next_value = parts.values_of_all(next_value, self.counting, self.cfg.team_reward)
        return jax.lax.stop_gradient(reward + self.cfg.gamma * (1.0 - terminated) * next_value)

    def _others(self, own: Array) -> Array:
        return {"stored": self.action, "current": jax.lax.stop_gradient(own), "joint": own}[self.cfg.other_actions]

    def _next_values(self, params: Params, own: Array, others: Array) -> Array:
        taken = self.steps.obs, self.action, self.action
        return self._next("critic", params, taken, (self.steps.next_obs, own, others))

    def _now(self, name: str, params: Params, x: Any) -> Any:
        return self._unroll(name, params, x, self.steps.first)

    def _next(self, name: str, params: Params, x: Any, next_x: Any) -> Any:
        if not jax.tree.leaves(self.carry[name]):
            return self._now(name, params, next_x)
        out = self._unroll(name, params, *replay.with_successors(x, next_x, self.steps.first))
        axis = getattr(self.nets, name).batch_axis - 1
        return jax.tree.map(lambda leaf: jax.lax.slice_in_dim(leaf, 1, None, axis=axis), out)

    def _unroll(self, name: str, params: Params, x: Any, first: Array) -> Any:
        net, burn_in = getattr(self.nets, name), self.cfg.burn_in
        carry = self.carry[name]
        return replay.unroll(net, params[name], carry, x, first, burn_in=burn_in, time_axis=net.batch_axis - 1)


def read(batch: Trajectory, nets: ActorCritic, cfg: Any) -> Sequences:
    """A batch as losses read it; networks start without a memory where it does not say what they remember."""
    carry, size = batch.carry, batch.steps.first.shape[1:]
    if not jax.tree.leaves(carry):
        carry = {"actor": nets.actor.init_carry(size), "critic": nets.critic.init_carry(size)}
    weight = replay.weights(batch, cfg.burn_in)
    return Sequences(
        steps=batch.steps,
        action=nets.code.encode(batch.steps.action),
        weight=weight,
        acting=jnp.where(batch.steps.obs.agent_mask, weight, 0.0),
        counting=masks.counting(batch),
        carry=carry,
        nets=nets,
        cfg=cfg,
    )


def critic_loss(
    params: Params, batch: Trajectory, target: Float[Array, "L M N"], *, nets: ActorCritic, cfg: CriticConfig
) -> tuple[Array, Metrics]:
    """TD errors of the critics, summed over critics, averaged over the agents whose steps count.

    Args:
      params: {"actor": of `nets.actor`, "critic": of `nets.critic`}; differentiate with respect to the critics.
      batch: sequences; none crosses an episode's end.
      target: what values should be, such as `ddpg_targets` or `sac_targets`.
      nets: networks.
      cfg: its leaves may be tracers.

    Returns:
      A scalar and its parts; "priority" is the mean absolute error of each sequence.
    """
    x = read(batch, nets, cfg)
    q = x.values(params, x.action)
    if q.ndim > target.ndim + 1:  # one for each own action
        q = losses.select(q, jnp.broadcast_to(x.steps.action, q.shape[:-1]))
    error = losses.value_loss(q, jnp.broadcast_to(target, q.shape), huber_delta=cfg.huber_delta)
    loss = parts.mean_loss(error, x.weight, cfg.sharing)
    return loss, {
        "loss/critic": loss,
        "value/q_taken": losses.masked_mean(q[0], x.weight > 0),
        "value/target": losses.masked_mean(target, x.weight > 0),
        "priority": replay.priority(q[0] - target, x.weight),
    }


def team_critic_loss(
    params: Params, batch: Trajectory, target: Float[Array, "L M N"], *, nets: ActorCritic, cfg: CriticConfig
) -> tuple[Array, Metrics]:
    """TD error of Q_tot, averaged over the steps of the team that count. Arguments and results as for `critic_loss`."""
    x = read(batch, nets, cfg)
    weight = replay.team_weight(x.weight)[..., None]
    q, y = x.values(params, x.action)[..., :1], target[..., :1]  # each agent's is the team's
    loss = parts.mean_loss(losses.value_loss(q, jnp.broadcast_to(y, q.shape), huber_delta=cfg.huber_delta), weight)
    return loss, {
        "loss/critic": loss,
        "value/q_taken": losses.masked_mean(q[0], weight > 0),
        "value/target": losses.masked_mean(y, weight > 0),
        "priority": replay.priority(q[0] - y, weight),
    }


# --------------------------------------------------------------------------------------------------------- learners

Optimizers = dict[str, optax.GradientTransformation]  # by the name of the parameters that each moves


def init_state(
    key: PRNGKeyArray, nets: ActorCritic, optimizers: Optimizers, targets: tuple[str, ...], **others: Params
) -> TrainState:
    """Before the first step. Slowly moving copies are kept of `targets`; `others` are parameters beside the nets'."""
    key_actor, key_critic = jax.random.split(key)
    params = {"actor": nets.actor.init(key_actor), "critic": nets.critic.init(key_critic), **others}
    return TrainState(
        params=params,
        target_params=jax.tree.map(jnp.copy, {name: params[name] for name in targets}),  # or a run is donated one twice
        opt_state={name: optimizers[name].init(params[name]) for name in params},
        step=jnp.int32(0),
    )


def improve(
    optimizers: Optimizers, state: TrainState, name: str, loss: Callable[[Params], tuple[Array, Any]]
) -> tuple[TrainState, Any, Metrics]:
    """One optimiser step of the parameters called `name`, on a loss of them; its aux, and the norm of its gradient."""
    part, opt_state, aux, norm = parts.improve(optimizers[name], loss, state.params[name], state.opt_state[name])
    params, opt_states = {**state.params, name: part}, {**state.opt_state, name: opt_state}
    return state.replace(params=params, opt_state=opt_states), aux, {f"loss/{name}_grad_norm": norm}


class Actors(NamedTuple):
    """How actors learn.

    Attributes:
      optimizer: `init` takes the parameters of all actors.
      improve: `(state, given, batch, noise, key) -> (state, aux of the loss, metrics)`; beside the actors, losses read
        the parameters `given`.
    """

    optimizer: optax.GradientTransformation
    improve: Callable[[TrainState, Params, Trajectory, Any, PRNGKeyArray | None], tuple[TrainState, Any, Metrics]]


def at_once(optimizer: optax.GradientTransformation, loss: Callable[[Params, Trajectory, Any], Any]) -> Actors:
    """All actors together, in one step on one loss, `(params, batch, noise) -> (scalar, aux)`."""

    def improve_all(state, given, batch, noise, key):
        del key
        optimizers = {"actor": optimizer}
        return improve(optimizers, state, "actor", lambda part: loss({**given, "actor": part}, batch, noise))

    return Actors(optimizer, improve_all)


def or_random(state: TrainState, cfg: CriticConfig, chosen: Array, anything: Array) -> Array:
    """What was chosen, or in the first `cfg.random_steps` environment steps anything."""
    if configs.is_number(cfg.random_steps) and cfg.random_steps == 0:
        return chosen  # and nobody needs to count
    return jnp.where(exploration.count(state) < cfg.random_steps, anything, chosen)
