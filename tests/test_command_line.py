"""The command line: options, errors, and a tiny run from end to end."""

import csv
import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

import jmarl
import throughput
from jmarl import presets
from jmarl.cli import experiment, main, own, plotting, report, run_folders, statistics_of_runs, train
from jmarl.cli import options as command_line

TINY = ["--hidden-sizes", "8", "--num-epochs", "1", "--num-minibatches", "1"]
CHEAP = ["--env", "CartPole-v1", "--seeds", "1", "--num-envs", "2", "--rollout-length", "4"]  # to compile


def parse(line):
    return command_line.parse(line.split(), experiment.options_of, prog="jmarl train", does="Trains {algorithm}.")[:3]


def refused(capsys, *words):
    """What the user reads: exit code 2, and no traceback."""
    with pytest.raises(SystemExit) as error:
        train.main(words)
    assert error.value.code == 2
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize("line", ["", "--help", "ippo --env CartPole-v1 -h"])
def test_help_names_every_field_of_the_config(line, capsys):
    with pytest.raises(SystemExit) as error:
        parse(line)
    assert error.value.code == 0
    text = capsys.readouterr().out
    for field in dataclasses.fields(jmarl.PPOConfig):
        assert f"--{field.name.replace('_', '-')}" in text
    assert "discount of future rewards" in text


def test_options_have_flat_names_and_types():
    algorithm, options, config = parse(
        "mappo --seeds 8 --total-steps 2e6 --learning-rate 1e-3 --recurrent --hidden-sizes 32 16"
        " --target-kl 0.02 --recurrent-length none --env-kwargs num_agents=4"
    )
    assert (algorithm, options.seeds, options.total_steps, options.env_kwargs) == (
        "mappo",
        8,
        2_000_000,
        ("num_agents=4",),
    )
    assert (config.learning_rate, config.recurrent, config.hidden_sizes) == (1e-3, True, (32, 16))
    assert (config.target_kl, config.recurrent_length) == (0.02, None)


def test_the_environment_decides_the_defaults():
    spread, cartpole = parse("mappo")[2], parse("ippo --env CartPole-v1")[2]
    assert (spread.gamma, cartpole.gamma) == (0.85, 0.99)
    assert parse("ippo --env=MPE_simple_tag_v3")[2].sharing == "per_group"


ENVS = ["MPE_simple_spread_v3", "HeuristicEnemySMAX", "overcooked", "hanabi", "ant_4x2", "Pendulum-v1", "predator_prey"]


@pytest.mark.parametrize(
    "algorithm, env",
    [("mappo", env) for env in ENVS] + [(name, ENVS[0]) for name in own.ALGORITHMS if name != "mappo"],
)
def test_command_line_defaults_are_the_preset(algorithm, env):
    preset = presets.for_environment(algorithm, env)
    _, options, config = parse(f"{algorithm} --env {env}")
    assert config == preset.config
    assert command_line.key_values(options.env_kwargs) == preset.env_kwargs
    if preset.replay is not None:
        assert (options.buffer_size, options.num_updates) == preset.replay[:4:3]


@pytest.mark.parametrize("env", ENVS)
@pytest.mark.parametrize("algorithm", own.ALGORITHMS)
def test_presets_fit_together(algorithm, env):
    preset = presets.for_environment(algorithm, env)
    assert isinstance(own.default_config(algorithm), type(preset.config))  # what reads a run back knows all its fields
    assert presets.task(env).items() <= preset.env_kwargs.items()  # all learn the same task
    assert preset.num_envs * preset.rollout_length % getattr(preset.config, "num_minibatches", 1) == 0
    if preset.replay is not None:
        assert preset.replay.buffer_size >= max(preset.replay.batch_size, preset.num_envs * preset.rollout_length)


