"""Distributions: exact samples, stable log-probabilities, and finite gradients where others give NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jmarl.networks import heads

MASK = np.array([[True, True, True], [True, False, True], [False, True, False]])


def finite(tree):
    return all(bool(np.isfinite(np.asarray(x, np.float64)).all()) for x in jax.tree.leaves(tree))


def chi_square(counts, probs):
    expected = counts.sum() * probs
    return np.sum((counts - expected)[probs > 0] ** 2 / expected[probs > 0])


# -------------------------------------------------------------------------------------------------------- categorical


def test_masked_softmax_matches_numpy(dtype, maybe_jit):
    logits = np.random.default_rng(0).normal(size=MASK.shape)
    odds = np.exp(logits) * MASK
    probs = odds / odds.sum(-1, keepdims=True)
    entropy = -sum(p * np.log(np.where(p > 0, p, 1)) for p in probs.T)
    action = np.array([2, 0, 1])

    def everything(logits, mask, action):
        dist = heads.categorical(logits, mask)
        return dist.probs, dist.entropy(), dist.log_prob(action), dist.mode()

    actual = maybe_jit(everything)(jnp.asarray(logits), jnp.asarray(MASK), jnp.asarray(action))
    desired = probs, entropy, np.log(probs[np.arange(3), action]), probs.argmax(-1)
    for x, y in zip(actual, desired, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5 if dtype == "float32" else 1e-12, atol=1e-7)
    assert actual[1].dtype == dtype
    assert (np.asarray(actual[0])[~MASK] == 0).all()


def statistics(logits, mask):
    """Everything a loss could ask for, with its gradient."""

    def total(logits):
        dist = heads.categorical(logits, mask)
        other = heads.categorical(logits[..., ::-1], mask)
        return jnp.sum(
            dist.entropy() + dist.log_prob(jnp.zeros(logits.shape[:-1], jnp.int32)) + dist.kl_divergence(other)
        )

    return heads.categorical(logits, mask).logits, *jax.value_and_grad(total)(logits)


@pytest.mark.parametrize("precision", ["float16", "bfloat16", "float32"])
def test_everything_stays_finite_even_when_no_action_is_legal(precision):
    logits = jnp.asarray(100 * np.random.default_rng(1).normal(size=(4, 3)), precision)
    mask = jnp.asarray(np.vstack([MASK, [[False] * 3]]))
    out = jax.jit(statistics)(logits, mask)
    assert finite(out)
    assert out[0].dtype == precision
    np.testing.assert_array_equal(np.asarray(out[-1], np.float32)[~np.asarray(mask)], 0)


@pytest.mark.parametrize("precision", ["float16", "float32"])
def test_no_legal_action_means_uniform(precision):
    def probs_and_sample(logits):
        dist = heads.categorical(logits, jnp.zeros(logits.shape, bool))
        return dist.probs, dist.sample(seed=jax.random.key(0))

    probs, action = jax.jit(probs_and_sample)(jnp.asarray([5.0, -5, 0], precision))
    np.testing.assert_allclose(probs, 1 / 3, rtol=2e-3)
    assert 0 <= action < 3


def test_an_added_illegal_action_changes_nothing(dtype):
    logits = jnp.asarray([0.3, -1.2])
    wide = jnp.asarray([0.3, 50, -1.2])
    mask = jnp.asarray([True, False, True])

    def entropy(logits, mask):
        return heads.categorical(logits, mask).entropy()

    narrow_out = jax.jit(jax.value_and_grad(entropy))(logits, None)
    wide_out = jax.jit(jax.value_and_grad(entropy))(wide, mask)
    np.testing.assert_allclose(narrow_out[0], wide_out[0], rtol=1e-6)
    np.testing.assert_allclose(np.asarray(wide_out[1])[[0, 2]], narrow_out[1], rtol=1e-5)
    assert wide_out[1][1] == 0


def test_one_legal_action_is_certain(dtype):
    def everything(logits):
        dist = heads.categorical(logits, jnp.asarray([True, False]))
        return dist.entropy(), dist.log_prob(jnp.asarray(0)), dist.mode()

    assert jax.jit(everything)(jnp.asarray([-30.0, 80.0])) == (0, 0, 0)


@pytest.mark.parametrize(
    ("logits", "mask"),
    [
        ([0.0, 1, 2, -1, 0.5], [True] * 5),
        ([0.0, 9, 2, -1, 9], [True, False, True, True, False]),
        ([9.0, 0, 9, 0.1, 9], [False, True, False, True, False]),
    ],
)
def test_samples_have_the_right_distribution(logits, mask):
    """Chi-square statistic below the 99.9% quantile, 18.5 for four degrees of freedom; a fixed key, so no flakes."""
    dist = jax.jit(heads.categorical)(jnp.asarray(logits), jnp.asarray(mask))
    many = heads.Categorical(logits=jnp.asarray(np.broadcast_to(dist.logits, (200_000, 5))))
    action = jax.jit(lambda dist, key: dist.sample(seed=key))(many, jax.random.key(0))
    counts = np.bincount(action, minlength=5)
    assert counts[~np.asarray(mask)].sum() == 0
    assert chi_square(counts, np.asarray(dist.probs, np.float64)) < 18.5


@pytest.mark.parametrize("num_actions", [5, 33, 300])
def test_extreme_uniforms_never_pick_an_illegal_action(num_actions, monkeypatch):
    """u = 0 and the largest u below 1, with illegal actions first, last and between; sums round in every way."""
    below_one = np.nextafter(np.float32(1), np.float32(0))
    extremes = jnp.asarray(np.resize([0, below_one], (500, 1)), jnp.float32)
    monkeypatch.setattr(jax.random, "uniform", lambda key, shape: extremes)
    rng = np.random.default_rng(num_actions)
    logits, mask = 5 * rng.normal(size=(500, num_actions)), rng.random((500, num_actions)) < 0.5
    mask[np.arange(500), rng.integers(num_actions, size=500)] = True
    sample = jax.jit(lambda logits, mask: heads.categorical(logits, mask).sample(seed=jax.random.key(0)))
    action = np.asarray(sample(jnp.asarray(logits), jnp.asarray(mask)))
    assert action.min() >= 0
    assert action.max() < num_actions
    assert mask[np.arange(500), action].all()


def test_samples_do_not_depend_on_precision():
    logits = np.random.default_rng(2).normal(size=(1000, 6))
    sample = jax.jit(lambda x: heads.categorical(x).sample(seed=jax.random.key(3)))
    half, single = (np.asarray(sample(jnp.asarray(logits, dtype))) for dtype in ("float16", "float32"))
    assert single.dtype == np.int32
    assert np.mean(half != single) < 0.01  # different probabilities, the same uniform numbers


def test_sample_and_log_prob_agree_under_vmap():
    logits = jnp.asarray(np.random.default_rng(3).normal(size=(4, 3)), jnp.float32)
    keys = jax.random.split(jax.random.key(0), 4)

    def draw(logits, key):
        return heads.categorical(logits).sample_and_log_prob(seed=key)

    action, log_prob = jax.jit(jax.vmap(draw))(logits, keys)
    np.testing.assert_array_equal(log_prob, jax.jit(lambda x, a: heads.categorical(x).log_prob(a))(logits, action))
    assert jax.jit(draw)(logits[0], keys[0])[0] == action[0]


def test_successive_keys_give_different_actions():
    sample = jax.jit(lambda key: heads.categorical(jnp.zeros((64, 4))).sample(seed=key))
    assert (np.asarray(sample(jax.random.key(0))) != np.asarray(sample(jax.random.key(1)))).any()


def test_epsilon_floor_limits(dtype):
    logits, mask = jnp.asarray([[1.0, -200, 3]]), jnp.asarray([[True, True, False]])
    floor = jax.jit(lambda epsilon: heads.categorical(logits, mask, epsilon=epsilon).probs)
    np.testing.assert_allclose(floor(0.0), heads.categorical(logits, mask).probs, atol=1e-6)
    np.testing.assert_allclose(floor(1.0), [[0.5, 0.5, 0]], atol=1e-6)
    np.testing.assert_allclose(floor(0.5), [[0.75, 0.25, 0]], atol=1e-6)


def test_epsilon_floor_is_finite_everywhere():
    mask = jnp.asarray([[True, False], [False, False]])

    def total(logits, epsilon):
        dist = heads.categorical(logits, mask, epsilon=epsilon)
        return jnp.sum(dist.entropy() + dist.log_prob(jnp.zeros(2, jnp.int32)))

    gradient = jax.jit(jax.value_and_grad(total))
    for epsilon in (0.0, 0.5, 1.0):
        assert finite(gradient(jnp.asarray([[1.0, 900], [-900, 2]]), epsilon))


def test_kl_is_zero_only_between_equals(dtype):
    kl = jax.jit(lambda x, y: heads.categorical(x).kl_divergence(heads.categorical(y)))
    one, other = np.array([1.0, 2, 3]), np.array([3.0, 2, 1])
    p, q = np.exp(one) / np.exp(one).sum(), np.exp(other) / np.exp(other).sum()
    np.testing.assert_allclose(kl(jnp.asarray(one), jnp.asarray(other)), np.sum(p * np.log(p / q)), rtol=1e-5)
    assert kl(jnp.asarray(one), jnp.asarray(one)) == 0


def test_gumbel_softmax_picks_the_noisy_maximum():
    logits, gumbel = jnp.asarray([0.0, 1, 0.5]), jnp.asarray([2.0, 0, 0])
    np.testing.assert_array_equal(heads.gumbel_softmax(logits, gumbel, 0.5, straight_through=True), [1, 0, 0])
    np.testing.assert_allclose(heads.gumbel_softmax(logits, gumbel, 1e-3), [1, 0, 0], atol=1e-6)


@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_gumbel_softmax_gives_illegal_actions_nothing(temperature):
    @jax.jit
    def sample_and_gradient(logits):
        def sample(logits):
            legal = heads.categorical(logits, jnp.asarray([True, True, False])).logits
            return heads.gumbel_softmax(legal, jnp.asarray([0.0, 0, 15]), temperature)

        return sample(logits), jax.jacobian(sample)(logits)

    sample, gradient = sample_and_gradient(jnp.asarray([0.0, 1, 9]))
    assert finite(gradient)
    assert sample[2] == 0
    np.testing.assert_allclose(sample.sum(), 1, rtol=1e-6)


# ----------------------------------------------------------------------------------------------------------- gaussian


def test_gaussian_has_one_scalar_per_agent(dtype):
    mean, log_std, action = np.random.default_rng(4).normal(size=(3, 5, 4, 2))
    z = (action - mean) / np.exp(log_std)
    log_prob = np.sum(-0.5 * z**2 - log_std - 0.5 * np.log(2 * np.pi), axis=-1)
    dist = heads.gaussian(jnp.asarray(mean), jnp.asarray(log_std))
    tolerance = 1e-5 if dtype == "float32" else 1e-12
    np.testing.assert_allclose(dist.log_prob(jnp.asarray(action)), log_prob, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(
        dist.entropy(), np.sum(log_std + 0.5 * np.log(2 * np.pi * np.e), axis=-1), rtol=tolerance, atol=tolerance
    )
    np.testing.assert_array_equal(dist.mode(), jnp.asarray(mean))


def test_gaussian_takes_a_log_std_without_batch_axes():
    def everything(key):
        dist = heads.gaussian(jnp.zeros((5, 3, 2)), jnp.asarray([0.0, 1.0]))
        action, log_prob = dist.sample_and_log_prob(seed=key)
        return action, log_prob, dist.log_prob(action), dist.entropy()

    action, log_prob, again, entropy = jax.jit(everything)(jax.random.key(0))
    assert action.shape == (5, 3, 2)
    assert entropy.shape == (5, 3)
    np.testing.assert_allclose(log_prob, again, rtol=1e-5)


# -------------------------------------------------------------------------------------------------------- tanh-normal


def test_tanh_normal_known_values(dtype):

    @jax.jit
    def log_probs(z):
        dist = heads.tanh_normal(jnp.zeros_like(z), jnp.zeros_like(z))
        return dist.log_prob_of_z(z), dist.log_prob(dist.squash(z))

    np.testing.assert_allclose(log_probs(jnp.zeros(1)), -0.9189385, rtol=1e-6)
    np.testing.assert_allclose(log_probs(jnp.asarray([0.5, -1])), -1.3550864, rtol=1e-5)


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (0.0, 1.0), (-2.0, 6.0)])
def test_tanh_normal_density_integrates_to_one(low, high):
    action = np.linspace(low, high, 20_001)[1:-1, None]
    dist = heads.tanh_normal(*(jnp.asarray([x]) for x in (0.3, -0.7, low, high)))
    density = np.exp(jax.jit(jax.vmap(dist.log_prob))(jnp.asarray(action, jnp.float32)))
    np.testing.assert_allclose(np.sum(density) * (high - low) / 20_000, 1, rtol=1e-3)


@pytest.mark.parametrize("edge", ["low", "high"])
def test_tanh_normal_is_finite_at_its_bounds(edge, dtype):
    low, high = jnp.asarray([-1.0, 0.0]), jnp.asarray([1.0, 1.0])
    action = low if edge == "low" else high

    def log_prob(mean, log_std, action):
        return heads.tanh_normal(mean, log_std, low, high).log_prob(action)

    assert finite(jax.jit(jax.value_and_grad(log_prob, (0, 1, 2)))(jnp.zeros(2), jnp.zeros(2), action))


@jax.jit
def draw_tanh_normal(mean, log_std, low, high):
    dist = heads.tanh_normal(mean, log_std, low, high)
    noise = jax.random.normal(jax.random.key(0), mean.shape, mean.dtype)
    return *dist.sample_and_log_prob(seed=jax.random.key(0)), mean + jnp.exp(log_std) * noise


@given(arrays(np.float32, 3, elements=st.floats(-50, 50, width=32)), st.floats(-5, 2))
def test_tanh_normal_samples_stay_inside_with_exact_log_probs(mean, log_std):
    low, high = np.float32([0.0, -1, 0.1]), np.float32([1.0, 1, 0.7])
    action, log_prob, z = draw_tanh_normal(*map(jnp.asarray, (mean, np.full(3, log_std, np.float32), low, high)))
    assert (low <= action).all()
    assert (action <= high).all()
    z = np.asarray(z, np.float64)
    std = np.exp(np.float64(np.float32(log_std)))
    log_slope = np.log(4.0) - 2 * np.abs(z) - 2 * np.log1p(np.exp(-2 * np.abs(z))) + np.log((high - low) / 2.0)
    desired = np.sum(-0.5 * ((z - mean) / std) ** 2 - np.log(std * np.sqrt(2 * np.pi)) - log_slope)
    np.testing.assert_allclose(log_prob, desired, rtol=1e-4, atol=2e-2)


def test_tanh_normal_mode_is_the_squashed_mean(dtype):
    mean = jnp.asarray([0.5, -2.0])
    dist = heads.tanh_normal(mean, jnp.zeros(2), jnp.asarray([-1.0, 0]), jnp.asarray([1.0, 4]))
    np.testing.assert_allclose(dist.mode(), [np.tanh(0.5), 2 + 2 * np.tanh(-2.0)], rtol=1e-6)


def test_tanh_normal_entropy_is_the_integral():
    """Quadrature, and the average of 20 000 samples' -log π (standard error 0.006), against -∫ p log p."""
    num = 20_000
    action = jnp.asarray((np.arange(num)[:, None] + 0.5) / num, jnp.float32)

    @jax.jit
    def log_density_and_estimates(action):
        dist = heads.tanh_normal(jnp.full((num, 1), 0.4), jnp.full(1, -0.5), 0.0, 1.0)
        return dist.log_prob(action), dist.entropy(), -dist.sample_and_log_prob(seed=jax.random.key(1))[1]

    log_density, quadrature, estimates = (np.asarray(x, np.float64) for x in log_density_and_estimates(action))
    assert quadrature.shape == estimates.shape == (num,)
    entropy = -np.sum(np.exp(log_density) * log_density) / num
    np.testing.assert_allclose(quadrature, entropy, atol=1e-4)
    np.testing.assert_allclose(estimates.mean(), entropy, atol=0.02)


