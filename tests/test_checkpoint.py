"""Checkpoints: bit for bit the same run after a restart, whatever ended it; clear refusals; nothing lost."""

import csv
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmarl
from jmarl import PPOConfig, buffers, checkpoint, configs, envs, saving
from jmarl.cli import own, train

GAME = envs.matrix_game([[1.0, 0.0], [0.0, 3.0]], num_steps=3)
MEMORY = envs.probe("memory", num_agents=2, num_steps=3)  # the start state is drawn, so keys matter
SHAPED = MEMORY._replace(
    step=lambda *args: (*(out := MEMORY.step(*args))[:2], out[2].replace(shaped_reward=jnp.ones(2)))
)
SMALL = {"hidden_sizes": (8,), "learning_rate": 1e-2}
PPO = PPOConfig(**SMALL, num_epochs=1, num_minibatches=2)


def on_policy(algorithm, env=GAME):
    return jmarl.on_policy(env, algorithm, num_envs=4, rollout_length=4)


def replayed(algorithm, buffer, env=MEMORY):
    return jmarl.off_policy(env, algorithm, buffer=buffer, num_envs=4, rollout_length=4, warmup_steps=16)


# ------------------------------------------------------------------------------------------------------ bit for bit

SETTINGS = SMALL | {"num_epochs": 1, "pool_size": 2, "feature_size": 4, "cell_size": 4}
RECURRENT = ("mappo", "happo", "vdac_mix", "vdn")
COMPOSED = ["self_play(rnd(normalized(ippo)))", "teams(agent_0=icm(shaped(iql)),agent_1=random)"]


def case(name):
    """A small loop and config of an algorithm of the command line."""
    cfg = own.default_config(name)
    fields = [field for field, _ in configs.fields(cfg)]
    cfg = configs.replace(cfg, {field: SETTINGS[end] for field in fields if (end := field.split(".")[-1]) in SETTINGS})
    cfg = cfg.replace(recurrent=True) if name in RECURRENT else cfg
    algorithm = own.find_algorithm(name)
    env = SHAPED if "shaped" in name else MEMORY
    if own.learns_from(name) != "replay":
        return on_policy(algorithm, env), cfg
    buffer = buffers.prioritized(64, 8, sequence_length=3) if name == "vdn" else buffers.uniform(64, 8)
    return replayed(algorithm, buffer, env), cfg


@pytest.mark.parametrize("name", [*own.ALGORITHMS, *COMPOSED])
def test_k_iterations_saved_and_k_more_equal_2k(name, tmp_path):
    loop, cfg = case(name)
    cfg = jmarl.training.with_horizon(loop, cfg, 6)
    init = jax.jit(lambda key: loop.init(key, cfg))
    step = jax.jit(lambda run: loop.step(run, cfg), donate_argnums=0)
    run = init(jax.random.key(0))
    for _ in range(3):
        run, _ = step(run)
    with checkpoint.Writer(tmp_path / "saved") as writer:
        writer.save(3, run)
        for _ in range(3):  # while the save is under way: its arrays are donated here
            run, metrics = step(run)
    again = checkpoint.restore(tmp_path / "saved", jax.eval_shape(init, jax.random.key(0)))
    for _ in range(3):
        again, metrics_again = step(again)
    require_identical(run, again)
    require_identical(metrics, metrics_again)


