"""PettingZoo's parallel environments, by the module that makes them or from a function."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from jmarl.envs import gymnasium_adapter, host, slots
from jmarl.envs.slots import HostStep, Seen
from jmarl.envs.stacked import common_dtype, teams_of
from jmarl.types import Env, EnvSpec

INSTALL = 'pip install "jmarl[pettingzoo]"'
FAMILIES = ("mpe2", "atari", "butterfly", "classic", "sisl")  # MPE2, and what PettingZoo itself holds


_SOME = ("adversary_v3", "crypto_v3", "push_v3", "reference_v3", "speaker_listener_v4", "spread_v3", "tag_v3")


def names() -> list[str]:
    """Those of MPE2; others are named by their modules alike."""
    return [f"pettingzoo:mpe2.simple_{name}" for name in _SOME]


def make(name: str, options: dict[str, Any], *, agent_ids: bool, time_limit: str, flatten: bool) -> Env:
    """The environment of a module such as "mpe2.simple_spread_v3" or "butterfly.pistonball_v6".

    Options are arguments of the module's `parallel_env`, and `max_steps`, `workers`, `on` and `timeout_s`,
    see `from_pettingzoo`.
    """
    where, options = host.split_options(options)
    max_steps, options = options.get("max_steps"), {k: v for k, v in options.items() if k != "max_steps"}
    constructor = _constructor(name)
    return from_pettingzoo(
        lambda: constructor(**options),
        name=f"pettingzoo:{name}",
        max_steps=max_steps,
        **where,
        agent_ids=agent_ids,
        time_limit=time_limit,
        flatten=flatten,
    )


def from_pettingzoo(
    make: Callable[[], Any],
    *,
    name: str | None = None,
    max_steps: int | None = None,
    workers: int = 0,
    on: str = "processes",
    timeout_s: float = 60.0,
    agent_ids: bool = False,
    time_limit: str = "truncated",
    flatten: bool = False,
) -> Env:
    """Environments with PettingZoo's parallel interface, which `make` makes as many of as are played side by side.

    Views are vectors by `gymnasium.spaces.flatten`, padded to the widest: dicts in the order of their sorted keys,
    tuples in theirs, discrete values one-hot. Boxes of three axes stay images, unless `flatten`. Legal actions are
    read from `info[agent]["action_mask"]`, or from a view that is a dict of "observation" and "action_mask". The
    global state is `env.state()`, or all views joined where that is not written. An agent acts while it is in
    `env.agents`; its return ends where it terminates. An episode ends with the last of its agents, and truncates
    those who did not terminate.

    Args:
      make: makes one environment, wrappers included.
      name: for the spec; the environment's own name if None.
      max_steps: of the longest episode, which PettingZoo does not say; by default `env.unwrapped.max_cycles`, or
        unknown.
      workers, on, timeout_s: see `from_host`.
      agent_ids, time_limit, flatten: see `jmarl.make`.

    Example:
      >>> from mpe2 import simple_spread_v3
      >>> from_pettingzoo(lambda: simple_spread_v3.parallel_env(N=2, max_cycles=10)).spec.obs_shape
      (12,)
    """

    def make_one() -> Parallel:
        return Parallel(make(), name, max_steps=max_steps, flatten=flatten)

    where: dict[str, Any] = {"workers": workers, "on": on, "timeout_s": timeout_s}
    return host.from_host(make_one, **where, agent_ids=agent_ids, time_limit=time_limit)


def _constructor(name: str) -> Callable[..., Any]:
    try:
        import pettingzoo
    except ImportError as error:
        raise ImportError(f"pettingzoo:{name} needs PettingZoo: {INSTALL}.") from error
    module_name = f"pettingzoo.{name}" if name.split(".")[0] in FAMILIES[1:] else name
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name == module_name != name.split(".")[0]:
            raise ValueError(f"pettingzoo:{name} names no module: python finds no {module_name}.") from error
        raise ImportError(f"pettingzoo:{name} needs {error.name}, which is not installed: {INSTALL}.") from error
    if hasattr(module, "parallel_env"):
        return module.parallel_env
    if hasattr(module, "env"):
        return lambda **options: pettingzoo.utils.conversions.aec_to_parallel(module.env(**options))
    raise ValueError(f"pettingzoo:{name} makes no environment: {module_name} has neither parallel_env nor env.")


class Parallel:
    """An environment of PettingZoo's as a `HostEnv`, see `from_pettingzoo`."""

    info = ()

    def __init__(self, env: Any, name: str | None = None, *, max_steps: int | None = None, flatten: bool = False):
        self.env, self._agents = env, tuple(env.possible_agents)
        self.fps = getattr(env, "metadata", {}).get("render_fps", 10)
        name = name or str(env)
        readers = [gymnasium_adapter.Reader(env.observation_space(a), f"{name}, {a}", flatten) for a in self._agents]
        codes = [gymnasium_adapter.action_codes(env.action_space(a), f"{name}, {a}") for a in self._agents]
        self._readers = dict(zip(self._agents, readers, strict=True))
        self._decode = {agent: code for agent, (code, _) in zip(self._agents, codes, strict=True)}
        shapes = [reader.shape for reader in readers]
        is_image = len(shapes[0]) == 3
        if len({len(shape) for shape in shapes}) > 1 or (is_image and len(set(shapes)) > 1):
            raise ValueError(f"{name} shows images of the shapes {shapes}: pass flatten=True to get padded vectors.")
        obs_shape = shapes[0] if is_image else (max(shape[0] for shape in shapes),)
        self._size = obs_shape[-1]
        limit = getattr(env.unwrapped, "max_cycles", None) if max_steps is None else max_steps
        self.spec = EnvSpec(
            name=name,
            agents=self._agents,
            obs_shape=obs_shape,
            state_shape=(1,),
            obs_sizes=() if is_image else tuple(shape[0] for shape in shapes),
            max_steps=limit,
            teams=teams_of(self._agents),
            **_joint(name, [facts for _, facts in codes]),
        )
        views, infos = env.reset(seed=0)
        self._has_state = self._state() is not None
        dtypes = [np.empty(0, reader.dtype) for reader in readers]
        self.spec = self.spec._replace(obs_dtype="float32" if self._has_state else common_dtype(dtypes))
        first = self._seen(views, infos, set(self._agents))
        state = slots.joined(first.agents) if first.state is None else first.state
        self.spec = self.spec._replace(state_shape=state.shape)

    def reset(self, seed: int) -> Seen:
        views, infos = self.env.reset(seed=seed)
        return self._seen(views, infos, set(self.env.agents))

    def step(self, action: np.ndarray) -> HostStep:
        actions, present = {}, self.env.agents  # which wrappers take a while to look up
        for i, agent in enumerate(self._agents):
            if agent in present:
                size = self.spec.action_sizes[i]
                chosen = np.minimum(action[i], size - 1) if self.spec.is_discrete else action[i, :size]
                actions[agent] = self._decode[agent](chosen)
        views, rewards, terminated, truncated, infos = self.env.step(actions)
        last = not self.env.agents or all(terminated.get(a) or truncated.get(a) for a in actions)
        # Nobody is in `env.agents` after the last step, and whoever is truncated there is still to be bootstrapped.
        acts = {a for a in actions if not terminated.get(a)} if last else set(self.env.agents)
        return HostStep(
            self._seen(views, infos, acts),
            [rewards.get(agent, 0.0) for agent in self._agents],
            [bool(terminated.get(agent, False)) for agent in self._agents],
            last,
        )

    def render(self) -> Any:
        """`[H, W, 3]`, where the environment was made with render_mode="rgb_array"."""
        return self.env.render()

    def close(self) -> None:
        self.env.close()

    def _state(self) -> np.ndarray | None:
        try:
            return np.asarray(self.env.state(), np.float32).reshape(-1)
        except (NotImplementedError, AttributeError):
            return None

    def _seen(self, views: dict[str, Any], infos: dict[str, Any], acts: set[str]) -> Seen:
        rows = np.zeros((len(self._agents), *self.spec.obs_shape), self.spec.obs_dtype)
        num_actions = self.spec.num_actions
        legal = None if num_actions is None else np.zeros((len(self._agents), num_actions), bool)
        for i, agent in enumerate(self._agents):
            mask = None
            if agent in views:
                view, mask = self._readers[agent](views[agent], infos.get(agent, {}))
                rows[i, ..., : view.shape[-1]] = view
            if legal is not None:
                legal[i, : self.spec.action_sizes[i]] = True if mask is None else mask
        state = self._state() if self._has_state else None
        return Seen(rows, state, legal, np.array([agent in acts for agent in self._agents]))


def _joint(name: str, each: list[dict[str, Any]]) -> dict[str, Any]:
    """Facts about everybody's actions from those about each one's, padded to the widest."""
    if len({"num_actions" in facts for facts in each}) > 1:
        raise ValueError(f"{name} has agents of discrete and agents of continuous actions: jmarl takes one kind.")
    sizes = tuple(facts["action_sizes"][0] for facts in each)
    if "num_actions" in each[0]:
        return {"num_actions": max(sizes), "action_sizes": sizes}

    def padded(bound: tuple[float, ...]) -> tuple[float, ...]:
        return (*bound, *[bound[0]] * (max(sizes) - len(bound)))  # so that squashing stays well defined there

    low, high = (tuple(padded(facts[which][0]) for facts in each) for which in ("action_low", "action_high"))
    return {"action_size": max(sizes), "action_sizes": sizes, "action_low": low, "action_high": high}