@pytest.mark.parametrize("algorithm", own.ALGORITHMS)
def test_presets_are_what_their_learner_can_learn_from(algorithm):
    """Sizes, fields and kinds of replay go together: what a learner or a loop would refuse, it refuses here."""
    arguments = command_line.parse([algorithm], experiment.options_of, prog="jmarl train", does="")
    built = experiment.build(*arguments[:4])
    state = jax.eval_shape(built.loop.init, jax.random.key(0), built.config)
    assert jax.eval_shape(built.loop.step, state, built.config)[0].train_state.step.shape == ()


def test_unknown_option_names_the_nearest(capsys):
    assert "--learning-rate" in refused(capsys, "mappo", "--learning-rat", "1e-3")


def test_unknown_algorithm_names_the_nearest(capsys):
    assert refused(capsys, "mapo") == "error: no algorithm is called 'mapo': did you mean mappo?"


def test_missing_algorithm_is_asked_for(capsys):
    assert "name an algorithm before --env" in refused(capsys, "--env", "MPE_simple_spread_v3")


def test_unknown_environment_names_the_nearest(capsys):
    assert "did you mean 'MPE_simple_spread_v3'" in refused(capsys, "mappo", "--env", "MPE_simple_spred_v3")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--env-kwargs", "num_agents"), "KEY=VALUE"),
        (("--env-kwargs", "num_agent=4"), "num_agents"),
        (("--total-steps", "1.5"), "1.5 is not a whole number"),
        (("--total-steps", "inf"), "inf is not a whole number"),
        (("--total-steps", "nan"), "nan is not a whole number"),
        (("--total-steps", "0"), "--total-steps 0 must be at least 1"),
        (("--log-every", "0"), "--log-every 0 must be at least 1"),
        (("--eval-every", "0"), "--eval-every 0 must be at least 1"),
        (("--eval-episodes", "-1"), "--eval-episodes -1 must be positive, or 0"),
        (("--checkpoint-every", "nan"), "--checkpoint-every nan must be positive, or 0"),
        (("--checkpoint-every", "-1"), "--checkpoint-every -1.0 must be positive, or 0"),
        (("--keep-checkpoints", "0"), "--keep-checkpoints 0 must be at least 1"),
        (("--seed", "-1"), "--seed -1 must be at least 0 and less than 2**32"),
        (("--seed", "4294967296"), "--seed 4294967296 must be at least 0 and less than 2**32"),
        ((*CHEAP, "--env-kwargs", "max_steps_in_episode=0"), "Episodes of CartPole-v1 have 0 steps"),
        (("--num-envs", "0"), "num_envs=0 must be at least 1"),
        (("--parts", "0"), "--parts 0 must be at least 1"),
        ((*CHEAP, "--parts", "3"), "--num-envs 2 cannot be shared equally by --parts 3: choose a multiple"),
        ((*CHEAP, "--num-minibatches", "7"), "num_minibatches=7 must divide"),
        ((*CHEAP, "--num-resets", "0"), "num_resets=0 must be at least 1"),
        ((*CHEAP, "--recurrent", "--recurrent-length", "9"), "recurrent_length=9 must divide"),
        (("--activation", "rely"), "invalid choice 'rely'"),
        (("--action-distribution", "gaussian"), "discrete"),
        (("--seeds", "0"), "--seeds 0 must be at least 1"),
        (("--env", "CartPole-v1", "--env", "Pendulum-v1"), "--env is given 2 times: give it once"),
        (("--gif", "--no-gif"), "--gif is given 2 times"),
        (("--ent-coef", "nan"), "--ent-coef nan must be a finite number"),
        (("--vf-coef", "inf"), "--vf-coef inf must be a finite number"),
        (("--learning-rate", "1e39"), "--learning-rate 1e+39 must be a finite number"),
        (("--learning-rate", "-1e-3"), "--learning-rate -0.001 must not be negative"),
        (("--adam-eps", "-1"), "--adam-eps -1 must not be negative"),
        (("--target-kl", "-0.1"), "--target-kl -0.1 must not be negative"),
        (("--max-grad-norm", "0"), "--max-grad-norm 0 must be positive"),
        (("--horizon", "-3"), "--horizon -3 must not be negative"),
        (("--horizon", "0"), "--horizon 0 must be positive"),
        (("--num-epochs", "2147483648"), "--num-epochs 2147483648 must be less than 2**31"),
        (("--hidden-sizes", "4294967296"), "--hidden-sizes 4294967296 must be less than 2**31"),
        (("--num-envs", "1e10"), "--num-envs 10000000000 must be less than 2**31"),
        (("--total-steps", "1e30"), "iterations: 2**31 are too many"),
        (("--eval-episodes", "1e30"), "must be less than 2**31"),
        (("--absolute-episodes", "1e30"), "must be less than 2**31"),
        ((*CHEAP, "--eval-episodes", "2147483647"), "--eval-episodes 2147483647 of 1 seeds side by side take"),
        (("--checkpoint-every", "inf"), "--checkpoint-every inf must be positive"),
        (("--max-eval-steps", "0"), "--max-eval-steps 0 must be at least 1"),
        (
            ("--env", "jaxnav", "--env-kwargs", 'map_params={"a": {"dir_path": "x"}}'),
            "dir_path, from which JaxNav loads",
        ),
        (("--env", "nowhere.py:make"), "there is no file"),
        (("--env", "no_such_module:make"), "there is no module no_such_module"),
        (("--env", "json:lods"), "json has no function 'lods': did you mean loads?"),
        (("--env", "json:dumps", "--env-kwargs", "obj=1"), "json:dumps returned str: it must return a jmarl.types.Env"),
    ],
)
def test_bad_values_are_refused_in_one_sentence_and_leave_no_folder(words, sentence, tmp_path, capsys):
    assert sentence in refused(capsys, "mappo", *words, "--run-dir", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_tiny_run_leaves_everything_behind(tmp_path, capsys):
    folder = tmp_path / "run"
    words = ["mappo", "--env", "MPE_simple_v3", *TINY, "--num-envs", "4", "--rollout-length", "26", "--seeds", "2"]
    words += ["--total-steps", "208", "--eval-episodes", "2", "--absolute-episodes", "0", "--run-dir", str(folder)]
    assert train.main(words) == folder
    assert {path.name for path in folder.iterdir()} == {
        *("config.json", "metrics.csv", "metrics.json", "learning_curve.png", "trained.gif", "params.safetensors"),
        "checkpoints",
    }
    config = json.loads((folder / "config.json").read_text())
    assert config["command"].endswith(f"mappo {' '.join(words[1:])}")
    assert (config["seeds"], config["config"]["hidden_sizes"], config["config"]["horizon"]) == (2, [8], 2)

    env_steps, metrics = run_folders.load_metrics(folder)
    assert env_steps.tolist() == [104, 208] and metrics["train/return_sum"].shape == (2, 2)
    assert np.isnan(metrics["eval/return_sum"][:, 0]).all() and np.isfinite(metrics["eval/return_sum"][:, 1]).all()
    with (folder / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    written = np.array([float(row["train/return_sum"]) for row in table]).reshape(2, 2)
    np.testing.assert_allclose(written.T, metrics["train/return_sum"], rtol=1e-6)

    assert Image.open(folder / "trained.gif").n_frames == 27  # 26 steps
    assert Image.open(folder / "learning_curve.png").size[0] > 600
    params = load_file(folder / "params.safetensors")
    assert all(name.startswith(("actor/", "critic/")) and len(leaf) == 2 for name, leaf in params.items())
    out = capsys.readouterr().out
    assert "eval/return_sum" in out and str(folder) in out

    before = (folder / "metrics.csv").read_bytes()
    assert "exists already" in refused(capsys, *words)
    assert (folder / "metrics.csv").read_bytes() == before


PREY = ["--env", "predator_prey", "--env-kwargs", "size=4", "num_predators=2", "num_prey=1", "max_steps=8"]
REPLAY = ["--num-envs", "2", "--rollout-length", "8", "--warmup-steps", "16", "--num-updates", "2"]


def test_a_tiny_run_with_replay(tmp_path, capsys):
    folder = tmp_path / "run"
    words = ["vdn", *PREY, *REPLAY, "--hidden-sizes", "8", "--recurrent", "--cell-size", "4", "--sequence-length", "4"]
    words += ["--buffer-size", "64", "--batch-size", "4", "--prioritized", "--seeds", "2", "--total-steps", "32"]
    words += ["--shard", "envs"]  # on one device of no consequence
    assert train.main([*words, "--eval-episodes", "2", "--absolute-episodes", "0", "--run-dir", str(folder)]) == folder
    config = json.loads((folder / "config.json").read_text())
    assert (config["buffer_size"], config["prioritized"], config["config"]["horizon"]) == (64, True, 2 * 2)
    assert "Replay takes" in capsys.readouterr().out
    assert {"eval/captures", "loss/td", "epsilon"} <= set(run_folders.load_metrics(folder)[1])
    assert (folder / "trained.gif").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("qmix", *PREY, "--sequence-length", "9"), "sequence_length=9 is longer than an episode of predator_prey, 8"),
        (("qmix", *PREY, "--buffer-size", "4"), "capacity=4 is smaller than batch_size=128"),
        (("vdn", *PREY, *REPLAY, "--buffer-size", "8", "--batch-size", "2"), "capacity=8 is smaller than one addition"),
        (("vdn", "--env", "MPE_simple_v3", "--env-kwargs", "action_type=Continuous"), "are continuous"),
        (
            ("vdn", *PREY, "--preset", "quick"),
            "--preset quick is vdn on MPE_simple_spread_v3, not vdn on predator_prey",
        ),
        (("iql", "--preset", "slow"), "--preset slow is unknown: choose default or quick"),
        (("mappo", *PREY, "--buffer-size", "8"), "--buffer-size"),  # on-policy algorithms have no replay
    ],
)
def test_bad_replay_is_refused_in_one_sentence_and_leaves_no_folder(words, sentence, tmp_path, capsys):
    assert sentence in refused(capsys, *words, "--run-dir", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_quick_preset():
    _, options, config = parse("vdn --preset quick")
    assert (options.seeds, options.num_updates, options.total_steps) == (1, 64, 210_000)
    assert options.preset == "quick" and config.gamma == 0.85


def test_two_runs_without_a_name_get_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [jmarl.logging.run_folder(experiment.new_name("mappo", "humanoid_9|8")) for _ in range(3)]
    assert len(set(folders)) == 3


def test_curves_of_two_runs_share_a_figure(tmp_path):
    for name in ("one", "two"):
        sink = jmarl.logging.json_file(jmarl.logging.run_folder(tmp_path / name) / "metrics.json", every_s=0.0)
        sink.write(100, 1.0, {"train/return_sum": np.array([1.0, 2.0])})
        sink.write(200, 2.0, {"train/return_sum": np.array([np.nan, 3.0])})
    out = plotting.plot_curves([tmp_path / "one", tmp_path / "two"], tmp_path / "both.png", labels=["1", "2"])
    assert Image.open(out).size[0] > 600


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "name at least one run folder"),
        (["one", "--metric", "train/won"], "no run has the metric train/won: choose one of train/return_sum."),
        (["none"], "none is no run folder of jmarl train: its metrics.json cannot be read"),
        (["torn"], "torn/metrics.json is damaged"),
        (["one", "--out", "one/metrics.json"], "metrics.json exists already: give another --out, or --overwrite"),
        (["one", "--out", "one", "--overwrite"], "one is a folder: give --out a file"),
        (["one", "--out", "none/curves.png"], "curves.png has no place, since none is no folder"),
        (["one", "--out", "curves.abc"], "curves.abc cannot be drawn"),
    ],
)
def test_plotting_refuses_in_one_sentence(words, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sink = jmarl.logging.json_file(jmarl.logging.run_folder("one") / "metrics.json", every_s=0.0)
    sink.write(100, 1.0, {"train/return_sum": np.array([1.0, 2.0])})
    (jmarl.logging.run_folder("torn") / "metrics.json").write_text('{"env_steps": [1')
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as error:
        plotting.main(words)
    assert error.value.code == 2 and sentence in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
    plotting.main(["one"])
    with pytest.raises(SystemExit):
        plotting.main(["one"])
    plotting.main(["one", "--overwrite"])


def test_random_actions_are_legal_and_cover_what_is_legal():
    spec = jmarl.envs.matrix_game(jnp.zeros((3, 3))).spec
    obs = jmarl.types.zero_observation(spec, (500,))
    legal = jnp.broadcast_to(jnp.array([[True, False, True], [False, True, False]]), obs.action_mask.shape)
    act = throughput.random_learner(spec).act
    action, _, _ = act((), (), obs.replace(action_mask=legal), jnp.zeros(500, bool), jax.random.key(0))
    assert set(np.unique(action[:, 0])) == {0, 2} and set(np.unique(action[:, 1])) == {1}


def test_throughput_reports_parts_that_add_up(tmp_path, capsys):
    out = tmp_path / "speed.json"
    throughput.main(["mappo", *CHEAP, *TINY, "--repeats", "1", "--seconds", "0.01", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["num_envs"], row["num_seeds"]) for row in rows] == [(2, 1)]
    for row in rows:
        assert row["step"]["steps_per_s"] > 0 and row["memory_mib"] > 0
        step, rollout, random = (row[name]["steps_per_s"] for name in ("step", "rollout", "random"))
        assert row["share"]["environment"] == pytest.approx(step / random)
        assert row["share"]["acting"] == pytest.approx(step / rollout - step / random)
        assert row["share"]["update"] == pytest.approx(1 - step / rollout)
    assert "steps/s" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = [*CHEAP[:2], "--seeds", "2", *CHEAP[4:], *TINY, "--total-steps", "32", "--log-every", "1", "--no-gif"]
    return train.main(["ippo", *words, "--eval-episodes", "2", "--absolute-episodes", "0", "--run-dir", str(folder)])


def copied(folder, to):
    shutil.copytree(folder, to)
    return to


def test_a_finished_run_is_trained_longer(tiny_run, tmp_path):
    folder = copied(tiny_run, tmp_path / "run")
    before = run_folders.load_metrics(folder)
    train.main(["--resume", str(folder), "--total-steps", "48"])
    env_steps, metrics = run_folders.load_metrics(folder)
    assert env_steps.tolist() == [8, 16, 24, 32, 40, 48]
    for name, values in before[1].items():
        np.testing.assert_array_equal(metrics[name][:, :4], values)
    facts = json.loads((folder / "config.json").read_text())
    assert (facts["total_steps"], facts["config"]["horizon"], facts["log_every"]) == (48, 6, 1)
    train.main(["--resume", str(folder)])  # and what was begun anew goes on as any run does
    assert run_folders.load_metrics(folder)[0].tolist() == env_steps.tolist()


def test_a_run_cannot_be_shortened(tiny_run, capsys):
    assert "--total-steps 8 must be at least the 32" in refused(capsys, "--resume", str(tiny_run), "--total-steps", "8")
    assert "--total-steps inf must be" in refused(capsys, "--resume", str(tiny_run), "--total-steps", "inf")


def test_a_config_is_where_another_run_starts(tiny_run, tmp_path, capsys):
    words = ["--config", str(tiny_run / "config.json"), "--gamma", "0.5", "--run-dir", str(tmp_path / "run")]
    for first in ([], ["ippo"]):
        arguments = command_line.parse([*first, *words], experiment.options_of, prog="", does="")
        assert arguments.algorithm == "ippo" and arguments.config.gamma == 0.5
        assert (arguments.options.total_steps, arguments.options.seeds, arguments.config.hidden_sizes) == (32, 2, (8,))
        assert arguments.config.horizon is None and arguments.options.run_dir == tmp_path / "run"  # as nobody gave one
    assert "is of ippo, not mappo: leave one of them out" in refused(capsys, "mappo", *words)


def test_parts_share_what_a_run_has():
    """Environments, replay, batches and the warm-up; a single seed's parts are on devices of their own."""
    line = (
        "iql --env CartPole-v1 --seeds 1 --num-envs 4 --buffer-size 2000 --batch-size 32 --warmup-steps 200 --parts 2"
    )
    algorithm, options, config = parse(line)
    loop = experiment.build(algorithm, options, config, {}).loop
    shared = ("num_envs", "capacity", "batch_size", "warmup_steps", "num_parts")
    assert [loop.settings[name] for name in shared] == [2, 1000, 16, 100, 2]
    assert loop.env_steps_per_iteration == 4 * options.rollout_length
    assert experiment.shard_of(options) == "parts"
    assert experiment.shard_of(dataclasses.replace(options, seeds=2)) == "seeds"


def test_a_dry_run_says_what_a_run_takes_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train.main(["ippo", *CHEAP, *TINY, "--total-steps", "80", "--dry-run"])
    out = capsys.readouterr().out
    # Actor: 4 x 8 + 8, 8 x 2 + 2. Critic: 4 x 8 + 8, 8 + 1.
    assert f"{40 + 18 + 40 + 9} parameters per seed" in out
    assert "8 environment steps per iteration, 10 iterations" in out and "hidden_sizes            (8,)" in out
    assert list(tmp_path.iterdir()) == []


def test_quiet_prints_the_folder_alone(tmp_path, capsys):
    folder = tmp_path / "run"
    train.main(["random", *CHEAP, "--total-steps", "8", "--eval-episodes", "0", "--quiet", "--run-dir", str(folder)])
    assert capsys.readouterr().out == f"{folder}\n"


@pytest.mark.parametrize("group", ["experiment", "algorithm", "networks", "optimiser", "exploration", "command"])
def test_help_is_grouped_by_subject(group, capsys):
    with pytest.raises(SystemExit):
        parse("qmix --help")
    text = capsys.readouterr().out
    assert f"{group} options" in text and "--sweep" in text and "that share the seeds; of a CPU, its cores" in text


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ([], "in place of names and values"),
        (None, "in place of names and values"),
        ({"algorithm": None}, "algorithm is null"),
        ({"algorithm": "ipo"}, "no algorithm is called 'ipo': did you mean"),
        ({"env": 3}, "env is 3"),
        ({"env_kwargs": [1]}, "env_kwargs is [1]"),
        ({"config": "x"}, 'config is "x"'),
        ({"config": {"gamma": "0.9"}}, 'gamma is "0.9"'),
        ({"config": {"gamma": None}}, "gamma is null"),
        ({"config": {"gamma": 2}}, "gamma=2 must lie in [0, 1]"),
        ({"config": {"hidden_sizes": 8}}, "hidden_sizes is 8"),
        ({"config": {"hidden_sizes": ["a"]}}, 'hidden_sizes is ["a"]'),
        ({"config": {"recurrent": 1}}, "recurrent is 1"),
        ({"config": {"unknown": 1}}, "unknown in its config, which ippo does not know"),
        ({"seeds": "2"}, 'seeds is "2"'),
        ({"seeds": True}, "seeds is true"),
        ({"num_envs": -1}, "num_envs is -1"),
        ({"checkpoint_every": "often"}, 'checkpoint_every is "often"'),
        ({"gif": "yes"}, 'gif is "yes"'),
        ({"shard": "agents"}, 'shard is "agents"'),
        ({"preset": 3}, "preset is 3"),
        ({"preset": "slow"}, "--preset slow is unknown"),
    ],
)
def test_a_config_that_was_edited_is_refused_in_one_sentence(tiny_run, tmp_path, capsys, change, sentence):
    facts = json.loads((tiny_run / "config.json").read_text())
    (tmp_path / "checkpoints").mkdir()
    facts = facts | change if isinstance(change, dict) else change
    (tmp_path / "config.json").write_text(json.dumps(facts))
    text = refused(capsys, "--resume", str(tmp_path))
    assert sentence in text and text.count(". ") <= 1


