"""A search: trials inside the space, each with a run folder; the same command goes on."""

import fcntl

import pytest

from jmarl.cli import experiment, search

TINY = "ippo --env CartPole-v1 --num-envs 2 --rollout-length 8 --total-steps 64 --log-every 1 --seeds 2"
TINY += " --hidden-sizes 8 --num-epochs 1 --num-minibatches 1 --eval-episodes 2 --eval-every 1"
SPACE = "--space learning-rate=1e-4:1e-2:log gamma=0.8:0.9 num-minibatches=2,3"


def test_a_search_leaves_a_run_of_each_possible_trial(tmp_path, capsys):
    words = f"{TINY} {SPACE} --run-dir {tmp_path / 'search'} --trials 2 --no-halving"
    study = search.main(words.split())
    assert [trial.number for trial in study.trials] == [0, 1]
    assert {trial.params["num-minibatches"] for trial in study.trials} == {"2", "3"}
    for trial in study.trials:
        assert 1e-4 <= trial.params["learning-rate"] <= 1e-2 and 0.8 <= trial.params["gamma"] <= 0.9
        is_possible = trial.params["num-minibatches"] != "3"  # of 16 steps
        assert trial.state.name == ("COMPLETE" if is_possible else "FAIL")
        assert (tmp_path / "search" / f"trial-00{trial.number}" / "metrics.json").exists() == is_possible
    out = capsys.readouterr().out
    assert "eval/return_sum, mean over seeds" in out and "Trial 2 of 2" in out


@pytest.fixture
def no_training(monkeypatch):
    """Runs that only report: their score is the learning rate, in each of eight evaluations."""
    trained = []

    def train(algorithm, options, config, env_kwargs, *, command, callback, sinks, is_quiet):
        trained.append(float(config.learning_rate))
        for sink in sinks:
            sink.start({"total_env_steps": 64})
        for env_steps in range(8, 72, 8):
            if callback(env_steps, {"eval/return_sum": [config.learning_rate]}, None):
                break

    monkeypatch.setattr(experiment, "train", train)
    return trained


def words_of(tmp_path, trials, *more):
    rates = ",".join(f"{0.001 * i:g}" for i in (9, 8, 7, 6, 5, 4, 3, 2, 1))
    words = f"{TINY} --space learning-rate={rates} --run-dir {tmp_path / 'search'} --trials {trials}"
    return [*words.split(), *more]


def test_halving_ends_what_is_worse_than_the_trials_before(tmp_path, no_training):
    states = [trial.state.name for trial in search.main(words_of(tmp_path / "all", 12, "--no-halving")).trials]
    assert states == ["COMPLETE"] * 12
    study = search.main(words_of(tmp_path / "halved", 12))
    ended = [trial for trial in study.trials if trial.state.name == "PRUNED"]
    assert ended and all(len(trial.intermediate_values) < 8 for trial in ended)
    # By successive halving: none is ended that is better than all before it.
    for trial in ended:
        before = [float(other.params["learning-rate"]) for other in study.trials[: trial.number]]
        assert float(trial.params["learning-rate"]) <= max(before)


def test_a_trial_of_a_killed_process_is_trained_again(tmp_path, no_training):
    study = search.main(words_of(tmp_path, 1, "--no-halving"))
    trial = study.ask()  # a process that is killed leaves such a trial
    rate = trial.suggest_categorical("learning-rate", study.trials[0].distributions["learning-rate"].choices)
    study = search.main(words_of(tmp_path, 3, "--no-halving"))
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]
    assert study.trials[2].params["learning-rate"] == rate and len(no_training) == 3
    assert len(search.main(words_of(tmp_path, 3, "--no-halving")).trials) == 4  # all is done


def test_a_second_search_in_the_same_folder_is_refused(tmp_path, capsys):
    (tmp_path / "search").mkdir()
    with (tmp_path / "search" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SystemExit) as error:
            search.main(words_of(tmp_path, 1))
    assert error.value.code == 2 and "is being searched by another process" in capsys.readouterr().err
    assert not (tmp_path / "search" / "study.db").exists()


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
