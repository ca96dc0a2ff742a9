"""Replay: what is kept, what is overwritten, what is drawn, and what that costs."""

import collections
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replay_beside_flashbax
from jmarl import buffers
from jmarl.types import EnvSpec, Observation, Trajectory, Transition


def rollout_of(ids, first, last, successors=None):
    """A rollout `[T, B]` of one agent in which everything tells its step's id; carries are the id too."""
    ids = np.asarray(ids)
    successors = ids + 0.5 if successors is None else successors

    def observation(x):
        x = jnp.asarray(x, jnp.float32)[..., None]
        ones = jnp.ones((*x.shape[:-1], 1), bool)
        return Observation(agents=x[..., None], state=x, action_mask=ones[..., None], agent_mask=ones)

    steps = Transition(
        obs=observation(ids),
        first=jnp.asarray(first),
        action=jnp.asarray(ids, jnp.int32)[..., None],
        reward=jnp.asarray(ids, jnp.float32)[..., None],
        terminated=jnp.asarray(last)[..., None],
        last=jnp.asarray(last),
        next_obs=observation(successors),
        carry=jnp.asarray(ids, jnp.float32)[..., None],
        measured={"log_prob": -jnp.asarray(ids, jnp.float32)[..., None]},
    )
    return Trajectory(steps=steps, carry=jnp.zeros((ids.shape[1], 1)))


def transitions(*ids):
    """A rollout of one environment in which every step is an episode."""
    column, true = np.array(ids)[:, None], np.ones((len(ids), 1), bool)
    return rollout_of(column, true, true)


def filled(buffer, *rollouts):
    state, add = buffer.init(rollouts[0]), jax.jit(buffer.add)
    for rollout in rollouts:
        state = add(state, rollout)
    return state


# -------------------------------------------------------------------------------------------------------- the ring


def test_the_oldest_make_room():
    state = filled(buffers.uniform(5, 2), transitions(0, 1, 2), transitions(10, 11, 12))
    assert sorted(state.steps.action.ravel().tolist()) == [1, 2, 10, 11, 12] and int(state.count) == 6


def test_an_addition_may_be_as_large_as_the_buffer_and_no_larger():
    state = filled(buffers.uniform(3, 2), transitions(0, 1, 2), transitions(10, 11, 12))
    assert sorted(state.steps.action.ravel().tolist()) == [10, 11, 12]
    with pytest.raises(ValueError, match=r"capacity=3 is smaller than one addition: .* can begin 4 sequences"):
        buffers.uniform(3, 2).init(transitions(0, 1, 2, 3))


def test_what_was_never_written_is_never_drawn():
    for buffer in (buffers.uniform(50, 50), buffers.prioritized(50, 50)):
        state = filled(buffer, transitions(7, 8, 9))
        drawn = jax.jit(buffer.sample)(state, jax.random.key(0)).steps.action
        assert set(drawn.ravel().tolist()) == {7, 8, 9}


def test_the_count_of_sequences_never_overflows():
    buffer = buffers.uniform(5, 2, sequence_length=2)
    first, last = [[[True]], [[False]]]
    state = filled(buffer, transitions(0, 1, 2, 3), rollout_of([[4]], first, last))
    far = 2**30 // 5 * 5
    late = state.replace(count=state.count + far, open=state.open + far)
    for rollout in (rollout_of([[5]], last, first), transitions(6, 7, 8)):
        state, late = _add(state, rollout), _add(late, rollout)
        assert 5 <= int(late.count) < 10 and int(late.count) % 5 == int(state.count) % 5
        jax.tree.map(np.testing.assert_array_equal, (state.steps, state.length), (late.steps, late.length))


@st.composite
def histories(draw):
    """Where episodes end `[rollouts, T, B]`, and where they are given up between rollouts `[rollouts, B]`; the shortest
    episode's length that the environment claims, and whether it keeps to it; sequence length and capacity. Few shapes,
    few compilations."""
    shape = draw(st.integers(1, 7)), 3, 2
    ends = np.array(draw(st.lists(st.booleans(), min_size=shape[0] * 6, max_size=shape[0] * 6))).reshape(shape)
    given_up = np.array(draw(st.lists(st.booleans(), min_size=shape[0] * 2, max_size=shape[0] * 2))).reshape(-1, 2)
    min_steps, is_kept = draw(st.sampled_from([(1, True), (3, True), (3, False)]))
    if is_kept and min_steps > 1:
        age, given_up = np.zeros(2, int), np.zeros_like(given_up)
        for end in ends.reshape(-1, 2):
            age += 1
            end &= age >= min_steps
            age[end] = 0
    return ends, given_up, min_steps, is_kept, *draw(st.sampled_from([(1, 7), (2, 6), (4, 7)]))


