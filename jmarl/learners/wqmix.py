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
from typing import Any, NamedTuple

import jax
from flax import struct
from jaxtyping import Array

from jmarl import losses, normalize
from jmarl.learners import checks, q_learning, replayed
from jmarl.learners.q_learning import QConfig
from jmarl.networks import mixers
from jmarl.networks.mixers import Mixer
from jmarl.types import EnvSpec, Learner, Metrics, Network, Numeric, Params, Trajectory, static

VARIANTS = ("cw", "ow")


@struct.dataclass(kw_only=True)
class WQMIXConfig(QConfig):
    """Hyperparameters of CW- and OW-QMIX: QMIX's and those of the weighting. `returns` must be "td"."""

    alpha: Numeric = 0.1  # weight of joint actions that are not worth more
    central_loss_coef: Numeric = 1.0  # weight of the central value's loss
    central_sizes: tuple[int, ...] = static((64, 64, 64))  # layers of the central mixer
    condition: str = static("online")  # of CW reads Q̂* of this network: online, or target as in the authors' code


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


def wqmix_loss(
    params: Params, target_params: Params, batch: Trajectory, *, variant: str, nets: WQMIXNets, cfg: WQMIXConfig
) -> tuple[Array, Metrics]:
    """Weighted TD error of Q_tot and TD error of the central value, averaged over what is not padding.

    Args:
      params: one entry for each of `nets`, by name.
      target_params: the same of the target networks.
      batch: sequences with `next_obs`; none crosses an episode's end. The central agents start each with a blank
        memory, so recurrent ones want whole episodes, or a burn-in for what starts inside one.
      variant: "cw" or "ow".
      nets: networks.
      cfg: its leaves may be tracers.

    Returns:
      A scalar and its parts; "priority" is the mean absolute error of each sequence.
    """
    loss, (metrics, _) = _wqmix_loss(params, target_params, batch, None, variant=variant, nets=nets, cfg=cfg)
    return loss, metrics


def _wqmix_loss(params, target_params, batch, stats, *, variant, nets, cfg):
    value, central_value, target, importance, weight, stats = weighted_values(
        params, target_params, batch, stats, variant=variant, nets=nets, cfg=cfg
    )
    is_real = weight > 0
    error = importance * losses.value_loss(value, target, huber_delta=cfg.huber_delta)
    central_error = losses.value_loss(central_value, target, huber_delta=cfg.huber_delta)
    loss_mixed = losses.masked_mean(error * weight, is_real)
    loss_central = losses.masked_mean(central_error * weight, is_real)
    loss = loss_mixed + cfg.central_loss_coef * loss_central
    metrics = {
        "loss/td": loss_mixed,
        "loss/central": loss_central,
        "value/q_taken": losses.masked_mean(value, is_real),
        "value/target": losses.masked_mean(target, is_real),
        "value/weight": losses.masked_mean(importance, is_real),
        "priority": replayed.priority((value - target)[..., None], weight[..., None]),
    }
    return loss, (metrics, stats)


