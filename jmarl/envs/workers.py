"""Environments in Python in processes of their own, which may die or hang without the run doing so."""

import atexit
import collections
import contextlib
import multiprocessing
import multiprocessing.util
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from jmarl import parallel
from jmarl.envs.slots import Answer, HostEnv, Shown, Slots


class WorkerFailed(RuntimeError):
    """An environment raised in a worker: its traceback, as text.

    Attributes:
      summary: the traceback's last line.
    """

    def __init__(self, summary: str, text: str):
        super().__init__(f"in a worker:\n{text}")
        self.summary = summary


class Lost(Exception):
    """A worker died, or does not answer: in words that follow "a worker"."""


class Worker(Protocol):
    """Where environments are stepped: a process of this machine, or an actor of Ray anywhere in a cluster.

    It is made from what makes an environment, pickled, and has one `Serving`.
    """

    def send(self, question: tuple[Any, ...]) -> None:
        """Arguments for `Serving.answer`. Does not wait, and raises nothing."""

    def receive(self, timeout_s: float) -> tuple[bool, Any]:
        """What it answers to the question before. Raises `Lost`."""

    def end(self) -> None:
        """Kills it, whatever it is doing."""


_is_exiting = threading.Event()
atexit.register(_is_exiting.set)  # called before multiprocessing, which was imported first, ends its processes
_START_S = 120.0  # until the first answer: a new process imports what its environments need
_UNGUARDED = 71  # exit code of a process that imports the script that began it, and begins workers as it does
_MOST_TRIES = 3  # to begin an episode, each with a new worker


class Workers:
    """`Slots` that are shared out to workers: environment i is in worker i modulo their number.

    Args:
      make: makes one environment; it is pickled, by cloudpickle where that is installed.
      num: workers.
      timeout_s: seconds that an answer may take.
      start: makes a worker from the pickled `make`.
    """

    def __init__(self, make: Callable[[], HostEnv], num: int, timeout_s: float, start: Callable[[bytes], Worker]):
        if num < 0 or timeout_s <= 0:
            raise ValueError(f"workers={num} must not be negative, and timeout_s={timeout_s} must be positive.")
        self._make, self._timeout_s, self._start = _pickled(make), timeout_s, start
        here = Slots(make)
        self.spec, self.info, self.example = here.spec, here.info, here.example
        here.close()
        self._workers = [self._start(self._make) for _ in range(num)]
        self._has_answered = [False] * num
        self._seen: dict[int, Shown] = {}  # what each showed last

    def reset(self, numbers: Sequence[int], seeds: Sequence[int]) -> list[Shown]:
        """See `Slots.reset`."""
        if not self._seen and len(numbers) < len(self._workers):
            parallel.say(
                f"workers={len(self._workers)} for {len(numbers)} environments of {self.spec.name}: "
                f"{len(self._workers) - len(numbers)} of them will have nothing to do."
            )
        return self._begin(numbers, seeds, [0] * len(numbers))

    def step(
        self, numbers: Sequence[int], clocks: Sequence[int], is_over: Sequence[bool], actions: Sequence[np.ndarray]
    ) -> list[Answer]:
        """See `Slots.step`. The episodes of a worker that was lost are cut off where they were, and new ones begin."""
        answers = self._ask("step", numbers, clocks, is_over, actions)
        for k, answer in enumerate(answers):
            if answer is not None:
                self._seen[numbers[k]] = answer.start if answer.last else answer.seen
        lost = [k for k, answer in enumerate(answers) if answer is None]
        if lost:
            shown = [self._seen[numbers[k]] for k in lost]
            seeds, clocks_then = [numbers[k] + clocks[k] for k in lost], [clocks[k] + 1 for k in lost]
            starts = self._begin([numbers[k] for k in lost], seeds, clocks_then)
            n, num_info = self.spec.num_agents, len(self.info)
            nothing, nobody = np.zeros(n, np.float32), np.zeros(n, bool)
            for k, seen, start in zip(lost, shown, starts, strict=True):
                answers[k] = Answer(seen, start, nothing, nobody, np.array(True), np.zeros(num_info, np.float32))
        return answers

    def close(self) -> None:
        """Ends all workers."""
        for worker in self._workers:
            worker.end()

    def _begin(self, numbers: Sequence[int], seeds: Sequence[int], clocks: Sequence[int]) -> list[Shown]:
        """New episodes, in new workers where these are lost meanwhile."""
        rows, left = list(zip(numbers, seeds, clocks, strict=True)), list(range(len(numbers)))
        for _ in range(_MOST_TRIES):
            shown = self._ask("reset", *zip(*[rows[k] for k in left], strict=True))
            self._seen |= {numbers[k]: x for k, x in zip(left, shown, strict=True) if x is not None}
            left = [k for k, x in zip(left, shown, strict=True) if x is None]
            if not left:
                return [self._seen[number] for number in numbers]
        raise RuntimeError(f"{_MOST_TRIES} workers one after the other were lost when they were to begin an episode.")

    def _ask(self, method: str, numbers: Sequence[int], *columns: Sequence[Any]) -> list[Any]:
        """All workers at once, each about its own environments. None for those whose worker is lost, and replaced."""
        num = len(self._workers)
        of_worker = [[k for k, i in enumerate(numbers) if i % num == w] for w in range(num)]
        for worker, ks in zip(self._workers, of_worker, strict=True):
            if ks:
                worker.send((method, *[[column[k] for k in ks] for column in (numbers, *columns)]))
        answers: list[Any] = [None] * len(numbers)
        lost: dict[int, str] = {}
        failure = None
        for w, ks in enumerate(of_worker):
            try:
                is_answer, content = self._receive(w) if ks else (True, [])
            except Lost as error:
                lost[w] = str(error)
                continue
            if not is_answer:  # told when all have answered, so that no answer is left for the next question
                failure = failure or WorkerFailed(*content)
                continue
            for k, answer in zip(ks, content, strict=True):
                answers[k] = answer
        self._replace(lost)
        if failure is not None:
            raise failure
        return answers

    def _receive(self, w: int) -> tuple[bool, Any]:
        limit_s = self._timeout_s if self._has_answered[w] else max(self._timeout_s, _START_S)
        answer = self._workers[w].receive(limit_s)
        self._has_answered[w] = True
        return answer

    def _replace(self, lost: dict[int, str]) -> None:
        """New workers, which know of no episode, in place of those that were lost, with the reasons."""
        if lost and _is_exiting.is_set():
            sys.exit()  # of this thread: the program ends, and its workers with it
        for why, num in collections.Counter(lost.values()).items():
            who = "A worker" if num == 1 else f"Each of {num} workers"
            parallel.say(f"{who} of {self.spec.name} {why}: it is replaced, and the episodes in it are cut off.")
        for w in lost:
            self._workers[w].end()
            self._workers[w], self._has_answered[w] = self._start(self._make), False


