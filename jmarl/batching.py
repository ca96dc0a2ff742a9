"""The one place where time is cut and shuffled: rollouts into sequences, sequences into minibatches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from jmarl.types import Carry, Metrics, Trajectory


def divisors(n: int) -> list[int]:
    """All divisors of n, for error messages that offer a way out."""
    return [d for d in range(1, n + 1) if n % d == 0]


def to_sequences(steps: Any, carry: Carry, carries: Carry, length: int) -> Trajectory:
    """Cuts a rollout `[T, B, ..]` into `T/length * B` sequences of consecutive steps.

    Args:
      steps: the rollout, a `Transition`.
      carry: what the networks remembered before its first step, leading axis `[B]`.
      carries: what they remembered after each step, leading axes `[T, B]`.
      length: steps of a sequence; divides T.

    Returns:
      Steps with leading axes `[length, T/length * B]` and each sequence's own start carry.

    >>> x = jnp.arange(6).reshape(6, 1)  # six steps of one environment
    >>> to_sequences(x, (), (), 3).steps.T
    Array([[0, 1, 2],
           [3, 4, 5]], dtype=int32)
    """

    def cut(x):
        pieces = jnp.moveaxis(x.reshape(-1, length, *x.shape[1:]), 0, 1)  # [length, T/length, B, ..]
        return pieces.reshape(length, -1, *x.shape[2:])

    def starts(before, after):
        # The carry before step k * length is the one after the step before it.
        first_of_piece = jnp.concatenate([before[None], after[length - 1 : -1 : length]])
        return first_of_piece.reshape(-1, *before.shape[1:])

    return Trajectory(steps=jax.tree.map(cut, steps), carry=jax.tree.map(starts, carry, carries))


def require_every_step_counts(batch: Trajectory) -> None:
    """Refuses weights, which on-policy learners do not read."""
    if batch.weight is not None:
        raise ValueError(
            "The batch has a weight for each step, but on-policy learners count every step alike: give it without "
            "weight, and steps that do not count an agent_mask of False."
        )


def sequence_length(recurrent: bool, recurrent_length: int | None, rollout_length: int) -> int:
    """Steps of the sequences that a rollout is cut into: 1 for feed-forward networks."""
    if not recurrent:
        if recurrent_length is not None:
            raise ValueError(
                f"recurrent_length={recurrent_length} is of recurrent networks: set recurrent=True, or leave it out."
            )
        return 1  # feed-forward is recurrent with sequences of one step
    length = recurrent_length or rollout_length
    if rollout_length % length:
        raise ValueError(
            f"recurrent_length={length} must divide the rollout of {rollout_length} steps. "
            f"Try one of {divisors(rollout_length)}."
        )
    return length


def minibatch_epochs(
    minibatch_step: Callable[[Any, Trajectory], tuple[Any, Metrics]],
    state: Any,
    batch: Trajectory,
    key: PRNGKeyArray,
    *,
    num_epochs: int,
    num_minibatches: int,
) -> tuple[Any, Metrics]:
    """Passes over a batch in shuffled minibatches of whole sequences.

    Args:
      minibatch_step: `(state, minibatch) -> (state, metrics)`.
      state: the first state.
      batch: `M` sequences; `num_minibatches` divides M.
      key: source of the permutations, one for each epoch.

    Returns:
      The last state, and the metrics of every minibatch with a leading axis `[num_epochs * num_minibatches]`.
    """
    num_sequences = batch.steps.first.shape[1]
    if num_sequences % num_minibatches:
        raise ValueError(
            f"num_minibatches={num_minibatches} must divide the {num_sequences} sequences of a batch, since whole "
            f"sequences are shuffled. Try num_minibatches in {divisors(num_sequences)}."
        )
    if num_minibatches == 1:
        return jax.lax.scan(lambda state, _: minibatch_step(state, batch), state, length=num_epochs)
    # One sort of random words; jax.random.permutation sorts twice, and sorting is slow on a CPU.
    order = jnp.argsort(jax.random.bits(key, (num_epochs, num_sequences)), axis=-1, stable=False)
    order = order.reshape(num_epochs * num_minibatches, -1)

    def step(state, index):
        minibatch = Trajectory(
            steps=jax.tree.map(lambda x: x.at[:, index].get(mode="promise_in_bounds"), batch.steps),
            carry=jax.tree.map(lambda c: c.at[index].get(mode="promise_in_bounds"), batch.carry),
        )
        return minibatch_step(state, minibatch)

    return jax.lax.scan(step, state, order)
