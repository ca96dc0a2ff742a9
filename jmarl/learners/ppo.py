"""Proximal policy optimisation for many agents: IPPO, and MAPPO with a centralised critic; advantage actor-critic.

Each agent maximises the clipped surrogate of its own advantage; a critic regresses the λ-returns:

    L(θ, φ) = mean_m[ -min(ρ A, clip(ρ, 1 ± ε) A) ] - c_H mean_m[ H(π) ] + c_V mean_m[ l(V_φ, R) ],   ρ = π_θ / π_old,

with the means taken over agents that are alive. IPPO's critic reads the agent's own view, MAPPO's the global state.
With one agent, IPPO is PPO. With one step on each rollout, where ρ = 1, these are advantage actor-critic: IA2C, MAA2C.

References:
  Schulman et al., 2017, Proximal Policy Optimization Algorithms (https://arxiv.org/abs/1707.06347).
  de Witt et al., 2020, Is Independent Learning All You Need in the StarCraft Multi-Agent Challenge?
    (https://arxiv.org/abs/2011.09533).
  Yu et al., 2022, The Surprising Effectiveness of PPO in Cooperative Multi-Agent Games
    (https://arxiv.org/abs/2103.01955).
  Huang et al., 2022, A2C is a Special Case of PPO (https://arxiv.org/abs/2205.09123).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array

from jmarl import batching, losses, networks, normalize, optim, parallel
from jmarl.learners import checks
from jmarl.networks import actor_critic
from jmarl.types import (
    Carry,
    EnvSpec,
    Learner,
    Metrics,
    Network,
    Numeric,
    Params,
    TrainState,
    Trajectory,
    static,
)


@struct.dataclass(kw_only=True)
class PPOConfig:
    """Hyperparameters of IPPO and MAPPO."""

    gamma: Numeric = 0.99  # discount of future rewards
    gae_lambda: Numeric = 0.95  # mixes one-step (0) and Monte Carlo (1) advantages
    clip_eps: Numeric = 0.2  # trust region of the probability ratio
    ent_coef: Numeric = 0.01  # weight of the entropy bonus
    ent_coef_end: Numeric = 0.0  # its value (or floor) at the end of ent_coef_schedule
    ent_coef_schedule: str = static("constant")  # constant, linear or exponential
    vf_coef: Numeric = 0.5  # weight of the value loss
    value_clip_eps: Numeric | None = None  # clips the value's change as PPO2 does; None: no clipping
    huber_delta: Numeric | None = None  # Huber value loss beyond this error; None: squared error
    normalize_advantage: str = static("all")  # over "all" living agents, for each "agent" alone, or "none"
    normalize_value: bool = static(False)  # critic learns returns scaled by running moments
    value_norm_beta: Numeric = 0.99  # memory of the running moments, per iteration
    learning_rate: Numeric = 5e-4  # Adam step size
    critic_learning_rate: Numeric | None = None  # the critic's own; None: learning_rate
    learning_rate_end: Numeric = 0.0  # its value (or floor, exponential) at the end, as a fraction of the start
    learning_rate_schedule: str = static("constant")  # constant, linear or exponential, in optimiser steps
    horizon: Numeric | None = None  # calls of update until schedules end; None: make_train and run fill it in
    adam_eps: Numeric = 1e-5  # added to Adam's denominator
    max_grad_norm: Numeric | None = 0.5  # global norm to which gradients are clipped; None: never
    clip_separately: bool = static(False)  # actor's and critic's gradients have norms of their own
    num_epochs: int = static(4)  # passes over each rollout
    num_minibatches: int = static(4)  # parts of a pass; whole sequences are shuffled
    target_kl: Numeric | None = None  # an iteration stops learning beyond this KL to the old policy; None: never
    recurrent: bool = static(False)  # recurrent actor and critic
    recurrent_length: int | None = static(None)  # steps that gradients flow back; None: the whole rollout
    cell: str = static("gru")  # gru or lstm
    cell_size: int = static(128)  # width of the recurrent state
    hidden_sizes: tuple[int, ...] = static((64, 64))  # layers before the outputs; before the cell if recurrent
    head_sizes: tuple[int, ...] = static(())  # layers between cell (or torso) and outputs
    activation: str = static("tanh")  # tanh, relu, elu, gelu or silu
    layer_norm: bool = static(False)  # before each activation
    kernel_init: str = static("orthogonal")  # orthogonal, lecun or xavier
    sharing: str = static("shared")  # parameters: shared, per_agent or per_group (agents of equal sizes)
    critic_view: str = static("obs")  # what the critic reads: obs, state, state_id or state_obs
    shared_torso: bool = static(False)  # one torso for actor and critic; needs critic_view="obs"
    action_distribution: str = static("auto")  # auto, categorical, gaussian or tanh_normal


@struct.dataclass(kw_only=True)
class A2CConfig(PPOConfig):
    """Hyperparameters of IA2C and MAA2C: those of PPO, one step on each rollout. `clip_eps` changes nothing."""

    num_epochs: int = static(1)
    num_minibatches: int = static(1)
    normalize_advantage: str = static("none")


class Nets(NamedTuple):
    """What `ppo_loss` needs to know of the networks.

    Attributes:
      model: a network over observations `[L, M, ..]` whose output is `(policy, value [L, M, N])`.
      distribution: `(policy, action_mask) -> distribution`.
    """

    model: Network
    distribution: Callable[[Any, Array | None], Any]


@struct.dataclass(kw_only=True)
class Memory:
    """What acting leaves for the update: log-probabilities, values, and the carry *after* the step."""

    log_prob: Array
    value: Array
    carry: Carry


@struct.dataclass(kw_only=True)
class Targets:
    """What `ppo_loss` reads in `batch.steps.extras`, all `[L, M, N]`: values and targets on the critic's own scale."""

    log_prob: Array
    value: Array
    advantage: Array
    target: Array


