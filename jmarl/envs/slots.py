"""One environment in Python, what it shows and answers, and several of them side by side in one process."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from jmarl.types import EnvSpec

Shown = tuple[np.ndarray | None, ...]  # what `Seen` holds, of known shapes and dtypes, with nothing left out but a mask


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


class Answer(NamedTuple):
    """A `HostStep` as arrays of known shapes and dtypes, and what the next episode begins with where this one ended."""

    seen: Shown
    start: Shown
    reward: np.ndarray
    terminated: np.ndarray
    last: np.ndarray
    info: np.ndarray


class _Slot:
    """One environment, how often it was stepped, and what it answered last."""

    def __init__(self, env: HostEnv):
        self.env, self.clock = env, 0
        self.answer: Answer | None = None
        self.seeds = np.random.default_rng(0)


class Slots:
    """Environments by number, in this process.

    Args:
      make: makes one.

    Attributes:
      spec, info: see `HostEnv`.
      example: what an environment shows, all zeros, everything legal and everybody acting.
      pictures: a list takes what `render()` of an environment draws after each reset and step, if it has one.
      fps: pictures in a second of real time, as the environment says.
    """

    pictures: list[Any] | None = None

    def __init__(self, make: Callable[[], HostEnv]):
        self._make = make
        self._unused = make()
        self._slots: dict[int, _Slot] = {}
        self.spec, self.info = self._unused.spec, tuple(self._unused.info)
        self.fps = float(getattr(self._unused, "fps", 10.0))
        n, num_actions = self.spec.num_agents, self.spec.num_actions
        sizes = np.array(self.spec.action_sizes or (num_actions,) * n)
        self._legal = None if num_actions is None else np.arange(num_actions) < sizes[:, None]
        self.example: Shown = (
            np.zeros((n, *self.spec.obs_shape), self.spec.obs_dtype),
            np.zeros(self.spec.state_shape, self.spec.obs_dtype),
            self._legal,
            np.ones(n, bool),
        )

    def reset(
        self, numbers: Iterable[int], seeds: Iterable[int], clocks: Iterable[int] = itertools.repeat(0)
    ) -> list[Shown]:
        """Begins an episode of each, whose clock stands where it is told; returns what they show."""
        return [self._reset(*each) for each in zip(numbers, seeds, clocks, strict=False)]

    def _reset(self, number: int, seed: int, clock: int) -> Shown:
        if number not in self._slots:
            env, self._unused = self._unused, None  # type: ignore[assignment]
            self._slots[number] = _Slot(env or self._make())
        slot = self._slots[number]
        slot.clock, slot.answer, slot.seeds = clock, None, np.random.default_rng(seed)
        return self._begin(slot)

    def step(
        self, numbers: Iterable[int], clocks: Iterable[int], is_over: Iterable[bool], actions: Iterable[np.ndarray]
    ) -> list[Any]:
        """A step of each, but for those whose episode is over: these answer as before, and earn nothing.

        Returns:
          An `Answer` for each; None for an environment that was never reset here.
        """
        each = zip(numbers, clocks, is_over, actions, strict=True)
        return [self._step(self._slots.get(number), clock, over, action) for number, clock, over, action in each]

    def _step(self, slot: _Slot | None, clock: int, is_over: bool, action: np.ndarray) -> Answer | None:
        if slot is None:
            return None
        if slot.clock == clock + 1 and slot.answer is not None:  # asked for once more
            return slot.answer
        if slot.clock != clock:
            raise RuntimeError(gone_by(slot.clock, clock))
        slot.clock += 1
        if is_over and slot.answer is not None:
            slot.answer = slot.answer._replace(reward=np.zeros_like(slot.answer.reward))
            return slot.answer
        seen, reward, terminated, last, info = slot.env.step(action)
        self._draw(slot.env)
        n, shown = self.spec.num_agents, self._shown(seen)
        slot.answer = Answer(
            shown,
            self._begin(slot) if last else shown,
            _for_all(reward, n, np.float32),
            _for_all(terminated, n, bool),
            np.array(last, bool),
            np.array([info[name] for name in self.info], np.float32),
        )
        return slot.answer

    def close(self) -> None:
        """Closes all environments."""
        envs = [slot.env for slot in self._slots.values()] + [self._unused]
        self._slots, self._unused = {}, None  # type: ignore[assignment]
        for env in envs:
            if env is not None:
                env.close()

    def _begin(self, slot: _Slot) -> Shown:
        seen = slot.env.reset(int(slot.seeds.integers(2**31)))
        self._draw(slot.env)
        return self._shown(seen)

    def _draw(self, env: Any) -> None:
        if self.pictures is not None:
            self.pictures.append(env.render() if hasattr(env, "render") else None)

    def _shown(self, seen: Seen) -> Shown:
        agents = self._numbers("agents", seen.agents)
        state = joined(agents) if seen.state is None else self._numbers("state", seen.state)
        mask = self._legal if seen.action_mask is None else np.array(seen.action_mask, bool)
        acts = np.ones(len(agents), bool) if seen.agent_mask is None else np.array(seen.agent_mask, bool)
        shown = agents, state, mask, acts
        names = ("agents", "state", "action_mask", "agent_mask")
        for name, given, example in zip(names, shown, self.example, strict=True):
            if given is not None and example is not None and given.shape != example.shape:
                raise ValueError(f"it shows {name} {given.shape}, and its spec asks for {example.shape}.")
        return shown

    def _numbers(self, name: str, given: Any) -> np.ndarray:
        """A copy, since many environments write into one array again and again, of the spec's type."""
        if self.spec.obs_dtype == "uint8" and np.asarray(given).dtype not in (bool, np.uint8):
            raise ValueError(f"it shows {name} of {np.asarray(given).dtype}, and its spec has obs_dtype='uint8'.")
        return np.array(given, self.spec.obs_dtype)


def gone_by(clock: int, asked: int) -> str:
    """What is said where a step from an earlier or later state is asked for."""
    return (
        f"it is at step {clock} and was asked to go on from step {asked}: an environment in Python cannot be taken "
        f"back to a state that has gone by."
    )


def _for_all(value: Any, num: int, dtype: Any) -> np.ndarray:
    """What is said of each agent, or once for all of them, as an array `[N]`."""
    given = np.array(value, dtype)
    return given if given.shape == (num,) else np.full(num, given, dtype)


def joined(views: np.ndarray) -> np.ndarray:
    """All views `[N, ...]` along their last axis: the global state of an environment that has none."""
    return np.concatenate(list(views), axis=-1)
