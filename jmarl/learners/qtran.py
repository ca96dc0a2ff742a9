"""QTRAN-base: Q-learning for a team that is told, beside its values, which sum of agents' values has the same maximum.

A joint value without restriction learns from rewards, and the sum of the agents' own values, Q' = Σ_i Q_i, is fitted to
it with the help of a value V of the state: equal where all do what they value most, ū, and no lower elsewhere,

    L_td = mean( (Q_jt(s, u) - y)² ),   y = r + γ Q_jt⁻(s', ū'),
    L_opt = mean( (Q'(s, ū) - Q̂_jt(s, ū) + V(s))² ),
    L_nopt = mean( min(Q'(s, u) - Q̂_jt(s, u) + V(s), 0)² ),
    L = L_td + λ_opt L_opt + λ_nopt L_nopt,

where no gradient flows into Q̂_jt. Where both fits hold, ū is the best joint action of Q_jt, whatever it is of others.

The joint value is a network over the state, the joint action and the values of agents of its own, which remember where
the others do; V reads the state and these values, without gradient. So Q_jt learns from L_td alone. The paper instead
adds up what hidden layers of the agents themselves say of each one's view and action, and passes L_td on to them.

References:
  Son et al., 2019, QTRAN: Learning to Factorize with Transformation for Cooperative Multi-Agent Reinforcement Learning,
    sec. 3.1 and 3.2 (https://arxiv.org/abs/1905.05408).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from jmarl import configs, losses
from jmarl.configs import config
from jmarl.learners import checks, parts, q_learning, replay
from jmarl.learners.q_learning import Aux, QConfig, VDNConfig
from jmarl.networks import mixers
from jmarl.types import EnvSpec, Learner, Mixer, Moments, Network, Numeric, Params, Trajectory, static


@config
class QTRANConfig(VDNConfig):
    """Hyperparameters of QTRAN-base: those of VDN and of the joint value."""

    opt_loss_coef: Numeric = 1.0  # λ_opt, weight of the fit where all do what they value most
    nopt_loss_coef: Numeric = 1.0  # λ_nopt, weight of the bound elsewhere
    joint_sizes: tuple[int, ...] = static(mixers.Joint.hidden_sizes)  # layers of the joint value, and of V


class QTRANNets(NamedTuple):
    """What `qtran_loss` needs to know of the networks.

    Attributes:
      agent: as in VDN.
      joint_agent: agents whose values the joint value reads, with carries like those of `agent`.
      joint: from these values and the joint action to Q_jt.
      value: from these values to V; it reads no action.
    """

    agent: Network
    joint_agent: Network
    joint: Mixer
    value: Mixer


@struct.dataclass(kw_only=True)
class TransformedValues:
    """What QTRAN makes of a batch, each `[L, M, 1]`.

    Attributes:
      joint: Q_jt of what was done.
      target: y, without gradient.
      optimal_error: Q' - Q̂_jt + V of the greedy joint action, which is to be 0.
      taken_error: the same of what was done, which is not to be negative.
      weight: of each step, 0 for padding.
    """

    joint: Float[Array, "L M 1"]
    target: Float[Array, "L M 1"]
    optimal_error: Float[Array, "L M 1"]
    taken_error: Float[Array, "L M 1"]
    weight: Float[Array, "L M 1"]


def default_nets(spec: EnvSpec, cfg: QTRANConfig) -> QTRANNets:
    """The networks that `cfg` describes."""
    agent, module = q_learning.agent_network(spec, cfg), mixers.Joint(cfg.joint_sizes)
    return QTRANNets(agent, agent, mixers.joint(module, spec), mixers.joint(module, spec, reads_actions=False))


def transformed_values(
    params: Params,
    target_params: Params,
    batch: Trajectory,
    moments: dict[str, Moments] | None = None,
    *,
    nets: QTRANNets,
    cfg: QTRANConfig,
) -> tuple[TransformedValues, dict[str, Moments]]:
    """The joint value of what was done, its target, and how far Q' + V is from it. Arguments as for `qtran_loss`."""
    steps: Any = batch.steps
    blank = dataclasses.replace(batch, carry=())
    q, next_q = q_learning.unroll(nets.agent, params["agent"], batch, cfg.burn_in)
    chooses = q
    if not cfg.double_q:
        chooses, next_q = q_learning.unroll(nets.agent, target_params["agent"], batch, cfg.burn_in)
    joint_q, _ = q_learning.unroll(nets.joint_agent, params["joint_agent"], blank, cfg.burn_in)
    old_q, old_next_q = q_learning.unroll(nets.joint_agent, target_params["joint_agent"], blank, cfg.burn_in)
    best_action = losses.masked_argmax(q, steps.obs.action_mask)
    next_action = losses.masked_argmax(next_q, steps.next_obs.action_mask)
    obs, next_obs = q_learning.team_views(batch, cfg)

    def joint(params, q, action, obs=obs):
        return nets.joint.apply(params["joint"], q, action, obs)[..., None]

    fixed_q = jax.lax.stop_gradient(joint_q)
    value = nets.value.apply(params["value"], fixed_q, steps.action, obs)[..., None]
    fixed_joint = jax.lax.stop_gradient(params["joint"])

    def error(action):
        total = mixers.vdn().apply({}, q, action, obs)[..., None]
        return total - joint({"joint": fixed_joint}, fixed_q, action) + value

    next_value = joint(target_params, old_next_q, next_action, next_obs)
    old_value = joint(target_params, old_q, steps.action)
    reward, terminated, weight = q_learning.team(batch, replay.weights(batch, cfg.burn_in), cfg.team_reward)
    is_greedy = q_learning.follows(batch, chooses, of_team=True)
    target, moments = q_learning.targets_of(
        batch, reward, terminated, weight, next_value, old_value, moments, cfg, is_greedy=is_greedy
    )
    values = TransformedValues(
        joint=joint(params, joint_q, steps.action),
        target=target,
        optimal_error=error(best_action),
        taken_error=error(steps.action),
        weight=weight,
    )
    return values, moments


