"""Soft actor-critic for one agent or many: SAC, ISAC and MASAC, with continuous or discrete actions.

Actors maximise value and entropy, with the temperature α between them:

    L(φ) = mean( (Q_φ(s, a) - y)² ),   y = r + γ (min Q⁻(s', a') - α log π(a'|o')),   a' ~ π,
    L(θ) = mean( α log π_θ(a|o) - min Q_φ(s, a) ),   a ~ π_θ,
    L(α) = mean( -log α (log π(a|o) + H̄) ).

Critics learn of all agents whose steps count, actors and α of those that act. Independent learners (ISAC) have critics
of their own view and action, MASAC's read the state and everyone's actions. Discrete actions need no sample of one's
own: expectations over the legal ones take its place, and a critic has a value for each, or is asked for each. With one
agent this is SAC.

References:
  Haarnoja et al., 2018, Soft Actor-Critic Algorithms and Applications (https://arxiv.org/abs/1812.05905).
  Christodoulou, 2019, Soft Actor-Critic for Discrete Action Settings (https://arxiv.org/abs/1910.07207).
  Lowe et al., 2017, for the critics of many agents (https://arxiv.org/abs/1706.02275).
"""

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jmarl import configs, losses, masks, networks, optim
from jmarl.configs import config
from jmarl.learners import checks, critics, parts
from jmarl.networks import actor_critic, heads
from jmarl.networks.torsos import Attended
from jmarl.types import EnvSpec, Learner, Metrics, Numeric, Params, Trajectory, static


@config
class SACConfig(critics.CriticConfig):
    """Hyperparameters of ISAC and MASAC."""

    adam_eps: Numeric = 1e-8
    alpha_learning_rate: Numeric | None = None  # of the temperature; None: learning_rate
    tau: Numeric = 0.005
    num_critics: int = static(2)
    alpha: Numeric = 0.2  # the temperature, or where it starts if it is learnt
    learn_alpha: bool = static(True)  # move it so that the entropy becomes target_entropy
    alpha_per_agent: bool = static(False)  # a temperature for each agent
    target_entropy: Numeric | None = None  # None: minus the action's dimensions; discrete: half of the greatest one
    target_actor: bool = static(False)  # next actions are those of a slowly moving actor
    update_order: Literal["critic_first", "actor_first", "simultaneous"] = static(
        "critic_first"
    )  # the last: all at old parameters
    own_action: critics.OwnAction = static(
        "output"
    )  # if discrete, critics have a value for each, or read it as the others', in a pass for each
    action_distribution: Literal["tanh_normal", "gaussian"] = static(
        "tanh_normal"
    )  # of continuous actions; gaussian: own deviation
    log_std_min: Numeric = -20.0  # bounds of the tanh-normal's log deviation
    log_std_max: Numeric = 2.0  # the upper one


def sac_targets(
    params: Params, target_params: Params, batch: Trajectory, noise: Array, *, nets: critics.ActorCritic, cfg: SACConfig
) -> Float[Array, "L M N"]:
    """What the critics' values should be, y = r + γ (min Q⁻(s', a') - α log π(a'|o')).

    Args:
      params: {"actor": .., "critic": .., "log_alpha": [] or [N]}.
      target_params: {"critic": ..}, and "actor" with `cfg.target_actor`.
      batch: sequences with `next_obs`; none crosses an episode's end.
      noise: for the next actions, `[L, M, N, A]`: standard normal numbers, for discrete actions Gumbel noise.
      nets: networks.
      cfg: its leaves may be tracers.
    """
    x = critics.read(batch, nets, cfg)
    next_obs: Any = x.steps.next_obs
    policy: Any = nets.distribution(x.next_output(target_params if cfg.target_actor else params), next_obs.action_mask)
    next_action, log_prob = draw(nets, policy, noise)
    alpha = jnp.where(next_obs.agent_mask, jnp.exp(params["log_alpha"]), 0.0)  # who waits has no choice, nor entropy
    if nets.code.is_discrete:
        next_q = losses.clipped_double_q(x.next_values_of_each(target_params, next_action))
        return x.target(losses.soft_value(next_q, policy.logits, alpha[..., None], policy.probs))
    next_q = losses.clipped_double_q(x.next_values(target_params, next_action))
    return x.target(losses.soft_value(next_q, log_prob, alpha))