def ppo_loss(params: Params, batch: Trajectory, *, nets: Nets, cfg: PPOConfig) -> tuple[Array, Metrics]:
    """Clipped surrogate, entropy bonus and value loss, averaged over living agents.

    Args:
      params: of `nets.model`.
      batch: sequences whose `steps.extras` are `Targets`.
      nets: networks.
      cfg: its leaves may be tracers.

    Returns:
      A scalar and its parts.
    """
    steps, old = batch.steps, batch.steps.extras
    alive = steps.obs.agent_mask

    def evaluate(params, carry, obs, first, action):
        _, (policy, value) = nets.model.apply(params, carry, obs, first)
        pi = nets.distribution(policy, obs.action_mask)
        return value, pi.log_prob(action), pi.entropy()

    evaluate = parallel.split(evaluate, (0, 1, 1, 1), (1, 1, 1))
    value, log_prob, entropy = evaluate(params, batch.carry, steps.obs, steps.first, steps.action)

    advantage = old.advantage
    if cfg.normalize_advantage != "none":
        axis = (0, 1) if cfg.normalize_advantage == "agent" else None
        advantage = losses.masked_normalize(advantage, alive, axis=axis)
    surrogate = losses.clipped_surrogate(log_prob, old.log_prob, advantage, cfg.clip_eps)
    value_error = losses.value_loss(
        value, old.target, old_value=old.value, clip_eps=cfg.value_clip_eps, huber_delta=cfg.huber_delta
    )

    actor_loss = losses.masked_mean(surrogate, alive)
    critic_loss = losses.masked_mean(value_error, alive)
    mean_entropy = losses.masked_mean(entropy, alive)
    loss = actor_loss - cfg.ent_coef * mean_entropy + cfg.vf_coef * critic_loss
    ratio_off = jnp.abs(jnp.exp(log_prob - old.log_prob) - 1) > cfg.clip_eps
    return loss, {
        "loss/total": loss,
        "loss/actor": actor_loss,
        "loss/critic": critic_loss,
        "policy/entropy": mean_entropy,
        "policy/approx_kl": losses.masked_mean(losses.approx_kl(log_prob, old.log_prob), alive),
        "policy/clip_fraction": losses.masked_mean(ratio_off.astype(value.dtype), alive),
    }


