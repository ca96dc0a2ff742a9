"""How a greedy policy explores: random legal actions, noise on continuous ones."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jmarl import losses
from jmarl.types import Numeric

__all__ = ["epsilon_greedy", "ornstein_uhlenbeck"]


def epsilon_greedy(
    key: PRNGKeyArray, q: Float[Array, "*batch A"], action_mask: Bool[Array, "*batch A"], epsilon: Numeric
) -> Int[Array, "*batch"]:
    """The legal action of highest value, or with probability ε any legal one, each equally likely.

    Args:
      key: source of the coin and of the choice; every element draws its own.
      q: values.
      action_mask: True where the action is legal; at least one must be.
      epsilon: ε in [0, 1].

    >>> legal = jnp.array([True, True, False])
    >>> int(epsilon_greedy(jax.random.key(0), jnp.array([1.0, 2.0, 9.0]), legal, 0.0))
    1
    """
    # One draw for both: small draws are dear to compile. The legal action with the largest number is a uniform choice.
    drawn = jax.random.uniform(key, (*q.shape[:-1], q.shape[-1] + 1))
    choice = jnp.where(drawn[..., :1] < epsilon, drawn[..., 1:], q)
    return losses.masked_argmax(choice, action_mask)


def ornstein_uhlenbeck(
    key: PRNGKeyArray, noise: Float[Array, "*batch"], scale: Numeric, pull: Numeric = 0.15
) -> Float[Array, "*batch"]:
    """The next noise of an Ornstein-Uhlenbeck process around 0, x ← (1 - θ) x + σ ε: noise with a memory.

    Args:
      key: source of ε.
      noise: x of the step before; 0 as an episode starts.
      scale: σ.
      pull: θ in (0, 1]; at 1 the noise has no memory.

    References:
      Uhlenbeck & Ornstein, 1930; Lillicrap et al., 2016, sec. 7 (https://arxiv.org/abs/1509.02971).

    >>> ornstein_uhlenbeck(jax.random.key(0), jnp.array([1.0]), 0.0)
    Array([0.85], dtype=float32)
    """
    return jnp.asarray((1 - pull) * noise + scale * jax.random.normal(key, noise.shape))
