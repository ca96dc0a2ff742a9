"""Schedules end where they should, and optimisers follow PyTorch's formulas with settings that may be traced."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jmarl import optim


@pytest.mark.parametrize("kind", ["linear", "exponential"])
def test_schedules_start_and_end_exactly(kind, dtype):
    rate = jax.jit(optim.schedule(kind, 3e-4, 1e-5, total_steps=7))
    assert rate(0) == jnp.asarray(3e-4)
    for count in (7, 8, 1000):
        assert rate(count) == jnp.asarray(1e-5)


def test_linear_is_half_way_at_half_time(dtype):
    assert jax.jit(optim.schedule("linear", 5e-4, 0.0, total_steps=10))(5) == jnp.asarray(5e-4) / 2


def test_exponential_shrinks_by_the_same_factor_every_step():
    rate = jax.jit(optim.schedule("exponential", 1.0, 0.1, total_steps=10))
    np.testing.assert_allclose([rate(count) for count in range(11)], 0.1 ** (np.arange(11) / 10), rtol=1e-5)


def test_schedules_never_leave_their_range():
    for kind, start, end in [
        ("linear", 0.7, 0.1),
        ("linear", 0.1, 0.7),
        ("exponential", 0.7, 0.1),
        ("constant", 0.7, 0.1),
    ]:
        rate = jax.jit(optim.schedule(kind, start, end, total_steps=13))
        values = np.array([rate(count) for count in range(30)])
        assert values.min() >= np.float32(min(start, end))
        assert values.max() <= np.float32(max(start, end))


def test_constant_stays():
    assert optim.schedule("constant", 0.5)(10**6) == 0.5


def test_schedules_take_tracers():
    def rate_after(start, total_steps):
        return optim.schedule("linear", start, 0.0, total_steps)(5)

    rates = jax.jit(jax.vmap(rate_after, (0, None)))(jnp.array([1.0, 2.0]), 10)
    np.testing.assert_array_equal(rates, [0.5, 1.0])


def test_an_optimiser_counts_its_own_updates():
    """After all updates the rate is the end value exactly: sgd's step from there on is -end * gradient."""
    opt = optim.optimizer(optim.schedule("linear", 1.0, 0.25, total_steps=4), name="sgd")
    params = jnp.zeros(())
    state, steps = opt.init(params), []
    update = jax.jit(opt.update)
    for _ in range(6):
        step, state = update(jnp.ones(()), state, params)
        steps.append(-float(step))
    np.testing.assert_array_equal(steps, [1, 0.8125, 0.625, 0.4375, 0.25, 0.25])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: optim.schedule("linaer", 1.0), "Did you mean 'linear'"),
        (lambda: optim.optimizer(1.0, name="adamW"), "Did you mean 'adamw'"),
    ],
)
def test_unknown_names_are_answered_with_the_nearest(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def one_step(name, gradient, params, **settings):
    opt = optim.optimizer(0.1, name=name, **settings)
    return jax.jit(lambda g, p: optax.apply_updates(p, opt.update(g, opt.init(p), p)[0]))(gradient, params)


def test_weight_decay_is_decoupled_in_adamw_and_l2_elsewhere(dtype):
    gradient, params = jnp.array([0.0, 2.0]), jnp.array([1.0, 1.0])
    zero_eps = {"weight_decay": 0.5, "eps": 0.0}
    tolerance = 1e-6
    # Adam's first step is the sign of the gradient, decay included: both entries move by the whole learning rate.
    np.testing.assert_allclose(one_step("adam", gradient, params, **zero_eps), [0.9, 0.9], rtol=tolerance)
    np.testing.assert_allclose(one_step("sgd", gradient, params, weight_decay=0.5), [0.95, 0.75], rtol=tolerance)
    # Decoupled: p - 0.1 (sign + 0.5 p).
    np.testing.assert_allclose(
        one_step("adamw", gradient, params, weight_decay=0.5, eps=1e-12), [0.95, 0.85], rtol=tolerance
    )


def test_rmsprop_has_eps_outside_the_root(dtype):
    step = one_step("rmsprop", jnp.array([2.0]), jnp.zeros(1), decay=0.75, eps=1.0)
    np.testing.assert_allclose(step, [-0.1 * 2 / (np.sqrt(0.25 * 4) + 1)], rtol=1e-6)


def test_clipping_comes_first_and_is_global(dtype):
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    after = one_step("sgd", {"a": jnp.array([3.0]), "b": jnp.array([4.0])}, params, max_grad_norm=1.0)
    np.testing.assert_allclose([after["a"][0], after["b"][0]], [-0.06, -0.08], rtol=1e-6)
    # L2 decay is no part of the norm.
    decayed = one_step("sgd", jnp.array([0.5]), jnp.array([10.0]), max_grad_norm=1.0, weight_decay=1.0)
    np.testing.assert_allclose(decayed, [10 - 0.1 * 10.5], rtol=1e-6)


@pytest.mark.parametrize("name", ["adam", "adamw", "rmsprop", "sgd"])
def test_every_setting_may_be_traced_and_mapped_over(name):
    """A sweep over hyperparameters is one compilation and equals the single runs."""
    params, gradient = jnp.array([1.0, -2]), jnp.array([0.3, 5])

    def run(learning_rate, eps, weight_decay, max_grad_norm):
        opt = optim.optimizer(learning_rate, name=name, eps=eps, weight_decay=weight_decay, max_grad_norm=max_grad_norm)
        state = opt.init(params)
        updates, state = opt.update(gradient, state, params)
        updates, _ = opt.update(gradient, state, params)
        return updates

    settings = jnp.array([[1e-3, 1e-5, 0.0, 0.5], [1e-2, 1e-8, 0.1, 10]])
    swept = jax.jit(jax.vmap(run))(*settings.T)
    for setting, updates in zip(settings, swept, strict=True):
        np.testing.assert_allclose(updates, jax.jit(run)(*setting), rtol=1e-6)


def test_states_hold_arrays_only():
    state = optim.optimizer(optim.schedule("linear", 1.0), max_grad_norm=1.0).init({"w": jnp.zeros(2)})
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