def ippo(spec: EnvSpec, cfg: PPOConfig, nets: Nets | None = None) -> Learner:
    """Independent PPO: each agent learns from its own view. At one agent this is PPO.

    Args:
      spec: of the environment.
      cfg: hyperparameters.
      nets: your own networks; by default those that `cfg` describes.

    >>> from jmarl import envs
    >>> env = envs.matrix_game([[8.0, -12.0], [-12.0, 0.0]])
    >>> learner = ippo(env.spec, PPOConfig(hidden_sizes=(8,)))
    >>> state = learner.init(jax.random.key(0))
    >>> sorted(state.params)
    ['actor', 'critic']
    """
    _validate(cfg)
    nets = default_nets(spec, cfg) if nets is None else nets
    model, model_step = nets.model, networks.one_step(parallel.split_network(nets.model))

    steps_per_update = cfg.num_epochs * cfg.num_minibatches
    learning_rate = optim.learning_rate(cfg, steps_per_update=steps_per_update)
    ent_coef = optim.over_run(
        "ent_coef",
        cfg.ent_coef_schedule,
        cfg.ent_coef,
        cfg.ent_coef_end,
        cfg.horizon,
        steps_per_update=steps_per_update,
    )
    optimizer = _optimizer(cfg, learning_rate)

    def init(key):
        params = model.init(key)
        return TrainState(
            params=params,
            opt_state=optimizer.init(params),
            step=jnp.int32(0),
            env_steps=jnp.int32(0),
            extras=normalize.init() if cfg.normalize_value else (),
        )

    def policy_and_value(params, carry, obs, first):
        carry, (policy, value) = model_step(params, carry, obs, first)
        return carry, nets.distribution(policy, obs.action_mask), value

    def act(state, carry, obs, first, key):
        carry, pi, value = policy_and_value(state.params, carry, obs, first)
        action = pi.sample(seed=key)
        # Of the action as it is stored, rounded and cut to its bounds: so the update finds a ratio of 1 at first.
        return action, carry, Memory(log_prob=pi.log_prob(action), value=value, carry=carry)

    def greedy(state, carry, obs, first):
        carry, pi, _ = policy_and_value(state.params, carry, obs, first)
        return pi.mode(), carry

    def targets(state, batch):
        """Advantages and value targets of a rollout, on the scales that the loss reads."""
        steps, memory = batch.steps, batch.steps.extras
        # The true successors of all steps in one pass: each is one step on from the carry that acting left.
        flat = lambda tree: jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)  # noqa: E731
        carry, next_obs, first = flat(memory.carry), flat(steps.next_obs), jnp.zeros(steps.first.size, bool)
        _, _, next_value = policy_and_value(state.params, carry, next_obs, first)
        value, next_value, norm = memory.value, next_value.reshape(memory.value.shape), state.extras
        if cfg.normalize_value:
            value, next_value = normalize.denormalize(norm, value), normalize.denormalize(norm, next_value)
        discount = cfg.gamma * (1.0 - steps.terminated)
        last = jnp.broadcast_to(steps.last[..., None], value.shape)
        advantage = losses.gae(steps.reward, discount, value, next_value, last, cfg.gae_lambda)
        target = advantage + value
        explained = losses.explained_variance(value, target, steps.obs.agent_mask)
        if cfg.normalize_value:
            norm = normalize.update(norm, target, steps.obs.agent_mask, cfg.value_norm_beta)
            target = normalize.normalize(norm, target)
        # Clipping compares what the critic says with what it said, on whatever scale: both are its outputs.
        return (
            Targets(log_prob=memory.log_prob, value=memory.value, advantage=advantage, target=target),
            norm,
            explained,
        )

    def minibatch_step(carry, batch):
        state, stopped = carry
        current = dataclasses.replace(cfg, ent_coef=ent_coef(state.step))
        grads, metrics = jax.grad(ppo_loss, has_aux=True)(state.params, batch, nets=nets, cfg=current)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        new = state.replace(params=optax.apply_updates(state.params, updates), opt_state=opt_state, step=state.step + 1)
        if cfg.target_kl is not None:
            stopped = stopped | (metrics["policy/approx_kl"] > cfg.target_kl)
            new = _unless(stopped, state, new)
        return (new, stopped), {**metrics, "loss/grad_norm": optax.global_norm(grads)}

    def update(state, batch, key):
        batching.require_every_step_counts(batch)
        target, norm, explained = targets(state, batch)
        steps = batch.steps.replace(extras=target, next_obs=None)
        length = batching.sequence_length(cfg.recurrent, cfg.recurrent_length, len(steps.first))
        sequences = batching.to_sequences(steps, batch.carry, batch.steps.extras.carry, length)
        (state, _), metrics = batching.minibatch_epochs(
            minibatch_step,
            (state.replace(extras=norm), jnp.bool_(False)),
            sequences,
            key,
            num_epochs=cfg.num_epochs,
            num_minibatches=cfg.num_minibatches,
        )
        metrics = jax.tree.map(jnp.mean, metrics)
        metrics["value/explained_variance"] = explained
        metrics["learning_rate"] = jnp.asarray(learning_rate(state.step), jnp.float32)
        return state, metrics

    return Learner(init, model.init_carry, act, greedy, update, learns_from="rollouts")