def require_identical(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (place, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape, jax.tree_util.keystr(place)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y, jax.tree_util.keystr(place))


def run_in(folder, *, resume=False, num_iterations=12, callback=None, every_s=60.0, best="eval/return_sum", **changes):
    """A run with everything that has to survive: sinks, evaluation, the best learner."""
    folder.mkdir(exist_ok=True)
    options = {"iterations_per_chunk": 1, "num_seeds": 2, "evaluation": jmarl.Evaluation(num_episodes=3, every=3)}
    return jmarl.run(
        on_policy(jmarl.ippo, MEMORY),
        jax.random.key(0),
        PPO,
        num_iterations=num_iterations,
        sinks=[jmarl.logging.csv_file(folder / "metrics.csv"), jmarl.logging.json_file(folder / "metrics.json")],
        checkpoint=jmarl.Checkpointing(folder / "checkpoints", every_s, resume=resume, best=best),
        callback=callback,
        **options | changes,
    )


def written(folder):
    """All that a run leaves behind, without the clock."""
    with (folder / "metrics.csv").open(newline="") as file:
        table = [{name: cell for name, cell in row.items() if name != "wall_s"} for row in csv.DictReader(file)]
    series = json.loads((folder / "metrics.json").read_text())
    assert series["wall_s"] == sorted(series.pop("wall_s"))
    saved = checkpoint.describe(folder / "checkpoints")
    return table, series, saved["step"], saved["leaves"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that was never stopped."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return run_in(folder), folder


def test_a_run_that_was_stopped_goes_on_as_if_nothing_had_happened(whole, tmp_path, capsys):
    run_in(tmp_path, callback=lambda env_steps, *_: env_steps == 7 * 16)
    assert "Stopped after 7 of 12 iterations" in capsys.readouterr().out
    table, series, step, _ = written(tmp_path)
    assert series["env_steps"] == [16 * i for i in range(1, 8)] and len(table) == 2 * 7 and step == 7
    require_identical(run_in(tmp_path, resume=True), whole[0])
    assert written(tmp_path) == written(whole[1])


def test_a_run_that_is_complete_is_not_run_again(whole):
    before = written(whole[1])
    require_identical(run_in(whole[1], resume=True), whole[0])
    assert written(whole[1]) == before


def test_a_run_that_was_killed_while_it_saved_goes_on_as_if_nothing_had_happened(whole, tmp_path):
    paths = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, __file__, str(tmp_path)], env=paths) as process:
        saves = tmp_path / "checkpoints"
        deadline = time.monotonic() + 120
        while not (list(saves.glob("[3-9]")) and list(saves.glob("*tmp*"))) and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    killed_at = json.loads((tmp_path / "metrics.json").read_text())["env_steps"][-1]
    assert killed_at < 12 * 16
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("9999,1.0,0,2")  # a row that was torn
    require_identical(run_in(tmp_path, resume=True), whole[0])
    assert written(tmp_path) == written(whole[1])
    assert not list(saves.glob("*tmp*"))


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew_and_says_so(whole, tmp_path, capsys):
    def die(*_):
        raise KeyboardInterrupt  # what is raised otherwise would be saved first

    with pytest.raises(KeyboardInterrupt):
        run_in(tmp_path, callback=die)
    assert checkpoint.steps(tmp_path / "checkpoints") == []
    require_identical(run_in(tmp_path, resume=True), whole[0])
    assert "checkpoints holds no checkpoint yet: the run begins anew" in capsys.readouterr().out
    assert written(tmp_path) == written(whole[1])


def test_metrics_without_checkpoints_are_never_replaced(whole, tmp_path):
    shutil.copy(whole[1] / "metrics.csv", tmp_path)
    for _ in range(2):  # the first time leaves nothing that would look like a run to go on with
        with pytest.raises(FileExistsError, match=r"metrics.csv exists already"):
            run_in(tmp_path)
        with pytest.raises(FileNotFoundError, match=r"checkpoints does not exist"):
            run_in(tmp_path, resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]
    assert (tmp_path / "metrics.csv").read_bytes() == (whole[1] / "metrics.csv").read_bytes()


