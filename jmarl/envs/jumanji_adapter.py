"""Jumanji's environments for many agents: robots in a warehouse, foragers, connectors, cleaners, searchers.

Jumanji's `discount` is 0 after some time limits and not after others, so each kind's rule below tells termination from
truncation; each was written after reading that environment's step code. Episodes end by themselves only where the task
does: a collision in the warehouse, all food eaten, all tiles clean, all targets found, everybody connected or blocked.
"""

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PRNGKeyArray

from jmarl.envs.flags import usual_flags
from jmarl.envs.stacked import AgentDicts, scalars, stack, unknown
from jmarl.envs.views import flatten_views
from jmarl.types import Env

INSTALL = 'pip install "jmarl[jumanji]"'
REWARDS = ("individual", "team")


class _Kind(NamedTuple):
    """How to read one class of Jumanji.

    Attributes:
      views: `(observation) -> [N, ...]`, what each agent sees.
      world: `(state, observation) -> [S] or [H, W, C]`, the global state; None for all views concatenated.
      terminated: `(state, timestep) -> [N] or scalar`, time limits left out.
      info: `(state, timestep) -> dict` of scalars that describe the episode at its last step.
      retires: whose return ends before the episode's does not act any more.
    """

    views: Callable[[Any], Array]
    terminated: Callable[[Any, Any], Array]
    world: Callable[[Any, Any], Array] | None = None
    info: Callable[[Any, Any], dict[str, Array]] = lambda state, timestep: scalars(timestep.extras)
    retires: bool = False


def _ends_with_the_task(state: Any, timestep: Any) -> Bool[Array, "..."]:
    """Discount 0, where Jumanji keeps it for the task's own end."""
    return timestep.discount == 0


# ----------------------------------------------------------------------------------------------------- robot warehouse


_ROBOTS = 1  # the layer of the floor; the other one holds shelves


def _has_collided(state: Any, timestep: Any) -> Bool[Array, ""]:
    # A robot that is not on its own cell of the floor was run over by another. The discount is 0 after the time limit,
    # too.
    x, y = state.agents.position
    return jnp.any(state.grid[_ROBOTS, x, y] != jnp.arange(len(x)) + 1)


_WAREHOUSE = _Kind(
    views=lambda observation: observation.agents_view,
    terminated=_has_collided,
    info=lambda state, timestep: {"collided": _has_collided(state, timestep)},
)

# ------------------------------------------------------------------------------------------------- level-based foraging


def _forager_views(observation: Any) -> Array:
    views = observation.agents_view
    return views if views.ndim == 2 else jnp.moveaxis(views, 1, -1)  # grids come with their channels first


_FORAGING = _Kind(views=_forager_views, terminated=_ends_with_the_task)

# ------------------------------------------------------------------------------------------------------------ connector


def _wires(grid: Array) -> Array:
    """`[G, G, 3]`: heads, targets, paths of all agents, whose values are 3 i + 2, 3 i + 3 and 3 i + 1."""
    return jnp.stack([(grid > 0) & (grid % 3 == value) for value in (2, 0, 1)], axis=-1)


def _connector_views(observation: Any) -> Array:
    """`[N, G, G, 5]`: heads, targets and paths of all, then the agent's own head and target."""
    grid, num_agents = observation.grid, len(observation.action_mask)
    own = 3 * jnp.arange(num_agents)[:, None, None]
    everybody = jnp.broadcast_to(_wires(grid), (num_agents, *grid.shape, 3))
    return jnp.concatenate([everybody, jnp.stack([grid == own + 2, grid == own + 3], axis=-1)], axis=-1)


_CONNECTOR = _Kind(
    views=_connector_views,
    terminated=_ends_with_the_task,
    world=lambda state, observation: _wires(observation.grid),
    retires=True,
)

# -------------------------------------------------------------------------------------------------------------- cleaner


