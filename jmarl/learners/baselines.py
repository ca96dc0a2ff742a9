"""Baselines and opponents that learn nothing: random actions, and whatever a function of the observation says."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from jmarl.configs import config
from jmarl.learners import checks, critics
from jmarl.networks import heads
from jmarl.types import Action, EnvSpec, Learner, Metrics, Observation, TrainState, Trajectory


@config
class RandomConfig:
    """The random baseline has no hyperparameters."""


def random_policy(spec: EnvSpec, cfg: RandomConfig) -> Learner:
    """Acts at random, in evaluation too, where its only parameter, a seed, decides; `update` counts.

    >>> from jmarl import envs
    >>> env = envs.matrix_game([[8.0, -12.0], [-12.0, 0.0]])
    >>> learner = random_policy(env.spec, RandomConfig())
    >>> state, obs = learner.init(jax.random.key(0)), jax.vmap(env.reset)(jax.random.split(jax.random.key(1), 5))[1]
    >>> action, carry = learner.greedy(state, learner.init_carry((5,)), obs, jnp.ones(5, bool))
    >>> action.shape
    (5, 2)
    """
    checks.validate(cfg, RandomConfig, spec)
    code = critics.action_code(spec)

    def init(key):
        return TrainState(params={"seed": jax.random.bits(key)}, step=jnp.int32(0))

    def init_carry(batch_shape):
        return jnp.zeros(batch_shape, jnp.int32)  # steps taken, so that evaluation draws anew at each

    def choose(obs, key):
        shape = (*obs.agent_mask.shape, code.is_real.shape[1])
        if code.is_discrete:
            return heads.categorical(jnp.zeros(shape), obs.action_mask).sample(seed=key)
        return code.decode(jax.random.uniform(key, shape, minval=-1.0, maxval=1.0))

    def act(state, carry, obs, first, key):
        return choose(obs, key), carry + 1, {}

    def greedy(state, carry, obs, first):
        key = jax.random.fold_in(jax.random.key(state.params["seed"]), jnp.max(carry))
        return choose(obs, key), carry + 1

    return Learner(init, init_carry, act, greedy, _count)


def scripted(policy: Callable[[Observation], Action]) -> Learner:
    """A fixed policy, such as a heuristic opponent: `policy(obs [B, ..]) -> actions [B, N]` or `[B, N, A]`.

    >>> from jmarl import envs
    >>> env = envs.matrix_game([[8.0, -12.0], [-12.0, 0.0]])
    >>> always_0 = scripted(lambda obs: jnp.zeros(obs.agent_mask.shape, jnp.int32))
    >>> state, obs = always_0.init(jax.random.key(0)), jax.vmap(env.reset)(jax.random.split(jax.random.key(1), 5))[1]
    >>> always_0.greedy(state, (), obs, jnp.ones(5, bool))[0].shape
    (5, 2)
    """

    def init(key):
        return TrainState(params={}, step=jnp.int32(0))

    def act(state, carry, obs, first, key):
        return policy(obs.as_floats()), carry, {}

    def greedy(state, carry, obs, first):
        return policy(obs.as_floats()), carry

    return Learner(init, lambda batch_shape: (), act, greedy, _count)


def _count(state: TrainState, batch: Trajectory, key: PRNGKeyArray) -> tuple[TrainState, Metrics]:
    """The update of what does not learn."""
    return state.replace(step=state.step + 1), {}
