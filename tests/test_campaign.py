"""jmarl campaign: what is done is left alone, what was stopped goes on, and bad files are refused in a sentence."""

import importlib.util
import json
import tomllib
from pathlib import Path

import pytest

from jmarl.cli import campaign, run_folders

TRAIN = (
    "ippo --env CartPole-v1 --seeds 2 --num-envs 2 --rollout-length 4 --total-steps {steps} --hidden-sizes 8 "
    "--num-epochs 1 --num-minibatches 1 --eval-episodes 2 --absolute-episodes 0 --no-gif --devices 1"
)


def written(path, *runs):
    tables = ("[[run]]\n" + "\n".join(f"{name} = {json.dumps(value)}" for name, value in run.items()) for run in runs)
    path.write_text("\n".join(tables))
    return str(path)


def test_a_campaign_is_worked_off_and_leaves_a_table(tmp_path, capfd):
    run = {"name": "one", "train": TRAIN.format(steps=80), "published": 500, "source": "somebody"}
    words = [written(tmp_path / "all.toml", run), "--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "kept")]
    assert campaign.main([*words, "--dry-run"]) == 0
    assert "one: 0 steps done" in capfd.readouterr().out and not (tmp_path / "runs").exists()
    assert campaign.main(words) == 0
    assert "one: begins" in capfd.readouterr().out
    assert sorted(path.name for path in (tmp_path / "kept" / "one").iterdir()) == sorted(campaign.KEPT)
    table = (tmp_path / "kept" / "all.md").read_text()
    assert "| one | 8.0e+01 | 2 |" in table and "| 500 | somebody |" in table
    assert campaign.main(words) == 0  # nothing is trained again
    assert "begins" not in (out := capfd.readouterr().out) and "one: done" in out
    curves = [tmp_path / folder / "one" / "learning_curve.png" for folder in ("runs", "kept")]
    for curve in curves:
        curve.unlink()  # as if it had failed after its last step
    assert campaign.main(words) == 0
    assert "one: goes on" in capfd.readouterr().out and all(curve.exists() for curve in curves)


def test_a_stopped_run_goes_on(tmp_path, monkeypatch, capfd):
    run = {"name": "one", "train": TRAIN.format(steps=80)}
    words = [written(tmp_path / "all.toml", run), "--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "kept")]
    asked = []

    def stopped(words, seconds):
        asked.append((words, seconds))
        folder = tmp_path / "runs" / "one"
        folder.mkdir(parents=True, exist_ok=True)
        facts = {"algorithm": "ippo", "env": "CartPole-v1", "env_kwargs": {}, "config": {}, "format": 2, "seeds": 2}
        facts |= {"num_envs": 2, "rollout_length": 4, "total_steps": 80, "command": "jmarl train " + " ".join(words)}
        (folder / "config.json").write_text(json.dumps(facts))
        metrics = {"eval/return_sum": [[1.0] * len(asked), [3.0] * len(asked)]}
        steps = [40, 80][: len(asked)]
        (folder / "metrics.json").write_text(json.dumps({"env_steps": steps, "wall_s": steps, "metrics": metrics}))
        (folder / "learning_curve.png").write_bytes(b"")
        return 0

    monkeypatch.setattr(campaign, "run_train", stopped)
    assert campaign.main([*words, "--minutes", "1"]) == 0
    assert "one: 40 steps done" in capfd.readouterr().out and not (tmp_path / "kept").exists()
    facts = run_folders.read_config(tmp_path / "runs" / "one")
    assert campaign.main(words) == 0
    assert asked[1] == (["--resume", str(tmp_path / "runs" / "one")], None) and 0 < asked[0][1] <= 60
    assert "2 (" in (tmp_path / "kept" / "all.md").read_text() and facts["seeds"] == 2


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("run = 3", "must hold tables [[run]]"),
        ("[[run]]\nname = 'a'", "run 1 has no train"),
        ("[[run]]\nname = 'a/b'\ntrain = 'ippo'", "without a path"),
        ("[[run]]\nname = 'a'\ntrain = 'ippo'\nseeds = 4", "seeds is unknown"),
        ("[[run]]\nname = 'a'\ntrain = 'ippo'\npublished = 'much'", "must be a number"),
        ("[[run]]\nname = 'a'\ntrain = 'ippo'\n[[run]]\nname = 'a'\ntrain = 'ippo'", "two runs called a"),
        ("[[run]]\nname = 'a'\ntrain = 'ippo --run-dir b'", "leave --run-dir out"),
        ("[[run]]\nname = 'a'\ntrain = 'ippo --sweep gamma=0.9,0.99'", "leave --sweep out"),
        ("[[run]]\nname = 'a'\ntrain = 'ippo --env nowhere'", "a: "),
        ("[[run]]\nname = 'a'\ntrain = 'ippo --gamma banana'", "a: jmarl train refuses 'ippo --gamma banana'"),
        ("[[run", "is no TOML"),
    ],
)
def test_bad_files_are_refused_before_anything_is_trained(text, sentence, tmp_path, monkeypatch, capsys):
    (tmp_path / "all.toml").write_text(text)
    monkeypatch.setattr(campaign, "run_train", lambda *args: pytest.fail("trained"))
    with pytest.raises(SystemExit) as error:
        campaign.main([str(tmp_path / "all.toml"), "--results", str(tmp_path)])
    assert error.value.code == 2
    assert sentence in capsys.readouterr().err


def test_another_command_does_not_go_on_with_a_run(tmp_path):
    folder = tmp_path / "one"
    folder.mkdir()
    facts = {"algorithm": "ippo", "env": "CartPole-v1", "env_kwargs": {}, "config": {}, "format": 2}
    (folder / "config.json").write_text(json.dumps({**facts, "command": "jmarl train ippo --run-dir x"}))
    with pytest.raises(campaign.UsageError, match="was begun with 'ippo --run-dir x', but the file asks for 'iql"):
        campaign.require_same_command(campaign.Entry("iql", "one"), ["iql"], folder)


def test_one_seed_has_no_interval(tmp_path):
    facts = {"algorithm": "ippo", "env": "CartPole-v1", "env_kwargs": {}, "config": {}, "format": 2, "seeds": 1}
    facts |= {"num_envs": 2, "rollout_length": 4, "total_steps": 80, "command": "jmarl train ippo"}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    metrics = {"env_steps": [80], "wall_s": [1], "metrics": {"eval/return_sum": [[3.0]]}}
    (tmp_path / "metrics.json").write_text(json.dumps(metrics))
    assert campaign.row(campaign.Entry("ippo", "one"), tmp_path)[3] == "3"


@pytest.mark.parametrize("needs_envpool", [False, True])
def test_the_committed_campaign_can_be_trained(needs_envpool, tmp_path, capsys):
    """Of EnvPool's environments where it is installed; where it is not, they are refused before anything is trained."""
    runs = tomllib.loads(Path("benchmarks/evidence/campaign.toml").read_text())["run"]
    runs = [run for run in runs if ("envpool" in run["name"]) == needs_envpool]
    words = [written(tmp_path / "part.toml", *runs), "--dry-run"]
    if needs_envpool and not importlib.util.find_spec("envpool"):
        assert len(runs) == 4
        with pytest.raises(SystemExit):
            campaign.main([*words, "--results", str(tmp_path)])
        assert 'needs EnvPool: pip install "jmarl[envpool]".' in capsys.readouterr().err
    else:
        assert campaign.main(words) == 0
        assert capsys.readouterr().out.count("\n") == len(runs)
