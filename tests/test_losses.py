"""Returns, losses and masked statistics against plain numpy, closed forms and the faults other projects had."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jmarl import envs, losses, normalize
from jmarl.learners import ppo
from jmarl.types import Moments, Trajectory, Transition, zero_observation

# Compiled as a whole, because op by op costs the tests more time.
gae, lambda_returns, value_loss = jax.jit(losses.gae), jax.jit(losses.lambda_returns), jax.jit(losses.value_loss)
n_step_returns = jax.jit(losses.n_step_returns, static_argnames="n")
masked_mean = jax.jit(losses.masked_mean, static_argnames="axis")
masked_normalize = jax.jit(losses.masked_normalize, static_argnames="axis")
explained_variance = jax.jit(losses.explained_variance)
update, normalize_by, denormalize_by = map(jax.jit, (normalize.update, normalize.normalize, normalize.denormalize))

GAMMA, LAMBDA = 0.9, 0.8


def episode_ends(seed, shape=(6, 3, 2)):
    """Random rewards and values with terminations, truncations, and agents that die while the episode goes on."""
    rng = np.random.default_rng(seed)
    reward, value, next_value = rng.normal(size=(3, *shape))
    terminated = rng.random(shape) < 0.2
    last = np.broadcast_to(rng.random(shape[:2])[..., None] < 0.2, shape)
    return reward, GAMMA * ~terminated, value, next_value, last


def on_device(*args):
    return [jnp.asarray(x) for x in args]


def close(actual, desired, dtype):
    tolerance = 1e-5 if dtype == "float32" else 1e-12
    np.testing.assert_allclose(actual, desired, rtol=tolerance, atol=tolerance)
    assert actual.dtype == dtype


# --------------------------------------------------------------------------------------------- returns, by definition


def gae_by_definition(reward, discount, value, next_value, last, lambda_):
    """Every trace from its own start: a double loop instead of a recursion."""
    advantage = np.zeros_like(reward)
    for index in np.ndindex(reward.shape):
        t, rest = index[0], index[1:]
        weight = 1.0
        for s in range(t, len(reward)):
            i = (s, *rest)
            advantage[index] += weight * (reward[i] + discount[i] * next_value[i] - value[i])
            weight *= discount[i] * lambda_
            if last[i]:
                break
    return advantage


def n_step_by_definition(reward, discount, next_value, last, n):
    returns = np.zeros_like(reward)
    for index in np.ndindex(reward.shape):
        t, rest = index[0], index[1:]
        weight = 1.0
        for s in range(t, len(reward)):
            i = (s, *rest)
            returns[index] += weight * reward[i]
            weight *= discount[i]
            if last[i] or s == t + n - 1 or s == len(reward) - 1:
                returns[index] += weight * next_value[i]
                break
    return returns


def lambda_by_definition(reward, discount, next_value, last, lambda_):
    """(1 - λ) Σ λⁿ⁻¹ Gⁿ over the n-step returns, those beyond the episode's end being equal to the longest."""
    n_steps = [n_step_by_definition(reward, discount, next_value, last, n) for n in range(1, len(reward) + 1)]
    weights = [(1 - lambda_) * lambda_**n for n in range(len(reward) - 1)]
    return sum(w * g for w, g in zip([*weights, lambda_ ** (len(reward) - 1)], n_steps, strict=True))


def test_gae_matches_numpy_double_loop(dtype, maybe_jit):
    args = episode_ends(0)
    close(maybe_jit(losses.gae)(*on_device(*args), LAMBDA), gae_by_definition(*args, LAMBDA), dtype)


def test_lambda_returns_average_n_step_returns(dtype, maybe_jit):
    reward, discount, _, next_value, last = episode_ends(0)
    args = reward, discount, next_value, last
    close(maybe_jit(losses.lambda_returns)(*on_device(*args), LAMBDA), lambda_by_definition(*args, LAMBDA), dtype)


