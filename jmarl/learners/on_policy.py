"""What learners from rollouts share: values of true successors, and passes over a rollout in minibatches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from jmarl import batching
from jmarl.types import Carry, Metrics, Trajectory


def carry_after(batch: Trajectory) -> Carry:
    """What was remembered after each step of a rollout, leading axes `[T, B]`: before the next one, or at the end."""
    before = batch.steps.carry
    if len(jax.tree.leaves(before)) != len(jax.tree.leaves(batch.next_carry)):
        raise ValueError(
            "The batch has no next_carry: recurrent networks need what was remembered after its last step, which "
            "rollout puts there."
        )
    if not jax.tree.leaves(before):
        return before
    return jax.tree.map(lambda x, y: jnp.concatenate([x[1:], y[None]]), before, batch.next_carry)


def of_successors(batch: Trajectory, now: Array, evaluate: Callable[..., Array]) -> Array:
    """Something of each step's true successor, `[T, B, ..]`: the next step's, or where none follows, evaluated.

    None follows the rollout's last step and an episode's last one; after a terminal step nobody asks, and what is
    there is arbitrary. The few that are evaluated go one step on from their carry, B of them at a time.

    Args:
      batch: a rollout with `next_obs`.
      now: the same of each step's own view, `[T, B, ..]`.
      evaluate: `(carry, obs, first, action, places) -> out` of B sequences of one step, `[1, B, ..]`. The action is
        that of the step before, which is at `places` of the rollout's T B steps; one beyond them is nowhere.
    """
    steps: Any = batch.steps
    num_steps, num_envs = steps.first.shape
    goes_on = steps.last & ~jnp.all(steps.terminated, axis=-1)
    is_asked = goes_on.at[-1].set(goes_on[-1] | ~steps.last[-1])
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (carry_after(batch), steps.next_obs, steps.action))
    nowhere = num_steps * num_envs
    (asked,) = jnp.nonzero(is_asked.ravel(), size=nowhere, fill_value=nowhere)

    def evaluate_some(i, out):
        places = jax.lax.dynamic_slice_in_dim(asked, i * num_envs, num_envs)
        carry, next_obs, action = jax.tree.map(lambda x: x.at[places].get(mode="clip"), flat)
        next_obs, action = jax.tree.map(lambda x: x[None], (next_obs, action))
        some = evaluate(carry, next_obs, jnp.zeros((1, num_envs), bool), action, places)
        return out.at[places].set(some[0], mode="drop")

    following = jnp.roll(now, -1, axis=0).reshape(-1, *now.shape[2:])
    num_calls = -(-jnp.sum(is_asked) // num_envs)
    return jax.lax.fori_loop(0, num_calls, evaluate_some, following).reshape(now.shape)


def learn(
    minibatch_step: Callable[[Any, Trajectory, Any], tuple[Any, Metrics]],
    state: Any,
    batch: Trajectory,
    targets: Any,
    key: PRNGKeyArray,
    *,
    cfg: Any,
) -> tuple[Any, Metrics]:
    """Passes over a rollout, as a `RolloutConfig` says, and the means of their metrics.

    Args:
      minibatch_step: `(state, minibatch, its targets) -> (state, metrics)`, one optimiser step.
      state: the first state.
      batch: the rollout.
      targets: arrays `[T, B, ..]`, cut and shuffled with it.
      key: source of the order.
      cfg: of the learner.
    """
    return learn_sequences(minibatch_step, state, *sequences(batch, targets, cfg=cfg), key, cfg=cfg)


def sequences(batch: Trajectory, targets: Any, *, cfg: Any) -> tuple[Trajectory, Any]:
    """A rollout and its targets as the sequences `[L, M, ..]` that are shuffled, without what nobody reads then."""
    length = batching.sequence_length(cfg.recurrent, cfg.recurrent_length, len(batch.steps.first))
    lean = batch.replace(steps=batch.steps.replace(next_obs=None, measured={}))
    return batching.to_sequences(lean, targets, length)


def learn_sequences(
    minibatch_step: Callable[[Any, Trajectory, Any], tuple[Any, Metrics]],
    state: Any,
    batch: Trajectory,
    targets: Any,
    key: PRNGKeyArray,
    *,
    cfg: Any,
) -> tuple[Any, Metrics]:
    """As `learn`, of what `sequences` returns."""
    passes = {"num_epochs": cfg.num_epochs, "num_minibatches": cfg.num_minibatches}
    state, metrics = batching.minibatch_epochs(minibatch_step, state, batch, targets, key, **passes)
    return state, jax.tree.map(jnp.mean, metrics)