def test_the_best_learner_of_each_seed_is_kept(whole):
    state, folder = whole
    scores = np.array(json.loads((folder / "metrics.json").read_text())["metrics"]["eval/return_sum"], float)
    like = jmarl.running.Best(train_state=state.train_state, score=jnp.zeros(2))
    best = checkpoint.restore(folder / "checkpoints", like, part="best")
    learner = checkpoint.restore(folder / "checkpoints", state.train_state, part="best.train_state")
    require_identical(best.train_state, learner)
    np.testing.assert_allclose(best.score, np.nanmax(scores, axis=1), rtol=1e-6)
    at_iteration = 1 + np.nanargmax(scores, axis=1)
    np.testing.assert_array_equal(best.train_state.env_steps, 16 * at_iteration)


def test_a_score_is_beaten_only_by_a_higher_one():
    def best(*scores):
        learner = jmarl.types.TrainState(
            params={"w": jnp.array(scores)[:, None]},
            step=jnp.zeros(4, jnp.int32),
            env_steps=jnp.zeros(4, jnp.int32),
            opt_state=jax.random.split(jax.random.key(int(scores[0])), 4),
        )
        return jmarl.running.Best(train_state=learner, score=jnp.array(scores))

    old, new = best(1.0, 2.0, 3.0, np.nan), best(2.0, 2.0, np.nan, 4.0)
    kept = saving.better(old, new, np.ones(4, bool))
    np.testing.assert_array_equal(kept.score, [2.0, 2.0, 3.0, 4.0])
    np.testing.assert_array_equal(kept.train_state.params["w"][:, 0], kept.score)
    assert (
        kept.train_state.opt_state[0] == new.train_state.opt_state[0]
        and kept.train_state.opt_state[1] == old.train_state.opt_state[1]
    )
    assert kept.train_state.step.dtype == jnp.int32
    unspoilt = saving.better(old, new, np.zeros(4, bool))  # the new parameters are not finite
    np.testing.assert_array_equal(unspoilt.score, old.score)


def test_another_run_is_not_resumed_and_none_is_overwritten(whole):
    _, folder = whole
    before = written(folder)
    with pytest.raises(ValueError, match=r"num_iterations is 12 in the checkpoint, but 11 here"):
        run_in(folder, resume=True, num_iterations=11)
    with pytest.raises(ValueError, match=r"best is eval/return_sum in the checkpoint, but eval/return_mean here"):
        run_in(folder, resume=True, best="eval/return_mean")
    with pytest.raises(FileExistsError, match=r"checkpoints exists already: resume the run"):
        run_in(folder)
    assert written(folder) == before


def test_the_metric_of_the_best_must_be_measured(tmp_path):
    options = jmarl.Checkpointing(tmp_path / "checkpoints", best="eval/won")
    with pytest.raises(ValueError, match=r"best='eval/won' is not measured: choose one of eval/a, eval/b"):
        saving.Saver(options, None, dict.fromkeys(["eval/b", "eval/a"]), {}, None)
    assert not (tmp_path / "checkpoints").exists()


def test_the_script_goes_on_with_a_run_from_its_folder_alone(tmp_path, capsys):
    folder = tmp_path / "a run"
    words = "mappo --env CartPole-v1 --seeds 2 --num-envs 2 --rollout-length 8 --total-steps 64 --log-every 1 --no-gif"
    words += " --hidden-sizes 8 --num-epochs 1 --num-minibatches 1 --eval-episodes 2 --absolute-episodes 0"
    words += " --checkpoint-every 1e-9"
    train.main([*words.split(), "--run-dir", str(folder)])
    finished = written(folder), (folder / "params.safetensors").read_bytes(), (folder / "config.json").read_bytes()
    for step in (3, 4):  # as if the run had been killed before
        shutil.rmtree(folder / "checkpoints" / str(step))
    (folder / "params.safetensors").unlink()
    assert train.main(["--resume", str(folder)]) == folder
    assert finished == (
        written(folder),
        (folder / "params.safetensors").read_bytes(),
        (folder / "config.json").read_bytes(),
    )
    assert "64 environment steps each, 32 of them done" in capsys.readouterr().out

    empty = folder / "checkpoints"
    for path in empty.glob("[0-9]*"):
        shutil.rmtree(path)
    for is_there in (True, False):  # checkpoints were removed, and then their folder
        if not is_there:
            shutil.rmtree(empty)
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for _ in range(2):
            with pytest.raises(SystemExit) as error:
                train.main(["--resume", str(folder)])
            assert error.value.code == 2
            assert "a run holds metrics, but no checkpoint to go on from: start a new" in capsys.readouterr().err
            assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
            assert empty.exists() == is_there


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--resume", "there is none"], "there is none holds no run to go on with: there is none is no run folder"),
        (["--resume", "x", "--seeds", "3"], "--seeds does not go with --resume: all but --total-steps is read from"),
        (["mappo", "--resume=x"], "x holds no run to go on with"),
    ],
)
def test_the_script_refuses_what_it_cannot_go_on_with(words, sentence, capsys):
    with pytest.raises(SystemExit) as error:
        train.main(words)
    assert error.value.code == 2 and sentence in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------- folders

