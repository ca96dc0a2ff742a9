"""One run on many devices, in pieces, by several processes: the same numbers as on one device, all at once, by one."""

import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmarl
from jmarl import buffers, envs

if __name__ == "__main__" and sys.argv[1] == "one_of_two":  # before anything uses jax
    index, port = sys.argv.pop(-2), sys.argv.pop(-1)
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=int(index))

MEMORY = envs.probe("memory", num_agents=2, num_steps=3)  # the start state is drawn, so keys matter
SMALL = {"hidden_sizes": (8,), "learning_rate": 1e-2}
PPO = jmarl.PPOConfig(**SMALL, num_epochs=1, num_minibatches=2)
MAPPO = jmarl.on_policy(MEMORY, jmarl.mappo, num_envs=8, rollout_length=4)
QMIX = jmarl.off_policy(
    MEMORY, jmarl.qmix, buffer=buffers.uniform(64, 8), num_envs=4, rollout_length=4, warmup_steps=16
)
MADDPG = jmarl.off_policy(
    MEMORY, jmarl.maddpg, buffer=buffers.uniform(64, 8), num_envs=4, rollout_length=4, warmup_steps=16
)
PARTS_OF_MAPPO = jmarl.data_parallel(jmarl.on_policy(MEMORY, jmarl.mappo, num_envs=2, rollout_length=4), 4)
PARTS_OF_QMIX = jmarl.data_parallel(
    jmarl.off_policy(
        MEMORY, jmarl.qmix, buffer=buffers.prioritized(64, 8), num_envs=2, rollout_length=4, warmup_steps=16
    ),
    4,
)
CASES = {
    "mappo": (MAPPO, PPO),
    "parts_of_mappo": (PARTS_OF_MAPPO, PPO),
    "parts_of_qmix": (PARTS_OF_QMIX, jmarl.QConfig(**SMALL)),
    "qmix": (QMIX, jmarl.QConfig(**SMALL)),
    "maddpg": (MADDPG, jmarl.DDPGConfig(**SMALL)),
}


def train(name="mappo", **changes):
    """The final state and all rows of metrics."""
    rows = []
    sink = jmarl.logging.Sink(lambda info: None, lambda *row: rows.append(row[2]), lambda: None)
    options = {"num_seeds": 8, "evaluation": jmarl.Evaluation(num_episodes=3, every=2), "sinks": [sink]}
    loop, cfg = CASES[name]
    cfg = changes.pop("cfg", cfg)
    state = jmarl.run(loop, jax.random.key(0), cfg, num_iterations=6, iterations_per_chunk=2, **options | changes)
    return state, rows


@functools.cache
def train_on_one(name, num_seeds=8):
    """What several checks compare with."""
    return train(name, num_seeds=num_seeds, devices=1)