@pytest.mark.parametrize("n", [1, 3, 20])
def test_n_step_returns_match_numpy_double_loop(n, dtype, maybe_jit):
    reward, discount, _, next_value, last = episode_ends(2)
    args = reward, discount, next_value, last
    function = maybe_jit(losses.n_step_returns, static_argnums=4)
    close(function(*on_device(*args), n), n_step_by_definition(*args, n), dtype)


def vtrace_by_definition(ratio, reward, discount, value, next_value, last, lambda_, max_rho, max_c):
    """The sum over all later steps of an episode, each with the product of what lies between."""
    target, advantage = value.copy(), np.zeros_like(value)
    for index in np.ndindex(reward.shape):
        t, rest = index[0], index[1:]
        weight = 1.0
        for s in range(t, len(reward)):
            i = (s, *rest)
            td_error = reward[i] + discount[i] * next_value[i] - value[i]
            target[index] += weight * min(max_rho, ratio[i]) * td_error
            weight *= discount[i] * lambda_ * min(max_c, ratio[i])
            if last[i]:
                break
    for index in np.ndindex(reward.shape):
        t, rest = index[0], index[1:]
        is_cut = last[index] or t == len(reward) - 1
        after = next_value[index] + (0 if is_cut else target[t + 1, *rest] - value[t + 1, *rest])
        advantage[index] = min(max_rho, ratio[index]) * (reward[index] + discount[index] * after - value[index])
    return target, advantage


def retrace_by_definition(ratio, reward, discount, q, next_value, last, lambda_):
    target = q.copy()
    for index in np.ndindex(reward.shape):
        t, rest = index[0], index[1:]
        weight = 1.0
        for s in range(t, len(reward)):
            i = (s, *rest)
            if s > t:
                weight *= lambda_ * min(1.0, ratio[i])
            target[index] += weight * (reward[i] + discount[i] * next_value[i] - q[i])
            weight *= discount[i]
            if last[i]:
                break
    return target


def log_ratios(seed):
    return np.random.default_rng(100 + seed).normal(size=(6, 3, 2))


def test_vtrace_matches_numpy_double_loop(dtype, maybe_jit):
    args, log_ratio = episode_ends(4), log_ratios(4)
    expected = vtrace_by_definition(np.exp(log_ratio), *args, LAMBDA, 1.5, 0.8)
    actual = maybe_jit(losses.vtrace)(*on_device(log_ratio, *args), LAMBDA, 1.5, 0.8)
    for x, y in zip(actual, expected, strict=True):
        close(x, y, dtype)


def test_retrace_matches_numpy_double_loop(dtype, maybe_jit):
    args, log_ratio = episode_ends(5), log_ratios(5)
    expected = retrace_by_definition(np.exp(log_ratio), *args, LAMBDA)
    close(maybe_jit(losses.retrace)(*on_device(log_ratio, *args), LAMBDA), expected, dtype)


# ---------------------------------------------------------------------------------------------------- returns, limits


def consistent(seed):
    """Inside an episode the value of a step's successor is that of the next step."""
    reward, discount, value, next_value, last = on_device(*episode_ends(seed))
    cut = last.at[-1].set(True)
    return reward, discount, value, jnp.where(cut, next_value, jnp.roll(value, -1, axis=0)), last


def test_on_policy_vtrace_is_n_step_returns_and_their_advantage(dtype):
    reward, discount, value, next_value, last = consistent(6)
    target, advantage = jax.jit(losses.vtrace)(jnp.zeros_like(reward), reward, discount, value, next_value, last)
    n_step = n_step_returns(reward, discount, next_value, last, len(reward))
    close(target, n_step, dtype)
    close(advantage, n_step - value, dtype)


def test_vtrace_of_actions_that_the_policy_never_takes_learns_nothing():
    args = consistent(6)
    target, advantage = jax.jit(losses.vtrace)(jnp.full_like(args[0], -1e30), *args)
    np.testing.assert_array_equal(target, args[2])
    assert not advantage.any()


def test_retrace_on_policy_is_q_lambda_and_one_step_where_policies_never_agree(dtype):
    reward, discount, q, next_value, last = on_device(*episode_ends(7))
    zero, args = jnp.zeros_like(reward), (reward, discount, q, next_value, last)
    close(jax.jit(losses.retrace)(zero, *args, LAMBDA), q + gae(*args, LAMBDA), dtype)
    one_step = reward + discount * next_value
    close(jax.jit(losses.retrace)(zero - 1e30, *args, LAMBDA), one_step, dtype)


