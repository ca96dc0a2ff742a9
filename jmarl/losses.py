"""Returns, advantages and losses on plain arrays: no networks, no keys.

Time comes first, any axes may follow, and each function returns one value per element: the caller masks and averages
with `masked_mean`. Arrays of one call must have equal shapes; nothing is broadcast in silence. Gradients are never
stopped here.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jmarl import metrics, parallel
from jmarl.types import Numeric

__all__ = [
    "approx_kl",
    "clipped_double_q",
    "clipped_surrogate",
    "counterfactual_advantage",
    "cw_weight",
    "deterministic_policy_loss",
    "explained_variance",
    "gae",
    "is_greedy",
    "lambda_returns",
    "masked_argmax",
    "masked_mean",
    "masked_normalize",
    "n_step_returns",
    "next_q",
    "ow_weight",
    "policy_gradient_loss",
    "pooled_mean",
    "retrace",
    "select",
    "smoothed_action",
    "soft_policy_loss",
    "soft_value",
    "team_reward",
    "temperature_loss",
    "value_loss",
    "vtrace",
]


# ------------------------------------------------------------------------------------------- returns and advantages


def _discounted_sum(x: Array, decay: Array) -> Array:
    """y_t = x_t + decay_t y_{t+1}, with zero after the end."""

    def step(y: Array, x_decay: tuple[Array, Array]) -> tuple[Array, Array]:
        y = x_decay[0] + x_decay[1] * y
        return y, y

    # Not unrolled, not an associative scan: at [128, 16, 3] on a CPU both compile slower and run no faster.
    return jax.lax.scan(step, jnp.zeros_like(x[0]), (x, decay.astype(x.dtype)), reverse=True)[1]


def gae(
    reward: Float[Array, "T *batch"],
    discount: Float[Array, "T *batch"],
    value: Float[Array, "T *batch"],
    next_value: Float[Array, "T *batch"],
    last: Bool[Array, "T *batch"],
    lambda_: Numeric = 0.95,
) -> Float[Array, "T *batch"]:
    """Generalised advantage estimates, A_t = δ_t + γλ A_{t+1} within an episode.

    Here δ_t = r_t + γ V(s_{t+1}) - V(s_t). With Q of the taken action as `value` and E_π Q(s_{t+1}, ·) as `next_value`,
    `value + gae(...)` is Harutyunyan's Q(λ) [2].

    Args:
      reward: r_{t+1}, received after acting in s_t.
      discount: γ where the episode may continue, 0 where it terminated.
      value: V(s_t).
      next_value: V of the true successor, before any automatic reset.
      last: the episode ends after this step, so no trace crosses it. A truncated step still bootstraps.
      lambda_: mixes one-step (0) and Monte Carlo (1) estimates.

    Returns:
      Advantages. Not normalised; gradients are not stopped.

    References:
      [1] Schulman et al., 2016, High-Dimensional Continuous Control Using GAE, eq. 16
      (https://arxiv.org/abs/1506.02438).
      [2] Harutyunyan et al., 2016, Q(λ) with Off-Policy Corrections, eq. 5 (https://arxiv.org/abs/1602.04951).

    >>> reward, zero = jnp.ones(3), jnp.zeros(3)
    >>> terminated = jnp.array([False, True, False])
    >>> gae(reward, 1.0 - terminated, zero, jnp.array([0.0, 0.0, 10.0]), terminated, lambda_=1.0)
    Array([ 2.,  1., 11.], dtype=float32)
    """
    chex.assert_equal_shape([reward, discount, value, next_value, last])
    td_error = reward + discount * next_value - value
    return _discounted_sum(td_error, discount * jnp.where(last, 0, lambda_))


def lambda_returns(
    reward: Float[Array, "T *batch"],
    discount: Float[Array, "T *batch"],
    next_value: Float[Array, "T *batch"],
    last: Bool[Array, "T *batch"],
    lambda_: Numeric = 0.95,
) -> Float[Array, "T *batch"]:
    """λ-returns, G_t = r_t + γ ((1 - λ) V(s_{t+1}) + λ G_{t+1}), and G_t = r_t + γ V(s_{t+1}) at an episode's end.

    The end of the arrays counts as a cut. With max Q(s_{t+1}, ·) as `next_value` this is Peng's Q(λ), with
    E_π Q(s_{t+1}, ·) it is TD(λ) on action values.

    Args:
      reward: r_{t+1}, received after acting in s_t.
      discount: γ where the episode may continue, 0 where it terminated.
      next_value: V of the true successor, before any automatic reset.
      last: the episode ends after this step, so no trace crosses it. A truncated step still bootstraps.
      lambda_: mixes one-step (0) and Monte Carlo (1) estimates.

    References:
      Sutton & Barto, 2018, Reinforcement Learning, eq. 12.20 (http://incompleteideas.net/book/the-book-2nd.html).

    >>> terminated = jnp.array([True, False, False])
    >>> lambda_returns(jnp.ones(3), 0.5 * ~terminated, jnp.array([4.0, 4.0, 8.0]), terminated, lambda_=0.5)
    Array([1.  , 3.25, 5.  ], dtype=float32)
    """
    chex.assert_equal_shape([reward, discount, next_value, last])
    trace = jnp.where(jnp.asarray(last).at[-1].set(True), 0, lambda_)
    return _discounted_sum(reward + discount * (1 - trace) * next_value, discount * trace)


def n_step_returns(
    reward: Float[Array, "T *batch"],
    discount: Float[Array, "T *batch"],
    next_value: Float[Array, "T *batch"],
    last: Bool[Array, "T *batch"],
    n: int,
) -> Float[Array, "T *batch"]:
    """n-step returns, G_t = r_t + γ r_{t+1} + ... + γⁿ V(s_{t+n}).

    Where the episode or the arrays end earlier, the return bootstraps from the furthest true successor there is.

    Args:
      reward: r_{t+1}, received after acting in s_t.
      discount: γ where the episode may continue, 0 where it terminated.
      next_value: V of the true successor, before any automatic reset.
      last: the episode ends after this step. A truncated step still bootstraps.
      n: number of rewards, static. From n = T on these are bootstrapped Monte Carlo returns.

    References:
      Sutton & Barto, 2018, Reinforcement Learning, eq. 7.1 (http://incompleteideas.net/book/the-book-2nd.html).

    >>> false = jnp.zeros(3, bool)
    >>> n_step_returns(jnp.ones(3), jnp.full(3, 0.5), jnp.array([4.0, 4.0, 8.0]), false, n=2)
    Array([2.5, 3.5, 5. ], dtype=float32)
    """
    chex.assert_equal_shape([reward, discount, next_value, last])
    if n < 1:
        raise ValueError(f"n={n} must be at least 1: one step is the shortest return.")
    cut = jnp.asarray(last).at[-1].set(True)

    def one_step_longer(_: Any, returns: Array) -> Array:
        return reward + discount * jnp.where(cut, next_value, jnp.roll(returns, -1, axis=0))

    return jax.lax.fori_loop(1, min(n, len(reward)), one_step_longer, reward + discount * next_value)


def vtrace(
    log_ratio: Float[Array, "T *batch"],
    reward: Float[Array, "T *batch"],
    discount: Float[Array, "T *batch"],
    value: Float[Array, "T *batch"],
    next_value: Float[Array, "T *batch"],
    last: Bool[Array, "T *batch"],
    lambda_: Numeric = 1.0,
    max_rho: Numeric = 1.0,
    max_c: Numeric = 1.0,
    *,
    weighted: bool = True,
) -> tuple[Float[Array, "T *batch"], Float[Array, "T *batch"]]:
    """V-trace: targets v_t of values and advantages of a policy π, from actions of another one, μ.

    With ρ_t = min(ρ̄, π/μ) and c_t = λ min(c̄, π/μ), within an episode:

        v_t = V(s_t) + δ_t + γ c_t (v_{t+1} - V(s_{t+1})),   δ_t = ρ_t (r_t + γ V(s_{t+1}) - V(s_t)),
        A_t = ρ_t (r_t + γ v_{t+1} - V(s_t)).

    Where π = μ and nothing is cut, v are λ-returns. At the end of an episode or of the arrays v_{t+1} is V(s_{t+1}).

    Args:
      log_ratio: log π(a_t) - log μ(a_t); 0 on policy.
      reward: r_{t+1}, received after acting in s_t.
      discount: γ where the episode may continue, 0 where it terminated.
      value: V(s_t).
      next_value: V of the true successor, before any automatic reset.
      last: the episode ends after this step, so no trace crosses it. A truncated step still bootstraps.
      lambda_: λ, 1 in the paper.
      max_rho: ρ̄, which decides the policy whose value is learnt: π where it is infinite.
      max_c: c̄, how far back corrections reach.
      weighted: False for A without its factor ρ_t, for surrogates that weigh advantages by π/μ themselves.

    Returns:
      v and A. For a policy gradient of A log π; gradients are not stopped.

    References:
      Espeholt et al., 2018, IMPALA, eq. 1 and sec. 4.2 (https://arxiv.org/abs/1802.01561).

    >>> false = jnp.zeros(2, bool)
    >>> log_ratio = jnp.log(jnp.array([0.5, 2.0]))
    >>> vtrace(log_ratio, jnp.ones(2), jnp.full(2, 0.5), jnp.zeros(2), jnp.array([0.0, 4.0]), false)
    (Array([1.25, 3.  ], dtype=float32), Array([1.25, 3.  ], dtype=float32))
    """
    chex.assert_equal_shape([log_ratio, reward, discount, value, next_value, last])
    # min(x, ratio) of logarithms: a ratio that overflows has a slope of inf, which meets a 0 in the minimum's gradient.
    rho, c = (jnp.exp(jnp.minimum(log_ratio, jnp.log(bound))) for bound in (max_rho, max_c))
    cut = jnp.asarray(last).at[-1].set(True)
    td_error = rho * (reward + discount * next_value - value)
    # Behind a step that is not cut comes s_{t+1} itself, so V(s_{t+1}) is the value of the next row.
    correction = _discounted_sum(td_error, discount * jnp.where(cut, 0, lambda_ * c))
    target = value + correction
    next_target = next_value + jnp.where(cut, 0, jnp.roll(correction, -1, axis=0))
    advantage = reward + discount * next_target - value
    return target, rho * advantage if weighted else advantage


def retrace(
    log_ratio: Float[Array, "T *batch"],
    reward: Float[Array, "T *batch"],
    discount: Float[Array, "T *batch"],
    q: Float[Array, "T *batch"],
    next_value: Float[Array, "T *batch"],
    last: Bool[Array, "T *batch"],
    lambda_: Numeric = 1.0,
) -> Float[Array, "T *batch"]:
    """Retrace(λ): targets of action values of a policy π, from actions of another one, μ.

    With c_t = λ min(1, π/μ), within an episode:

        G_t = Q(s_t, a_t) + δ_t + γ c_{t+1} (G_{t+1} - Q(s_{t+1}, a_{t+1})),
        δ_t = r_t + γ E_π Q(s_{t+1}, ·) - Q(s_t, a_t).

    Traces are cut where π would not have done what μ did, and nowhere else: safe for any two policies, and on policy
    as long as Harutyunyan's Q(λ).

    Args:
      log_ratio: log π(a_t) - log μ(a_t).
      reward: r_{t+1}, received after acting in s_t.
      discount: γ where the episode may continue, 0 where it terminated.
      q: Q(s_t, a_t) of the action taken.
      next_value: E_π Q(s_{t+1}, ·) of the true successor; max Q(s_{t+1}, ·) if π is greedy.
      last: the episode ends after this step, so no trace crosses it. A truncated step still bootstraps.
      lambda_: λ, 1 in the paper.

    Returns:
      Targets. Gradients are not stopped.

    References:
      Munos et al., 2016, Safe and Efficient Off-Policy Reinforcement Learning, eq. 3 and 4
      (https://arxiv.org/abs/1606.02647).

    >>> false = jnp.zeros(2, bool)
    >>> log_ratio = jnp.log(jnp.array([9.0, 0.5]))
    >>> retrace(log_ratio, jnp.ones(2), jnp.full(2, 0.5), jnp.zeros(2), jnp.array([0.0, 4.0]), false)
    Array([1.75, 3.  ], dtype=float32)
    """
    chex.assert_equal_shape([log_ratio, reward, discount, q, next_value, last])
    c = lambda_ * jnp.exp(jnp.minimum(log_ratio, 0.0))
    trace = jnp.where(jnp.asarray(last).at[-1].set(True), 0, jnp.roll(c, -1, axis=0))
    return q + _discounted_sum(reward + discount * next_value - q, discount * trace)


# ---------------------------------------------------------------------------------------------------- action values


def select(q: Float[Array, "*batch A"], action: Int[Array, "*batch"]) -> Float[Array, "*batch"]:
    """Q of one action each, q[.., action].

    >>> select(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([1, 0]))
    Array([2., 3.], dtype=float32)
    """
    chex.assert_equal_shape_prefix([q, action], action.ndim)
    return jnp.take_along_axis(q, action[..., None], axis=-1)[..., 0]


def masked_argmax(q: Float[Array, "*batch A"], action_mask: Bool[Array, "*batch A"]) -> Int[Array, "*batch"]:
    """The legal action of highest value; the first of equals.

    >>> masked_argmax(jnp.array([5.0, 1.0, 9.0]), jnp.array([True, True, False]))
    Array(0, dtype=int32)
    """
    chex.assert_equal_shape([q, action_mask])
    return jnp.argmax(jnp.where(action_mask, q, -jnp.inf), axis=-1).astype(jnp.int32)


def next_q(
    q: Float[Array, "*batch A"], target_q: Float[Array, "*batch A"], action_mask: Bool[Array, "*batch A"]
) -> Float[Array, "*batch"]:
    """Value of a successor, Q⁻(s', argmax_a Q(s', a)) over its legal actions.

    Args:
      q: what chooses the action: the online network's values for double Q-learning [1], `target_q` itself for
        Q-learning, max_a Q⁻(s', a).
      target_q: what values the choice.
      action_mask: actions that are legal in the *successor*.

    References:
      [1] van Hasselt et al., 2016, Deep Reinforcement Learning with Double Q-learning, eq. 4
      (https://arxiv.org/abs/1509.06461).

    >>> legal = jnp.ones(2, bool)
    >>> next_q(jnp.array([1.0, 3.0]), jnp.array([10.0, 2.0]), legal)
    Array(2., dtype=float32)
    """
    chex.assert_equal_shape([q, target_q, action_mask])
    return select(target_q, masked_argmax(q, action_mask))


def team_reward(reward: Float[Array, "*batch N"], kind: str) -> Float[Array, "*batch"]:
    """One reward for all: the "sum" of the agents' rewards, or their "mean".

    >>> team_reward(jnp.array([1.0, 1.0, 1.0]), "sum"), team_reward(jnp.array([1.0, 1.0, 1.0]), "mean")
    (Array(3., dtype=float32), Array(1., dtype=float32))
    """
    kinds: dict[str, Any] = {"sum": jnp.sum, "mean": jnp.mean}
    if kind not in kinds:
        raise ValueError(f"team_reward={kind!r} is unknown: choose 'sum' or 'mean'.")
    return kinds[kind](reward, axis=-1)


def is_greedy(
    action: Int[Array, "*batch N"], greedy_action: Int[Array, "*batch N"], agent_mask: Bool[Array, "*batch N"]
) -> Bool[Array, "*batch"]:
    """Whether a joint action is the greedy one. Inactive agents count as matching: what they do changes nothing.

    >>> is_greedy(jnp.array([0, 1]), jnp.array([0, 2]), jnp.array([True, False]))
    Array(True, dtype=bool)
    """
    chex.assert_equal_shape([action, greedy_action, agent_mask])
    return jnp.all((action == greedy_action) | ~agent_mask, axis=-1)


def cw_weight(
    is_greedy: Bool[Array, "*batch"],
    target: Float[Array, "*batch"],
    greedy_q: Float[Array, "*batch"],
    alpha: Numeric = 0.1,
) -> Float[Array, "*batch"]:
    """Central weighting: 1 where u = u* or y > Q̂*(s, u*), α elsewhere.

    Args:
      is_greedy: the joint action taken is the utilities' greedy one, u = u*.
      target: y.
      greedy_q: Q̂*(s, u*), the central value of the greedy joint action.
      alpha: α in (0, 1].

    References:
      Rashid et al., 2020, Weighted QMIX, "central weighting" (https://arxiv.org/abs/2006.10800).

    >>> cw_weight(jnp.array([True, False, False]), jnp.array([0.0, 2.0, 0.0]), jnp.ones(3))
    Array([1. , 1. , 0.1], dtype=float32)
    """
    chex.assert_equal_shape([is_greedy, target, greedy_q])
    return jnp.where(is_greedy | (target > greedy_q), 1.0, alpha).astype(target.dtype)


def ow_weight(q_tot: Float[Array, "*batch"], target: Float[Array, "*batch"], alpha: Numeric = 0.1):
    """Optimistic weighting: 1 where Q_tot underestimates, Q_tot < y, and α elsewhere.

    Args:
      q_tot: mixed value of the joint action taken.
      target: y.
      alpha: α in (0, 1].

    References:
      Rashid et al., 2020, Weighted QMIX, "optimistic weighting" (https://arxiv.org/abs/2006.10800).

    >>> ow_weight(jnp.array([2.0, 2.0]), jnp.array([3.0, 1.0]))
    Array([1. , 0.1], dtype=float32)
    """
    chex.assert_equal_shape([q_tot, target])
    return jnp.where(q_tot < target, 1.0, alpha).astype(target.dtype)


# ----------------------------------------------------------------------------------- actors that follow action values


def deterministic_policy_loss(q: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    """Deterministic policy gradient: -Q(s, μ(s)), whose gradient is -∇_a Q ∇_θ μ.

    Args:
      q: Q of the policy's own action; differentiate with respect to the actor only.

    References:
      Silver et al., 2014, Deterministic Policy Gradient Algorithms, eq. 9; Lillicrap et al., 2016, eq. 6
      (https://arxiv.org/abs/1509.02971).

    >>> jax.grad(lambda a: deterministic_policy_loss(a * 3.0))(5.0)
    Array(-3., dtype=float32, weak_type=True)
    """
    return -q


def smoothed_action(
    action: Float[Array, "*batch"],
    noise: Float[Array, "*batch"],
    scale: Numeric = 0.2,
    clip: Numeric = 0.5,
    low: Numeric = -1.0,
    high: Numeric = 1.0,
) -> Float[Array, "*batch"]:
    """A target policy's action with clipped noise, clip(a + clip(σ ε, -c, c), low, high).

    Args:
      action: μ⁻(s').
      noise: ε, standard normal numbers.
      scale: σ.
      clip: c.
      low, high: bounds of the action.

    References:
      Fujimoto et al., 2018, Addressing Function Approximation Error in Actor-Critic Methods, eq. 14
      (https://arxiv.org/abs/1802.09477).

    >>> smoothed_action(jnp.array([0.0, 0.9]), jnp.array([9.0, 1.0]))
    Array([0.5, 1. ], dtype=float32)
    """
    chex.assert_equal_shape([action, noise])
    return jnp.clip(action + jnp.clip(scale * noise, -clip, clip), low, high)


def clipped_double_q(q: Float[Array, "C *batch"]) -> Float[Array, "*batch"]:
    """The lowest of C critics' values: a bound on the overestimation of each.

    References:
      Fujimoto et al., 2018, eq. 10 (https://arxiv.org/abs/1802.09477).

    >>> clipped_double_q(jnp.array([[1.0, 5.0], [2.0, 3.0]]))
    Array([1., 3.], dtype=float32)
    """
    return jnp.min(q, axis=0)


def soft_value(
    q: Float[Array, "*batch"],
    log_prob: Float[Array, "*batch"],
    alpha: Float[Array, "*batch"] | Numeric,
    probs: Float[Array, "*batch"] | None = None,
) -> Float[Array, "..."]:
    """V(s) = E_π[Q(s, a) - α log π(a)]: of a sampled action, or with `probs` the expectation over all.

    Args:
      q: Q of the sampled action; with `probs` Q of every action, `[.., A]`.
      log_prob: log π of the same; finite also where π is zero.
      alpha: α, the temperature.
      probs: π of every action, exactly zero for illegal ones; None where the action was sampled.

    References:
      Haarnoja et al., 2018, Soft Actor-Critic Algorithms and Applications, eq. 3 (https://arxiv.org/abs/1812.05905).
      Christodoulou, 2019, Soft Actor-Critic for Discrete Action Settings, eq. 10 (https://arxiv.org/abs/1910.07207).

    >>> soft_value(jnp.array([10.0]), jnp.array([-1.0]), 0.2)
    Array([10.2], dtype=float32)
    >>> probs = jnp.array([0.25, 0.75])
    >>> soft_value(jnp.array([1.0, 2.0]), jnp.log(probs), 0.5, probs)
    Array(2.0311675, dtype=float32)
    """
    chex.assert_equal_shape([q, log_prob])
    if probs is None:
        return q - alpha * log_prob
    chex.assert_equal_shape([q, probs])
    # The log π of an illegal action is so low that α log π overflows: 0 * inf poisons the value and the gradient.
    log_prob = jnp.where(probs > 0, log_prob, 0.0)
    return jnp.sum(probs * (q - alpha * log_prob), axis=-1)


def soft_policy_loss(
    q: Float[Array, "*batch"],
    log_prob: Float[Array, "*batch"],
    alpha: Float[Array, "*batch"] | Numeric,
    probs: Float[Array, "*batch"] | None = None,
) -> Float[Array, "..."]:
    """α log π(a) - Q(s, a) of a reparametrised action, or its expectation with `probs`: minus the `soft_value`.

    Args:
      q, log_prob, alpha, probs: as for `soft_value`.

    References:
      Haarnoja et al., 2018, eq. 7 (https://arxiv.org/abs/1812.05905); Christodoulou, 2019, eq. 12
      (https://arxiv.org/abs/1910.07207).
    """
    return -soft_value(q, log_prob, alpha, probs)


def temperature_loss(
    log_alpha: Float[Array, "*batch"], log_prob: Float[Array, "*batch"], target_entropy: Numeric
) -> Float[Array, "*batch"]:
    """-log α (log π + H̄): the temperature rises while the entropy is below its target H̄.

    The gradient is taken with respect to log α, as most implementations do, not to α as in the paper.

    Args:
      log_alpha: log α, broadcast to the shape of `log_prob`.
      log_prob: log π(a) without gradient; for discrete actions minus the entropy.
      target_entropy: H̄; negative for continuous actions, usually minus their number of dimensions.

    References:
      Haarnoja et al., 2018, eq. 17 (https://arxiv.org/abs/1812.05905).

    >>> float(jax.grad(temperature_loss)(jnp.array(0.0), jnp.array(-1.0), -2.0))
    3.0
    """
    chex.assert_equal_shape([log_alpha, log_prob])
    return -log_alpha * (log_prob + target_entropy)


def counterfactual_advantage(
    q: Float[Array, "*batch A"], probs: Float[Array, "*batch A"], action: Int[Array, "*batch"]
) -> Float[Array, "*batch"]:
    """A = Q(s, u) - Σ_a π(a) Q(s, (u₋ᵢ, a)): what an agent's action was worth beside its others.

    Args:
      q: Q of each of the agent's actions, with the other agents' actions as they were.
      probs: π, exactly zero for illegal actions.
      action: u_i.

    References:
      Foerster et al., 2018, Counterfactual Multi-Agent Policy Gradients, eq. 4 (https://arxiv.org/abs/1705.08926).

    >>> counterfactual_advantage(jnp.array([1.0, 2.0]), jnp.array([0.25, 0.75]), jnp.array(0))
    Array(-0.75, dtype=float32)
    """
    chex.assert_equal_shape([q, probs])
    return select(q, action) - jnp.sum(probs * q, axis=-1)


def policy_gradient_loss(log_prob: Float[Array, "*batch"], advantage: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    """-A log π(a): REINFORCE with a baseline. The advantage should carry no gradient.

    Args:
      log_prob: log π(a) of the action taken.
      advantage: A.

    References:
      Williams, 1992, Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning.

    >>> policy_gradient_loss(jnp.array([1.0, 2.0, 3.0]), jnp.array([1.0, 0.0, -1.0]))
    Array([-1., -0.,  3.], dtype=float32)
    """
    chex.assert_equal_shape([log_prob, advantage])
    return -advantage * log_prob


# ----------------------------------------------------------------------------------------------------------- losses


def clipped_surrogate(
    log_prob: Float[Array, "*batch"],
    old_log_prob: Float[Array, "*batch"],
    advantage: Float[Array, "*batch"],
    clip_eps: Numeric = 0.2,
) -> Float[Array, "*batch"]:
    """PPO's policy loss, -min(ρ A, clip(ρ, 1 - ε, 1 + ε) A) with ρ = π(a) / π_old(a).

    Args:
      log_prob: log π(a) under the policy that is trained.
      old_log_prob: log π_old(a), recorded while acting.
      advantage: A of the action taken.
      clip_eps: ε, how far the ratio may move before its gradient stops.

    References:
      Schulman et al., 2017, Proximal Policy Optimization Algorithms, eq. 7 (https://arxiv.org/abs/1707.06347).

    >>> log_ratio = jnp.log(jnp.array([1.5, 1.5, 0.5, 0.5]))
    >>> clipped_surrogate(log_ratio, jnp.zeros(4), jnp.array([1.0, -1.0, 1.0, -1.0]), clip_eps=0.25)
    Array([-1.25,  1.5 , -0.5 ,  0.75], dtype=float32)
    """
    chex.assert_equal_shape([log_prob, old_log_prob, advantage])
    log_ratio = log_prob - old_log_prob
    # Where the ratio overflows its slope does too, and 0 * inf poisons the gradient of the clipped side.
    overflows = jnp.isinf(jnp.exp(log_ratio))
    ratio = jnp.where(overflows, jnp.finfo(log_ratio.dtype).max, jnp.exp(jnp.where(overflows, 0.0, log_ratio)))
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip_eps, 1 + clip_eps) * advantage)


def value_loss(
    value: Float[Array, "*batch"],
    target: Float[Array, "*batch"],
    *,
    old_value: Float[Array, "*batch"] | None = None,
    clip_eps: Numeric | None = None,
    huber_delta: Numeric | None = None,
) -> Float[Array, "*batch"]:
    """Regression loss l(V - R): e², *without* 1/2, or Huber's, 0.5 e² for |e| ≤ δ and δ (|e| - 0.5 δ) beyond.

    With `clip_eps` it is max(l(V - R), l(V_old + clip(V - V_old, -ε, ε) - R)): no reward for moving far in one go.

    Args:
      value: V(s_t), on the scale of `target`.
      target: R, for example a λ-return.
      old_value: V(s_t) recorded while acting, on the same scale. Read only with `clip_eps`.
      clip_eps: ε; None for no clipping.
      huber_delta: δ, where the loss turns linear; None for squared error.

    References:
      Yu et al., 2022, The Surprising Effectiveness of PPO in Cooperative Multi-Agent Games, app. A
      (https://arxiv.org/abs/2103.01955).

    >>> value_loss(jnp.array([3.0]), jnp.array([0.0]))
    Array([9.], dtype=float32)
    >>> value_loss(jnp.array([3.0]), jnp.array([0.0]), huber_delta=1.0)
    Array([2.5], dtype=float32)
    """
    chex.assert_equal_shape([value, target])

    def loss(error: Array) -> Array:
        if huber_delta is None:
            return error**2
        size = jnp.abs(error)
        return jnp.where(size <= huber_delta, 0.5 * error**2, huber_delta * (size - 0.5 * huber_delta))

    if clip_eps is None:
        return loss(value - target)
    if old_value is None:
        raise ValueError("clip_eps is given and old_value is None: pass the values recorded while acting.")
    chex.assert_equal_shape([value, old_value])
    clipped = old_value + jnp.clip(value - old_value, -clip_eps, clip_eps)
    return jnp.maximum(loss(value - target), loss(clipped - target))


# ------------------------------------------------------------------------------------------- masked statistics


def masked_mean(
    x: Float[Array, "*batch"], mask: Bool[Array, "*batch"], *, axis: int | tuple[int, ...] | None = None
) -> Float[Array, "..."]:
    """Mean of the active entries, Σ x m / max(Σ m, 1): zero, with zero gradients, where nothing is active.

    Masked entries may hold anything, inf and NaN included: their gradient is zero. Upstream that zero still meets the
    slope of whatever made them, and 0 · inf is NaN.

    Args:
      x: one value per element.
      mask: True where the element counts.
      axis: axes to average over; None for all.

    >>> masked_mean(jnp.array([2.0, 4.0, 9.0, jnp.nan]), jnp.array([True, True, False, False]))
    Array(3., dtype=float32)
    """
    chex.assert_equal_shape([x, mask])
    return jnp.where(mask, x, 0).sum(axis) / jnp.maximum(mask.sum(axis), 1)


def pooled_mean(
    x: Float[Array, "*batch"], mask: Bool[Array, "*batch"], *, axis: int | tuple[int, ...] | None = None
) -> Float[Array, "..."]:
    """`masked_mean` over all parts of a run together, see `jmarl.data_parallel`; where there are none, the same.

    >>> pooled_mean(jnp.array([2.0, 4.0, 9.0, jnp.nan]), jnp.array([True, True, False, False]))
    Array(3., dtype=float32)
    """
    chex.assert_equal_shape([x, mask])
    total, num = parallel.summed((jnp.where(mask, x, 0).sum(axis), mask.sum(axis)))
    return total / jnp.maximum(num, 1)


def masked_normalize(
    x: Float[Array, "*batch"],
    mask: Bool[Array, "*batch"],
    *,
    axis: int | tuple[int, ...] | None = None,
    eps: Numeric = 1e-8,
) -> Float[Array, "*batch"]:
    """(x - mean) / (std + ε), with mean and population standard deviation over the active entries.

    Masked entries are shifted and scaled like the others: mask the loss too.

    Args:
      x: advantages, for example.
      mask: True where the element counts.
      axis: axes to pool over; None for all. Over `(0, 1)` of `[T, B, N]` each agent is normalised on its own.
      eps: ε, added to the standard deviation.

    >>> masked_normalize(jnp.array([1.0, 3.0, 9.0]), jnp.array([True, True, False]))[:2]
    Array([-1.,  1.], dtype=float32)
    """
    chex.assert_equal_shape([x, mask])
    axes = tuple(range(x.ndim)) if axis is None else axis
    centred = x - jnp.expand_dims(pooled_mean(x, mask, axis=axes), axes)
    variance = jnp.expand_dims(pooled_mean(centred**2, mask, axis=axes), axes)
    # The square root has no gradient at zero, and constant inputs do occur.
    std = jnp.where(variance > 0, jnp.sqrt(jnp.where(variance > 0, variance, 1)), 0)
    return centred / (std + eps)


def approx_kl(log_prob: Float[Array, "*batch"], old_log_prob: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    """Estimate of KL(π_old ‖ π) from actions of π_old: ρ - 1 - log ρ. Unbiased and never negative.

    Args:
      log_prob: log π(a) under the policy that is trained.
      old_log_prob: log π_old(a), recorded while acting.

    References:
      Schulman, 2020, Approximating KL Divergence, k3 (http://joschu.net/blog/kl-approx.html).

    >>> approx_kl(jnp.log(jnp.array([0.5, 0.25])), jnp.log(jnp.array([0.5, 0.5])))
    Array([0.        , 0.19314718], dtype=float32)
    """
    chex.assert_equal_shape([log_prob, old_log_prob])
    log_ratio = log_prob - old_log_prob
    return jnp.expm1(log_ratio) - log_ratio


def explained_variance(
    value: Float[Array, "*batch"], target: Float[Array, "*batch"], mask: Bool[Array, "*batch"]
) -> Float[Array, ""]:
    """1 - Var(R - V) / Var(R) over the active entries: 1 is perfect, 0 no better than a constant.

    NaN where it has no meaning: constant targets, or nothing active.

    Args:
      value: V(s_t).
      target: R, for example a λ-return.
      mask: True where the element counts.

    >>> target = jnp.array([1.0, 2.0, 3.0])
    >>> explained_variance(target + 5.0, target, jnp.ones(3, bool))
    Array(1., dtype=float32)
    """
    chex.assert_equal_shape([value, target, mask])

    def variance(x: Array) -> Array:
        return masked_mean((x - masked_mean(x, mask)) ** 2, mask)

    spread = variance(target)
    ratio = variance(target - value) / jnp.where(spread > 0, spread, 1)
    return jnp.where(spread > 0, 1 - ratio, metrics.missing())
