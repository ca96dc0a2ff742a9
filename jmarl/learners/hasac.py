"""Agents that learn one after the other from replay: HATD3 and HASAC.

One critic of the team learns what joint actions are worth, and actors climb it in turns, in an order that is drawn anew
for every update. Agent i sees those before it in the order do what they do since they moved, and those after it what
they do until then:

    J_i = Q(s, a_before, a_i, a_after),   a_before ~ π_new,   a_i ~ π_θi,   a_after ~ π_old.

HATD3 climbs J_i with deterministic actors, and is otherwise MATD3: the lowest of two critics, smoothed targets, delayed
actors. HASAC climbs J_i - α log π_i(a_i|o_i) in the mean, and its critic learns the soft value of the team,

    y = r + γ (min Q⁻(s', a') - Σ_i α log π_i(a'_i|o'_i)),   a' ~ π.

Agents that move at once each climb a critic in which the others stand still, and may together go where none of them
wanted to; here what one gains, the next one knows. Rewards are the team's. Discrete actions are Gumbel-softmax samples
in HATD3, as in MATD3. In HASAC they are expectations over an agent's own legal actions, for each of which the critic is
read beside what the others do. With one agent these are TD3 and SAC, and HATD3 with `num_critics=1`, `policy_delay=1`
and `target_noise=None` is HADDPG.

Parameters are each agent's own, or a group's whose agents move at once, see `jmarl.learners.turns`. Noise is drawn once
for an update: an agent's new action and its old one are made of the same numbers. The authors' code
(https://github.com/PKU-MARL/HARL) draws anew, samples discrete actions of HASAC by Gumbel-softmax, and learns, beside a
temperature for each agent (`alpha_per_agent=True` here), another one for the critic; the paper has one for all.

References:
  Zhong et al., 2024, Heterogeneous-Agent Reinforcement Learning, sec. 4.4 (https://arxiv.org/abs/2304.09870).
  Liu et al., 2024, Maximum Entropy Heterogeneous-Agent Reinforcement Learning (https://arxiv.org/abs/2306.10715).
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jmarl import configs, losses, networks, optim
from jmarl.configs import config
from jmarl.learners import checks, critics, ddpg, parts, replay, sac, turns
from jmarl.types import EnvSpec, Learner, Metrics, Params, Trajectory, static


@config
class HATD3Config(ddpg.TD3Config):
    """Hyperparameters of HATD3: those of MATD3, for a team whose agents have parameters of their own."""

    sharing: configs.Sharing = static("per_agent")
    team_reward: configs.TeamReward = static("sum")  # of the agents' rewards
    critic_view: Literal["auto", "state"] = static("auto")  # what the critic reads: the state
    other_actions: Literal["current", "stored"] = static("current")  # in actors' loss, of those whose turn is later


@config
class HASACConfig(sac.SACConfig):
    """Hyperparameters of HASAC: those of MASAC, for a team whose agents have parameters of their own."""

    sharing: configs.Sharing = static("per_agent")
    team_reward: configs.TeamReward = static("sum")  # of the agents' rewards
    critic_view: Literal["auto", "state"] = static("auto")  # what the critic reads: the state
    own_action: Literal["input"] = static("input")  # the critic reads the joint action
    other_actions: Literal["current", "stored"] = static("current")  # in actors' loss, of those whose turn is later


class Mover(NamedTuple):
    """Who moves in one turn: an agent, or a group of agents that share parameters.

    Attributes:
      nets: networks, whose actor takes the mover's parameters alone; what it says of the members is meant.
      members: `[K, N]`, of each of its K members which agent it is.
    """

    nets: critics.ActorCritic
    members: Bool[Array, "K N"]

    @property
    def is_member(self) -> Bool[Array, "N"]:
        return self.members.any(0)

    def read(self, batch: Trajectory, cfg: Any) -> tuple[critics.Sequences, Array, Array]:
        """A batch; whose step counts in the mover's loss, `[L, M, N]`; and of which step of the team, `[L, M, 1]`."""
        x = critics.read(batch, self.nets, cfg)
        acting = jnp.where(self.is_member, x.acting, 0.0)
        return x, acting, replay.team_weight(acting)[..., None]

    def beside(self, own: Array, action: Array) -> Array:
        """The joint action `[L, M, N, A]` in which members do what `own` says."""
        return jnp.where(self.is_member[:, None], own, action)


def hatd3_actor_loss(
    params: Params, batch: Trajectory, action: Array, noise: Array | None, *, nets: Mover, cfg: HATD3Config
) -> tuple[Array, Metrics]:
    """Minus the critic's value of the joint action, averaged over the steps in which a member acts.

    Args:
      params: {"actor": of the mover alone, "critic": of the critics}; differentiate with respect to the actor.
      batch: sequences; none crosses an episode's end.
      action: what everyone does at this turn, coded, `[L, M, N, A]`.
      noise: Gumbel noise for discrete actions, `[L, M, N, A]`; not read for continuous ones.
      nets: the mover.
      cfg: its leaves may be tracers.
    """
    x, acting, weight = nets.read(batch, cfg)
    own, penalty = ddpg.actions_of_policy(params, x, noise)
    q = ddpg.value_to_raise(x.values(params, nets.beside(own, action)), cfg)[..., :1]  # each agent's is the team's
    loss = parts.mean_loss(losses.deterministic_policy_loss(q), weight)
    loss = loss + parts.mean_loss(jnp.where(nets.is_member, penalty, 0.0), acting)
    return loss, {"loss/actor": loss, "value/q_policy": losses.masked_mean(q, weight > 0)}