def test_a_ratio_that_overflows_gives_finite_traces_and_gradients():
    args = consistent(6)
    for function in (lambda x: losses.vtrace(x, *args)[1], lambda x: losses.retrace(x, *args)):
        out, slope = jax.value_and_grad(lambda x, function=function: function(x).sum())(jnp.full_like(args[0], 200.0))
        assert jnp.isfinite(out) and jnp.isfinite(slope).all()


def test_gae_lambda_zero_is_the_td_error(dtype):
    reward, discount, value, next_value, last = on_device(*episode_ends(3))
    td_error = reward + discount * next_value - value
    close(gae(reward, discount, value, next_value, last, 0.0), td_error, dtype)


def test_gae_lambda_one_is_monte_carlo(dtype):
    reward, discount, value, next_value, last = on_device(*episode_ends(3))
    next_value = jnp.roll(value, -1, axis=0)  # consistent with `value`, so that everything between telescopes
    monte_carlo = n_step_returns(reward, discount, next_value, last, len(reward))
    close(gae(reward, discount, value, next_value, last, 1.0), monte_carlo - value, dtype)


def test_lambda_limits_are_one_step_and_monte_carlo(dtype):
    reward, discount, _, next_value, last = on_device(*episode_ends(4))
    args = reward, discount, next_value, last
    close(lambda_returns(*args, 0.0), n_step_returns(*args, 1), dtype)
    close(lambda_returns(*args, 1.0), n_step_returns(*args, len(reward)), dtype)


def test_gae_of_consistent_values_is_lambda_return_minus_value(dtype):
    reward, discount, value, next_value, last = on_device(*episode_ends(5))
    next_value = jnp.where(last, next_value, jnp.roll(value, -1, axis=0))
    returns = lambda_returns(reward, discount, next_value, last, LAMBDA)
    close(gae(reward, discount, value, next_value, last, LAMBDA), returns - value, dtype)


# --------------------------------------------------------------------------------------------- returns, what bites


def test_gae_stops_at_termination(dtype):
    terminated = jnp.array([False, True, False])
    zero = jnp.zeros(3)
    advantage = gae(jnp.ones(3), 1.0 - terminated, zero, jnp.array([0.0, 0, 10]), terminated, 1.0)
    np.testing.assert_array_equal(advantage, [2, 1, 11])


def test_gae_bootstraps_at_a_time_limit_from_the_true_successor(dtype):
    value, next_value = jnp.array([1.0, 2, 100]), jnp.array([2.0, 5, 3])
    last = jnp.array([False, True, False])
    advantage = gae(jnp.ones(3), jnp.full(3, 0.9), value, next_value, last, 0.8)
    close(advantage, np.array([4.32, 3.5, -96.3]), dtype)


def test_an_agents_death_cuts_its_trace_and_nobody_elses(dtype):
    """terminated[:, 0] without `last`: the episode goes on for agent 1."""
    discount = jnp.array([[1.0, 1], [0, 1], [1, 1]])
    args = jnp.ones((3, 2)), discount, jnp.zeros((3, 2)), jnp.zeros((3, 2)), jnp.zeros((3, 2), bool)
    np.testing.assert_array_equal(gae(*args, 1.0), [[2, 3], [1, 2], [1, 1]])


def test_td_lambda_over_an_unpadded_window(dtype):
    reward, next_value = jnp.ones(3), jnp.array([4.0, 4, 8])
    never, at_0 = jnp.zeros(3, bool), jnp.array([True, False, False])
    np.testing.assert_array_equal(lambda_returns(reward, 0.5 * ~at_0, next_value, at_0, 0.5), jnp.array([1, 3.25, 5]))
    np.testing.assert_array_equal(
        lambda_returns(reward, 0.5 * ~never, next_value, never, 0.5), jnp.array([2.8125, 3.25, 5])
    )


