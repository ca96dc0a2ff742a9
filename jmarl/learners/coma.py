"""Counterfactual multi-agent policy gradients (COMA): a central critic tells each agent what its own action was worth.

The critic has a value for each action of one agent, with the other agents' actions as they were. The advantage of the
action taken is its value less the policy's mean over one's own actions:

    A_i = Q(s, u) - Σ_a π_i(a) Q(s, (u₋ᵢ, a)),
    L(θ) = mean( -A_i log π_i(u_i) - c_H H(π_i) ),   L(φ) = mean( (Q_φ(s, u) - G)² ),

with G the λ- or n-step returns of a slowly moving copy of the critic. Actors learn of agents that act, the critic of
all whose steps count.

References:
  Foerster et al., 2018, Counterfactual Multi-Agent Policy Gradients (https://arxiv.org/abs/1705.08926).
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jmarl import configs, exploration, losses, masks, networks, optim
from jmarl.configs import config
from jmarl.learners import checks, critics, on_policy, parts
from jmarl.networks import actor_critic, heads
from jmarl.types import EnvSpec, Learner, Metrics, Network, Numeric, Params, TrainState, Trajectory, static


@config
class COMAConfig(configs.OptimizerConfig, configs.RolloutConfig, configs.NetworkConfig, configs.EpsilonConfig):
    """Hyperparameters of COMA. `epsilon` is a share of the policy that is spread over legal actions while exploring."""

    critic_learning_rate: Numeric | None = None  # of the critic; None: learning_rate
    gamma: Numeric = 0.99  # discount of future rewards
    returns: Literal["td_lambda", "n_step"] = static("td_lambda")  # the critic's targets
    lambda_: Numeric = 0.8  # mixes one-step (0) and Monte Carlo (1) returns
    n_step: int = static(3)  # rewards in n_step returns
    tau: Numeric = 0.01  # share of the critic in each update of its target, once per optimiser step
    huber_delta: Numeric | None = None  # Huber loss of the critic beyond this error; None: squared error
    team_reward: configs.Reward = static("mean")  # each agent's own reward, or sum or mean of all for each
    normalize_advantage: Literal["all", "agent", "none"] = static("none")  # over all who act, or for each agent alone
    ent_coef: Numeric = 0.0  # weight of the entropy bonus
    epsilon_start: Numeric = 0.5
    epsilon_end: Numeric = 0.02
    epsilon_steps: Numeric = 100_000
    num_epochs: int = static(1)
    num_minibatches: int = static(1)
    recurrent: bool = static(False)  # recurrent actors; the critic reads the state and has no memory
    critic_sizes: tuple[int, ...] = static((128, 128))  # layers of the critic
    own_action: critics.OwnAction = static(
        "output"
    )  # the critic has a value for each, or reads it as the others', in a pass for each
    critic_view: Literal["state", "state_obs"] = static("state_obs")  # what the critic reads beside the others' actions
    mask_actions: bool = static(True)  # critics read zeros in place of the actions of agents that do not act


class COMANets(NamedTuple):
    """What `coma_loss` needs to know of the networks.

    Attributes:
      actor: a network over observations whose output is logits `[L, M, N, A]`.
      critic: a network without memory over `(obs, own, others)`, one-hot actions `[L, M, N, A]` of each agent and of
        those beside it: values `[L, M, N, A]` of each of its own, or `[L, M, N]` with `own_action="input"`. See
        `critics.network`.
    """

    actor: Network
    critic: Network


@struct.dataclass(kw_only=True)
class COMATargets:
    """What `coma_loss` compares with.

    Attributes:
      value: the critic's targets G, `[L, M, N]`.
      epsilon: ε of the policy that acted, `[L, M]`.
    """

    value: Float[Array, "L M N"]
    epsilon: Float[Array, "L M"]


def coma_targets(
    target_params: Params, batch: Trajectory, next_action: Int[Array, "L M N"], *, nets: COMANets, cfg: COMAConfig
) -> COMATargets:
    """The critic's λ- or n-step returns of a rollout.

    Args:
      target_params: {"critic": of the slowly moving critic}.
      batch: sequences with `next_obs`, and with "epsilon" measured.
      next_action: what was done next; where the episode or the batch ends, what could have been.
      nets, cfg: as for `coma_loss`.
    """
    steps: Any = batch.steps
    _, next_q = values(target_params, steps.next_obs, next_action, nets=nets, cfg=cfg)
    next_q = parts.values_of_all(next_q, masks.counting(batch), cfg.team_reward)
    reward, terminated = parts.rewards_and_ends(steps, cfg.team_reward)
    discount = jnp.asarray(cfg.gamma * (1.0 - terminated))
    last = jnp.broadcast_to(steps.last[..., None], reward.shape)
    if cfg.returns == "n_step":
        value = losses.n_step_returns(reward, discount, next_q, last, cfg.n_step)
    else:
        value = losses.lambda_returns(reward, discount, next_q, last, cfg.lambda_)
    return COMATargets(value=value, epsilon=steps.measured["epsilon"])


def coma_loss(
    params: Params, batch: Trajectory, targets: COMATargets, *, nets: COMANets, cfg: COMAConfig
) -> tuple[Array, Metrics]:
    """Counterfactual policy gradient and entropy bonus of those who act, TD error of all whose steps count.

    Args:
      params: {"actor": of `nets.actor`, "critic": of `nets.critic`}.
      batch: sequences.
      targets: of the same steps, such as `coma_targets` makes.
      nets: networks.
      cfg: its leaves may be tracers.

    Returns:
      The sum of both losses, which share no parameters, and its parts.
    """
    steps, weight, acting = batch.steps, masks.weight(batch), masks.acting(batch)
    _, logits = nets.actor.apply(params["actor"], batch.carry, steps.obs, steps.first)
    policy = heads.categorical(logits, steps.obs.action_mask, epsilon=targets.epsilon[..., None, None])
    q, taken = values(params, steps.obs, steps.action, nets=nets, cfg=cfg)

    advantage = losses.counterfactual_advantage(*jax.lax.stop_gradient((q, policy.probs)), steps.action)
    if cfg.normalize_advantage != "none":
        axis = (0, 1) if cfg.normalize_advantage == "agent" else None
        advantage = losses.masked_normalize(advantage, acting > 0, axis=axis)
    actor_loss = parts.mean_loss(losses.policy_gradient_loss(policy.log_prob(steps.action), advantage), acting)
    critic_loss = parts.mean_loss(losses.value_loss(taken, targets.value, huber_delta=cfg.huber_delta), weight)
    entropy = parts.mean_loss(policy.entropy(), acting)
    loss = actor_loss - cfg.ent_coef * entropy + critic_loss
    return loss, {
        "loss/actor": actor_loss,
        "loss/critic": critic_loss,
        "policy/entropy": entropy,
        "value/q_taken": parts.mean_loss(taken, weight),
    }


def values(
    params: Params, obs: Any, action: Int[Array, "L M N"], *, nets: COMANets, cfg: COMAConfig
) -> tuple[Float[Array, "L M N A"], Float[Array, "L M N"]]:
    """The critic's value of each of an agent's actions beside the others' as given, and of its own as given."""
    code = jax.nn.one_hot(action, obs.action_mask.shape[-1])
    first = jnp.zeros(action.shape[:-1], bool)  # not read: no memory

    def value(own):
        return nets.critic.apply(params["critic"], (), (obs, own, code), first)[1]

    if cfg.own_action == "input":
        return critics.of_each_action(value, code), value(code)
    each = value(code)
    return each, losses.select(each, action)


