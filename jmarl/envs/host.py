"""Environments that are Python code: a small protocol of one environment, and how compiled programs step many of them.

A compiled rollout calls back into Python once for each step of all environments together, those of all seeds included.
So runs, sweeps, evaluations, sinks and checkpoints are those of any other environment. The alternative was a loop in
Python around a compiled `act`, with loops, evaluations and sweeps of its own; with MPE2's and EnvPool's environments it
was 1.2 to 1.3 times as fast (`benchmarks/speed/host_environments.py`).

What jax holds of an environment is its number and how often it was stepped. Callbacks count as pure: a step that is
asked for twice is answered twice and taken once, and one from a state that has gone by is refused. So environments in
Python go on from where they are and nowhere else: a checkpoint does not hold them, and a resumed run begins its
episodes anew.
"""

import abc
import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from jmarl.envs import ray_actors
from jmarl.envs.flags import usual_flags
from jmarl.envs.slots import HostEnv, HostStep, Seen, Shown, Slots  # noqa: F401  two of them for the example
from jmarl.envs.stacked import require_time_limit
from jmarl.envs.views import with_agent_ids
from jmarl.envs.workers import Process, Worker, WorkerFailed, Workers
from jmarl.types import Action, Env, EnvSpec, Observation, Outcome

try:  # experimental: whatever becomes of it, there is `jax.pure_callback`
    from jax.experimental.buffer_callback import buffer_callback
except ImportError:
    buffer_callback = None  # type: ignore[assignment]

PLACES = ("processes", "ray")  # of workers


class HostState(NamedTuple):
    """What a compiled program holds of an environment of Python.

    Attributes:
      number: which one it is.
      clock: how often it was stepped.
      is_over: its episode has ended, and nobody went on to the next one.
      start: what the next episode begins with, once this one has ended.
    """

    number: Int[Array, "*batch"]
    clock: Int[Array, "*batch"]
    is_over: Bool[Array, "*batch"]
    start: Observation


@usual_flags
def from_host(
    make: Callable[[], HostEnv],
    *,
    workers: int = 0,
    on: str = "processes",
    timeout_s: float = 60.0,
    agent_ids: bool = False,
    time_limit: str = "truncated",
) -> Env:
    """Environments in Python, which `make` makes as many of as are played side by side.

    Args:
      make: makes one environment.
      workers: how many share the environments; 0: all are in this process. One that dies, or does not answer, is
        replaced, the episodes in it are cut off, and the run goes on.
      on: "processes" of this machine, or "ray": actors on all machines of the cluster that this one belongs to.
      timeout_s: seconds that a worker may take for an answer.
      agent_ids: put a one-hot id before each agent's features.
      time_limit: "truncated" or "terminal", see `jmarl.make`.

    Example:
      >>> class Count:
      ...     spec = EnvSpec(name="count", agents=("ann",), obs_shape=(1,), state_shape=(1,), num_actions=2)
      ...     info = ()
      ...     def reset(self, seed):
      ...         self.time = 0
      ...         return Seen(np.zeros((1, 1)))
      ...     def step(self, action):
      ...         self.time += 1
      ...         return HostStep(Seen(np.full((1, 1), self.time)), action, False, self.time == 3)
      ...     def close(self):
      ...         pass
      >>> env = from_host(Count)
      >>> state, obs = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 4))
      >>> _, obs, outcome = jax.vmap(env.step)(state, jnp.ones((4, 1), int), jax.random.split(jax.random.key(0), 4))
      >>> outcome.reward[:, 0], obs.agents[:, 0, 0]
      (Array([1., 1., 1., 1.], dtype=float32), Array([1., 1., 1., 1.], dtype=float32))
    """
    start = _start_of_workers(workers, on)
    pool = _Pool(Workers(make, workers, timeout_s, start) if workers else Slots(make))
    return from_pool(pool, agent_ids=agent_ids, time_limit=time_limit)


def _start_of_workers(workers: int, on: str) -> Callable[[bytes], Worker]:
    """What makes one."""
    if on not in PLACES:
        raise ValueError(f"on={on!r} is not one of {PLACES}.")
    if on == "processes":
        return Process
    if not workers:
        raise ValueError(f"on={on!r} is about workers, and there are none: say how many, workers=4.")
    return ray_actors.Cluster().start


