"""Sable: agents that choose one after the other, and remember together, by retention in place of MAT's attention.

An encoder reads the agents' views, of this step and of those before, and gives the value of each agent; a decoder reads
the actions chosen so far. All of it is one policy of the team, which PPO learns as it learns MAT's,

    π(a_t | o_{≤t}, a_{<t}) = Π_i π_i(a_{t,i} | o_{≤t}, a_{t,1}, .., a_{t,i-1}, a_{<t}).

What the team remembers is a matrix for each head, S_t = κ S_{t-1} + Σ_n k_{t,n} v_{t,n}ᵀ, of the same size for any
number of agents and steps: so acting takes as long late in an episode as at its start, and learning reads whole
sequences in products. See `jmarl.networks.retention` and `jmarl.networks.retentive`.

Unlike the authors' code (github.com/instadeepai/Mava):
  - nothing of an agent that does not act is remembered, and it takes its turn after those that act, where theirs is
    remembered like all others;
  - each head is normalised over its features, as in the paper of retention, where theirs are cut into as many groups as
    there are heads once more; scores are divided by √d; weights are orthogonal, where theirs start small;
  - layers behind retention are one hidden layer of GELU, where theirs are SwiGLU, and outputs read features that are
    not normalised, nor are views before the first layer, which would erase views of one number;
  - the code of the time is of the step in its episode, which the carry counts; without memory it is that of step 0;
  - the first turn is told by a feature for continuous actions, too, which enter the decoder scaled to their bounds, and
    whose Gaussian has jmarl's standard deviation;
  - sequences are cut into chunks of so many steps as make `retention.CHUNK_ROWS` rows; agents of a step are never cut.

References:
  Mahjoub et al., 2024, Sable: a Performant, Efficient and Scalable Sequence Model for MARL
    (https://arxiv.org/abs/2410.01706).
  Sun et al., 2023, Retentive Network: A Successor to Transformer for Large Language Models
    (https://arxiv.org/abs/2307.08621).
"""

import functools

from jmarl import configs, optim
from jmarl.configs import config
from jmarl.learners import checks, parts, ppo
from jmarl.learners.ppo import ppo_loss, ppo_targets
from jmarl.networks import actor_critic, retention, retentive
from jmarl.networks.torsos import Output
from jmarl.types import EnvSpec, Learner, Numeric, Policy, static


@config
class SableConfig(ppo.JointLossConfig, ppo.ClippedConfig, configs.RolloutConfig):
    """Hyperparameters of Sable."""

    team_reward: configs.TeamReward = static("mean")  # of the agents' rewards; where all have the same, that is theirs
    recurrent: bool = static(True)  # the team remembers its episode, and learns from sequences; False: each step alone
    num_blocks: int = static(1)  # of retention, in the encoder and in the decoder
    num_heads: int = static(4)  # of each retention; the first forgets fastest
    embed_size: int = static(64)  # width of all layers
    decay_scale: Numeric = 1.0  # scales each head's κ, from 31/32 to 511/512: what is left of a memory after a step


def sable(
    spec: EnvSpec, cfg: SableConfig, nets: Policy | None = None, *, targets=ppo_targets, loss=ppo_loss
) -> Learner:
    """Sable: PPO of a retentive network, whose agents choose one after the other, and remember together.

    Args:
      spec: of the environment.
      cfg: hyperparameters.
      nets: your own policy; by default `default_policy(spec, cfg)`.
      targets, loss: your own in place of `ppo_targets` and `ppo_loss`, with the same arguments and results.

    >>> import jax
    >>> from jmarl import envs
    >>> env = envs.matrix_game([[8.0, -12.0], [-12.0, 0.0]])
    >>> learner = sable(env.spec, SableConfig(embed_size=8, num_heads=2))
    >>> learner.init_carry((3,))["encoder"].shape  # environments, blocks, heads; whatever the number of agents
    (3, 1, 2, 4, 4)
    """
    checks.validate(cfg, SableConfig, spec)
    checks.require_heads(cfg.num_heads, cfg.embed_size, smallest=2)
    nets = parts.choose_nets(nets, default_policy, spec, cfg)
    optimizer = optim.optimizer(ppo.schedules(cfg)[0], eps=cfg.adam_eps, max_grad_norm=cfg.max_grad_norm)
    return parts.for_team(ppo.of_policy(nets, cfg, optimizer, targets=targets, loss=loss), cfg.team_reward)


def default_policy(spec: EnvSpec, cfg: SableConfig) -> Policy:
    """The policy that `cfg` describes."""
    head = functools.partial(Output, hidden_sizes=(cfg.embed_size,), activation="gelu")
    output, distribution = actor_critic.policy_output(spec, head, cfg.action_distribution)
    model = retentive.RetentiveNetwork(
        output=output(spec.num_actions or spec.action_size or 0),
        num_blocks=cfg.num_blocks,
        num_heads=cfg.num_heads,
        embed_size=cfg.embed_size,
        is_image=len(spec.obs_shape) == 3,
    )
    decay = retention.decays(cfg.num_heads, cfg.decay_scale)
    return retentive.autoregressive(spec, model, distribution, decay, recurrent=cfg.recurrent)
