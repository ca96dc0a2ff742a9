"""Committed results stay readable and re-checkable: each config.json, and each command, begun once more."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from jmarl import configs, presets
from jmarl.cli import check, composed, experiment, options, own, run_folders, train

RESULTS = sorted(path.parent for path in (Path(__file__).parents[1] / "benchmarks" / "results").glob("*/config.json"))
NEEDED = {"hopper": "brax", "envpool": "envpool", "football": "gfootball"}
INSTALLED = [
    path
    for path in RESULTS
    if all(importlib.util.find_spec(package) for word, package in NEEDED.items() if word in path.name)
]
MIGRATED = {"num_updates", "critic_view", "team_reward", "alpha", "normalize_advantage"}
SMALL = {"num_envs": 2, "rollout_length": 8, "buffer_size": 32, "batch_size": 2, "warmup_steps": 16, "seeds": 1}


def names(folder):
    return folder.name


def restored(folder):
    facts = run_folders.read_config(folder)
    preset = options.preset_of(facts["algorithm"], facts["env"], facts.get("preset", "default"))
    of_experiment = run_folders.restore(experiment.options_of(preset), facts)
    return facts, of_experiment, run_folders.restore_config(own.default_config(facts["algorithm"]), facts)


@pytest.mark.parametrize("folder", RESULTS, ids=names)
def test_every_committed_config_is_read(folder):
    written = json.loads((folder / "config.json").read_text())
    facts, of_experiment, config = restored(folder)
    assert (of_experiment.env, of_experiment.seeds) == (written["env"], written["seeds"])
    now = {name: configs.get(config, name) for name, _ in configs.fields(config)}
    for name, value in run_folders._leaves(written["config"]).items():
        if name not in MIGRATED and name in now:
            assert np.array_equal(now[name], value) or now[name] is value is None
    if "inner" not in written["config"] and written["config"].keys() >= {"gamma"}:
        assert config.horizon == written["config"].get("horizon", written["config"].get("num_updates"))
    assert composed.take_options(facts["command"].split()[2:])[0] == written["algorithm"]


@pytest.mark.parametrize(
    ("name", "field", "meant"),
    [
        ("mappo-MPE_simple_spread_v3", "critic_view", "state"),  # written as "obs", as are the others
        ("maddpg-MPE_simple_tag_v3", "critic_view", "state"),
        ("masac-MPE_simple_spread_v3-discrete", "critic_view", "state_obs"),  # written so
        ("ippo-MPE_simple_spread_v3", "critic_view", "obs"),
        ("vdn-MPE_simple_spread_v3", "team_reward", "sum"),  # written as null
        ("iddpg-MPE_simple_spread_v3", "team_reward", "individual"),
    ],
)
def test_words_of_earlier_versions_mean_what_they_meant(name, field, meant):
    facts = run_folders.read_config(RESULTS[0].parent / name)
    assert facts["config"].get(field, meant) == meant
    assert getattr(restored(RESULTS[0].parent / name)[2], field, meant) == meant


def test_options_of_earlier_versions_have_new_names():
    facts = run_folders.read_config(RESULTS[0].parent / "masac-MPE_simple_spread_v3-discrete")
    assert facts["num_updates"] == 16 and "num_updates_per_step" not in facts
    assert "--num-updates 16" in facts["command"]


def test_devices_and_losses_of_earlier_versions_have_new_names(tmp_path):
    facts = {"algorithm": "coma", "env": "CartPole-v1", "env_kwargs": {}, "split": "envs", "gone": 1}
    facts |= {"command": "python benchmarks/train.py coma --split=envs --num-updates 7"}
    facts |= {"config": {"num_updates": 7, "normalize_advantage": False, "a_field_of_before": 3}}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    read = run_folders.read_config(tmp_path)
    assert read["shard"] == "envs" and read["command"] == "jmarl train coma --shard=envs --horizon 7"
    assert read["config"]["horizon"] == 7 and "a_field_of_before" not in read["config"]
    assert read["config"]["normalize_advantage"] in (False, "none")


def small(folder):
    """The arguments of a committed command, at sizes that take seconds."""
    words = check.command_of(run_folders.read_config(folder), seeds=1, seed=1, run_dir=None)
    arguments = options.parse(words, experiment.options_of, prog="jmarl train", does=train.DOES, given=[])
    sizes = {name: value for name, value in SMALL.items() if hasattr(arguments.options, name)}
    sizes |= {"total_steps": 16, "eval_episodes": 2, "absolute_episodes": 0, "gif": False}
    config = arguments.config
    widths = {"hidden_sizes": (4,), "head_sizes": (), "num_minibatches": 1, "num_epochs": 1, "cell_size": 4}
    names = [name for name, _ in configs.fields(config) if name.rpartition(".")[2] in widths]
    config = configs.replace(config, {name: widths[name.rpartition(".")[2]] for name in names})
    return arguments._replace(options=type(arguments.options)(**vars(arguments.options) | sizes), config=config)


@pytest.mark.parametrize("folder", INSTALLED, ids=names)
def test_every_committed_command_is_built(folder):
    arguments = small(folder)
    experiment.require_sensible(arguments.options)
    built = experiment.build(*arguments[:4])
    experiment.require_memory(built, arguments.options)
    assert built.eval_env.spec.max_steps is not None  # or no evaluation is possible


@pytest.mark.parametrize(
    "name",
    [
        "ippo-hanabi",
        "iql-CartPole-v1",
        "qmix-predator_prey-6x6",
        "ow_qmix-predator_prey-6x6",
        "pqn_vdn-MPE_simple_spread_v3",
        "iddpg-Pendulum-v1",
        "isac-Pendulum-v1",
        "coma-MPE_simple_spread_v3",
    ],
)
def test_a_committed_command_of_each_family_trains_and_evaluates(name, tmp_path):
    arguments = small(RESULTS[0].parent / name)
    options_ = type(arguments.options)(**vars(arguments.options) | {"run_dir": tmp_path / "run"})
    folder = experiment.train(arguments.algorithm, options_, arguments.config, arguments.env_kwargs)
    assert np.isfinite(run_folders.load_metrics(folder)[1]["eval/return_sum"]).all()


def test_the_preset_of_lunar_lander_is_what_was_found_to_work():
    found = json.loads((RESULTS[0].parent / "ippo-envpool-LunarLander-v3" / "config.json").read_text())
    preset = presets.for_environment("ippo", found["env"])
    assert (preset.num_envs, preset.rollout_length) == (found["num_envs"], found["rollout_length"])
    now = {name: configs.get(preset.config, name) for name, _ in configs.fields(preset.config)}
    now = json.loads(json.dumps(now))  # with lists in place of tuples, as in the file
    assert {name for name, value in found["config"].items() if now[name] != value} == {"horizon"}