def sac_actor_loss(
    params: Params, batch: Trajectory, noise: Array, *, nets: critics.ActorCritic, cfg: SACConfig
) -> tuple[Array, tuple[Metrics, Array]]:
    """α log π - min Q of the actors' actions, averaged over the agents that act.

    Args:
      params: as for `sac_targets`; differentiate with respect to the actors.
      batch: sequences; none crosses an episode's end.
      noise: as for `sac_targets`; for discrete actions read with `other_actions="current"` only.
      nets: networks.
      cfg: its leaves may be tracers.

    Returns:
      A scalar; its parts, and log π of the actions (for discrete ones minus the entropy), which `sac_alpha_loss` reads.
    """
    x, alpha = critics.read(batch, nets, cfg), jnp.exp(params["log_alpha"])
    policy: Any = nets.distribution(x.output(params), x.steps.obs.action_mask)
    own, log_prob = draw(nets, policy, noise)
    if nets.code.is_discrete:
        q = losses.clipped_double_q(x.values_of_each(params, own))
        policy_loss = losses.soft_policy_loss(q, policy.logits, alpha[..., None], policy.probs)
    else:
        q = losses.clipped_double_q(x.values(params, own))
        policy_loss = losses.soft_policy_loss(q, log_prob, alpha)
    loss = parts.mean_loss(policy_loss, x.acting, cfg.sharing)
    return loss, ({"loss/actor": loss, "policy/entropy": -losses.masked_mean(log_prob, x.acting > 0)}, log_prob)


def sac_alpha_loss(
    log_alpha: Array, log_prob: Array, batch: Trajectory, *, nets: critics.ActorCritic, cfg: SACConfig
) -> tuple[Array, Metrics]:
    """Loss of the temperature, averaged over the agents that act: of each one where each has a temperature.

    Args:
      log_alpha: [] or [N].
      log_prob: log π of the policy's actions, `[L, M, N]`.
      batch, nets, cfg: as for `sac_actor_loss`.
    """
    x = critics.read(batch, nets, cfg)
    obs: Any = x.steps.obs
    if cfg.target_entropy is not None:
        target = cfg.target_entropy
    elif nets.code.is_discrete:
        target = 0.5 * jnp.log(jnp.maximum(jnp.sum(obs.action_mask, axis=-1), 1))
    else:
        target = -jnp.asarray(nets.code.is_real.sum(-1), log_prob.dtype)
    log_prob = jax.lax.stop_gradient(log_prob)
    loss = losses.temperature_loss(jnp.broadcast_to(log_alpha, log_prob.shape), log_prob, target)
    loss = parts.mean_loss(loss, x.acting, "per_agent" if cfg.alpha_per_agent else "shared")
    return loss, {"loss/alpha": loss, "policy/alpha": jnp.mean(jnp.exp(log_alpha))}


def isac(
    spec: EnvSpec,
    cfg: SACConfig,
    nets: critics.ActorCritic | None = None,
    *,
    targets=sac_targets,
    critic_loss=critics.critic_loss,
    actor_loss=sac_actor_loss,
    alpha_loss=sac_alpha_loss,
) -> Learner:
    """Independent SAC: each agent's critics read its own view and action. At one agent this is SAC.

    Args:
      spec: of the environment.
      cfg: hyperparameters.
      nets: your own networks; by default `default_nets(spec, cfg)`.
      targets, critic_loss, actor_loss, alpha_loss: your own in place of `sac_targets`, `critic_loss`, `sac_actor_loss`
        and `sac_alpha_loss`, with the same arguments and results.
    """
    cfg = checked(spec, cfg)
    nets = parts.choose_nets(nets, default_nets, spec, cfg)
    own = {"targets": targets, "critic_loss": critic_loss, "actor_loss": actor_loss, "alpha_loss": alpha_loss}
    return learner(nets, cfg, *training(spec, nets, cfg, **own))


def masac(spec: EnvSpec, cfg: SACConfig, nets: critics.ActorCritic | None = None, **own_losses: Callable) -> Learner:
    """MASAC: critics read the global state and everyone's actions. Arguments as for `isac`.

    >>> from jmarl import envs
    >>> env = envs.matrix_game([[8.0, -12.0], [-12.0, 0.0]])
    >>> sorted(masac(env.spec, SACConfig(hidden_sizes=(8,))).init(jax.random.key(0)).params)
    ['actor', 'critic', 'log_alpha']
    """
    return isac(spec, parts.with_central_critic(cfg, "masac", "isac"), nets, **own_losses)


