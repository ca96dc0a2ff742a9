"""From network outputs to distributions over actions, see `Distribution`.

A distribution is a pytree of arrays, made and used inside a trace. The last axis belongs to one action:
log-probabilities and entropies have one scalar per agent.
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jmarl.types import Numeric

__all__ = [
    "Categorical",
    "Distribution",
    "Gaussian",
    "TanhNormal",
    "categorical",
    "gaussian",
    "gumbel_softmax",
    "kl_divergence",
    "tanh_normal",
]

_QUADRATURE_NODES = 32


class Distribution(Protocol):
    """What learners ask of a distribution over actions: every head has these, with these meanings."""

    def sample(self, *, seed: PRNGKeyArray) -> Any:
        """An action."""

    def log_prob(self, action: Any) -> Any:
        """log π(a)."""

    def sample_and_log_prob(self, *, seed: PRNGKeyArray) -> tuple[Any, Any]:
        """An action and its log-probability."""

    def from_noise(self, noise: Any) -> tuple[Any, Any]:
        """The action that noise `[.., A]` makes, and its log-probability; differentiable if actions are continuous.

        The noise is standard normal for continuous actions, Gumbel's for discrete ones.
        """

    def entropy(self) -> Any:
        """-E[log π(a)]."""

    def mode(self) -> Any:
        """The greedy action."""


# ---------------------------------------------------------------------------------------------------- discrete


@struct.dataclass(kw_only=True)
class Categorical:
    """A distribution over `A` actions. Make it with `categorical`.

    Our own, because rollouts on a CPU spend much of their time sampling: it takes one uniform number per row and a
    cumulative sum, instead of `A` Gumbel numbers.

    Attributes:
      logits: normalised log-probabilities, finite also where the probability is zero.
    """

    logits: Float[Array, "*batch A"]

    @property
    def probs(self) -> Float[Array, "*batch A"]:
        """Probabilities, exactly zero for illegal actions."""
        return jnp.exp(self.logits)

    def sample(self, *, seed: PRNGKeyArray) -> Int[Array, "*batch"]:
        """An action, by inverting the cumulative distribution; never one of probability zero."""
        # Always in float32, so that actions do not depend on the precision of the network.
        probs = self.probs.astype(jnp.float32)
        cumulative = jnp.cumsum(probs, axis=-1)
        # Relative to the largest sum a possible action attains: whatever the rounding, that action is a hit, and no
        # impossible action is.
        top = jnp.max(jnp.where(probs > 0, cumulative, 0), axis=-1, keepdims=True)
        hit = (cumulative > top * jax.random.uniform(seed, top.shape)) & (probs > 0)
        index = jnp.arange(probs.shape[-1], dtype=jnp.int32)
        return jnp.min(jnp.where(hit, index, index[-1]), axis=-1)

    def log_prob(self, action: Int[Array, "*batch"]) -> Float[Array, "*batch"]:
        """log π(a)."""
        return jnp.take_along_axis(self.logits, action[..., None], axis=-1)[..., 0]

    def sample_and_log_prob(self, *, seed: PRNGKeyArray) -> tuple[Int[Array, "*batch"], Float[Array, "*batch"]]:
        """An action and its log-probability."""
        action = self.sample(seed=seed)
        return action, self.log_prob(action)

    def from_noise(self, noise: Float[Array, "*batch A"]) -> tuple[Int[Array, "*batch"], Float[Array, "*batch"]]:
        """The action of largest logit with Gumbel's noise added, and its log-probability."""
        action = jnp.argmax(self.logits + noise, axis=-1).astype(jnp.int32)
        return action, self.log_prob(action)

    def entropy(self) -> Float[Array, "*batch"]:
        """-Σ p log p, where 0 log 0 is 0."""
        return -jnp.sum(self.probs * self.logits, axis=-1)

    def mode(self) -> Int[Array, "*batch"]:
        """The most probable action, the first of equals."""
        return jnp.argmax(self.logits, axis=-1).astype(jnp.int32)

    def kl_divergence(self, other: "Categorical") -> Float[Array, "*batch"]:
        """KL(self ‖ other) = Σ p (log p - log q)."""
        return jnp.sum(self.probs * (self.logits - other.logits), axis=-1)