def hasac_targets(
    params: Params,
    target_params: Params,
    batch: Trajectory,
    noise: Array,
    *,
    nets: critics.ActorCritic,
    cfg: HASACConfig,
) -> Float[Array, "L M N"]:
    """What the critics' values should be, y = r + γ (min Q⁻(s', a') - Σ α log π). Arguments as for `sac_targets`."""
    x = critics.read(batch, nets, cfg)
    next_obs: Any = x.steps.next_obs
    policy: Any = nets.distribution(x.next_output(target_params if cfg.target_actor else params), next_obs.action_mask)
    next_action, log_prob = sac.draw(nets, policy, noise)
    next_q = losses.clipped_double_q(x.next_values(target_params, next_action))
    alpha = jnp.where(next_obs.agent_mask, jnp.exp(params["log_alpha"]), 0.0)  # who waits has no choice, nor entropy
    return x.target(next_q - jnp.sum(alpha * log_prob, axis=-1, keepdims=True))


def hasac_actor_loss(
    params: Params, batch: Trajectory, action: Array, noise: Array, *, nets: Mover, cfg: HASACConfig
) -> tuple[Array, tuple[Metrics, Array]]:
    """α log π - min Q of the joint action, averaged over the steps in which a member acts.

    Args:
      params: as for `hatd3_actor_loss`, and "log_alpha", [] or [N].
      batch, action, nets, cfg: as for `hatd3_actor_loss`.
      noise: `[L, M, N, A]`: standard normal numbers; for discrete actions Gumbel noise, which is not read here.

    Returns:
      A scalar; its parts, and log π of the actions (for discrete ones minus the entropy), which `sac_alpha_loss` reads.
    """
    x, acting, weight = nets.read(batch, cfg)
    policy: Any = nets.nets.distribution(x.output(params), x.steps.obs.action_mask)
    own, log_prob = sac.draw(nets.nets, policy, noise)
    alpha = jnp.exp(params["log_alpha"])
    if nets.nets.code.is_discrete:
        q = _values_of_alternatives(params, x, action, nets.members)
        by_agent = losses.soft_policy_loss(q, policy.logits, alpha[..., None], policy.probs)
        q = jnp.zeros(())
    else:
        by_agent = alpha * log_prob
        q = losses.clipped_double_q(x.values(params, nets.beside(own, action)))[..., :1]  # each agent's is the team's
    policy_loss = jnp.sum(jnp.where(acting > 0, by_agent, 0.0), axis=-1, keepdims=True) - q
    loss = parts.mean_loss(policy_loss, weight)
    return loss, ({"loss/actor": loss, "policy/entropy": -losses.masked_mean(log_prob, acting > 0)}, log_prob)


def hatd3(
    spec: EnvSpec,
    cfg: HATD3Config,
    nets: critics.ActorCritic | None = None,
    *,
    targets=ddpg.ddpg_targets,
    critic_loss=critics.team_critic_loss,
    actor_loss=hatd3_actor_loss,
) -> Learner:
    """HATD3: MATD3 for a team with one critic, whose agents learn one after the other.

    Args:
      spec: of the environment.
      cfg: hyperparameters.
      nets: your own networks, whose critics read the joint action in `own`, and have the team's value for each agent;
        by default `default_nets(spec, cfg)`.
      targets, critic_loss, actor_loss: your own in place of `ddpg_targets`, `team_critic_loss` and `hatd3_actor_loss`,
        with the same arguments and results.

    >>> from jmarl import envs
    >>> env = envs.probe("continuous", num_agents=2)
    >>> state = hatd3(env.spec, HATD3Config(hidden_sizes=(8,))).init(jax.random.key(0))
    >>> state.params["actor"]["torso"]["Dense_0"]["kernel"].shape  # of two agents
    (2, 1, 8)
    """
    checks.validate(cfg, HATD3Config, spec)
    turns.require_apart(cfg.sharing, "matd3")
    cfg = ddpg.checked(spec, parts.with_critic_view(cfg, "state"))
    nets = parts.choose_nets(nets, default_nets, spec, cfg)

    def act(params, x, noise):
        return ddpg.actions_of_policy(params, x, noise)[0]

    actors = _in_turn(spec, nets, cfg, ddpg.actor_rate(cfg), actor_loss, act)
    own = {"targets": targets, "critic_loss": critic_loss, "actors": actors}
    return ddpg.learner(nets, cfg, *ddpg.training(nets, cfg, **own, is_of_team=True))


