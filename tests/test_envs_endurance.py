"""Environments in Python over long runs: nothing is compiled again, memory stays, and no process is left behind."""

import ast
import os
import signal
import subprocess
import sys
import time

import chex
import gymnasium
import jax
import numpy as np
import pytest
from gymnasium import spaces

import jmarl
from jmarl import envs


class Coin(gymnasium.Env):
    """Episodes of three steps, with a view of 4 kB."""

    observation_space = spaces.Box(0, 1, (1000,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.np_random.random(1000, np.float32), {}

    def step(self, action):
        self.time += 1
        return self.np_random.random(1000, np.float32), 1.0, self.time == 3, False, {}


def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux")
@pytest.mark.parametrize("kind", ["one by one", "vector"])
def test_thousands_of_iterations_compile_once_and_take_no_more_memory(kind):
    if kind == "vector":
        make = lambda num: gymnasium.vector.SyncVectorEnv([Coin] * num)  # noqa: E731
        env = envs.from_gymnasium_vector(make, max_steps=3)
    else:
        env = envs.from_host(lambda: envs.gymnasium_adapter.Single(Coin(), "coin"))
    learner = jmarl.random_policy(env.spec, jmarl.RandomConfig())
    chex.clear_trace_counter()

    @chex.assert_max_traces(n=1)
    def iterate(run):
        return jmarl.rollout(env, learner, run, length=2)[0]

    run = jax.jit(lambda key: jmarl.training.start(env, learner, key, num_envs=2))(jax.random.key(0))
    step = jax.jit(iterate)
    for _ in range(300):  # after which caches and allocators have what they need
        run = step(run)
    before = resident_mib()
    for _ in range(1200):
        run = step(run)
    jax.block_until_ready(run.obs)
    assert int(run.env_steps) == 1500 * 4
    # A view that was kept in each step would be 1200 * 2 * 2 * 4 kB, 19 MiB.
    assert resident_mib() - before < 10


PARENT = """
import signal
import threading
import time

import jax
import jmarl
from jmarl.envs import slots, workers
from jmarl.types import EnvSpec


class Still:
    spec = EnvSpec(name="still", agents=("ann",), obs_shape=(1,), state_shape=(1,), num_actions=2)
    info = ()

    def reset(self, seed):
        return slots.Seen([[0.0]])

    def step(self, action):
        time.sleep(600)

    def close(self):
        pass


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background may have none
    stores = [workers.Workers(Still, 1, 600.0, workers.Process) for _ in range(2)]
    for store in stores:
        store.reset([0], [0])
    # The second one hangs, and hears of nothing.
    threading.Thread(target=stores[1].step, args=([0], [0], [False], [0]), daemon=True).start()
    vector = jmarl.make("gymnasium:CartPole-v1", vector="async")
    vector.reset(jax.random.key(0))
    processes = {"waits": stores[0]._workers[0]._process, "hangs": stores[1]._workers[0]._process}
    [processes["vector"]] = vector.unwrapped._groups[0].env.processes
    print({name: process.pid for name, process in processes.items()}, flush=True)
    time.sleep(600)
"""


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split()[2] != "Z"
    except FileNotFoundError:
        return False


def alive_after(pids, seconds):
    """The names of those that are still there then, or as soon as none is."""
    deadline = time.monotonic() + seconds
    while any(map(is_alive, pids.values())) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [name for name, pid in pids.items() if is_alive(pid)]


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs Linux")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_whatever_ends_a_run_ends_its_workers(name, tmp_path):
    (tmp_path / "parent.py").write_text(PARENT)
    with open(tmp_path / "errors", "w") as errors:
        command = [sys.executable, str(tmp_path / "parent.py")]
        parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
    try:
        pids = ast.literal_eval(parent.stdout.readline())
        assert list(pids) == ["waits", "hangs", "vector"] and all(map(is_alive, pids.values()))
        if name == "SIGINT":  # as a terminal sends it, to all
            os.killpg(parent.pid, signal.SIGINT)
        else:
            parent.send_signal(getattr(signal, name))
        parent.wait(30)
        assert alive_after(pids, 30) == []
    finally:
        parent.kill()
        parent.wait()
    # Python tells of an interrupt, once; the workers of nothing.
    assert (tmp_path / "errors").read_text().count("Traceback") == (name == "SIGINT")
