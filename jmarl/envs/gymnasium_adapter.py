"""Gymnasium's environments, and whatever is registered with it, by name: of one agent, or of one for each space."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jmarl.envs import host, stacked, vectors, workers
from jmarl.envs.slots import HostStep, Seen
from jmarl.types import Env, EnvSpec

INSTALL = 'pip install "jmarl[gymnasium]"'
AGENT = "agent_0"
FAMILIES = ("lbforaging", "rware")  # packages that register environments, and are known not to do harm
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
    """Gymnasium's environment `name`. Options are arguments of `gymnasium.make`, `vector`, and those of `from_host`.

    Where actions are a tuple of spaces, as in lbforaging and rware, each of them is an agent's: see `Several`.
    """
    try:
        import gymnasium
    except ImportError as error:
        raise ImportError(f"gymnasium:{name} needs Gymnasium: {INSTALL}.") from error

    where, options = host.split_options(options)
    mode, options = options.get("vector"), {k: v for k, v in options.items() if k != "vector"}
    views: dict[str, Any] = {"agent_ids": agent_ids, "time_limit": time_limit}
    if mode is not None:
        return _make_vector(name, mode, where, options, flatten, views)

    def make_one() -> Any:
        env = gymnasium.make(name, **options)
        if not isinstance(env.action_space, gymnasium.spaces.Tuple):
            return Single(env, f"gymnasium:{name}", flatten=flatten)

        from jmarl.envs import pettingzoo_adapter  # which imports this module

        # Gymnasium's checker tells with each step that the rewards are several.
        env = gymnasium.make(name, **{"disable_env_checker": True, **options})
        several = Several(env, f"gymnasium:{name}")
        return pettingzoo_adapter.Parallel(several, several.name, max_steps=several.max_steps, flatten=flatten)

    try:
        return host.from_host(make_one, **where, **views)
    except gymnasium.error.Error as error:
        raise ValueError(f"gymnasium:{name}: {error}") from error


VECTORS = ("sync", "async")


def _make_vector(
    name: str, mode: Any, where: dict[str, Any], options: dict[str, Any], flatten: bool, views: dict[str, Any]
) -> Env:
    import gymnasium

    if mode not in VECTORS:
        raise ValueError(f"vector={mode!r} is not one of {VECTORS}.")
    if where:
        raise TypeError(f"{min(where)} is of environments that are stepped one by one: leave out vector={mode!r}.")
    # Jax has threads, which a fork would not survive.
    how: dict[str, Any] = {"autoreset_mode": "SameStep", **({"context": "spawn"} if mode == "async" else {})}

    def make_vector(num_envs: int) -> Any:
        return gymnasium.make_vec(
            name, num_envs, vectorization_mode=mode, vector_kwargs=how, wrappers=[_following], **options
        )

    try:
        one = gymnasium.make(name, **options)
    except gymnasium.error.Error as error:
        raise ValueError(f"gymnasium:{name}: {error}") from error
    limit = None if one.spec is None else one.spec.max_episode_steps
    reading = reading_of(one.observation_space, one.action_space, f"gymnasium:{name}", limit, flatten=flatten)
    one.close()
    return host.from_pool(vectors.VectorPool(lambda seeds: make_vector(len(seeds)), reading), **views)


def _following(env: Any) -> Any:
    """The environment as it is; the process that it is made in ends with the run."""
    workers.follow_parent()
    return env


def from_gymnasium_vector(
    make: Any,
    *,
    name: str | None = None,
    max_steps: int | None = None,
    agent_ids: bool = False,
    time_limit: str = "truncated",
    flatten: bool = False,
) -> Env:
    """Vectors with the interface of `gymnasium.vector.VectorEnv`, of single agents: N = 1.

    All three ways in which Gymnasium begins the next episode are understood, and come to the same: the true last view,
    and no step that leads from one episode to the next. A vector that resets on the next step, or never, must know
    `reset(options={"reset_mask": ..})`, as Gymnasium's own two do. Views and actions are read as by
    "gymnasium:NAME", see `jmarl.make`.

    Args:
      make: `(num_envs) -> vector`; it makes one for each number of environments that are played side by side, and one
        of a single environment to ask for its spaces.
      name: for the spec; "gymnasium" and the vector's own name if None.
      max_steps: of the longest episode; by default what the vector's or its first environment's spec says, or unknown.
      agent_ids, time_limit, flatten: see `jmarl.make`.

    Example:
      >>> import gymnasium
      >>> def make(num_envs):
      ...     return gymnasium.make_vec("CartPole-v1", num_envs, vectorization_mode="sync")
      >>> from_gymnasium_vector(make).spec.max_steps
      500
    """
    if not callable(make):
        raise TypeError(
            f"make={make!r} is no function: give one that makes as many environments as it is told, for training, for "
            f"evaluation: from_gymnasium_vector(lambda num_envs: ..)."
        )
    one = make(1)
    spec = one.spec or next((env.spec for env in getattr(one, "envs", ())), None)
    name = name or (f"gymnasium:{spec.id}" if spec is not None else type(one).__name__)
    limit = getattr(spec, "max_episode_steps", None) if max_steps is None else max_steps
    reading = reading_of(one.single_observation_space, one.single_action_space, name, limit, flatten=flatten)
    one.close()
    pool = vectors.VectorPool(lambda seeds: make(len(seeds)), reading)
    return host.from_pool(pool, agent_ids=agent_ids, time_limit=time_limit)


def reading_of(
    view_space: Any, action_space: Any, name: str, max_steps: int | None, *, flatten: bool = False, moved: bool = False
) -> vectors.Reading:
    """How to read vectors of environments with these spaces.

    Args:
      view_space, action_space: of one environment.
      name, max_steps: for the spec.
      flatten: images as vectors.
      moved: images whose channels come first get them last.
    """
    from gymnasium import spaces
    from gymnasium.vector.utils import batch_space, iterate

    read, decode, spec = _of_one(view_space, action_space, name, max_steps, flatten)
    is_moved = moved and len(read.shape) == 3 and read.shape[0] < read.shape[2]
    if is_moved:
        shape = (*read.shape[1:], read.shape[0])
        spec = spec._replace(obs_shape=shape, state_shape=shape)

    def stack(rows: list[tuple[np.ndarray, np.ndarray | None]]) -> tuple[np.ndarray, np.ndarray | None]:
        masks = [mask for _, mask in rows]
        is_known = any(mask is not None for mask in masks)
        legal = np.ones(spec.num_actions or 0, bool)
        views = placed(np.stack([view for view, _ in rows]))
        return views, np.stack([legal if mask is None else mask for mask in masks]) if is_known else None

    def placed(views: np.ndarray) -> np.ndarray:
        return np.moveaxis(views, 1, -1) if is_moved else views

    def view(views: Any, infos: dict[str, Any], num: int) -> tuple[np.ndarray, np.ndarray | None]:
        if isinstance(read.space, spaces.Box) and read.space is view_space:
            mask = infos.get("action_mask")
            return placed(
                np.asarray(views, read.dtype).reshape(num, *read.shape)
            ), None if mask is None else np.asarray(mask, bool).reshape(num, -1)
        masks = infos.get("action_mask", [None] * num)
        each = zip(iterate(batch_space(view_space, num), views), masks, strict=True)
        return stack([read(one, {"action_mask": mask}) for one, mask in each])

    def final(infos: dict[str, Any], ended: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        masks = infos.get("final_info", {}).get("action_mask")
        return stack(
            [read(infos["final_obs"][i], {"action_mask": None if masks is None else masks[i]}) for i in ended.tolist()]
        )

    def action(codes: np.ndarray) -> Any:
        if isinstance(action_space, spaces.Discrete):
            return codes.astype(action_space.dtype) + action_space.start
        if isinstance(action_space, spaces.Box):
            return codes.astype(action_space.dtype).reshape(len(codes), *action_space.shape)
        return np.stack([decode(code) for code in codes])

    return vectors.Reading(spec, view, final, action)


def _of_one(
    view_space: Any, action_space: Any, name: str, max_steps: int | None, flatten: bool
) -> tuple[Any, Any, Any]:
    """`(reader, decode, spec)` of an environment with these spaces."""
    read = Reader(view_space, name, flatten)
    decode, actions = action_codes(action_space, name)
    shape = read.shape
    spec = EnvSpec(
        name=name,
        agents=(AGENT,),
        obs_shape=shape,
        state_shape=shape,
        max_steps=max_steps,
        always_act=True,
        obs_dtype=read.dtype,
        **actions,
    )
    return read, decode, spec


class Single:
    """A `gymnasium.Env` as a `HostEnv` of one agent.

    Views are read as by `Reader`, actions as by `action_codes`.
    """

    info = ()

    def __init__(self, env: Any, name: str, *, flatten: bool = False):
        self.env = env
        self.fps = env.metadata.get("render_fps", 30)
        limit = None if env.spec is None else env.spec.max_episode_steps
        self._read, self._decode, self.spec = _of_one(env.observation_space, env.action_space, name, limit, flatten)

    def reset(self, seed: int) -> Seen:
        view, info = self.env.reset(seed=seed)
        return self._seen(view, info)

    def step(self, action: np.ndarray) -> HostStep:
        view, reward, terminated, truncated, info = self.env.step(self._decode(action[0]))
        return HostStep(self._seen(view, info), reward, terminated, bool(terminated or truncated))

    def render(self) -> Any:
        """`[H, W, 3]`, where the environment was made with render_mode="rgb_array"."""
        return self.env.render()

    def close(self) -> None:
        self.env.close()

    def _seen(self, view: Any, info: dict[str, Any]) -> Seen:
        view, mask = self._read(view, info)
        return Seen(view[None], action_mask=None if mask is None else mask[None])


class Several:
    """A `gymnasium.Env` of several agents, with PettingZoo's parallel interface.

    Actions and views are tuples of spaces, one for each agent; rewards, and what is terminated and truncated, are lists
    or one for all; legal actions are `info["action_mask"]`, one for each. Where Gymnasium does not know how long
    episodes can be, it is read from the environment's `max_steps` or `_max_episode_steps`.
    """

    def __init__(self, env: Any, name: str):
        views, actions = env.observation_space, env.action_space
        if len(getattr(views, "spaces", ())) != len(actions.spaces):
            raise ValueError(
                f"{name} has actions for {len(actions.spaces)} agents, a tuple of spaces, and views of {views}: jmarl "
                f"takes a tuple of as many."
            )
        self.env, self.name, self.metadata = env, name, env.metadata
        self.possible_agents = [f"agent_{i}" for i in range(len(actions.spaces))]
        self.agents = list(self.possible_agents)
        self._views, self._actions = (dict(zip(self.agents, x.spaces, strict=True)) for x in (views, actions))
        known, raw = None if env.spec is None else env.spec.max_episode_steps, env.unwrapped
        self.max_steps = known or getattr(raw, "max_steps", None) or getattr(raw, "_max_episode_steps", None)

    @property
    def unwrapped(self) -> Any:
        """The environment without wrappers."""
        return self.env.unwrapped

    def observation_space(self, agent: str) -> Any:
        """Of one agent."""
        return self._views[agent]

    def action_space(self, agent: str) -> Any:
        """Of one agent."""
        return self._actions[agent]

    def reset(self, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Views and infos by agent."""
        views, info = self.env.reset(seed=seed)
        self.agents = list(self.possible_agents)
        return self._each(views), self._infos(info)

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        """Views, rewards, who is terminated and truncated, and infos, by agent."""
        views, reward, terminated, truncated, info = self.env.step(tuple(actions.values()))
        if np.all(np.logical_or(terminated, truncated)):
            self.agents = []
        return (
            self._each(views),
            *(self._each(np.broadcast_to(x, len(actions)).tolist()) for x in (reward, terminated, truncated)),
            self._infos(info),
        )

    def render(self) -> Any:
        """`[H, W, 3]`; None where the environment knows windows alone."""
        is_drawn = self.env.render_mode == "rgb_array" and "rgb_array" in self.metadata.get("render_modes", ())
        return self.env.render() if is_drawn else None

    def close(self) -> None:
        """Frees what the environment holds."""
        self.env.close()

    def _infos(self, info: dict[str, Any]) -> dict[str, Any]:
        masks = info.get("action_mask", [None] * len(self.possible_agents))
        return self._each([{"action_mask": mask} for mask in masks])

    def _each(self, values: Any) -> dict[str, Any]:
        return dict(zip(self.possible_agents, values, strict=True))


