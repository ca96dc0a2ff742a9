"""Parallelised Q-learning (PQN) for many agents, with neither replay nor target network: with IQL, VDN or QMIX.

Layer normalisation keeps the values in bounds, many parallel environments take the place of replay, and Q(λ) returns
of the rollout just made are the targets:

    L(θ) = mean( (Q(s, u) - G)² ),   G_t = r_t + γ ((1 - λ) max Q(s_{t+1}, ·) + λ G_{t+1}).

Q is each agent's own, with its own reward (IQL), or the team's, mixed of the agents' values Q_i(o_i, u_i) by their sum
(VDN) or monotonically with weights made from the state (QMIX).

References:
  Gallici et al., 2024, Simplifying Deep Temporal Difference Learning (https://arxiv.org/abs/2407.04811).
  Sunehag et al., 2018, Value-Decomposition Networks (https://arxiv.org/abs/1706.05296).
  Rashid et al., 2018, QMIX (https://arxiv.org/abs/1803.11485).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jmarl import configs, exploration, losses, masks, optim
from jmarl.configs import config
from jmarl.learners import checks, on_policy, parts, q_learning, replay
from jmarl.networks import mixers
from jmarl.types import EnvSpec, Learner, Metrics, Mixer, Network, Numeric, Params, TrainState, Trajectory, static


@config
class PQNIQLConfig(configs.OptimizerConfig, configs.RolloutConfig, configs.EpsilonConfig, configs.QNetworkConfig):
    """Hyperparameters of PQN-IQL. Defaults: those of JaxMARL's script for PQN-VDN on MPE, with smaller networks."""

    gamma: Numeric = 0.9  # discount of future rewards
    lambda_: Numeric = 0.3  # mixes one-step (0) and Monte Carlo (1) returns
    team_reward: configs.Reward = static("individual")  # each agent's own, or the sum or mean for everyone
    max_grad_norm: Numeric | None = 1.0
    num_minibatches: int = static(16)
    epsilon_end: Numeric = 0.1
    epsilon_steps: Numeric = 200_000
    cell_size: int = static(128)
    hidden_sizes: tuple[int, ...] = static((128, 128))
    layer_norm: bool = static(True)  # before each activation: what makes it stable without a target network


@config
class PQNConfig(PQNIQLConfig):
    """Hyperparameters of PQN-VDN: those of PQN-IQL, for a team."""

    team_reward: configs.TeamReward = static("sum")  # of the agents' rewards


@config
class PQNQMIXConfig(q_learning.MonotonicConfig, PQNConfig):
    """Hyperparameters of PQN-QMIX: those of PQN-VDN and of the mixer."""


class PQNNets(NamedTuple):
    """What `pqn_loss` needs to know of the networks.

    Attributes:
      agent: a network over observations `[L, M, ..]` whose output is a value of each action, `[L, M, N, A]`.
      mixer: from the agents' values to the team's; None for independent learners.
    """

    agent: Network
    mixer: Mixer | None


def default_nets(spec: EnvSpec, cfg: PQNIQLConfig) -> PQNNets:
    """The networks that `cfg` describes, whose class says which mixer."""
    agent = q_learning.agent_network(spec, cfg)
    if isinstance(cfg, PQNQMIXConfig):
        return PQNNets(agent, q_learning.monotonic_mixer(spec, cfg))
    return PQNNets(agent, mixers.vdn() if isinstance(cfg, PQNConfig) else None)


def pqn_targets(params: Params, batch: Trajectory, *, nets: PQNNets, cfg: PQNIQLConfig) -> Float[Array, "L M *K"]:
    """Q(λ) returns G of a rollout, `[T, B]`, or of each agent `[T, B, N]` where there is no mixer.

    Args:
      params: {"agent": of `nets.agent`, "mixer": of `nets.mixer`}, before the rollout is learnt from.
      batch: a rollout with `next_obs`, and with "q" measured.
      nets: networks.
      cfg: its leaves may be tracers.
    """
    steps: Any = batch.steps
    q = on_policy.of_successors(
        batch, steps.measured["q"], lambda *args: nets.agent.apply(params["agent"], *args[:3])[1]
    )
    best = losses.masked_argmax(q, steps.next_obs.action_mask)
    if nets.mixer is None:
        next_value = parts.values_of_all(losses.select(q, best), masks.counting(batch), cfg.team_reward)
        reward, terminated = parts.rewards_and_ends(steps, cfg.team_reward)
        last = jnp.broadcast_to(steps.last[..., None], reward.shape)
        return losses.lambda_returns(reward, jnp.where(terminated, 0.0, cfg.gamma), next_value, last, cfg.lambda_)
    next_obs = masks.speaking(steps.next_obs, masks.counting(batch))
    next_value = nets.mixer.apply(params["mixer"], q, best, next_obs)
    reward = losses.team_reward(steps.reward, cfg.team_reward)
    discount = jnp.where(jnp.all(steps.terminated, axis=-1), 0.0, cfg.gamma)
    return losses.lambda_returns(reward, discount, next_value, steps.last, cfg.lambda_)


