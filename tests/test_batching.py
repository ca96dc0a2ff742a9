"""Cutting and shuffling: what belongs together stays together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_batches import random_batch, with_true_successors

from jmarl import batching, envs
from jmarl.learners import on_policy
from jmarl.types import Observation, Trajectory, Transition

T, B, N = 12, 3, 2


def tagged_rollout():
    """Steps whose reward is 100 * environment + time, whose carry before them is the same number."""
    tag = 100 * jnp.arange(B)[None, :] + jnp.arange(T)[:, None]
    agents = jnp.broadcast_to(tag[..., None], (T, B, N)).astype(jnp.float32)
    mask = jnp.ones((T, B, N), bool)
    obs = Observation(
        agents=agents[..., None], state=tag[..., None].astype(jnp.float32), action_mask=None, agent_mask=mask
    )
    steps = Transition(
        obs=obs,
        carry=agents[..., None],
        first=jnp.zeros((T, B), bool),
        action=agents,
        reward=agents,
        terminated=~mask,
        last=~mask[..., 0],
    )
    return Trajectory(steps=steps, weight=agents)


@pytest.mark.parametrize("length", [1, 3, 12])
def test_sequences_are_consecutive_and_carry_what_came_before(length):
    rollout = tagged_rollout()
    batch, targets = batching.to_sequences(rollout, rollout.steps.reward, length)
    tags = np.asarray(batch.steps.reward[..., 0])
    assert tags.shape == (length, T // length * B)
    np.testing.assert_array_equal(np.diff(tags, axis=0), 1)
    np.testing.assert_array_equal(batch.carry[:, 0, 0], tags[0])
    np.testing.assert_array_equal(batch.weight, batch.steps.reward)
    np.testing.assert_array_equal(targets, batch.steps.reward)


def test_what_was_remembered_before_the_first_step_alone_serves_whole_rollouts_only():
    rollout = tagged_rollout()
    blind = rollout.replace(steps=rollout.steps.replace(carry=()), carry=jnp.ones((B, 4)))
    np.testing.assert_array_equal(batching.to_sequences(blind, (), T)[0].carry, blind.carry)
    with pytest.raises(ValueError, match="cannot be cut into sequences of 3 steps"):
        batching.to_sequences(blind, (), 3)


def test_minibatches_cover_each_epoch_once_and_never_cut_sequences():
    rollout = tagged_rollout()
    batch, targets = batching.to_sequences(rollout, rollout.steps.reward, 4)

    def record(state, minibatch, targets):
        same = (targets == minibatch.steps.reward) & (minibatch.weight == targets)
        tags = {"tags": minibatch.steps.reward[..., 0], "carry": minibatch.carry[..., 0, 0], "same": same.all()}
        return state + 1, tags

    count, seen = jax.jit(
        lambda key: batching.minibatch_epochs(record, 0, batch, targets, key, num_epochs=2, num_minibatches=3)
    )(jax.random.key(0))
    assert count == 6
    tags = np.asarray(seen["tags"])  # [6, 4, 3]
    np.testing.assert_array_equal(np.diff(tags, axis=1), 1)
    everything = np.sort(np.asarray(rollout.steps.reward[..., 0]).ravel())
    for epoch in (tags[:3], tags[3:]):
        np.testing.assert_array_equal(np.sort(epoch.ravel()), everything)
    assert not np.array_equal(tags[:3], tags[3:])  # another order in another epoch
    np.testing.assert_array_equal(seen["carry"], tags[:, 0])
    assert seen["same"].all()


def test_one_minibatch_is_the_whole_batch_in_order():
    rollout = tagged_rollout()
    record = lambda state, minibatch, targets: (state, {"tags": minibatch.steps.reward})  # noqa: E731
    _, seen = batching.minibatch_epochs(record, 0, rollout, (), jax.random.key(0), num_epochs=2, num_minibatches=1)
    np.testing.assert_array_equal(seen["tags"], jnp.stack([rollout.steps.reward] * 2))


def test_minibatches_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"num_minibatches=2 must divide the 3 sequences .* Try .*\[1, 3\]"):
        batching.minibatch_epochs(
            lambda s, b, t: (s, {}), 0, tagged_rollout(), (), jax.random.key(0), num_epochs=1, num_minibatches=2
        )


@pytest.mark.parametrize("num_truncated", [0, 1, 4, 17])
def test_values_of_successors_are_computed_only_where_none_follows(num_truncated):
    """B of T B steps at a time: those of the last row, and those whose episode was cut off."""
    spec, calls = envs.matrix_game([[1.0, 0.0], [0.0, 0.0]]).spec, []
    batch = random_batch(spec, jax.random.key(0), length=7, batch_size=3).replace(next_carry=())
    order = np.random.default_rng(num_truncated).permutation(18)
    last = np.zeros(18, bool)
    last[order[:num_truncated]] = True
    last = np.append(last, [False, True, True]).reshape(7, 3)
    terminated = np.zeros((7, 3, 2), bool)
    terminated[6, 2] = True  # an end of its own: nobody asks what follows
    terminated[6, 1, 0] = True
    steps = with_true_successors(batch.steps.replace(last=jnp.asarray(last), terminated=jnp.asarray(terminated)))
    batch = batch.replace(steps=steps)

    def of(obs, first, action, places):
        jax.debug.callback(lambda places: calls.append(np.asarray(places)), places)
        return obs.agents.sum(-1) + 10 * action

    now = steps.obs.agents.sum(-1) + 10 * jnp.roll(steps.action, 1, axis=0)
    of_all = jax.jit(lambda batch: on_policy.of_successors(batch, now, lambda carry, *args: of(*args)))(batch)
    jax.effects_barrier()
    expected = np.asarray(steps.next_obs.agents.sum(-1) + 10 * steps.action)
    asked = ~(last & terminated.all(-1))
    np.testing.assert_allclose(of_all[asked], expected[asked], rtol=1e-6)
    assert sorted(x for places in calls for x in places if x < 21) == sorted(
        {*np.flatnonzero(last.ravel()), 18, 19} - {20}
    )
    assert len(calls) == -(-(num_truncated + 2) // 3)
