"""Environments that are Python code: a small protocol of one environment, and how compiled programs step many of them.

A compiled rollout calls back into Python once for each step of all environments together, those of all seeds included.
So runs, sweeps, evaluations, sinks and checkpoints are those of any other environment. The alternative was a loop in
Python around a compiled `act`, with loops, evaluations and sweeps of its own. It was not faster than it is long: with
gymnasium's CartPole on two busy cores, 64 environments made 71,000 steps per second by callback and 51,000 by the loop,
8 made 16,000 and 22,000, and EnvPool's 64 made 172,000 and 191,000: the environments take the time. A callback alone
costs 0.05 to 0.2 ms.

What jax holds of an environment is its number and how often it was stepped. Callbacks count as pure: a step that is
asked for twice is answered twice and taken once, and one from a state that has gone by is refused. So environments in
Python go on from where they are and nowhere else: a checkpoint does not hold them, and a resumed run begins its
episodes anew.
"""

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from jmarl.envs.flags import usual_flags
from jmarl.envs.views import with_agent_ids
from jmarl.types import Action, Env, EnvSpec, Observation, Outcome


class Seen(NamedTuple):
    """What an environment shows, in numpy.

    Attributes:
      agents: each agent's view, `[N, O]` or `[N, H, W, C]`.
      state: the global state; None: all views, joined along their last axis.
      action_mask: legal actions `[N, A]`; None: all of `spec.action_sizes`.
      agent_mask: who acts now, `[N]`; None: everybody.
    """

    agents: np.ndarray
    state: np.ndarray | None = None
    action_mask: np.ndarray | None = None
    agent_mask: np.ndarray | None = None


class HostStep(NamedTuple):
    """What an environment answers to an action.

    Attributes:
      seen: the true successor, also at an episode's end.
      reward: of each agent, `[N]`, or one for all.
      terminated: whose return ends here, `[N]`, or of all; time limits left out.
      last: the episode ends after this step, by termination or by a time limit.
      info: numbers that describe the episode at its last step, by the names of `HostEnv.info`.
    """

    seen: Seen
    reward: Any
    terminated: Any
    last: bool
    info: dict[str, float] = {}  # noqa: RUF012  a NamedTuple's default, never written to


