"""Distributions against reference values: masked categorical, Gaussian, tanh-normal, Gumbel-softmax."""

import jax
import jax.numpy as jnp
import numpy as np
from reference_data import assert_close, load, matching

from jmarl.networks import heads

Z = load("distributions")


def arrays(*names):
    return [jnp.asarray(Z[name]) for name in names]


def test_masked_categorical(dtype, maybe_jit):
    logits, other, mask, action = arrays("in/logits", "in/logits_other", "in/avail", "in/action")

    def everything(logits, other, mask, action):
        dist = heads.categorical(logits, mask)
        return {
            "probs": dist.probs,
            "log_prob": dist.log_prob(action),
            "entropy": dist.entropy(),
            "mode": dist.mode(),
            "kl_self_other": dist.kl_divergence(heads.categorical(other, mask)),
        }

    actual = maybe_jit(everything)(logits, other, mask, action)
    assert_close(actual, {name: Z[f"out/cat/{name}"] for name in actual}, dtype)
    assert (np.asarray(actual["probs"])[~Z["in/avail"]] == 0).all()


def test_masked_categorical_gradients(dtype):
    logits, mask, action = arrays("in/logits", "in/avail", "in/action")
    log_prob = jax.jit(jax.grad(lambda x: heads.categorical(x, mask).log_prob(action).sum()))
    assert_close(log_prob(logits), Z["out/cat/dlogprob_dlogits"], dtype, "gradient")
    entropy = jax.jit(jax.grad(lambda x: heads.categorical(x, mask).entropy().sum()))
    assert_close(entropy(logits), Z["out/cat/dentropy_dlogits"], dtype, "gradient")


def test_epsilon_floor(dtype):
    logits, mask = arrays("in/logits", "in/avail")
    for (epsilon,), expected in matching(Z, r"out/cat/probs_eps(.*)"):
        probs = jax.jit(lambda x, e: heads.categorical(x, mask, epsilon=e).probs)(logits, float(epsilon))
        assert_close(probs, expected, dtype)


def test_gumbel_softmax(dtype):
    logits, gumbel, cotangent = arrays("in/logits", "in/gumbel", "in/cotangent")
    for (temperature, hard), expected in matching(Z, r"out/gumbel/tau=(.*),hard=(\d)/sample"):

        def sample(logits, temperature=float(temperature), straight_through=hard == "1"):
            return heads.gumbel_softmax(logits, gumbel, temperature, straight_through=straight_through)

        actual, vjp = jax.vjp(jax.jit(sample), logits)
        assert_close(actual, expected, dtype)
        assert_close(vjp(cotangent)[0], Z[f"out/gumbel/tau={temperature},hard={hard}/vjp"], dtype, "gradient")


def test_gaussian(dtype):
    mean, log_std, action = arrays("in/mean", "in/log_std", "out/gauss/sample")

    def everything(mean, log_std, action):
        dist = heads.gaussian(mean, log_std)
        return {"log_prob": dist.log_prob(action), "entropy": dist.entropy()}

    actual = jax.jit(everything)(mean, log_std, action)
    assert_close(actual, {name: Z[f"out/gauss/{name}"] for name in actual}, dtype)


def test_tanh_normal(dtype):
    """The gradients are those of a sample that moves with its mean and deviation; one row is saturated."""
    mean, log_std, noise = arrays("in/mean", "in/log_std", "in/eps")

    def sample_and_log_prob(mean, log_std):
        action, log_prob = heads.tanh_normal(mean, log_std).from_noise(noise)
        return log_prob.sum(), (action, log_prob)

    function = jax.jit(jax.value_and_grad(sample_and_log_prob, (0, 1), has_aux=True))
    (_, (action, log_prob)), gradients = function(mean, log_std)
    assert_close(action, Z["out/tanh/action"], dtype)
    assert_close(log_prob, Z["out/tanh/log_prob"], dtype)
    assert_close(gradients[0], Z["out/tanh/dlogprob_dmean"], dtype, "gradient")
    assert_close(gradients[1], Z["out/tanh/dlogprob_dlogstd"], dtype, "gradient")


def test_tanh_normal_inverts_its_own_actions(dtype):
    """Unless tanh saturates, an action alone gives the log-probability too, to fewer digits."""
    mean, log_std, action = arrays("in/mean", "in/log_std", "out/tanh/action")
    clear = np.abs(Z["out/tanh/action"]).max(-1) < 0.99
    log_prob = jax.jit(lambda *args: heads.tanh_normal(*args[:2]).log_prob(args[2]))(mean, log_std, action)
    log_prob = np.asarray(log_prob)
    np.testing.assert_allclose(
        log_prob[clear], Z["out/tanh/log_prob"][clear], rtol=1e-4 if dtype == "float32" else 1e-9, atol=1e-4
    )
