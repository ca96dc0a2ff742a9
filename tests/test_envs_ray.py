"""Environments in actors of Ray, on two nodes of a cluster that are one machine."""

import os
import socket
import subprocess
import sys
import tempfile

import cloudpickle
import failing
import jax
import numpy as np
import pytest
import ray
from test_envs_endurance import alive_after, is_alive

import jmarl
from jmarl import envs
from jmarl.envs import ray_actors

cloudpickle.register_pickle_by_value(failing)  # tests are much to import


@pytest.fixture(scope="module")
def cluster():
    """Of a head without environments, to which the tests belong, and one node."""
    from ray.cluster_utils import Cluster

    with (
        tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_AUTH_MODE", "disabled")  # or a file in the user's home would decide
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        made.add_node(num_cpus=2)
        patch.setenv("RAY_ADDRESS", made.address)
        yield made
        ray.shutdown()
        made.shutdown()


def test_no_cluster_is_told_of_at_once(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(
        ValueError, match=r"^on='ray': Ray finds no cluster at RAY_ADDRESS=127.0.0.1:1 .*=HOST:PORT` joi"
    ):
        envs.from_host(failing.Count, workers=2, on="ray")
    assert not ray.is_initialized()


def test_a_cluster_that_ended_is_not_waited_for(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    asked = []
    monkeypatch.setattr(ray, "init", lambda address, **_: asked.append(address))
    ray_actors.Cluster()  # no machine was joined to a cluster
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
    ray_actors.Cluster()
    with socket.create_server(("127.0.0.1", 0)) as server:
        (tmp_path / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{server.getsockname()[1]}")
        ray_actors.Cluster()
    assert asked == ["local", "local", "auto"]


DRIVER = """
import os
import threading
import time

import cloudpickle
import failing
import ray
from jmarl.envs import ray_actors, workers

if __name__ == "__main__":
    cloudpickle.register_pickle_by_value(failing)
    store = workers.Workers(failing.failing, 1, 600.0, ray_actors.Cluster().start)
    store.reset([0], [0])
    pid = ray.get(store._workers[0]._actor.__ray_call__.remote(lambda _: os.getpid()))
    threading.Thread(target=store.step, args=([0], [0], [False], [[2]]), daemon=True).start()
    time.sleep(1)
    print(pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs Linux")
def test_actors_end_with_a_run_that_was_killed(cluster, tmp_path):
    (tmp_path / "driver.py").write_text(DRIVER)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)])}
    command = [sys.executable, str(tmp_path / "driver.py")]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
    try:
        pids = {"hangs": int(driver.stdout.readline())}
        assert is_alive(pids["hangs"])
    finally:
        driver.kill()
        driver.wait()
    assert alive_after(pids, 30) == []


def test_actors_that_die_or_hang_are_replaced_and_what_they_raise_is_told(cluster, capfd):
    start = ray_actors.Cluster().start
    failing.require_that_the_lost_are_replaced(start, capfd, where=f" on {ray.util.get_node_ip_address()}")


def first_of(env):
    """What the first rollout gives, and what makes the next."""
    learner = jmarl.random_policy(env.spec, jmarl.RandomConfig())
    run = jax.jit(lambda key: jmarl.training.start(env, learner, key, num_envs=4))(jax.random.key(0))
    roll = jax.jit(lambda run: jmarl.training.rollout(env, learner, run, length=9)[:2])
    return roll(run), roll


def test_a_machine_that_is_gone_takes_its_episodes_with_it_and_no_others(cluster, capfd):
    node = cluster.add_node(num_cpus=2)
    on_ray = envs.from_host(failing.Count, workers=2, on="ray")
    (_, expected), _ = first_of(envs.from_host(failing.Count))
    (run, batch), roll = first_of(on_ray)
    jax.tree.map(np.testing.assert_array_equal, expected, batch)

    where = lambda _: (ray.get_runtime_context().get_node_id(), os.getpid())  # noqa: E731  which is sent as it is
    told = [ray.get(worker._actor.__ray_call__.remote(where)) for worker in on_ray.unwrapped._store._workers]
    nodes, pids = zip(*told, strict=True)
    assert len(set(nodes)) == 2 and cluster.head_node.node_id not in nodes
    gone = nodes.index(node.node_id)
    cluster.remove_node(node, allow_graceful=False)
    assert alive_after({"of the lost node": pids[gone]}, 60) == []  # an actor answers until it knows
    _, batch = roll(run)
    steps = batch.steps
    episode, time = np.moveaxis(np.asarray(steps.obs.agents[:, :, 0]), -1, 0)
    next_episode, next_time = np.moveaxis(np.asarray(steps.next_obs.agents[:, :, 0]), -1, 0)
    is_cut = np.asarray(steps.reward[..., 0] == 0)
    assert is_cut.sum(0).tolist() == [i % 2 == gone for i in range(4)]
    np.testing.assert_array_equal(steps.last, is_cut | (next_time == episode % 5 + 1))
    assert not steps.terminated[is_cut].any()
    np.testing.assert_array_equal(next_episode, episode)
    np.testing.assert_array_equal(next_time, time + ~is_cut)
    goes_on = ~np.asarray(steps.last[:-1])
    np.testing.assert_array_equal(episode[1:][goes_on], next_episode[:-1][goes_on])
    np.testing.assert_array_equal(time[1:], np.where(goes_on, next_time[:-1], 0))
    assert (episode[1:] != episode[:-1])[~goes_on].all()
    said = f"A worker of count on {ray.util.get_node_ip_address()} has died: it is replaced, and the episodes in it are"
    out, err = capfd.readouterr()
    assert (out.count("\n"), err) == (1, "") and out.startswith(said)
