"""Soft actor-critic for one agent or many: SAC, ISAC and MASAC, with continuous or discrete actions.

Actors maximise value and entropy, with the temperature α between them:

    L(φ) = mean( (Q_φ(s, a) - y)² ),   y = r + γ (min Q⁻(s', a') - α log π(a'|o')),   a' ~ π,
    L(θ) = mean( α log π_θ(a|o) - min Q_φ(s, a) ),   a ~ π_θ,
    L(α) = mean( -log α (log π(a|o) + H̄) ).

Independent learners (ISAC) have critics of their own view and action, MASAC's read the state and everyone's actions.
Discrete actions need no sample of one's own: expectations over the legal ones take its place, and a critic has a value
for each. With one agent this is SAC.

References:
  Haarnoja et al., 2018, Soft Actor-Critic Algorithms and Applications (https://arxiv.org/abs/1812.05905).
  Christodoulou, 2019, Soft Actor-Critic for Discrete Action Settings (https://arxiv.org/abs/1910.07207).
  Lowe et al., 2017, for the critics of many agents (https://arxiv.org/abs/1706.02275).
"""

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jaxtyping import Array

from jmarl import losses, networks, optim, parallel
from jmarl.learners import checks, replayed
from jmarl.networks import actor_critic, heads
from jmarl.types import EnvSpec, Learner, Metrics, Network, Numeric, Params, TrainState, Trajectory, static


@struct.dataclass(kw_only=True)
class SACConfig:
    """Hyperparameters of ISAC and MASAC. Actions are meant in units of half their range, from -1 to 1."""

    learning_rate: Numeric = 1e-3  # Adam step size of actors
    critic_learning_rate: Numeric | None = None  # of critics; None: learning_rate
    alpha_learning_rate: Numeric | None = None  # of the temperature; None: learning_rate
    learning_rate_end: Numeric = 0.0  # of schedules, as a fraction of the start
    learning_rate_schedule: str = static("constant")  # constant, linear or exponential, in optimiser steps
    horizon: Numeric | None = None  # calls of update until schedules end; None: make_train and run fill it in
    adam_eps: Numeric = 1e-8  # added to Adam's denominator
    max_grad_norm: Numeric | None = 0.5  # norm to which actors' and critics' gradients are clipped, each; None: never
    gamma: Numeric = 0.99  # discount
    tau: Numeric = 0.005  # share of the online networks in each update of the targets
    huber_delta: Numeric | None = None  # where the critics' loss turns linear; None: squared error
    num_critics: int = static(2)  # the lowest of so many values counts
    alpha: Numeric = 0.2  # the temperature, or where it starts if it is learnt
    learn_alpha: bool = static(True)  # move it so that the entropy becomes target_entropy
    alpha_per_agent: bool = static(False)  # a temperature for each agent
    target_entropy: Numeric | None = None  # None: minus the action's dimensions; discrete: half of the greatest one
    target_actor: bool = static(False)  # next actions are those of a slowly moving actor
    update_order: str = static("critic_first")  # critic_first, actor_first or simultaneous (all at old parameters)
    other_actions: str = static("stored")  # in an actor's loss: stored, current, or joint (gradients to all)
    action_distribution: str = static("tanh_normal")  # of continuous actions: tanh_normal or gaussian (own deviation)
    log_std_min: Numeric = -20.0  # bounds of the tanh-normal's log deviation
    log_std_max: Numeric = 2.0
    team_reward: str | None = static(None)  # individual (None), or sum or mean of all agents' rewards for each
    random_steps: Numeric = 0  # environment steps at the start with random actions
    burn_in: int = static(0)  # first steps that only warm up the memory, of sequences that start inside an episode
    recurrent: bool = static(False)  # recurrent actors and critics, trained on sequences
    cell: str = static("gru")  # gru or lstm
    cell_size: int = static(64)  # width of the recurrent state
    hidden_sizes: tuple[int, ...] = static((64, 64))  # layers before the output; before the cell if recurrent
    head_sizes: tuple[int, ...] = static(())  # layers between cell (or torso) and output
    activation: str = static("relu")  # tanh, relu, elu, gelu or silu
    layer_norm: bool = static(False)  # before each activation
    kernel_init: str = static("orthogonal")  # orthogonal, lecun or xavier
    sharing: str = static("shared")  # parameters: shared, per_agent or per_group (agents of equal sizes)
    critic_view: str = static("obs")  # what critics read: obs (own view and action), state or state_obs (all actions)
    mask_actions: bool = static(True)  # critics read zeros in place of the actions of inactive agents