def categorical(
    logits: Float[Array, "*batch A"],
    action_mask: Bool[Array, "*batch A"] | None = None,
    *,
    epsilon: Numeric | None = None,
) -> Categorical:
    """Softmax over the legal actions.

    Where no action is legal, as for padding, all are equally likely and no gradient flows.

    Args:
      logits: preferences, not normalised.
      action_mask: legal actions; None if all are.
      epsilon: probability spread evenly over the legal actions, (1 - ε) π + ε / |legal|; None for none.

    >>> dist = categorical(jnp.array([0.0, 0.0, 5.0]), jnp.array([True, True, False]))
    >>> dist.probs, dist.entropy()
    (Array([0.5, 0.5, 0. ], dtype=float32), Array(0.6931472, dtype=float32))
    >>> categorical(jnp.array([50.0, 0.0]), epsilon=0.5).probs
    Array([0.75, 0.25], dtype=float32)
    """
    if action_mask is None:
        action_mask = jnp.ones(logits.shape, bool)
    # Finite, not -inf: entropy multiplies p by log p, and 0 * -inf poisons the gradient. Half of the lowest number, so
    # that subtracting the largest logit does not overflow either.
    lowest = jnp.finfo(logits.dtype).min / 2
    log_probs = jax.nn.log_softmax(jnp.where(action_mask, logits, lowest))
    if epsilon is not None:
        legal = action_mask | ~action_mask.any(-1, keepdims=True)
        floor = jnp.log(epsilon / legal.sum(-1, keepdims=True)).astype(logits.dtype)
        log_probs = jnp.where(legal, jnp.logaddexp(jnp.log1p(-epsilon) + log_probs, floor), lowest)
    return Categorical(logits=log_probs)


def gumbel_softmax(
    logits: Float[Array, "*batch A"],
    gumbel: Float[Array, "*batch A"],
    temperature: Numeric = 1.0,
    *,
    straight_through: bool = False,
) -> Float[Array, "*batch A"]:
    """A differentiable sample of a categorical distribution, softmax((logits + g) / τ).

    Args:
      logits: of a `Categorical`, or not normalised.
      gumbel: noise g, such as `jax.random.gumbel(key, logits.shape)`.
      temperature: τ; small is close to one-hot, with gradients of large variance.
      straight_through: return the one-hot sample, with the gradient of the soft one.

    References:
      Jang et al., 2017, Categorical Reparameterization with Gumbel-Softmax (https://arxiv.org/abs/1611.01144).

    >>> gumbel_softmax(jnp.array([0.0, 1.0]), jnp.zeros(2), straight_through=True)
    Array([0., 1.], dtype=float32)
    """
    soft = jax.nn.softmax((logits + gumbel) / temperature)
    if not straight_through:
        return soft
    hard = jax.nn.one_hot(jnp.argmax(soft, axis=-1), soft.shape[-1], dtype=soft.dtype)
    # In this order the value is exactly one-hot.
    return hard + (soft - jax.lax.stop_gradient(soft))


# -------------------------------------------------------------------------------------------------- continuous


@struct.dataclass(kw_only=True)
class Gaussian:
    """Independent normal distributions over the last axis. Make it with `gaussian`.

    Attributes:
      mean, log_std: μ and log σ of the action.
    """

    mean: Float[Array, "*batch A"]
    log_std: Float[Array, "*batch A"]

    def sample(self, *, seed: PRNGKeyArray) -> Float[Array, "*batch A"]:
        """An action, differentiable in μ and σ."""
        return self.sample_and_log_prob(seed=seed)[0]

    def log_prob(self, action: Float[Array, "*batch A"]) -> Float[Array, "*batch"]:
        """log π(a)."""
        return self._log_prob_of_noise((action - self.mean) / jnp.exp(self.log_std))

    def sample_and_log_prob(self, *, seed: PRNGKeyArray) -> tuple[Float[Array, "*batch A"], Float[Array, "*batch"]]:
        """An action and its log-probability."""
        return self.from_noise(jax.random.normal(seed, self.mean.shape, self.mean.dtype))

    def from_noise(self, noise: Float[Array, "*batch A"]) -> tuple[Float[Array, "*batch A"], Float[Array, "*batch"]]:
        """The action μ + σ ε of standard normal noise ε, and its log-probability."""
        return self.mean + jnp.exp(self.log_std) * noise, self._log_prob_of_noise(noise)

    def entropy(self) -> Float[Array, "*batch"]:
        """Σ log σ + (1 + log 2π) / 2."""
        return jnp.sum(self.log_std + 0.5 * (1 + np.log(2 * np.pi)), axis=-1)

    def mode(self) -> Float[Array, "*batch A"]:
        """μ."""
        return self.mean

    def _log_prob_of_noise(self, noise: Float[Array, "*batch A"]) -> Float[Array, "*batch"]:
        return jnp.sum(-0.5 * (noise**2 + np.log(2 * np.pi)) - self.log_std, axis=-1)