def test_a_seed_that_diverged_is_named_and_never_the_best(tiny_run, tmp_path, capsys):
    folder = copied(tiny_run, tmp_path / "run")
    content = json.loads((folder / "metrics.json").read_text())
    content["metrics"]["eval/return_sum"] = [[None, None, None, 9.0], [None, None, None, 5.0]]
    content["metrics"]["loss/policy"] = [[0.1, 0.1, None, None], [0.1] * 4]
    (folder / "metrics.json").write_text(json.dumps(content))
    lost = run_folders.diverged({"w": np.array([[1.0, np.nan], [1.0, 2.0]])}, folder)
    assert lost == {0: 24}
    assert experiment._report(folder, "title", lost) == 1  # though the other's last return was higher
    assert "Diverged, so that parameters are not finite: seed 0 after 24 steps" in capsys.readouterr().out
    assert experiment._report(folder, "title", {0: 24, 1: 32}) is None


def test_learning_rates_that_are_too_large_end_in_a_config_that_says_so(tmp_path, capsys):
    folder = tmp_path / "run"
    words = ["ippo", *CHEAP, *TINY, "--total-steps", "80", "--learning-rate", "1e38", "--max-grad-norm", "none"]
    train.main([*words, "--eval-episodes", "2", "--absolute-episodes", "0", "--run-dir", str(folder)])
    assert list(json.loads((folder / "config.json").read_text())["diverged"]) == ["0"]
    assert (folder / "params.safetensors").exists() and not (folder / "trained.gif").exists()


