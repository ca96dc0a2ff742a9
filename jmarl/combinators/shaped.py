"""Shaped rewards: an aid to learning whose weight follows a schedule, and which no evaluation sees.

    r'_t = r_t + c F_t,   c from `shaping_start` to `shaping_end` over `shaping_steps` environment steps

F is the environment's own shaped reward, a function of the transition, or the difference of a potential,

    F_t = γ Φ(s_{t+1}) - Φ(s_t),   with Φ = 0 where the return has ended,

which changes no policy's rank. Replay keeps r and F apart, and learns with today's weight.

References:
  Ng et al., 1999, Policy Invariance Under Reward Transformations: Theory and Application to Reward Shaping.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jmarl import configs, exploration, losses, masks
from jmarl.combinators import nesting
from jmarl.configs import config
from jmarl.learners import checks
from jmarl.types import Algorithm, EnvSpec, Learner, Numeric, Observation, Transition, static


@config
class ShapedConfig:
    """Hyperparameters of `shaped`."""

    inner: Any  # the config of the algorithm within
    shaping_start: Numeric = 1.0  # weight of the shaped reward at the start
    shaping_end: Numeric = 0.0  # at the end of the schedule, and ever after
    shaping_steps: Numeric = 1_000_000  # environment steps (of one seed) from start to end
    shaping_schedule: configs.Schedule = static("linear")  # its course


def shaped(
    algorithm: Algorithm,
    *,
    reward: Callable[[Transition], Array] | None = None,
    potential: Callable[[Observation], Array] | None = None,
) -> Callable[[EnvSpec, ShapedConfig], Learner]:
    """The algorithm, learning from shaped rewards. Returns in metrics and evaluations stay the environment's own.

    Args:
      algorithm: any.
      reward: F of a `Transition` with any leading axes, `[.., N]`.
      potential: Φ of an `Observation`, `[.., N]`; γ is the algorithm's own. Without either, F is what the environment
        tells as `Outcome.shaped_reward`, as those of Overcooked do.

    Example:
      >>> import jmarl
      >>> env = jmarl.make("overcooked", flatten=True)
      >>> cfg = ShapedConfig(inner=jmarl.PPOConfig(), shaping_steps=2e6)
      >>> learner = shaped(jmarl.ippo)(env.spec, cfg)
    """
    if reward is not None and potential is not None:
        raise ValueError("reward and potential are two ways to shape one reward: give one of them.")

    def combined(spec: EnvSpec, cfg: ShapedConfig) -> Learner:
        checks.validate(cfg, ShapedConfig, spec)
        gamma: Any = None if potential is None else nesting.of_innermost(cfg, "gamma")
        learner = algorithm(spec, cfg.inner)
        weight = exploration.over_env_steps(cfg, "shaping")

        def shape_of(steps: Any) -> Array:
            if potential is not None:
                before, after = (_of_agents("potential", potential(obs), steps) for obs in (steps.obs, steps.next_obs))
                return gamma * jnp.where(steps.terminated, 0.0, after) - before
            if reward is not None:
                return _of_agents("reward", reward(steps), steps)
            if steps.shaped_reward is None:
                raise ValueError(
                    f"{spec.name} has no shaped reward of its own: give shaped(.., reward=) a function of the "
                    f"transition, or potential= one of the observation."
                )
            return steps.shaped_reward

        def update(state, batch, key):
            counts = masks.weight(batch) > 0
            seen, after = batch.steps.obs.as_floats(), batch.steps.next_obs
            shape = shape_of(batch.steps.replace(obs=seen, next_obs=after and after.as_floats()))
            shape = jnp.where(counts | jnp.isfinite(shape), shape, 0.0)
            now = weight(state)
            steps = batch.steps.replace(reward=batch.steps.reward + now * shape)
            state, metrics = learner.update(state, batch.replace(steps=steps), key)
            own = {"shaping/weight": now, "shaping/reward": losses.masked_mean(shape, counts)}
            return state, {**metrics, **own}

        return learner._replace(update=update)

    return combined


def _of_agents(name: str, x: Array, steps: Transition) -> Array:
    if x.shape != steps.reward.shape:
        raise ValueError(
            f"{name} gave the shape {x.shape}, and rewards have {steps.reward.shape}: give each agent a number, with "
            f"any leading axes."
        )
    return x