class SACNets(NamedTuple):
    """What the losses need to know of the networks.

    Attributes:
      actor: a network over observations; its output parametrises the distribution.
      critic: a network over `(obs, features of actions)`, with values `[C, L, M, N]` of C critics; `[C, L, M, N, A]`,
        one for each of the agent's own actions, if they are discrete.
      code: how critics read actions.
      distribution: `(output, action_mask) -> distribution` over coded actions.
    """

    actor: Network
    critic: Network
    code: replayed.ActionCode
    distribution: Callable[[Any, Array | None], Any]


def sac_critic_loss(
    params: Params, target_params: Params, batch: Trajectory, noise: Array, *, nets: SACNets, cfg: SACConfig
) -> tuple[Array, Metrics]:
    """TD errors of the critics, summed over critics and averaged over what is neither padding nor inactive.

    Args:
      params: {"actor": .., "critic": .., "log_alpha": [] or [N]}; differentiate with respect to the critics.
      target_params: {"critic": ..}, and "actor" with `cfg.target_actor`.
      batch: sequences with `next_obs`; none crosses an episode's end.
      noise: for the next actions, `[L, M, N, A]`: standard normal numbers, for discrete actions Gumbel noise.
      nets: networks.
      cfg: its leaves may be tracers.

    Returns:
      A scalar and its parts; "priority" is the mean absolute error of each sequence.
    """
    x, alpha = replayed.Inputs.of(batch, nets, cfg), jnp.exp(params["log_alpha"])
    output = x.next("actor", target_params if cfg.target_actor else params, x.obs, x.next_obs)
    policy = nets.distribution(output, x.next_obs.action_mask)
    next_action, log_prob = _sample(nets, policy, noise)
    next_action, read = replayed.visible(cfg, next_action, x.next_obs), _features(nets)
    taken, ahead = read(cfg, x.action, x.action), read(cfg, next_action, next_action)
    next_q = losses.clipped_double_q(x.next("critic", target_params, (x.obs, taken), (x.next_obs, ahead)))
    q = x.now("critic", params, (x.obs, taken))
    if nets.code.is_discrete:
        next_value = losses.soft_value(next_q, policy.logits, alpha[..., None], policy.probs)
        q = losses.select(q, jnp.broadcast_to(x.steps.action, q.shape[:-1]))
    else:
        next_value = losses.soft_value(next_q, log_prob, alpha)
    next_value = replayed.values_of_all(next_value, x.next_obs.agent_mask, cfg.team_reward)
    reward, terminated = replayed.rewards_and_ends(x.steps, cfg.team_reward)
    target = jax.lax.stop_gradient(reward + cfg.gamma * (1.0 - terminated) * next_value)
    error = losses.value_loss(q, jnp.broadcast_to(target, q.shape), huber_delta=cfg.huber_delta)
    loss = replayed.mean_loss(error, x.mask, cfg.sharing)
    return loss, {
        "loss/critic": loss,
        "value/q_taken": losses.masked_mean(q[0], x.mask > 0),
        "value/target": losses.masked_mean(target, x.mask > 0),
        "priority": replayed.priority(q[0] - target, x.mask),
    }


