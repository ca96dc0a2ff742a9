"""Agents that learn one after the other, each knowing what those before it have become: HAPPO and HAA2C.

In an order that is drawn anew for every rollout, each agent maximises PPO's surrogate of an advantage that is weighted
by how much likelier the agents before it have made their own actions:

    L_m(θ_m) = mean[ -min(ρ_m M, clip(ρ_m, 1 ± ε) M) ],   M = A(s, a) Π_{j before m} ρ_j,   ρ_j = π_j / π_j_old.

What an agent gains is then gained by the team: the joint surrogate, the mean of A Π ρ, does
not fall from turn to turn, which agents that move at once cannot promise. Rewards are the team's, and a critic of the
state gives the advantage. With one step on each rollout, where ρ_m = 1, this is HAA2C; with one agent HAPPO is PPO.

Parameters are each agent's own, or a group's whose agents move at once, see `jmarl.learners.turns`. Turns make as many
network passes as PPO, and one more for each M.

References:
  Kuba et al., 2022, Trust Region Policy Optimisation in Multi-Agent Reinforcement Learning, alg. 4
    (https://arxiv.org/abs/2109.11251).
  Zhong et al., 2024, Heterogeneous-Agent Reinforcement Learning (https://arxiv.org/abs/2304.09870).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

from jmarl import configs, losses, masks, normalize, optim
from jmarl.configs import config
from jmarl.learners import checks, on_policy, parts, ppo, turns
from jmarl.learners.ppo import PPOTargets, ppo_targets
from jmarl.networks import actor_critic
from jmarl.types import EnvSpec, Learner, Metrics, Network, Params, TrainState, Trajectory, static


@config
class HAPPOConfig(ppo.SurrogateConfig):
    """Hyperparameters of HAPPO. Advantages are normalised over the whole rollout."""

    team_reward: configs.TeamReward = static("sum")  # of the agents' rewards
    sharing: configs.Sharing = static("per_agent")
    critic_view: Literal["auto", "state", "state_id"] = static("auto")  # what the critic reads; auto: state
    num_minibatches: int = static(1)


@config
class HAA2CConfig(HAPPOConfig):
    """Hyperparameters of HAA2C: those of HAPPO, one step on each rollout. `clip_eps` changes nothing."""

    num_epochs: int = static(1)
    normalize_advantage: Literal["all", "agent", "none"] = static("none")


class HANets(NamedTuple):
    """Actors with parameters of their own, and a critic.

    Attributes:
      actor: a network over observations, to what `distribution` reads. Parameters of `sharing="per_agent"` have a
        leading axis N, and the same function serves any number of agents; those of "per_group" are {"group_0": ..}.
      critic: a network over observations whose output is a value for each agent, `[L, M, N]`.
      distribution: `(actor's output, action_mask) -> distribution` over actions.
    """

    actor: Network
    critic: Network
    distribution: Callable[[Any, Array | None], Any]


class Player(NamedTuple):
    """Who moves in one turn: an agent, or a group of agents that share parameters.

    Attributes:
      evaluate: `(its parameters, batch) -> (log_prob, entropy)`, `[L, M, N]`; those of its members are meant.
      members: `[N]`, which agents it is.
      distribution: `(its parameters, batch) -> distribution` over actions, of each agent as for `evaluate`.
    """

    evaluate: Callable[[Params, Trajectory], tuple[Array, Array]]
    members: Bool[Array, "N"]
    distribution: Callable[[Params, Trajectory], Any]


def happo_loss(
    params: Params, batch: Trajectory, targets: PPOTargets, *, nets: Player, cfg: HAPPOConfig
) -> tuple[Array, Metrics]:
    """Clipped surrogate and entropy bonus of one player's members where they act.

    Args:
      params: of the player alone.
      batch: sequences.
      targets: of the same steps; the advantage is M, weighted by those who moved before.
      nets: the player.
      cfg: its leaves may be tracers.

    Returns:
      A scalar and its parts.
    """
    acting = jnp.where(nets.members, masks.acting(batch), 0.0)
    log_prob, entropy = nets.evaluate(params, batch)
    # What is none of this player's has no slope: it may not even be a number.
    log_prob = jnp.where(nets.members, log_prob, targets.log_prob)
    surrogate = losses.clipped_surrogate(log_prob, targets.log_prob, targets.advantage, cfg.clip_eps)
    actor_loss = parts.mean_loss(surrogate, acting)
    mean_entropy = parts.mean_loss(jnp.where(nets.members, entropy, 0.0), acting)
    loss = actor_loss - cfg.ent_coef * mean_entropy
    is_far = jnp.abs(jnp.exp(log_prob - targets.log_prob) - 1) > cfg.clip_eps
    return loss, {
        "loss/actor": actor_loss,
        "policy/entropy": mean_entropy,
        "policy/approx_kl": parts.mean_loss(losses.approx_kl(log_prob, targets.log_prob), acting),
        "policy/clip_fraction": parts.mean_loss(is_far.astype(surrogate.dtype), acting),
    }


def happo_critic_loss(
    params: Params, batch: Trajectory, targets: PPOTargets, *, nets: HANets, cfg: HAPPOConfig
) -> tuple[Array, Metrics]:
    """Value loss of the team's steps that count. As for `happo_loss`, of all networks and the critic's parameters."""
    _, value = nets.critic.apply(params, batch.carry["critic"], batch.steps.obs, batch.steps.first)
    error = losses.value_loss(
        value, targets.value_target, old_value=targets.value, clip_eps=cfg.value_clip_eps, huber_delta=cfg.huber_delta
    )
    loss = parts.mean_loss(error, masks.weight(batch))
    return loss, {"loss/critic": loss}


def happo(
    spec: EnvSpec,
    cfg: HAPPOConfig,
    nets: HANets | None = None,
    *,
    targets=ppo_targets,
    loss=happo_loss,
    critic_loss=happo_critic_loss,
) -> Learner:
    """HAPPO: PPO for a team whose agents learn one after the other, each with parameters of its own.

    Args:
      spec: of the environment.
      cfg: hyperparameters.
      nets: your own networks; by default `default_nets(spec, cfg)`.
      targets, loss, critic_loss: your own in place of `ppo_targets`, `happo_loss` and `happo_critic_loss`, with the
        same arguments and results. Advantages of targets are normalised, and weighted by who moved before, afterwards.

    >>> from jmarl import envs
    >>> env = envs.matrix_game([[8.0, -12.0], [-12.0, 0.0]])
    >>> state = happo(env.spec, HAPPOConfig(hidden_sizes=(8,))).init(jax.random.key(0))
    >>> state.params["actor"]["torso"]["Dense_0"]["kernel"].shape  # of two agents
    (2, 1, 8)
    """
    checks.validate(cfg, HAPPOConfig, spec)
    learning_rate, ent_coef = ppo.schedules(cfg)
    optimizer = optim.optimizer(learning_rate, eps=cfg.adam_eps, max_grad_norm=cfg.max_grad_norm)

    def improve(optimizer, player, params, opt_state, batch, target, step, key):
        """A player's passes over the rollout."""

        def minibatch_step(state, batch, target):
            params, opt_state, step = state
            current = dataclasses.replace(cfg, ent_coef=ent_coef(step))
            params, opt_state, metrics, norm = parts.improve(
                optimizer, lambda params: loss(params, batch, target, nets=player, cfg=current), params, opt_state
            )
            return (params, opt_state, step + 1), {**metrics, "loss/grad_norm": norm}

        first = params, opt_state, step
        (params, opt_state, _), metrics = on_policy.learn_sequences(minibatch_step, first, batch, target, key, cfg=cfg)
        return params, opt_state, metrics

    return in_turns(spec, cfg, nets, improve, optimizer, targets=targets, critic_loss=critic_loss)


