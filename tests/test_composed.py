"""Algorithms within algorithms on the command line: their names, options, run folders."""

import json

import numpy as np
import pytest

from jmarl.cli import composed, evaluate, main, run_folders, train

TINY = "--num-envs 2 --rollout-length 8 --total-steps 32 --log-every 1 --seeds 2 --eval-episodes 2 --no-gif"
TINY += " --absolute-episodes 0 --checkpoint-every 1e-9"


def test_teams_train_resume_and_evaluate_like_any_algorithm(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main.main(["new", "env", "my_env"])
    named = ["--env", "my_env.py:my_env"]
    words = ["--team", "ann=rnd(ippo)", "--team", "bob=random", *named, *TINY.split()]
    small = ["--ann.inner.hidden-sizes", "4", "--ann.hidden-sizes", "4", "--ann.bonus-start", "0.5"]
    train.main([*words, *small, "--run-dir", "run"])
    facts = run_folders.read_config(tmp_path / "run")
    assert facts["algorithm"] == "teams(ann=rnd(ippo),bob=random)"
    assert facts["config"]["ann"]["inner"]["hidden_sizes"] == [4]
    _, metrics = run_folders.load_metrics("run")
    np.testing.assert_array_equal(metrics["ann/intrinsic/weight"], np.full((2, 2), 0.5))

    train.main(["--resume", "run", *named, "--total-steps", "64"])
    assert run_folders.load_metrics("run")[0][-1] == 64
    assert evaluate.main(["run", *named, "--episodes", "2"])["eval/return_sum"].shape == (2,)

    capsys.readouterr()
    train.main(["--config", "run/config.json", *named, "--ann.feature-size", "3", "--dry-run"])
    assert "ann.feature_size" in (shown := capsys.readouterr().out) and "ann.inner.hidden_sizes" in shown

    facts["config"]["ann"]["inner"]["speed"] = 3
    (tmp_path / "run" / "config.json").write_text(json.dumps(facts))
    with pytest.raises(SystemExit):
        evaluate.main(["run", *named, "--overwrite"])
    assert "config.json has ann.inner.speed in its config" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, message",
    [
        ("mappo --intrinsic novelty", "--intrinsic novelty is unknown: choose icm or rnd"),
        ("mappo --intrinsic", "--intrinsic takes one model"),
        ("mappo --shaping 1:0", "--shaping 1:0 is no schedule: write KIND:START:END:STEPS"),
        ("mappo --self-play 16", "--self-play takes NAME=VALUE, such as pool-size=16"),
        ("mappo --self-play --self-play", "--self-play is given twice"),
        ("mappo --team a=mappo", "leave mappo out, or --team"),
        ("--team a=mappo b", "must give each team an algorithm"),
        ("--intrinsic icm", "name an algorithm before --intrinsic"),
        ("icm(mapo)", "no algorithm is called 'mapo'"),
        ("icn(mappo)", "no combinator is called 'icn'"),
        ("icm(mappo", "is no algorithm: write COMBINATOR(ALGORITHM)"),
        ("--team adversary=mappo --env MPE_simple_tag_v3", "agent_0 of MPE_simple_tag_v3 is in no team"),
        ("mappo --shaping linear", "has no shaped reward of its own"),
    ],
)
def test_what_does_not_fit_is_refused(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as error:
        train.main([*words.split(), "--dry-run"])
    assert error.value.code == 2 and message in capsys.readouterr().err


def test_options_stand_for_a_name_and_its_values():
    options = "--normalize-observations --intrinsic icm --shaping=linear:1:0:2e6 --self-play pool-size=4 --seeds 2"
    words = composed.take_options(["mappo", *options.split()])
    assert words[0] == "self_play(shaped(icm(normalized(mappo))))"
    assert " ".join(words[1:]) == (
        "--seeds 2 --inner.shaping-schedule linear --inner.shaping-start 1 --inner.shaping-end 0 "
        "--inner.shaping-steps 2e6 --pool-size 4"
    )
    assert composed.take_options(["mappo", "--seeds", "2"]) == ["mappo", "--seeds", "2"]


POTENTIAL = """
import jax.numpy as jnp
from jmarl import combinators

def near_the_origin(algorithm):
    return combinators.shaped(algorithm, potential=lambda obs: -jnp.abs(obs.agents).sum(-1))

def as_it_is(algorithm):
    return algorithm

def nothing(algorithm):
    return 3
"""


def test_a_combinator_may_be_ones_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "potentials.py").write_text(POTENTIAL)
    name = "potentials.py:near_the_origin(ippo)"
    words = ["--env", "MPE_simple_v3", *TINY.split(), "--inner.hidden-sizes", "4", "--shaping-steps", "64"]
    train.main([name, *words, "--run-dir", "run"])
    facts = run_folders.read_config(tmp_path / "run")
    assert facts["algorithm"] == name and facts["config"]["inner"]["hidden_sizes"] == [4]
    _, metrics = run_folders.load_metrics("run")
    assert "shaping/weight" in metrics and np.isfinite(metrics["shaping/weight"]).all()

    written = (tmp_path / "run" / "config.json").read_text()
    (tmp_path / "evil.py").write_text("raise SystemExit('code of a folder was run')")
    for there in (name, "pettingzoo:mpe.x:y(evil.py:f)", "gymnasium:x(evil.py:f)", "icm(evil.py:f)", "evil.py:f(ippo)"):
        (tmp_path / "run" / "config.json").write_text(written.replace(name, there))
        with pytest.raises(SystemExit) as error:  # a folder alone has no code run
            train.main(["--resume", "run", "--total-steps", "64"])
        assert error.value.code == 2 and "which is not run unless you name it yourself" in capsys.readouterr().err
    (tmp_path / "run" / "config.json").write_text(written)
    train.main([name, "--resume", "run", "--total-steps", "64"])
    assert run_folders.load_metrics("run")[0][-1] == 64

    train.main(["potentials.py:as_it_is(ippo)", *words[:2], "--dry-run"])
    assert "hidden_sizes" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        train.main(["potentials.py:nothing(ippo)", *words[:2], "--dry-run"])
    assert "potentials.py:nothing returned int: a combinator returns an algorithm" in capsys.readouterr().err