def sac_actor_loss(
    params: Params, batch: Trajectory, noise: Array, *, nets: SACNets, cfg: SACConfig
) -> tuple[Array, tuple[Metrics, Array]]:
    """α log π - min Q of the actors' actions, averaged over what is neither padding nor inactive.

    Args:
      params: as for `sac_critic_loss`; differentiate with respect to the actors.
      batch: sequences; none crosses an episode's end.
      noise: as for `sac_critic_loss`; for discrete actions read with `other_actions="current"` only.
      nets: networks.
      cfg: its leaves may be tracers.

    Returns:
      A scalar; its parts, and log π of the actions (for discrete ones minus the entropy), which `sac_alpha_loss` reads.
    """
    x, alpha = replayed.Inputs.of(batch, nets, cfg), jnp.exp(params["log_alpha"])
    policy = nets.distribution(x.now("actor", params, x.obs), x.obs.action_mask)
    own, log_prob = _sample(nets, policy, noise)
    own = replayed.visible(cfg, own, x.obs)
    others = replayed.others_actions(cfg, x.action, own)
    q = losses.clipped_double_q(x.now("critic", params, (x.obs, _features(nets)(cfg, own, others))))
    if nets.code.is_discrete:
        policy_loss = losses.soft_policy_loss(q, policy.logits, alpha[..., None], policy.probs)
        log_prob = -policy.entropy()
    else:
        policy_loss = losses.soft_policy_loss(q, log_prob, alpha)
    loss = replayed.mean_loss(policy_loss, x.mask, cfg.sharing)
    return loss, ({"loss/actor": loss, "policy/entropy": -losses.masked_mean(log_prob, x.mask > 0)}, log_prob)


def sac_alpha_loss(
    log_alpha: Array, log_prob: Array, batch: Trajectory, *, nets: SACNets, cfg: SACConfig
) -> tuple[Array, Metrics]:
    """Loss of the temperature, averaged over what is neither padding nor inactive: of each agent where each has one.

    Args:
      log_alpha: [] or [N].
      log_prob: log π of the policy's actions, `[L, M, N]`.
      batch, nets, cfg: as for `sac_actor_loss`.
    """
    obs: Any = batch.steps.obs
    mask = replayed.weights(batch, cfg.burn_in)[..., None] * obs.agent_mask
    if cfg.target_entropy is not None:
        target = cfg.target_entropy
    elif nets.code.is_discrete:
        target = 0.5 * jnp.log(jnp.maximum(jnp.sum(obs.action_mask, axis=-1), 1))
    else:
        target = -jnp.asarray(nets.code.is_real.sum(-1), log_prob.dtype)
    log_prob = jax.lax.stop_gradient(log_prob)
    loss = losses.temperature_loss(jnp.broadcast_to(log_alpha, log_prob.shape), log_prob, target)
    loss = replayed.mean_loss(loss, mask, "per_agent" if cfg.alpha_per_agent else "shared")
    return loss, {"loss/alpha": loss, "policy/alpha": jnp.mean(jnp.exp(log_alpha))}


def isac(spec: EnvSpec, cfg: SACConfig, nets: SACNets | None = None) -> Learner:
    """Independent SAC: each agent's critics read its own view and action. At one agent this is SAC.

    Args:
      spec: of the environment.
      cfg: hyperparameters.
      nets: your own networks; by default `default_nets(spec, cfg)`.
    """
    _validate(spec, cfg)
    nets = default_nets(spec, cfg) if nets is None else nets
    code = nets.code
    init, update_with = training(spec, nets, cfg)
    actor_step, critic_memory = networks.one_step(nets.actor), replayed.critic_memory(nets, cfg, _features(nets))

    def init_carry(batch_shape):
        return {"actor": nets.actor.init_carry(batch_shape), "critic": nets.critic.init_carry(batch_shape)}

    def act(state, carry, obs, first, key):
        key_action, key_random = jax.random.split(key)
        memory, output = actor_step(state.params["actor"], carry["actor"], obs, first)
        policy, is_random = nets.distribution(output, obs.action_mask), state.env_steps < cfg.random_steps
        if code.is_discrete:
            anything = heads.categorical(jnp.zeros_like(output), obs.action_mask).sample(seed=key_random)
            action = jnp.where(is_random, anything, policy.sample(seed=key_action))
        else:
            chosen = policy.sample(seed=key_action)
            anything = jax.random.uniform(key_random, chosen.shape, minval=-1.0, maxval=1.0)
            action = code.decode(jnp.where(is_random, anything, chosen))
        critic = critic_memory(state.params["critic"], carry["critic"], obs, action, first)
        return action, {"actor": memory, "critic": critic}, carry

    def greedy(state, carry, obs, first):
        memory, output = actor_step(state.params["actor"], carry["actor"], obs, first)
        mode = nets.distribution(output, obs.action_mask).mode()
        return mode if code.is_discrete else code.decode(mode), {**carry, "actor": memory}

    def update(state, batch, key):
        draw = jax.random.gumbel if code.is_discrete else jax.random.normal
        shape = batch.steps.obs.agent_mask.shape + code.is_real.shape[1:]
        next_noise, noise = draw(key, (2, *shape))
        return update_with(state, batch, next_noise, noise)

    return Learner(init, init_carry, act, greedy, update, learns_from="replay")