# ----------------------------------------------------------------------------------------------------- the parts


class NormalOutput(nn.Module):
    """Mean and log deviation of an action, both from the features: `[.., F] -> ([.., A], [.., A])`."""

    head: nn.Module
    log_std_min: Any
    log_std_max: Any

    @nn.compact
    def __call__(self, x: Array | Attended) -> tuple[Array, Array]:
        mean, log_std = jnp.split(self.head(x), 2, axis=-1)
        return mean, jnp.clip(log_std, self.log_std_min, self.log_std_max)


def default_nets(spec: EnvSpec, cfg: SACConfig) -> critics.ActorCritic:
    """The networks that `cfg` describes."""
    cfg = parts.with_critic_view(cfg, "obs")
    model, head = actor_critic.from_config(cfg, spec)
    code, is_gaussian = critics.action_code(spec), cfg.action_distribution == "gaussian"
    has_each = code.is_discrete and cfg.own_action == "output"
    critic = networks.ensemble(critics.network(spec, cfg, counterfactual=has_each), cfg.num_critics)
    if code.is_discrete:
        actor = actor_critic.of_own_view(spec, lambda size: (head(size, scale=0.01),), model, cfg.sharing)
        return critics.ActorCritic(actor, critic, code)

    def output(size):
        if is_gaussian:
            return actor_critic.GaussianOutput(head(size, scale=0.01), size)
        return NormalOutput(head(2 * size, scale=0.01), cfg.log_std_min, cfg.log_std_max)

    def distribution(output, action_mask):
        del action_mask
        # Padded dimensions have mean 0 and a density of 1 there: with noise 0 they add nothing to log π.
        mean = jnp.where(code.is_real, output[0], 0.0)
        log_std = jnp.where(code.is_real, output[1], -0.5 * math.log(2 * math.pi))
        return heads.gaussian(mean, log_std) if is_gaussian else heads.tanh_normal(mean, log_std)

    actor = actor_critic.of_own_view(spec, lambda size: (output(size),), model, cfg.sharing)
    return critics.ActorCritic(actor, critic, code, distribution)


def learner(nets: critics.ActorCritic, cfg: SACConfig, init: Callable, update_with: Callable) -> Learner:
    """A learner that acts by `nets.actor`; the two functions are what `training` returns."""
    code, actor_step, remember = nets.code, networks.one_step(nets.actor), critics.memory(nets)

    def init_carry(batch_shape):
        return {"actor": nets.actor.init_carry(batch_shape), "critic": nets.critic.init_carry(batch_shape)}

    def act(state, carry, obs, first, key):
        key_action, key_random = jax.random.split(key)
        actor, output = actor_step(state.params["actor"], carry["actor"], obs, first)
        action = nets.distribution(output, obs.action_mask).sample(seed=key_action)
        if code.is_discrete:
            anything = heads.categorical(jnp.zeros_like(output), obs.action_mask).sample(seed=key_random)
            action = critics.or_random(state, cfg, action, anything)
        else:
            anything = jax.random.uniform(key_random, action.shape, minval=-1.0, maxval=1.0)
            action = code.decode(critics.or_random(state, cfg, action, anything))
        critic = remember(state.params["critic"], carry["critic"], obs, action, first)
        return action, {"actor": actor, "critic": critic}, {}

    def greedy(state, carry, obs, first):
        actor, output = actor_step(state.params["actor"], carry["actor"], obs, first)
        mode = nets.distribution(output, obs.action_mask).mode()
        return mode if code.is_discrete else code.decode(mode), {**carry, "actor": actor}

    def update(state, batch, key):
        kind = jax.random.gumbel if code.is_discrete else jax.random.normal
        shape = batch.steps.obs.agent_mask.shape + code.is_real.shape[1:]
        next_noise, noise = kind(key, (2, *shape))
        return update_with(state, batch, next_noise, noise, jax.random.fold_in(key, 1))

    return Learner(init, init_carry, act, greedy, update, learns_from="replay")