def test_one_step_targets_across_an_episodes_end(dtype):
    terminated = jnp.array([False, True, False])
    target = n_step_returns(jnp.array([1.0, 10, 2]), 0.5 * ~terminated, jnp.array([6.0, 7, 8]), terminated, n=1)
    np.testing.assert_array_equal(target, [4, 10, 6])


def test_targets_before_an_episodes_end_do_not_see_the_next_episode(dtype):
    reward, discount, value, next_value, last = on_device(*episode_ends(6))
    last, discount = last.at[3].set(True), jnp.full_like(discount, GAMMA)
    after = jnp.arange(len(reward))[:, None, None] > 3
    other = [jnp.where(after, 1e3, x) for x in (reward, value, next_value)]
    for estimate in (
        lambda r, v, w: gae(r, discount, v, w, last, LAMBDA),
        lambda r, v, w: lambda_returns(r, discount, w, last, LAMBDA),
        lambda r, v, w: n_step_returns(r, discount, w, last, 3),
    ):
        np.testing.assert_array_equal(estimate(reward, value, next_value)[:4], estimate(*other)[:4])


def test_n_must_be_positive():
    with pytest.raises(ValueError, match="n=0"):
        n_step_returns(*[jnp.ones(3)] * 3, jnp.zeros(3, bool), n=0)


def test_returns_take_a_traced_lambda_and_vmap_over_it():
    args = on_device(*episode_ends(7))
    lambdas = jnp.array([0.0, 0.5, 1.0])
    batched = jax.jit(jax.vmap(lambda lambda_: losses.gae(*args, lambda_)))(lambdas)
    for lambda_, advantage in zip(lambdas, batched, strict=True):
        np.testing.assert_allclose(advantage, gae(*args, lambda_), rtol=1e-6, atol=1e-6)


# ------------------------------------------------------------------------------------------------------------ losses


@pytest.mark.parametrize("advantage, slope", [(1.0, 0.0), (0.0, 0.0)])
def test_a_ratio_beyond_the_largest_float_has_the_loss_and_slope_of_the_clipped_one(advantage, slope):
    def loss(log_ratio):
        return losses.clipped_surrogate(log_ratio, jnp.zeros(1), jnp.full(1, advantage), 0.25)[0]

    value, gradient = jax.value_and_grad(loss)(jnp.array([90.0]))
    assert float(value) == -1.25 * advantage and float(gradient[0]) == slope
    assert np.isfinite(jax.grad(lambda x: -loss(x))(jnp.array([90.0]))).all()
    assert np.isnan(loss(jnp.array([jnp.nan])))  # only what overflows is replaced


@pytest.mark.parametrize("name, argument", [("lambda_returns", LAMBDA), ("n_step_returns", 2)])
def test_returns_of_numpy_arrays(name, argument):
    function = inspect.unwrap(getattr(losses, name))  # while tests run, the type checker wants arrays on the device
    reward, discount, _, next_value, last = episode_ends(0)
    args = [x.astype(np.float32) for x in (reward, discount, next_value)]
    expected = function(*on_device(*args, last), argument)
    np.testing.assert_allclose(function(*args, last, argument), expected, rtol=1e-6)


def test_clipped_surrogate_matches_the_four_cases(dtype):
    """Only the gain beyond the trust region is cut: ratio up with A > 0, ratio down with A < 0."""
    log_ratio, advantage = jnp.log(jnp.array([1.5, 1.5, 0.5, 0.5])), jnp.array([1.0, -1, 1, -1])
    loss = jax.jit(losses.clipped_surrogate)(log_ratio, jnp.zeros(4), advantage, 0.25)
    close(loss, np.array([-1.25, 1.5, -0.5, 0.75]), dtype)
    gradient = jax.jit(jax.grad(lambda x: losses.clipped_surrogate(x, jnp.zeros(4), advantage, 0.25).sum()))(log_ratio)
    close(gradient, np.array([0, 1.5, -0.5, 0]), dtype)


