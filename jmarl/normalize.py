"""Running normalisation of value targets and of observations: statistics are arrays, functions are pure.

The critic predicts normalised values; whatever mixes values with rewards must denormalise them first:

>>> stats = update(init(), jnp.array([4.0, 12.0]), jnp.ones(2, bool), beta=0.0)
>>> denormalize(stats, jnp.array([0.5]))
Array([10.], dtype=float32)
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from jmarl import losses, parallel
from jmarl.types import Moments, Numeric, as_floats

__all__ = ["accumulate", "denormalize", "init", "init_features", "normalize", "normalize_features", "update"]


def init() -> Moments:
    """Statistics that have seen nothing: normalising with them changes nothing."""
    return Moments(mean=jnp.zeros(()), variance=jnp.zeros(()), weight=jnp.zeros(()))


def update(stats: Moments, x: Float[Array, "*batch"], mask: Bool[Array, "*batch"], beta: Numeric = 0.99999) -> Moments:
    """The moments of the past with weight β and of x with weight 1 - β. Nothing active, nothing changed.

    These are Yu et al.'s debiased averages of x and x², as a mean and a variance: two moments of equal size would leave
    nothing of a variance that is small beside them.

    Args:
      stats: the old statistics.
      x: value targets, not normalised.
      mask: True where the element counts.
      beta: β, the weight of the past.

    References:
      Yu et al., 2022, The Surprising Effectiveness of PPO in Cooperative Multi-Agent Games, sec. 5.1
      (https://arxiv.org/abs/2103.01955).
      Chan et al., 1983, Algorithms for Computing the Sample Variance: the variance of two groups together.
    """
    new = jnp.where(parallel.summed(mask.sum()) > 0, 1 - beta, 0)
    weight = (1 - new) * stats.weight + new
    share = new / jnp.where(weight > 0, weight, 1)  # of x in all that was seen
    mean = losses.pooled_mean(x, mask)
    distance = mean - stats.mean
    variance = losses.pooled_mean((x - mean) ** 2, mask) + (1 - share) * distance**2
    return Moments(
        mean=stats.mean + share * distance,
        variance=(1 - share) * stats.variance + share * variance,
        weight=weight,
    )


def _mean_and_std(stats: Moments) -> tuple[Array, Array]:
    # A floor: the first targets of a sparse reward are all alike.
    std = jnp.sqrt(jnp.maximum(stats.variance, 0.01))
    return stats.mean, jnp.where(stats.weight > 0, std, 1)


def normalize(stats: Moments, x: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    """(x - mean) / std, with a variance of at least 0.01."""
    mean, std = _mean_and_std(stats)
    return (x - mean) / std


def denormalize(stats: Moments, x: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    """mean + std x: undoes `normalize`."""
    mean, std = _mean_and_std(stats)
    return mean + std * x


def init_features(shape: tuple[int, ...]) -> Moments:
    """Statistics of each feature that have seen nothing: normalising with them changes nothing."""
    return Moments(mean=jnp.zeros(shape), variance=jnp.ones(shape), weight=jnp.zeros(()))


def accumulate(stats: Moments, x: Shaped[Array, "..."], mask: Bool[Array, "*batch"]) -> Moments:
    """The moments of all that was ever seen, each sight with the same weight: `stats.weight` counts them.

    Args:
      stats: the old statistics, of features.
      x: what is seen now, `[*batch, *features]`.
      mask: where it counts.

    References:
      Chan et al., 1983, Algorithms for Computing the Sample Variance: the variance of two groups together.

    >>> stats = accumulate(init_features((1,)), jnp.array([[1.0], [3.0], [9.0]]), jnp.array([True, True, False]))
    >>> stats = accumulate(stats, jnp.array([[8.0]]), jnp.array([True]))
    >>> stats.mean.tolist(), round(float(stats.variance[0]), 4), float(stats.weight)
    ([4.0], 8.6667, 3.0)
    """
    x, axes = as_floats(x), tuple(range(mask.ndim))
    counts = mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim))
    num = parallel.summed(jnp.sum(mask, dtype=x.dtype))

    def mean_of(x: Array) -> Array:  # not 0 times what is masked: that may be no number
        return parallel.summed(jnp.sum(jnp.where(counts, x, 0.0), axes)) / jnp.maximum(num, 1)

    mean = mean_of(x)
    variance = mean_of((x - mean) ** 2)
    total = stats.weight + num
    share, distance = num / jnp.maximum(total, 1), mean - stats.mean
    before = jnp.where(stats.weight > 0, stats.variance, 0.0)
    joint = (1 - share) * before + share * variance + share * (1 - share) * distance**2
    return Moments(
        mean=stats.mean + share * distance, variance=jnp.where(total > 0, joint, stats.variance), weight=total
    )


def normalize_features(stats: Moments, x: Shaped[Array, "..."], clip: Numeric) -> Float[Array, "..."]:
    """(x - mean) / std of each feature, cut off at ± clip. One that never changes, such as padding, is 0."""
    return jnp.clip((x - stats.mean) / jnp.sqrt(stats.variance + 1e-8), -clip, clip)
