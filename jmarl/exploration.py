"""How a greedy policy explores: random legal actions, noise on continuous ones."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jmarl import losses, optim
from jmarl.types import Config, Numeric, TrainState

__all__ = ["count", "epsilon_greedy", "ornstein_uhlenbeck", "over_env_steps"]


def count(state: TrainState) -> Int[Array, "*batch"]:
    """The environment steps so far, on which exploration depends; refused where nobody counts them."""
    if state.env_steps is None:
        raise ValueError(
            "state.env_steps is None, and exploration depends on it: start and rollout count, and a loop of your own "
            "begins with state.replace(env_steps=jnp.int32(0)) and adds the steps that it takes in all environments."
        )
    return state.env_steps


def over_env_steps(cfg: Config, name: str) -> Callable[[TrainState], Float[Array, "*batch"]]:
    """The schedule of exploration that a config has in `NAME_start`, `NAME_end`, `NAME_steps` and `NAME_schedule`.

    Args:
      cfg: of a learner.
      name: "epsilon" or "noise".
    """
    kind, start, end, steps = (getattr(cfg, f"{name}_{part}") for part in ("schedule", "start", "end", "steps"))
    schedule = optim.schedule(kind, start, end, steps, name=name)
    if kind == "constant":
        return lambda state: schedule(0)
    return lambda state: schedule(count(state))


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
