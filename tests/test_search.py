"""A search: trials inside the space, each with a run folder; the same command goes on."""

import pytest

from jmarl.cli import search

TINY = "ippo --env CartPole-v1 --num-envs 2 --rollout-length 8 --total-steps 64 --log-every 1 --seeds 2"
TINY += " --hidden-sizes 8 --num-epochs 1 --num-minibatches 1 --eval-episodes 2 --eval-every 1"
SPACE = "--space learning-rate=1e-4:1e-2:log gamma=0.8:0.9 num-minibatches=2,3"


def test_a_search_and_how_it_goes_on(tmp_path, capsys, monkeypatch):
    words = f"{TINY} {SPACE} --run-dir {tmp_path / 'search'} --trials"
    study = search.main([*words.split(), "2", "--no-halving"])
    assert [trial.number for trial in study.trials] == [0, 1]
    assert {trial.params["num-minibatches"] for trial in study.trials} == {"2", "3"}
    for trial in study.trials:
        assert 1e-4 <= trial.params["learning-rate"] <= 1e-2 and 0.8 <= trial.params["gamma"] <= 0.9
        is_possible = trial.params["num-minibatches"] != "3"  # of 16 steps
        assert trial.state.name == ("COMPLETE" if is_possible else "FAIL")
        assert (tmp_path / "search" / f"trial-00{trial.number}" / "metrics.json").exists() == is_possible
    study.ask()  # a process that is killed leaves such a trial
    monkeypatch.setattr(search.optuna.Trial, "should_prune", lambda trial: True)
    monkeypatch.setattr(search, "_suggest", lambda trial, name, choices: {"num-minibatches": "2"}.get(name, "1e-3"))
    study = search.main([*words.split(), "4"])
    assert [trial.state.name for trial in study.trials[2:]] == ["FAIL", "PRUNED"]
    out = capsys.readouterr().out
    assert "eval/return_sum, mean over seeds" in out and "Trial 4 of 4" in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--space gamma", "--space takes NAME=LOW:HIGH, NAME=LOW:HIGH:log (of positive numbers) or NAME=VALUE,VALUE"),
        ("--space gamma=1:0", "not 'gamma=1:0'"),
        ("--space gamma=0:1:log", "not 'gamma=0:1:log'"),
        ("--space gama=0.8:0.9", "--gamma"),
    ],
)
def test_it_refuses_what_it_does_not_understand(words, sentence, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        search.main([*TINY.split(), *words.split(), "--run-dir", str(tmp_path / "search")])
    assert error.value.code == 2 and sentence in capsys.readouterr().err
    assert not (tmp_path / "search").exists()


def test_another_question_needs_another_folder(tmp_path, capsys):
    args = ["--run-dir", str(tmp_path), "--trials", "0"]
    search.main([*TINY.split(), "--space", "gamma=0.8:0.9", *args])
    with pytest.raises(SystemExit):
        search.main([*TINY.split(), "--space", "gamma=0.8:0.95", *args])
    assert "holds a search with space ['gamma=0.8:0.9']" in capsys.readouterr().err
