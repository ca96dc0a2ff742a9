"""Sweeps: settings side by side equal runs of their own, in one piece or in several."""

import json

import jax
import numpy as np
import pytest

import jmarl
from jmarl import envs
from jmarl.cli import report, sweeping, train
from jmarl.cli.options import canonical, without
from jmarl.cli.run_folders import load_metrics

CFG = jmarl.PPOConfig(hidden_sizes=(8,), num_epochs=1, num_minibatches=2)
LOOP = jmarl.on_policy(envs.probe("memory", num_agents=2, num_steps=3), jmarl.ippo, num_envs=16, rollout_length=256)
TINY = "ippo --env CartPole-v1 --num-envs 2 --rollout-length 8 --total-steps 64 --log-every 1 --no-gif --seeds 2"
TINY += " --hidden-sizes 8 --num-epochs 1 --num-minibatches 1 --eval-episodes 2"
REPLAY = "iql --env CartPole-v1 --num-envs 2 --rollout-length 4 --total-steps 16 --log-every 1 --seeds 1"
REPLAY += " --buffer-size 64 --batch-size 4 --warmup-steps 16 --num-updates 1"
REPLAY += " --hidden-sizes 8 --eval-episodes 0"


def learn(cfg, **options):
    """The learners and all rows of metrics."""
    rows = []
    sink = jmarl.logging.Sink(lambda info: None, lambda *row: rows.append(row[2]), lambda: None)
    evaluation = jmarl.Evaluation(num_episodes=2, every=2)
    options = {"num_seeds": 2, "sinks": [sink], "evaluation": evaluation} | options
    state = jmarl.run(LOOP, jax.random.key(0), cfg, num_iterations=4, iterations_per_chunk=2, **options)
    return state.train_state, rows


def require_close(one, other):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), one, other)


@pytest.fixture(scope="module")
def swept():
    cfgs, axes = jmarl.sweep(CFG, learning_rate=[1e-4, 1e-2], gamma=[0.9, 0.5])
    return cfgs, axes, learn(cfgs, sweep_axes=axes)


def test_each_setting_equals_a_run_of_its_own(swept):
    own = learn(CFG.replace(learning_rate=1e-2, gamma=0.5))
    require_close(jax.tree.map(lambda x: x[2:], swept[2]), own)


def test_what_does_not_fit_is_done_in_pieces(swept, capsys, tmp_path):
    cfgs, axes, whole = swept
    with pytest.raises(ValueError, match=r"A single seed needs .* which has 0.0 for this run: lower num_envs") as error:
        learn(cfgs, sweep_axes=axes, seed_axis="vmap", memory_limit=1)
    needed = 4 * 2**20 * float(str(error.value).split()[4])
    for share, at_a_time in {0.7: 2, 0.4: 1}.items():
        stopped = jmarl.Checkpointing(tmp_path / str(at_a_time))
        options = {"sweep_axes": axes, "seed_axis": "vmap", "memory_limit": int(share * needed)}
        require_close(learn(cfgs, **options, checkpoint=stopped), whole)
        assert f"for them: they take turns, {at_a_time} at a time." in capsys.readouterr().out


def test_pieces_are_resumed_in_one_piece_and_the_other_way_round(swept, tmp_path):
    cfgs, axes, whole = swept
    save = jmarl.Checkpointing(tmp_path / "checkpoints")
    learn(cfgs, sweep_axes=axes, memory_limit=3 * 2**20, checkpoint=save, callback=lambda *_: True)
    learner, rows = learn(cfgs, sweep_axes=axes, checkpoint=save._replace(resume=True))
    require_close((learner, rows), (whole[0], whole[1][1:]))


