"""MAT, the multi-agent transformer: agents that choose one after the other, each knowing what those before it chose.

An encoder attends between the agents' views and gives the value of each; a decoder attends to the actions chosen so
far. All of it is one policy of the team, in which what agent i does depends on what was done before it,

    π(a | o) = Π_i π_i(a_i | o, a_1, .., a_{i-1}),

and which PPO learns: its loss is that of `ppo_loss`, with the ratio of each agent's factor, for the team's reward. See
`jmarl.networks.transformer` for the network.

Unlike the authors' code (github.com/PKU-MARL/Multi-Agent-Transformer):
  - who does not act is attended to by none but itself, and its action by nobody, where theirs is seen by all;
  - views are not normalised before the first layer, which would erase views of one number; nor are the features before
    the outputs, and weights of attention are drawn at full scale, where theirs are a hundred times smaller;
  - Gaussian actions have jmarl's standard deviation, a parameter that starts at half the width of the actions' range;
    actions enter the decoder scaled to their bounds, and their first turn is told by a feature, as for discrete ones;
  - the order of agents may be drawn anew at every step (`order="random"`);
  - there is no decoder without attention (MAT-Dec), no encoder of the state and no GRU.

References:
  Wen et al., 2022, Multi-Agent Reinforcement Learning is a Sequence Modeling Problem (https://arxiv.org/abs/2205.14953).
"""

import functools
from typing import ClassVar, Literal

from jmarl import configs, optim
from jmarl.configs import config
from jmarl.learners import checks, parts, ppo
from jmarl.learners.ppo import ppo_loss, ppo_targets
from jmarl.networks import actor_critic, transformer
from jmarl.networks.torsos import Output
from jmarl.types import EnvSpec, Learner, Policy, static


@config
class MATConfig(ppo.JointLossConfig, ppo.ClippedConfig, configs.PassesConfig):
    """Hyperparameters of MAT."""

    team_reward: configs.TeamReward = static("mean")  # of the agents' rewards; where all have the same, that is theirs
    num_blocks: int = static(1)  # of attention, in the encoder and in the decoder
    num_heads: int = static(1)  # of each attention
    embed_size: int = static(64)  # width of all layers
    order: Literal["fixed", "random"] = static(
        "fixed"
    )  # in which agents choose: as they are listed, or drawn each step

    # No fields: the networks have no memory.
    recurrent: ClassVar[bool] = False
    recurrent_length: ClassVar[None] = None


def mat(spec: EnvSpec, cfg: MATConfig, nets: Policy | None = None, *, targets=ppo_targets, loss=ppo_loss) -> Learner:
    """MAT: PPO of a transformer, whose agents choose one after the other.

    Args:
      spec: of the environment.
      cfg: hyperparameters.
      nets: your own policy; by default `default_policy(spec, cfg)`.
      targets, loss: your own in place of `ppo_targets` and `ppo_loss`, with the same arguments and results.

    >>> import jax
    >>> from jmarl import envs
    >>> env = envs.matrix_game([[8.0, -12.0], [-12.0, 0.0]])
    >>> learner = mat(env.spec, MATConfig(embed_size=8))
    >>> state = learner.init(jax.random.key(0))
    >>> state.params["decoder_0"]["among"]["query"]["kernel"].shape  # whatever the number of agents
    (8, 8)
    """
    checks.validate(cfg, MATConfig, spec)
    checks.require_heads(cfg.num_heads, cfg.embed_size)
    nets = parts.choose_nets(nets, default_policy, spec, cfg)
    optimizer = optim.optimizer(ppo.schedules(cfg)[0], eps=cfg.adam_eps, max_grad_norm=cfg.max_grad_norm)
    return parts.for_team(ppo.of_policy(nets, cfg, optimizer, targets=targets, loss=loss), cfg.team_reward)


def default_policy(spec: EnvSpec, cfg: MATConfig) -> Policy:
    """The policy that `cfg` describes."""
    head = functools.partial(Output, hidden_sizes=(cfg.embed_size,), activation="gelu")
    output, distribution = actor_critic.policy_output(spec, head, cfg.action_distribution)
    model = transformer.Transformer(
        output=output(spec.num_actions or spec.action_size or 0),
        num_blocks=cfg.num_blocks,
        num_heads=cfg.num_heads,
        embed_size=cfg.embed_size,
        is_image=len(spec.obs_shape) == 3,
    )
    return transformer.autoregressive(spec, model, distribution, order=cfg.order)
