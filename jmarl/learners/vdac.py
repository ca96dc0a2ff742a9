"""Value-decomposition actor-critics: VDAC-sum and VDAC-mix, whose critic is the value of the team.

Each agent has a value of its own view; they make up the team's by their sum, or by the monotonic mixer of QMIX:

    V_tot(s) = Σ_i V_i(o_i)   or   V_tot(s) = f(V_1(o_1), .., V_N(o_N); s),   df/dV_i >= 0.

Everyone's advantage is that of V_tot for the team's reward. By default, as in the paper, one step is taken on each
rollout, so nothing is clipped: advantage actor-critic. With more of them this is PPO with a decomposed critic.

References:
  Su et al., 2021, Value-Decomposition Multi-Agent Actor-Critics (https://arxiv.org/abs/2007.12306).
"""

from jmarl import configs
from jmarl.configs import config
from jmarl.learners import checks, parts, ppo
from jmarl.learners.ppo import ppo_loss, ppo_targets
from jmarl.learners.q_learning import MonotonicConfig, monotonic_mixer
from jmarl.networks import mixers
from jmarl.types import EnvSpec, Learner, Policy, static


@config
class VDACConfig(ppo.A2CConfig):
    """Hyperparameters of VDAC-sum: those of advantage actor-critic, for a team. More epochs than one make it PPO."""

    team_reward: configs.TeamReward = static("sum")  # of the agents' rewards


@config
class VDACMixConfig(MonotonicConfig, VDACConfig):
    """Hyperparameters of VDAC-mix: those of VDAC-sum and of the mixer."""


def vdac_sum(
    spec: EnvSpec, cfg: VDACConfig, nets: Policy | None = None, *, targets=ppo_targets, loss=ppo_loss
) -> Learner:
    """VDAC-sum: the team's value is the sum of the agents' values.

    Args:
      spec: of the environment.
      cfg: hyperparameters.
      nets: your own policy, whose values are the team's; by default `default_policy(spec, cfg)`.
      targets, loss: your own in place of `ppo_targets` and `ppo_loss`, with the same arguments and results.

    >>> import jax
    >>> from jmarl import envs
    >>> env = envs.matrix_game([[8.0, -12.0], [-12.0, 0.0]])
    >>> sorted(vdac_sum(env.spec, VDACConfig(hidden_sizes=(8,))).init(jax.random.key(0)).params["critic"])
    ['agents', 'mixer']
    """
    checks.validate(cfg, VDACConfig, spec)
    learner = ppo.ippo(spec, cfg, default_policy(spec, cfg) if nets is None else nets, targets=targets, loss=loss)
    return parts.for_team(learner, cfg.team_reward)


def vdac_mix(
    spec: EnvSpec, cfg: VDACMixConfig, nets: Policy | None = None, *, targets=ppo_targets, loss=ppo_loss
) -> Learner:
    """VDAC-mix: the team's value grows with each agent's, by the mixer of QMIX. Arguments as for `vdac_sum`."""
    checks.validate(cfg, VDACMixConfig, spec)
    return vdac_sum(spec, cfg, nets, targets=targets, loss=loss)


def default_policy(spec: EnvSpec, cfg: VDACConfig) -> Policy:
    """The policy that `cfg` describes, whose class says which mixer."""
    mixer = monotonic_mixer(spec, cfg) if isinstance(cfg, MonotonicConfig) else mixers.vdn()
    return ppo.default_policy(spec, cfg, mixer)