def require_close(one, other, **tolerance):
    """To float rounding, by default of a few iterations of learning; keys and counters exactly."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (place, x), y in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        name = jax.tree_util.keystr(place)
        np.testing.assert_allclose(x, y, err_msg=name, **{"rtol": 1e-5, "atol": 1e-5} | tolerance)


# ----------------------------------------------------------------------------------- with eight devices of the host


def seeds_of_mappo():
    compare_with_one_device("mappo")


def seeds_of_qmix():
    compare_with_one_device("qmix")


def compare_with_one_device(name):
    state, rows = train(name)
    one, one_rows = train_on_one(name)
    assert len(state.first.sharding.device_set) == 8 and len(one.first.sharding.device_set) == 1
    require_close(state, one)
    require_close(rows, one_rows)


def environments_of_mappo():
    compare_environments_with_one_device("mappo", 8, devices=8)


def environments_of_qmix():
    compare_environments_with_one_device("qmix", 4)  # environments, so no more devices than that


def environments_of_maddpg():
    compare_environments_with_one_device("maddpg", 2, devices=2)


def compare_environments_with_one_device(name, num, **devices):
    state, rows = train(name, num_seeds=1, shard="envs", **devices)
    num_envs = state.first.shape[1]
    assert len(state.first.sharding.device_set) == num
    assert len(state.first.addressable_shards[0].data[0]) == num_envs // num
    one, one_rows = train_on_one(name, num_seeds=1)
    require_close(state, one)
    require_close(rows, one_rows)


def parts_of_mappo():
    state, rows = train("parts_of_mappo", num_seeds=1, shard="parts")
    require_cut_in_parts(state, 4)  # parts, so no more devices than that
    one, one_rows = train("parts_of_mappo", num_seeds=1, devices=1)
    require_close(state, one)
    require_close(rows, one_rows)


def parts_of_qmix():
    """What was saved by four devices goes on on two."""
    whole, _ = train("parts_of_qmix", num_seeds=1, devices=1)
    with tempfile.TemporaryDirectory() as folder:
        save, same = jmarl.Checkpointing(Path(folder) / "checkpoints"), {"num_seeds": 1, "shard": "parts"}
        state, _ = train("parts_of_qmix", checkpoint=save, callback=lambda *_: True, **same)
        require_cut_in_parts(state, 4)
        state, _ = train("parts_of_qmix", checkpoint=save._replace(resume=True), devices=2, **same)
    require_cut_in_parts(state, 2)
    require_close(state, whole)


def require_cut_in_parts(state, num):
    for x in jax.tree.leaves((state.first, state.buffer)):
        assert len(x.addressable_shards) == num and x.addressable_shards[0].data.shape[1] == x.shape[1] // num


def parts_talk_once_a_gradient():
    """Of one optimiser step, and once for the metrics."""
    cfg = jmarl.PPOConfig(**SMALL, num_epochs=1, num_minibatches=1, normalize_advantage="none")
    placement = jmarl.parallel.Placement(jax.devices()[:4], "parts")
    step = jax.vmap(lambda run: PARTS_OF_MAPPO.step(run, cfg))
    step = placement.jit(step, (placement.state,), (placement.state, placement.rows))
    run = jax.eval_shape(jax.vmap(lambda key: PARTS_OF_MAPPO.init(key, cfg)), jax.random.split(jax.random.key(0), 1))
    text = step.lower(run).compile().as_text()
    assert text.count(" all-reduce(") <= 3 and " all-gather(" not in text  # totals and counts of metrics are two


def sums_over_devices():
    """One for each network and step, of all its gradients: not one for each of its arrays."""
    placement = jmarl.parallel.Placement(jax.devices()[:2], "envs")
    net = jmarl.networks.network(jmarl.networks.Model(hidden_sizes=(8, 8), outputs=(jmarl.networks.Output(2),)), (3,))
    shared = jmarl.parallel.split_networks(net)
    params, first = net.init(jax.random.key(0)), jnp.zeros((4, 6), bool)
    x = jax.random.normal(jax.random.key(1), (4, 6, 3))

    def gradients(params, x, net=shared):
        return jax.grad(lambda params, x: jnp.sum(net.apply(params, (), x, first)[1] ** 2), argnums=(0, 1))(params, x)

    everywhere = placement.everywhere
    together = placement.jit(jmarl.parallel.together(gradients, (None, 1)), (everywhere, everywhere), everywhere)
    require_close(together(params, x), gradients(params, x, net))
    assert together.lower(params, x).compile().as_text().count(" all-reduce(") == 1


def checkpoints():
    whole, _ = train_on_one("mappo")
    with tempfile.TemporaryDirectory() as folder:
        save = jmarl.Checkpointing(Path(folder) / "checkpoints")
        train(checkpoint=save, callback=lambda *_: True)  # one chunk of three
        train(checkpoint=save._replace(resume=True), callback=lambda *_: True, devices=jax.devices()[3:5])
        state, _ = train(checkpoint=save._replace(resume=True))
    assert len(state.first.sharding.device_set) == 8
    require_close(state, whole)


def refusals():
    for arguments, sentence in [
        ({"devices": 9}, "devices=9, but there are 8: choose 1 to 8"),
        ({"devices": []}, "devices=\\[\\] names no device: name at least one, or None"),
        ({"devices": 3}, "8 seeds cannot be shared equally by 3 devices"),
        ({"shard": "agents"}, "shard='agents' is not known"),
        ({"shard": "envs", "devices": 3}, "num_envs=8 cannot be shared equally by 3 devices"),
        ({"shard": "parts"}, "shard='parts' needs a loop that has some: jmarl.data_parallel"),
        (
            {"name": "parts_of_mappo", "shard": "parts", "devices": 3},
            "4 parts cannot be shared equally by 3 devices: choose",
        ),
    ]:
        with pytest.raises(ValueError, match=sentence):
            train(**arguments)
    for num_shared, num in {1: 1, 3: 3, 4: 4, 9: 3, 11: 1, 12: 6, 16: 8}.items():
        of_seeds = jmarl.parallel.choose_devices(None, num_shared, "seeds", lambda: 1)
        of_envs = jmarl.parallel.choose_devices(None, 3, "envs", lambda num_shared=num_shared: num_shared)
        assert len(of_seeds) == len(of_envs) == num
    assert jmarl.use_cores(8) == 8
    with pytest.raises(
        RuntimeError, match=r"use_cores must come before the first use of jax.* 8 CPU devices already, not 2"
    ):
        jmarl.use_cores(2)


ON_EIGHT = [
    seeds_of_mappo,
    seeds_of_qmix,
    environments_of_mappo,
    environments_of_qmix,
    environments_of_maddpg,
    parts_of_mappo,
    parts_of_qmix,
    parts_talk_once_a_gradient,
    sums_over_devices,
    checkpoints,
    refusals,
]


def in_a_process(*words, **variables):
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, __file__, *words], env=os.environ | paths | variables, stdout=subprocess.PIPE, text=True
    )


@pytest.fixture(scope="module")
def outcomes():
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8"
    with in_a_process("eight", XLA_FLAGS=flags) as process:
        return json.loads(process.communicate(timeout=600)[0].splitlines()[-1])


@pytest.mark.parametrize("name", [check.__name__ for check in ON_EIGHT])
def test_on_eight_devices(outcomes, name):
    assert outcomes[name] == "ok"


def eight():
    outcomes = {}
    for check in ON_EIGHT:
        try:
            check()
            outcomes[check.__name__] = "ok"
        except Exception:
            outcomes[check.__name__] = traceback.format_exc()
    print(json.dumps(outcomes))


# ------------------------------------------------------------------------------------------------------------ memory


def machine(folder, groups, **limits):
    """A file system with these limits, and this process in these groups."""
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text(groups)
    for path, limit in limits.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(limit)
    return folder


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/\n", {"sys/fs/cgroup/memory.max": "1048576\n"}, 2**20),
        ("0::/\n", {"sys/fs/cgroup/memory.max": "max\n"}, None),
        ("0::/a/b\n", {"sys/fs/cgroup/a/memory.max": "1048576\n", "sys/fs/cgroup/a/b/memory.max": "max\n"}, 2**20),
        ("0::/a/b\n", {"sys/fs/cgroup/a/memory.max": "4096\n", "sys/fs/cgroup/a/b/memory.max": "2048\n"}, 2048),
        ("0::/a\n", {"sys/fs/cgroup/elsewhere/memory.max": "2048\n"}, None),
        ("3:cpu,memory:/docker/1\n", {"sys/fs/cgroup/memory/memory.limit_in_bytes": "1048576\n"}, 2**20),
        ("3:memory:/d\n0::/\n", {"sys/fs/cgroup/memory/d/memory.limit_in_bytes": "4096\n"}, 4096),
        ("3:memory:/\n", {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ("", {}, None),
    ],
)
def test_the_limit_of_a_container_counts_and_not_the_machine(tmp_path, groups, limits, expected):
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert jmarl.parallel.memory_of_machine(machine(tmp_path, groups, **limits)) == (expected or whole)


def test_memory_that_the_system_does_not_say_is_no_limit(tmp_path, monkeypatch):
    assert jmarl.parallel.memory_of_machine(tmp_path) < float("inf")
    monkeypatch.delattr(os, "sysconf")
    assert jmarl.parallel.memory_of_machine(tmp_path) == float("inf")
    monkeypatch.setattr(jmarl.parallel, "memory_of_machine", lambda: float("inf"))
    loop = jmarl.on_policy(MEMORY, jmarl.random_policy, num_envs=2, rollout_length=2)
    assert len(jmarl.run(loop, jax.random.key(0), jmarl.RandomConfig(), num_iterations=1).first) == 1


# ------------------------------------------------------------------------------------------------ by two processes


def one_of_two(folder):
    """A process that is stopped after the first chunk, and then goes on."""
    state, _ = train_in(Path(folder), callback=lambda *_: True)
    assert len(state.first) == 4  # its own seeds
    train_in(Path(folder), resume=True)
    parts = Path(folder) / "parts"
    parts.mkdir(exist_ok=True)
    train_in(parts, **PARTS, callback=lambda *_: True)
    state, _ = train_in(parts, **PARTS, resume=True)
    assert len(state.first.addressable_shards) == 1 and state.first.addressable_shards[0].data.shape == (1, 4)
    assert jmarl.parallel.gather(state.first).shape == (1, 8)


PARTS = {"name": "parts_of_qmix", "num_seeds": 1, "shard": "parts"}


def train_in(folder, *, resume=False, **changes):
    files = [jmarl.logging.csv_file(folder / "metrics.csv"), jmarl.logging.json_file(folder / "metrics.json")]
    save = jmarl.Checkpointing(folder / "checkpoints", resume=resume)
    return train(sinks=files, checkpoint=save, **changes)


def test_two_processes_equal_one(tmp_path):
    (tmp_path / "two").mkdir()
    (tmp_path / "one").mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = [in_a_process("one_of_two", str(tmp_path / "two"), str(i), port) for i in range(2)]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0].count("Stopped after 2 of 6") == 2 and "Stopped" not in outputs[1]
    state, _ = train_in(tmp_path / "one")
    require_close(train_in(tmp_path / "two", resume=True)[0], state)  # it is complete: this only reads
    series = [json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("one", "two")]
    assert series[0]["env_steps"] == series[1]["env_steps"] == [64, 128, 192]
    one, two = (np.array(list(x["metrics"].values()), float) for x in series)
    np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-5)
    (tmp_path / "one" / "parts").mkdir()
    state, _ = train_in(tmp_path / "one" / "parts", **PARTS)
    require_close(train_in(tmp_path / "two" / "parts", **PARTS, resume=True)[0], state)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
