"""EnvPool's environments of one agent, by name: whole batches are stepped in threads of C++."""

import warnings
from collections.abc import Sequence
from typing import Any

from jmarl.envs import gymnasium_adapter, host, stacked, vectors
from jmarl.types import Env

INSTALL = 'pip install "jmarl[envpool]"'
_NO_LIMIT = 2**31 - 1
# Shown where all would be too many: 1,651 in EnvPool 1.2.
_SOME = (
    "CartPole-v1",
    "Pendulum-v1",
    "LunarLander-v3",
    "BipedalWalker-v3",
    "CarRacing-v3",
    "HalfCheetah-v5",
    "Pong-v5",
)


def names() -> list[str]:
    """Some of EnvPool's environments, for a list of those of all packages; nothing is imported."""
    return [f"envpool:{name}" for name in _SOME]


def all_names() -> list[str]:
    """Everything that EnvPool can make here."""
    return [f"envpool:{name}" for name in _import("").list_all_envs()]


def make(name: str, options: dict[str, Any], *, agent_ids: bool, time_limit: str, flatten: bool) -> Env:
    """EnvPool's environment `name`. Options are those of `envpool.make`, such as `num_threads`, `max_episode_steps`.

    EnvPool takes seeds only as it makes a pool, so each evaluation has one of its own.
    """
    envpool = _import(name)
    if name not in (known := envpool.list_all_envs()):
        raise stacked.unknown("environment of EnvPool", name, known, ValueError)

    def make_pool(seeds: Sequence[int]) -> Any:
        with warnings.catch_warnings():  # of Gymnasium, about float64 bounds of float32 views
            warnings.simplefilter("ignore")
            pool = envpool.make_gymnasium(name, num_envs=len(seeds), seed=list(seeds), **options)
            pool.observation_space  # noqa: B018  which is made, and warned of, as it is first read
            return pool

    for option in ("num_envs", "batch_size", "seed"):
        if option in options:
            raise TypeError(f"envpool:{name} takes no {option}: it is as many environments as are played side by side.")
    try:
        one = make_pool([0])
    except (AssertionError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"envpool:{name} with {options}: {error}") from error
    if one.config.get("max_num_players", 1) > 1:
        raise ValueError(f"envpool:{name} has several players, and jmarl takes EnvPool's environments of one.")
    spaces = one.single_observation_space, one.single_action_space
    limit = one.config.get("max_episode_steps", _NO_LIMIT)
    limit = None if limit in (0, _NO_LIMIT) else limit
    reading = gymnasium_adapter.reading_of(*spaces, f"envpool:{name}", limit, flatten=flatten, moved=True)
    one.close()
    pool = vectors.VectorPool(make_pool, reading, is_seeded_once=True)
    return host.from_pool(pool, agent_ids=agent_ids, time_limit=time_limit)


def _import(name: str) -> Any:
    try:
        import envpool
    except ImportError as error:
        raise ImportError(f"envpool:{name} needs EnvPool: {INSTALL}.") from error
    return envpool
