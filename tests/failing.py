"""Environments for workers: one fails in the way its action says. What all kinds of workers make of that."""

import jax
import numpy as np
import pytest

from jmarl.envs.slots import HostStep, Seen, Slots
from jmarl.envs.workers import WorkerFailed, Workers
from jmarl.types import EnvSpec


def failing():
    """Of a class that a worker need not import to have."""
    import os
    import time

    from jmarl.envs import HostStep, Seen
    from jmarl.types import EnvSpec

    class Failing:
        spec = EnvSpec(name="failing", agents=("ann",), obs_shape=(1,), state_shape=(1,), num_actions=4, max_steps=9)
        info = ("time",)

        def reset(self, seed):
            self.time, self.place = 0, seed
            return Seen([[seed]])

        def step(self, action):
            self.time += 1
            if action[0] == 1:
                os._exit(1)
            if action[0] == 2:
                time.sleep(100)
            if action[0] == 3:
                raise ZeroDivisionError("the wheel came off")
            return HostStep(Seen([[self.time]]), 1.0, False, self.time == 2, {"time": self.time})

        def close(self):
            pass

    return Failing()


class Count:
    """Two agents see which episode it is and the time, and earn 1 each. It ends after 1 to 5 steps, or truncates."""

    spec = EnvSpec(name="count", agents=("ann", "bob"), obs_shape=(2,), state_shape=(4,), num_actions=3, max_steps=5)
    info = ()

    def reset(self, seed):
        self.time, self.episode = 0, seed % 2**20  # exact in single precision
        return self.seen()

    def seen(self):
        return Seen(np.array([[self.episode, self.time]] * 2))

    def step(self, action):
        self.time += 1
        last = self.time == self.episode % 5 + 1
        return HostStep(self.seen(), 1.0, last and self.episode % 2 == 1, last)

    def close(self):
        pass


def require_that_the_lost_are_replaced(start, capsys, where=""):
    """Raises where two workers that `start` makes, of three environments, answer otherwise than `Slots`, or are missed.

    Args:
      start: see `Workers`.
      capsys: reads what is said.
      where: what is said of a worker's place.
    """
    workers = Workers(failing, 2, 30.0, start)
    go, die, hang, fail = (np.array([action]) for action in range(4))
    try:
        here = Slots(failing)
        for store in (here, workers):
            shown = store.reset([0, 1, 2], [5, 6, 7])
            answers = store.step([0, 1, 2], [0] * 3, [False] * 3, [go] * 3)
            told = [*shown, *answers] if store is here else told
        jax.tree.map(np.testing.assert_array_equal, told, [*shown, *answers])
        # 0 and 2 are in one worker, which dies at the step of 2. Nobody asks for 0 then.
        lost, other = workers.step([2, 1], [1, 1], [False] * 2, [die, go])
        assert (lost.last, lost.terminated.tolist(), lost.reward.tolist()) == (True, [False], [0.0])
        np.testing.assert_array_equal(lost.seen[0], [[1.0]])  # what it showed before
        assert other.reward == 1.0 and other.last
        said = f"A worker of failing{where} has died: it is replaced, and the episodes in it are cut off.\n"
        assert capsys.readouterr().out == said
        [later] = workers.step([0], [1], [False], [go])  # it was lost, too
        assert later.last and not later.terminated.any() and later.reward == 0.0
        np.testing.assert_array_equal(later.seen[0], [[1.0]])
        for number in (2, 0):
            [first] = workers.step([number], [2], [False], [go])
            assert first.reward == 1.0 and not first.last
            np.testing.assert_array_equal(first.seen[0], [[1.0]])
        workers._timeout_s = 2.0
        lost, other = workers.step([2, 1], [3, 2], [False] * 2, [hang, go])
        assert lost.last and lost.reward == 0.0 and other.reward == 1.0 and not other.last
        assert f"A worker of failing{where} has not answered for 2 seconds: it is rep" in capsys.readouterr().out
        workers._timeout_s = 30.0
        with pytest.raises(
            WorkerFailed, match=r"in a worker:\nTraceback .*\n(.*\n)*ZeroDivisionError: the wh"
        ) as error:
            workers.step([2, 1], [4, 3], [False] * 2, [fail, go])
        assert error.value.summary == "ZeroDivisionError: the wheel came off"
        [again] = workers.reset([1], [8])  # what 1 answered then is not taken for this
        np.testing.assert_array_equal(again[0], here.reset([1], [8])[0][0])
        assert capsys.readouterr().out == ""
    finally:
        workers.close()
    return workers
