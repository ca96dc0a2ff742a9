"""Algorithms and environments by name: jmarl's, and the user's own as `module:function` or `path/file.py:function`.

Naming a function is running its code. So only the command line may name one: what a run folder says is compared with
that, and refused where the user did not say it too. A run folder may come from anybody.
"""

import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jmarl
from jmarl.cli import composed
from jmarl.cli.errors import UsageError, nearest
from jmarl.envs import gymnasium_adapter, pettingzoo_adapter
from jmarl.types import Algorithm, Env, EnvSpec

ALGORITHMS: dict[str, Algorithm] = {
    "ippo": jmarl.ippo,
    "mappo": jmarl.mappo,
    "iql": jmarl.iql,
    "vdn": jmarl.vdn,
    "qmix": jmarl.qmix,
    "cw_qmix": jmarl.cw_qmix,
    "ow_qmix": jmarl.ow_qmix,
    "qplex": jmarl.qplex,
    "qtran": jmarl.qtran,
    "pqn_vdn": jmarl.pqn_vdn,
    "pqn_iql": jmarl.pqn_iql,
    "pqn_qmix": jmarl.pqn_qmix,
    "iddpg": jmarl.iddpg,
    "maddpg": jmarl.maddpg,
    "itd3": jmarl.itd3,
    "matd3": jmarl.matd3,
    "facmac": jmarl.facmac,
    "hatd3": jmarl.hatd3,
    "isac": jmarl.isac,
    "masac": jmarl.masac,
    "hasac": jmarl.hasac,
    "coma": jmarl.coma,
    "ia2c": jmarl.ia2c,
    "maa2c": jmarl.maa2c,
    "happo": jmarl.happo,
    "haa2c": jmarl.haa2c,
    "hatrpo": jmarl.hatrpo,
    "mat": jmarl.mat,
    "sable": jmarl.sable,
    "vdac_sum": jmarl.vdac_sum,
    "vdac_mix": jmarl.vdac_mix,
    "random": jmarl.random_policy,
}


def is_own(name: str) -> bool:
    """Whether a name is that of a function of the user, or holds one: any colon of a composed name may be."""
    return ":" in name and (composed.is_composed(name) or name.partition(":")[0] not in jmarl.envs.PACKAGES)


def runs_code(name: str) -> bool:
    """Whether a name says what to import: a function of the user, or a module that makes or registers environments."""
    package, _, within = name.partition(":")
    if package == "pettingzoo" and not composed.is_composed(name):
        return within.split(".")[0] not in pettingzoo_adapter.FAMILIES
    if package == "gymnasium" and within.split(":")[0] in gymnasium_adapter.FAMILIES:
        return False
    return is_own(name) or (package in jmarl.envs.PACKAGES and ":" in within)


def find_algorithm(name: str) -> Algorithm:
    """One of `ALGORITHMS`, one of them within combinators, or the user's: `(spec, cfg) -> Learner`."""
    if composed.is_composed(name):
        return composed.algorithm(name, find_algorithm)
    if is_own(name):
        return _load(name)
    if name not in ALGORITHMS:
        raise UsageError(f"no algorithm is called {name!r}: {nearest(name, ALGORITHMS)}")
    return ALGORITHMS[name]


def default_config(name: str) -> Any:
    """The config of an algorithm, with its defaults."""
    return composed.config(name, lambda name: config_class(name)(), config_class)


def config_class(name: str) -> type:
    """The class of an algorithm's config: the annotation of its second parameter, or the first of several in it."""
    algorithm = find_algorithm(name)
    parameters = list(inspect.signature(algorithm).parameters)
    hints = typing.get_type_hints(inspect.unwrap(algorithm))
    cls = hints.get(parameters[1]) if len(parameters) > 1 else None
    cls = next(iter(typing.get_args(cls)), cls) if isinstance(cls, types.UnionType) else cls
    if not isinstance(cls, type) or not hasattr(cls, "__dataclass_fields__"):
        raise UsageError(
            f"{name} does not say which config it takes: annotate its second parameter with a dataclass, as in "
            "def algorithm(spec: EnvSpec, cfg: MyConfig)."
        )
    return cls