def _cleaner_views(observation: Any) -> Array:
    """`[N, R, C, 4]`: dirty tiles, walls, how many agents are there, the agent itself."""
    grid, at = observation.grid, observation.agents_locations
    each = jnp.zeros((len(at), *grid.shape)).at[jnp.arange(len(at)), at[:, 0], at[:, 1]].set(1.0)
    shared = jnp.stack([grid == 0, grid == 2, jnp.sum(each, axis=0)], axis=-1)
    return jnp.concatenate([jnp.broadcast_to(shared, (len(at), *shared.shape)), each[..., None]], axis=-1)


_CLEANER = _Kind(
    views=_cleaner_views,
    terminated=lambda state, timestep: timestep.extras["num_dirty_tiles"] == 0,
    world=lambda state, observation: _cleaner_views(observation)[0, :, :, :3],
)

# ---------------------------------------------------------------------------------------------------- search and rescue


def _search(state: Any, observation: Any) -> Array:
    """What all see, where they are, which share of the targets is left, and the time in hundreds of steps."""
    numbers = jnp.stack([observation.targets_remaining, observation.step / 100])
    return jnp.concatenate([observation.searcher_views.reshape(-1), observation.positions.reshape(-1), numbers])


_RESCUE = _Kind(
    views=lambda observation: observation.searcher_views,
    terminated=lambda state, timestep: jnp.all(state.targets.found),
    world=_search,
    info=lambda state, timestep: {"found": jnp.mean(state.targets.found, dtype=jnp.float32)},
)

# ---------------------------------------------------------------------------------------------------------------- names

_NO_OPTIONS = ("generator", "viewer", "time_limit")  # objects, and a name that means something else in `jmarl.make`


class _Class(NamedTuple):
    """A class of Jumanji's: how to read it, its generator, and the arguments of that in the class's own defaults."""

    kind: _Kind
    generator: str
    defaults: dict[str, Any]


_CLASSES = {
    "RobotWarehouse": _Class(
        _WAREHOUSE,
        "routing.robot_warehouse.generator:RandomGenerator",
        {
            "shelf_rows": 2,
            "shelf_columns": 3,
            "column_height": 8,
            "num_agents": 4,
            "sensor_range": 1,
            "request_queue_size": 8,
        },
    ),
    "LevelBasedForaging": _Class(
        _FORAGING,
        "routing.lbf.generator:RandomGenerator",
        {"grid_size": 8, "fov": 8, "num_agents": 2, "num_food": 2, "force_coop": True},
    ),
    "Connector": _Class(
        _CONNECTOR, "routing.connector.generator:RandomWalkGenerator", {"grid_size": 10, "num_agents": 10}
    ),
    "Cleaner": _Class(
        _CLEANER, "routing.cleaner.generator:RandomGenerator", {"num_rows": 10, "num_cols": 10, "num_agents": 3}
    ),
    "SearchAndRescue": _Class(
        _RESCUE, "swarms.search_and_rescue.generator:RandomGenerator", {"num_targets": 40, "num_searchers": 2}
    ),
}
_REGISTERED = ("RobotWarehouse-v0", "LevelBasedForaging-v0", "Connector-v3", "Cleaner-v0", "SearchAndRescue-v0")
_PAPERS = {
    "rware": ("tiny-2ag", "tiny-4ag", "tiny-4ag-easy", "small-4ag", "medium-4ag", "large-8ag"),
    "lbf": ("8x8-2p-2f-coop", "2s-8x8-2p-2f-coop", "10x10-3p-3f", "2s-10x10-3p-3f", "15x15-4p-3f", "15x15-4p-5f"),
    "con": ("5x5x3a", "7x7x5a", "10x10x10a", "15x15x23a"),
    "clean": ("5x5x3a", "10x10x10a", "15x15x15a"),
}
_SIZES = {"tiny": (1, 3), "small": (2, 3), "medium": (2, 5), "large": (3, 5)}  # rows and columns of shelves
_REQUESTS = {"-easy": 2.0, "": 1.0, "-hard": 0.5}  # shelves that are asked for, per robot


def _warehouse(size: str, robots: str, difficulty: str) -> dict[str, Any]:
    rows, columns = _SIZES[size]
    shelves = {"shelf_rows": rows, "shelf_columns": columns, "column_height": 8, "sensor_range": 1}
    return {**shelves, "num_agents": int(robots), "request_queue_size": int(int(robots) * _REQUESTS[difficulty])}


