"""Deterministic actors: DDPG and TD3, for many agents MADDPG and MATD3.

A critic learns the value of actions, an actor follows its slope:

    L(φ) = mean( (Q_φ(s, a) - y)² ),   y = r + γ Q⁻(s', μ⁻(s')),
    L(θ) = mean( -Q_φ(s, μ_θ(o)) ).

Independent learners (IDDPG, ITD3) have critics of their own view and action, MADDPG's and MATD3's read the state and
everyone's actions. TD3 takes the lowest of two critics in y, adds clipped noise to μ⁻(s'), and moves the actor and the
targets at every second update only. With one agent these are DDPG and TD3. Discrete actions are one-hot vectors, and
gradients pass through a straight-through Gumbel-softmax.

References:
  Lillicrap et al., 2016, Continuous Control with Deep Reinforcement Learning (https://arxiv.org/abs/1509.02971).
  Lowe et al., 2017, Multi-Agent Actor-Critic for Mixed Cooperative-Competitive Environments
    (https://arxiv.org/abs/1706.02275).
  Fujimoto et al., 2018, Addressing Function Approximation Error in Actor-Critic Methods
    (https://arxiv.org/abs/1802.09477).
  Ackermann et al., 2019, Reducing Overestimation Bias in Multi-Agent Domains Using Double Centralized Critics
    (https://arxiv.org/abs/1910.01465).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array

from jmarl import exploration, losses, networks, optim, parallel
from jmarl.learners import checks, replayed
from jmarl.networks import actor_critic, heads
from jmarl.types import EnvSpec, Learner, Metrics, Network, Numeric, Params, TrainState, Trajectory, static


@struct.dataclass(kw_only=True)
class DDPGConfig:
    """Hyperparameters of IDDPG and MADDPG. Actions are meant in units of half their range, from -1 to 1."""

    learning_rate: Numeric = 1e-3  # Adam step size of actors
    critic_learning_rate: Numeric | None = None  # of critics; None: learning_rate
    learning_rate_end: Numeric = 0.0  # of schedules, as a fraction of the start
    learning_rate_schedule: str = static("constant")  # constant, linear or exponential, in optimiser steps
    horizon: Numeric | None = None  # calls of update until schedules end; None: make_train and run fill it in
    adam_eps: Numeric = 1e-5  # added to Adam's denominator
    max_grad_norm: Numeric | None = 0.5  # norm to which actors' and critics' gradients are clipped, each; None: never
    gamma: Numeric = 0.95  # discount
    tau: Numeric = 0.01  # share of the online networks in each update of the targets
    huber_delta: Numeric | None = None  # where the critics' loss turns linear; None: squared error
    num_critics: int = static(1)  # the lowest of so many values is the target
    policy_delay: int = static(1)  # updates of the critics for one of actors and targets
    target_noise: Numeric | None = None  # deviation of the noise on the target policy's actions; None: no noise
    target_noise_clip: Numeric = 0.5  # where it is cut off
    actor_q: str = static("first")  # whose value actors raise: of the first critic, or the mean or min of all
    other_actions: str = static("stored")  # in an actor's loss: stored (paper), current, or joint (gradients to all)
    gumbel_temperature: Numeric = 1.0  # of relaxed discrete actions
    logit_coef: Numeric = 1e-3  # weight of squared logits in the actors' loss, where actions are discrete
    team_reward: str | None = static(None)  # individual (None), or sum or mean of all agents' rewards for each
    noise: str = static("gaussian")  # exploration: gaussian or ornstein_uhlenbeck; discrete actions are sampled
    noise_start: Numeric = 0.3  # its deviation at the start
    noise_end: Numeric = 0.05  # at the end of the decay, and ever after
    noise_steps: Numeric = 100_000  # environment steps (of one seed) from start to end
    noise_schedule: str = static("linear")  # linear, exponential or constant
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


@struct.dataclass(kw_only=True)
class TD3Config(DDPGConfig):
    """Hyperparameters of ITD3 and MATD3: twin critics, delayed actors, smoothed targets."""

    num_critics: int = static(2)
    policy_delay: int = static(2)
    target_noise: Numeric | None = 0.2


class DDPGNets(NamedTuple):
    """What the losses need to know of the networks.

    Attributes:
      actor: a network over observations whose output is an action before tanh, or logits, `[L, M, N, A]`.
      critic: a network over `(obs, actions [L, M, N, K])` with values `[C, L, M, N]` of C critics. K is A, or N A for
        everyone's actions.
      code: how critics read actions.
    """

    actor: Network
    critic: Network
    code: replayed.ActionCode


def ddpg_critic_loss(
    params: Params, target_params: Params, batch: Trajectory, noise: Array | None, *, nets: DDPGNets, cfg: DDPGConfig
) -> tuple[Array, Metrics]:
    """TD errors of the critics, summed over critics and averaged over what is neither padding nor inactive.

    Args:
      params: {"actor": of `nets.actor`, "critic": of `nets.critic`}; differentiate with respect to the critics.
      target_params: the same of the target networks.
      batch: sequences with `next_obs`; none crosses an episode's end.
      noise: standard normal numbers for the target policy, `[L, M, N, A]`; None for none.
      nets: networks.
      cfg: its leaves may be tracers.

    Returns:
      A scalar and its parts; "priority" is the mean absolute error of each sequence.
    """
    x = replayed.Inputs.of(batch, nets, cfg)
    next_action = _deterministic(nets, x.next("actor", target_params, x.obs, x.next_obs), x.next_obs)
    if noise is not None and cfg.target_noise is not None and not nets.code.is_discrete:
        smooth = losses.smoothed_action(next_action, noise, cfg.target_noise, cfg.target_noise_clip)
        next_action = jnp.where(nets.code.is_real, smooth, 0.0)
    taken = replayed.action_features(cfg, x.action, x.action)
    next_action = replayed.visible(cfg, next_action, x.next_obs)
    ahead = replayed.action_features(cfg, next_action, next_action)
    next_q = x.next("critic", target_params, (x.obs, taken), (x.next_obs, ahead))
    reward, terminated = replayed.rewards_and_ends(x.steps, cfg.team_reward)
    discount = cfg.gamma * (1.0 - terminated)
    next_value = replayed.values_of_all(losses.clipped_double_q(next_q), x.next_obs.agent_mask, cfg.team_reward)
    target = jax.lax.stop_gradient(reward + discount * next_value)
    q = x.now("critic", params, (x.obs, taken))
    error = losses.value_loss(q, jnp.broadcast_to(target, q.shape), huber_delta=cfg.huber_delta)
    loss = replayed.mean_loss(error, x.mask, cfg.sharing)
    return loss, {
        "loss/critic": loss,
        "value/q_taken": losses.masked_mean(q[0], x.mask > 0),
        "value/target": losses.masked_mean(target, x.mask > 0),
        "priority": replayed.priority(q[0] - target, x.mask),
    }


def ddpg_actor_loss(
    params: Params, batch: Trajectory, noise: Array | None, *, nets: DDPGNets, cfg: DDPGConfig
) -> tuple[Array, Metrics]:
    """Minus the critics' value of the actors' actions, averaged over what is neither padding nor inactive.

    Args:
      params: {"actor": of `nets.actor`, "critic": of `nets.critic`}; differentiate with respect to the actors.
      batch: sequences; none crosses an episode's end.
      noise: Gumbel noise for discrete actions, `[L, M, N, A]`; not read for continuous ones.
      nets: networks.
      cfg: its leaves may be tracers.
    """
    x = replayed.Inputs.of(batch, nets, cfg)
    output = x.now("actor", params, x.obs)
    if nets.code.is_discrete:
        assert noise is not None and x.obs.action_mask is not None
        logits = heads.categorical(output, x.obs.action_mask).logits
        own = heads.gumbel_softmax(logits, noise, cfg.gumbel_temperature, straight_through=True)
        penalty = cfg.logit_coef * losses.masked_mean(output**2, x.obs.action_mask, axis=-1)
    else:
        own, penalty = _deterministic(nets, output, x.obs), jnp.zeros(x.mask.shape)
    own = replayed.visible(cfg, own, x.obs)
    others = replayed.others_actions(cfg, x.action, own)
    q = x.now("critic", params, (x.obs, replayed.action_features(cfg, own, others)))
    q = {"first": lambda q: q[0], "mean": lambda q: jnp.mean(q, 0), "min": losses.clipped_double_q}[cfg.actor_q](q)
    loss = replayed.mean_loss(losses.deterministic_policy_loss(q) + penalty, x.mask, cfg.sharing)
    return loss, {"loss/actor": loss, "value/q_policy": losses.masked_mean(q, x.mask > 0)}


def iddpg(spec: EnvSpec, cfg: DDPGConfig, nets: DDPGNets | None = None) -> Learner:
    """Independent DDPG: each agent's critic reads its own view and action. At one agent this is DDPG.

    Args:
      spec: of the environment.
      cfg: hyperparameters.
      nets: your own networks; by default `default_nets(spec, cfg)`.
    """
    checks.validate(cfg, {"noise": ("gaussian", "ornstein_uhlenbeck"), "actor_q": ("first", "mean", "min")})
    checks.require(cfg, ("gumbel_temperature",), lambda x: x > 0, "be positive: logits are divided by it")
    nets = default_nets(spec, cfg) if nets is None else nets
    code = nets.code
    noise_scale = optim.schedule(cfg.noise_schedule, cfg.noise_start, cfg.noise_end, cfg.noise_steps)
    init, update_with = training(nets, cfg)
    actor_step, critic_memory = networks.one_step(nets.actor), replayed.critic_memory(nets, cfg)
    keeps_noise = cfg.noise == "ornstein_uhlenbeck" and not code.is_discrete

    def init_carry(batch_shape):
        noise = jnp.zeros((*batch_shape, *code.is_real.shape)) if keeps_noise else ()
        memory = {"actor": nets.actor.init_carry(batch_shape), "critic": nets.critic.init_carry(batch_shape)}
        return {**memory, "noise": noise}

    def act(state, carry, obs, first, key):
        key_noise, key_random = jax.random.split(key)
        memory, output = actor_step(state.params["actor"], carry["actor"], obs, first)
        noise, is_random = carry["noise"], state.env_steps < cfg.random_steps
        if code.is_discrete:
            logits = jnp.where(is_random, 0.0, output)
            action = heads.categorical(logits, obs.action_mask).sample(seed=key_noise)
        else:
            scale = noise_scale(state.env_steps)
            if keeps_noise:
                noise = jnp.where(first[:, None, None], 0.0, noise)
                added = noise = exploration.ornstein_uhlenbeck(key_noise, noise, scale)
            else:
                added = scale * jax.random.normal(key_noise, output.shape)
            chosen = jnp.clip(_deterministic(nets, output, obs) + added, -1.0, 1.0)
            anything = jax.random.uniform(key_random, output.shape, minval=-1.0, maxval=1.0)
            action = code.decode(jnp.where(is_random, anything, chosen))
        before = {"actor": carry["actor"], "critic": carry["critic"]}
        critic = critic_memory(state.params["critic"], carry["critic"], obs, action, first)
        return action, {"actor": memory, "critic": critic, "noise": noise}, before

    def greedy(state, carry, obs, first):
        memory, output = actor_step(state.params["actor"], carry["actor"], obs, first)
        return code.decode(_deterministic(nets, output, obs)), {**carry, "actor": memory}

    def update(state, batch, key):
        shape = batch.steps.obs.agent_mask.shape + code.is_real.shape[1:]
        if code.is_discrete:
            return update_with(state, batch, None, jax.random.gumbel(key, shape))
        smoothing = None if cfg.target_noise is None else jax.random.normal(key, shape)
        state, metrics = update_with(state, batch, smoothing, None)
        return state, {**metrics, "noise": jnp.asarray(noise_scale(state.env_steps), jnp.float32)}

    return Learner(init, init_carry, act, greedy, update, learns_from="replay")


def maddpg(spec: EnvSpec, cfg: DDPGConfig, nets: DDPGNets | None = None) -> Learner:
    """MADDPG: critics read the global state and everyone's actions. Arguments as for `iddpg`.

    >>> from jmarl import envs
    >>> env = envs.matrix_game([[8.0, -12.0], [-12.0, 0.0]])
    >>> sorted(maddpg(env.spec, DDPGConfig(hidden_sizes=(8,))).init(jax.random.key(0)).params)
    ['actor', 'critic']
    """
    return iddpg(spec, replayed.centralized(cfg), nets)


def itd3(spec: EnvSpec, cfg: TD3Config, nets: DDPGNets | None = None) -> Learner:
    """Independent TD3; at one agent TD3. Arguments as for `iddpg`."""
    return iddpg(spec, _require_td3(cfg), nets)


def matd3(spec: EnvSpec, cfg: TD3Config, nets: DDPGNets | None = None) -> Learner:
    """MATD3: MADDPG with what TD3 adds to DDPG. Arguments as for `iddpg`."""
    return maddpg(spec, _require_td3(cfg), nets)


# ----------------------------------------------------------------------------------------------------- the parts


def default_nets(spec: EnvSpec, cfg: DDPGConfig) -> DDPGNets:
    """The networks that `cfg` describes."""
    model, head = actor_critic.from_config(cfg)
    code = replayed.action_code(spec)
    actor = actor_critic.of_own_view(spec, lambda size: (head(size, scale=0.01),), model, cfg.sharing)
    return DDPGNets(parallel.split_network(actor), replayed.action_critic(spec, cfg, code), code)


def training(nets: DDPGNets, cfg: DDPGConfig):
    """`Learner.init`, and `Learner.update` with its noise given: `(state, batch, target noise, actor noise)`."""
    critic_rate = optim.learning_rate(cfg, start=cfg.critic_learning_rate)
    actor_rate = optim.learning_rate(cfg, steps_per_update=1 / cfg.policy_delay)
    optimizers = {"actor": replayed.optimizer(cfg, actor_rate), "critic": replayed.optimizer(cfg, critic_rate)}

    def init(key):
        key_actor, key_critic = jax.random.split(key)
        params = {"actor": nets.actor.init(key_actor), "critic": nets.critic.init(key_critic)}
        return TrainState(
            params=params,
            target_params=jax.tree.map(jnp.copy, params),  # or a donated run would be given the same buffer twice
            opt_state={name: optimizers[name].init(params[name]) for name in params},
            step=jnp.int32(0),
            env_steps=jnp.int32(0),
        )

    def improve(name, params, opt_state, loss):
        """One optimiser step of the actors or the critics."""
        part, new, metrics, norm = replayed.improve(
            optimizers[name], params[name], opt_state[name], lambda part: loss({**params, name: part})
        )
        return {**params, name: part}, {**opt_state, name: new}, {**metrics, f"loss/{name}_grad_norm": norm}

    def update(state, batch, target_noise, actor_noise):
        def critic_loss(params):
            return ddpg_critic_loss(params, state.target_params, batch, target_noise, nets=nets, cfg=cfg)

        def actor_loss(params):
            return ddpg_actor_loss(params, batch, actor_noise, nets=nets, cfg=cfg)

        step = state.step + 1
        params, opt_state, metrics = improve("critic", state.params, state.opt_state, critic_loss)
        new_params, new_opt_state, actor_metrics = improve("actor", params, opt_state, actor_loss)
        if cfg.policy_delay > 1:
            # Not a `cond`: seeds are vmapped, and then both branches run anyway.
            new_params, new_opt_state = jax.tree.map(
                lambda new, old: jnp.where(step % cfg.policy_delay == 0, new, old),
                (new_params, new_opt_state),
                (params, opt_state),
            )
        target_params = replayed.update_target(state.target_params, new_params, step, cfg.policy_delay, cfg.tau)
        metrics = {**metrics, **actor_metrics, "learning_rate": jnp.asarray(critic_rate(step), jnp.float32)}
        return state.replace(
            params=new_params, target_params=target_params, opt_state=new_opt_state, step=step
        ), metrics

    return init, update


def _deterministic(nets: DDPGNets, output: Array, obs: Any) -> Array:
    """The coded action that an actor's output stands for."""
    if nets.code.is_discrete:
        return nets.code.encode(losses.masked_argmax(output, obs.action_mask))
    return jnp.where(nets.code.is_real, jnp.tanh(output), 0.0)


def _require_td3(cfg: Any) -> Any:
    if not isinstance(cfg, TD3Config):
        raise TypeError(f"itd3 and matd3 take a TD3Config, got {type(cfg).__name__}: iddpg and maddpg take that one.")
    return cfg