def test_plots_and_reports_draw_the_same_interval(tiny_run, tmp_path, monkeypatch):
    drawn = []
    summary = statistics_of_runs.summary
    monkeypatch.setattr(
        statistics_of_runs,
        "summary",
        lambda *scores, interval: drawn.append(interval) or summary(*scores, interval=interval),
    )
    for interval in statistics_of_runs.INTERVALS:
        drawn.clear()
        words = [str(tiny_run), "--metric", "eval/return_sum", "--interval", interval]
        plotting.main([*words, "--out", str(tmp_path / f"{interval}.png")])
        report.main([*words, "--out", str(tmp_path / interval)])
        assert len(drawn) >= 3 and set(drawn) == {interval}
        assert statistics_of_runs.INTERVALS[interval] in (tmp_path / interval / "report.md").read_text()


def test_a_summary_is_the_one_that_it_is_called():
    seeds = np.array([-61.4, -63.5, -73.0, -68.0])
    np.testing.assert_allclose(
        statistics_of_runs.summary(seeds),
        [
            np.mean([-63.5, -68.0]),
            *statistics_of_runs.stratified_bootstrap(statistics_of_runs.interquartile_mean, seeds),
        ],
    )
    # t(0.975, 2) = 4.302653, s = sqrt(7), n = 3; t(0.975, 1) = 12.706205, s = sqrt(2), n = 2.
    values = np.array([[1.0, 5.0, np.nan], [2.0, 7.0, 3.0], [6.0, np.nan, np.nan]]).T
    mean, low, high = statistics_of_runs.summary(values, interval="mean")
    np.testing.assert_allclose(mean, [3.0, 6.0, 3.0])
    np.testing.assert_allclose(high - mean, [4.302653 * np.sqrt(7 / 3), 12.706205, np.nan], rtol=1e-6)
    np.testing.assert_allclose(mean - low, high - mean)