def _foraging(sight: str | None, rows: str, columns: str, foragers: str, food: str, coop: str) -> dict[str, Any]:
    size = _square(rows, columns)
    levels = {"max_agent_level": 2, "force_coop": bool(coop)}
    return {"grid_size": size, "fov": int(sight or size), "num_agents": int(foragers), "num_food": int(food), **levels}


def _connector(rows: str, columns: str, agents: str) -> dict[str, Any]:
    size = _square(rows, columns)
    return {"grid_size": size, "num_agents": int(agents), "max_steps": size**2}


def _cleaning(rows: str, columns: str, agents: str) -> dict[str, Any]:
    return {"num_rows": int(rows), "num_cols": int(columns), "num_agents": int(agents)}


def _square(rows: str, columns: str) -> int:
    if rows != columns:
        raise ValueError(f"Jumanji's grid is a square, not {rows} by {columns} cells: write {rows}x{rows}.")
    return int(rows)


# By the papers' word for it: the class, how a scenario is written, and what its parts mean.
_GAMES: dict[str, tuple[str, str, Callable[..., dict[str, Any]]]] = {
    "rware": ("RobotWarehouse", r"(tiny|small|medium|large)-(\d+)ag(-easy|-hard|)", _warehouse),
    "lbf": ("LevelBasedForaging", r"(?:(\d+)s-)?(\d+)x(\d+)-(\d+)p-(\d+)f(-coop|)", _foraging),
    "con": ("Connector", r"(\d+)x(\d+)x(\d+)a", _connector),
    "clean": ("Cleaner", r"(\d+)x(\d+)x(\d+)a", _cleaning),
}


def names() -> list[str]:
    """What Jumanji registers for many agents, and the papers' scenarios: others are named alike."""
    return [*_REGISTERED, *(f"{game} {scenario}" for game, known in _PAPERS.items() for scenario in known)]


def is_name(name: str) -> bool:
    """Whether this is one of Jumanji's names, or begins like one."""
    return re.match(rf"({'|'.join(_CLASSES)})-v\d+$|({'|'.join(_GAMES)})[ -]", name) is not None


def _read_name(name: str) -> tuple[str, dict[str, Any]]:
    """The class that a name stands for, and the options."""
    if name in _REGISTERED:
        class_name = name.rpartition("-")[0]
        return class_name, _CLASSES[class_name].defaults
    game, scenario = re.split("[ -]", name, maxsplit=1)
    if game not in _GAMES:
        raise unknown("environment of Jumanji", name, list(_REGISTERED), ValueError)
    class_name, grammar, options = _GAMES[game]
    parts = re.fullmatch(grammar, scenario)
    if parts is None:
        raise unknown(f"scenario of {game}", scenario, list(_PAPERS[game]), ValueError)
    return class_name, options(*parts.groups())


# --------------------------------------------------------------------------------------------------------------- making


@usual_flags
def make(name: str, options: dict[str, Any], **views: Any) -> Env:
    """Jumanji's environment `name`.

    Options are its constructor's or its generator's arguments, `reward`, and `max_steps` for Jumanji's `time_limit`.
    """
    class_name, chosen = _read_name(name)
    constructor, generator = _import(class_name)
    of_env = [x for x in inspect.signature(constructor).parameters if x not in _NO_OPTIONS]
    of_generator = list(inspect.signature(generator).parameters)
    for option in options:
        if option not in (known := [*of_env, *of_generator, "max_steps", "reward"]):
            raise unknown(f"option of {name}", option, known, TypeError)
    arguments = {**chosen, **options}
    reward = arguments.get("reward", "individual")
    max_steps = {"time_limit": arguments["max_steps"]} if "max_steps" in arguments else {}
    try:
        start = generator(**{k: v for k, v in arguments.items() if k in of_generator})
    except AssertionError as error:
        raise ValueError(f"{name}: {error}") from error
    env = constructor(generator=start, **max_steps, **{k: v for k, v in arguments.items() if k in of_env})
    return stack(name, _agent_dicts(env, _CLASSES[class_name].kind, reward, views["flatten"]), **views)