def in_turns(
    spec: EnvSpec,
    cfg: HAPPOConfig,
    nets: HANets | None,
    improve: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    targets: Callable[..., Any],
    critic_loss: Callable[..., Any],
) -> Learner:
    """A team whose actors learn one after the other by `improve`, and its critic.

    Args:
      spec: of the environment.
      cfg: hyperparameters.
      nets: networks; None for `default_nets(spec, cfg)`.
      improve: `(optimizer, player, its parameters, its optimiser state, batch, targets, step, key) -> (parameters,
        optimiser state, metrics)`, one turn on a rollout of sequences. The advantage of its targets is M.
      optimizer: of one player, whose state `improve` may leave as it is.
      targets, critic_loss: as for `happo`.
    """
    turns.require_apart(cfg.sharing, "mappo")
    nets = parts.choose_nets(nets, default_nets, spec, cfg)
    policy = actor_critic.separate(nets.actor, nets.critic, nets.distribution)
    learning_rate, _ = ppo.schedules(cfg)
    steps_per_update = cfg.num_epochs * cfg.num_minibatches
    critic_rate = optim.learning_rate(cfg, start=cfg.critic_learning_rate, steps_per_update=steps_per_update)
    critic_optimizer = optim.optimizer(critic_rate, eps=cfg.adam_eps, max_grad_norm=cfg.max_grad_norm)
    players = turns.players(spec, nets.actor, optimizer, cfg.sharing)

    def init(key):
        params = policy.init(key)
        opt_state = {
            "actor": players.optimizer.init(params["actor"]),
            "critic": critic_optimizer.init(params["critic"]),
        }
        moments = {"value": normalize.init()} if cfg.normalize_value else {}
        return TrainState(params=params, opt_state=opt_state, step=jnp.int32(0), moments=moments)

    def act(state, carry, obs, first, key):
        carry, action, measured = policy.sample(state.params, carry, obs, first, key)
        return action, carry, measured

    def greedy(state, carry, obs, first):
        carry, action = policy.mode(state.params, carry, obs, first)
        return action, carry

    def turn(player, batch, target, carry, key):
        """One player learns; then what it has become weighs on those that follow."""
        actors, opt_states, log_ratio, start = carry
        one = _player(players, nets, actors, player)
        weighted = target.replace(advantage=target.advantage * jnp.exp(log_ratio)[..., None])
        own = players.take(actors, player), players.take(opt_states, player)
        params, opt_state, metrics = improve(players.optimizer, one, *own, batch, weighted, start, key)
        moved = jnp.where(one.members & (masks.acting(batch) > 0), one.evaluate(params, batch)[0] - target.log_prob, 0)
        actors, opt_states = players.put(actors, params, player), players.put(opt_states, opt_state, player)
        return (actors, opt_states, log_ratio + jnp.sum(moved, axis=-1), start), metrics

    def critic_step(carry, batch, target):
        params, opt_state, metrics, norm = parts.improve(
            critic_optimizer, lambda params: critic_loss(params, batch, target, nets=nets, cfg=cfg), *carry
        )
        return (params, opt_state), {**metrics, "loss/critic_grad_norm": norm}

    def update(state, batch, key):
        batch = parts.of_team(masks.readable_batch(batch), cfg.team_reward)
        target, moments, seen = targets(state.params, batch, state.moments, nets=policy, cfg=cfg)
        if cfg.normalize_advantage != "none":
            axis = (0, 1) if cfg.normalize_advantage == "agent" else None
            advantage = losses.masked_normalize(target.advantage, masks.acting(batch) > 0, axis=axis)
            target = target.replace(advantage=advantage)
        batch, target = on_policy.sequences(batch, target, cfg=cfg)
        key_critic, key_order, key_turns = jax.random.split(key, 3)
        critic, critic_metrics = on_policy.learn_sequences(
            critic_step, (state.params["critic"], state.opt_state["critic"]), batch, target, key_critic, cfg=cfg
        )
        start = state.params["actor"], state.opt_state["actor"], jnp.zeros_like(target.advantage[..., 0]), state.step
        (actors, opt_states, log_ratio, _), metrics = turns.one_after_the_other(
            players,
            lambda player, carry, key: turn(player, batch, target, carry, key),
            start,
            key_order,
            jax.random.split(key_turns, players.num),
        )
        state = state.replace(
            params={"actor": actors, "critic": critic[0]},
            opt_state={"actor": opt_states, "critic": critic[1]},
            step=state.step + steps_per_update,
            moments=moments,
        )
        somebody_acts = jnp.any(masks.acting(batch) > 0, axis=-1)
        metrics = {**jax.tree.map(jnp.mean, metrics), **critic_metrics, **seen}
        metrics["policy/joint_ratio"] = losses.masked_mean(jnp.exp(log_ratio), somebody_acts)
        return state, {**metrics, "learning_rate": parts.as_metric(learning_rate(state.step))}

    return Learner(init, policy.init_carry, act, greedy, update, learns_from="rollouts")