def test_an_inherited_backend_does_not_matter():
    code = "from jmarl.cli import plotting; import os; print(os.environ['MPLBACKEND'])"
    environ = {**os.environ, "MPLBACKEND": "module://there_is_no.backend"}
    result = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=300)
    assert result.stdout.strip() == environ["MPLBACKEND"], result.stderr


def test_a_reader_who_has_seen_enough_gets_no_traceback():
    command = [sys.executable, "-m", "jmarl", "algorithms"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()  # as `| head` does
        assert process.stderr.read() == b""
    assert process.returncode == 141  # as a shell says of a command that SIGPIPE ended


def test_each_value_of_a_sweep_is_checked(tmp_path, capsys):
    folder = str(tmp_path / "run")
    for swept, sentence in {
        "gamma=0.9,2": "gamma=2: gamma=2.0 must lie in [0, 1]",
        "learning-rate=1e-3,-1": "--learning-rate -1 must not be negative",
        "ent-coef=0,nan": "--ent-coef nan must be a finite number",
    }.items():
        assert sentence in refused(capsys, "ippo", *CHEAP, *TINY, "--run-dir", folder, "--sweep", swept)
    assert not (tmp_path / "run").exists()


def test_the_command_has_help_a_version_and_lists(capsys):
    for words in ([], ["--help"]):
        assert main.main(words) == 0
        text = capsys.readouterr().out
        assert all(f"  {name} " in text for name in main.COMMANDS)
    main.main(["--version"])
    assert capsys.readouterr().out == f"jmarl {jmarl.__version__}\n"
    main.main(["algorithms"])
    assert all(name in capsys.readouterr().out for name in ["ippo"])
    main.main(["algorithms", "ippo"])
    assert "discount of future rewards" in capsys.readouterr().out
    main.main(["envs"])
    listed = capsys.readouterr().out.split()
    assert {"MPE_simple_spread_v3", "CartPole-v1", "predator_prey"} <= set(listed)
    main.main(["envs", "CartPole-v1", "--env-kwargs", "max_steps_in_episode=7"])
    assert "max_steps       7" in capsys.readouterr().out
    main.main(["presets", "vdn", "--env", "MPE_simple_spread_v3"])
    assert "gamma                   0.85" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "sentence"), [(["trian"], "did you mean train?"), (["envs", "CartPol"], "did you")])
