"""The one place where time is cut and shuffled: rollouts into sequences, sequences into minibatches."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from jmarl.types import Metrics, Trajectory


def divisors(n: int) -> list[int]:
    """All divisors of n, for error messages that offer a way out."""
    return [d for d in range(1, n + 1) if n % d == 0]


def to_sequences(batch: Trajectory, targets: Any, length: int) -> tuple[Trajectory, Any]:
    """Cuts a rollout `[T, B, ..]` into `T/length * B` sequences of consecutive steps.

    Args:
      batch: the rollout, with what the networks remembered before each step.
      targets: arrays `[T, B, ..]` that are cut alike.
      length: steps of a sequence; divides T.

    Returns:
      Both with leading axes `[length, T/length * B]`, and each sequence's own start carry.

    >>> x = jnp.arange(6).reshape(6, 1)  # six steps of one environment
    >>> cut_axes(x, 3).T
    Array([[0, 1, 2],
           [3, 4, 5]], dtype=int32)
    """
    steps = batch.steps
    if jax.tree.leaves(steps.carry):
        carry = jax.tree.map(lambda x: x[::length].reshape(-1, *x.shape[2:]), steps.carry)
    elif jax.tree.leaves(batch.carry) and length != len(steps.first):
        raise ValueError(
            f"The batch says what was remembered before its first step only, so it cannot be cut into sequences of "
            f"{length} steps: give it steps.carry, as rollout does, or recurrent_length={len(steps.first)}."
        )
    else:
        carry = batch.carry
    cut = functools.partial(jax.tree.map, lambda x: cut_axes(x, length))
    sequences = Trajectory(steps=cut(steps.replace(carry=())), carry=carry, weight=cut(batch.weight))
    return sequences, cut(targets)


def cut_axes(x: Array, length: int) -> Array:
    """`[T, B, ..]` to `[length, T/length * B, ..]`."""
    pieces = jnp.moveaxis(x.reshape(-1, length, *x.shape[1:]), 0, 1)  # [length, T/length, B, ..]
    return pieces.reshape(length, -1, *x.shape[2:])


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
    minibatch_step: Callable[[Any, Trajectory, Any], tuple[Any, Metrics]],
    state: Any,
    batch: Trajectory,
    targets: Any,
    key: PRNGKeyArray,
    *,
    num_epochs: int,
    num_minibatches: int,
) -> tuple[Any, Metrics]:
    """Passes over a batch in shuffled minibatches of whole sequences.

    Args:
      minibatch_step: `(state, minibatch, its targets) -> (state, metrics)`.
      state: the first state.
      batch: `M` sequences; `num_minibatches` divides M.
      targets: arrays `[L, M, ..]` that are shuffled alike.
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
        return jax.lax.scan(lambda state, _: minibatch_step(state, batch, targets), state, length=num_epochs)
    # One sort of random words; jax.random.permutation sorts twice, and sorting is slow on a CPU.
    order = jnp.argsort(jax.random.bits(key, (num_epochs, num_sequences)), axis=-1, stable=False)
    order = order.reshape(num_epochs * num_minibatches, -1)

    def step(state, index):
        def take(x):
            return x.at[:, index].get(mode="promise_in_bounds")

        minibatch = Trajectory(
            steps=jax.tree.map(take, batch.steps),
            carry=jax.tree.map(lambda c: c.at[index].get(mode="promise_in_bounds"), batch.carry),
            weight=jax.tree.map(take, batch.weight),
        )
        return minibatch_step(state, minibatch, jax.tree.map(take, targets))

    return jax.lax.scan(step, state, order)
