"""From one environment's dicts of agents to stacked arrays `[N, ...]`: padding, ids, masks, dtypes.

An adapter describes its environment as `AgentDicts`; `stack` does everything that is the same for all of them.
"""

import difflib
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jmarl.envs.flags import usual_flags
from jmarl.envs.views import with_agent_ids
from jmarl.evaluation import flat_info
from jmarl.types import EntityLayout, Env, EnvSpec, Observation, Outcome


def unknown(what: str, given: str, known: list[str], error: type[Exception]) -> Exception:
    """An error of one sentence that names the nearest known name."""
    nearest = difflib.get_close_matches(given, known, n=1, cutoff=0.0)
    advice = f"did you mean {nearest[0]!r}?" if nearest else "it takes none."
    return error(f"{given!r} is no {what}: {advice}")


def scalars(info: Any) -> dict[str, Array]:
    """The scalars in an environment's info, by name; arrays, which no log can show, are left out."""
    return {name: x for name, x in flat_info(info).items() if jnp.shape(x) == ()}


TIME_LIMITS = ("truncated", "terminal")


def require_time_limit(time_limit: str) -> None:
    """Refuses what says nothing about time limits."""
    if time_limit not in TIME_LIMITS:
        raise ValueError(f"time_limit={time_limit!r} is not one of {TIME_LIMITS}.")


class AgentDicts(NamedTuple):
    """An environment whose agents are keys of dicts, without automatic reset.

    Attributes:
      agents: names in the order of the agent axis. Dicts leave `jit` with sorted keys ("agent_10" before "agent_2"),
        so nothing here ever relies on a dict's own order.
      action_spaces: by agent; a space has `n`, or `low`, `high` and `shape`.
      reset: `(key) -> (views, state)`.
      step: `(key, state, actions) -> (views, state, rewards, shaped, terminated, last, info)`; `shaped` are the shaped
        rewards, or None; `terminated` is `[N]` or a scalar, and does not count time limits.
      alive: `(state) -> [N]`; None where nobody dies before the episode ends.
      legal: `(state) -> dict of masks`; None where every action is legal.
      world: `(views, state) -> [S]`, the environment's own global state; None where it has none.
      max_steps: length of the longest episode.
      is_fixed_length: every episode is that long.
      may_wait: an agent may not act although its return goes on.
      unwrapped: the environment itself.
      entities: where the views, without ids, hold lists of entities; None where that is not known.
    """

    agents: tuple[str, ...]
    action_spaces: dict[str, Any]
    reset: Callable[..., Any]
    step: Callable[..., Any]
    alive: Callable[[Any], Array] | None = None
    legal: Callable[[Any], dict[str, Array]] | None = None
    world: Callable[[Any, Any], Array] | None = None
    max_steps: int | None = None
    is_fixed_length: bool = False
    may_wait: bool = False
    unwrapped: Any = None
    entities: EntityLayout | None = None


