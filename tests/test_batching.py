"""Cutting and shuffling: what belongs together stays together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmarl import batching
from jmarl.types import Observation, Trajectory, Transition

T, B, N = 12, 3, 2


def tagged_steps():
    """Steps whose reward is 100 * environment + time, whose carry after them is the same number."""
    tag = 100 * jnp.arange(B)[None, :] + jnp.arange(T)[:, None]
    agents = jnp.broadcast_to(tag[..., None], (T, B, N)).astype(jnp.float32)
    mask = jnp.ones((T, B, N), bool)
    obs = Observation(
        agents=agents[..., None], state=tag[..., None].astype(jnp.float32), action_mask=None, agent_mask=mask
    )
    steps = Transition(
        obs=obs, first=jnp.zeros((T, B), bool), action=agents, reward=agents, terminated=~mask, last=~mask[..., 0]
    )
    return steps, agents[..., None]


@pytest.mark.parametrize("length", [1, 3, 12])
def test_sequences_are_consecutive_and_carry_what_came_before(length):
    steps, carries = tagged_steps()
    before = jnp.full((B, N, 1), -1.0)
    batch = batching.to_sequences(steps, before, carries, length)
    tags = np.asarray(batch.steps.reward[..., 0])
    assert tags.shape == (length, T // length * B)
    np.testing.assert_array_equal(np.diff(tags, axis=0), 1)
    starts = tags[0]
    expected = np.where(starts % 100 == 0, -1, starts - 1)
    np.testing.assert_array_equal(batch.carry[:, 0, 0], expected)


def test_minibatches_cover_each_epoch_once_and_never_cut_sequences():
    steps, carries = tagged_steps()
    batch = batching.to_sequences(steps, carries[0], carries, 4)

    def record(state, minibatch):
        return state + 1, {"tags": minibatch.steps.reward[..., 0], "carry": minibatch.carry[..., 0, 0]}

    count, seen = jax.jit(
        lambda key: batching.minibatch_epochs(record, 0, batch, key, num_epochs=2, num_minibatches=3)
    )(jax.random.key(0))
    assert count == 6
    tags = np.asarray(seen["tags"])  # [6, 4, 3]
    np.testing.assert_array_equal(np.diff(tags, axis=1), 1)
    everything = np.sort(np.asarray(steps.reward[..., 0]).ravel())
    for epoch in (tags[:3], tags[3:]):
        np.testing.assert_array_equal(np.sort(epoch.ravel()), everything)
    assert not np.array_equal(tags[:3], tags[3:])  # another order in another epoch
    later = tags[:, 0] % 100 > 0
    np.testing.assert_array_equal(np.asarray(seen["carry"])[later], tags[:, 0][later] - 1)


def test_one_minibatch_is_the_whole_batch_in_order():
    steps, _ = tagged_steps()
    record = lambda state, minibatch: (state, {"tags": minibatch.steps.reward})  # noqa: E731
    _, seen = batching.minibatch_epochs(
        record, 0, Trajectory(steps=steps), jax.random.key(0), num_epochs=2, num_minibatches=1
    )
    np.testing.assert_array_equal(seen["tags"], jnp.stack([steps.reward] * 2))


def test_minibatches_that_do_not_divide_are_refused():
    steps, _ = tagged_steps()
    with pytest.raises(ValueError, match=r"num_minibatches=2 must divide the 3 sequences .* Try .*\[1, 3\]"):
        batching.minibatch_epochs(
            lambda s, b: (s, {}), 0, Trajectory(steps=steps), jax.random.key(0), num_epochs=1, num_minibatches=2
        )
