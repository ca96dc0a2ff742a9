"""What there is: `jmarl envs`, `jmarl algorithms`, `jmarl presets`."""

import dataclasses
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import tyro

import jmarl
from jmarl import configs
from jmarl.cli import own
from jmarl.cli.errors import UsageError, nearest, require_at_least_one, require_free_file, usage_errors
from jmarl.cli.options import key_values, preset_of
from jmarl.envs import (
    envpool_adapter,
    football_adapter,
    gymnasium_adapter,
    gymnax_adapter,
    jaxmarl_adapter,
    jumanji_adapter,
    pettingzoo_adapter,
    pgx_adapter,
)


def main(argv: Sequence[str] | None = None, prog: str = "jmarl envs") -> None:
    """The command line of the three: the last word of `prog` says which."""
    commands: dict[str, Any] = {"envs": list_envs, "algorithms": list_algorithms, "presets": list_presets}
    with usage_errors():
        tyro.cli(commands[prog.split()[-1]], prog=prog, args=argv)


def list_envs(
    name: tyro.conf.Positional[str] = "",
    env_kwargs: tuple[str, ...] = (),
    render: Path | None = None,
    window: bool = False,
    steps: int = 200,
) -> None:
    """Names of all environments, or facts about one.

    Args:
      name: an environment, or a function of your own: module:function or file.py:function; envpool: lists all of its.
      env_kwargs: KEY=VALUE for it.
      render: play random actions into this film, .gif or .mp4.
      window: play random actions in a window, in real time: Gymnasium's and PettingZoo's.
      steps: at most so many of them.
    """
    if not name:
        for title, names in _names().items():
            print(f"{title}\n" + "".join(f"  {env}\n" for env in names))
        return
    if name in ALL_NAMES:
        try:
            print("\n".join(ALL_NAMES[name]()))
        except ImportError as error:
            raise UsageError(str(error)) from error
        return
    known = [env for names in _names().values() for env in names]
    if ":" not in name and name not in known and not jumanji_adapter.is_name(name):
        raise UsageError(f"no environment is called {name!r}: {nearest(name, known)}")
    try:
        spec = own.make_env(name, key_values(env_kwargs)).spec
    except (ValueError, TypeError, ImportError) as error:
        raise UsageError(str(error)) from error
    for field, value in spec._asdict().items():
        print(f"{field:16s}{value}")
    if render is not None or window:
        _play_at_random(name, key_values(env_kwargs), render, steps, window)


def _play_at_random(name: str, env_kwargs: dict[str, Any], path: Path | None, steps: int, window: bool) -> None:
    from jmarl.cli import trial  # pictures take time to import

    if window:
        trial.require_window(name, path)
    if path is not None:
        trial.require_film(path)
        require_free_file(path, False, "--render")
    require_at_least_one(steps=steps)
    env = trial.visible_env(name, env_kwargs, steps, window=window)
    learner = jmarl.random_policy(env.spec, jmarl.RandomConfig())
    key_init, key_play = jax.random.split(jax.random.key(0))
    played = trial.play(env, learner, learner.init(key_init), key_play, 1, window=window)
    trial.tell(played, env.spec.agents)
    if path is not None:
        trial.film(played, path, name, None)


# All that a package can make, where the list of all packages has some.
ALL_NAMES = {"envpool:": envpool_adapter.all_names}


def _names() -> dict[str, list[str]]:
    return {
        "JaxMARL": jaxmarl_adapter.names(),
        "gymnax, one agent": gymnax_adapter.names(),
        f"Jumanji{_needs('jumanji', jumanji_adapter.INSTALL)}": jumanji_adapter.names(),
        f"Gymnasium, one agent{_needs('gymnasium', gymnasium_adapter.INSTALL)}": gymnasium_adapter.names(),
        f"EnvPool, one agent, some of many: jmarl envs envpool:{_needs('envpool', envpool_adapter.INSTALL)}": (
            envpool_adapter.names()
        ),
        f"PettingZoo{_needs('mpe2', pettingzoo_adapter.INSTALL)}": pettingzoo_adapter.names(),
        f"Google Research Football{_needs('gfootball', football_adapter.INSTALL)}": football_adapter.names(),
        f"Pgx, games with turns{_needs('pgx', pgx_adapter.INSTALL)}": pgx_adapter.names(),
        "jmarl": ["predator_prey"],
    }


def _needs(module: str, install: str) -> str:
    """What to install for a package that is not here; nothing is imported."""
    is_here = sys.modules.get(module, module) is not None and importlib.util.find_spec(module) is not None
    return "" if is_here else f", not installed: {install}"


def list_algorithms(name: tyro.conf.Positional[str] = "") -> None:
    """Names of all algorithms, or the hyperparameters of one.

    Args:
      name: an algorithm, or a function of your own: module:function or file.py:function.
    """
    if name:
        cls: Any = own.config_class(name)
        for field, text in configs.explain(cls).items():
            default = cls.__dataclass_fields__[field].default
            print(f"{field:24s}{default!s:14s}{text}")
        return
    for known, algorithm in own.ALGORITHMS.items():
        print(f"{known:10s}{(algorithm.__doc__ or '').strip().splitlines()[0]}")


def list_presets(
    algorithm: tyro.conf.Positional[str] = "mappo", env: str = "MPE_simple_spread_v3", preset: str = "default"
) -> None:
    """The settings that a run begins with, unless options say otherwise.

    Args:
      algorithm: its name.
      env: the environment.
      preset: default, or quick.
    """
    for field, value in preset_of(algorithm, env, preset)._asdict().items():
        if dataclasses.is_dataclass(value):
            for name, _ in configs.fields(value):
                print(f"  {name:24s}{configs.get(value, name)}")
        elif field == "replay" and value is not None:
            for name, number in value._asdict().items():
                print(f"  {name:24s}{number}")
        else:
            print(f"{field:26s}{value}")
