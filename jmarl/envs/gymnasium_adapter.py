"""Gymnasium's environments of one agent, and whatever is registered with it, by name: N = 1."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jmarl.envs import host
from jmarl.envs.slots import HostStep, Seen
from jmarl.types import Env, EnvSpec

INSTALL = 'pip install "jmarl[gymnasium]"'
AGENT = "agent_0"
_MOST_CHOICES = 4096  # of a MultiDiscrete space, whose combinations are the actions


def names() -> list[str]:
    """What is registered with Gymnasium, but for its environments in JAX and of outdated versions; [] without it."""
    try:
        import gymnasium
    except ImportError:
        return []
    known = gymnasium.registry.values()
    newest: dict[str, int] = {}
    for spec in known:
        newest[spec.name] = max(spec.version or 0, newest.get(spec.name, 0))
    ids = [spec.id for spec in known if (spec.version or 0) == newest[spec.name] and spec.namespace is None]
    return [f"gymnasium:{name}" for name in ids]


def make(name: str, options: dict[str, Any], *, agent_ids: bool, time_limit: str, flatten: bool) -> Env:
    """Gymnasium's environment `name`. Options are arguments of `gymnasium.make`, and those of `from_host`."""
    try:
        import gymnasium
    except ImportError as error:
        raise ImportError(f"gymnasium:{name} needs Gymnasium: {INSTALL}.") from error

    where, options = host.split_options(options)

    def make_one() -> Single:
        return Single(gymnasium.make(name, **options), f"gymnasium:{name}", flatten=flatten)

    try:
        return host.from_host(make_one, **where, agent_ids=agent_ids, time_limit=time_limit)
    except gymnasium.error.Error as error:
        raise ValueError(f"gymnasium:{name}: {error}") from error


class Single:
    """A `gymnasium.Env` as a `HostEnv` of one agent.

    Views are read as by `Reader`, actions as by `action_codes`.
    """

    info = ()

    def __init__(self, env: Any, name: str, *, flatten: bool = False):
        self.env = env
        self._read = Reader(env.observation_space, name, flatten)
        self._decode, actions = action_codes(env.action_space, name)
        limit = None if env.spec is None else env.spec.max_episode_steps
        shape = self._read.shape
        self.spec = EnvSpec(
            name=name, agents=(AGENT,), obs_shape=shape, state_shape=shape, max_steps=limit, always_act=True, **actions
        )

    def reset(self, seed: int) -> Seen:
        view, info = self.env.reset(seed=seed)
        return self._seen(view, info)

    def step(self, action: np.ndarray) -> HostStep:
        view, reward, terminated, truncated, info = self.env.step(self._decode(action[0]))
        return HostStep(self._seen(view, info), reward, terminated, bool(terminated or truncated))

    def close(self) -> None:
        self.env.close()

    def _seen(self, view: Any, info: dict[str, Any]) -> Seen:
        view, mask = self._read(view, info)
        return Seen(view[None], action_mask=None if mask is None else mask[None])


class Reader:
    """`(view, info) -> (array, action mask or None)` for views of one space.

    Vectors by `gymnasium.spaces.flatten`: dicts in the order of their sorted keys, tuples in theirs, discrete values
    one-hot. Boxes of three axes stay images, unless `flatten`. The mask is `info["action_mask"]`, or the part of that
    name of a dict whose other part is "observation".

    Attributes:
      shape: of the array.
    """

    def __init__(self, space: Any, name: str, flatten: bool):
        from gymnasium import spaces

        self._holds_mask = isinstance(space, spaces.Dict) and set(space.keys()) == {"observation", "action_mask"}
        self._space = space["observation"] if self._holds_mask else space
        self._is_box = isinstance(self._space, spaces.Box)
        is_image = self._is_box and len(self._space.shape) == 3 and not flatten
        try:
            self.shape = self._space.shape if is_image else (spaces.flatdim(self._space),)
        except (NotImplementedError, ValueError) as error:
            raise ValueError(f"{name} has the observation space {space}, which has no fixed size.") from error

    def __call__(self, view: Any, info: dict[str, Any]) -> tuple[np.ndarray, np.ndarray | None]:
        from gymnasium import spaces

        mask = info.get("action_mask")
        if self._holds_mask:
            view, mask = view["observation"], view["action_mask"]
        if not self._is_box:  # which `flatten` takes as long for as CartPole takes for a step
            view = spaces.flatten(self._space, view)
        return np.asarray(view, np.float32).reshape(self.shape), None if mask is None else np.asarray(
            mask, bool
        ).reshape(-1)


def action_codes(space: Any, name: str) -> tuple[Callable[[np.ndarray], Any], dict[str, Any]]:
    """`(code -> action, facts for the spec of one agent)` of a space of Gymnasium."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        return lambda action: int(action) + start, {"num_actions": int(space.n), "action_sizes": (int(space.n),)}
    if isinstance(space, spaces.MultiDiscrete):
        parts, least = space.nvec.reshape(-1), space.start
        num = math.prod(parts.tolist())
        if num > _MOST_CHOICES:
            raise ValueError(f"{name} has {num} combinations of actions, {space}: jmarl takes up to {_MOST_CHOICES}.")

        def combination(action: Any) -> np.ndarray:
            return np.array(np.unravel_index(int(action), parts)).reshape(space.shape) + least

        return combination, {"num_actions": num, "action_sizes": (num,)}
    if isinstance(space, spaces.Box) and space.is_bounded():
        low, high = (tuple(np.asarray(x, float).reshape(-1).tolist()) for x in (space.low, space.high))
        facts = {"action_size": len(low), "action_sizes": (len(low),), "action_low": (low,), "action_high": (high,)}
        return lambda action: np.asarray(action, space.dtype).reshape(space.shape), facts
    raise ValueError(f"{name} has the action space {space}: jmarl knows Discrete, MultiDiscrete and bounded Box ones.")