@usual_flags
def from_jumanji(
    env: object,
    *,
    views: Callable[[Any], Array] | None = None,
    world: Callable[[Any, Any], Array] | None = None,
    terminated: Callable[[Any, Any], Array] | None = None,
    reward: str = "individual",
    agent_ids: bool = False,
    time_limit: str = "truncated",
    flatten: bool = False,
) -> Env:
    """Any object with Jumanji's interface and several agents: `num_agents`, `reset`, `step`, `action_spec`.

    Objects of the classes that `jmarl.make` knows, and of classes derived from them, are read as by name. For all
    others the rules are those below; each can be replaced by a function, which is traced like the environment. Legal
    actions are `observation.action_mask`, where there is one; scalars of `timestep.extras` describe an episode at its
    last step; the longest episode has `env.time_limit` steps.

    Args:
      env: the environment itself, without Jumanji's wrappers: jmarl resets by itself.
      views: `(observation) -> [N, ...]`. By default every field of the observation but `action_mask` and
        `step_count`, as one vector: in the order of their sorted names, each read row by row. A field whose first axis
        is not N is seen by everybody.
      world: `(state, observation) -> [S]`, the global state; by default all views concatenated.
      terminated: `(state, timestep) -> [N] or scalar`: whose return ends with this step, time limits left out. By
        default where the discount is 0, but for an episode that ends on step `env.time_limit`: that truncates.
      reward: "individual", as the environment gives it, or "team": everybody gets the sum over the agents. A reward
        that Jumanji gives once for all is everybody's, and summed by neither.
      agent_ids, time_limit, flatten: see `jmarl.make`.

    Example:
      >>> from jumanji.environments import RobotWarehouse
      >>> from_jumanji(RobotWarehouse(time_limit=50)).spec.max_steps
      50
    """
    raw: Any = env
    for attribute in ("num_agents", "reset", "step", "action_spec"):
        if not hasattr(raw, attribute):
            raise TypeError(
                f"{type(env).__name__} has no {attribute}: from_jumanji takes Jumanji's environments of several agents."
            )
    known = (cls.__name__ for cls in type(env).__mro__ if cls.__module__.startswith("jumanji."))
    class_name = next((name for name in known if name in _CLASSES), None)
    kind = _by_convention(raw) if class_name is None else _CLASSES[class_name].kind
    rules: dict[str, Any] = {"views": views, "world": world, "terminated": terminated}
    kind = kind._replace(**{name: rule for name, rule in rules.items() if rule is not None})
    dicts = _agent_dicts(raw, kind, reward, flatten)
    # The rules of a user may end a return at any time; those above are known not to.
    dicts = dicts._replace(may_wait=class_name is None or terminated is not None)
    return stack(type(env).__name__, dicts, agent_ids=agent_ids, time_limit=time_limit, flatten=flatten)


class _Box(NamedTuple):
    low: Any
    high: Any
    shape: tuple[int, ...]


class _Choice(NamedTuple):
    n: int


class _State(NamedTuple):
    """Jumanji's state, and what it tells in the time step instead."""

    raw: Any
    legal: Bool[Array, "N A"] | None
    is_alive: Bool[Array, "N"]


