"""Vectors of environments with Gymnasium's interface, which step many at once and begin episodes by themselves.

Gymnasium has three ways to begin the next episode, and its `metadata["autoreset_mode"]` says which a vector has:

| mode | `step` at an episode's end returns | and then |
|---|---|---|
| NEXT_STEP | the true last view | the next `step` drops its action, earns nothing and shows the new episode |
| SAME_STEP | the new episode's first view | the true last view is in `infos["final_obs"]` |
| DISABLED | the true last view | nothing: `reset(options={"reset_mask": ..})` begins the next episode |

Here all three come to the same: the true last view, whether its return ended there, and what the next episode begins
with, in one step. In the first mode the environments that ended are reset at once, so that no step of theirs is lost,
and none is counted that leads from one episode to the next.
"""

import bisect
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jmarl.envs import host, slots
from jmarl.envs.slots import Answer
from jmarl.types import EnvSpec


class Reading(NamedTuple):
    """How to read the vectors of one kind: facts about a single environment in them.

    Attributes:
      spec: of the one agent.
      view: `(views, infos, num) -> (array [num, ...], action mask [num, A] or None)` of a batch.
      final: the same of `infos`, for the rows `[num]` of those that ended: what SAME_STEP hides there.
      action: `[num]` codes or `[num, A]` numbers as the vector's actions.
    """

    spec: EnvSpec
    view: Callable[[Any, dict[str, Any], int], tuple[np.ndarray, np.ndarray | None]]
    final: Callable[[dict[str, Any], np.ndarray], tuple[np.ndarray, np.ndarray | None]]
    action: Callable[[np.ndarray], Any]


class _Group:
    """One vector, whose environments are always stepped together."""

    def __init__(self, env: Any, numbers: np.ndarray):
        self.env, self.numbers = env, numbers
        self.begin()

    def begin(self) -> None:
        self.clock = np.zeros(len(self.numbers), int)
        self.answer: Answer | None = None
        self.was_left = np.zeros(len(self.numbers), bool)  # it went on with the others, and nobody followed

    def close(self) -> None:
        if self.env is not None:
            self.env.close()
        self.env = None


