"""Counterfactual multi-agent policy gradients (COMA): a central critic tells each agent what its own action was worth.

The critic has a value for each action of one agent, with the other agents' actions as they were. The advantage of the
action taken is its value less the policy's mean over one's own actions:

    A_i = Q(s, u) - Σ_a π_i(a) Q(s, (u₋ᵢ, a)),
    L(θ) = mean( -A_i log π_i(u_i) - c_H H(π_i) ),   L(φ) = mean( (Q_φ(s, u) - G)² ),

with G the λ- or n-step returns of a slowly moving copy of the critic.

References:
  Foerster et al., 2018, Counterfactual Multi-Agent Policy Gradients (https://arxiv.org/abs/1705.08926).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array

from jmarl import batching, losses, networks, optim, parallel
from jmarl.learners import checks, replayed
from jmarl.networks import actor_critic, heads
from jmarl.types import Carry, EnvSpec, Learner, Metrics, Network, Numeric, Params, TrainState, Trajectory, static


@struct.dataclass(kw_only=True)
class COMAConfig:
    """Hyperparameters of COMA."""

    learning_rate: Numeric = 5e-4  # Adam step size of actors
    critic_learning_rate: Numeric | None = None  # of the critic; None: learning_rate
    learning_rate_end: Numeric = 0.0  # of schedules, as a fraction of the start
    learning_rate_schedule: str = static("constant")  # constant, linear or exponential, in optimiser steps
    horizon: Numeric | None = None  # calls of update until schedules end; None: make_train and run fill it in
    adam_eps: Numeric = 1e-5  # added to Adam's denominator
    max_grad_norm: Numeric | None = 10.0  # norm to which actors' and critic's gradients are clipped, each; None: never
    gamma: Numeric = 0.99  # discount
    returns: str = static("td_lambda")  # the critic's targets: td_lambda or n_step
    lambda_: Numeric = 0.8  # mixes one-step (0) and Monte Carlo (1) returns
    n_step: int = static(3)  # rewards in n_step returns
    tau: Numeric = 0.01  # share of the critic in each update of its target, once per optimiser step
    huber_delta: Numeric | None = None  # where the critic's loss turns linear; None: squared error
    team_reward: str | None = static("mean")  # sum or mean of all agents' rewards, or individual
    normalize_advantage: bool = static(False)  # to mean 0 and deviation 1 in each minibatch
    ent_coef: Numeric = 0.0  # weight of the entropy bonus
    epsilon_start: Numeric = 0.5  # share of the policy that is spread over legal actions while exploring, at the start
    epsilon_end: Numeric = 0.02  # at the end of the decay, and ever after
    epsilon_steps: Numeric = 100_000  # environment steps (of one seed) from start to end
    epsilon_schedule: str = static("linear")  # linear, exponential or constant
    num_epochs: int = static(1)  # passes over each rollout
    num_minibatches: int = static(1)  # parts of a pass; whole sequences are shuffled
    recurrent: bool = static(False)  # recurrent actors; the critic reads the state and has no memory
    recurrent_length: int | None = static(None)  # steps that gradients flow back; None: the whole rollout
    cell: str = static("gru")  # gru or lstm
    cell_size: int = static(64)  # width of the recurrent state
    hidden_sizes: tuple[int, ...] = static((64, 64))  # layers before the outputs; before the cell if recurrent
    head_sizes: tuple[int, ...] = static(())  # layers between cell (or torso) and outputs
    critic_sizes: tuple[int, ...] = static((128, 128))  # layers of the critic
    activation: str = static("relu")  # tanh, relu, elu, gelu or silu
    layer_norm: bool = static(False)  # before each activation
    kernel_init: str = static("orthogonal")  # orthogonal, lecun or xavier
    sharing: str = static("shared")  # parameters: shared, per_agent or per_group (agents of equal sizes)
    critic_view: str = static("state_obs")  # what the critic reads beside the others' actions: state_obs or state
    mask_actions: bool = static(True)  # critics read zeros in place of the actions of inactive agents


class COMANets(NamedTuple):
    """What `coma_loss` needs to know of the networks.

    Attributes:
      actor: a network over observations whose output is logits `[L, M, N, A]`.
      critic: a network without memory over `(obs, others' actions [L, M, N, N A])`: values `[L, M, N, A]`.
    """

    actor: Network
    critic: Network


@struct.dataclass(kw_only=True)
class Targets:
    """What `coma_loss` reads in `batch.steps.extras`: the critic's targets G, and ε of the policy that acted."""

    target: Array
    epsilon: Array


