"""What learners check in a config before anything is traced. Types say most of it: choices, flags, numbers, widths."""

import dataclasses
import functools
import math
import types
import warnings
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import jax
import numpy as np

from jmarl import configs
from jmarl.types import Config, Env, EnvSpec

__all__ = ["require", "require_discrete", "require_heads", "validate"]

_LARGEST = 2**31 - 1
_ARRAYS = ("target_entropy",)  # leaves that may hold a number for each agent


def validate(cfg: Config, cls: type | None = None, spec: EnvSpec | None = None) -> None:
    """Static facts of a config, and numbers that are not tracers, in a sentence for each that cannot be meant.

    Args:
      cfg: of any learner.
      cls: the class of configs that the learner takes; None for any.
      spec: what the learner was given as one; None to leave it alone.
    """
    if isinstance(spec, Env):
        raise TypeError(f"An algorithm takes the spec of an environment: write env.spec, of {spec.spec.name}.")
    if spec is not None and not isinstance(spec, EnvSpec):
        raise TypeError(f"spec is {type(spec).__name__} here, and must be the spec of an environment: env.spec.")
    if cls is not None and not isinstance(cfg, cls):
        raise TypeError(f"cfg is {type(cfg).__name__} here, and this algorithm takes {cls.__name__}: {cls.__name__}().")
    if isinstance(cfg, dict):
        for inner in cfg.values():
            validate(inner)
        return
    hints = _hints(type(cfg))  # type: ignore[arg-type]
    for field in dataclasses.fields(cfg):
        _validate_field(field, hints[field.name], getattr(cfg, field.name))
    _validate_ranges(cfg)
    if spec is not None and getattr(cfg, "sharing", None) == "shared":
        _warn_of_different_agents(spec)
    if spec is not None and len(set(spec.teams)) > 1 and getattr(cfg, "team_reward", "individual") != "individual":
        _warn_of_opponents(spec, type(cfg).__name__, cfg.team_reward)


@functools.cache
def _warn_of_different_agents(spec: EnvSpec) -> None:
    """Once: agents of different kinds that one network cannot tell apart seldom learn more than what suits them all."""
    differ = len(set(zip(spec.obs_sizes or (0,), spec.action_sizes or (0,), strict=False))) > 1
    if differ and not spec.has_ids:
        warnings.warn(
            f"Agents of {spec.name} differ in their views or actions, and sharing='shared' gives them one network that "
            f"cannot tell who is who: try sharing='per_group', or agent_ids=True in jmarl.make.",
            stacklevel=4,
        )


@functools.cache
def _warn_of_opponents(spec: EnvSpec, name: str, team_reward: str) -> None:
    """Once, however often an algorithm is built: a learner of one team would learn to please both of two."""
    warnings.warn(
        f"{spec.name} has {len(set(spec.teams))} teams that oppose each other, and {name} learns from one reward, the "
        f"{team_reward} of all agents': use an algorithm with a reward for each agent, such as ippo or iql.",
        stacklevel=4,
    )


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def _validate_field(field: dataclasses.Field, hint: Any, value: Any) -> None:
    name = field.name
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if value is None:
        if type(None) not in kinds:
            raise ValueError(f"{name}=None has no meaning: leave it out for {field.default!r}.")
        return
    if configs.is_config(value) and (Any in kinds or any(map(dataclasses.is_dataclass, kinds))):
        return validate(value)
    if choices := [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]:
        if value not in choices:
            raise ValueError(f"{name}={value!r} is unknown here: choose one of {', '.join(map(str, choices))}.")
    elif jax.Array in kinds or float in kinds:
        _validate_number(name, value)
    elif bool in kinds:
        if not isinstance(value, bool | np.bool_):
            raise ValueError(f"{name}={value!r} must be True or False.")
    elif int in kinds:
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or abs(int(value)) > _LARGEST:
            raise ValueError(f"{name}={value!r} must be a whole number below 2**31.")
    elif any(get_origin(kind) is tuple for kind in kinds):
        _validate_widths(name, value)


def _validate_number(name: str, value: Any) -> None:
    if isinstance(value, bool | str | bytes) or (not hasattr(value, "dtype") and not configs.is_number(value)):
        raise ValueError(f"{name}={value!r} must be a number, such as {name}=0.5.")
    if np.shape(value) and name not in _ARRAYS:
        raise ValueError(
            f"{name} has the shape {np.shape(value)}, and a run has one number: give jmarl.sweep the values, and run "
            f"its axes (sweep_axes) or vmap over them."
        )
    if configs.is_number(value) and not math.isfinite(value):
        raise ValueError(f"{name}={value} must be a finite number.")