def _agent_dicts(env: Any, kind: _Kind, reward: str, flatten: bool) -> AgentDicts:
    if reward not in REWARDS:
        raise ValueError(f"reward={reward!r} is not one of {REWARDS}.")
    num_agents = int(env.num_agents)
    agents = tuple(f"agent_{i}" for i in range(num_agents))

    def by_agent(rows: Array) -> dict[str, Array]:
        return dict(zip(agents, rows, strict=True))

    def read(state: Any, timestep: Any, is_alive: Array) -> tuple[dict[str, Array], _State]:
        observation = timestep.observation
        views = by_agent(kind.views(observation))
        if kind.world is not None:
            world = kind.world(state, observation)
            views["world"] = world.reshape(-1) if flatten else world
        return views, _State(state, getattr(observation, "action_mask", None), is_alive)

    def reset(key: PRNGKeyArray) -> Any:
        state, timestep = env.reset(key)
        return read(state, timestep, jnp.ones(num_agents, bool))

    def step(key: PRNGKeyArray, state: _State, actions: dict[str, Array]) -> Any:
        action = jnp.stack([actions[agent] for agent in agents])
        raw, timestep = env.step(_with_key(state.raw, key), action)
        rewards = jnp.broadcast_to(timestep.reward, (num_agents,))
        terminated = jnp.broadcast_to(kind.terminated(raw, timestep), (num_agents,))
        is_alive = jnp.ones(num_agents, bool)
        if reward == "team":  # which goes on for everybody until it ends for all
            rewards = rewards if jnp.ndim(timestep.reward) == 0 else jnp.full(num_agents, jnp.sum(rewards))
            terminated = jnp.full(num_agents, jnp.all(terminated))
        elif kind.retires:
            is_alive = ~terminated
        views, state = read(raw, timestep, is_alive)
        return views, state, by_agent(rewards), None, terminated, timestep.last(), kind.info(raw, timestep)

    return AgentDicts(
        agents=agents,
        action_spaces=_action_spaces(env, agents),
        reset=reset,
        step=step,
        alive=(lambda state: state.is_alive) if kind.retires else None,
        legal=(lambda state: by_agent(state.legal)) if hasattr(env.observation_spec, "action_mask") else None,
        world=None if kind.world is None else lambda views, state: views["world"],
        max_steps=getattr(env, "time_limit", None),
        unwrapped=env,
    )


def _with_key(state: Any, key: PRNGKeyArray) -> Any:
    """`state` with the key of this step: a rollout may begin several episodes in the same state."""
    if not hasattr(state, "key") or not jnp.issubdtype(state.key.dtype, jax.dtypes.prng_key):
        return state
    return dataclasses.replace(state, key=key)


def _action_spaces(env: Any, agents: tuple[str, ...]) -> dict[str, _Box | _Choice]:
    spec = env.action_spec
    if hasattr(spec, "num_values"):
        return {agent: _Choice(int(n)) for agent, n in zip(agents, spec.num_values, strict=True)}
    if hasattr(spec, "minimum"):
        low, high = (jnp.broadcast_to(bound, spec.shape) for bound in (spec.minimum, spec.maximum))
        return {agent: _Box(low[i], high[i], spec.shape[1:]) for i, agent in enumerate(agents)}
    raise ValueError(
        f"{type(env).__name__} has an action_spec of {type(spec).__name__}: jmarl knows MultiDiscreteArray, one number "
        f"for each agent, and BoundedArray, whose first axis is that of the agents."
    )


def _by_convention(env: Any) -> _Kind:
    """What Jumanji's interface says of a class that is not known here."""

    def views(observation: Any) -> Array:
        fields = dict(observation._asdict() if hasattr(observation, "_asdict") else vars(observation))
        parts = {name: jnp.asarray(x) for name, x in fields.items() if name not in ("action_mask", "step_count")}
        is_shared = {name: x.shape[:1] != (env.num_agents,) for name, x in parts.items()}
        return flatten_views(
            {n: jnp.broadcast_to(x, (env.num_agents, *x.shape)) if is_shared[n] else x for n, x in parts.items()}
        )

    def terminated(state: Any, timestep: Any) -> Array:
        limit = getattr(env, "time_limit", None)
        steps = getattr(timestep.observation, "step_count", None)
        ended = timestep.discount == 0
        return ended if limit is None or steps is None else ended & (steps < limit)

    return _Kind(views=views, terminated=terminated)


@usual_flags
def _import(class_name: str) -> tuple[Any, Any]:
    """A class of Jumanji's, and that of its generator."""
    try:
        from jumanji import environments
    except ImportError as error:
        raise ImportError(f"{class_name} needs Jumanji: {INSTALL}.") from error
    module, _, generator = _CLASSES[class_name].generator.partition(":")
    return getattr(environments, class_name), getattr(
        importlib.import_module(f"jumanji.environments.{module}"), generator
    )
