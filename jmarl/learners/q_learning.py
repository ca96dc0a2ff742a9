"""Q-learning for many agents: IQL, VDN and QMIX, which are one loss and three mixers.

    L(θ) = mean( (Q(s, u) - y)² ),   y = r + γ Q⁻(s', argmax_u' Q(s', u')),

with Q⁻ the target network. IQL has a value and a reward for each agent; VDN and QMIX mix the agents' values into the
value Q_tot of the team: by their sum, or monotonically with weights made from the state. Either way each agent's own
greedy actions form the greedy joint action. With one agent, IQL is double DQN.

Targets may look further, `returns`: Peng's and Harutyunyan's Q(λ), and Retrace(λ), whose traces λ min(1, π/μ) are those
of a greedy π. Such a ratio is 0 where an action was not the greedy one, and at least 1 where it was, whatever μ is: so
nothing need be recorded of how likely an action was, and this is Watkins' Q(λ).

References:
  Watkins, 1989, Learning from Delayed Rewards.
  Munos et al., 2016, Safe and Efficient Off-Policy Reinforcement Learning (https://arxiv.org/abs/1606.02647).
  van Hasselt et al., 2016, Deep Reinforcement Learning with Double Q-learning (https://arxiv.org/abs/1509.06461).
  Tan, 1993, Multi-Agent Reinforcement Learning: Independent vs. Cooperative Agents.
  Sunehag et al., 2018, Value-Decomposition Networks (https://arxiv.org/abs/1706.05296).
  Rashid et al., 2018, QMIX (https://arxiv.org/abs/1803.11485).
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jmarl import configs, exploration, losses, masks, networks, normalize, optim
from jmarl.configs import config
from jmarl.learners import checks, parts, replay
from jmarl.networks import actor_critic, mixers
from jmarl.types import (
    EnvSpec,
    Learner,
    Metrics,
    Mixer,
    Moments,
    Network,
    Numeric,
    Observation,
    Params,
    Replaceable,
    TrainState,
    Trajectory,
    static,
)

Aux = tuple[Metrics, dict[str, Moments]]  # what a loss tells beside its scalar


@config
class QConfig(configs.OptimizerConfig, configs.EpsilonConfig, configs.QNetworkConfig):
    """Hyperparameters of IQL."""

    gamma: Numeric = 0.99  # discount of future rewards
    returns: Literal["td", "peng", "harutyunyan", "retrace"] = static(
        "td"
    )  # td: one step; over sequences the others, Q(lambda); retrace: as far as actions were greedy
    lambda_: Numeric = 0.8  # of all but td; 0 is td
    double_q: bool = static(True)  # the online network chooses the next action, the target network values it
    target_update_interval: int = static(200)  # optimiser steps between two updates of the target network
    tau: Numeric = 1.0  # share of the online network in such an update: 1 copies it
    huber_delta: Numeric | None = None  # where the loss turns linear; None: squared error
    team_reward: configs.Reward = static("individual")  # each agent's own, or the sum or mean for everyone
    standardize_reward: bool = static(False)  # rewards less their running mean, over their deviation
    standardize_return: bool = static(False)  # networks predict standardised returns
    standardize_beta: Numeric = 0.99  # weight of the past in those running moments
    burn_in: int = static(0)  # first steps that only warm up the memory, of sequences that start inside an episode


@config
class VDNConfig(QConfig):
    """Hyperparameters of VDN: those of IQL, for a team."""

    team_reward: configs.TeamReward = static("sum")  # of the agents' rewards
    next_agent_mask: Literal["next", "current"] = static(
        "next"
    )  # who counts in the value of s': who acts in s' or in s


@config
class HypernetConfig(Replaceable):
    """Mixers whose weights other networks make from the state."""

    mixer_hypernet_sizes: tuple[int, ...] = static(mixers.QMIX.hypernet_sizes)  # hidden layers of its hypernetworks
    mixer_scale: float = static(
        mixers.QMIX.scale
    )  # variance of the hypernetworks' first outputs, small to start near 0


@config
class MonotonicConfig(HypernetConfig):
    """The mixer of QMIX."""

    mixer_embed_size: int = static(mixers.QMIX.embed_size)  # width of the mixing layer


@config
class QMIXConfig(MonotonicConfig, VDNConfig):
    """Hyperparameters of QMIX: those of VDN and of the mixer."""


class QNets(NamedTuple):
    """What `q_loss` needs to know of the networks.

    Attributes:
      agent: a network over observations `[L, M, ..]` whose output is a value of each action, `[L, M, N, A]`.
      mixer: from the agents' values to the team's; None for independent learners.
    """

    agent: Network
    mixer: Mixer | None


def default_nets(spec: EnvSpec, cfg: QConfig) -> QNets:
    """The networks that `cfg` describes, whose class says which mixer.

    With an agent of your own beside QMIX's mixer:

    >>> from jmarl import envs
    >>> spec = envs.matrix_game([[8.0, -12.0], [-12.0, 0.0]]).spec
    >>> nets = default_nets(spec, QMIXConfig())
    >>> learner = qmix(spec, QMIXConfig(), nets._replace(agent=nets.agent))
    """
    agent = agent_network(spec, cfg)
    if isinstance(cfg, QMIXConfig):
        return QNets(agent, monotonic_mixer(spec, cfg))
    return QNets(agent, mixers.vdn() if isinstance(cfg, VDNConfig) else None)


def values_and_targets(
    params: Params,
    target_params: Params,
    batch: Trajectory,
    moments: dict[str, Moments] | None = None,
    *,
    nets: QNets,
    cfg: QConfig,
) -> tuple[Array, Array, Array, dict[str, Moments]]:
    """Q of what was done, its target y (without gradient) and the weight of both, and the moments with these returns.

    The three are `[L, M, K]`, for K = 1 team or N agents. For a target of your own, write a loss that reads the values
    here; both come from one pass of recurrent networks. Arguments as for `q_loss`.
    """
    steps: Any = batch.steps
    weight = replay.weights(batch, cfg.burn_in)
    q, next_q = unroll(nets.agent, params["agent"], batch, cfg.burn_in)
    old_q, old_next_q = unroll(nets.agent, target_params["agent"], batch, cfg.burn_in)
    next_action = losses.masked_argmax(next_q if cfg.double_q else old_next_q, steps.next_obs.action_mask)
    is_greedy = follows(batch, q if cfg.double_q else old_q, of_team=nets.mixer is not None)
    if nets.mixer is None:
        value, old_value = losses.select(q, steps.action), losses.select(old_q, steps.action)
        next_value = losses.select(old_next_q, next_action)
        old_value = parts.values_of_all(old_value, masks.weight(batch) > 0, cfg.team_reward)
        next_value = parts.values_of_all(next_value, masks.counting(batch), cfg.team_reward)
        reward, terminated = parts.rewards_and_ends(steps, cfg.team_reward)
    else:
        obs, next_obs = team_views(batch, cfg)
        value = nets.mixer.apply(params["mixer"], q, steps.action, obs)[..., None]
        old_value = nets.mixer.apply(target_params["mixer"], old_q, steps.action, obs)[..., None]
        next_value = nets.mixer.apply(target_params["mixer"], old_next_q, next_action, next_obs)[..., None]
        reward, terminated, weight = team(batch, weight, cfg.team_reward)
    target, moments = targets_of(
        batch, reward, terminated, weight, next_value, old_value, moments, cfg, is_greedy=is_greedy
    )
    return value, target, weight, moments


def q_loss(
    params: Params,
    target_params: Params,
    batch: Trajectory,
    moments: dict[str, Moments] | None = None,
    *,
    nets: QNets,
    cfg: QConfig,
) -> tuple[Array, Aux]:
    """TD error of Q_tot, or of each agent's Q, averaged over the steps that count.

    Args:
      params: {"agent": of `nets.agent`, "mixer": of `nets.mixer`}.
      target_params: the same of the target network.
      batch: sequences with `next_obs`; none crosses an episode's end.
      moments: {"return": moments of returns} if `cfg.standardize_return`: values are in their units.
      nets: networks.
      cfg: its leaves may be tracers.

    Returns:
      A scalar; then its parts, of which "priority" is the mean absolute error of each sequence, and the moments, with
      these returns among them.
    """
    value, target, weight, moments = values_and_targets(params, target_params, batch, moments, nets=nets, cfg=cfg)
    error = losses.value_loss(value, target, huber_delta=cfg.huber_delta)
    loss = parts.mean_loss(error, weight, cfg.sharing if nets.mixer is None else "shared")
    metrics = {
        "loss/td": loss,
        "value/q_taken": losses.masked_mean(value, weight > 0),
        "value/target": losses.masked_mean(target, weight > 0),
        "priority": replay.priority(value - target, weight),
    }
    return loss, (metrics, moments)


def iql(spec: EnvSpec, cfg: QConfig, nets: QNets | None = None, *, loss=q_loss) -> Learner:
    """Independent Q-learning: each agent learns the value of its own actions. At one agent this is double DQN.

    Args:
      spec: of the environment.
      cfg: hyperparameters.
      nets: your own networks; by default `default_nets(spec, cfg)`.
      loss: your own in place of `q_loss`, with the same arguments and results.
    """
    cfg = _checked(spec, cfg, QConfig, nets)
    nets = parts.choose_nets(nets, default_nets, spec, cfg)
    return learner(cfg, nets, loss, parts.optimizer(cfg, optim.learning_rate(cfg)))


def vdn(spec: EnvSpec, cfg: VDNConfig | QConfig, nets: QNets | None = None, *, loss=q_loss) -> Learner:
    """Value-decomposition networks: the team's value is the sum of the agents' values. Arguments as for `iql`.

    A `QConfig` serves, too: what it leaves at its default has that of a `VDNConfig`.

    >>> from jmarl import envs
    >>> env = envs.matrix_game([[8.0, -12.0], [-12.0, 0.0]])
    >>> sorted(vdn(env.spec, VDNConfig(hidden_sizes=(8,))).init(jax.random.key(0)).params)
    ['agent', 'mixer']
    """
    cfg = _checked(spec, cfg, VDNConfig, nets)
    return learner(cfg, parts.choose_nets(nets, default_nets, spec, cfg), loss)


def qmix(spec: EnvSpec, cfg: QMIXConfig | QConfig, nets: QNets | None = None, *, loss=q_loss) -> Learner:
    """QMIX: the team's value grows with each agent's, by weights made from the state. Arguments as for `iql`.

    A `QConfig` serves, too: what it leaves at its default has that of a `QMIXConfig`.
    """
    cfg = _checked(spec, cfg, QMIXConfig, nets)
    return learner(cfg, parts.choose_nets(nets, default_nets, spec, cfg), loss)


# ----------------------------------------------------------------------------------------------------- the parts


def learner(cfg: QConfig, nets: Any, loss: Any, optimizer: Any = None) -> Learner:
    """A Q-learner with a target network.

    Args:
      cfg: hyperparameters.
      nets: a NamedTuple of networks; `agent` acts epsilon-greedily.
      loss: `(params, target_params, batch, moments, *, nets, cfg) -> (loss, (metrics, moments))`, such as `q_loss`.
      optimizer: by default one for all parameters.
    """
    learning_rate, epsilon = optim.learning_rate(cfg), exploration.over_env_steps(cfg, "epsilon")
    if optimizer is None:
        optimizer = optim.optimizer(learning_rate, eps=cfg.adam_eps, max_grad_norm=cfg.max_grad_norm)
    act, greedy = acting(nets.agent, epsilon)

    def init(key):
        keys = jax.random.split(key, len(nets))
        params = {name: net.init(k) if net else {} for (name, net), k in zip(nets._asdict().items(), keys, strict=True)}
        kinds = {"reward": cfg.standardize_reward, "return": cfg.standardize_return}
        return TrainState(
            params=params,
            target_params=jax.tree.map(jnp.copy, params),  # or a donated run would be given the same buffer twice
            opt_state=optimizer.init(params),
            step=jnp.int32(0),
            moments={name: normalize.init() for name, is_asked in kinds.items() if is_asked},
        )

    def update(state, batch, key):
        del key
        batch, moments = _standardized(masks.readable_batch(batch), state.moments, cfg)
        params, opt_state, (metrics, moments), norm = parts.improve(
            optimizer,
            lambda params: loss(params, state.target_params, batch, moments, nets=nets, cfg=cfg),
            state.params,
            state.opt_state,
        )
        step = state.step + 1
        target_params = replay.update_target(state.target_params, params, step, cfg.target_update_interval, cfg.tau)
        metrics = {**metrics, "loss/grad_norm": norm, "learning_rate": parts.as_metric(learning_rate(step))}
        if state.env_steps is not None:
            metrics["epsilon"] = parts.as_metric(epsilon(state))
        return state.replace(
            params=params, target_params=target_params, opt_state=opt_state, step=step, moments=moments
        ), metrics

    return Learner(init, nets.agent.init_carry, act, greedy, update, learns_from="replay")


def acting(agent: Network, epsilon: Any, *, tells_q: bool = False):
    """`Learner.act`, with probability `epsilon(state)` at random, which may tell its values, and `Learner.greedy`."""
    step = networks.one_step(agent)

    def act(state, carry, obs, first, key):
        carry, q = step(state.params["agent"], carry, obs, first)
        action = exploration.epsilon_greedy(key, q, obs.action_mask, epsilon(state))
        return action, carry, {"q": q} if tells_q else {}

    def greedy(state, carry, obs, first):
        carry, q = step(state.params["agent"], carry, obs, first)
        return losses.masked_argmax(q, obs.action_mask), carry

    return act, greedy


def unroll(agent: Network, params: Params, batch: Trajectory, burn_in: int) -> tuple[Array, Array]:
    """Values of each step and of its true successor, `[L, M, N, A]`."""
    steps: Any = batch.steps
    carry = replay.blank_or_recorded(agent, batch)
    if not jax.tree.leaves(carry):  # without memory, successors need no gradient
        _, q = agent.apply(params, carry, steps.obs, steps.first)
        _, next_q = agent.apply(jax.lax.stop_gradient(params), carry, steps.next_obs, steps.first)
        return q, next_q
    sequence, starts = replay.with_successors(steps.obs, steps.next_obs, steps.first)
    q = replay.unroll(agent, params, carry, sequence, starts, burn_in=burn_in)
    return q[:-1], q[1:]


def team_views(batch: Trajectory, cfg: Any) -> tuple[Observation, Observation]:
    """What mixers read of each step and of its successor, with those who count in `agent_mask`."""
    steps: Any = batch.steps
    next_obs = steps.next_obs
    if cfg.next_agent_mask == "current":
        next_obs = next_obs.replace(agent_mask=steps.obs.agent_mask)
    return masks.speaking(steps.obs, masks.weight(batch) > 0), masks.speaking(next_obs, masks.counting(batch))


def team(batch: Trajectory, weight: Array, kind: str) -> tuple[Array, Array, Array]:
    """Reward, termination and weight of the team, `[L, M, 1]`: it goes on while any agent does."""
    reward = losses.team_reward(batch.steps.reward, kind)
    parts_of_team = reward, jnp.all(batch.steps.terminated, axis=-1), replay.team_weight(weight)
    return jax.tree.map(lambda x: x[..., None], parts_of_team)


def follows(batch: Trajectory, q: Array, *, of_team: bool) -> Array:
    """Whether what was done is best by `q` `[L, M, N, A]`, of each agent `[L, M, N]` or of all who act `[L, M, 1]`."""
    obs: Any = batch.steps.obs
    greedy_action = losses.masked_argmax(q, obs.action_mask)
    if of_team:
        return losses.is_greedy(batch.steps.action, greedy_action, obs.agent_mask)[..., None]
    return (batch.steps.action == greedy_action) | ~obs.agent_mask


def targets_of(
    batch: Trajectory,
    reward: Array,
    terminated: Array,
    weight: Array,
    next_value: Array,
    old_value: Array,
    moments: dict[str, Moments] | None,
    cfg: QConfig,
    *,
    is_greedy: Array,
) -> tuple[Array, dict[str, Moments]]:
    """y of each step, `[L, M, K]`, on the scale of the networks' outputs. Traces end with the episode and at padding.

    Args:
      batch: sequences.
      reward, terminated, weight: of K teams or agents.
      next_value: Q⁻ of the successor's greedy action.
      old_value: Q⁻ of the action taken, which `returns="harutyunyan"` and "retrace" read.
      moments: as for `q_loss`.
      cfg: hyperparameters.
      is_greedy: whether the action taken is the greedy one, which `returns="retrace"` reads: see `follows`.
    """
    moments = dict(moments or {})
    if cfg.standardize_return:
        next_value, old_value = (normalize.denormalize(moments["return"], x) for x in (next_value, old_value))
    discount = jnp.asarray(cfg.gamma * (1.0 - terminated))
    if cfg.returns == "td":
        target = reward + discount * next_value
    else:
        is_real = replay.team_weight(weight) > 0
        before_padding = jnp.concatenate([is_real[:-1] & ~is_real[1:], jnp.ones_like(is_real[:1])])
        cut = jnp.broadcast_to((batch.steps.last | before_padding)[..., None], reward.shape)
        if cfg.returns == "peng":
            target = losses.lambda_returns(reward, discount, next_value, cut, cfg.lambda_)
        elif cfg.returns == "retrace":
            log_ratio = jnp.where(is_greedy, 0.0, -jnp.inf)
            target = losses.retrace(log_ratio, reward, discount, old_value, next_value, cut, cfg.lambda_)
        else:
            target = old_value + losses.gae(reward, discount, old_value, next_value, cut, cfg.lambda_)
    if cfg.standardize_return:
        moments["return"] = normalize.update(moments["return"], target, weight > 0, cfg.standardize_beta)
        target = normalize.normalize(moments["return"], target)
    return jax.lax.stop_gradient(target), moments


def agent_network(spec: EnvSpec, cfg: configs.QNetworkConfig) -> Network:
    """The agents' network that `cfg` describes: from each one's view to a value of each action."""
    model, output = actor_critic.from_config(cfg, spec)

    def outputs(num_actions):
        return (networks.Dueling(output(1), output(num_actions)) if cfg.dueling else output(num_actions),)

    return actor_critic.of_own_view(spec, outputs, model, cfg.sharing)


def monotonic_mixer(spec: EnvSpec, cfg: MonotonicConfig) -> Mixer:
    """The QMIX mixer that `cfg` describes."""
    module = mixers.QMIX(cfg.mixer_embed_size, cfg.mixer_hypernet_sizes, cfg.mixer_embed_size, cfg.mixer_scale)
    return mixers.mixer(module, spec)


def _standardized(
    batch: Trajectory, moments: dict[str, Moments], cfg: QConfig
) -> tuple[Trajectory, dict[str, Moments]]:
    """Rewards on the scale of their running moments, if asked for."""
    if not cfg.standardize_reward:
        return batch, moments
    steps: Any = batch.steps
    new = normalize.update(moments["reward"], steps.reward, replay.weights(batch) > 0, cfg.standardize_beta)
    steps = steps.replace(reward=normalize.normalize(new, steps.reward))
    return dataclasses.replace(batch, steps=steps), {**moments, "reward": new}


def _checked(spec: EnvSpec, cfg: QConfig, cls: type, nets: QNets | None) -> Any:
    """The config as one of the algorithm's own class, which says which mixer it describes."""
    cfg = configs.extended(cfg, cls)
    checks.validate(cfg, cls, spec)
    checks.require_discrete(spec, "Q-learning takes the best of finitely many actions")
    of_others: Any = {QConfig: VDNConfig, VDNConfig: HypernetConfig}.get(cls)
    if of_others is not None and isinstance(cfg, of_others):
        raise TypeError(f"cfg is {type(cfg).__name__} here, and this algorithm takes {cls.__name__}: {cls.__name__}().")
    if nets is not None and (nets.mixer is None) != (cls is QConfig):
        raise ValueError(
            f"nets.mixer is {'None' if nets.mixer is None else 'given'} here: iql has none, vdn and qmix have one, "
            f"such as that of q_learning.default_nets(spec, cfg)."
        )
    return cfg