def gaussian(mean: Float[Array, "*batch A"], log_std: Float[Array, "..."]) -> Gaussian:
    """Independent normal distributions over the last axis, unbounded: clip actions on their way to the environment.

    The log-probability belongs to the sample before that clipping.

    Args:
      mean: μ.
      log_std: log σ; of the mean's shape, or `[A]` where it does not depend on the state.

    >>> gaussian(jnp.zeros((3, 2)), jnp.zeros(2)).log_prob(jnp.zeros((3, 2)))
    Array([-1.837877, -1.837877, -1.837877], dtype=float32)
    """
    return Gaussian(mean=mean, log_std=jnp.broadcast_to(log_std, mean.shape))


@struct.dataclass(kw_only=True)
class TanhNormal:
    """Independent normals, squashed into bounds by tanh. Make it with `tanh_normal`.

    `z` is the normal variable before tanh. Where tanh saturates, an action does not tell its `z`: prefer
    `sample_and_log_prob` or `from_noise`, or keep `z` and use `log_prob_of_z`, to `log_prob(sample)`.

    Attributes:
      z_mean, z_log_std: μ and log σ of z.
      low, high: bounds of the action.
    """

    z_mean: Float[Array, "*batch A"]
    z_log_std: Float[Array, "*batch A"]
    low: Float[Array, "*batch A"]
    high: Float[Array, "*batch A"]

    def squash(self, z: Float[Array, "*batch A"]) -> Float[Array, "*batch A"]:
        """The action of z."""
        middle, half_range = (self.high + self.low) / 2, (self.high - self.low) / 2
        # Rounding can leave the bounds by one unit in the last place.
        return jnp.clip(middle + half_range * jnp.tanh(z), self.low, self.high)

    def unsquash(self, action: Float[Array, "*batch A"]) -> Float[Array, "*batch A"]:
        """The z of an action, finite at the bounds."""
        middle, half_range = (self.high + self.low) / 2, (self.high - self.low) / 2
        inside = 1 - jnp.finfo(action.dtype).eps
        return jnp.arctanh(jnp.clip((action - middle) / half_range, -inside, inside))

    def log_prob_of_z(self, z: Float[Array, "*batch A"]) -> Float[Array, "*batch"]:
        """log π(squash(z)), exact however far tanh saturates."""
        noise = (z - self.z_mean) / jnp.exp(self.z_log_std)
        normal = -0.5 * (noise**2 + jnp.log(2 * jnp.pi)) - self.z_log_std
        # log(1 - tanh(z)²), without the cancellation.
        log_slope = 2 * (jnp.log(2) - z - jax.nn.softplus(-2 * z)) + jnp.log((self.high - self.low) / 2)
        return jnp.sum(normal - log_slope, axis=-1)

    def sample(self, *, seed: PRNGKeyArray) -> Float[Array, "*batch A"]:
        """An action, differentiable in μ and σ."""
        return self.sample_and_log_prob(seed=seed)[0]

    def log_prob(self, action: Float[Array, "*batch A"]) -> Float[Array, "*batch"]:
        """log π(a), finite with finite gradients at the bounds."""
        return self.log_prob_of_z(self.unsquash(action))

    def sample_and_log_prob(self, *, seed: PRNGKeyArray) -> tuple[Float[Array, "*batch A"], Float[Array, "*batch"]]:
        """An action and its exact log-probability."""
        return self.from_noise(jax.random.normal(seed, self.z_mean.shape, self.z_mean.dtype))

    def from_noise(self, noise: Float[Array, "*batch A"]) -> tuple[Float[Array, "*batch A"], Float[Array, "*batch"]]:
        """The action of z = μ + σ ε with standard normal noise ε, and its exact log-probability."""
        z = self.z_mean + jnp.exp(self.z_log_std) * noise
        return self.squash(z), self.log_prob_of_z(z)

    def entropy(self) -> Float[Array, "*batch"]:
        """No closed form: by Gauss-Hermite quadrature, differentiable."""
        nodes, weights = np.polynomial.hermite_e.hermegauss(_QUADRATURE_NODES)
        z = self.z_mean + jnp.exp(self.z_log_std) * jnp.asarray(nodes, self.z_mean.dtype).reshape(
            -1, *[1] * self.z_mean.ndim
        )
        return -jnp.tensordot(jnp.asarray(weights / weights.sum(), self.z_mean.dtype), self.log_prob_of_z(z), axes=1)

    def mode(self) -> Float[Array, "*batch A"]:
        """The action of μ: the usual greedy action, though not where the density is highest."""
        return self.squash(self.z_mean)