def test_the_script_goes_on_with_a_sweep(tmp_path, capsys, monkeypatch):
    words = f"{TINY} --sweep learning_rate=1e-3,1e-2 num-epochs=1,2 --run-dir"
    whole = train.main([*words.split(), str(tmp_path / "whole")])
    run = jmarl.run
    monkeypatch.setattr(jmarl, "run", lambda *args, **kwargs: run(*args, **kwargs, callback=lambda *_: True))
    folder = train.main([*words.split(), str(tmp_path / "stopped")])
    assert f"To go on: jmarl train --resume {folder}" in capsys.readouterr().out
    monkeypatch.undo()
    configs = list(folder.glob("*/config.json"))  # of the settings that have begun: they stay as they were written
    for config in configs:
        config.write_text(config.read_text() + "\n")
    assert train.main(["--resume", str(folder)]) == folder and not (folder / ".checkpoints").exists()
    assert len(configs) == 2 and all(config.read_text().endswith("}\n\n") for config in configs)
    paths = list(whole.glob("*/metrics.json"))
    assert len(paths) == 4
    for path in paths:
        values, again = (load_metrics(root / path.parent.name) for root in (whole, folder))
        jax.tree.map(np.testing.assert_array_equal, values, again)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_sweep_with_a_warm_up_is_trained_to_its_end_and_then_left_alone(tmp_path, capsys):
    words = f"{REPLAY} --sweep batch-size=4,8 --run-dir {tmp_path / 'sweep'}"
    folder = train.main(words.split())
    assert "in 2 compilations" in capsys.readouterr().out and not (folder / ".checkpoints").exists()
    for name in ("batch-size=4", "batch-size=8"):
        assert load_metrics(folder / name)[0].tolist() == [8, 16]
        assert (folder / name / "params.safetensors").exists()
    before = contents(folder)
    for _ in range(2):
        assert train.main(["--resume", str(folder)]) == folder
        assert "is complete: there is nothing to go on with" in capsys.readouterr().out
        assert contents(folder) == before and not (folder / ".checkpoints").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--checkpoint-every 60", "gamma=0.9 holds metrics, but no checkpoint to go on from: start a new run"),
        ("--checkpoint-every 0", "sweep has no checkpoints, because of --checkpoint-every 0: start a new sweep"),
    ],
)
def test_a_sweep_without_checkpoints_keeps_its_metrics(words, sentence, tmp_path, capsys):
    folder = tmp_path / "sweep"
    (folder / "gamma=0.9").mkdir(parents=True)
    (folder / "gamma=0.9" / "metrics.csv").write_text("env_steps,wall_s,seed\n16,1.0,0\n")
    sweeping._write_status(folder, [*TINY.split(), *words.split(), "--sweep", "gamma=0.9,0.5"], is_complete=False)
    before = contents(folder)
    for _ in range(2):
        with pytest.raises(SystemExit) as error:
            train.main(["--resume", str(folder)])
        assert error.value.code == 2 and sentence in capsys.readouterr().err
        assert contents(folder) == before and len(list(folder.iterdir())) == 2


def test_the_script_leaves_a_run_folder_for_each_setting(tmp_path, capsys):
    words = f"{TINY} --tensorboard --sweep learning_rate=1e-3,1e-2 hidden-sizes=8,4+4 --run-dir {tmp_path / 'sweep'}"
    assert train.main(words.split()) == tmp_path / "sweep"
    out = capsys.readouterr().out
    assert "4 settings of 2 seeds in 2 compilations" in out
    names = [f"learning-rate={rate}-hidden-sizes={sizes}" for rate in ("1e-3", "1e-2") for sizes in ("8", "4+4")]
    assert "return_sum at the end" in out and out.count(" to ") == 4
    assert sorted(path.name for path in (tmp_path / "sweep").iterdir()) == sorted([".sweep.json", *names])

    folder = tmp_path / "sweep" / names[3]
    facts = json.loads((folder / "config.json").read_text())
    assert (facts["config"]["learning_rate"], facts["config"]["hidden_sizes"], facts["seeds"]) == (1e-2, [4, 4], 2)
    again = without(facts["command"].split()[2:], {"--run-dir"})
    own = train.main([*again, "--run-dir", str(tmp_path / "own"), "--absolute-episodes", "0"])
    for name, values in load_metrics(own)[1].items():
        np.testing.assert_allclose(load_metrics(folder)[1][name], values, rtol=1e-5, atol=1e-5)
    assert report.read_run(folder, "eval/return_sum")
    assert all(list((folder / "tensorboard" / f"seed_{seed}").iterdir()) for seed in range(2))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--sweep", "--sweep takes NAME=VALUE,VALUE"),
        ("--sweep gamma", "--sweep takes NAME=VALUE,VALUE, such as learning-rate=1e-4,1e-3, not 'gamma'"),
        ("--sweep gama=0.9,0.8", "--gamma"),
        ("--devices -1", "--devices -1 must be at least 1"),
        ("--sweep gamma=0.9,0.9", "--sweep has the setting gamma=0.9 2 times: give each value once"),
        ("--sweep gamma=0.9 gamma=0.8", "--sweep names gamma 2 times: put all its values into one"),
        ("--sweep num-minibatches=1,7", "num_minibatches=7 must divide"),  # of the second compilation
        ("--sweep gamma=0.9,0.8 --seeds 0", "--seeds 0 must be at least 1"),
        ("--sweep gamma=0.9,0.8 --eval-every 0", "--eval-every 0 must be at least 1"),
        ("--sweep gamma=0.9,0.8 --shard envs --devices 9", "devices=9, but there are 1"),  # by `jmarl.run`
        ("--sweep gamma=0.9,0.8 --gif", "--sweep draws no GIF and plays no absolute episodes"),
        ("--sweep gamma=0.9,0.8 --absolute_episodes=3", "--sweep draws no GIF and plays no absolute episodes"),
    ],
)
def test_the_script_refuses_what_it_does_not_understand(words, sentence, capsys, tmp_path):
    with pytest.raises(SystemExit) as error:
        given = without(TINY.split(), set(map(canonical, words.split())))
        train.main([*given, *words.split(), "--run-dir", str(tmp_path / "run")])
    assert error.value.code == 2 and sentence in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