def training(
    spec: EnvSpec,
    nets: critics.ActorCritic,
    cfg: SACConfig,
    *,
    targets=sac_targets,
    critic_loss=critics.critic_loss,
    actor_loss=sac_actor_loss,
    alpha_loss=sac_alpha_loss,
    actors: critics.Actors | None = None,
    is_of_team: bool = False,
):
    """`Learner.init`, and `Learner.update` with its noise given: `(state, batch, next actions' noise, noise, key)`.

    Actors are those of `actor_loss`, moved at once, or `actors`, which read the key. With `is_of_team`, the critic is
    one of all agents, so one optimiser moves it however parameters are shared.
    """
    options = {"nets": nets, "cfg": cfg}
    critic_rate = optim.learning_rate(cfg, start=cfg.critic_learning_rate)
    if actors is None:
        optimizer = parts.optimizer(cfg, optim.learning_rate(cfg))
        actors = critics.at_once(optimizer, functools.partial(actor_loss, **options))
    optimizers = {
        "actor": actors.optimizer,
        "critic": parts.optimizer(cfg, critic_rate, is_of_team=is_of_team),
        "log_alpha": optim.optimizer(optim.learning_rate(cfg, start=cfg.alpha_learning_rate), eps=1e-8),
    }
    slow = ("actor", "critic") if cfg.target_actor else ("critic",)

    def init(key):
        shape = (spec.num_agents,) if cfg.alpha_per_agent else ()
        log_alpha = jnp.broadcast_to(jnp.log(jnp.asarray(cfg.alpha, float)), shape)
        return critics.init_state(key, nets, optimizers, targets=slow, log_alpha=log_alpha)

    def improve_critic(state, read, batch, noise):
        target = targets(read, state.target_params, batch, noise, **options)
        return critics.improve(
            optimizers, state, "critic", lambda part: critic_loss({**read, "critic": part}, batch, target, **options)
        )

    def update(state, batch, next_noise, noise, key=None):
        batch, old = masks.readable_batch(batch), state.params
        if cfg.update_order == "actor_first":
            state, (actor_metrics, log_prob), actor_norm = actors.improve(state, old, batch, noise, key)
            state, metrics, norm = improve_critic(state, state.params, batch, next_noise)
        else:
            state, metrics, norm = improve_critic(state, old, batch, next_noise)
            read = old if cfg.update_order == "simultaneous" else state.params
            state, (actor_metrics, log_prob), actor_norm = actors.improve(state, read, batch, noise, key)
        metrics = {**metrics, **norm, **actor_metrics, **actor_norm}
        if cfg.learn_alpha:
            state, alpha_metrics, alpha_norm = critics.improve(
                optimizers, state, "log_alpha", lambda part: alpha_loss(part, log_prob, batch, **options)
            )
            metrics = {**metrics, **alpha_metrics, **alpha_norm}
        step = state.step + 1
        target_params = optax.incremental_update(
            {name: state.params[name] for name in slow}, state.target_params, cfg.tau
        )
        metrics["learning_rate"] = parts.as_metric(critic_rate(step))
        return state.replace(target_params=target_params, step=step), metrics

    return init, update


def draw(nets: critics.ActorCritic, policy: Any, noise: Array) -> tuple[Array, Array]:
    """A coded action and its log-probability, differentiable; of discrete ones no gradient, and minus the entropy."""
    noise = jnp.where(nets.code.is_real, noise, 0.0)
    action, log_prob = policy.from_noise(noise)
    return (nets.code.encode(action), -policy.entropy()) if nets.code.is_discrete else (action, log_prob)


def checked(spec: EnvSpec, cfg: Any) -> Any:
    """The config, with what its critics read."""
    checks.validate(cfg, SACConfig, spec)
    checks.require(cfg, ("alpha",), lambda x: x > 0, "be positive: it is a temperature, and its logarithm is kept")
    above = f"lie above log_std_min={cfg.log_std_min}: they are the bounds of the log deviation"
    if configs.is_number(cfg.log_std_min):
        checks.require(cfg, ("log_std_max",), lambda x: x > cfg.log_std_min, above)
    target = cfg.target_entropy
    if isinstance(target, (int, float, np.ndarray)) and np.any(np.sign(target) == (-1 if spec.is_discrete else 1)):
        kind, usual = ("discrete", "positive") if spec.is_discrete else ("continuous", "negative")
        warnings.warn(
            f"target_entropy={target} has an unusual sign: entropies of {kind} actions are aimed at {usual} values, "
            f"and the temperature may run away. Leave it out for the usual target.",
            stacklevel=3,
        )
    return parts.with_critic_view(cfg, "obs")