def weighted_values(
    params: Params,
    target_params: Params,
    batch: Trajectory,
    stats: normalize.ValueNorm | None = None,
    *,
    variant: str,
    nets: WQMIXNets,
    cfg: WQMIXConfig,
) -> tuple[Array, Array, Array, Array, Array, normalize.ValueNorm | None]:
    """Q_tot and Q̂* of what was done, their target y and the weight w (both without gradient), each `[L, M]`.

    Then the weight of each step, 0 for padding, and `stats`, which are as for `q_learning.values_and_targets`.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant={variant!r} is unknown: choose one of {', '.join(VARIANTS)}.")
    steps: Any = batch.steps
    weight = replayed.weights(batch, cfg.burn_in)
    blank = dataclasses.replace(batch, carry=())
    q, next_q = q_learning.unroll(nets.agent, params["agent"], batch, cfg.burn_in)
    central_q, _ = q_learning.unroll(nets.central_agent, params["central_agent"], blank, cfg.burn_in)
    old_q, old_next_q = q_learning.unroll(nets.central_agent, target_params["central_agent"], blank, cfg.burn_in)
    if not cfg.double_q:
        _, next_q = q_learning.unroll(nets.agent, target_params["agent"], batch, cfg.burn_in)
    greedy_action = losses.masked_argmax(q, steps.obs.action_mask)
    next_action = losses.masked_argmax(next_q, steps.next_obs.action_mask)

    def mix(mixer, params, q, action, obs, agent_mask):
        return mixer.apply(params, losses.select(q, action) * agent_mask, obs.state)

    def central(params, q, action, obs=steps.obs, agent_mask=steps.obs.agent_mask):
        return mix(nets.central_mixer, params["central_mixer"], q, action, obs, agent_mask)

    value = mix(nets.mixer, params["mixer"], q, steps.action, steps.obs, steps.obs.agent_mask)
    central_value = central(params, central_q, steps.action)
    next_value = central(target_params, old_next_q, next_action, steps.next_obs, q_learning.next_mask(steps, cfg))
    if stats is not None:
        next_value = normalize.denormalize(stats, next_value)
    reward, terminated, _ = q_learning.team(steps, weight, cfg.team_reward or "sum")
    target = reward[..., 0] + cfg.gamma * (1.0 - terminated[..., 0]) * next_value
    if stats is not None:
        stats = normalize.update(stats, target, weight > 0, cfg.standardize_beta)
        target = normalize.normalize(stats, target)
    target = jax.lax.stop_gradient(target)

    if variant == "cw":
        online, q_of_greedy = (params, central_q) if cfg.condition == "online" else (target_params, old_q)
        match = losses.is_greedy(steps.action, greedy_action, steps.obs.agent_mask)
        importance = losses.cw_weight(match, target, central(online, q_of_greedy, greedy_action), cfg.alpha)
    else:
        importance = losses.ow_weight(value, target, cfg.alpha)

    return value, central_value, target, jax.lax.stop_gradient(importance), weight, stats


def cw_qmix(spec: EnvSpec, cfg: WQMIXConfig, nets: WQMIXNets | None = None) -> Learner:
    """QMIX with central weighting.

    Args:
      spec: of the environment.
      cfg: hyperparameters.
      nets: your own networks; by default those that `cfg` describes.
    """
    return _learner(spec, cfg, nets, "cw")


def ow_qmix(spec: EnvSpec, cfg: WQMIXConfig, nets: WQMIXNets | None = None) -> Learner:
    """QMIX with optimistic weighting. Arguments as for `cw_qmix`.

    >>> from jmarl import envs
    >>> env = envs.matrix_game([[8.0, -12.0], [-12.0, 0.0]])
    >>> sorted(ow_qmix(env.spec, WQMIXConfig(hidden_sizes=(8,))).init(jax.random.key(0)).params)
    ['agent', 'central_agent', 'central_mixer', 'mixer']
    """
    return _learner(spec, cfg, nets, "ow")


def _learner(spec: EnvSpec, cfg: WQMIXConfig, nets: WQMIXNets | None, variant: str) -> Learner:
    if not isinstance(cfg, WQMIXConfig):
        raise TypeError(
            f"cw_qmix and ow_qmix take a WQMIXConfig, got {type(cfg).__name__}: iql, vdn and qmix take that one."
        )
    q_learning.validate(spec, cfg, is_team=True, condition=("online", "target"))
    checks.require(cfg, ("alpha",), lambda x: 0 < x <= 1, "lie in (0, 1]: it is a weight beside those of 1")
    if not cfg.central_sizes:
        raise ValueError("central_sizes=() must hold at least one width: the central value is a network.")
    if cfg.returns != "td":
        raise ValueError(f"returns={cfg.returns!r} is not defined for weighted QMIX: its targets are one-step, td.")
    if nets is None:
        agent = q_learning.q_network(spec, cfg)
        central_mixer = mixers.mixer(mixers.Central(cfg.central_sizes, cfg.central_sizes[-1]), spec)
        nets = WQMIXNets(agent, q_learning.monotonic_mixer(spec, cfg), agent, central_mixer)

    parts: dict[str, Any] = nets._asdict()

    def init(key):
        keys = jax.random.split(key, len(parts))
        return {name: net.init(k) for (name, net), k in zip(parts.items(), keys, strict=True)}

    loss = functools.partial(_wqmix_loss, variant=variant, nets=nets)
    return q_learning.learner(cfg, nets.agent, init, loss)