def haa2c(
    spec: EnvSpec,
    cfg: HAA2CConfig,
    nets: HANets | None = None,
    *,
    targets=ppo_targets,
    loss=happo_loss,
    critic_loss=happo_critic_loss,
) -> Learner:
    """HAA2C: `happo` with one step on each rollout, where nothing is clipped. Arguments as for `happo`."""
    checks.validate(cfg, HAA2CConfig, spec)
    return happo(spec, ppo.require_one_step(cfg), nets, targets=targets, loss=loss, critic_loss=critic_loss)


# ----------------------------------------------------------------------------------------------------- the parts


def default_nets(spec: EnvSpec, cfg: HAPPOConfig) -> HANets:
    """The networks that `cfg` describes."""
    cfg = parts.with_critic_view(cfg, "state")
    model, head = actor_critic.from_config(cfg, spec)
    output, distribution = actor_critic.policy_output(spec, head, cfg.action_distribution)
    actor = actor_critic.of_own_view(spec, lambda size: (output(size),), model, cfg.sharing)
    model, head = actor_critic.from_config(cfg)
    critic = actor_critic.of_state_or_view(
        spec, lambda size: (head(size, scale=1.0),), model, cfg.sharing, cfg.critic_view
    )
    return HANets(actor, critic, distribution)


def _player(players: turns.Players, nets: HANets, actors: Params, number: Any) -> Player:
    net = players.actor(actors, number)

    def distribution(params, batch):
        obs, first = batch.steps.obs, batch.steps.first
        _, output = net.apply(params, players.memory(batch.carry["actor"], number), obs, first)
        return nets.distribution(output, obs.action_mask)

    def evaluate(params, batch):
        pi = distribution(params, batch)
        return pi.log_prob(batch.steps.action), pi.entropy()

    return Player(evaluate, players.members(number).any(0), distribution)
