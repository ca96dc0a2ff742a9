"""Proximal policy optimisation for many agents: IPPO, and MAPPO with a centralised critic; advantage actor-critic.

Each agent maximises the clipped surrogate of its own advantage; a critic regresses the λ-returns:

    L(θ, φ) = mean_m[ -min(ρ A, clip(ρ, 1 ± ε) A) ] - c_H mean_m[ H(π) ] + c_V mean_m[ l(V_φ, R) ],   ρ = π_θ / π_old,

with the means taken over agents that act, and for the critic over those whose return goes on. IPPO's critic reads the
agent's own view, MAPPO's the global state. With one agent, IPPO is PPO. With one step on each rollout, where ρ = 1,
these are advantage actor-critic: IA2C, MAA2C.

Advantages are GAE's, by the values at the start, or with advantage="vtrace" V-trace's: made anew for each pass over the
rollout, by values and ratios of the policy as it has become.

References:
  Schulman et al., 2017, Proximal Policy Optimization Algorithms (https://arxiv.org/abs/1707.06347).
  de Witt et al., 2020, Is Independent Learning All You Need in the StarCraft Multi-Agent Challenge?
    (https://arxiv.org/abs/2011.09533).
  Yu et al., 2022, The Surprising Effectiveness of PPO in Cooperative Multi-Agent Games
    (https://arxiv.org/abs/2103.01955).
  Espeholt et al., 2018, IMPALA, eq. 1 (https://arxiv.org/abs/1802.01561).
  Huang et al., 2022, A2C is a Special Case of PPO (https://arxiv.org/abs/2205.09123).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Float

from jmarl import configs, losses, masks, normalize, optim, parallel
from jmarl.configs import config
from jmarl.learners import checks, on_policy, parts
from jmarl.networks import actor_critic, mixers
from jmarl.types import (
    Config,
    EnvSpec,
    Learner,
    Metrics,
    Mixer,
    Moments,
    Numeric,
    Params,
    Policy,
    Replaceable,
    TrainState,
    Trajectory,
    static,
)

CriticView = Literal["auto", "obs", "state", "state_id", "state_obs"]


@config
class ClippedConfig(configs.OptimizerConfig):
    """What targets and losses of a clipped surrogate read, whatever the networks are."""

    gamma: Numeric = 0.99  # discount of future rewards
    gae_lambda: Numeric = 0.95  # mixes one-step (0) and Monte Carlo (1) advantages
    clip_eps: Numeric = 0.2  # trust region of the probability ratio
    ent_coef: Numeric = 0.01  # weight of the entropy bonus
    ent_coef_end: Numeric = 0.0  # its value (or floor) at the end of ent_coef_schedule
    ent_coef_schedule: configs.Schedule = static("constant")  # its course over the run, in optimiser steps
    value_clip_eps: Numeric | None = None  # clips the value's change as PPO2 does; None: no clipping
    huber_delta: Numeric | None = None  # Huber value loss beyond this error; None: squared error
    normalize_advantage: Literal["all", "agent", "none"] = static("all")  # over all who act, or for each agent alone
    normalize_value: bool = static(False)  # critic learns returns scaled by running moments
    value_norm_beta: Numeric = 0.99  # memory of the running moments, per iteration
    max_grad_norm: Numeric | None = 0.5
    action_distribution: Literal["auto", "categorical", "gaussian", "tanh_normal"] = static("auto")  # of the policy


@config
class JointLossConfig(Replaceable):
    """Actor and critic learn from one loss."""

    advantage: Literal["gae", "vtrace"] = static("gae")  # vtrace: anew for each pass, as far as the policy has moved
    max_rho: Numeric = 1.0  # of vtrace: to which ratios of new to old probabilities are cut in TD errors
    max_c: Numeric = 1.0  # of vtrace: and in traces
    vf_coef: Numeric = 0.5  # weight of the value loss
    target_kl: Numeric | None = None  # an iteration stops learning beyond this KL to the old policy; None: never


@config
class SurrogateConfig(ClippedConfig, configs.RolloutConfig, configs.NetworkConfig):
    """What learners that clip a surrogate share, of actors and critics.

    A critic of the "state" is one network with an output for each agent, evaluated once per environment; "state_id"
    appends the agent's one-hot id, "state_obs" its view and id, and both are evaluated for each agent.
    """

    critic_learning_rate: Numeric | None = None  # the critic's own; None: learning_rate
    cell_size: int = static(128)
    activation: configs.Activation = static("tanh")
    critic_view: CriticView = static("auto")  # what the critic reads; auto: obs, and the state for MAPPO and MAA2C


@config
class PPOConfig(JointLossConfig, SurrogateConfig):
    """Hyperparameters of IPPO and MAPPO.

    A critic of the "state" is one network with an output for each agent, evaluated once per environment; "state_id"
    appends the agent's one-hot id, "state_obs" its view and id, and both are evaluated for each agent.
    """

    clip_separately: bool = static(False)  # actor's and critic's gradients have norms of their own
    shared_torso: bool = static(False)  # one torso for actor and critic of the agent's own view


@config
class A2CConfig(PPOConfig):
    """Hyperparameters of IA2C and MAA2C: those of PPO, one step on each rollout. `clip_eps` changes nothing."""

    num_epochs: int = static(1)
    num_minibatches: int = static(1)
    normalize_advantage: Literal["all", "agent", "none"] = static("none")


@struct.dataclass(kw_only=True)
class PPOTargets:
    """What `ppo_loss` compares with, all `[L, M, N]`. With an advantage of your own: `targets.replace(advantage=mine)`.

    Attributes:
      log_prob: of the action, by the policy that took it.
      value: the critic's output then.
      advantage: of the action; the loss normalises it.
      value_target: what the critic's output should be.
    """

    log_prob: Float[Array, "L M N"]
    value: Float[Array, "L M N"]
    advantage: Float[Array, "L M N"]
    value_target: Float[Array, "L M N"]


def ppo_targets(
    params: Params, batch: Trajectory, moments: dict[str, Moments] | None = None, *, nets: Policy, cfg: Config
) -> tuple[PPOTargets, dict[str, Moments], Metrics]:
    """Advantages and value targets of a rollout, on the scales that the loss reads.

    GAE by the values that were measured, or V-trace by those of `params`, each agent with the ratio of its own action.

    Args:
      params: of `nets`, before the rollout is learnt from; for V-trace, before this pass.
      batch: a rollout with `next_obs`, and with "log_prob" and "value" measured.
      moments: {"value": moments of returns} if `cfg.normalize_value`: the critic's outputs are in their units.
      nets: the policy.
      cfg: a `ClippedConfig`, and a `JointLossConfig` for V-trace; its leaves may be tracers.

    Returns:
      The targets `[T, B, N]`; the moments, with these returns among them; metrics.
    """
    steps, moments, weight = batch.steps, dict(moments or {}), masks.weight(batch)
    output, by_vtrace = steps.measured["value"], getattr(cfg, "advantage", "gae") == "vtrace"
    if by_vtrace:
        log_prob, _, output = nets.evaluate(params, batch.carry, steps.obs, steps.first, steps.action)
        log_ratio = jnp.where(masks.acting(batch) > 0, log_prob - steps.measured["log_prob"], 0.0)
    next_output = on_policy.of_successors(batch, output, lambda *args: nets.evaluate(params, *args[:4])[2])
    value, next_value = output, next_output
    if cfg.normalize_value:
        value, next_value = (normalize.denormalize(moments["value"], x) for x in (output, next_output))
    discount = jnp.asarray(cfg.gamma * (1.0 - steps.terminated))
    last = jnp.broadcast_to(steps.last[..., None], value.shape)
    if by_vtrace:
        # The surrogate has the ratio itself.
        target, advantage = losses.vtrace(
            *(log_ratio, steps.reward, discount, value, next_value, last, cfg.gae_lambda, cfg.max_rho, cfg.max_c),
            weighted=False,
        )
    else:
        advantage = losses.gae(steps.reward, discount, value, next_value, last, cfg.gae_lambda)
        target = advantage + value
    metrics = {"value/explained_variance": losses.explained_variance(value, target, weight > 0)}
    if cfg.normalize_value:
        moments["value"] = normalize.update(moments["value"], target, weight > 0, cfg.value_norm_beta)
        target = normalize.normalize(moments["value"], target)
    # Clipping compares what the critic says with what it said, on whatever scale: both are its outputs.
    targets = PPOTargets(log_prob=steps.measured["log_prob"], value=output, advantage=advantage, value_target=target)
    return targets, moments, metrics


def ppo_loss(
    params: Params, batch: Trajectory, targets: PPOTargets, *, nets: Policy, cfg: Config
) -> tuple[Array, Metrics]:
    """Clipped surrogate and entropy bonus of those who act, value loss of all whose steps count.

    Args:
      params: of `nets`.
      batch: sequences.
      targets: of the same steps, such as `ppo_targets` makes.
      nets: the policy.
      cfg: a `ClippedConfig` and `JointLossConfig`, such as `PPOConfig`; its leaves may be tracers.

    Returns:
      A scalar and its parts.
    """
    steps, weight, acting = batch.steps, masks.weight(batch), masks.acting(batch)
    log_prob, entropy, value = nets.evaluate(params, batch.carry, steps.obs, steps.first, steps.action)
    advantage = targets.advantage
    if cfg.normalize_advantage != "none":
        axis = (0, 1) if cfg.normalize_advantage == "agent" else None
        advantage = losses.masked_normalize(advantage, acting > 0, axis=axis)
    surrogate = losses.clipped_surrogate(log_prob, targets.log_prob, advantage, cfg.clip_eps)
    value_error = losses.value_loss(
        value, targets.value_target, old_value=targets.value, clip_eps=cfg.value_clip_eps, huber_delta=cfg.huber_delta
    )
    actor_loss, mean_entropy = parts.mean_loss(surrogate, acting), parts.mean_loss(entropy, acting)
    critic_loss = parts.mean_loss(value_error, weight)
    loss = actor_loss - cfg.ent_coef * mean_entropy + cfg.vf_coef * critic_loss
    is_far = jnp.abs(jnp.exp(log_prob - targets.log_prob) - 1) > cfg.clip_eps
    return loss, {
        "loss/total": loss,
        "loss/actor": actor_loss,
        "loss/critic": critic_loss,
        "policy/entropy": mean_entropy,
        "policy/approx_kl": parts.mean_loss(losses.approx_kl(log_prob, targets.log_prob), acting),
        "policy/clip_fraction": parts.mean_loss(is_far.astype(value.dtype), acting),
    }


def ippo(spec: EnvSpec, cfg: PPOConfig, nets: Policy | None = None, *, targets=ppo_targets, loss=ppo_loss) -> Learner:
    """Independent PPO: each agent learns from its own view. At one agent this is PPO.

    Args:
      spec: of the environment.
      cfg: hyperparameters.
      nets: your own policy; by default `default_policy(spec, cfg)`.
      targets, loss: your own in place of `ppo_targets` and `ppo_loss`, with the same arguments and results.

    >>> from jmarl import envs
    >>> env = envs.matrix_game([[8.0, -12.0], [-12.0, 0.0]])
    >>> learner = ippo(env.spec, PPOConfig(hidden_sizes=(8,)))
    >>> state = learner.init(jax.random.key(0))
    >>> sorted(state.params)
    ['actor', 'critic']
    """
    cfg = _checked(spec, cfg)
    nets = parts.choose_nets(nets, default_policy, spec, cfg)
    return of_policy(nets, cfg, _optimizer(cfg, schedules(cfg)[0]), targets=targets, loss=loss)


def of_policy(
    nets: Policy,
    cfg: Config,
    optimizer: optax.GradientTransformation,
    *,
    targets: Callable[..., Any] = ppo_targets,
    loss: Callable[..., Any] = ppo_loss,
) -> Learner:
    """PPO of any policy.

    Args:
      nets: the policy.
      cfg: a `ClippedConfig` and `JointLossConfig`, and what `on_policy.learn` reads.
      optimizer: of all of the policy's parameters.
      targets, loss: as for `ippo`.
    """
    learning_rate, ent_coef = schedules(cfg)

    def init(key):
        params = nets.init(key)
        moments = {"value": normalize.init()} if cfg.normalize_value else {}
        return TrainState(params=params, opt_state=optimizer.init(params), step=jnp.int32(0), moments=moments)

    def act(state, carry, obs, first, key):
        carry, action, measured = nets.sample(state.params, carry, obs, first, key)
        return action, carry, measured

    def greedy(state, carry, obs, first):
        carry, action = nets.mode(state.params, carry, obs, first)
        return action, carry

    def minibatch_step(carry, batch, target):
        state, stopped = carry
        current = dataclasses.replace(cfg, ent_coef=ent_coef(state.step))
        params, opt_state, metrics, norm = parts.improve(
            optimizer, lambda params: loss(params, batch, target, nets=nets, cfg=current), state.params, state.opt_state
        )
        new = state.replace(params=params, opt_state=opt_state, step=state.step + 1)
        if cfg.target_kl is not None:
            stopped = stopped | (parallel.averaged(metrics["policy/approx_kl"]) > cfg.target_kl)
            new = _unless(stopped, state, new)
        return (new, stopped), {**metrics, "loss/grad_norm": norm}

    def update(state, batch, key):
        batch, start = masks.readable_batch(batch), (state, jnp.bool_(False))
        if cfg.advantage == "gae":
            (state, _), metrics = passes(cfg, batch, start, key)
        else:
            one = dataclasses.replace(cfg, num_epochs=1)
            keys = jax.random.split(key, cfg.num_epochs)
            (state, _), metrics = jax.lax.scan(lambda carry, key: passes(one, batch, carry, key), start, keys)
            metrics = jax.tree.map(jnp.mean, metrics)
        return state, {**metrics, "learning_rate": parts.as_metric(learning_rate(state.step))}

    def passes(cfg, batch, carry, key):
        """As many as `cfg` says, with the same targets."""
        state, stopped = carry
        target, moments, seen = targets(state.params, batch, state.moments, nets=nets, cfg=cfg)
        carry, metrics = on_policy.learn(
            minibatch_step, (state.replace(moments=moments), stopped), batch, target, key, cfg=cfg
        )
        return carry, {**metrics, **seen}

    return Learner(init, nets.init_carry, act, greedy, update, learns_from="rollouts")


def mappo(spec: EnvSpec, cfg: PPOConfig, nets: Policy | None = None, *, targets=ppo_targets, loss=ppo_loss) -> Learner:
    """PPO with a centralised critic: `ippo` whose critic reads the global state. Arguments as for `ippo`."""
    return ippo(spec, parts.with_central_critic(cfg, "mappo", "ippo"), nets, targets=targets, loss=loss)


def ia2c(spec: EnvSpec, cfg: A2CConfig, nets: Policy | None = None, *, targets=ppo_targets, loss=ppo_loss) -> Learner:
    """Independent advantage actor-critic: `ippo` with one step on each rollout, where nothing is clipped."""
    return ippo(spec, require_one_step(cfg), nets, targets=targets, loss=loss)


def maa2c(spec: EnvSpec, cfg: A2CConfig, nets: Policy | None = None, *, targets=ppo_targets, loss=ppo_loss) -> Learner:
    """Advantage actor-critic with a centralised critic: `mappo` with one step on each rollout."""
    return ia2c(spec, parts.with_central_critic(cfg, "maa2c", "ia2c"), nets, targets=targets, loss=loss)


# ----------------------------------------------------------------------------------------------------- the parts


def default_policy(spec: EnvSpec, cfg: PPOConfig, mixer: Mixer | None = None) -> Policy:
    """The policy that `cfg` describes; with a mixer, its value is the team's, made of those of the agents."""
    of_team = (lambda net: net) if mixer is None else (lambda net: mixers.mixed(net, mixer))
    cfg = parts.with_critic_view(cfg, "obs")
    model, head = actor_critic.from_config(cfg, spec)
    output, distribution = actor_critic.policy_output(spec, head, cfg.action_distribution)
    value = lambda size: (head(size, scale=1.0),)  # noqa: E731
    if cfg.shared_torso:
        both = actor_critic.of_own_view(spec, lambda size: (output(size), *value(1)), model, cfg.sharing)
        return actor_critic.shared_torso(of_team(both), distribution)
    actor = actor_critic.of_own_view(spec, lambda size: (output(size),), model, cfg.sharing)
    if cfg.critic_view != "obs":  # then it reads no lists of entities
        model, head = actor_critic.from_config(cfg)
    critic = actor_critic.of_state_or_view(spec, value, model, cfg.sharing, cfg.critic_view)
    return actor_critic.separate(actor, of_team(critic), distribution)