def test_an_unknown_command_or_name_is_refused(words, sentence, capsys):
    with pytest.raises(SystemExit) as error:
        main.main(words)
    assert error.value.code == 2 and sentence in capsys.readouterr().err


def test_without_the_extra_one_sentence_names_it(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "tyro" else find(name))
    with pytest.raises(SystemExit) as error:
        main.main(["train", "mappo"])
    assert error.value.code == 2
    assert capsys.readouterr().err == 'error: the command jmarl needs tyro: pip install "jmarl[cli]".\n'


def test_a_shell_can_complete_the_command(capsys):
    with pytest.raises(SystemExit) as error:
        main.main(["--tyro-print-completion", "bash"])
    script = capsys.readouterr().out
    assert error.value.code in (0, None)
    assert all(word in script for word in ["mappo", "crossplay", "--learning-rate", "--env-kwargs"])


@pytest.mark.parametrize("told", [None, "off", "elsewhere"])
def test_compiled_programs_are_kept_unless_the_user_says_otherwise(told, tmp_path, monkeypatch):
    names = ("jax_compilation_cache_dir", "jax_compilation_cache_max_size", "jax_enable_compilation_cache")
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        jax.config.update("jax_compilation_cache_dir", "elsewhere" if told == "elsewhere" else None)
        jax.config.update("jax_enable_compilation_cache", told != "off")
        main.keep_compiled()
        folder = jax.config.jax_compilation_cache_dir
        if told is None:
            assert Path(folder).parent == tmp_path / "jmarl"
            assert jax.config.jax_compilation_cache_max_size == main.CACHE_BYTES
        else:
            assert folder == {"off": None, "elsewhere": "elsewhere"}[told]
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