def next_actions(params: Params, batch: Trajectory, key: PRNGKeyArray, *, nets: COMANets) -> Int[Array, "T B N"]:
    """What was done next in a rollout; at ends, where nothing was, what the policy that acted would have done."""
    steps = batch.steps

    def draw(carry, obs, first, action, places):
        _, logits = nets.actor.apply(params["actor"], carry, obs, first)
        epsilon = steps.measured["epsilon"].ravel().at[places].get(mode="clip")[None, :, None, None]
        policy = heads.categorical(logits, obs.action_mask, epsilon=epsilon)
        return policy.sample(seed=jax.random.fold_in(key, places[0]))

    return on_policy.of_successors(batch, steps.action, draw)


def coma(
    spec: EnvSpec, cfg: COMAConfig, nets: COMANets | None = None, *, targets=coma_targets, loss=coma_loss
) -> Learner:
    """COMA, for the on-policy loop.

    Args:
      spec: of the environment.
      cfg: hyperparameters.
      nets: your own networks; by default `default_nets(spec, cfg)`.
      targets, loss: your own in place of `coma_targets` and `coma_loss`, with the same arguments and results.

    >>> from jmarl import envs
    >>> env = envs.matrix_game([[8.0, -12.0], [-12.0, 0.0]])
    >>> sorted(coma(env.spec, COMAConfig(hidden_sizes=(8,))).init(jax.random.key(0)).params)
    ['actor', 'critic']
    """
    checks.validate(cfg, COMAConfig, spec)
    checks.require_discrete(spec, "COMA's critic has a value for each of finitely many actions")
    nets = parts.choose_nets(nets, default_nets, spec, cfg)
    actor_step, epsilon = networks.one_step(nets.actor), exploration.over_env_steps(cfg, "epsilon")
    learning_rate, optimizer = _optimizer(cfg)

    def init(key):
        key_actor, key_critic = jax.random.split(key)
        params = {"actor": nets.actor.init(key_actor), "critic": nets.critic.init(key_critic)}
        target_params = jax.tree.map(jnp.copy, {"critic": params["critic"]})
        return TrainState(
            params=params, target_params=target_params, opt_state=optimizer.init(params), step=jnp.int32(0)
        )

    def act(state, carry, obs, first, key):
        carry, logits = actor_step(state.params["actor"], carry, obs, first)
        share = jnp.asarray(epsilon(state), float)
        action = heads.categorical(logits, obs.action_mask, epsilon=share).sample(seed=key)
        return action, carry, {"epsilon": jnp.broadcast_to(share, first.shape)}

    def greedy(state, carry, obs, first):
        carry, logits = actor_step(state.params["actor"], carry, obs, first)
        return heads.categorical(logits, obs.action_mask).mode(), carry

    def minibatch_step(state, batch, target):
        params, opt_state, metrics, norm = parts.improve(
            optimizer, lambda params: loss(params, batch, target, nets=nets, cfg=cfg), state.params, state.opt_state
        )
        target_params = optax.incremental_update({"critic": params["critic"]}, state.target_params, cfg.tau)
        new = state.replace(params=params, target_params=target_params, opt_state=opt_state, step=state.step + 1)
        return new, {**metrics, "loss/grad_norm": norm}

    def update(state, batch, key):
        batch = masks.readable_batch(batch)
        key_next, key_order = jax.random.split(key)
        next_action = next_actions(state.params, batch, key_next, nets=nets)
        target = targets(state.target_params, batch, next_action, nets=nets, cfg=cfg)
        state, metrics = on_policy.learn(minibatch_step, state, batch, target, key_order, cfg=cfg)
        if state.env_steps is not None:
            metrics["epsilon"] = parts.as_metric(epsilon(state))
        return state, {**metrics, "learning_rate": parts.as_metric(learning_rate(state.step))}

    return Learner(init, nets.actor.init_carry, act, greedy, update, learns_from="rollouts")


