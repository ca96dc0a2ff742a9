"""Weighted QMIX: CW-QMIX and OW-QMIX, which find joint actions that a monotonic mixer alone talks itself out of.

A central value Q̂* without restriction learns beside QMIX and gives both their target:

    y = r + γ Q̂*⁻(s', argmax_u' Q_tot(s', u')),
    L = mean( w(s, u) (Q_tot(s, u) - y)² ) + mean( (Q̂*(s, u) - y)² ).

The weight w is 1 for joint actions that may be the best and α for the others: in central weighting (CW) where u is
the greedy joint action u* or y > Q̂*(s, u*), in optimistic weighting (OW) where Q_tot(s, u) < y. The greedy joint action
comes from the agents' own values, never from Q̂*.

References:
  Rashid et al., 2020, Weighted QMIX (https://arxiv.org/abs/2006.10800).
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
from flax import struct
from jaxtyping import Array, Float

from jmarl import configs, losses
from jmarl.configs import config
from jmarl.learners import checks, parts, q_learning, replay
from jmarl.learners.q_learning import Aux, QConfig, QMIXConfig
from jmarl.networks import mixers
from jmarl.types import EnvSpec, Learner, Mixer, Moments, Network, Numeric, Params, Trajectory, static

Variant = Literal["cw", "ow"]


@config
class WQMIXConfig(QMIXConfig):
    """Hyperparameters of CW- and OW-QMIX: those of QMIX and of the weighting."""

    suboptimal_weight: Numeric = 0.1  # of joint actions that are not worth more, beside 1
    central_loss_coef: Numeric = 1.0  # weight of the central value's loss
    central_sizes: tuple[int, ...] = static((64, 64, 64))  # layers of the central mixer
    condition: Literal["online", "target"] = static("online")  # network whose Q̂* CW reads; target: the authors' code


class WQMIXNets(NamedTuple):
    """What `wqmix_loss` needs to know of the networks.

    Attributes:
      agent, mixer: as in QMIX.
      central_agent: the central value's own agents, with carries like those of `agent`.
      central_mixer: from their values to Q̂*.
    """

    agent: Network
    mixer: Mixer
    central_agent: Network
    central_mixer: Mixer


@struct.dataclass(kw_only=True)
class WeightedValues:
    """What weighted QMIX makes of a batch, each `[L, M, 1]`.

    Attributes:
      value: Q_tot of what was done.
      central_value: Q̂* of it.
      target: y of both, without gradient.
      importance: w, without gradient.
      weight: of each step, 0 for padding.
    """

    value: Float[Array, "L M 1"]
    central_value: Float[Array, "L M 1"]
    target: Float[Array, "L M 1"]
    importance: Float[Array, "L M 1"]
    weight: Float[Array, "L M 1"]


def default_nets(spec: EnvSpec, cfg: WQMIXConfig) -> WQMIXNets:
    """The networks that `cfg` describes."""
    agent = q_learning.agent_network(spec, cfg)
    central_mixer = mixers.mixer(mixers.Central(cfg.central_sizes, cfg.central_sizes[-1]), spec)
    return WQMIXNets(agent, q_learning.monotonic_mixer(spec, cfg), agent, central_mixer)


def weighted_values(
    params: Params,
    target_params: Params,
    batch: Trajectory,
    moments: dict[str, Moments] | None = None,
    *,
    variant: Variant,
    nets: WQMIXNets,
    cfg: WQMIXConfig,
) -> tuple[WeightedValues, dict[str, Moments]]:
    """Both values of what was done, their target and weights; and the moments. Arguments as for `wqmix_loss`."""
    steps: Any = batch.steps
    blank = dataclasses.replace(batch, carry=())
    q, next_q = q_learning.unroll(nets.agent, params["agent"], batch, cfg.burn_in)
    central_q, _ = q_learning.unroll(nets.central_agent, params["central_agent"], blank, cfg.burn_in)
    old_q, old_next_q = q_learning.unroll(nets.central_agent, target_params["central_agent"], blank, cfg.burn_in)
    chooses = q
    if not cfg.double_q:
        chooses, next_q = q_learning.unroll(nets.agent, target_params["agent"], batch, cfg.burn_in)
    greedy_action = losses.masked_argmax(q, steps.obs.action_mask)
    next_action = losses.masked_argmax(next_q, steps.next_obs.action_mask)
    obs, next_obs = q_learning.team_views(batch, cfg)

    def central(params, q, action, obs=obs):
        return nets.central_mixer.apply(params["central_mixer"], q, action, obs)[..., None]

    value = nets.mixer.apply(params["mixer"], q, steps.action, obs)[..., None]
    next_value = central(target_params, old_next_q, next_action, next_obs)
    old_value = central(target_params, old_q, steps.action)
    reward, terminated, weight = q_learning.team(batch, replay.weights(batch, cfg.burn_in), cfg.team_reward)
    is_greedy = q_learning.follows(batch, chooses, of_team=True)
    target, moments = q_learning.targets_of(
        batch, reward, terminated, weight, next_value, old_value, moments, cfg, is_greedy=is_greedy
    )
    if variant == "cw":
        online, q_of_greedy = (params, central_q) if cfg.condition == "online" else (target_params, old_q)
        match = losses.is_greedy(steps.action, greedy_action, obs.agent_mask)[..., None]
        greedy_value = central(online, q_of_greedy, greedy_action)
        importance = losses.cw_weight(match, target, greedy_value, cfg.suboptimal_weight)
    else:
        importance = losses.ow_weight(value, target, cfg.suboptimal_weight)
    values = WeightedValues(
        value=value,
        central_value=central(params, central_q, steps.action),
        target=target,
        importance=jax.lax.stop_gradient(importance),
        weight=weight,
    )
    return values, moments


def wqmix_loss(
    params: Params,
    target_params: Params,
    batch: Trajectory,
    moments: dict[str, Moments] | None = None,
    *,
    variant: Variant,
    nets: WQMIXNets,
    cfg: WQMIXConfig,
) -> tuple[Array, Aux]:
    """Weighted TD error of Q_tot and TD error of the central value, averaged over the steps that count.

    Args:
      params: one entry for each of `nets`, by name.
      target_params: the same of the target networks.
      batch: sequences with `next_obs`; none crosses an episode's end. The central agents start each with a blank
        memory, so recurrent ones want whole episodes, or a burn-in for what starts inside one.
      moments: as for `q_loss`.
      variant: "cw" or "ow".
      nets: networks.
      cfg: its leaves may be tracers.

    Returns:
      As `q_loss`: a scalar; then its parts and the moments.
    """
    values, moments = weighted_values(params, target_params, batch, moments, variant=variant, nets=nets, cfg=cfg)
    is_real = values.weight > 0
    error = values.importance * losses.value_loss(values.value, values.target, huber_delta=cfg.huber_delta)
    central_error = losses.value_loss(values.central_value, values.target, huber_delta=cfg.huber_delta)
    loss_mixed = parts.mean_loss(error, values.weight)
    loss_central = parts.mean_loss(central_error, values.weight)
    loss = loss_mixed + cfg.central_loss_coef * loss_central
    metrics = {
        "loss/td": loss_mixed,
        "loss/central": loss_central,
        "value/q_taken": losses.masked_mean(values.value, is_real),
        "value/target": losses.masked_mean(values.target, is_real),
        "value/weight": losses.masked_mean(values.importance, is_real),
        "priority": replay.priority(values.value - values.target, values.weight),
    }
    return loss, (metrics, moments)


def cw_qmix(spec: EnvSpec, cfg: WQMIXConfig | QConfig, nets: WQMIXNets | None = None, *, loss=wqmix_loss) -> Learner:
    """QMIX with central weighting.

    Args:
      spec: of the environment.
      cfg: hyperparameters.
      nets: your own networks; by default `default_nets(spec, cfg)`.
      loss: your own in place of `wqmix_loss`, with the same arguments and results.
    """
    return _learner(spec, cfg, nets, functools.partial(loss, variant="cw"))


def ow_qmix(spec: EnvSpec, cfg: WQMIXConfig | QConfig, nets: WQMIXNets | None = None, *, loss=wqmix_loss) -> Learner:
    """QMIX with optimistic weighting. Arguments as for `cw_qmix`.

    >>> from jmarl import envs
    >>> env = envs.matrix_game([[8.0, -12.0], [-12.0, 0.0]])
    >>> sorted(ow_qmix(env.spec, WQMIXConfig(hidden_sizes=(8,))).init(jax.random.key(0)).params)
    ['agent', 'central_agent', 'central_mixer', 'mixer']
    """
    return _learner(spec, cfg, nets, functools.partial(loss, variant="ow"))


def _learner(spec: EnvSpec, cfg: Any, nets: WQMIXNets | None, loss: Any) -> Learner:
    cfg = configs.extended(cfg, WQMIXConfig)
    checks.validate(cfg, WQMIXConfig, spec)
    checks.require_discrete(spec, "Q-learning takes the best of finitely many actions")
    rule = "lie in (0, 1]: it is a weight beside those of 1"
    checks.require(cfg, ("suboptimal_weight",), lambda x: 0 < x <= 1, rule)
    if not cfg.central_sizes:
        raise ValueError("central_sizes=() must hold at least one width: the central value is a network.")
    return q_learning.learner(cfg, parts.choose_nets(nets, default_nets, spec, cfg), loss)