TREE = {
    "learner": {"kernel": jnp.arange(5000.0).reshape(2, 2500), "none": jnp.zeros((2, 0))},
    "count": jnp.array([2**24 + 1, 7]),
    "half": jnp.ones((2, 3), jnp.bfloat16),
    "flags": (jnp.array([True, False]),),
    "key": jax.random.split(jax.random.key(3), 2),
    "other_key": jax.random.split(jax.random.key(3, impl="rbg"), 2),
}


@pytest.fixture
def saved(tmp_path):
    with checkpoint.Writer(tmp_path / "saved") as writer:
        writer.save(1, TREE, {"note": "one"})
        writer.save(2, TREE)
    return tmp_path / "saved"


def test_every_dtype_and_typed_keys_survive(saved):
    again = checkpoint.restore(saved, jax.eval_shape(lambda: TREE))
    require_identical(TREE, again)
    assert jax.random.key_impl(again["other_key"]) == jax.random.key_impl(TREE["other_key"])
    assert checkpoint.describe(saved, 1)["info"] == {"note": "one"}


def test_two_leaves_of_one_name_are_refused(tmp_path):
    tree = {"a.b": jnp.zeros(2), "a": {"b": jnp.ones(2)}}
    with (
        checkpoint.Writer(tmp_path / "saved") as writer,
        pytest.raises(ValueError, match="Two arrays have the same name: let no key of the tree hold a dot"),
    ):
        writer.save(1, tree)


def test_a_part_is_read_alone(saved):
    require_identical(checkpoint.restore(saved, TREE["learner"], part="learner"), TREE["learner"])


def test_relative_paths(saved, monkeypatch):
    monkeypatch.chdir(saved.parent)
    require_identical(checkpoint.restore("saved", TREE), TREE)
    with checkpoint.Writer("saved", resume=True) as writer:
        writer.save(3, TREE)
    assert checkpoint.steps("saved") == [1, 2, 3]


def test_a_seed_is_taken_out(saved):
    one = checkpoint.take_seed(checkpoint.restore(saved, TREE), 1)
    require_identical(one, jax.tree.map(lambda x: x[1], TREE))
    with pytest.raises(ValueError, match="seed=2 is none of the 2 seeds: choose 0 to 1"):
        checkpoint.take_seed(TREE, 2)


def test_the_last_ones_are_kept(tmp_path):
    for resume in (False, True):
        with checkpoint.Writer(tmp_path / "saved", keep=2, resume=resume) as writer:
            for step in range(3):
                writer.save(step + 10 * resume, TREE["key"])
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["11", "12", "jmarl.json"]