def _validate_widths(name: str, value: Any) -> None:
    if not isinstance(value, tuple | list):
        raise ValueError(f"{name}={value!r} must hold one width for each layer: write {name}=({value},) for one.")
    if any(not isinstance(size, int | np.integer) or isinstance(size, bool) for size in value):
        raise ValueError(f"{name}={value!r} must hold whole numbers.")
    if any(size < 1 or size > _LARGEST for size in value):
        raise ValueError(f"{name}={value} must hold positive widths.")


def _validate_ranges(cfg: Config) -> None:
    counts = ("n_step", "num_critics", "num_epochs", "num_minibatches", "policy_delay", "target_update_interval")
    sizes = ("num_blocks", "num_heads", "embed_size", "cell_size", "mixer_embed_size", "recurrent_length", "horizon")
    shares = (
        "gamma",
        "gae_lambda",
        "lambda_",
        "tau",
        "epsilon_start",
        "epsilon_end",
        "standardize_beta",
        "value_norm_beta",
        "decay_scale",
    )
    rates = ("learning_rate", "learning_rate_end", "critic_learning_rate", "alpha_learning_rate", "adam_eps")
    coefficients = ("ent_coef", "ent_coef_end", "vf_coef", "logit_coef", "central_loss_coef", "target_kl")
    bounds = ("clip_eps", "value_clip_eps", "huber_delta", "epsilon_steps", "noise_steps", "random_steps", "burn_in")
    deviations = ("noise_start", "noise_end", "target_noise", "target_noise_clip")
    attention = ("entity_size", "entity_heads", "entity_blocks")
    require(cfg, (*counts, *sizes, *attention), lambda x: x >= 1, "be at least 1")
    require(cfg, shares, lambda x: 0 <= x <= 1, "lie in [0, 1]")
    require(cfg, (*rates, *coefficients, *bounds), lambda x: x >= 0, "not be negative")
    require(cfg, deviations, lambda x: x >= 0, "not be negative: choose 0 for no noise")
    require(cfg, ("max_rho", "max_c"), lambda x: x > 0, "be positive: choose 1 for the paper's")
    require(cfg, ("max_grad_norm",), lambda x: x > 0, "be positive: choose None for no clipping")
    require(cfg, ("mixer_scale",), lambda x: x > 0, "be positive: weights that start at 0 together never learn")
    for kind in ("epsilon", "noise"):
        if getattr(cfg, f"{kind}_schedule", None) == "exponential":
            rule = "be positive for an exponential schedule, which never gets to 0: choose linear, or a small number"
            require(cfg, (f"{kind}_start", f"{kind}_end"), lambda x: x > 0, rule)
    burn_in = getattr(cfg, "burn_in", 0)
    if burn_in and not cfg.recurrent:
        raise ValueError(f"burn_in={burn_in} warms up recurrent networks: set recurrent=True, or burn_in=0.")


def require(cfg: Config, names: tuple[str, ...], is_right: Callable[[Any], bool], rule: str) -> None:
    """What these fields must be, where a config has them: `rule` follows the word "must". Tracers cannot be asked."""
    for name in names:
        value = getattr(cfg, name, None)
        if configs.is_number(value) and not is_right(value):
            raise ValueError(f"{name}={value} must {rule}.")


def require_heads(num_heads: int, embed_size: int, *, smallest: int = 1) -> None:
    """Refuses heads that do not share a width equally, or of fewer features than `smallest`."""
    if embed_size % num_heads:
        raise ValueError(
            f"num_heads={num_heads} must divide embed_size={embed_size}, since heads share it equally: choose another "
            f"of the two."
        )
    if embed_size // num_heads < smallest:
        raise ValueError(
            f"num_heads={num_heads} leaves each head {embed_size // num_heads} of embed_size={embed_size} features, "
            f"and it needs {smallest}: choose another of the two."
        )


def require_discrete(spec: EnvSpec, what: str) -> None:
    """Refuses continuous actions; `what` reads finitely many, for the sentence."""
    if not spec.is_discrete:
        raise ValueError(
            f"{what}, but those of {spec.name} are continuous: use another algorithm, such as mappo or masac, or a "
            f"discrete version of the environment."
        )