# ----------------------------------------------------------------------------------------------------- the parts


def default_nets(spec: EnvSpec, cfg: COMAConfig) -> COMANets:
    """The networks that `cfg` describes."""
    model, head = actor_critic.from_config(cfg, spec)
    actor = actor_critic.of_own_view(spec, lambda size: (head(size, scale=0.01),), model, cfg.sharing)
    of_critic = dataclasses.replace(cfg, recurrent=False, hidden_sizes=cfg.critic_sizes, head_sizes=())
    return COMANets(actor, critics.network(spec, of_critic, counterfactual=cfg.own_action == "output"))


def _optimizer(cfg: COMAConfig) -> tuple[optim.Schedule, optax.GradientTransformation]:
    """The actors' learning rate, and clipped Adam: actors and critic each have a rate and a norm of their own."""
    steps_per_update = cfg.num_epochs * cfg.num_minibatches
    actor_rate = optim.learning_rate(cfg, steps_per_update=steps_per_update)
    critic_rate = optim.learning_rate(cfg, start=cfg.critic_learning_rate, steps_per_update=steps_per_update)
    rates = {"actor": actor_rate, "critic": critic_rate}
    each = {
        name: optim.optimizer(rate, eps=cfg.adam_eps, max_grad_norm=cfg.max_grad_norm) for name, rate in rates.items()
    }
    return actor_rate, optax.partition(each, {name: name for name in rates})