def tanh_normal(
    mean: Float[Array, "*batch A"],
    log_std: Float[Array, "..."],
    low: ArrayLike = -1.0,
    high: ArrayLike = 1.0,
) -> TanhNormal:
    """A normal distribution squashed into [low, high], a = (high + low) / 2 + (high - low) / 2 tanh(z).

    Args:
      mean: of z.
      log_std: of z; of the mean's shape, or `[A]` where it does not depend on the state.
      low, high: bounds of the action, numbers or arrays that broadcast against the mean.

    References:
      Haarnoja et al., 2018, Soft Actor-Critic Algorithms and Applications, app. C (https://arxiv.org/abs/1812.05905).

    >>> dist = tanh_normal(jnp.zeros(1), jnp.zeros(1))
    >>> dist.mode(), dist.log_prob(jnp.zeros(1))
    (Array([0.], dtype=float32), Array(-0.9189385, dtype=float32))
    """

    def like_mean(x: ArrayLike) -> Array:
        return jnp.broadcast_to(jnp.asarray(x, mean.dtype), mean.shape)

    return TanhNormal(z_mean=mean, z_log_std=like_mean(log_std), low=like_mean(low), high=like_mean(high))


# ---------------------------------------------------------------------------------------------- two distributions


def kl_divergence(p: Any, q: Any) -> Float[Array, "*batch"]:
    """KL(p ‖ q) = E_p[log p(a) - log q(a)], exact, of two distributions of one kind and with the same bounds.

    >>> print(f"{kl_divergence(categorical(jnp.log(jnp.array([0.5, 0.5]))), categorical(jnp.zeros(2))):.1f}")
    0.0
    >>> kl_divergence(gaussian(jnp.ones(1), jnp.zeros(1)), gaussian(jnp.zeros(1), jnp.zeros(1)))
    Array(0.5, dtype=float32)
    """
    if isinstance(p, Categorical) and isinstance(q, Categorical):
        # An action of probability 0 adds nothing, however unlike its logits are.
        gap = jnp.where(p.probs > 0, p.logits - q.logits, 0.0)
        return jnp.sum(p.probs * gap, axis=-1)
    # tanh does not change it: both are squashed alike.
    (mean, log_std), (other_mean, other_log_std) = _normal(p), _normal(q)
    scaled = (jnp.exp(2 * log_std) + (mean - other_mean) ** 2) / (2 * jnp.exp(2 * other_log_std))
    return jnp.sum(other_log_std - log_std + scaled - 0.5, axis=-1)


def _normal(pi: Any) -> tuple[Array, Array]:
    """Mean and log standard deviation, before tanh."""
    if isinstance(pi, Gaussian):
        return pi.mean, pi.log_std
    if isinstance(pi, TanhNormal):
        return pi.z_mean, pi.z_log_std
    raise TypeError(
        f"kl_divergence knows Categorical, Gaussian and TanhNormal, and pi is {type(pi).__name__} here: use one of "
        f"these heads."
    )
