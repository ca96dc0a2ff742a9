"""Running normalisation of value targets: statistics are arrays, functions are pure.

The critic predicts normalised values; whatever mixes values with rewards must denormalise them first:

>>> stats = update(init(), jnp.array([4.0, 12.0]), jnp.ones(2, bool), beta=0.0)
>>> denormalize(stats, jnp.array([0.5]))
Array([10.], dtype=float32)
"""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from jmarl import losses
from jmarl.types import Numeric

__all__ = ["ValueNorm", "denormalize", "init", "normalize", "update"]


@struct.dataclass(kw_only=True)
class ValueNorm:
    """Exponential moving moments, biased towards their start at zero.

    Attributes:
      mean: average of x.
      mean_sq: average of x².
      debias: what the weights of the averages sum to: 0 before the first update, towards 1 after many.
    """

    mean: Float[Array, "*batch"]
    mean_sq: Float[Array, "*batch"]
    debias: Float[Array, "*batch"]


def init() -> ValueNorm:
    """Statistics that have seen nothing: normalising with them changes nothing."""
    return ValueNorm(mean=jnp.zeros(()), mean_sq=jnp.zeros(()), debias=jnp.zeros(()))


def update(
    stats: ValueNorm, x: Float[Array, "*batch"], mask: Bool[Array, "*batch"], beta: Numeric = 0.99999
) -> ValueNorm:
    """m ← β m + (1 - β) mean(x) for x, x² and 1, over the active entries. Nothing active, nothing changed.

    Args:
      stats: the old statistics.
      x: value targets, not normalised.
      mask: True where the element counts.
      beta: β, the weight of the past.

    References:
      Yu et al., 2022, The Surprising Effectiveness of PPO in Cooperative Multi-Agent Games, sec. 5.1
      (https://arxiv.org/abs/2103.01955).
    """
    new = jnp.where(mask.any(), 1 - beta, 0)
    return ValueNorm(
        mean=(1 - new) * stats.mean + new * losses.masked_mean(x, mask),
        mean_sq=(1 - new) * stats.mean_sq + new * losses.masked_mean(x**2, mask),
        debias=(1 - new) * stats.debias + new,
    )


def _mean_and_std(stats: ValueNorm) -> tuple[Array, Array]:
    seen = stats.debias > 0
    weight = jnp.where(seen, stats.debias, 1)
    mean = stats.mean / weight
    # A floor: the first targets of a sparse reward are all alike.
    variance = jnp.maximum(stats.mean_sq / weight - mean**2, 0.01)
    return mean, jnp.where(seen, jnp.sqrt(variance), 1)


def normalize(stats: ValueNorm, x: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    """(x - mean) / std, with the debiased moments and a variance of at least 0.01."""
    mean, std = _mean_and_std(stats)
    return (x - mean) / std


def denormalize(stats: ValueNorm, x: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    """mean + std x: undoes `normalize`."""
    mean, std = _mean_and_std(stats)
    return mean + std * x