def test_what_a_killed_process_left_goes_and_nothing_else(saved):
    for name in ("0.old", "3.orbax-checkpoint-tmp", "my notes"):
        (saved / name).mkdir()
    with checkpoint.Writer(saved, resume=True):
        pass
    assert sorted(path.name for path in saved.iterdir()) == ["1", "2", "jmarl.json", "my notes"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"learner": {**TREE["learner"], "kernel": jnp.zeros((2, 4))}},
            "learner.kernel is float32 [2, 2500] in the checkpoint, but float32 [2, 4] is expected here",
        ),
        (
            {"count": jnp.zeros(2)},  # 16777217 would become 16777216
            "count is int32 [2] in the checkpoint, but float32 [2] is expected here",
        ),
        ({"key": jnp.zeros((2, 2), jnp.uint32)}, "key is key<fry> [2] in the checkpoint, but uint32 [2, 2] is"),
        ({"extra": jnp.zeros(2)}, "extra is expected here, but is not in the checkpoint"),
        ({"flags": ()}, "flags.0 is in the checkpoint, but not expected here"),
    ],
)
def test_another_tree_is_refused_and_its_leaf_named(saved, change, sentence):
    with pytest.raises(ValueError) as error:
        checkpoint.restore(saved, TREE | change)
    assert sentence in str(error.value)


def test_a_folder_without_checkpoints_is_refused(tmp_path):
    for read in (
        lambda folder: checkpoint.restore(folder, TREE),
        lambda folder: checkpoint.Writer(folder, resume=True),
    ):
        with pytest.raises(FileNotFoundError, match="none does not exist, so there are no checkpoints to read"):
            read(tmp_path / "none")
    (tmp_path / "1").mkdir()
    with pytest.raises(ValueError, match=r"is not a folder of jmarl's checkpoints: its jmarl.json"):
        checkpoint.restore(tmp_path, TREE)
    for _ in range(2):  # a folder of ours without a checkpoint may be used
        with checkpoint.Writer(tmp_path / "new"):
            pass
    with pytest.raises(FileNotFoundError, match="holds no checkpoint: none was completed yet"):
        checkpoint.restore(tmp_path / "new", TREE)


def test_a_checkpoint_that_is_not_there_is_refused(saved):
    with pytest.raises(FileNotFoundError, match="holds no checkpoint 7: choose one of 1, 2"):
        checkpoint.restore(saved, TREE, step=7)


def test_another_format_is_refused(saved):
    (saved / "jmarl.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="has format 99, but this version of jmarl reads format 1"):
        checkpoint.restore(saved, TREE)


def test_a_folder_with_anything_in_it_is_not_written_to(saved, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").write_text("1")
    for folder in (saved, tmp_path / "mine"):
        before = sorted(folder.rglob("*"))
        with pytest.raises(FileExistsError, match="exists already"):
            checkpoint.Writer(folder)
        assert sorted(folder.rglob("*")) == before


def test_a_step_is_not_written_twice(saved):
    with (
        checkpoint.Writer(saved, resume=True) as writer,
        pytest.raises(FileExistsError, match="holds a checkpoint 2 already"),
    ):
        writer.save(2, TREE)


def test_a_second_writer_is_refused(saved):
    with (
        checkpoint.Writer(saved, resume=True),
        pytest.raises(FileExistsError, match="is being written by another run"),
    ):
        checkpoint.Writer(saved, resume=True)


def largest_file(folder):
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def test_a_flipped_bit_is_found(saved):
    path = largest_file(saved / "2" / "arrays")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"2 is damaged, .*: remove it to go on from another \(1\)"):
        checkpoint.restore(saved, TREE)
    require_identical(checkpoint.restore(saved, TREE, step=1), TREE)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:9])])
@pytest.mark.parametrize("item", ["arrays", "facts"])
def test_missing_and_cut_files_are_found(saved, item, damage):
    damage(largest_file(saved / "2" / item))
    with pytest.raises(ValueError, match=rf"2 is damaged, its {item} cannot be read: remove it"):
        checkpoint.restore(saved, TREE)


def facts_file(folder, step=2):
    return max((path for path in (folder / str(step) / "facts").iterdir()), key=lambda path: path.stat().st_size)