def coma_loss(params: Params, batch: Trajectory, *, nets: COMANets, cfg: COMAConfig) -> tuple[Array, Metrics]:
    """Counterfactual policy gradient, entropy bonus and the critic's TD error, averaged over what counts.

    Args:
      params: {"actor": of `nets.actor`, "critic": of `nets.critic`}.
      batch: sequences whose `steps.extras` are `Targets`, `[L, M, N]` and `[L, M]`.
      nets: networks.
      cfg: its leaves may be tracers.

    Returns:
      The sum of both losses, which share no parameters, and its parts.
    """
    steps, old = batch.steps, batch.steps.extras
    counts = steps.obs.agent_mask if batch.weight is None else steps.obs.agent_mask & (batch.weight > 0)[..., None]
    _, logits = nets.actor.apply(params["actor"], batch.carry, steps.obs, steps.first)
    policy = heads.categorical(logits, steps.obs.action_mask, epsilon=old.epsilon[..., None, None])
    q = values(params["critic"], steps.obs, steps.action, nets=nets, cfg=cfg)

    probs, q_fixed = jax.lax.stop_gradient((policy.probs, q))
    advantage = losses.counterfactual_advantage(q_fixed, probs, steps.action)
    if cfg.normalize_advantage:
        advantage = losses.masked_normalize(advantage, counts)
    actor_error = losses.policy_gradient_loss(policy.log_prob(steps.action), advantage)
    critic_error = losses.value_loss(losses.select(q, steps.action), old.target, huber_delta=cfg.huber_delta)
    actor_loss, critic_loss = losses.masked_mean(actor_error, counts), losses.masked_mean(critic_error, counts)
    entropy = losses.masked_mean(policy.entropy(), counts)
    loss = actor_loss - cfg.ent_coef * entropy + critic_loss
    return loss, {
        "loss/actor": actor_loss,
        "loss/critic": critic_loss,
        "policy/entropy": entropy,
        "value/q_taken": losses.masked_mean(losses.select(q, steps.action), counts),
    }


def values(params: Params, obs: Any, action: Array, *, nets: COMANets, cfg: COMAConfig) -> Array:
    """The critic's value of each of an agent's actions beside the others' as given, `[L, M, N, A]`."""
    code = replayed.visible(cfg, jax.nn.one_hot(action, obs.action_mask.shape[-1]), obs)
    others = actor_critic.joint_actions(jnp.zeros_like(code), code)
    first = jnp.zeros(action.shape[:-1], bool)  # not read: no memory
    return nets.critic.apply(params, (), (obs, others), first)[1]


def returns(target_critic: Params, batch: Trajectory, next_action: Array, *, nets: COMANets, cfg: COMAConfig) -> Array:
    """The critic's targets G of a rollout or of episodes, `[L, M, N]`.

    Args:
      target_critic: parameters of the slowly moving critic.
      batch: sequences with `next_obs`.
      next_action: what was done next, `[L, M, N]`; where the episode or the batch ends, what could have been.
      nets, cfg: as for `coma_loss`.
    """
    steps: Any = batch.steps
    next_q = losses.select(values(target_critic, steps.next_obs, next_action, nets=nets, cfg=cfg), next_action)
    next_q = replayed.values_of_all(next_q, steps.next_obs.agent_mask, cfg.team_reward)
    reward, terminated = replayed.rewards_and_ends(steps, cfg.team_reward)
    discount = jnp.asarray(cfg.gamma * (1.0 - terminated))
    ends = steps.last
    if batch.weight is not None:  # traces end before padding
        ends = ends | jnp.concatenate([(batch.weight[:-1] > 0) & (batch.weight[1:] == 0), jnp.ones_like(ends[:1])])
    last = jnp.broadcast_to(ends[..., None], reward.shape)
    if cfg.returns == "n_step":
        return losses.n_step_returns(reward, discount, next_q, last, cfg.n_step)
    return losses.lambda_returns(reward, discount, next_q, last, cfg.lambda_)