def mappo(spec: EnvSpec, cfg: PPOConfig, nets: Nets | None = None) -> Learner:
    """PPO with a centralised critic: `ippo` whose critic reads the global state.

    `critic_view="state"` gives one network with an output for each agent, evaluated once per environment; "state_id"
    appends the agent's one-hot id, "state_obs" its view and id, and both are evaluated for each agent.
    """
    critic_view = "state" if cfg.critic_view == "obs" else cfg.critic_view
    return ippo(spec, dataclasses.replace(cfg, critic_view=critic_view), nets)


def ia2c(spec: EnvSpec, cfg: A2CConfig, nets: Nets | None = None) -> Learner:
    """Independent advantage actor-critic: `ippo` with one step on each rollout, where nothing is clipped."""
    return ippo(spec, _require_one_step(cfg), nets)


def maa2c(spec: EnvSpec, cfg: A2CConfig, nets: Nets | None = None) -> Learner:
    """Advantage actor-critic with a centralised critic: `mappo` with one step on each rollout."""
    return mappo(spec, _require_one_step(cfg), nets)


# ----------------------------------------------------------------------------------------------------- the parts


def _require_one_step(cfg: PPOConfig) -> PPOConfig:
    if cfg.num_epochs * cfg.num_minibatches != 1:
        raise ValueError(
            f"Advantage actor-critic takes one step on each rollout, but num_epochs={cfg.num_epochs} and "
            f"num_minibatches={cfg.num_minibatches}: leave both at 1, or use ippo or mappo."
        )
    return cfg


def _unless(stopped: Array, old: TrainState, new: TrainState) -> TrainState:
    """The new state, or if stopped the old one, in which only what schedules count goes on."""

    def is_count(x):
        return isinstance(x, optax.ScaleByScheduleState)

    def choose(old, new):
        return new if is_count(new) else jnp.where(stopped, old, new)

    return jax.tree.map(choose, old, new, is_leaf=is_count).replace(step=new.step)


def default_nets(spec: EnvSpec, cfg: PPOConfig) -> Nets:
    """The networks that `cfg` describes."""
    model, head = actor_critic.from_config(cfg)
    policy, distribution = actor_critic.policy(spec, head, cfg.action_distribution)
    if cfg.shared_torso:
        net = actor_critic.shared_torso(spec, model, policy, head, cfg.sharing)
    else:
        net = actor_critic.separate(spec, model, policy, head, cfg.sharing, cfg.critic_view)
    return Nets(net, distribution)


def _optimizer(cfg: PPOConfig, learning_rate: optim.Schedule) -> optax.GradientTransformation:
    """Clipped Adam; the critic may have a rate and a norm of its own."""
    if not cfg.clip_separately and cfg.critic_learning_rate is None:
        return optim.optimizer(learning_rate, eps=cfg.adam_eps, max_grad_norm=cfg.max_grad_norm)
    critic_rate = optim.learning_rate(
        cfg, start=cfg.critic_learning_rate, steps_per_update=cfg.num_epochs * cfg.num_minibatches
    )
    rates = {"actor": learning_rate, "critic": critic_rate}
    own_norm = cfg.max_grad_norm if cfg.clip_separately else None
    parts = {name: optim.optimizer(rate, eps=cfg.adam_eps, max_grad_norm=own_norm) for name, rate in rates.items()}
    both = optax.partition(parts, {name: name for name in parts})
    if cfg.clip_separately or cfg.max_grad_norm is None:
        return both
    return optax.chain(optax.clip_by_global_norm(cfg.max_grad_norm), both)


def _validate(cfg: PPOConfig) -> None:
    options = {"normalize_advantage": ("all", "agent", "none"), "critic_view": actor_critic.CRITIC_VIEWS}
    checks.validate(cfg, options)
    if cfg.shared_torso and cfg.critic_view != "obs":
        raise ValueError(
            f"shared_torso=True needs critic_view='obs', got {cfg.critic_view!r}: actor and critic must read the same."
        )
    if cfg.shared_torso and (cfg.clip_separately or cfg.critic_learning_rate is not None):
        raise ValueError(
            "shared_torso=True has one optimiser: leave out clip_separately and critic_learning_rate, or set "
            "shared_torso=False."
        )
