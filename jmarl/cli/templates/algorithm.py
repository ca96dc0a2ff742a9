"""OwnAlgorithm: say in a sentence what it does, and after which paper. As it stands, it is REINFORCE for each agent.

jmarl train own_algorithm.py:own_algorithm --env MPE_simple_spread_v3
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array

from jmarl.types import (
    EnvSpec,
    Learner,
    Metrics,
    Numeric,
    Observation,
    Params,
    TrainState,
    Trajectory,
    static,
    zero_observation,
)


@struct.dataclass(kw_only=True)
class OwnAlgorithmConfig:
    """Hyperparameters. Each is an option of `jmarl train`, with the comment behind it as its help."""

    learning_rate: Numeric = 1e-2  # Adam step size
    gamma: Numeric = 0.99  # discount of future rewards
    hidden_sizes: tuple[int, ...] = static((32,))  # layers of the policy


class Policy(nn.Module):
    """Views `[.., N, O]` to logits `[.., N, A]`: all agents share its parameters."""

    hidden_sizes: tuple[int, ...]
    num_actions: int

    @nn.compact
    def __call__(self, obs: Observation) -> Array:
        x = obs.agents
        for size in self.hidden_sizes:
            x = nn.tanh(nn.Dense(size)(x))
        logits = nn.Dense(self.num_actions)(x)
        # Finite, not -inf, which would make gradients NaN.
        return jnp.where(obs.action_mask, logits, jnp.finfo(logits.dtype).min)


def own_algorithm(spec: EnvSpec, cfg: OwnAlgorithmConfig) -> Learner:
    """A learner of this environment: five pure functions, built inside the trace, so that `cfg` may hold tracers."""
    if spec.num_actions is None:
        raise ValueError(f"own_algorithm chooses among actions, but those of {spec.name} are continuous.")
    policy = Policy(cfg.hidden_sizes, spec.num_actions)
    optimiser = optax.adam(cfg.learning_rate)

    def init(key: Array) -> TrainState:
        params = policy.init(key, zero_observation(spec))
        return TrainState(params=params, opt_state=optimiser.init(params), step=jnp.int32(0), env_steps=jnp.int32(0))

    def init_carry(batch_shape: tuple[int, ...]) -> tuple[()]:
        return ()  # the policy remembers nothing

    def act(state: TrainState, carry: tuple[()], obs: Observation, first: Array, key: Array):
        return jax.random.categorical(key, policy.apply(state.params, obs)), carry, {}

    def greedy(state: TrainState, carry: tuple[()], obs: Observation, first: Array):
        return jnp.argmax(policy.apply(state.params, obs), axis=-1).astype(jnp.int32), carry

    def loss(params: Params, batch: Trajectory) -> Array:
        steps = batch.steps
        log_probs = jax.nn.log_softmax(policy.apply(params, steps.obs))
        log_prob = jnp.take_along_axis(log_probs, steps.action[..., None], axis=-1)[..., 0]
        target = returns(steps.reward, steps.last, cfg.gamma)
        alive = steps.obs.agent_mask  # who is dead or absent does not count
        baseline = jnp.sum(target * alive) / jnp.maximum(jnp.sum(alive), 1)
        return -jnp.sum(log_prob * (target - baseline) * alive) / jnp.maximum(jnp.sum(alive), 1)

    def update(state: TrainState, batch: Trajectory, key: Array) -> tuple[TrainState, Metrics]:
        value, gradient = jax.value_and_grad(loss)(state.params, batch)
        change, opt_state = optimiser.update(gradient, state.opt_state)
        params = optax.apply_updates(state.params, change)
        return state.replace(params=params, opt_state=opt_state, step=state.step + 1), {"loss/policy": value}

    return Learner(init, init_carry, act, greedy, update, learns_from="rollouts")


def returns(reward: Array, last: Array, gamma: Numeric) -> Array:
    """G_t = r_t + γ G_{t+1} of each agent `[T, B, N]`, within an episode and as far as the rollout goes."""

    def step(later: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        reward, last = now
        total = reward + gamma * jnp.where(last[..., None], 0.0, later)
        return total, total

    return jax.lax.scan(step, jnp.zeros_like(reward[0]), (reward, last), reverse=True)[1]
