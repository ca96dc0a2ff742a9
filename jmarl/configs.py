"""Configs: one frozen dataclass of hyperparameters beside each algorithm, and the fields that algorithms share.

Numbers that only scale arithmetic are leaves of a pytree, so they may be swept inside one compilation; what sets a
shape or a branch is `static`. A field means the same in every config. A config may hold another one, as those of
combinators do, and a dict of configs by name is one, too: their fields have dotted names here, such as
`inner.learning_rate`.

The comment behind a field says what it means; `explain`, `help(PPOConfig)` and the command line show it.
"""

import dataclasses
import linecache
import re
import sys
from collections.abc import Iterator
from typing import Any, Literal, dataclass_transform

import numpy as np
from flax import struct

from jmarl.deprecation import renamed_arguments
from jmarl.types import Config, Numeric, Replaceable, static

__all__ = [
    "EpsilonConfig",
    "NetworkConfig",
    "OptimizerConfig",
    "PassesConfig",
    "QNetworkConfig",
    "RolloutConfig",
    "config",
    "explain",
    "get",
    "leaves",
    "replace",
    "subjects",
]

Schedule = Literal["constant", "linear", "exponential"]
TeamReward = Literal["sum", "mean"]
Reward = Literal["individual", "sum", "mean"]
Activation = Literal["tanh", "relu", "elu", "gelu", "silu"]
Sharing = Literal["shared", "per_agent", "per_group"]


def explain(cls: type) -> dict[str, str]:
    """What each field of a config means, by name: the comment behind it, the inherited one where there is none.

    >>> explain(OptimizerConfig)["learning_rate"]
    'Adam step size'
    """
    comments: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        comments.update(_comments(base))
    return {field.name: comments.get(field.name, "") for field in dataclasses.fields(cls)}


def _comments(cls: type) -> dict[str, str]:
    """Those behind the fields of a class's own, if its source is there."""
    path = getattr(sys.modules.get(cls.__module__), "__file__", None)
    lines = iter(linecache.getlines(path) if path else ())
    found: dict[str, str] = {}
    for line in lines:
        if line.startswith(f"class {cls.__name__}(") or line.startswith(f"class {cls.__name__}:"):
            break
    for line in lines:
        if line.strip() and not line.startswith(" "):
            break
        if match := re.match(r"    (\w+): ", line):
            name = match[1]
        if match := re.match(r"    (?:\w+: .*|\)\s*)#\s*(.+)$", line):  # a long field ends with a line of its own
            found[name] = match[1]
    return found


@dataclass_transform(kw_only_default=True, frozen_default=True)
def config(cls: type) -> Any:
    """A frozen dataclass that is a pytree, as `flax.struct.dataclass`, whose docstring explains all of its fields."""
    made: Any = struct.dataclass(cls, kw_only=True)  # type: ignore[call-overload]
    made.__init__ = renamed_arguments(num_updates="horizon")(made.__init__)
    lines = [f"  {name}: {text}" for name, text in explain(made).items()]
    made.__doc__ = "\n".join([(cls.__doc__ or "").strip(), "", "Attributes:", *lines])
    return made


@config
class OptimizerConfig(Replaceable):
    """Adam, the course of its step size, and clipping."""

    learning_rate: Numeric = 5e-4  # Adam step size
    learning_rate_end: Numeric = 0.0  # its value (or floor, exponential) at the end, as a fraction of the start
    learning_rate_schedule: Schedule = static("constant")  # its course over the run, in optimiser steps
    horizon: Numeric | None = None  # calls of update until schedules end; None: make_train and run fill it in
    adam_eps: Numeric = 1e-5  # added to Adam's denominator
    max_grad_norm: Numeric | None = 10.0  # global norm to which gradients are clipped; None: never


@config
class NetworkConfig(Replaceable):
    """Torsos, memory and parameter sharing."""

    recurrent: bool = static(False)  # networks with a memory, trained on sequences
    cell: Literal["gru", "lstm", "attention"] = static("gru")  # of recurrent networks
    cell_size: int = static(64)  # width of the recurrent state
    cell_window: int = static(16)  # steps that a cell of attention looks back; rollouts record as many, at every step
    hidden_sizes: tuple[int, ...] = static((64, 64))  # layers before the outputs; before the cell if recurrent
    head_sizes: tuple[int, ...] = static(())  # layers between cell (or torso) and outputs
    activation: Activation = static("relu")  # after each layer
    layer_norm: bool = static(False)  # before each activation
    kernel_init: Literal["orthogonal", "lecun", "xavier"] = static("orthogonal")  # of weights
    torso: Literal["layers", "entities"] = static("layers")  # of own views; entities: attention over them before layers
    entity_size: int = static(64)  # width of that attention
    entity_heads: int = static(4)  # of it
    entity_blocks: int = static(1)  # of it, one after the other
    sharing: Sharing = static("shared")  # of parameters; groups are agents of equal sizes