@pytest.mark.parametrize(("log_std", "error"), [(-5.0, 1e-4), (0.0, 3e-4), (2.0, 0.15)])
def test_tanh_normal_quadrature_of_several_dimensions(log_std, error):
    """Against a fine sum over each dimension's z, from spreads where tanh is linear to where it saturates."""
    mean = np.array([0.0, -1.5, 4.0])
    low, high = np.array([-1.0, 0, 2]), np.array([1.0, 1, 7])
    z = mean + np.exp(log_std) * np.linspace(-8, 8, 100_001)[:, None]
    weight = np.exp(-0.5 * np.linspace(-8, 8, 100_001) ** 2)
    log_slope = np.log(4) - 2 * np.abs(z) - 2 * np.log1p(np.exp(-2 * np.abs(z))) + np.log((high - low) / 2)
    entropy = np.sum(log_std + 0.5 * np.log(2 * np.pi * np.e) + np.average(log_slope, axis=0, weights=weight))
    args = (jnp.asarray(x, jnp.float32) for x in (mean, log_std, low, high))
    np.testing.assert_allclose(jax.jit(lambda *args: heads.tanh_normal(*args).entropy())(*args), entropy, atol=error)


def test_tanh_normal_reparametrised_gradient_of_entropy():
    """More spread is more entropy while tanh is still linear."""

    def entropy(log_std):
        return heads.tanh_normal(jnp.zeros((100, 1)), log_std).entropy().mean()

    np.testing.assert_allclose(jax.jit(jax.grad(entropy))(jnp.full(1, -5.0)), 1, atol=0.01)