def learns_from(name: str) -> str:
    """Which batches an algorithm takes, as its `Learner` says for the first kind of actions that it knows."""
    if composed.is_composed(name):
        return "replay" if "replay" in map(learns_from, composed.innermost(name)) else "rollouts"
    algorithm, config = find_algorithm(name), default_config(name)
    common: Mapping[str, Any] = {"name": "", "agents": ("a", "b"), "obs_shape": (1,), "state_shape": (2,)}
    bounds = ((-1.0,), (-1.0,)), ((1.0,), (1.0,))
    discrete = EnvSpec(**common, num_actions=2)
    continuous = EnvSpec(**common, action_size=1, action_low=bounds[0], action_high=bounds[1])
    try:
        return algorithm(discrete, config).learns_from
    except (ValueError, TypeError):
        return algorithm(continuous, config).learns_from


def make_env(name: str, env_kwargs: Mapping[str, Any]) -> Env:
    """An environment of `jmarl.make`, or what the user's function returns; `env_kwargs` are its arguments."""
    require_no_pickle(env_kwargs)
    if not is_own(name):
        return jmarl.make(name, **env_kwargs)
    env = _load(name)(**env_kwargs)
    if not isinstance(env, Env):
        raise UsageError(f"{name} returned {type(env).__name__}: it must return a jmarl.types.Env.")
    return jmarl.envs.check_env(env)


def require_no_pickle(env_kwargs: Any) -> None:
    """Refuses what makes JaxNav read files of pickle, at any depth: such a file may run any code."""
    if isinstance(env_kwargs, Mapping):
        if "dir_path" in env_kwargs:
            raise UsageError(
                "dir_path, from which JaxNav loads files of pickle, is refused here: such a file may run any code. "
                "Make the environment in a function of your own: --env file.py:function."
            )
        env_kwargs = list(env_kwargs.values())
    if isinstance(env_kwargs, list | tuple):
        for value in env_kwargs:
            require_no_pickle(value)


def require_named(name: str, given: Collection[str] | None, way: str) -> str:
    """What to import for a name that a file holds: the name that the user gave for it, and never another.

    Args:
      name: of an algorithm or an environment, from a file.
      given: what the user typed; None: `name` itself was typed.
      way: how to type it, for the sentence.
    """
    if given is None or not runs_code(name):
        return name
    for typed in given:  # the folder of a file may have another name by now
        if Path(typed).name == Path(name).name:
            return typed
    raise UsageError(f"its code is {name}, which is not run unless you name it yourself: add {way} if you trust it.")


def _load(name: str) -> Callable[..., Any]:
    where, _, function = name.rpartition(":")
    if not where or not function:
        raise UsageError(f"{name!r} names no function: write module:function or path/file.py:function.")
    module = _load_file(Path(where)) if where.endswith(".py") else _load_module(where)
    if not callable(found := getattr(module, function, None)):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UsageError(f"{where} has no function {function!r}: {nearest(function, names)}")
    return found


def _load_module(name: str) -> Any:
    if os.getcwd() not in sys.path:  # an installed command does not look there by itself, as python -m does
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # it is there, but something that it imports is not
        raise UsageError(f"there is no module {name}: name one that python can import here, or a file.") from None


def _load_file(path: Path) -> Any:
    path = path.resolve()
    name = f"jmarl_own_{path.stem}"
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == str(path):
        return loaded
    if not path.is_file():
        raise UsageError(f"there is no file {path}.")
    if str(path.parent) not in sys.path:  # for what it imports from beside it
        sys.path.append(str(path.parent))
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for their module there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    with contextlib.suppress(ImportError):  # no other process finds it by its name: workers get what it holds
        import cloudpickle

        cloudpickle.register_pickle_by_value(module)
    return module