def coma(spec: EnvSpec, cfg: COMAConfig, nets: COMANets | None = None) -> Learner:
    """COMA, for the on-policy loop.

    Args:
      spec: of the environment.
      cfg: hyperparameters.
      nets: your own networks; by default `default_nets(spec, cfg)`.

    >>> from jmarl import envs
    >>> env = envs.matrix_game([[8.0, -12.0], [-12.0, 0.0]])
    >>> sorted(coma(env.spec, COMAConfig(hidden_sizes=(8,))).init(jax.random.key(0)).params)
    ['actor', 'critic']
    """
    _validate(spec, cfg)
    nets = default_nets(spec, cfg) if nets is None else nets
    actor_step = networks.one_step(nets.actor)
    epsilon = optim.schedule(cfg.epsilon_schedule, cfg.epsilon_start, cfg.epsilon_end, cfg.epsilon_steps)
    steps_per_update = cfg.num_epochs * cfg.num_minibatches
    rates = {
        "actor": optim.learning_rate(cfg, steps_per_update=steps_per_update),
        "critic": optim.learning_rate(cfg, start=cfg.critic_learning_rate, steps_per_update=steps_per_update),
    }
    optimizer = optax.partition(
        {
            name: optim.optimizer(rate, eps=cfg.adam_eps, max_grad_norm=cfg.max_grad_norm)
            for name, rate in rates.items()
        },
        {name: name for name in rates},
    )

    def init(key):
        key_actor, key_critic = jax.random.split(key)
        params = {"actor": nets.actor.init(key_actor), "critic": nets.critic.init(key_critic)}
        return TrainState(
            params=params,
            target_params=jax.tree.map(jnp.copy, {"critic": params["critic"]}),
            opt_state=optimizer.init(params),
            step=jnp.int32(0),
            env_steps=jnp.int32(0),
        )

    def policy(state, carry, obs, first, epsilon):
        carry, logits = actor_step(state.params["actor"], carry, obs, first)
        return carry, heads.categorical(logits, obs.action_mask, epsilon=epsilon)

    def act(state, carry, obs, first, key):
        share = jnp.asarray(epsilon(state.env_steps), float)
        carry, pi = policy(state, carry, obs, first, share)
        return pi.sample(seed=key), carry, Memory(carry=carry, epsilon=jnp.broadcast_to(share, first.shape))

    def greedy(state, carry, obs, first):
        carry, pi = policy(state, carry, obs, first, None)
        return pi.mode(), carry

    def next_actions(state, batch, key):
        """What was done next; at ends, where nothing was, what the policy would do, one step on from its carry."""
        steps = batch.steps
        memory, next_obs = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (steps.extras, steps.next_obs))
        first = jnp.zeros(memory.epsilon.shape, bool)
        _, pi = policy(state, memory.carry, next_obs, first, memory.epsilon[:, None, None])
        possible = pi.sample(seed=key).reshape(steps.action.shape)
        done = jnp.concatenate([steps.action[1:], possible[-1:]])
        return jnp.where(steps.last[..., None], possible, done)

    def minibatch_step(state, batch):
        grads, metrics = jax.grad(coma_loss, has_aux=True)(state.params, batch, nets=nets, cfg=cfg)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        target_params = optax.incremental_update({"critic": params["critic"]}, state.target_params, cfg.tau)
        metrics["loss/grad_norm"] = optax.global_norm(grads)
        return state.replace(
            params=params, target_params=target_params, opt_state=opt_state, step=state.step + 1
        ), metrics

    def update(state, batch, key):
        batching.require_every_step_counts(batch)
        key_next, key_order = jax.random.split(key)
        next_action = next_actions(state, batch, key_next)
        target = returns(state.target_params["critic"], batch, next_action, nets=nets, cfg=cfg)
        memory = batch.steps.extras
        steps = batch.steps.replace(extras=Targets(target=target, epsilon=memory.epsilon), next_obs=None)
        length = batching.sequence_length(cfg.recurrent, cfg.recurrent_length, len(steps.first))
        sequences = batching.to_sequences(steps, batch.carry, memory.carry, length)
        state, metrics = batching.minibatch_epochs(
            minibatch_step, state, sequences, key_order, num_epochs=cfg.num_epochs, num_minibatches=cfg.num_minibatches
        )
        metrics = jax.tree.map(jnp.mean, metrics)
        metrics["epsilon"] = jnp.asarray(epsilon(state.env_steps), jnp.float32)
        metrics["learning_rate"] = jnp.asarray(rates["actor"](state.step), jnp.float32)
        return state, metrics

    return Learner(init, nets.actor.init_carry, act, greedy, update, learns_from="rollouts")


# ----------------------------------------------------------------------------------------------------- the parts


@struct.dataclass(kw_only=True)
class Memory:
    """What acting leaves for the update: the carry *after* the step, and ε."""

    carry: Carry
    epsilon: Array


def default_nets(spec: EnvSpec, cfg: COMAConfig) -> COMANets:
    """The networks that `cfg` describes."""
    model, head = actor_critic.from_config(cfg)
    actor = actor_critic.of_own_view(spec, lambda size: (head(size, scale=0.01),), model, cfg.sharing)
    num_actions = spec.num_actions or 0
    critic = actor_critic.of_actions(
        spec,
        dataclasses.replace(cfg, recurrent=False, hidden_sizes=cfg.critic_sizes, head_sizes=()),
        view=cfg.critic_view,
        num_features=spec.num_agents * num_actions,
        num_outputs=num_actions,
    )
    return COMANets(parallel.split_network(actor), parallel.split_network(critic))


def _validate(spec: EnvSpec, cfg: COMAConfig) -> None:
    if not spec.is_discrete:
        raise ValueError(
            f"COMA's critic has a value for each of finitely many actions, but those of {spec.name} are continuous: "
            f"use mappo or masac, or a discrete version of the environment."
        )
    options = {"returns": ("td_lambda", "n_step"), "critic_view": ("state", "state_obs")}
    checks.validate(cfg, options)