def masac(spec: EnvSpec, cfg: SACConfig, nets: SACNets | None = None) -> Learner:
    """MASAC: critics read the global state and everyone's actions. Arguments as for `isac`.

    >>> from jmarl import envs
    >>> env = envs.matrix_game([[8.0, -12.0], [-12.0, 0.0]])
    >>> sorted(masac(env.spec, SACConfig(hidden_sizes=(8,))).init(jax.random.key(0)).params)
    ['actor', 'critic', 'log_alpha']
    """
    return isac(spec, replayed.centralized(cfg), nets)


# ----------------------------------------------------------------------------------------------------- the parts


class NormalOutput(nn.Module):
    """Mean and log deviation of an action, both from the features: `[.., F] -> ([.., A], [.., A])`."""

    head: nn.Module
    log_std_min: Any
    log_std_max: Any

    @nn.compact
    def __call__(self, x: Array) -> tuple[Array, Array]:
        mean, log_std = jnp.split(self.head(x), 2, axis=-1)
        return mean, jnp.clip(log_std, self.log_std_min, self.log_std_max)


def default_nets(spec: EnvSpec, cfg: SACConfig) -> SACNets:
    """The networks that `cfg` describes."""
    model, head = actor_critic.from_config(cfg)
    code = replayed.action_code(spec)
    if code.is_discrete:
        actor = actor_critic.of_own_view(spec, lambda size: (head(size, scale=0.01),), model, cfg.sharing)
        critic = replayed.action_critic(spec, cfg, code, counterfactual=True)
        return SACNets(parallel.split_network(actor), critic, code, heads.categorical)

    is_gaussian = cfg.action_distribution == "gaussian"

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
    return SACNets(parallel.split_network(actor), replayed.action_critic(spec, cfg, code), code, distribution)


