"""Returns, advantages, MAPPO's losses and running statistics against reference values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_data import assert_close, load, matching

from jmarl import losses, normalize

Z, MAPPO = load("returns"), load("mappo")

gae, lambda_returns = jax.jit(losses.gae), jax.jit(losses.lambda_returns)
n_step_returns = jax.jit(losses.n_step_returns, static_argnames="n")
value_loss, masked_mean = jax.jit(losses.value_loss), jax.jit(losses.masked_mean)
masked_normalize = jax.jit(losses.masked_normalize)
update, normalize_by, denormalize_by = map(jax.jit, (normalize.update, normalize.normalize, normalize.denormalize))


def time_first(*arrays):
    """The files have [B, T]."""
    return [jnp.asarray(np.swapaxes(x, 0, 1)) for x in arrays]


def continuing():
    """Rewards, discount, value, next value and `last` of a stream of episodes, some cut by a time limit."""
    discount = Z["cfg/gamma"] * ~Z["in/terminated"]
    last = Z["in/terminated"] | Z["in/truncated"]
    return time_first(Z["in/rewards"], discount, Z["in/values"], Z["in/next_values"], last)


def padded(value, next_value):
    """The same of one episode per row, with padding behind it: the last filled step ends the episode."""
    terminated, filled = Z["pad/terminated"], Z["pad/filled"]
    discount = Z["cfg/gamma"] * (filled & ~terminated)
    is_last = filled & ~np.pad(filled[:, 1:], ((0, 0), (0, 1)))
    return time_first(Z["pad/rewards"], discount, value * filled, next_value, is_last | terminated)


def assert_filled_close(actual, desired, dtype):
    assert_close(np.asarray(actual).T * Z["pad/filled"].astype(dtype), desired * Z["pad/filled"], dtype)


def test_gae(dtype):
    reward, discount, value, next_value, last = continuing()
    for (lambda_,), expected in matching(Z, r"out/lam=(.*)/gae_advantages"):
        advantage = gae(reward, discount, value, next_value, last, float(lambda_))
        assert_close(np.asarray(advantage).T, expected, dtype)
        assert_close(np.asarray(advantage + value).T, Z[f"out/lam={lambda_}/gae_returns"], dtype)


def test_lambda_returns(dtype):
    reward, discount, _, next_value, last = continuing()
    for (lambda_,), expected in matching(Z, r"out/lam=(.*)/lambda_returns"):
        assert_close(lambda_returns(reward, discount, next_value, last, float(lambda_)).T, expected, dtype)
    assert_close(lambda_returns(reward, discount, next_value, last, 1.0).T, Z["out/monte_carlo_bootstrapped"], dtype)


def test_n_step_returns(dtype):
    reward, discount, _, next_value, last = continuing()
    for (n,), expected in matching(Z, r"out/nstep_(\d+)"):
        assert_close(n_step_returns(reward, discount, next_value, last, n=int(n)).T, expected, dtype)
    monte_carlo = n_step_returns(reward, discount, next_value, last, n=len(reward))
    assert_close(monte_carlo.T, Z["out/monte_carlo_bootstrapped"], dtype)


@pytest.mark.parametrize("name", ["td_lambda", "peng_q_lambda"])
def test_td_lambda_is_a_lambda_return_of_expected_q(name, dtype):
    reward, discount, _, next_q, last = padded(Z["pad/q_exp"][:, :-1], Z["pad/q_exp"][:, 1:])
    actual = lambda_returns(reward, discount, next_q, last, float(Z["cfg/lam"]))
    assert_filled_close(actual, Z[f"out/pad/{name}"], dtype)


def test_harutyunyans_q_lambda_is_gae_with_expected_successors(dtype):
    args = padded(Z["pad/q_taken"][:, :-1], Z["pad/q_exp"][:, 1:])
    actual = args[2] + gae(*args, float(Z["cfg/lam"]))
    assert_filled_close(actual, Z["out/pad/harutyunyan_q_lambda"], dtype)


def test_returns_of_padded_episodes(dtype):
    args = padded(Z["pad/q_taken"][:, :-1], Z["pad/q_taken"][:, 1:])
    reward, discount, _, next_value, last = args
    lambda_ = float(Z["cfg/lam"])
    assert_filled_close(gae(*args, lambda_), Z["out/pad/gae_advantages"], dtype)
    returns = lambda_returns(reward, discount, next_value, last, lambda_)
    assert_filled_close(returns, Z["out/pad/value_lambda_returns"], dtype)
    for (n,), expected in matching(Z, r"out/pad/nstep_(\d+)"):
        assert_filled_close(n_step_returns(reward, discount, next_value, last, n=int(n)), expected, dtype)


def test_no_trace_crosses_from_one_episode_into_the_next(dtype):
    done = Z["pad/two_episode_done"]
    next_value = np.pad(Z["pad/values"][:, 1:], ((0, 0), (0, 1)))
    args = time_first(Z["pad/rewards"], Z["cfg/gamma"] * ~done, next_value, done)
    actual = lambda_returns(*args, float(Z["cfg/lam"]))
    assert_close(actual.T, Z["out/pad/two_episode_lambda_returns"], dtype)


# ------------------------------------------------------------------------------------------------------ MAPPO's losses


def mappo(*names):
    return [jnp.asarray(MAPPO[name]) for name in names]


POLICY = next(groups[0] for groups, _ in matching(MAPPO, r"out/([^/]*)/ratio"))


def test_policy_loss_and_its_diagnostics(dtype):
    mask, old_log_prob, advantage = mappo("in/agent_mask", "in/old_log_probs", "in/advantages")
    (log_prob,) = mappo(f"out/{POLICY}/log_prob")
    clip_eps = float(MAPPO["cfg/clip"])

    @jax.jit
    def policy_loss(advantage):
        return losses.masked_mean(losses.clipped_surrogate(log_prob, old_log_prob, advantage, clip_eps), mask)

    @jax.jit
    def kl():
        return losses.masked_mean(losses.approx_kl(log_prob, old_log_prob), mask)

    assert_close(policy_loss(advantage), MAPPO[f"out/{POLICY}/actor_loss"], dtype)
    assert_close(policy_loss(masked_normalize(advantage, mask)), MAPPO["out/adv_norm/actor_loss"], dtype)
    assert_close(kl(), MAPPO[f"out/{POLICY}/approx_kl_k3"], dtype)


def test_value_losses(dtype):
    mask, target, old_value = mappo("in/agent_mask", "in/returns", "in/old_values")
    (value,) = mappo(f"out/{POLICY}/value")
    for (clip, huber), expected in matching(MAPPO, r"out/value_clip=(\d),huber=(\d)/critic_loss"):
        settings = {
            "clip_eps": float(MAPPO["cfg/value_clip"]) if clip == "1" else None,
            "huber_delta": float(MAPPO["cfg/huber_delta"]) if huber == "1" else None,
        }
        loss = value_loss(value, target, old_value=old_value, **settings)
        assert_close(masked_mean(loss, mask), expected, dtype)


def test_advantage_normalisation(dtype):
    advantage, mask = mappo("in/advantages", "in/agent_mask")
    for (eps,), expected in matching(MAPPO, r"out/adv_norm/ddof0_eps(.*)"):
        assert_close(masked_normalize(advantage, mask, eps=float(eps)), expected, dtype)
    for (eps,), expected in matching(MAPPO, r"out/adv_norm/unmasked_ddof0_eps(.*)"):
        actual = masked_normalize(advantage, jnp.ones_like(mask), eps=float(eps))
        assert_close(actual, expected, dtype)


def test_value_normalisation(dtype):
    stats = normalize.init()
    for i, x in enumerate(jnp.asarray(MAPPO["in/value_norm_x"])):
        stats = update(stats, x, jnp.ones(x.shape, bool), float(MAPPO["cfg/value_norm_beta"]))
        assert_close(normalize_by(stats, x), MAPPO[f"out/value_norm/step{i}/normalized"], dtype)
        zero_one = denormalize_by(stats, jnp.array([0.0, 1.0]))
        mean, var = (MAPPO[f"out/value_norm/step{i}/{name}"] for name in ("mean", "var"))
        assert_close(zero_one, np.array([mean, mean + np.sqrt(var)]), dtype)
