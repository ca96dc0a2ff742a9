"""FACMAC: deterministic actors that climb one critic of the team, made of a critic of each agent.

Each agent's critic reads its own view and action, and a mixer makes the team's value of theirs:

    Q_tot(s, a) = g(Q_1(o_1, a_1), .., Q_N(o_N, a_N); s),
    L(φ) = mean( (Q_tot(s, a) - y)² ),   y = r + γ Q_tot⁻(s', μ⁻(s')),
    L(θ) = mean( -Q_tot(s, μ_1(o_1), .., μ_N(o_N)) ).

All actions in the actors' loss are those of the actors, so its gradient is of the whole joint action. Nobody takes a
maximum over Q_tot, so g need not be monotonic: it is the mixer of QMIX, the same without its constraint, or the sum.
Discrete actions are as in DDPG.

References:
  Peng et al., 2021, FACMAC: Factored Multi-Agent Centralised Policy Gradients (https://arxiv.org/abs/2003.06709).
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array

from jmarl import configs, losses, networks
from jmarl.configs import config
from jmarl.learners import checks, critics, ddpg, parts, replay
from jmarl.learners.q_learning import MonotonicConfig
from jmarl.networks import mixers
from jmarl.types import EnvSpec, Learner, Metrics, Mixer, Params, Trajectory, static


@config
class FACMACConfig(MonotonicConfig, ddpg.DDPGConfig):
    """Hyperparameters of FACMAC: those of DDPG and of the mixer, for a team."""

    mixer: Literal["monotonic", "free", "sum"] = static("monotonic")  # free: monotonic without the constraint
    team_reward: configs.TeamReward = static("sum")  # of the agents' rewards
    other_actions: Literal["stored", "current", "joint"] = static("joint")


def facmac_actor_loss(
    params: Params, batch: Trajectory, noise: Array | None, *, nets: critics.ActorCritic, cfg: FACMACConfig
) -> tuple[Array, Metrics]:
    """Minus Q_tot of what all actors do, averaged over the steps in which somebody acts. As for `ddpg_actor_loss`."""
    x = critics.read(batch, nets, cfg)
    q, penalty = ddpg.values_of_policy(params, x, noise)
    q, weight = q[..., :1], replay.team_weight(x.acting)[..., None]
    loss = parts.mean_loss(losses.deterministic_policy_loss(q), weight)
    loss = loss + parts.mean_loss(jnp.broadcast_to(penalty, x.acting.shape), x.acting)
    return loss, {"loss/actor": loss, "value/q_policy": losses.masked_mean(q, weight > 0)}


def facmac(
    spec: EnvSpec,
    cfg: FACMACConfig,
    nets: critics.ActorCritic | None = None,
    *,
    targets=ddpg.ddpg_targets,
    critic_loss=critics.team_critic_loss,
    actor_loss=facmac_actor_loss,
) -> Learner:
    """FACMAC: MADDPG with a factored critic.

    Args:
      spec: of the environment.
      cfg: hyperparameters.
      nets: your own networks, whose critics' values are the team's; by default `default_nets(spec, cfg)`.
      targets, critic_loss, actor_loss: your own in place of `ddpg_targets`, `team_critic_loss` and
        `facmac_actor_loss`, with the same arguments and results.

    >>> import jax
    >>> from jmarl import envs
    >>> env = envs.probe("continuous", num_agents=2)
    >>> sorted(facmac(env.spec, FACMACConfig(hidden_sizes=(8,))).init(jax.random.key(0)).params["critic"][0])
    ['agents', 'mixer']
    """
    checks.validate(cfg, FACMACConfig, spec)
    cfg = ddpg.checked(spec, cfg)
    nets = parts.choose_nets(nets, default_nets, spec, cfg)
    own = {"targets": targets, "critic_loss": critic_loss, "actor_loss": actor_loss}
    return ddpg.learner(nets, cfg, *ddpg.training(nets, cfg, **own, is_of_team=True))


def default_nets(spec: EnvSpec, cfg: FACMACConfig) -> critics.ActorCritic:
    """The networks that `cfg` describes."""
    nets = ddpg.default_nets(spec, cfg)
    critic = mixers.mixed(critics.network(spec, ddpg.checked(spec, cfg)), _mixer(spec, cfg))
    return nets._replace(critic=networks.ensemble(critic, cfg.num_critics))


def _mixer(spec: EnvSpec, cfg: FACMACConfig) -> Mixer:
    if cfg.mixer == "sum":
        return mixers.vdn()
    embed_size = cfg.mixer_embed_size
    module = mixers.QMIX(embed_size, cfg.mixer_hypernet_sizes, embed_size, cfg.mixer_scale, cfg.mixer == "monotonic")
    return mixers.mixer(module, spec)