def follow(ends, given_up):
    """Rollouts whose views tell the step's number: of each step its own, of its successor the next step's, or half a
    number more where there is no such step."""
    num_rollouts, _, num_envs = ends.shape
    ids = np.arange(ends.size).reshape(ends.shape)
    first = np.zeros_like(ends)
    first[:, 1:] = ends[:, :-1]
    first[:, 0] = np.concatenate([np.ones((1, num_envs), bool), ends[:-1, -1] | given_up[1:]])
    begins = np.concatenate([first.reshape(-1, num_envs)[1:], np.ones((1, num_envs), bool)]).reshape(ends.shape)
    successors = np.where(begins, ids + 0.5, ids + num_envs)
    return [(rollout_of(ids[k], first[k], ends[k], successors[k]), ids[k], first[k]) for k in range(num_rollouts)]


_add, _take = jax.jit(buffers._add), jax.jit(buffers._take)
SPEC = EnvSpec("e", ("a",), (1,), (1,), num_actions=1, always_act=True, state_is_views=True)


@settings(deadline=None, max_examples=80)
@given(histories(), st.booleans())
def test_contents_are_those_of_a_plain_deque(history, state_is_views):
    """The model: lists of steps in a deque; a new list for an episode's first step and after a full list. Where more
    episodes end than the environment has said, a last step may be lost, but nothing is wrong."""
    ends, given_up, min_steps, is_kept, sequence_length, capacity = history
    num_envs = ends.shape[2]
    model, open_lists = collections.deque(maxlen=capacity), [None] * num_envs
    spec = SPEC._replace(min_steps=min_steps, state_is_views=state_is_views)
    buffer, state, successor = buffers.uniform(capacity, 1, sequence_length).for_env(spec), None, {}
    for rollout, ids, first in follow(ends, given_up):
        state = buffer.init(rollout) if state is None else state
        state = _add(state, rollout)
        successor |= zip(ids.ravel().tolist(), rollout.steps.next_obs.state.ravel().tolist(), strict=True)
        for t in range(len(ids)):
            for b in range(num_envs):
                if first[t, b] or len(open_lists[b]) == sequence_length:
                    open_lists[b] = []
                    model.append(open_lists[b])
                open_lists[b].append(int(ids[t, b]))

        batch = jax.tree.map(np.asarray, _take(state, jnp.arange(capacity)))
        for age, expected in enumerate(reversed(model)):
            row, num = (int(state.count) - 1 - age) % capacity, len(expected)
            weight = batch.weight[:, row, 0].tolist()
            if not is_kept and num == sequence_length and not weight[-1]:
                num -= 1  # its successor was lost
            assert weight == [1.0] * num + [0.0] * (sequence_length - num)
            assert batch.steps.action[:num, row, 0].tolist() == expected[:num]
            for obs, wanted in ((batch.steps.obs, expected), (batch.steps.next_obs, [successor[i] for i in expected])):
                assert obs.agents[:num, row, 0, 0].tolist() == wanted[:num]
                assert obs.state[:num, row, 0].tolist() == wanted[:num]
            assert float(batch.carry[row, 0]) == expected[0]


def test_a_spare_place_that_was_taken_twice_is_known():
    """Each episode is one step, and the environment says four: three spare places, and one for the newest."""
    buffer = buffers.uniform(8, 1).for_env(SPEC._replace(min_steps=4))
    batch = _take(filled(buffer, transitions(0, 1), transitions(2, 3, 4, 5, 6, 7, 8)), jnp.arange(8))
    action, is_there = batch.steps.action[0, :, 0], batch.weight[0, :, 0] > 0
    assert set(action[is_there].tolist()) == {5, 6, 7, 8}
    np.testing.assert_array_equal(batch.steps.next_obs.state[0, :, 0][is_there], action[is_there] + 0.5)


def test_a_transition_takes_one_view():
    rollout = transitions(0, 1)
    of_view = 4 + 1 + 1  # a float and two masks
    sizes = [
        buffers.memory(buffers.uniform(10_000, 1).for_env(SPEC._replace(min_steps=m)).init(rollout).obs)
        for m in (1, 1_000)
    ]
    assert sizes == [(20_000 + 2) * of_view, (10_010 + 2) * of_view]
    plain = buffers.uniform(10_000, 1).init(rollout)
    assert buffers.memory(plain.obs) == (20_000 + 2) * (of_view + 4)  # and the state