def test_surrogate_at_the_old_policy_is_the_policy_gradient(dtype):
    log_prob, advantage = jnp.log(jnp.array([0.2, 0.5, 0.9])), jnp.array([1.0, 0, -1])
    gradient = jax.jit(jax.grad(lambda x: losses.clipped_surrogate(x, log_prob, advantage, 0.2).sum()))(log_prob)
    np.testing.assert_array_equal(gradient, -advantage)


def test_squared_error_has_no_half_and_huber_has(dtype):
    value, target = jnp.array([0.5, 3, -3]), jnp.zeros(3)
    close(value_loss(value, target), np.array([0.25, 9, 9]), dtype)
    huber = jax.jit(lambda v, t, d: losses.value_loss(v, t, huber_delta=d))
    close(huber(value, target, 2.0), np.array([0.125, 4, 4]), dtype)


def test_huber_gradient_is_the_clipped_error(dtype):
    error = jnp.array([-5.0, -1, 0, 0.5, 5])
    gradient = jax.jit(jax.grad(lambda e: losses.value_loss(e, jnp.zeros(5), huber_delta=1.0).sum()))(error)
    close(gradient, np.array([-1, -1, 0, 0.5, 1]), dtype)


@given(arrays(np.float32, (3, 8), elements=st.floats(-8, 8, width=32)), st.sampled_from([None, 0.5, 10.0]))
def test_value_clipping_takes_the_larger_loss(x, huber_delta):
    value, target, old_value = x

    def loss(e):
        if huber_delta is None:
            return e**2
        return np.where(abs(e) <= huber_delta, e**2 / 2, huber_delta * (abs(e) - huber_delta / 2))

    clipped = np.clip(value, old_value - 0.5, old_value + 0.5)
    actual = value_loss(
        *on_device(value, target), old_value=jnp.asarray(old_value), clip_eps=0.5, huber_delta=huber_delta
    )
    desired = np.maximum(loss(value - target), loss(clipped - target))
    np.testing.assert_allclose(actual, desired, rtol=1e-4, atol=1e-4)


def test_value_clipping_needs_old_values():
    with pytest.raises(ValueError, match="old_value"):
        value_loss(jnp.ones(2), jnp.ones(2), clip_eps=0.2)


def test_a_stray_axis_raises_instead_of_broadcasting():
    """log π [3] times A [3] has mean -2/3; [3, 1] against [3] would give 0 in silence."""
    log_prob, advantage = jnp.array([1.0, 2, 3]), jnp.array([1.0, 0, -1])
    np.testing.assert_allclose(jnp.mean(losses.policy_gradient_loss(log_prob, advantage)), 2 / 3, rtol=1e-6)
    vector, column, mask = jnp.ones(3), jnp.ones((3, 1)), jnp.ones(3, bool)
    calls = {
        losses.gae: [vector, vector, column, vector, mask],
        losses.lambda_returns: [vector, vector, column, mask],
        losses.n_step_returns: [vector, vector, column, mask, 2],
        losses.clipped_surrogate: [vector, vector, column],
        losses.value_loss: [column, vector],
        losses.masked_mean: [column, mask],
        losses.masked_normalize: [column, mask],
        losses.approx_kl: [column, vector],
        losses.explained_variance: [vector, column, mask],
    }
    for function, args in calls.items():
        unchecked = inspect.unwrap(function)  # what users call, without the type checker of these tests
        with pytest.raises(AssertionError):
            unchecked(*args)


# ------------------------------------------------------------------------------------------------- masked statistics


def test_masked_mean_ignores_masked_entries(dtype):
    mask = jnp.array([True, True, False, False])
    assert masked_mean(jnp.array([2.0, 4, 9, 9]), mask) == 3
    assert masked_mean(jnp.array([2.0, 4, jnp.nan, jnp.inf]), mask) == 3


def test_masked_mean_along_axes(dtype):
    rng = np.random.default_rng(0)
    x, mask = rng.normal(size=(4, 3, 2)), rng.random((4, 3, 2)) < 0.5
    mask[:, :, 1] = False
    for axis in (0, -1, (0, 1)):
        desired = (x * mask).sum(axis) / np.maximum(mask.sum(axis), 1)
        close(masked_mean(*on_device(x, mask), axis=axis), desired, dtype)


