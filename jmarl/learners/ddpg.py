"""Deterministic actors: DDPG and TD3, for many agents MADDPG and MATD3.

A critic learns the value of actions, an actor follows its slope:

    L(φ) = mean( (Q_φ(s, a) - y)² ),   y = r + γ Q⁻(s', μ⁻(s')),
    L(θ) = mean( -Q_φ(s, μ_θ(o)) ).

Critics learn of all agents whose steps count, actors of those that act. Independent learners (IDDPG, ITD3) have critics
of their own view and action, MADDPG's and MATD3's read the state and everyone's actions. TD3 takes the lowest of two
critics in y, adds clipped noise to μ⁻(s'), and moves the actor and the targets at every second update only. With one
agent these are DDPG and TD3. Discrete actions are one-hot vectors, and gradients pass through a straight-through
Gumbel-softmax.

References:
  Lillicrap et al., 2016, Continuous Control with Deep Reinforcement Learning (https://arxiv.org/abs/1509.02971).
  Lowe et al., 2017, Multi-Agent Actor-Critic for Mixed Cooperative-Competitive Environments
    (https://arxiv.org/abs/1706.02275).
  Fujimoto et al., 2018, Addressing Function Approximation Error in Actor-Critic Methods
    (https://arxiv.org/abs/1802.09477).
  Ackermann et al., 2019, Reducing Overestimation Bias in Multi-Agent Domains Using Double Centralized Critics
    (https://arxiv.org/abs/1910.01465).
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jmarl import configs, exploration, losses, masks, networks, optim
from jmarl.configs import config
from jmarl.learners import checks, critics, parts, replay
from jmarl.networks import actor_critic, heads
from jmarl.types import EnvSpec, Learner, Metrics, Numeric, Params, Trajectory, static


@config
class DDPGConfig(critics.CriticConfig):
    """Hyperparameters of IDDPG and MADDPG."""

    gamma: Numeric = 0.95
    policy_delay: int = static(1)  # updates of the critics for one of actors and targets
    target_noise: Numeric | None = None  # deviation of the noise on the target policy's actions; None: no noise
    target_noise_clip: Numeric = 0.5  # where it is cut off
    actor_q: Literal["first", "mean", "min"] = static(
        "first"
    )  # whose value actors raise: of the first critic, or of all
    gumbel_temperature: Numeric = 1.0  # of relaxed discrete actions
    logit_coef: Numeric = 1e-3  # weight of squared logits in the actors' loss, where actions are discrete
    noise: Literal["gaussian", "ornstein_uhlenbeck"] = static("gaussian")  # exploration; discrete actions are sampled
    noise_start: Numeric = 0.3  # its deviation at the start
    noise_end: Numeric = 0.05  # at the end of the decay, and ever after
    noise_steps: Numeric = 100_000  # environment steps (of one seed) from start to end
    noise_schedule: configs.Schedule = static("linear")  # its course


@config
class TD3Config(DDPGConfig):
    """Hyperparameters of ITD3 and MATD3: twin critics, delayed actors, smoothed targets."""

    num_critics: int = static(2)
    policy_delay: int = static(2)
    target_noise: Numeric | None = 0.2


def ddpg_targets(
    target_params: Params, batch: Trajectory, noise: Array | None, *, nets: critics.ActorCritic, cfg: DDPGConfig
) -> Float[Array, "L M N"]:
    """What the critics' values should be, y = r + γ min Q⁻(s', μ⁻(s')).

    Args:
      target_params: {"actor": of `nets.actor`, "critic": of `nets.critic`}, those of the slowly moving networks.
      batch: sequences with `next_obs`; none crosses an episode's end.
      noise: standard normal numbers for the target policy, `[L, M, N, A]`; None for none.
      nets: networks.
      cfg: its leaves may be tracers.
    """
    x = critics.read(batch, nets, cfg)
    next_action = _deterministic(nets, x.next_output(target_params), x.steps.next_obs)
    if noise is not None and cfg.target_noise is not None and not nets.code.is_discrete:
        smooth = losses.smoothed_action(next_action, noise, cfg.target_noise, cfg.target_noise_clip)
        next_action = jnp.where(nets.code.is_real, smooth, 0.0)
    return x.target(losses.clipped_double_q(x.next_values(target_params, next_action)))


def ddpg_actor_loss(
    params: Params, batch: Trajectory, noise: Array | None, *, nets: critics.ActorCritic, cfg: DDPGConfig
) -> tuple[Array, Metrics]:
    """Minus the critics' value of the actors' actions, averaged over the agents that act.

    Args:
      params: {"actor": of `nets.actor`, "critic": of `nets.critic`}; differentiate with respect to the actors.
      batch: sequences; none crosses an episode's end.
      noise: Gumbel noise for discrete actions, `[L, M, N, A]`; not read for continuous ones.
      nets: networks.
      cfg: its leaves may be tracers.
    """
    x = critics.read(batch, nets, cfg)
    q, penalty = values_of_policy(params, x, noise)
    loss = parts.mean_loss(losses.deterministic_policy_loss(q) + penalty, x.acting, cfg.sharing)
    return loss, {"loss/actor": loss, "value/q_policy": losses.masked_mean(q, x.acting > 0)}


def iddpg(
    spec: EnvSpec,
    cfg: DDPGConfig,
    nets: critics.ActorCritic | None = None,
    *,
    targets=ddpg_targets,
    critic_loss=critics.critic_loss,
    actor_loss=ddpg_actor_loss,
) -> Learner:
    """Independent DDPG: each agent's critic reads its own view and action. At one agent this is DDPG.

    Args:
      spec: of the environment.
      cfg: hyperparameters.
      nets: your own networks; by default `default_nets(spec, cfg)`.
      targets, critic_loss, actor_loss: your own in place of `ddpg_targets`, `critic_loss` and `ddpg_actor_loss`, with
        the same arguments and results.
    """
    cfg = checked(spec, cfg)
    nets = parts.choose_nets(nets, default_nets, spec, cfg)
    trained = training(nets, cfg, targets=targets, critic_loss=critic_loss, actor_loss=actor_loss)
    return learner(nets, cfg, *trained)


def maddpg(spec: EnvSpec, cfg: DDPGConfig, nets: critics.ActorCritic | None = None, **own_losses: Callable) -> Learner:
    """MADDPG: critics read the global state and everyone's actions. Arguments as for `iddpg`.

    >>> from jmarl import envs
    >>> env = envs.matrix_game([[8.0, -12.0], [-12.0, 0.0]])
    >>> sorted(maddpg(env.spec, DDPGConfig(hidden_sizes=(8,))).init(jax.random.key(0)).params)
    ['actor', 'critic']
    """
    return iddpg(spec, parts.with_central_critic(cfg, "maddpg", "iddpg"), nets, **own_losses)


def itd3(spec: EnvSpec, cfg: TD3Config, nets: critics.ActorCritic | None = None, **own_losses: Callable) -> Learner:
    """Independent TD3; at one agent TD3. Arguments as for `iddpg`."""
    checks.validate(cfg, TD3Config, spec)
    return iddpg(spec, cfg, nets, **own_losses)


def matd3(spec: EnvSpec, cfg: TD3Config, nets: critics.ActorCritic | None = None, **own_losses: Callable) -> Learner:
    """MATD3: MADDPG with what TD3 adds to DDPG. Arguments as for `iddpg`."""
    return itd3(spec, parts.with_central_critic(cfg, "matd3", "itd3"), nets, **own_losses)


# ----------------------------------------------------------------------------------------------------- the parts


def default_nets(spec: EnvSpec, cfg: DDPGConfig) -> critics.ActorCritic:
    """The networks that `cfg` describes."""
    cfg = parts.with_critic_view(cfg, "obs")
    model, head = actor_critic.from_config(cfg, spec)
    actor = actor_critic.of_own_view(spec, lambda size: (head(size, scale=0.01),), model, cfg.sharing)
    critic = networks.ensemble(critics.network(spec, cfg), cfg.num_critics)
    return critics.ActorCritic(actor, critic, critics.action_code(spec))


def learner(nets: critics.ActorCritic, cfg: DDPGConfig, init: Callable, update_with: Callable) -> Learner:
    """A learner that acts by `nets.actor`; the two functions are what `training` returns."""
    code, explore, noise_scale = nets.code, _exploring(nets, cfg), exploration.over_env_steps(cfg, "noise")
    actor_step, remember = networks.one_step(nets.actor), critics.memory(nets)

    def init_carry(batch_shape):
        noise = jnp.zeros((*batch_shape, *code.is_real.shape)) if _keeps_noise(nets, cfg) else ()
        return {
            "actor": nets.actor.init_carry(batch_shape),
            "critic": nets.critic.init_carry(batch_shape),
            "noise": noise,
        }

    def act(state, carry, obs, first, key):
        actor, output = actor_step(state.params["actor"], carry["actor"], obs, first)
        action, noise = explore(state, output, obs, first, carry["noise"], key)
        critic = remember(state.params["critic"], carry["critic"], obs, action, first)
        return action, {"actor": actor, "critic": critic, "noise": noise}, {}

    def greedy(state, carry, obs, first):
        actor, output = actor_step(state.params["actor"], carry["actor"], obs, first)
        return code.decode(_deterministic(nets, output, obs)), {**carry, "actor": actor}

    def update(state, batch, key):
        shape = batch.steps.obs.agent_mask.shape + code.is_real.shape[1:]
        key_turns = jax.random.fold_in(key, 1)
        if code.is_discrete:
            return update_with(state, batch, None, jax.random.gumbel(key, shape), key_turns)
        smoothing = None if cfg.target_noise is None else jax.random.normal(key, shape)
        state, metrics = update_with(state, batch, smoothing, None, key_turns)
        is_counted = state.env_steps is not None
        return state, {**metrics, "noise": parts.as_metric(noise_scale(state))} if is_counted else metrics

    return Learner(init, init_carry, act, greedy, update, learns_from="replay")


def training(
    nets: critics.ActorCritic,
    cfg: DDPGConfig,
    *,
    targets=ddpg_targets,
    critic_loss=critics.critic_loss,
    actor_loss=ddpg_actor_loss,
    actors: critics.Actors | None = None,
    is_of_team: bool = False,
):
    """`Learner.init`, and `Learner.update` with its noise given: `(state, batch, target noise, actor noise, key)`.

    Actors are those of `actor_loss`, moved at once, or `actors`, which read the key. With `is_of_team`, the critic is
    one of all agents, so one optimiser moves it however parameters are shared.
    """
    options = {"nets": nets, "cfg": cfg}
    critic_rate = optim.learning_rate(cfg, start=cfg.critic_learning_rate)
    if actors is None:
        actors = critics.at_once(parts.optimizer(cfg, actor_rate(cfg)), functools.partial(actor_loss, **options))
    optimizers = {"actor": actors.optimizer, "critic": parts.optimizer(cfg, critic_rate, is_of_team=is_of_team)}

    def init(key):
        return critics.init_state(key, nets, optimizers, targets=("actor", "critic"))

    def update(state, batch, target_noise, actor_noise, key=None):
        batch, step = masks.readable_batch(batch), state.step + 1
        target = targets(state.target_params, batch, target_noise, **options)
        state, metrics, norm = critics.improve(
            optimizers,
            state,
            "critic",
            lambda part: critic_loss({**state.params, "critic": part}, batch, target, **options),
        )
        new, actor_metrics, actor_norm = actors.improve(state, state.params, batch, actor_noise, key)
        if cfg.policy_delay > 1:
            # Not a `cond`: seeds are vmapped, and then both branches run anyway.
            new = jax.tree.map(lambda x, old: jnp.where(step % cfg.policy_delay == 0, x, old), new, state)
        target_params = replay.update_target(state.target_params, new.params, step, cfg.policy_delay, cfg.tau)
        metrics = {
            **metrics,
            **norm,
            **actor_metrics,
            **actor_norm,
            "learning_rate": parts.as_metric(critic_rate(step)),
        }
        return new.replace(target_params=target_params, step=step), metrics

    return init, update


def actor_rate(cfg: DDPGConfig) -> optim.Schedule:
    """The course of the actors' step size."""
    return optim.learning_rate(cfg, steps_per_update=1 / cfg.policy_delay)


def actions_of_policy(params: Params, x: critics.Sequences, noise: Array | None) -> tuple[Array, Array]:
    """What actors do, coded and differentiable, and a penalty `[L, M, N]` for the size of logits."""
    obs: Any = x.steps.obs
    output = x.output(params)
    if not x.nets.code.is_discrete:
        return _deterministic(x.nets, output, obs), jnp.zeros(obs.agent_mask.shape)
    penalty = x.cfg.logit_coef * losses.masked_mean(output**2, obs.action_mask, axis=-1)
    return _relaxed(output, obs, noise, x.cfg.gumbel_temperature), penalty


def value_to_raise(q: Float[Array, "C *batch"], cfg: DDPGConfig) -> Float[Array, "*batch"]:
    """Of several critics' values the one that actors follow, as `cfg.actor_q` says."""
    return {"first": lambda q: q[0], "mean": lambda q: jnp.mean(q, 0), "min": losses.clipped_double_q}[cfg.actor_q](q)


def values_of_policy(params: Params, x: critics.Sequences, noise: Array | None) -> tuple[Array, Array]:
    """The critics' value `[L, M, N]` of what actors do, as `cfg.actor_q` says, and a penalty for the size of logits."""
    own, penalty = actions_of_policy(params, x, noise)
    return value_to_raise(x.values(params, own), x.cfg), penalty


def _exploring(nets: critics.ActorCritic, cfg: DDPGConfig) -> Callable:
    """`(state, actor's output, obs, first, noise, key) -> (action, noise)`: for one step, as training acts."""
    code, noise_scale = nets.code, exploration.over_env_steps(cfg, "noise")

    def explore(state, output, obs, first, noise, key):
        key_noise, key_random = jax.random.split(key)
        if code.is_discrete:
            logits = critics.or_random(state, cfg, output, jnp.zeros_like(output))
            return nets.distribution(logits, obs.action_mask).sample(seed=key_noise), noise
        scale = noise_scale(state)
        if _keeps_noise(nets, cfg):
            noise = jnp.where(first[:, None, None], 0.0, noise)
            added = noise = exploration.ornstein_uhlenbeck(key_noise, noise, scale)
        else:
            added = scale * jax.random.normal(key_noise, output.shape)
        chosen = jnp.clip(_deterministic(nets, output, obs) + added, -1.0, 1.0)
        anything = jax.random.uniform(key_random, output.shape, minval=-1.0, maxval=1.0)
        return code.decode(critics.or_random(state, cfg, chosen, anything)), noise

    return explore


def _keeps_noise(nets: critics.ActorCritic, cfg: DDPGConfig) -> bool:
    return cfg.noise == "ornstein_uhlenbeck" and not nets.code.is_discrete


def _deterministic(nets: critics.ActorCritic, output: Array, obs: Any) -> Array:
    """The coded action that an actor's output stands for."""
    if nets.code.is_discrete:
        return nets.code.encode(losses.masked_argmax(output, obs.action_mask))
    return jnp.where(nets.code.is_real, jnp.tanh(output), 0.0)


def _relaxed(output: Array, obs: Any, gumbel: Array | None, temperature: Numeric) -> Array:
    """A sampled discrete action, one-hot, with the gradient of a soft one."""
    assert gumbel is not None
    logits = heads.categorical(output, obs.action_mask).logits
    return heads.gumbel_softmax(logits, gumbel, temperature, straight_through=True)


def checked(spec: EnvSpec, cfg: Any) -> Any:
    """The config, with what its critics read."""
    checks.validate(cfg, DDPGConfig, spec)
    checks.require(cfg, ("gumbel_temperature",), lambda x: x > 0, "be positive: logits are divided by it")
    return parts.with_critic_view(cfg, "obs")