def test_sequences_carry_their_start_and_stop_at_an_episodes_end():
    ids, last = np.arange(6)[:, None], np.array([0, 0, 0, 1, 0, 0], bool)[:, None]
    first = np.roll(last, 1)
    first[0] = True
    buffer = buffers.uniform(64, 64, sequence_length=3)
    successors = np.where(last, ids + 0.5, ids + 1)
    batch = jax.jit(buffer.sample)(filled(buffer, rollout_of(ids, first, last, successors)), jax.random.key(0))
    parts = batch.steps.action[0, :, 0], batch.weight[..., 0].T, batch.carry
    by_start = {int(start): (w, c) for start, w, c in zip(*parts, strict=True)}
    assert {start: w.tolist() for start, (w, _) in by_start.items()} == {0: [1, 1, 1], 3: [1, 0, 0], 4: [1, 1, 0]}
    assert all(float(c[0]) == start for start, (_, c) in by_start.items())
    step = batch.steps.next_obs.state[..., 0] - batch.steps.obs.state[..., 0]
    is_there = batch.weight[..., 0] > 0
    np.testing.assert_array_equal(step[is_there], np.where(batch.steps.last, 0.5, 1.0)[is_there])


def test_another_dtype_or_shape_names_its_leaf():
    state = filled(buffers.uniform(5, 2), transitions(0, 1))
    other = transitions(2, 3)
    wrong = other.replace(steps=other.steps.replace(reward=other.steps.reward.astype(jnp.float16)))
    with pytest.raises(ValueError, match=r"steps\.reward is float16 of shape \(1,\) in the rollout, .* float32"):
        buffers._add(state, wrong)
    wrong = other.replace(steps=other.steps.replace(action=jnp.zeros((2, 1, 2), jnp.int32)))
    with pytest.raises(ValueError, match=r"steps\.action is int32 of shape \(2,\)"):
        buffers._add(state, wrong)


def test_numbers_in_place_of_masks_are_refused():
    """The tests' own checker of types looks at arguments, so the numbers are put in behind its back."""
    for name in ("agent_mask", "action_mask"):
        rollout = transitions(0, 1)
        object.__setattr__(rollout.steps.obs, name, jnp.ones((2, 1, 1), jnp.int32))
        with pytest.raises(
            TypeError, match=f"steps.obs.{name} is int32 in the rollout, and a mask is bool: write x > 0"
        ):
            inspect.unwrap(buffers._init)(rollout, 5, 1)
    for name in ("first", "terminated", "last"):
        rollout = transitions(0, 1)
        object.__setattr__(rollout.steps, name, jnp.ones((2, 1), jnp.float32))
        with pytest.raises(TypeError, match=rf"steps\.{name} is float32 in the rollout"):
            inspect.unwrap(buffers._init)(rollout, 5, 1)


@pytest.mark.parametrize("make_buffer", [buffers.uniform, buffers.prioritized])
def test_what_was_measured_and_who_counts_come_back(make_buffer):
    """Agent 0 waits at steps 0 and 2: they count; nothing counts at step 1, whoever acts."""
    rollout = transitions(0, 1, 2)
    acts, counts = jnp.array([[[False]], [[True]], [[False]]]), jnp.array([[[True]], [[False]], [[True]]])
    steps = rollout.steps.replace(obs=rollout.steps.obs.replace(agent_mask=acts))
    buffer = make_buffer(32, 32)
    batch = buffer.sample(filled(buffer, rollout.replace(steps=steps, weight=counts)), jax.random.key(0))
    ids = batch.steps.action[0, :, 0]
    assert set(ids.tolist()) == {0, 1, 2} and (batch.weight[0, :, 0] == (ids != 1)).all()
    assert (batch.steps.measured["log_prob"][0, :, 0] == -ids).all()


def test_a_buffer_says_what_it_was_made_with():
    sizes = {"capacity": 8, "batch_size": 2, "sequence_length": 3}
    assert buffers.uniform(8, 2, 3).settings == {"buffer": "uniform", **sizes}
    exponents = {"priority_exponent": "0.5", "importance_exponent": "0.4"}
    made = buffers.prioritized(8, 2, 3, priority_exponent=0.5)
    assert made.settings == {"buffer": "prioritized", **sizes, **exponents}