class HostEnv(Protocol):
    """One environment in Python. It never resets itself.

    Attributes:
      spec: static facts.
      info: names of what `HostStep.info` tells.
    """

    spec: EnvSpec
    info: Sequence[str]

    def reset(self, seed: int) -> Seen:
        """Begins an episode that `seed` decides."""

    def step(self, action: np.ndarray) -> HostStep:
        """`action` is `[N]` int32, legal or not, or `[N, A]` float32 within the spec's bounds."""

    def close(self) -> None:
        """Frees what the environment holds."""


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
def from_host(make: Callable[[], HostEnv], *, agent_ids: bool = False, time_limit: str = "truncated") -> Env:
    """Environments in Python, which `make` makes as many of as are played side by side.

    Args:
      make: makes one environment.
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
    pool = _Pool(make)
    spec, info = pool.spec, pool.info
    shown = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), pool.shown_of_nothing)
    number, flag = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), bool)
    each = jax.ShapeDtypeStruct((spec.num_agents,), jnp.float32)
    told = (shown, shown, each, jax.ShapeDtypeStruct((spec.num_agents,), bool), flag)

    bounds = [np.asarray(bound, np.float32) for bound in (spec.action_low, spec.action_high) if bound is not None]

    @usual_flags
    def reset(key: PRNGKeyArray) -> tuple[HostState, Observation]:
        seed = jax.random.bits(key, dtype=jnp.uint32)
        which, seen = jax.pure_callback(pool.reset, (number, shown), seed, vmap_method="broadcast_all")
        obs = _observation(seen)
        return HostState(which, jnp.int32(0), jnp.bool_(False), jax.tree.map(jnp.zeros_like, obs)), obs

    @usual_flags
    def step(state: HostState, action: Action, key: PRNGKeyArray) -> tuple[HostState, Observation, Outcome]:
        if not spec.is_discrete:
            action = jnp.clip(action, *bounds)
        action = action.astype(jnp.int32 if spec.is_discrete else jnp.float32)
        asked = state.number, state.clock, state.is_over, action
        answer = jax.pure_callback(
            pool.step, (*told, jax.ShapeDtypeStruct((len(info),), jnp.float32)), *asked, vmap_method="broadcast_all"
        )
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
        io_callback(pool.release, None, state.number)

    env = Env(reset, step, spec, pool, restart, release)
    return with_agent_ids(env) if agent_ids else env


def _observation(shown: Any) -> Observation:
    agents, state, action_mask, agent_mask = shown
    return Observation(agents=agents, state=state, action_mask=action_mask, agent_mask=agent_mask)


class _Slot:
    """One environment, and what it has answered last."""

    def __init__(self, env: HostEnv):
        self.env, self.clock, self.answer = env, 0, None  # type: HostEnv, int, Any
        self.seeds = np.random.default_rng(0)


class _Pool:
    """All environments that `make` has made, by number."""

    def __init__(self, make: Callable[[], HostEnv]):
        self._make, self._lock = make, threading.RLock()  # several devices may ask at once
        self._slots, self._free = [_Slot(make())], [0]  # type: list[_Slot], list[int]
        one = self._slots[0].env
        self.spec, self.info = one.spec, tuple(one.info)
        n, spec = self.spec.num_agents, self.spec
        sizes = spec.action_sizes or (spec.num_actions,) * n
        self._legal = None if spec.num_actions is None else np.arange(spec.num_actions) < np.array(sizes)[:, None]
        self.failure: Exception | None = None
        self.shown_of_nothing: tuple[np.ndarray | None, ...] = (
            np.zeros((n, *spec.obs_shape), np.float32),
            np.zeros(spec.state_shape, np.float32),
            self._legal,
            np.ones(n, bool),
        )
        self._closing = weakref.finalize(self, _close, self._slots)

    def reset(self, seed: Any) -> Any:
        """New episodes of as many environments as there are seeds."""
        with self._lock, self._noting_failures():
            shape, numbers, shown = np.shape(seed), [], []
            for one in np.asarray(seed).reshape(-1):
                slot_number = self._take()
                slot = self._slots[slot_number]
                slot.clock, slot.seeds = 0, np.random.default_rng(int(one))
                numbers.append(slot_number)
                shown.append(self._begin(slot))
            return np.array(numbers, np.int32).reshape(shape), _stack(shown, shape)

    def step(self, index: Any, clock: Any, is_over: Any, action: Any) -> Any:
        """One step of each, but for those whose episodes are over."""
        with self._lock, self._noting_failures():
            shape = np.shape(index)
            numbers, clocks, over = (np.asarray(x).reshape(-1) for x in (index, clock, is_over))
            actions = np.asarray(action).reshape(len(numbers), *np.shape(action)[len(shape) :])
            each = zip(numbers, clocks, over, actions, strict=True)
            return _stack([self._step_one(self._slots[i], int(t), bool(done), act) for i, t, done, act in each], shape)

    def release(self, index: Any) -> None:
        """Gives environments back, for others to play in."""
        with self._lock:
            self._free += [int(i) for i in np.asarray(index).reshape(-1)]

    def close(self) -> None:
        """Closes all environments, which otherwise happens when nothing refers to them any more."""
        self._closing()

    @contextlib.contextmanager
    def _noting_failures(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failure = error
            raise

    def _take(self) -> int:
        if self._free:
            return self._free.pop(0)
        self._slots.append(_Slot(self._make()))
        return len(self._slots) - 1

    def _begin(self, slot: _Slot) -> Any:
        return self._shown(slot.env.reset(int(slot.seeds.integers(2**31))))

    def _step_one(self, slot: _Slot, clock: int, is_over: bool, action: np.ndarray) -> Any:
        if slot.clock == clock + 1 and slot.answer is not None:  # asked for once more
            return slot.answer
        if slot.clock != clock:
            raise RuntimeError(
                f"{self.spec.name} is at step {slot.clock} and was asked to go on from step {clock}: an environment in "
                f"Python cannot be taken back to a state that has gone by."
            )
        slot.clock += 1
        if is_over:
            seen, start, reward, terminated, last, info = slot.answer
            slot.answer = seen, start, np.zeros_like(reward), terminated, last, info
            return slot.answer
        seen, reward, terminated, last, info = slot.env.step(action)
        n = self.spec.num_agents
        shown = self._shown(seen)
        slot.answer = (
            shown,
            self._begin(slot) if last else shown,
            np.array(np.broadcast_to(reward, (n,)), np.float32),
            np.array(np.broadcast_to(terminated, (n,)), bool),
            np.bool_(last),
            np.array([info.get(name, np.nan) for name in self.info], np.float32),
        )
        return slot.answer

    def _shown(self, seen: Seen) -> Any:
        agents = np.asarray(seen.agents, np.float32)
        state = joined(agents) if seen.state is None else np.asarray(seen.state, np.float32)
        mask = self._legal if seen.action_mask is None else np.asarray(seen.action_mask, bool)
        acts = np.ones(len(agents), bool) if seen.agent_mask is None else np.asarray(seen.agent_mask, bool)
        shown = agents, state, mask, acts
        names = ("agents", "state", "action_mask", "agent_mask")
        for name, given, example in zip(names, shown, self.shown_of_nothing, strict=True):
            if given is not None and example is not None and given.shape != example.shape:
                raise ValueError(f"{self.spec.name} shows {name} {given.shape}; its spec asks for {example.shape}.")
        return shown


@contextlib.contextmanager
def failures_named(*envs: Env) -> Iterator[None]:
    """What an environment in Python raised, with its own traceback and its name, in place of what jax makes of it."""
    pools = [env.unwrapped for env in envs if isinstance(env.unwrapped, _Pool)]
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
        raise RuntimeError(f"{failed.spec.name} raised {type(error).__name__}: {error}") from error
    finally:
        log.disabled = is_silent


def joined(views: np.ndarray) -> np.ndarray:
    """All views `[N, ...]` along their last axis: the global state of an environment that has none."""
    return np.concatenate(list(views), axis=-1)


def _close(slots: list[_Slot]) -> None:
    for slot in slots:
        slot.env.close()


def _stack(rows: list[Any], shape: tuple[int, ...]) -> Any:
    """Trees of arrays as one tree, with the leading axes `shape`."""
    return jax.tree.map(lambda *x: np.stack(x).reshape((*shape, *np.shape(x[0]))), *rows)
