"""Learning-rate schedules and optimisers. Every number may be a tracer, so a sweep over them compiles once."""

import difflib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jmarl import configs
from jmarl.types import Numeric

__all__ = ["learning_rate", "optimizer", "over_run", "per_agent", "schedule"]

Schedule = Callable[[Any], Array]  # of an optimiser-step count


def _unknown(argument: str, value: str, known: Iterable[str]) -> ValueError:
    known = sorted(known)
    nearest = difflib.get_close_matches(value.lower(), known, n=1, cutoff=0.0)[0]
    return ValueError(f"{argument}={value!r} is unknown. Did you mean {nearest!r}? Known: {', '.join(known)}.")


def schedule(
    kind: str, start: Numeric, end: Numeric = 0.0, total_steps: Numeric = 1, *, name: str | None = None
) -> Schedule:
    """A number that changes with the count of optimiser steps.

    With p = min(count / total_steps, 1):

    - `"constant"`: start.
    - `"linear"`: (1 - p) start + p end.
    - `"exponential"`: start (end / start)^p, the same factor in every step; both must be positive.

    Args:
      kind: "constant", "linear" or "exponential"; static.
      start: value at count 0.
      end: value at count `total_steps`, exactly, and ever after.
      total_steps: optimiser steps from start to end.
      name: of the hyperparameter, for messages: that of a config with the fields `NAME_schedule` and `NAME_end`.

    >>> rate = schedule("linear", 1.0, 0.0, total_steps=10)
    >>> [float(rate(count)) for count in (0, 5, 10, 20)]
    [1.0, 0.5, 0.0, 0.0]
    """

    end_count = float(total_steps) if isinstance(total_steps, int) else total_steps  # beyond 2^31, too

    def progress(count: Numeric) -> Array:
        return jnp.clip(count / jnp.maximum(end_count, 1.0), 0.0, 1.0)

    def constant(count: Numeric) -> Array:
        return jnp.asarray(start, float)

    def linear(count: Numeric) -> Array:
        p = progress(count)
        return (1 - p) * start + p * end

    def exponential(count: Numeric) -> Array:
        p = progress(count)
        return jnp.where(p < 1, start * (end / start) ** p, end)

    kinds = {"constant": constant, "linear": linear, "exponential": exponential}
    if kind not in kinds:
        raise _unknown(f"{name}_schedule" if name else "kind", kind, kinds)
    if kind == "exponential":
        for argument, value in {name or "start": start, f"{name}_end" if name else "end": end}.items():
            if isinstance(value, int | float) and value <= 0:
                raise ValueError(
                    f"{argument}={value} must be positive for an exponential schedule, which never gets to 0."
                )
    return kinds[kind]


def over_run(
    name: str, kind: str, start: Numeric, end: Numeric, horizon: Numeric | None, *, steps_per_update: Numeric = 1
) -> Schedule:
    """A `schedule` over the optimiser steps of a whole run, for the hyperparameter `name`.

    Args:
      name: what error messages call it.
      kind: "constant", "linear" or "exponential"; static.
      start: value at the start.
      end: value at the end.
      horizon: calls of `Learner.update` until the end; may be None for "constant".
      steps_per_update: optimiser steps in each of them.

    Returns:
      The schedule. One that needs `horizon` and has None can be built, for a learner that acts only, not called.
    """
    checked = schedule(kind, start, end, 1 if horizon is None else horizon * steps_per_update, name=name)
    if kind == "constant" or horizon is not None:
        return checked

    def unfinished(count: Numeric) -> Array:
        raise ValueError(
            f"{name}_schedule={kind!r} needs horizon, the updates until its end: set it in the config, or "
            f"let make_train or run fill it in."
        )

    return unfinished


def learning_rate(
    cfg: configs.OptimizerConfig, *, start: Numeric | None = None, steps_per_update: Numeric = 1
) -> Schedule:
    """The schedule that a learner's config describes in `learning_rate`, `.._end`, `.._schedule` and `horizon`.

    Args:
      cfg: the config.
      start: another rate than `cfg.learning_rate`, with the same course.
      steps_per_update: optimiser steps in each call of `Learner.update`.
    """
    start = cfg.learning_rate if start is None else start
    end, kind = cfg.learning_rate_end * start, cfg.learning_rate_schedule
    return over_run("learning_rate", kind, start, end, cfg.horizon, steps_per_update=steps_per_update)


def optimizer(
    learning_rate: Numeric | Schedule,
    *,
    name: str = "adam",
    eps: Numeric = 1e-5,
    b1: Numeric = 0.9,
    b2: Numeric = 0.999,
    decay: Numeric = 0.99,
    weight_decay: Numeric | None = None,
    max_grad_norm: Numeric | None = None,
) -> optax.GradientTransformation:
    """Clipping by global norm, then the optimiser; the formulas are PyTorch's.

    Args:
      learning_rate: step size, or a `schedule`, which then counts the updates.
      name: "adam", "adamw", "rmsprop" or "sgd"; static.
      eps: added to the root of the second moment, outside the root.
      b1, b2: Adam's decay of the first and second moment.
      decay: RMSprop's decay of the second moment.
      weight_decay: for "adamw" decoupled from the gradient, for the others added to it (L2); None for none.
      max_grad_norm: norm of all gradients together above which they are scaled down; None for no clipping.

    >>> opt = optimizer(0.5, name="sgd", max_grad_norm=2.5)
    >>> params = {"w": jnp.zeros(2)}
    >>> updates, _ = opt.update({"w": jnp.array([3.0, 4.0])}, opt.init(params), params)
    >>> updates["w"]
    Array([-0.75, -1.  ], dtype=float32)
    """
    scalings = {
        "adam": lambda: optax.scale_by_adam(b1, b2, eps),
        "adamw": lambda: optax.scale_by_adam(b1, b2, eps),
        "rmsprop": lambda: optax.scale_by_rms(decay, eps, eps_in_sqrt=False),
        "sgd": optax.identity,
    }
    if name not in scalings:
        raise _unknown("name", name, scalings)
    scaling = scalings[name]()
    decaying = optax.identity() if weight_decay is None else optax.add_decayed_weights(weight_decay)
    return optax.chain(
        optax.identity() if max_grad_norm is None else optax.clip_by_global_norm(max_grad_norm),
        *((scaling, decaying) if name == "adamw" else (decaying, scaling)),
        optax.scale_by_learning_rate(learning_rate),
    )


def per_agent(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """One optimiser for each agent, for parameters with a leading axis N: each gradient is clipped by its own norm."""
    return optax.GradientTransformation(jax.vmap(optimizer.init), jax.vmap(optimizer.update))