def hasac(
    spec: EnvSpec,
    cfg: HASACConfig,
    nets: critics.ActorCritic | None = None,
    *,
    targets=hasac_targets,
    critic_loss=critics.team_critic_loss,
    actor_loss=hasac_actor_loss,
    alpha_loss=sac.sac_alpha_loss,
) -> Learner:
    """HASAC: soft actor-critic for a team with one critic, whose agents learn one after the other.

    Args:
      spec, cfg, nets: as for `hatd3`.
      targets, critic_loss, actor_loss, alpha_loss: your own in place of `hasac_targets`, `team_critic_loss`,
        `hasac_actor_loss` and `sac_alpha_loss`, with the same arguments and results.

    >>> from jmarl import envs
    >>> env = envs.matrix_game([[8.0, -12.0], [-12.0, 0.0]])
    >>> sorted(hasac(env.spec, HASACConfig(hidden_sizes=(8,))).init(jax.random.key(0)).params)
    ['actor', 'critic', 'log_alpha']
    """
    checks.validate(cfg, HASACConfig, spec)
    turns.require_apart(cfg.sharing, "masac")
    cfg = sac.checked(spec, parts.with_critic_view(cfg, "state"))
    nets = parts.choose_nets(nets, default_nets, spec, cfg)

    def act(params, x, noise):
        policy = nets.distribution(x.output(params), x.steps.obs.action_mask)
        return sac.draw(nets, policy, noise)[0]

    actors = _in_turn(spec, nets, cfg, optim.learning_rate(cfg), actor_loss, act)
    own = {"targets": targets, "critic_loss": critic_loss, "actors": actors, "alpha_loss": alpha_loss}
    return sac.learner(nets, cfg, *sac.training(spec, nets, cfg, **own, is_of_team=True))


# ----------------------------------------------------------------------------------------------------- the parts


def default_nets(spec: EnvSpec, cfg: Any) -> critics.ActorCritic:
    """The networks that `cfg` describes, whose class says which actors."""
    family: Any = sac if isinstance(cfg, HASACConfig) else ddpg
    nets = family.default_nets(spec, parts.with_critic_view(cfg, "state"))
    return nets._replace(critic=networks.ensemble(critics.joint_network(spec, cfg), cfg.num_critics))


def _in_turn(
    spec: EnvSpec,
    nets: critics.ActorCritic,
    cfg: Any,
    rate: optim.Schedule,
    loss: Callable[..., tuple[Array, Any]],
    act: Callable[[Params, critics.Sequences, Any], Array],
) -> critics.Actors:
    """Actors that learn one after the other; `act` gives what they do, coded, `[L, M, N, A]`.

    What a loss measures is averaged over turns; what it gives for each agent is that of the agent's own turn.
    """
    optimizer = optim.optimizer(rate, eps=cfg.adam_eps, max_grad_norm=cfg.max_grad_norm)
    players = turns.players(spec, nets.actor, optimizer, cfg.sharing)

    def turn(player, carry, given, batch, noise):
        actors, opt_states, action = carry
        mover = Mover(nets._replace(actor=players.actor(actors, player)), players.members(player))
        if jax.tree.leaves(batch.carry):
            batch = batch.replace(carry={**batch.carry, "actor": players.memory(batch.carry["actor"], player)})
        own, opt_state, aux, norm = parts.improve(
            players.optimizer,
            lambda own: loss({**given, "actor": own}, batch, action, noise, nets=mover, cfg=cfg),
            players.take(actors, player),
            players.take(opt_states, player),
        )
        action = mover.beside(act({"actor": own}, critics.read(batch, mover.nets, cfg), noise), action)
        carry = players.put(actors, own, player), players.put(opt_states, opt_state, player), action
        return carry, (mover.is_member, aux, norm)

    def improve(state, given, batch, noise, key):
        x = critics.read(batch, nets, cfg)
        action = x.action if cfg.other_actions == "stored" else act(state.params, x, noise)
        (actors, opt_states, _), (is_member, aux, norm) = turns.one_after_the_other(
            players,
            lambda player, carry, _: turn(player, carry, given, batch, noise),
            (state.params["actor"], state.opt_state["actor"], action),
            key,
        )

        def merged(leaf):
            return leaf.mean(0) if leaf.ndim == 1 else jnp.sum(jnp.where(is_member[:, None, None], leaf, 0.0), axis=0)

        params, opt_state = {**state.params, "actor": actors}, {**state.opt_state, "actor": opt_states}
        metrics = {"loss/actor_grad_norm": jnp.sqrt(jnp.sum(norm**2))}
        return state.replace(params=params, opt_state=opt_state), jax.tree.map(merged, aux), metrics

    return critics.Actors(players.optimizer, improve)


def _values_of_alternatives(
    params: Params, x: critics.Sequences, action: Array, members: Bool[Array, "K N"]
) -> Float[Array, "L M N A"]:
    """The lowest of the critics' values of each action of each member beside what the others do; 0 for other agents."""

    def of_member(member):
        def value(own):
            return losses.clipped_double_q(x.values(params, jnp.where(member[:, None], own, action)))[..., 0]

        return jnp.where(member[:, None], critics.of_each_action(value, action)[..., None, :], 0.0)

    return jnp.sum(jnp.stack([of_member(member) for member in members]), axis=0)
