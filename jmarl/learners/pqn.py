"""Parallelised Q-learning with value decomposition (PQN-VDN): neither replay nor target network.

Layer normalisation keeps the values in bounds, many parallel environments take the place of replay, and Q(λ) returns
of the rollout just made are the targets:

    L(θ) = mean( (Σ_i Q_i(o_i, u_i) - G)² ),   G_t = r_t + γ ((1 - λ) Σ_i max Q_i(o_{i,t+1}, ·) + λ G_{t+1}).

References:
  Gallici et al., 2024, Simplifying Deep Temporal Difference Learning (https://arxiv.org/abs/2407.04811).
  Sunehag et al., 2018, Value-Decomposition Networks (https://arxiv.org/abs/1706.05296).
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
class PQNConfig(configs.OptimizerConfig, configs.RolloutConfig, configs.EpsilonConfig, configs.NetworkConfig):
    """Hyperparameters of PQN-VDN. Defaults: those of JaxMARL's script for MPE, with smaller networks."""

    gamma: Numeric = 0.9  # discount of future rewards
    lambda_: Numeric = 0.3  # mixes one-step (0) and Monte Carlo (1) returns
    team_reward: configs.TeamReward = static("sum")  # of the agents' rewards
    max_grad_norm: Numeric | None = 1.0
    num_minibatches: int = static(16)
    epsilon_end: Numeric = 0.1
    epsilon_steps: Numeric = 200_000
    cell_size: int = static(128)
    hidden_sizes: tuple[int, ...] = static((128, 128))
    layer_norm: bool = static(True)  # before each activation: what makes it stable without a target network


class PQNNets(NamedTuple):
    """What `pqn_loss` needs to know of the networks.

    Attributes:
      agent: a network over observations `[L, M, ..]` whose output is a value of each action, `[L, M, N, A]`.
      mixer: from the agents' values to the team's.
    """

    agent: Network
    mixer: Mixer


def default_nets(spec: EnvSpec, cfg: PQNConfig) -> PQNNets:
    """The networks that `cfg` describes: the agents', and the sum as mixer."""
    return PQNNets(q_learning.agent_network(spec, cfg), mixers.vdn())


def pqn_targets(params: Params, batch: Trajectory, *, nets: PQNNets, cfg: PQNConfig) -> Float[Array, "L M"]:
    """Q(λ) returns G of a rollout, `[T, B]`.

    Args:
      params: {"agent": of `nets.agent`, "mixer": of `nets.mixer`}, before the rollout is learnt from.
      batch: a rollout with `next_obs`.
      nets: networks.
      cfg: its leaves may be tracers.
    """
    steps: Any = batch.steps
    q = on_policy.of_successors(batch, lambda *args: nets.agent.apply(params["agent"], *args[:3])[1])
    best = losses.masked_argmax(q, steps.next_obs.action_mask)
    next_obs = masks.speaking(steps.next_obs, masks.counting(batch))
    next_value = nets.mixer.apply(params["mixer"], q, best, next_obs)
    reward = losses.team_reward(steps.reward, cfg.team_reward)
    discount = jnp.where(jnp.all(steps.terminated, axis=-1), 0.0, cfg.gamma)
    return losses.lambda_returns(reward, discount, next_value, steps.last, cfg.lambda_)


def pqn_loss(
    params: Params, batch: Trajectory, targets: Float[Array, "L M"], *, nets: PQNNets, cfg: PQNConfig
) -> tuple[Array, Metrics]:
    """Squared error of the team's value, averaged over the steps that count.

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
    value = nets.mixer.apply(params["mixer"], q, steps.action, masks.speaking(steps.obs, weight > 0))
    weight_of_team = replay.team_weight(weight)
    is_real = weight_of_team > 0
    loss = losses.masked_mean(losses.value_loss(value, targets) * weight_of_team, is_real)
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
    checks.validate(cfg, PQNConfig, spec)
    checks.require_discrete(spec, "Q-learning takes the best of finitely many actions")
    nets = parts.choose_nets(nets, default_nets, spec, cfg)
    epsilon = exploration.over_env_steps(cfg, "epsilon")
    learning_rate = optim.learning_rate(cfg, steps_per_update=cfg.num_epochs * cfg.num_minibatches)
    optimizer = optim.optimizer(learning_rate, eps=cfg.adam_eps, max_grad_norm=cfg.max_grad_norm)
    act, greedy = q_learning.acting(nets.agent, epsilon)

    def init(key):
        params = {"agent": nets.agent.init(key), "mixer": nets.mixer.init(jax.random.fold_in(key, 1))}
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