class Pool(abc.ABC):
    """All environments of one kind, by number: what a compiled program calls, one question at a time.

    Attributes:
      spec, info: see `HostEnv`.
      example: what one shows, of known shapes and dtypes.
      failure: what an environment raised last.
      pictures: a list takes what each environment draws of itself after each reset and step.
      fps: pictures in a second of real time.
    """

    spec: EnvSpec
    info: Sequence[str]
    example: Shown
    failure: Exception | None = None
    pictures: list[Any] | None = None
    fps: float = 30.0

    def __init__(self) -> None:
        self._lock = threading.RLock()  # several devices may ask at once

    @abc.abstractmethod
    def reset(self, seed: Any) -> Any:
        """New episodes of as many environments as there are seeds: their numbers, and what they show."""

    @abc.abstractmethod
    def step(self, number: Any, clock: Any, is_over: Any, action: Any) -> Any:
        """The fields of an `Answer` of all that are asked; those whose episodes are over answer as before."""

    @abc.abstractmethod
    def release(self, number: Any) -> None:
        """Gives environments back, for others to play in."""

    @contextlib.contextmanager
    def one_at_a_time(self) -> Iterator[None]:
        """Notes what is raised within."""
        with self._lock:
            try:
                yield
            except Exception as error:
                self.failure = error
                raise


@usual_flags
def from_pool(pool: Pool, *, agent_ids: bool, time_limit: str) -> Env:
    """The environments of a pool as an `Env`, whose compiled steps call back once for all that are stepped together."""
    require_time_limit(time_limit)
    spec, info = pool.spec, pool.info
    shown = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), pool.example)
    number, flag = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), bool)
    each = jax.ShapeDtypeStruct((spec.num_agents,), jnp.float32)
    told = (shown, shown, each, jax.ShapeDtypeStruct((spec.num_agents,), bool), flag)

    bounds = [np.asarray(bound, np.float32) for bound in (spec.action_low, spec.action_high) if bound is not None]

    @usual_flags
    def reset(key: PRNGKeyArray) -> tuple[HostState, Observation]:
        seed = jax.random.bits(key, dtype=jnp.uint32)
        which, seen = _call_back(pool.reset, (number, shown), seed)
        obs = _observation(seen)
        return HostState(which, jnp.int32(0), jnp.bool_(False), jax.tree.map(jnp.zeros_like, obs)), obs

    @usual_flags
    def step(state: HostState, action: Action, key: PRNGKeyArray) -> tuple[HostState, Observation, Outcome]:
        if not spec.is_discrete:
            action = jnp.clip(action, *bounds)
        action = action.astype(jnp.int32 if spec.is_discrete else jnp.float32)
        asked = state.number, state.clock, state.is_over, action
        answer = _call_back(pool.step, (*told, jax.ShapeDtypeStruct((len(info),), jnp.float32)), *asked)
        seen, start, reward, terminated, last, numbers = answer
        if time_limit == "terminal":
            terminated = terminated | last
        outcome = Outcome(
            reward=reward, terminated=terminated, last=last, info={name: numbers[i] for i, name in enumerate(info)}
        )
        return HostState(state.number, state.clock + 1, last, _observation(start)), _observation(seen), outcome

    def restart(state: HostState) -> tuple[HostState, Observation]:
        return state._replace(is_over=jnp.zeros_like(state.is_over)), state.start

    def release(state: HostState) -> None:
        # The last answer goes with the numbers, which alone are known before the first step: release waits for it.
        io_callback(lambda number, _: pool.release(number), None, state.number, state.is_over)

    env = Env(reset, step, spec, pool, restart, release)
    return with_agent_ids(env) if agent_ids else env