class Serving:
    """`Slots` in a worker, and what they answer to questions."""

    def __init__(self, make: bytes):
        self._make = make
        self._slots: Slots | None = None

    def answer(self, method: str, *arguments: Any) -> tuple[bool, Any]:
        """True and what the method of `Slots` returned; or False, what it raised in one line, and the traceback."""
        try:
            if self._slots is None:
                self._slots = Slots(pickle.loads(self._make))
            return True, getattr(self._slots, method)(*arguments)
        except Exception as error:
            return False, (f"{type(error).__name__}: {error}", traceback.format_exc())


class Process:
    """A process with `Serving`, and the pipe to it: a `Worker`."""

    def __init__(self, make: bytes):
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            os._exit(_UNGUARDED)
        context = multiprocessing.get_context("spawn")  # jax has threads, which a fork would not survive
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, question: tuple[Any, ...]) -> None:
        with contextlib.suppress(OSError):  # `receive` will tell
            self._pipe.send(question)

    def receive(self, timeout_s: float) -> tuple[bool, Any]:
        try:
            if not self._pipe.poll(timeout_s):
                raise Lost(f"has not answered for {timeout_s:g} seconds")
            return self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(1.0)
            if self._process.exitcode == _UNGUARDED:
                raise RuntimeError(
                    "workers import the script that begins them, which begins workers again: put what it runs under if "
                    '__name__ == "__main__":, or leave workers out.'
                ) from None
            raise Lost("has died") from None

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(pipe: Any, make: bytes) -> None:
    """What a process does until the other end of its pipe is gone."""
    follow_parent()
    serving = Serving(make)
    try:
        while True:
            pipe.send(serving.answer(*pipe.recv()))
    except (EOFError, OSError):
        os._exit(0)


def follow_parent() -> None:
    """Ends this process once its parent is gone, also while an environment hangs, and leaves Ctrl-C to the parent.

    Does nothing but in a daemon of `multiprocessing`.
    """
    parent = multiprocessing.parent_process()
    if parent is None or not multiprocessing.current_process().daemon:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        parent.join()
        os._exit(0)

    def end_in_silence() -> None:
        parent.join(0.1)  # ends at the same time as its pipes
        if not parent.is_alive():
            os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    # Called before Python tells of an exception: of a pipe that broke since the parent is gone, nobody needs to know.
    multiprocessing.util.Finalize(None, end_in_silence, exitpriority=0)


def _pickled(make: Callable[[], HostEnv]) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(make)
    return cloudpickle.dumps(make)