def test_no_damaged_facts_are_taken_for_whole_ones(saved):
    path = facts_file(saved)
    data, rng = path.read_bytes(), np.random.default_rng(0)
    assert json.loads(data)["step"] == 2
    for place in rng.integers(len(data), size=25).tolist():
        damaged = bytearray(data)
        damaged[place] ^= 1 << int(rng.integers(7))
        for content in (bytes(damaged), data[:place] + bytes(len(data) - place)):
            path.write_bytes(content)
            try:
                facts = checkpoint.describe(saved)
            except ValueError as error:
                assert "2 is damaged, " in str(error) and "remove it to go on from another (1)" in str(error)
            else:  # the name of the checksum, or a space
                path.write_bytes(data)
                assert facts == checkpoint.describe(saved)


def test_checkpoints_of_another_place_are_refused(saved, tmp_path):
    with checkpoint.Writer(tmp_path / "other") as writer:
        writer.save(5, TREE)
    shutil.copytree(tmp_path / "other" / "5", saved / "5")
    with pytest.raises(ValueError, match=r"5 is damaged, it is checkpoint 5, or of another run"):
        checkpoint.restore(saved, TREE)
    shutil.rmtree(saved / "5")
    (saved / "2").rename(saved / "7")
    with pytest.raises(ValueError, match=r"7 is damaged, it is checkpoint 2, or of another run"):
        checkpoint.describe(saved)
    saved.rename(tmp_path / "moved")
    assert checkpoint.describe(tmp_path / "moved", 1)["step"] == 1


def test_facts_of_before_have_no_checksum_and_are_read(saved):
    path = facts_file(saved)
    facts = {name: x for name, x in json.loads(path.read_text()).items() if name in ("format", "leaves", "info")}
    path.write_text(json.dumps(facts))
    (saved / "jmarl.json").write_text(json.dumps({"what": "checkpoints of jmarl", "format": 1}))
    require_identical(checkpoint.restore(saved, TREE), TREE)


def test_what_goes_wrong_is_one_sentence(tmp_path):
    """In a process of its own, which shows all that orbax and its threads write."""
    code = """
        import pathlib, resource, sys
        import jax.numpy as jnp
        from jmarl import checkpoint
        folder, tree = pathlib.Path(sys.argv[1]), {"a": jnp.arange(1e5)}
        writer = checkpoint.Writer(folder)
        writer.save(1, tree)
        writer.wait()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            writer.save(2, tree)
            writer.wait()
        except OSError as error:
            print(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        (folder / "1/arrays/manifest.ocdbt").write_bytes(b"nothing")
        try:
            checkpoint.restore(folder, tree)
        except ValueError as error:
            print(error)
        writer.save(3, tree)
        raise KeyboardInterrupt  # while orbax writes
    """
    paths = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "saved")]
    result = subprocess.run(words, env=paths, capture_output=True, text=True, timeout=120)
    first, second = result.stdout.splitlines()
    assert first.startswith("Could not write a checkpoint to ") and " is damaged, its arrays cannot be read" in second
    assert "absl" not in result.stderr and result.stderr.count("Traceback") == 1, result.stderr
    assert result.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert checkpoint.steps(tmp_path / "saved") == [1, 3]  # and at once: orbax alone waits for five minutes


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of threads that orbax gives up
def test_a_full_disk_loses_nothing_that_was_saved(saved):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = checkpoint.Writer(saved, resume=True)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        with pytest.raises(OSError, match=r"Could not write a checkpoint to .* \(earlier ones are intact: 1, 2\)"):
            writer.save(3, TREE)
            writer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    require_identical(checkpoint.restore(saved, TREE), TREE)
    writer.save(4, TREE)  # there is room again
    writer.close()
    assert checkpoint.steps(saved) == [1, 2, 4]


if __name__ == "__main__":  # the process that is killed
    run_in(Path(sys.argv[1]), every_s=0.0)
