"""Parallelised Q-learning with value decomposition (PQN-VDN): neither replay nor target network.

Layer normalisation keeps the values in bounds, many parallel environments take the place of replay, and Q(λ) returns
of the rollout just made are the targets:

    L(θ) = mean( (Σ_i Q_i(o_i, u_i) - G)² ),   G_t = r_t + γ ((1 - λ) Σ_i max Q_i(o_{i,t+1}, ·) + λ G_{t+1}).

References:
  Gallici et al., 2024, Simplifying Deep Temporal Difference Learning (https://arxiv.org/abs/2407.04811).
  Sunehag et al., 2018, Value-Decomposition Networks (https://arxiv.org/abs/1706.05296).
"""

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array

from jmarl import batching, losses, networks, optim
from jmarl.learners import q_learning
from jmarl.types import EnvSpec, Learner, Metrics, Network, Numeric, Params, TrainState, Trajectory, static


@struct.dataclass(kw_only=True)
class PQNConfig:
    """Hyperparameters of PQN-VDN. Defaults: those of JaxMARL's script for MPE, with smaller networks."""

    learning_rate: Numeric = 5e-4  # Adam step size
    learning_rate_end: Numeric = 0.0  # of schedules, as a fraction of learning_rate
    learning_rate_schedule: str = static("constant")  # constant, linear or exponential, in optimiser steps
    horizon: Numeric | None = None  # calls of update until schedules end; None: make_train and run fill it in
    adam_eps: Numeric = 1e-5  # added to Adam's denominator
    max_grad_norm: Numeric | None = 1.0  # global norm to which gradients are clipped; None: never
    gamma: Numeric = 0.9  # discount
    lambda_: Numeric = 0.3  # mixes one-step (0) and Monte Carlo (1) returns
    team_reward: str = static("sum")  # sum or mean of the agents' rewards
    num_epochs: int = static(4)  # passes over each rollout
    num_minibatches: int = static(16)  # parts of a pass; whole sequences are shuffled
    epsilon_start: Numeric = 1.0  # share of random actions at the start
    epsilon_end: Numeric = 0.1  # at the end of the decay, and ever after
    epsilon_steps: Numeric = 200_000  # environment steps (of one seed) from start to end
    epsilon_schedule: str = static("linear")  # linear, exponential or constant
    recurrent: bool = static(False)  # recurrent agents
    recurrent_length: int | None = static(None)  # steps that gradients flow back; None: the whole rollout
    cell: str = static("gru")  # gru or lstm
    cell_size: int = static(128)  # width of the recurrent state
    hidden_sizes: tuple[int, ...] = static((128, 128))  # layers before the output; before the cell if recurrent
    head_sizes: tuple[int, ...] = static(())  # layers between cell (or torso) and output
    activation: str = static("relu")  # tanh, relu, elu, gelu or silu
    layer_norm: bool = static(True)  # before each activation: what makes it stable without a target network
    kernel_init: str = static("orthogonal")  # orthogonal, lecun or xavier
    sharing: str = static("shared")  # parameters: shared, per_agent or per_group (agents of equal sizes)


def pqn_loss(params: Params, batch: Trajectory, *, agent: Network) -> tuple[Array, Metrics]:
    """Squared error of the team's value, averaged over steps.

    Args:
      params: of `agent`.
      batch: sequences whose `steps.extras` are the targets G, `[L, M]`.
      agent: a network over observations whose output is a value of each action, `[L, M, N, A]`.
    """
    steps = batch.steps
    _, q = agent.apply(params, batch.carry, steps.obs, steps.first)
    value = jnp.sum(losses.select(q, steps.action) * steps.obs.agent_mask, axis=-1)
    loss = jnp.mean(losses.value_loss(value, steps.extras))
    return loss, {"loss/td": loss, "value/q_taken": jnp.mean(value), "value/target": jnp.mean(steps.extras)}


def pqn_vdn(spec: EnvSpec, cfg: PQNConfig, agent: Network | None = None) -> Learner:
    """PQN with the sum as mixer, for the on-policy loop. At one agent this is PQN.

    Args:
      spec: of the environment.
      cfg: hyperparameters.
      agent: your own network; by default the one that `cfg` describes.
    """
    q_learning.validate(spec, cfg, is_team=True)
    agent = q_learning.q_network(spec, cfg) if agent is None else agent
    epsilon = optim.schedule(cfg.epsilon_schedule, cfg.epsilon_start, cfg.epsilon_end, cfg.epsilon_steps)
    learning_rate = optim.learning_rate(cfg, steps_per_update=cfg.num_epochs * cfg.num_minibatches)
    optimizer = optim.optimizer(learning_rate, eps=cfg.adam_eps, max_grad_norm=cfg.max_grad_norm)
    act_epsilon_greedily, greedy = q_learning.acting(agent, epsilon)

    def init(key):
        params = {"agent": agent.init(key)}
        return TrainState(params=params, opt_state=optimizer.init(params), step=jnp.int32(0), env_steps=jnp.int32(0))

    def act(state, carry, obs, first, key):
        action, carry, _ = act_epsilon_greedily(state, carry, obs, first, key)
        return action, carry, carry  # the update goes on from the carry after each step

    def returns(state, batch):
        """Q(λ) of a rollout, `[T, B]`."""
        steps = batch.steps
        # The true successors of all steps in one pass: each is one step on from the carry that acting left.
        carry, next_obs = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (steps.extras, steps.next_obs))
        _, q = networks.one_step(agent)(state.params["agent"], carry, next_obs, jnp.zeros(steps.first.size, bool))
        best = losses.next_q(q, q, next_obs.action_mask) * next_obs.agent_mask
        next_value = jnp.sum(best, axis=-1).reshape(steps.first.shape)
        reward = losses.team_reward(steps.reward, cfg.team_reward)
        discount = jnp.where(jnp.all(steps.terminated, axis=-1), 0.0, cfg.gamma)
        return losses.lambda_returns(reward, discount, next_value, steps.last, cfg.lambda_)

    def minibatch_step(state, batch):
        def loss(params):
            return pqn_loss(params["agent"], batch, agent=agent)

        grads, metrics = jax.grad(loss, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics["loss/grad_norm"] = optax.global_norm(grads)
        return state.replace(params=params, opt_state=opt_state, step=state.step + 1), metrics

    def update(state, batch, key):
        batching.require_every_step_counts(batch)
        steps = batch.steps.replace(extras=returns(state, batch), next_obs=None)
        length = batching.sequence_length(cfg.recurrent, cfg.recurrent_length, len(steps.first))
        sequences = batching.to_sequences(steps, batch.carry, batch.steps.extras, length)
        state, metrics = batching.minibatch_epochs(
            minibatch_step, state, sequences, key, num_epochs=cfg.num_epochs, num_minibatches=cfg.num_minibatches
        )
        metrics = jax.tree.map(jnp.mean, metrics)
        metrics["epsilon"] = jnp.asarray(epsilon(state.env_steps), jnp.float32)
        metrics["learning_rate"] = jnp.asarray(learning_rate(state.step), jnp.float32)
        return state, metrics

    return Learner(init, agent.init_carry, act, greedy, update, learns_from="rollouts")