def test_tanh_normal_maps_over_its_leaves():
    dist = heads.tanh_normal(jnp.zeros((4, 3, 2)), jnp.zeros(2), np.zeros(2), 1.0)
    keys = jax.random.split(jax.random.key(0), 4)
    action, log_prob = jax.jit(jax.vmap(lambda d, key: d.sample_and_log_prob(seed=key)))(dist, keys)
    assert action.shape == (4, 3, 2)
    assert log_prob.shape == (4, 3)


# ------------------------------------------------------------------------------------------- one meaning for each name


HEADS = {
    "categorical": (lambda x: heads.categorical(x), jax.random.gumbel),
    "gaussian": (lambda x: heads.gaussian(x, -0.5 + 0.1 * x), jax.random.normal),
    "tanh_normal": (lambda x: heads.tanh_normal(x, -0.5 + 0.1 * x, -2.0, 1.0), jax.random.normal),
}


@pytest.mark.parametrize("name", HEADS)
def test_every_distribution_means_the_same_by_its_names(name, dtype):
    """20 000 draws from keys and from noise have the frequencies of log_prob, and entropy is their mean -log π."""
    head, draw = HEADS[name]
    x = jnp.asarray([0.3, -0.4])

    @jax.jit
    def everything(key, noise):
        dist = head(jnp.broadcast_to(x, (20_000, 2)))
        sampled, log_prob = dist.sample_and_log_prob(seed=key)
        made, made_log_prob = dist.from_noise(noise)
        again = dist.log_prob(sampled), dist.log_prob(made)
        return dist.sample(seed=key), sampled, log_prob, made, made_log_prob, *again, dist.entropy(), dist.mode()

    noise = draw(jax.random.key(1), (20_000, 2))
    same, sampled, log_prob, made, made_log_prob, *again, entropy, mode = everything(jax.random.key(0), noise)
    np.testing.assert_array_equal(same, sampled)
    for ours, given_action in zip((log_prob, made_log_prob), again, strict=True):
        np.testing.assert_allclose(ours, given_action, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(-np.mean(ours), entropy[0], atol=0.03)
    np.testing.assert_allclose(np.mean(sampled, axis=0), np.mean(made, axis=0), atol=0.03)
    greedy = {"categorical": 0, "gaussian": x, "tanh_normal": -0.5 + 1.5 * np.tanh(x)}[name]
    np.testing.assert_allclose(mode[0], greedy, rtol=1e-5)
    assert sampled.dtype == made.dtype == mode.dtype and log_prob.shape == entropy.shape == (20_000,)


@pytest.mark.parametrize("name", ["gaussian", "tanh_normal"])
def test_what_noise_makes_moves_with_mean_and_deviation(name, dtype):
    """d action / d mean and d log std by hand, and log π of the action follows both."""
    make = {"gaussian": heads.gaussian, "tanh_normal": heads.tanh_normal}[name]
    mean, log_std, noise = (jnp.asarray([x]) for x in (0.4, -1.0, 0.7))
    by_mean, by_log_std = jax.jit(jax.jacobian(lambda m, s: make(m, s).from_noise(noise)[0], (0, 1)))(mean, log_std)
    z = 0.4 + np.exp(-1.0) * 0.7
    slope = 1 - np.tanh(z) ** 2 if name == "tanh_normal" else 1.0
    np.testing.assert_allclose([by_mean[0, 0], by_log_std[0, 0]], [slope, slope * np.exp(-1.0) * 0.7], rtol=1e-5)
    slopes = jax.grad(lambda m, s: make(m, s).from_noise(noise)[1], (0, 1))(mean, log_std)
    squashed = [2 * np.tanh(z), -1 + 2 * np.tanh(z) * np.exp(-1.0) * 0.7]  # log π = .. - log σ - log(1 - tanh² z)
    np.testing.assert_allclose(np.ravel(slopes), squashed if name == "tanh_normal" else [0.0, -1.0], rtol=1e-5)