def schedules(cfg: Config) -> tuple[optim.Schedule, optim.Schedule]:
    """The learning rate and the weight of the entropy bonus, of optimiser steps."""
    steps_per_update = cfg.num_epochs * cfg.num_minibatches
    ent_coef = optim.over_run(
        "ent_coef",
        cfg.ent_coef_schedule,
        cfg.ent_coef,
        cfg.ent_coef_end,
        cfg.horizon,
        steps_per_update=steps_per_update,
    )
    return optim.learning_rate(cfg, steps_per_update=steps_per_update), ent_coef


def _optimizer(cfg: PPOConfig, learning_rate: optim.Schedule) -> optax.GradientTransformation:
    """Clipped Adam; the critic may have a rate and a norm of its own."""
    if not cfg.clip_separately and cfg.critic_learning_rate is None:
        return optim.optimizer(learning_rate, eps=cfg.adam_eps, max_grad_norm=cfg.max_grad_norm)
    critic_rate = optim.learning_rate(
        cfg, start=cfg.critic_learning_rate, steps_per_update=cfg.num_epochs * cfg.num_minibatches
    )
    rates = {"actor": learning_rate, "critic": critic_rate}
    own_norm = cfg.max_grad_norm if cfg.clip_separately else None
    each = {name: optim.optimizer(rate, eps=cfg.adam_eps, max_grad_norm=own_norm) for name, rate in rates.items()}
    both = optax.partition(each, {name: name for name in each})
    if cfg.clip_separately or cfg.max_grad_norm is None:
        return both
    return optax.chain(optax.clip_by_global_norm(cfg.max_grad_norm), both)