@config
class QNetworkConfig(NetworkConfig):
    """Networks whose outputs are values of actions."""

    dueling: bool = static(False)  # outputs are V + A - mean A, of a value and of advantages


@config
class PassesConfig(Replaceable):
    """How learners from rollouts pass over each."""

    num_epochs: int = static(4)  # passes over each rollout
    num_minibatches: int = static(4)  # parts of a pass; whole sequences are shuffled


@config
class RolloutConfig(PassesConfig):
    """How learners from rollouts, with networks that may have a memory, pass over each."""

    recurrent_length: int | None = static(None)  # steps that gradients flow back; None: the whole rollout


@config
class EpsilonConfig(Replaceable):
    """Random actions while exploring."""

    epsilon_start: Numeric = 1.0  # share of random actions at the start
    epsilon_end: Numeric = 0.05  # at the end of the decay, and ever after
    epsilon_steps: Numeric = 50_000  # environment steps (of one seed) from start to end
    epsilon_schedule: Schedule = static("linear")  # its course


_SUBJECTS = {OptimizerConfig: "optimiser", QNetworkConfig: "networks", EpsilonConfig: "exploration"}


def subjects(cls: type) -> dict[str, str]:
    """What each field is about: "optimiser", "networks", "exploration", or else "algorithm"."""
    about = {name: subject for base, subject in _SUBJECTS.items() for name in _names(base)}
    is_exploring = ("noise", "random_steps", "epsilon")
    return {
        field.name: "exploration" if field.name.startswith(is_exploring) else about.get(field.name, "algorithm")
        for field in dataclasses.fields(cls)
    }


def _names(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


# --------------------------------------------------------------------------------------------------- dotted names


def is_config(value: Any) -> bool:
    """Whether a value is a config, or a dict of them."""
    return dataclasses.is_dataclass(value) or isinstance(value, dict)


def fields(cfg: Config, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field]]:
    """Each field of a config and of those that it holds, by its dotted name."""
    if isinstance(cfg, dict):
        for name, inner in cfg.items():
            yield from fields(inner, f"{prefix}{name}.")
        return
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        if is_config(value):
            yield from fields(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", field


def leaves(cfg: Config) -> dict[str, Any]:
    """The numbers of a config that may vary inside one compilation, by dotted name."""
    return {name: get(cfg, name) for name, field in fields(cfg) if field.metadata.get("pytree_node", True)}


def get(cfg: Config, name: str) -> Any:
    """The field of a dotted name."""
    for part in name.split("."):
        cfg = cfg[part] if isinstance(cfg, dict) else getattr(cfg, part)
    return cfg


def replace(cfg: Config, values: dict[str, Any]) -> Any:
    """A config with other values, by dotted name."""
    own = {name: value for name, value in values.items() if "." not in name}
    inner: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        first, dot, rest = name.partition(".")
        if dot:
            inner.setdefault(first, {})[rest] = value
    own |= {name: replace(get(cfg, name), x) for name, x in inner.items()}
    return {**cfg, **own} if isinstance(cfg, dict) else dataclasses.replace(cfg, **own)


def extended(cfg: Config, cls: type) -> Any:
    """A config as one of `cls`, where that extends its class: what it leaves at its default has the default of `cls`.

    >>> from jmarl import QConfig, QMIXConfig
    >>> cfg = extended(QConfig(gamma=0.9), QMIXConfig)
    >>> type(cfg).__name__, cfg.gamma, cfg.team_reward
    ('QMIXConfig', 0.9, 'sum')
    """
    if isinstance(cfg, cls) or not issubclass(cls, type(cfg)):
        return cfg

    def is_default(field: dataclasses.Field) -> bool:
        value = getattr(cfg, field.name)
        return type(value) is type(field.default) and value == field.default

    return cls(**{field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg) if not is_default(field)})


def is_number(value: Any) -> bool:
    """A number that Python knows, and not a tracer, a flag or a word."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)