@usual_flags
def stack(name: str, env: AgentDicts, *, agent_ids: bool, time_limit: str, flatten: bool) -> Env:
    """`env` as an `Env` of stacked arrays."""
    require_time_limit(time_limit)
    agents, num_agents = env.agents, len(env.agents)
    actions = _action_layout(name, env)
    key_aval = jax.eval_shape(lambda: jax.random.key(0))
    views_aval, state_aval = jax.eval_shape(env.reset, key_aval)
    shapes = [_view_shape(views_aval[agent].shape, flatten) for agent in agents]
    is_image = len(shapes[0]) == 3
    if (is_image and len(set(shapes)) > 1) or any(len(shape) != len(shapes[0]) for shape in shapes):
        raise ValueError(
            f"{name}: the agents' images have the shapes {shapes}; pass flatten=True to get padded vectors."
        )
    width = max(shape[-1] for shape in shapes)
    seen = views_aval if env.world is None else (views_aval, jax.eval_shape(env.world, views_aval, state_aval))
    dtype = common_dtype(jax.tree.leaves(seen))

    def padded(row: Array) -> Array:
        """Features to the left, so that `row[:obs_sizes[i]]` is everything agent i sees."""
        return row if row.shape[-1] == width else jnp.pad(row, (0, width - row.shape[0]))

    def action_mask(state: Any) -> Array | None:
        if actions.mask is None or env.legal is None:
            return None if actions.mask is None else jnp.asarray(actions.mask)
        masks = env.legal(state)
        most = actions.mask.shape[1]
        rows = [masks[agent].astype(bool) for agent in agents]
        return jnp.stack([jnp.pad(row, (0, most - row.shape[0])) if row.shape[0] < most else row for row in rows])

    def observe(raw_views: Any, state: Any) -> Observation:
        # True widths and one type: coin_game observes int8, switch_riddle int32, some of gymnax scalars.
        views = [
            jnp.asarray(raw_views[agent], dtype).reshape(shape) for agent, shape in zip(agents, shapes, strict=True)
        ]
        world = jnp.concatenate(views, axis=-1) if env.world is None else env.world(raw_views, state)
        return Observation(
            agents=jnp.stack([padded(view) for view in views]),
            state=world.astype(dtype),
            action_mask=action_mask(state),
            agent_mask=jnp.ones(num_agents, bool) if env.alive is None else env.alive(state),
        )

    def raw_step(state: Any, action: Array, key: Array) -> Any:
        return env.step(key, state, actions.split(action))

    # Weak types (`time: int = 0`) and dtypes that drift in the first step would compile every caller's step twice.
    action_aval = jax.ShapeDtypeStruct(actions.shape, actions.dtype)
    next_aval = jax.eval_shape(raw_step, state_aval, action_aval, key_aval)[1]
    dtypes = jax.tree.map(
        lambda a, b: a.dtype if a.dtype == b.dtype else jnp.promote_types(a.dtype, b.dtype), state_aval, next_aval
    )

    @usual_flags
    def reset(key: Array) -> tuple[Any, Observation]:
        views, state = env.reset(key)
        return _strong(state, dtypes), observe(views, state)

    @usual_flags
    def step(state: Any, action: Array, key: Array) -> tuple[Any, Observation, Outcome]:
        action = jnp.asarray(action, actions.dtype)  # what a user's argmax found in 64 bits
        views, state, rewards, shaped, terminated, last, info = raw_step(state, action, key)
        if time_limit == "terminal":
            terminated = terminated | last

        def of_agents(rewards: dict[str, Any]) -> Array:
            # simple_tag mixes int32 and float32 rewards.
            return jnp.stack([jnp.asarray(rewards[agent], jnp.float32).reshape(()) for agent in agents])

        outcome = Outcome(
            reward=of_agents(rewards),
            terminated=jnp.broadcast_to(terminated, (num_agents,)),
            last=last,
            shaped_reward=None if shaped is None else of_agents(shaped),
            info={name: jnp.asarray(value, jnp.float32) for name, value in flat_info(info).items()},
        )
        return _strong(state, dtypes), observe(views, state), outcome

    obs = jax.eval_shape(lambda key: reset(key)[1], key_aval)
    spec = EnvSpec(
        name=name,
        agents=agents,
        obs_shape=obs.agents.shape[1:],
        state_shape=obs.state.shape,
        num_actions=None if actions.mask is None else actions.mask.shape[1],
        action_size=actions.shape[1] if actions.mask is None else None,
        action_low=actions.low,
        action_high=actions.high,
        obs_sizes=() if is_image else tuple(shape[0] for shape in shapes),
        action_sizes=actions.sizes,
        max_steps=env.max_steps,
        min_steps=env.max_steps if env.is_fixed_length and env.max_steps else 1,
        may_wait=env.may_wait,
        always_act=env.alive is None,
        teams=teams_of(agents),
        entities=env.entities,
        state_is_views=env.world is None and env.alive is None,
        obs_dtype=dtype,
    )
    stacked = Env(reset, step, spec, env.unwrapped)
    return with_agent_ids(stacked) if agent_ids else stacked


