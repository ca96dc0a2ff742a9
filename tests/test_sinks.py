"""TensorBoard and W&B: what a run sends arrives, per seed and once, also when it is resumed; a step has one row."""

import csv
import json
import struct
import sys
import types

import jax
import numpy as np
import pytest

import jmarl
from jmarl import logging
from jmarl.cli import train

INFO = {"num_seeds": 2, "total_env_steps": 400}
ROWS = {
    100: {"train/return_sum": np.array([np.nan, -2.5], np.float32)},
    200: {"train/return_sum": np.array([-1.0, -2.0]), "eval/return_sum": np.array([7.0, 8.0])},
    300: {"train/return_sum": np.array([-0.5, -1.5])},
}
SERIES = [
    {"train/return_sum": {200: -1.0, 300: -0.5}, "eval/return_sum": {200: 7.0}},
    {"train/return_sum": {100: -2.5, 200: -2.0, 300: -1.5}, "eval/return_sum": {200: 8.0}},
]


def write(sink, steps=tuple(ROWS), resumed_at=None):
    sink.start(INFO | {"resumed_at": resumed_at})
    for step in steps:
        sink.write(step, step / 100, ROWS[step])


# ------------------------------------------------------------------------------------------------------ TensorBoard


def events(folder):
    """A folder's events in the order of its files, decoded by hand: length, its checksum, the event, its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(folder.glob("events*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            yield Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]


def series(folder):
    """What TensorBoard shows of a folder: a session that starts at a step makes it forget what came from there on."""
    shown = {}
    for event in events(folder):
        if event.HasField("session_log"):
            for values in shown.values():
                for step in [step for step in values if step >= event.step]:
                    del values[step]
        for value in event.summary.value:
            shown.setdefault(value.tag, {})[event.step] = value.simple_value
    return shown


def test_tensorboard_has_one_run_per_seed(tmp_path):
    sink = logging.tensorboard(tmp_path / "board")
    write(sink)
    sink.close()
    assert [series(tmp_path / "board" / f"seed_{seed}") for seed in range(2)] == SERIES


def test_tensorboard_of_a_killed_run_has_what_was_flushed(tmp_path):
    sink = logging.tensorboard(tmp_path / "board")
    write(sink)
    sink.flush()  # and never closed
    assert series(tmp_path / "board" / "seed_1") == SERIES[1]


def test_a_resumed_tensorboard_forgets_what_followed_the_checkpoint(tmp_path):
    sink = logging.tensorboard(tmp_path / "board")
    write(sink)
    sink.write(400, 4.0, {"train/return_sum": np.array([99.0, 99.0])})  # not reached again
    sink.close()
    again = logging.tensorboard(tmp_path / "board")
    write(again, steps=(200, 300), resumed_at=100)
    again.close()
    assert [series(tmp_path / "board" / f"seed_{seed}") for seed in range(2)] == SERIES


def test_a_tensorboard_folder_that_exists_is_refused(tmp_path):
    with pytest.raises(FileExistsError, match="exists already: give another path"):
        logging.tensorboard(tmp_path).start(INFO)


# -------------------------------------------------------------------------------------------------------------- W&B


class FakeRun:
    offline, dir = True, "somewhere"

    def __init__(self, options):
        self.options, self.logged, self.finished = options, {}, False

    def log(self, values, step):
        self.logged.setdefault(step, {}).update(values)

    def finish(self):
        self.finished = True


@pytest.fixture
def fake(monkeypatch):
    """A module in place of wandb that keeps what it is given."""

    def init(**options):
        if options.get("mode") == "refused":
            raise module.Error("api_key not configured (no-tty)\nmore")
        module.runs.append(FakeRun(options))
        return module.runs[-1]

    module = types.SimpleNamespace(runs=[], init=init, Settings=dict, Error=type("Error", (Exception,), {}))
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_has_one_run_per_seed(fake):
    sink = logging.wandb(project="p", name="mappo", id="1a", config={"gamma": 0.9}, dir="here")
    write(sink)
    sink.close()
    wall_s = [{name: v for name, v in {100: 1.0, 200: 2.0, 300: 3.0}.items()}] * 2
    for seed, run in enumerate(fake.runs):
        names = {name for values in run.logged.values() for name in values}
        logged = {name: {step: v[name] for step, v in run.logged.items() if name in v} for name in names}
        assert logged == {**SERIES[seed], "wall_s": wall_s[seed]}
        assert run.finished
        options = {k: v for k, v in run.options.items() if k != "settings"}
        assert options == {
            "project": "p",
            "group": "mappo",
            "name": f"mappo seed {seed}",
            "id": f"1a-{seed}",
            "config": {"gamma": 0.9, "seed_index": seed},
            "dir": "here",
            "resume": "allow",
            "reinit": "create_new",  # several runs in one process
        }


def test_wandb_that_does_not_start_says_how(fake):
    with pytest.raises(
        ValueError, match=r"does not start \(api_key not configured \(no-tty\)\): log in with .* WANDB_MODE"
    ):
        logging.wandb(project="p", mode="refused").start(INFO)


MODULES = {"tensorboardX": "tensorboardX.event_file_writer", "wandb": "wandb"}  # what is imported of a package


@pytest.mark.parametrize(
    ("make", "package", "extra"),
    [(lambda: logging.tensorboard("x"), "tensorboardX", "tensorboard"), (logging.wandb, "wandb", "wandb")],
)
def test_missing_packages_name_the_extra(monkeypatch, make, package, extra):
    monkeypatch.setitem(sys.modules, MODULES[package], None)
    with pytest.raises(ImportError, match=rf'needs {package}: pip install "jmarl\[{extra}\]"'):
        make()


# ---------------------------------------------------------------------------------------------------- files, scripts


def test_a_second_call_adds_to_the_row_of_the_same_step(tmp_path):
    """Also in a process that resumed, and twice."""
    best = {"absolute/return_sum": np.array([5.0, np.nan])}
    for resumed_at in (None, 300):
        table = logging.csv_file(tmp_path / "metrics.csv")
        content = logging.json_file(tmp_path / "metrics.json")
        for sink in (table, content):
            write(sink, steps=tuple(ROWS) if resumed_at is None else (), resumed_at=resumed_at)
            sink.write(300, 99.0, best)
            sink.close()
        with (tmp_path / "metrics.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [(r["env_steps"], r["seed"]) for r in rows] == [(s, i) for s in ("100", "200", "300") for i in "01"]
        assert [r["absolute/return_sum"] for r in rows] == [""] * 4 + ["5.0", ""]
        assert [r["train/return_sum"] for r in rows] == ["", "-2.5", "-1.0", "-2.0", "-0.5", "-1.5"]
        assert float(rows[-1]["wall_s"]) == 3.0
        saved = json.loads((tmp_path / "metrics.json").read_text())
        assert (saved["env_steps"], saved["wall_s"]) == ([100, 200, 300], [1.0, 2.0, 3.0])
        assert saved["metrics"]["absolute/return_sum"] == [[None, None, 5.0], [None, None, None]]
        assert saved["metrics"]["train/return_sum"] == [[None, -1.0, -0.5], [-2.5, -2.0, -1.5]]


TINY = ["random", "--env", "CartPole-v1", "--env-kwargs", "max_steps_in_episode=4"]
TINY += ["--num-envs", "2", "--rollout-length", "4", "--seeds", "2", "--total-steps", "16", "--log-every", "1"]
TINY += ["--eval-episodes", "2", "--absolute-episodes", "4", "--no-gif"]


def test_train_sends_everything_to_both(tmp_path, fake):
    folder = train.main([*TINY, "--tensorboard", "--wandb", "project", "--run-dir", str(tmp_path / "run")])
    content = json.loads((folder / "metrics.json").read_text())
    for seed in range(2):
        board = series(folder / "tensorboard" / f"seed_{seed}")
        assert board.keys() == content["metrics"].keys()
        for name, values in board.items():
            assert all(step in content["env_steps"] and np.isfinite(value) for step, value in values.items())
            assert list(values.values())[-1] == pytest.approx(content["metrics"][name][seed][-1])
        run = fake.runs[seed]
        assert (
            run.finished and "absolute/return_sum" in run.logged[16] and run.options["config"]["algorithm"] == "random"
        )

    ids = [run.options["id"] for run in fake.runs]
    train.main(["--resume", str(folder)])  # nothing is left to do, but for what the end brings
    assert [run.options["id"] for run in fake.runs[2:]] == ids
    assert json.loads((folder / "metrics.json").read_text()) == content


def test_a_sweep_sends_each_setting_to_wandb(tmp_path, fake):
    words = [*TINY, "--absolute-episodes", "0", "--wandb", "project", "--sweep", "seed=0,1"]
    folder = train.main([*words, "--run-dir", str(tmp_path / "sweep")])
    assert [run.options["name"] for run in fake.runs] == [f"seed={i} seed {seed}" for i in (0, 1) for seed in (0, 1)]
    for i, run in enumerate(fake.runs):
        assert run.finished and list(run.logged) == [8, 16]
        facts = json.loads((folder / f"seed={i // 2}" / "config.json").read_text())
        assert run.options["id"] == f"{facts['wandb_id']}-{i % 2}" and run.options["config"]["seed"] == i // 2


@pytest.mark.parametrize(
    ("option", "package"), [(("--tensorboard",), "tensorboardX"), (("--wandb", "project"), "wandb")]
)
def test_train_without_the_package_leaves_no_folder(tmp_path, monkeypatch, capsys, option, package):
    monkeypatch.setitem(sys.modules, MODULES[package], None)
    with pytest.raises(SystemExit) as error:
        train.main([*TINY, *option, "--run-dir", str(tmp_path / "run")])
    assert error.value.code == 2 and f"needs {package}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_run_with_a_board(tmp_path):
    """From Python, with any loop."""
    env = jmarl.envs.matrix_game([[1.0, 0.0], [0.0, 0.0]])
    loop = jmarl.on_policy(env, jmarl.random_policy, num_envs=2, rollout_length=2)
    sink = logging.tensorboard(tmp_path / "board")
    jmarl.run(
        loop,
        jax.random.key(0),
        jmarl.RandomConfig(),
        num_iterations=2,
        iterations_per_chunk=1,
        num_seeds=2,
        sinks=[sink],
    )
    assert list(series(tmp_path / "board" / "seed_1")["train/return_sum"]) == [4, 8]