def pqn_loss(
    params: Params, batch: Trajectory, targets: Float[Array, "L M *K"], *, nets: PQNNets, cfg: PQNIQLConfig
) -> tuple[Array, Metrics]:
    """Squared error of the team's value, or of each agent's, averaged over the steps that count.

    Args:
      params: {"agent": of `nets.agent`, "mixer": of `nets.mixer`}.
      batch: sequences.
      targets: G of the same steps, such as `pqn_targets` makes.
      nets: networks.
      cfg: its leaves may be tracers.

    Returns:
      A scalar and its parts.
    """
    steps, weight = batch.steps, masks.weight(batch)
    _, q = nets.agent.apply(params["agent"], batch.carry, steps.obs, steps.first)
    if nets.mixer is None:
        value = losses.select(q, steps.action)
        loss = parts.mean_loss(losses.value_loss(value, targets), weight, cfg.sharing)
    else:
        value = nets.mixer.apply(params["mixer"], q, steps.action, masks.speaking(steps.obs, weight > 0))
        weight = replay.team_weight(weight)
        loss = losses.masked_mean(losses.value_loss(value, targets) * weight, weight > 0)
    is_real = weight > 0
    return loss, {
        "loss/td": loss,
        "value/q_taken": losses.masked_mean(value, is_real),
        "value/target": losses.masked_mean(targets, is_real),
    }


def pqn_vdn(
    spec: EnvSpec, cfg: PQNConfig, nets: PQNNets | None = None, *, targets=pqn_targets, loss=pqn_loss
) -> Learner:
    """PQN with the sum as mixer, for the on-policy loop. At one agent this is PQN.

    Args:
      spec: of the environment.
      cfg: hyperparameters.
      nets: your own networks; by default `default_nets(spec, cfg)`.
      targets, loss: your own in place of `pqn_targets` and `pqn_loss`, with the same arguments and results.
    """
    return _learner(spec, cfg, PQNConfig, nets, targets, loss)


def pqn_iql(
    spec: EnvSpec, cfg: PQNIQLConfig, nets: PQNNets | None = None, *, targets=pqn_targets, loss=pqn_loss
) -> Learner:
    """PQN of independent agents, each with the value of its own actions and its own reward. Arguments as for `pqn_vdn`.

    >>> from jmarl import envs
    >>> env = envs.matrix_game([[8.0, -12.0], [-12.0, 0.0]])
    >>> pqn_iql(env.spec, PQNIQLConfig(hidden_sizes=(8,))).init(jax.random.key(0)).params["mixer"]
    {}
    """
    return _learner(spec, cfg, PQNIQLConfig, nets, targets, loss)


def pqn_qmix(
    spec: EnvSpec, cfg: PQNQMIXConfig, nets: PQNNets | None = None, *, targets=pqn_targets, loss=pqn_loss
) -> Learner:
    """PQN with the monotonic mixer of QMIX. Arguments as for `pqn_vdn`."""
    return _learner(spec, cfg, PQNQMIXConfig, nets, targets, loss)


# ----------------------------------------------------------------------------------------------------- the parts


def _learner(spec: EnvSpec, cfg: Any, cls: type, nets: PQNNets | None, targets: Any, loss: Any) -> Learner:
    checks.validate(cfg, cls, spec)
    checks.require_discrete(spec, "Q-learning takes the best of finitely many actions")
    classes: dict[type, type] = {PQNIQLConfig: PQNConfig, PQNConfig: PQNQMIXConfig}
    of_others = classes.get(cls)
    if of_others is not None and isinstance(cfg, of_others):
        raise TypeError(f"cfg is {type(cfg).__name__} here, and this algorithm takes {cls.__name__}: {cls.__name__}().")
    if nets is not None and (nets.mixer is None) != (cls is PQNIQLConfig):
        raise ValueError(
            f"nets.mixer is {'None' if nets.mixer is None else 'given'} here: pqn_iql has none, pqn_vdn and pqn_qmix "
            f"have one, such as that of pqn.default_nets(spec, cfg)."
        )
    nets = parts.choose_nets(nets, default_nets, spec, cfg)
    epsilon = exploration.over_env_steps(cfg, "epsilon")
    learning_rate = optim.learning_rate(cfg, steps_per_update=cfg.num_epochs * cfg.num_minibatches)
    if nets.mixer is None:
        optimizer = parts.optimizer(cfg, learning_rate)
    else:
        optimizer = optim.optimizer(learning_rate, eps=cfg.adam_eps, max_grad_norm=cfg.max_grad_norm)
    act, greedy = q_learning.acting(nets.agent, epsilon, tells_q=True)

    def init(key):
        params = {
            "agent": nets.agent.init(key),
            "mixer": nets.mixer.init(jax.random.fold_in(key, 1)) if nets.mixer else {},
        }
        return TrainState(params=params, opt_state=optimizer.init(params), step=jnp.int32(0))

    def minibatch_step(state, batch, target):
        params, opt_state, metrics, norm = parts.improve(
            optimizer, lambda params: loss(params, batch, target, nets=nets, cfg=cfg), state.params, state.opt_state
        )
        new = state.replace(params=params, opt_state=opt_state, step=state.step + 1)
        return new, {**metrics, "loss/grad_norm": norm}

    def update(state, batch, key):
        batch = masks.readable_batch(batch)
        target = targets(state.params, batch, nets=nets, cfg=cfg)
        state, metrics = on_policy.learn(minibatch_step, state, batch, target, key, cfg=cfg)
        metrics["learning_rate"] = parts.as_metric(learning_rate(state.step))
        if state.env_steps is not None:
            metrics["epsilon"] = parts.as_metric(epsilon(state))
        return state, metrics

    return Learner(init, nets.agent.init_carry, act, greedy, update, learns_from="rollouts")