class Reader:
    """`(view, info) -> (array, action mask or None)` for views of one space.

    Vectors by `gymnasium.spaces.flatten`: dicts in the order of their sorted keys, tuples in theirs, discrete values
    one-hot. Boxes of three axes stay images, unless `flatten`. The mask is `info["action_mask"]`, or the part of that
    name of a dict whose other part is "observation".

    Attributes:
      shape, dtype: of the array; bytes stay bytes.
      space: what it is made from.
    """

    def __init__(self, space: Any, name: str, flatten: bool):
        from gymnasium import spaces

        self._holds_mask = isinstance(space, spaces.Dict) and set(space.keys()) == {"observation", "action_mask"}
        self.space, self._flatten = space["observation"] if self._holds_mask else space, spaces.flatten
        self._is_box = isinstance(self.space, spaces.Box)
        self.dtype = stacked.common_dtype([self.space] if self._is_box else [])
        is_image = self._is_box and len(self.space.shape) == 3 and not flatten
        try:
            self.shape = self.space.shape if is_image else (spaces.flatdim(self.space),)
        except (NotImplementedError, ValueError) as error:
            raise ValueError(f"{name} has the observation space {space}, which has no fixed size.") from error

    def __call__(self, view: Any, info: dict[str, Any]) -> tuple[np.ndarray, np.ndarray | None]:
        mask = info.get("action_mask")
        if self._holds_mask:
            view, mask = view["observation"], view["action_mask"]
        if not self._is_box:  # which `flatten` takes as long for as CartPole takes for a step
            view = self._flatten(self.space, view)
        return np.asarray(view, self.dtype).reshape(self.shape), None if mask is None else np.asarray(
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