def training(spec: EnvSpec, nets: SACNets, cfg: SACConfig):
    """`Learner.init`, and `Learner.update` with its noise given: `(state, batch, next actions' noise, noise)`."""
    rates = {
        "actor": optim.learning_rate(cfg),
        "critic": optim.learning_rate(cfg, start=cfg.critic_learning_rate),
        "log_alpha": optim.learning_rate(cfg, start=cfg.alpha_learning_rate),
    }
    optimizers = {name: replayed.optimizer(cfg, rates[name]) for name in ("actor", "critic")}
    optimizers["log_alpha"] = optim.optimizer(rates["log_alpha"], eps=1e-8)
    targets = ("actor", "critic") if cfg.target_actor else ("critic",)

    def init(key):
        key_actor, key_critic = jax.random.split(key)
        shape = (spec.num_agents,) if cfg.alpha_per_agent else ()
        params = {
            "actor": nets.actor.init(key_actor),
            "critic": nets.critic.init(key_critic),
            "log_alpha": jnp.broadcast_to(jnp.log(jnp.asarray(cfg.alpha, float)), shape),
        }
        return TrainState(
            params=params,
            target_params=jax.tree.map(jnp.copy, {name: params[name] for name in targets}),
            opt_state={name: optimizers[name].init(params[name]) for name in params},
            step=jnp.int32(0),
            env_steps=jnp.int32(0),
        )

    def update(state, batch, next_noise, noise):
        def critic_loss(critic, params):
            return sac_critic_loss(
                {**params, "critic": critic}, state.target_params, batch, next_noise, nets=nets, cfg=cfg
            )

        def actor_loss(actor, params):
            return sac_actor_loss({**params, "actor": actor}, batch, noise, nets=nets, cfg=cfg)

        def alpha_loss(log_alpha, log_prob):
            return sac_alpha_loss(log_alpha, log_prob, batch, nets=nets, cfg=cfg)

        def improve(name, loss, read):
            """One optimiser step of one part; `read` are the parameters that its loss reads beside it."""
            params[name], opt_state[name], aux, metrics[f"loss/{name}_grad_norm"] = replayed.improve(
                optimizers[name], params[name], opt_state[name], lambda part: loss(part, read)
            )
            return aux

        params, opt_state, metrics = dict(state.params), dict(state.opt_state), {}
        log_prob = None
        for name in ("actor", "critic") if cfg.update_order == "actor_first" else ("critic", "actor"):
            read = dict(state.params if cfg.update_order == "simultaneous" else params)
            if name == "critic":
                metrics.update(improve("critic", critic_loss, read))
            else:
                actor_metrics, log_prob = improve("actor", actor_loss, read)
                metrics.update(actor_metrics)
        if cfg.learn_alpha:
            metrics.update(improve("log_alpha", alpha_loss, log_prob))
        step = state.step + 1
        new_targets = {name: params[name] for name in targets}
        metrics["learning_rate"] = jnp.asarray(rates["critic"](step), jnp.float32)
        return state.replace(
            params=params,
            target_params=optax.incremental_update(new_targets, state.target_params, cfg.tau),
            opt_state=opt_state,
            step=step,
        ), metrics

    return init, update


def _features(nets: SACNets):
    """What critics read of actions: of discrete ones the others' only, since they value each of one's own."""
    return replayed.counterfactual_features if nets.code.is_discrete else replayed.action_features


def _sample(nets: SACNets, policy: Any, noise: Array) -> tuple[Array, Array]:
    """A coded action and its log-probability, differentiable where actions are continuous."""
    if nets.code.is_discrete:
        action = jnp.argmax(policy.logits + noise, axis=-1)
        return jax.lax.stop_gradient(nets.code.encode(action)), policy.log_prob(action)
    noise = jnp.where(nets.code.is_real, noise, 0.0)
    if isinstance(policy, heads.TanhNormal):
        z = policy.mean + jnp.exp(policy.log_std) * noise
        return policy.squash(z), policy.log_prob_of_z(z)
    action = policy.mean() + policy.stddev() * noise
    return action, policy.log_prob(action)


def _validate(spec: EnvSpec, cfg: SACConfig) -> None:
    options = {
        "update_order": ("critic_first", "actor_first", "simultaneous"),
        "action_distribution": ("tanh_normal", "gaussian"),
    }
    checks.validate(cfg, options)
    checks.require(cfg, ("alpha",), lambda x: x > 0, "be positive: it is a temperature, and its logarithm is kept")
    above = f"lie above log_std_min={cfg.log_std_min}: they are the bounds of the log deviation"
    if isinstance(cfg.log_std_min, int | float):
        checks.require(cfg, ("log_std_max",), lambda x: x > cfg.log_std_min, above)
    target = cfg.target_entropy
    if isinstance(target, (int, float, np.ndarray)) and np.any(np.sign(target) == (-1 if spec.is_discrete else 1)):
        kind, usual = ("discrete", "positive") if spec.is_discrete else ("continuous", "negative")
        warnings.warn(
            f"target_entropy={target} has an unusual sign: entropies of {kind} actions are aimed at {usual} values, "
            f"and the temperature may run away. Leave it out for the usual target.",
            stacklevel=3,
        )