def test_nothing_active_gives_zero_loss_and_zero_gradients(dtype):
    mask = jnp.zeros(3, bool)

    def loss(x):
        return losses.masked_mean(x**2 + masked_normalize(x, mask), mask)

    value, gradient = jax.jit(jax.value_and_grad(loss))(jnp.array([1.0, 2, 3]))
    assert value == 0
    np.testing.assert_array_equal(gradient, 0)


def test_masked_entries_change_neither_values_nor_gradients(dtype):
    mask = jnp.array([True, True, True, False])
    clean, poisoned = jnp.array([1.0, 2, 4, 0]), jnp.array([1.0, 2, 4, jnp.nan])
    gradient = jax.jit(jax.grad(lambda x: losses.masked_mean(x**3, mask)))
    np.testing.assert_array_equal(gradient(clean)[:3], gradient(poisoned)[:3])
    np.testing.assert_array_equal(masked_normalize(clean, mask)[:3], masked_normalize(poisoned, mask)[:3])


def test_masked_normalize_matches_numpy(dtype):
    rng = np.random.default_rng(1)
    x, mask = rng.normal(3, 2, size=(6, 4, 3)), rng.random((6, 4, 3)) < 0.7
    pooled = jax.jit(lambda x, m: losses.masked_normalize(x, m, eps=0.0))(*on_device(x, mask))
    close(np.asarray(pooled)[mask], (x[mask] - x[mask].mean()) / x[mask].std(), dtype)
    per_agent = jax.jit(lambda x, m: losses.masked_normalize(x, m, axis=(0, 1), eps=0.0))(*on_device(x, mask))
    for agent in range(3):
        active = x[..., agent][mask[..., agent]]
        close(np.asarray(per_agent)[..., agent][mask[..., agent]], (active - active.mean()) / active.std(), dtype)


def test_masked_normalize_of_two_active_entries(dtype):
    out = masked_normalize(jnp.array([1.0, 3, 7, -9]), jnp.array([True, True, False, False]), eps=0.0)
    close(out[:2], np.array([-1, 1]), dtype)


def test_normalising_constants_gives_zero_with_finite_gradients(dtype):
    x, mask = jnp.full(4, 2.0), jnp.ones(4, bool)
    value, gradient = jax.jit(jax.value_and_grad(lambda x: losses.masked_normalize(x, mask).sum()))(x)
    assert value == 0
    assert jnp.isfinite(gradient).all()


def test_approx_kl_estimates_kl_and_is_never_negative(dtype):
    old, new = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    kl = jax.jit(losses.approx_kl)(*on_device(np.log(new), np.log(old)))
    assert (kl >= 0).all()
    close(jnp.sum(jnp.asarray(old) * kl), np.sum(old * np.log(old / new)), dtype)


def test_approx_kl_survives_tiny_updates():
    """log ratio 1e-4 in float32: exp(x) - 1 - x would lose every digit of 5e-9."""
    kl = losses.approx_kl(jnp.array([-1 + 1e-4], jnp.float32), jnp.array([-1.0], jnp.float32))
    np.testing.assert_allclose(kl, 5e-9, rtol=2e-2)


def test_explained_variance_limits(dtype):
    target, mask = jnp.array([1.0, 2, 3, 99]), jnp.array([True, True, True, False])
    assert explained_variance(target + 5, target, mask) == 1
    close(explained_variance(jnp.zeros(4), target, mask), 0.0, dtype)
    close(explained_variance(-target, target, mask), -3.0, dtype)
    assert jnp.isnan(explained_variance(target, jnp.ones(4), mask))
    assert jnp.isnan(explained_variance(target, target, jnp.zeros(4, bool)))


# ------------------------------------------------------------------------------------------------- value normalisation