def _call_back(function: Callable[..., Any], result: Any, *args: Array) -> Any:
    """What Python answers, once for all that are asked side by side.

    As `jax.pure_callback`, which makes arrays of jax out of what it passes on and gets back. On a CPU a callback can
    read and write the compiled program's own memory, which takes a fraction of the time.
    """
    if buffer_callback is None or jax.default_backend() != "cpu":
        return jax.pure_callback(function, result, *args, vmap_method="broadcast_all")

    def fill(_: Any, out: Any, *asked: Any) -> None:
        answer = function(*(np.asarray(x).copy() for x in asked))  # the memory is used again, and actions may be kept
        for place, x in zip(map(np.asarray, jax.tree.leaves(out)), jax.tree.leaves(answer), strict=True):
            if place.shape != x.shape:  # or it would be repeated to fit
                raise ValueError(f"it answers with an array of shape {x.shape}, where {place.shape} is expected.")
            place[...] = x

    return buffer_callback(fill, result, vmap_method="broadcast_all")(*args)


def split_options(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of `from_host`, and the rest, which are the environment's."""
    of_host = ("workers", "on", "timeout_s")
    return {k: v for k, v in options.items() if k in of_host}, {k: v for k, v in options.items() if k not in of_host}


def _observation(shown: Any) -> Observation:
    agents, state, action_mask, agent_mask = shown
    return Observation(agents=agents, state=state, action_mask=action_mask, agent_mask=agent_mask)


class _Pool(Pool):
    """Environments that are stepped one by one: those of an evaluation that is over are used again."""

    def __init__(self, store: Slots | Workers):
        super().__init__()
        self._store = store
        self.spec, self.info, self.example = store.spec, store.info, store.example
        self.fps = getattr(store, "fps", self.fps)
        self._num, self._free = 0, []  # type: int, list[int]
        self.close = weakref.finalize(self, store.close)

    def reset(self, seed: Any) -> Any:
        """See `Pool.reset`."""
        with self.one_at_a_time():
            self._watch()
            seeds = np.asarray(seed).reshape(-1).tolist()
            again, self._free = self._free[: len(seeds)], self._free[len(seeds) :]
            numbers = [*again, *range(self._num, self._num + len(seeds) - len(again))]
            self._num += len(seeds) - len(again)
            shown = _stack(self._store.reset(numbers, seeds), np.shape(seed))
            return np.array(numbers, np.int32).reshape(np.shape(seed)), shown

    def step(self, number: Any, clock: Any, is_over: Any, action: Any) -> Any:
        """See `Pool.step`."""
        with self.one_at_a_time():
            shape = np.shape(number)
            numbers, clocks, over = (np.asarray(x).reshape(-1).tolist() for x in (number, clock, is_over))
            actions = np.asarray(action).reshape(len(numbers), *np.shape(action)[len(shape) :])
            return tuple(_stack(self._store.step(numbers, clocks, over, list(actions)), shape))

    def _watch(self) -> None:
        if isinstance(self._store, Slots):
            self._store.pictures = self.pictures

    def release(self, number: Any) -> None:
        """See `Pool.release`."""
        with self._lock:
            self._free += np.asarray(number).reshape(-1).tolist()


@contextlib.contextmanager
def failures_named(*envs: Env) -> Iterator[None]:
    """What an environment in Python raised, with its own traceback and its name, in place of what jax makes of it."""
    pools = [env.unwrapped for env in envs if isinstance(env.unwrapped, Pool)]
    for pool in pools:
        pool.failure = None
    log = logging.getLogger("jax._src.callback")  # writes the traceback, too
    is_silent, log.disabled = log.disabled, bool(pools) or log.disabled
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError):  # the second where nothing is compiled
        failed = next((pool for pool in pools if pool.failure is not None), None)
        if failed is None:
            raise
        error = failed.failure
        what = error.summary if isinstance(error, WorkerFailed) else f"{type(error).__name__}: {error}"
        raise RuntimeError(f"{failed.spec.name} raised {what}") from error
    finally:
        log.disabled = is_silent


def _stack(rows: Sequence[Any], shape: tuple[int, ...]) -> Any:
    """Nested tuples of arrays as one, with the leading axes `shape`."""
    if rows[0] is None:
        return None
    if isinstance(rows[0], tuple):
        return tuple(_stack(fields, shape) for fields in zip(*rows, strict=True))
    stacked = np.array(rows)  # `np.stack` takes four times as long
    return stacked.reshape((*shape, *stacked.shape[1:]))