class VectorPool(host.Pool):
    """Vectors of environments as a `host.Pool`: one for each number of environments that are played side by side.

    Args:
      make: `(seeds) -> vector` with as many environments. It is reset with these seeds, too.
      reading: how to read it.
      is_seeded_once: seeds count in `make` alone, so a vector is never used for a second evaluation.
    """

    info = ()

    def __init__(self, make: Callable[[Sequence[int]], Any], reading: Reading, *, is_seeded_once: bool = False):
        super().__init__()
        self._make, self._read, self._is_seeded_once = make, reading, is_seeded_once
        self.spec = spec = reading.spec
        self._all_legal = None if spec.num_actions is None else np.ones((1, spec.num_actions), bool)
        self.example = (
            np.zeros((1, *spec.obs_shape), spec.obs_dtype),
            np.zeros(spec.state_shape, spec.obs_dtype),
            self._all_legal,
            np.ones(1, bool),
        )
        self._groups: list[_Group] = []  # group g has the numbers from its first one on
        self._first: list[int] = [0]  # of each group, and of the one to come
        self._free: list[int] = []
        self.close = weakref.finalize(self, _close_all, self._groups)

    def reset(self, seed: Any) -> Any:
        """See `host.Pool.reset`."""
        with self.one_at_a_time():
            seeds = [int(s) % 2**31 for s in np.asarray(seed).reshape(-1)]
            group = self._group_of_size(seeds)
            group.begin()
            views, infos = group.env.reset() if self._is_seeded_once else group.env.reset(seed=seeds)
            self._draw(group)
            shown = self._shown(*self._read.view(views, infos, len(seeds)))
            return _shaped((group.numbers, shown), np.shape(seed))

    def step(self, number: Any, clock: Any, is_over: Any, action: Any) -> Any:
        """See `host.Pool.step`."""
        with self.one_at_a_time():
            shape = np.shape(number)
            numbers, clocks, over = (np.asarray(x).reshape(-1) for x in (number, clock, is_over))
            actions = np.asarray(action).reshape(len(numbers), *np.shape(action)[len(shape) :])[:, 0]
            only = self._groups[bisect.bisect_right(self._first, numbers[0]) - 1]
            if np.array_equal(numbers, only.numbers):  # as in a run of one seed, where each microsecond counts
                return _shaped(tuple(self._step(only, clocks, over, actions)), shape)
            which = np.searchsorted(self._first, numbers, side="right") - 1
            parts, rows = [], []
            for g in dict.fromkeys(which.tolist()):
                group, asked = self._groups[g], np.flatnonzero(which == g)
                asked = asked[np.argsort(numbers[asked])]
                if not np.array_equal(numbers[asked], group.numbers):
                    raise RuntimeError(
                        f"{len(group.numbers)} environments are stepped together, and a step of {len(asked)} of them "
                        f"was asked for: step all that were reset together."
                    )
                parts.append(self._step(group, clocks[asked], over[asked], actions[asked]))
                rows.append(asked)
            answer = parts[0] if len(parts) == 1 else _each(lambda *x: np.concatenate(x), *parts)
            order = np.argsort(np.concatenate(rows))
            if not np.array_equal(order, np.arange(len(numbers))):
                answer = _each(lambda x: x[order], answer)
            return _shaped(tuple(answer), shape)

    def release(self, number: Any) -> None:
        """See `host.Pool.release`."""
        with self._lock:
            for g in set((np.searchsorted(self._first, np.asarray(number).reshape(-1), side="right") - 1).tolist()):
                if self._is_seeded_once:
                    self._groups[g].close()
                else:
                    self._free.append(g)

    def _group_of_size(self, seeds: list[int]) -> _Group:
        for g in self._free:
            if len(self._groups[g].numbers) == len(seeds):
                self._free.remove(g)
                return self._groups[g]
        first = self._first[-1]
        group = _Group(self._make(seeds), np.arange(first, first + len(seeds), dtype=np.int32))
        if group.env.num_envs != len(seeds):
            raise ValueError(f"it was to make {len(seeds)} environments, and made {group.env.num_envs}.")
        self._groups.append(group)
        self._first.append(first + len(seeds))
        return group

    def _step(self, group: _Group, clocks: np.ndarray, is_over: np.ndarray, actions: np.ndarray) -> Answer:
        # Asked for once more: all, or those of seeds whose evaluation is over while that of others goes on.
        again = clocks == group.clock - 1
        if group.answer is not None and again.all():
            return group.answer
        wrong = np.flatnonzero(~again & (clocks != group.clock))
        if len(wrong):
            raise RuntimeError(slots.gone_by(int(group.clock[wrong[0]]), int(clocks[wrong[0]])))
        stays = is_over | again
        if (group.was_left & ~stays).any():
            raise RuntimeError("it was left while others were stepped, and cannot be gone on with: reset it.")
        group.clock, group.was_left = group.clock + ~again, stays
        num = len(actions)
        views, reward, terminated, truncated, infos = group.env.step(self._read.action(actions))
        self._draw(group)
        terminated = np.array(terminated, bool)
        last = terminated | np.asarray(truncated, bool)
        seen = self._shown(*self._read.view(views, infos, num))
        start = seen
        if last.any():
            ended = np.flatnonzero(last)
            if _mode(group.env) == "SAME_STEP":
                start, final = seen, self._shown(*self._read.final(infos, ended))
                seen = tuple(None if x is None else _with_rows(x, ended, y) for x, y in zip(seen, final, strict=True))
            else:
                begun = self._begin(group, seen[1], last, ended)
                start = tuple(None if x is None else _with_rows(x, ended, y) for x, y in zip(seen, begun, strict=True))
        earned = np.array(reward, np.float32).reshape(num, 1)
        answer = Answer(seen, start, earned, terminated[:, None], last, np.zeros((num, 0), np.float32))
        if stays.any() and group.answer is not None:
            rows = np.flatnonzero(stays)
            answer = _each(lambda new, old: _with_rows(new, rows, old[rows]), answer, group.answer)
            answer.reward[is_over & ~again] = 0.0
        group.answer = answer
        return answer

    def _begin(self, group: _Group, seen: np.ndarray, last: np.ndarray, ended: np.ndarray) -> Any:
        """Begins the next episodes of those that ended, and returns what these show."""
        views, infos = group.env.reset(options={"reset_mask": last.copy()})
        if _num_of(views) == len(ended) < len(last):  # EnvPool answers with these alone
            return self._shown(*self._read.view(views, infos, len(ended)))
        array, mask = self._read.view(views, infos, len(last))
        if not np.array_equal(seen[~last], array[~last]):
            raise ValueError(
                "where some episodes end it begins all anew, since its reset knows no options['reset_mask']: make it "
                "with autoreset_mode='SameStep', or by gymnasium.make_vec(.., vectorization_mode='sync')."
            )
        return self._shown(array[ended], None if mask is None else mask[ended])

    def _draw(self, group: _Group) -> None:
        """The first environment's picture: where it resets itself in the same step, already of the next episode."""
        if self.pictures is not None:
            drawn = group.env.render()
            self.pictures.append(None if drawn is None else drawn[0])

    def _shown(self, views: np.ndarray, mask: np.ndarray | None) -> Any:
        num = len(views)
        legal = self._all_legal
        if legal is not None:
            legal = np.ones((num, *legal.shape), bool) if mask is None else np.array(mask, bool)[:, None]
        return np.array(views)[:, None], np.array(views), legal, np.ones((num, 1), bool)


def _num_of(views: Any) -> int:
    """How many environments a batch of views is of."""
    while isinstance(views, dict | tuple):
        views = next(iter(views.values())) if isinstance(views, dict) else views[0]
    return len(views)


def _close_all(groups: list[_Group]) -> None:
    for group in groups:
        group.close()


def _mode(env: Any) -> str:
    """Of `AutoresetMode`, by name; Gymnasium takes a vector that says nothing to be of the first kind."""
    mode = env.metadata.get("autoreset_mode")
    return "NEXT_STEP" if mode is None else mode.name


def _with_rows(array: np.ndarray, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    new = array.copy()
    new[rows] = values
    return new


def _each(function: Callable[..., np.ndarray], *answers: Answer) -> Answer:
    """A function of arrays, of each field of answers; what `seen` and `start` leave out is left out."""

    def apply(*fields: Any) -> Any:
        if isinstance(fields[0], tuple):
            return tuple(None if x[0] is None else function(*x) for x in zip(*fields, strict=True))
        return function(*fields)

    return Answer(*map(apply, *answers))


def _shaped(tree: Any, shape: tuple[int, ...]) -> Any:
    """The same with the leading axes `shape` in place of one."""
    if isinstance(tree, tuple):
        return tuple(_shaped(x, shape) for x in tree)
    return None if tree is None else tree.reshape((*shape, *tree.shape[1:]))
