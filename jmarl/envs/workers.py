"""Environments in Python in processes of their own, which may die or hang without the run doing so."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jmarl import parallel
from jmarl.envs.slots import Answer, HostEnv, Shown, Slots


class WorkerFailed(RuntimeError):
    """An environment raised in a worker: its traceback, as text."""


_START_S = 120.0  # until the first answer: a new process imports what its environments need


class _Lost(Exception):
    """A worker died, or does not answer."""


class Workers:
    """`Slots` that are shared out to processes: environment i is in process i modulo their number.

    Args:
      make: makes one environment; it is pickled, by cloudpickle where that is installed.
      num: processes.
      timeout_s: seconds that an answer may take.
    """

    def __init__(self, make: Callable[[], HostEnv], num: int, timeout_s: float):
        if num < 0 or timeout_s <= 0:
            raise ValueError(f"workers={num} must not be negative, and timeout_s={timeout_s} must be positive.")
        self._make, self._timeout_s = _pickled(make), timeout_s
        here = Slots(make)
        self.spec, self.info, self.example = here.spec, here.info, here.example
        here.close()
        self._workers = [_Worker(self._make) for _ in range(num)]
        self._seen: dict[int, Shown] = {}  # what each showed last

    def reset(self, numbers: Sequence[int], seeds: Sequence[int]) -> list[Shown]:
        """See `Slots.reset`."""
        shown = self._ask("reset", numbers, seeds)
        self._seen |= dict(zip(numbers, shown, strict=True))
        return shown

    def step(
        self, numbers: Sequence[int], clocks: Sequence[int], is_over: Sequence[bool], actions: Sequence[np.ndarray]
    ) -> list[Answer]:
        """See `Slots.step`."""
        answers = self._ask("step", numbers, clocks, is_over, actions)
        for number, answer in zip(numbers, answers, strict=True):
            self._seen[number] = answer.start if answer.last else answer.seen
        return answers

    def close(self) -> None:
        """Ends all processes."""
        for worker in self._workers:
            worker.end()

    def _ask(self, method: str, numbers: Sequence[int], *columns: Sequence[Any]) -> list[Any]:
        """All processes at once, each about its own environments."""
        num = len(self._workers)
        of_worker = [[k for k, i in enumerate(numbers) if i % num == w] for w in range(num)]
        asked = [(method, *[[column[k] for k in ks] for column in (numbers, *columns)]) for ks in of_worker]
        for worker, question, ks in zip(self._workers, asked, of_worker, strict=True):
            if ks:
                worker.send(question)
        answers: list[Any] = [None] * len(numbers)
        for w, (question, ks) in enumerate(zip(asked, of_worker, strict=True)):
            if not ks:
                continue
            try:
                found = self._workers[w].receive(self._timeout_s)
            except _Lost as lost:
                found = self._replace(w, str(lost), question)
            for k, answer in zip(ks, found, strict=True):
                answers[k] = answer
        return answers

    def _replace(self, w: int, why: str, question: tuple[Any, ...]) -> list[Any]:
        """What a new process answers in place of one that was lost: all its episodes are cut off."""
        self._workers[w].end()
        self._workers[w] = worker = _Worker(self._make)
        parallel.say(f"A worker of {self.spec.name} {why}: it is replaced, and the episodes in it are cut off.")
        method, numbers, *columns = question
        if method == "reset":
            worker.send(question)
            return worker.receive(self._timeout_s)
        clocks, _, _ = columns
        n = self.spec.num_agents
        answers = []
        for number, clock in zip(numbers, clocks, strict=True):
            worker.send(("reset", [number], [number + clock], clock + 1))
            [start] = worker.receive(self._timeout_s)
            answers.append(
                Answer(
                    self._seen[number],
                    start,
                    np.zeros(n, np.float32),
                    np.zeros(n, bool),
                    np.array(True),
                    np.zeros(len(self.info), np.float32),
                )
            )
        return answers


class _Worker:
    """A process with `Slots`, and the pipe to it."""

    def __init__(self, make: bytes):
        context = multiprocessing.get_context("spawn")  # jax has threads, which a fork would not survive
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make), daemon=True)
        self._process.start()
        self._has_started = False
        theirs.close()

    def send(self, question: tuple[Any, ...]) -> None:
        with contextlib.suppress(OSError):  # `receive` will tell
            self._pipe.send(question)

    def receive(self, timeout_s: float) -> list[Any]:
        limit_s = timeout_s if self._has_started else max(timeout_s, _START_S)
        try:
            if not self._pipe.poll(limit_s):
                raise _Lost(f"has not answered for {limit_s:g} seconds")
            is_answer, content = self._pipe.recv()
            self._has_started = True
        except (EOFError, OSError):
            raise _Lost("has died") from None
        if not is_answer:
            raise WorkerFailed(f"in a worker:\n{content}")
        return content

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(pipe: Any, make: bytes) -> None:
    """What a worker does until the other end of its pipe is gone, as it is when its parent was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which ends its workers
    slots = None
    try:
        while True:
            method, *arguments = pipe.recv()
            try:
                slots = slots or Slots(pickle.loads(make))
                answer = True, getattr(slots, method)(*arguments)
            except Exception:
                answer = False, traceback.format_exc()
            pipe.send(answer)
    except (EOFError, OSError):
        os._exit(0)


def _pickled(make: Callable[[], HostEnv]) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(make)
    return cloudpickle.dumps(make)