def test_bad_sizes():
    for size in (2.5, True, "4"):
        with pytest.raises(TypeError, match=r"batch_size=.* must be a whole number, such as batch_size=8"):
            inspect.unwrap(buffers._validate)(4, size, 1)
    with pytest.raises(ValueError, match="capacity=4 is smaller than batch_size=8"):
        buffers.uniform(4, 8)
    with pytest.raises(ValueError, match="sequence_length=0 must be at least 1"):
        buffers.prioritized(4, 2, 0)


# ------------------------------------------------------------------------------------------------------ priorities


def test_prioritized_draws_in_proportion_and_weighs_against_it():
    buffer = buffers.prioritized(4000, 4000, priority_exponent=0.5, importance_exponent=1.0)
    state = filled(buffer, transitions(0, 1, 2))
    assert state.priority.shares[:5].tolist() == [1, 1, 1, 0, 0]  # new ones as high as any
    state = buffer.set_priority(state, jnp.array([0, 1, 2]), jnp.array([1.0, 4.0, 16.0]))  # roots 1, 2, 4
    batch = jax.jit(buffer.sample)(state, jax.random.key(1))
    share = np.bincount(np.asarray(batch.index), minlength=3) / 4000
    np.testing.assert_allclose(share, np.array([1, 2, 4]) / 7, atol=1e-3)  # stratified: hardly any noise
    weight = {int(i): float(w) for i, w in zip(batch.index, batch.weight[0, :, 0], strict=True)}
    assert weight == pytest.approx({0: 1.0, 1: 0.5, 2: 0.25})
    state = _add(state, transitions(3, 4, 5))
    assert state.priority.shares[3:6].tolist() == [4, 4, 4]


def test_steps_appended_to_a_sequence_are_as_urgent_as_a_new_one():
    """One step of an episode, which turns out to be known well; then three more."""
    buffer, false = buffers.prioritized(8, 2, sequence_length=4, priority_exponent=1.0), np.zeros((3, 1), bool)
    state = filled(buffer, rollout_of([[0]], [[True]], [[False]]), rollout_of([[9]], [[True]], [[False]]))
    state = buffer.set_priority(state, jnp.array([0, 1]), jnp.array([4.0, 0.001]))
    state = buffer.add(state, rollout_of([[10], [11], [12]], false, false))
    assert state.length[:2].tolist() == [1, 4] and state.priority.shares[:2].tolist() == [4, 4]


@pytest.mark.parametrize("name", ["priority_exponent", "importance_exponent"])
def test_negative_exponents_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}=-0.5 must not be negative"):
        buffers.prioritized(4, 2, **{name: -0.5})


# ------------------------------------------------------------------------------------------------------------ cost


@pytest.mark.parametrize("sequence_length", [1, 4])
def test_a_donated_buffer_is_updated_in_place(sequence_length):
    buffer, rollout = buffers.uniform(4096, 2, sequence_length), transitions(*range(64))
    state = jax.eval_shape(buffer.init, rollout)
    analysis = jax.jit(buffer.add, donate_argnums=0).lower(state, rollout).compile().memory_analysis()
    assert analysis.alias_size_in_bytes == buffers.memory(state)
    views = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.obs))
    assert analysis.temp_size_in_bytes < views / 10


def test_memory_is_what_the_arrays_take():
    state = filled(buffers.uniform(5, 2), transitions(0, 1))
    assert buffers.memory(state) == sum(x.nbytes for x in jax.tree.leaves(state))
    assert buffers.memory(jax.eval_shape(lambda: state)) == buffers.memory(state)


def test_seeds_have_buffers_of_their_own():
    buffer = buffers.uniform(4, 2)
    rollouts = jax.tree.map(lambda *x: jnp.stack(x), transitions(0, 1), transitions(5, 6))
    states = jax.vmap(buffer.add)(jax.vmap(buffer.init)(rollouts), rollouts)
    assert states.steps.action[:, :2, 0, 0].tolist() == [[0, 1], [5, 6]]


# ------------------------------------------------------------------------------------------------------- flashbax


def test_flashbax_plugs_in_through_the_same_functions():
    theirs = replay_beside_flashbax.flashbax_buffer(16, 4)
    batch = theirs.sample(filled(theirs, transitions(0, 1, 2)), jax.random.key(0))
    assert batch.steps.action.shape == (1, 4, 1) and set(batch.steps.action.ravel().tolist()) <= {0, 1, 2}