def common_dtype(seen: Iterable[Any]) -> str:
    """What `EnvSpec.obs_dtype` is where all of this is seen: "uint8" of bools and bytes, else "float32"."""
    types = {np.dtype(x.dtype) for x in seen}
    return "uint8" if types and types <= {np.dtype(bool), np.dtype(np.uint8)} else "float32"


def teams_of(agents: tuple[str, ...]) -> tuple[int, ...]:
    """1 for those whose names say that they oppose the others, as in MPE and SMAX; () where nobody does, or all do."""
    teams = tuple(int(agent.startswith(("adversary", "leadadversary", "enemy", "eve"))) for agent in agents)
    return teams if len(set(teams)) > 1 else ()


def _strong(state: Any, dtypes: Any) -> Any:
    """`state` with these dtypes and without weak types."""

    def cast(leaf: Any, dtype: Any) -> Any:
        return leaf if jnp.issubdtype(dtype, jax.dtypes.prng_key) else jnp.asarray(leaf, dtype)

    return jax.tree.map(cast, state, dtypes)


def _view_shape(shape: tuple[int, ...], flatten: bool) -> tuple[int, ...]:
    """Images stay `[H, W, C]`; scalars, grids without channels and everything else become vectors."""
    return shape if len(shape) == 3 and not flatten else (math.prod(shape),)


class _ActionLayout(NamedTuple):
    shape: tuple[int, ...]  # of the stacked action
    dtype: Any
    sizes: tuple[int, ...]
    mask: np.ndarray | None  # [N, A], False for padding; None for continuous actions
    low: tuple[tuple[float, ...], ...] | None
    high: tuple[tuple[float, ...], ...] | None
    split: Callable[[Array], dict[str, Array]]


def _action_layout(name: str, env: AgentDicts) -> _ActionLayout:
    spaces = [env.action_spaces[agent] for agent in env.agents]
    if all(hasattr(space, "n") for space in spaces):
        return _discrete_layout(env.agents, tuple(int(space.n) for space in spaces))
    if all(hasattr(space, "low") for space in spaces):
        return _continuous_layout(name, env.agents, spaces)
    kinds = sorted({type(space).__name__ for space in spaces})
    raise ValueError(
        f"{name} has the action spaces {kinds}; jmarl knows Discrete ones and Box ones, one kind at a time."
    )


def _discrete_layout(agents: tuple[str, ...], sizes: tuple[int, ...]) -> _ActionLayout:
    most = max(sizes)

    def split(action: Array) -> dict[str, Array]:
        # A padded action is illegal. Should one come, it becomes the agent's last action instead of an index out of
        # bounds, which every environment would treat in its own way.
        return {
            agent: action[i] if size == most else jnp.minimum(action[i], size - 1)
            for i, (agent, size) in enumerate(zip(agents, sizes, strict=True))
        }

    mask = np.arange(most) < np.array(sizes)[:, None]
    return _ActionLayout((len(agents),), jnp.int32, sizes, mask, None, None, split)


def _continuous_layout(name: str, agents: tuple[str, ...], spaces: list[Any]) -> _ActionLayout:
    sizes = tuple(math.prod(space.shape) for space in spaces)
    most = max(sizes)

    def padded(bound: Any, space: Any) -> tuple[float, ...]:
        # Padding has the bounds of the first dimension, so that a policy's squashing stays well defined there.
        row = np.broadcast_to(np.asarray(bound, float), space.shape).reshape(-1)
        return (*row.tolist(), *[float(row[0])] * (most - row.size))

    low = tuple(padded(space.low, space) for space in spaces)
    high = tuple(padded(space.high, space) for space in spaces)
    if not np.isfinite([low, high]).all():
        raise ValueError(f"{name} has unbounded actions, low={low} and high={high}: jmarl needs finite bounds.")
    low_array, high_array = np.array(low, np.float32), np.array(high, np.float32)

    def split(action: Array) -> dict[str, Array]:
        action = jnp.clip(action, low_array, high_array)
        return {
            agent: action[i, :size].reshape(space.shape)
            for i, (agent, size, space) in enumerate(zip(agents, sizes, spaces, strict=True))
        }

    return _ActionLayout((len(agents), most), jnp.float32, sizes, None, low, high, split)