def _unless(stopped: Array, old: TrainState, new: TrainState) -> TrainState:
    """The new state, or if stopped the old one, in which only what schedules count goes on."""

    def is_count(x):
        return isinstance(x, optax.ScaleByScheduleState)

    def choose(old, new):
        return new if is_count(new) else jnp.where(stopped, old, new)

    return jax.tree.map(choose, old, new, is_leaf=is_count).replace(step=new.step)


def require_one_step(cfg: Any) -> Any:
    """The config of advantage actor-critic: one with several steps on a rollout is refused."""
    if cfg.num_epochs * cfg.num_minibatches != 1:
        raise ValueError(
            f"Advantage actor-critic takes one step on each rollout, but num_epochs={cfg.num_epochs} and "
            f"num_minibatches={cfg.num_minibatches}: leave both at 1, or use ippo or mappo."
        )
    return cfg


def _checked(spec: EnvSpec, cfg: PPOConfig) -> PPOConfig:
    checks.validate(cfg, PPOConfig, spec)
    cfg = parts.with_critic_view(cfg, "obs")
    if cfg.shared_torso and cfg.critic_view != "obs":
        raise ValueError(
            f"shared_torso=True needs critic_view='obs', got {cfg.critic_view!r}: actor and critic must read the same."
        )
    if cfg.shared_torso and (cfg.clip_separately or cfg.critic_learning_rate is not None):
        raise ValueError(
            "shared_torso=True has one optimiser: leave out clip_separately and critic_learning_rate, or set "
            "shared_torso=False."
        )
    return cfg