def test_advantages_use_denormalised_values(dtype):
    """Return 10 and normalised value 0.5 with mean 8 and std 4 are the same number: advantage 0, not 9.5."""
    seen = Moments(mean=jnp.array(8.0), variance=jnp.array(4.0**2), weight=jnp.array(1.0))
    spec = envs.probe("delayed").spec
    cfg = ppo.PPOConfig(normalize_value=True, hidden_sizes=(4,))
    nets = ppo.default_policy(spec, cfg)
    shape = (1, 1, 1)

    @jax.jit
    def advantage(key):
        steps = Transition(
            obs=zero_observation(spec, shape[:2]),
            carry=nets.init_carry(shape[:2]),
            first=jnp.ones(shape[:2], bool),
            action=jnp.zeros(shape, jnp.int32),
            reward=jnp.full(shape, 10.0),
            terminated=jnp.ones(shape, bool),
            last=jnp.ones(shape[:2], bool),
            next_obs=zero_observation(spec, shape[:2]),
            measured={"log_prob": jnp.zeros(shape), "value": jnp.full(shape, 0.5)},
        )
        batch = Trajectory(steps=steps, next_carry=nets.init_carry((1,)))
        targets, *_ = ppo.ppo_targets(nets.init(key), batch, {"value": seen}, nets=nets, cfg=cfg)
        return targets.advantage

    np.testing.assert_array_equal(advantage(jax.random.key(0)), 0)
    np.testing.assert_array_equal(normalize_by(seen, jnp.array([10.0])), 0.5)


def test_first_update_needs_no_warm_up(dtype):
    """Debiased: however slow beta is, the first batch sets mean and standard deviation."""
    x = np.random.default_rng(2).normal(7, 3, size=50)
    stats = update(normalize.init(), jnp.asarray(x), jnp.ones(50, bool), beta=0.9999)
    tolerance = 1e-4 if dtype == "float32" else 1e-9
    np.testing.assert_allclose(
        normalize_by(stats, jnp.asarray(x)), (x - x.mean()) / x.std(), rtol=tolerance, atol=tolerance
    )


def test_value_norm_before_any_data_changes_nothing(dtype):
    x = jnp.array([3.0, -2])
    np.testing.assert_array_equal(normalize_by(normalize.init(), x), x)
    np.testing.assert_array_equal(denormalize_by(normalize.init(), x), x)


def test_value_norm_floors_the_variance(dtype):
    stats = update(normalize.init(), jnp.full(3, 5.0), jnp.ones(3, bool))
    close(normalize_by(stats, jnp.array([6.0])), np.array([10.0]), dtype)


def test_value_norm_ignores_masked_entries_and_empty_batches(dtype):
    stats = update(normalize.init(), jnp.array([1.0, 3, 99]), jnp.array([True, True, False]), 0.5)
    close(denormalize_by(stats, jnp.array([1.0])), np.array([3.0]), dtype)
    unchanged = update(stats, jnp.array([7.0]), jnp.zeros(1, bool), 0.5)
    jax.tree.map(np.testing.assert_array_equal, unchanged, stats)


@given(arrays(np.float32, 5, elements=st.floats(-100, 100, width=32)))
def test_denormalize_undoes_normalize(x):
    x = jnp.asarray(x)
    stats = update(normalize.init(), x, jnp.ones(5, bool))
    np.testing.assert_allclose(denormalize_by(stats, normalize_by(stats, x)), x, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(("mean", "std"), [(1e3, 1.0), (2e4, 5.0), (1e5, 10.0)])
def test_value_norm_finds_a_deviation_that_is_small_beside_the_mean(mean, std):
    x = (mean + std * np.random.default_rng(0).normal(size=(50, 200))).astype(np.float32)
    stats = normalize.init()
    for batch in x:
        stats = update(stats, jnp.asarray(batch), jnp.ones(200, bool), beta=0.99)
    np.testing.assert_allclose(normalize_by(stats, jnp.asarray(x)).std(), 1.0, rtol=0.05)


def test_value_norm_keeps_its_types_under_scan():
    """Weak types would make the second update compile again, or fail inside a scan."""
    x, mask = jnp.ones((4, 3)), jnp.ones((4, 3), bool)
    stats, _ = jax.lax.scan(lambda s, xm: (update(s, *xm, beta=0.9), None), normalize.init(), (x, mask))
    close(stats.weight, 1 - 0.9**4, "float32")
