"""QPLEX: Q-learning for a team with a mixer that can represent every value whose best joint action is everyone's own.

QMIX with another mixer, `mixers.QPLEX`, and the same loss:

    Q_tot(s, u) = Σ_i [ w_i(s) V_i(o_i) + b_i(s) ] + Σ_i λ_i(s, u) w_i(s) A_i(o_i, u_i),   w, λ > 0,
    V_i(o_i) = max_u Q_i(o_i, u),   A_i(o_i, u_i) = Q_i(o_i, u_i) - V_i(o_i) <= 0.

The advantages decide whose actions are the best, and for all that is not the best λ is free to say how much worse it
is, so the values need not be monotonic in those of the agents.

References:
  Wang et al., 2021, QPLEX: Duplex Dueling Multi-Agent Q-Learning (https://arxiv.org/abs/2008.01062).
"""

from jmarl import configs
from jmarl.configs import config
from jmarl.learners import checks, parts, q_learning
from jmarl.learners.q_learning import HypernetConfig, QConfig, QNets, VDNConfig, q_loss
from jmarl.networks import mixers
from jmarl.types import EnvSpec, Learner, static


@config
class QPLEXConfig(HypernetConfig, VDNConfig):
    """Hyperparameters of QPLEX: those of VDN and of the mixer."""

    mixer_scale: float = static(mixers.QPLEX.scale)
    mixer_num_heads: int = static(mixers.QPLEX.num_heads)  # of the attention that weighs advantages
    mixer_attention_sizes: tuple[int, ...] = static(mixers.QPLEX.attention_sizes)  # hidden layers of its networks
    mixer_advantage_gradient: bool = static(
        mixers.QPLEX.advantage_gradient
    )  # weights of advantages pass gradients on to them; the paper stops these


def default_nets(spec: EnvSpec, cfg: QPLEXConfig) -> QNets:
    """The networks that `cfg` describes."""
    module = mixers.QPLEX(
        cfg.mixer_num_heads,
        cfg.mixer_hypernet_sizes,
        cfg.mixer_attention_sizes,
        cfg.mixer_scale,
        cfg.mixer_advantage_gradient,
    )
    return QNets(q_learning.agent_network(spec, cfg), mixers.duplex(module, spec))


def qplex(spec: EnvSpec, cfg: QPLEXConfig | QConfig, nets: QNets | None = None, *, loss=q_loss) -> Learner:
    """QPLEX: the team's best action is everyone's own, and what else is worth how much is free.

    Args:
      spec: of the environment.
      cfg: hyperparameters; what a `QConfig` leaves at its default has that of a `QPLEXConfig`.
      nets: your own networks; by default `default_nets(spec, cfg)`.
      loss: your own in place of `q_loss`, with the same arguments and results.

    >>> import jax
    >>> from jmarl import envs
    >>> env = envs.matrix_game([[8.0, -12.0], [-12.0, 0.0]])
    >>> sorted(qplex(env.spec, QPLEXConfig(hidden_sizes=(8,))).init(jax.random.key(0)).params)
    ['agent', 'mixer']
    """
    cfg = configs.extended(cfg, QPLEXConfig)
    checks.validate(cfg, QPLEXConfig, spec)
    checks.require_discrete(spec, "Q-learning takes the best of finitely many actions")
    checks.require(cfg, ("mixer_num_heads",), lambda x: x >= 1, "be at least 1")
    return q_learning.learner(cfg, parts.choose_nets(nets, default_nets, spec, cfg), loss)