def qtran_loss(
    params: Params,
    target_params: Params,
    batch: Trajectory,
    moments: dict[str, Moments] | None = None,
    *,
    nets: QTRANNets,
    cfg: QTRANConfig,
) -> tuple[Array, Aux]:
    """L_td + λ_opt L_opt + λ_nopt L_nopt, each averaged over the steps that count.

    Args:
      params: one entry for each of `nets`, by name.
      target_params: the same of the target networks.
      batch: sequences with `next_obs`; none crosses an episode's end. The joint value's agents start each with a blank
        memory, so recurrent ones want whole episodes, or a burn-in for what starts inside one.
      moments: as for `q_loss`.
      nets: networks.
      cfg: its leaves may be tracers.

    Returns:
      As `q_loss`: a scalar; then its parts and the moments.
    """
    values, moments = transformed_values(params, target_params, batch, moments, nets=nets, cfg=cfg)

    def mean(x, target):
        return parts.mean_loss(losses.value_loss(x, target, huber_delta=cfg.huber_delta), values.weight)

    nothing = jnp.zeros_like(values.target)
    loss_td = mean(values.joint, values.target)
    loss_opt = mean(values.optimal_error, nothing)
    loss_nopt = mean(jnp.minimum(values.taken_error, 0.0), nothing)
    loss = loss_td + cfg.opt_loss_coef * loss_opt + cfg.nopt_loss_coef * loss_nopt
    metrics = {
        "loss/td": loss_td,
        "loss/opt": loss_opt,
        "loss/nopt": loss_nopt,
        "value/q_taken": losses.masked_mean(values.joint, values.weight > 0),
        "value/target": losses.masked_mean(values.target, values.weight > 0),
        "priority": replay.priority(values.joint - values.target, values.weight),
    }
    return loss, (metrics, moments)


def qtran(spec: EnvSpec, cfg: QTRANConfig | QConfig, nets: QTRANNets | None = None, *, loss=qtran_loss) -> Learner:
    """QTRAN-base: agents' values whose sum has its maximum where an unrestricted joint value has it.

    Args:
      spec: of the environment.
      cfg: hyperparameters; what a `QConfig` leaves at its default has that of a `QTRANConfig`.
      nets: your own networks; by default `default_nets(spec, cfg)`.
      loss: your own in place of `qtran_loss`, with the same arguments and results.

    >>> from jmarl import envs
    >>> env = envs.matrix_game([[8.0, -12.0], [-12.0, 0.0]])
    >>> sorted(qtran(env.spec, QTRANConfig(hidden_sizes=(8,))).init(jax.random.key(0)).params)
    ['agent', 'joint', 'joint_agent', 'value']
    """
    cfg = _checked(spec, cfg)
    return q_learning.learner(cfg, parts.choose_nets(nets, default_nets, spec, cfg), loss)


def _checked(spec: EnvSpec, cfg: Any) -> QTRANConfig:
    cfg = configs.extended(cfg, QTRANConfig)
    checks.validate(cfg, QTRANConfig, spec)
    checks.require_discrete(spec, "Q-learning takes the best of finitely many actions")
    checks.require(cfg, ("opt_loss_coef", "nopt_loss_coef"), lambda x: x >= 0, "not be negative")
    if not cfg.joint_sizes:
        raise ValueError("joint_sizes=() must hold at least one width: the joint value is a network.")
    return cfg
