"""What is handed on: parameters and policies in files, read back equal, and what a run folder gives to be evaluated."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import compiled
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmarl
from jmarl import envs, export
from jmarl.cli import evaluate, experiment, run_folders, train
from jmarl.cli.errors import UsageError
from jmarl.types import Observation

PARAMS = {
    "actor": {"Dense_0": {"kernel": jnp.arange(6.0).reshape(2, 3)}, "steps": jnp.int32(3)},
    "critic": [jnp.ones(2)],
}


# ------------------------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize("params", [PARAMS, {}, {"transposed": jnp.arange(6.0).reshape(2, 3).T}])
def test_parameters_read_back_equal(tmp_path, params):
    export.save_parameters(params, tmp_path / "params")
    again = export.load_parameters(tmp_path / "params", jax.eval_shape(lambda: params))
    assert jax.tree.structure(again) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, again, params)
    assert jax.tree.map(lambda x: x.dtype, again) == jax.tree.map(lambda x: x.dtype, params)


def test_names_are_places_in_the_tree(tmp_path):
    from safetensors.numpy import load_file

    export.save_parameters(PARAMS, tmp_path / "params")
    assert sorted(load_file(tmp_path / "params")) == ["actor/Dense_0/kernel", "actor/steps", "critic/0"]
    with pytest.raises(ValueError, match="same name: no key of the tree may hold a /"):
        export.save_parameters({"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}}, tmp_path / "other")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"critic": [jnp.ones(3)]}, r"critic/0 is float32 \[2\] in params, but float32 \[3\] is expected here"),
        ({"critic": [jnp.ones(2, int)]}, r"critic/0 is float32 \[2\] in params, but int32 \[2\] is expected here"),
        ({"critic": []}, "critic/0 is in params, but not expected here"),
        ({"mixer": jnp.ones(1)}, "mixer is expected here, but is not in params"),
    ],
)
def test_other_parameters_are_refused_and_the_leaf_named(tmp_path, change, sentence):
    export.save_parameters(PARAMS, tmp_path / "params")
    with pytest.raises(ValueError, match=sentence):
        export.load_parameters(tmp_path / "params", PARAMS | change)


def test_torn_parameters_are_refused(tmp_path):
    export.save_parameters(PARAMS, tmp_path / "params")
    (tmp_path / "params").write_bytes((tmp_path / "params").read_bytes()[:-3])
    with pytest.raises(ValueError, match="params is damaged, or no file of safetensors"):
        export.load_parameters(tmp_path / "params", PARAMS)
    with pytest.raises(FileNotFoundError):
        export.load_parameters(tmp_path / "none", PARAMS)


@pytest.mark.parametrize(
    ("package", "call"),
    [
        ("safetensors", lambda path: export.save_parameters(PARAMS, path)),
        ("flatbuffers", export.load_policy),
    ],
)
def test_missing_packages_name_the_extra(tmp_path, monkeypatch, package, call):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf'need {package}: pip install "jmarl\[export\]"'):
        call(tmp_path / "file")


# --------------------------------------------------------------------------------------------------------- policies


@functools.cache
def learner_of(name):
    """A tiny learner, its environment, and one seed of three that were made at once."""
    continuous, memory = envs.probe("continuous", num_agents=2), envs.probe("memory", num_agents=2)
    game = envs.matrix_game([[8.0, -12.0, 0.0], [-12.0, 0.0, 0.0]])  # the first agent has an illegal third action
    recurrent = {"hidden_sizes": (8,), "recurrent": True, "cell_size": 4}
    env, algorithm, config = {
        "mappo": (memory, jmarl.mappo, jmarl.PPOConfig(**recurrent)),
        "mappo per agent": (game, jmarl.mappo, jmarl.PPOConfig(sharing="per_agent", **recurrent)),
        "qmix": (game, jmarl.qmix, jmarl.QConfig(hidden_sizes=(8,))),
        "masac": (continuous, jmarl.masac, jmarl.SACConfig(hidden_sizes=(8,))),
        "random": (game, jmarl.random_policy, jmarl.RandomConfig()),
    }[name]
    learner = algorithm(env.spec, config)
    states = jax.jit(jax.vmap(learner.init))(jax.random.split(jax.random.key(0), 3))
    return env, learner, jmarl.checkpoint.take_seed(states, 2)


def observations(env, num_iterations=4, num_envs=5):
    """Views that no environment made, with everything legal that is so in this one."""
    obs = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(1), num_envs))[1]
    rng = np.random.default_rng(2)
    for _ in range(num_iterations):
        agents, state = (jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in (obs.agents, obs.state))
        yield obs.replace(agents=agents, state=state)


@pytest.mark.parametrize(
    ("name", "batch_size"), [("mappo", None), ("mappo per agent", None), ("qmix", None), ("qmix", 5), ("masac", None)]
)
def test_an_exported_policy_acts_as_the_learner_does(tmp_path, name, batch_size):
    env, learner, state = learner_of(name)
    export.export_policy(learner, state, env.spec, tmp_path / "policy.jax", batch_size)
    policy = export.load_policy(tmp_path / "policy.jax")
    greedy, exported = jax.jit(learner.greedy), jax.jit(policy.greedy)
    carry, own_carry = learner.init_carry((5,)), policy.init_carry((5,))
    actions = []
    for t, obs in enumerate(observations(env)):
        first = jnp.array([t == 0, t == 0, True, t == 2, t == 3])
        action, carry = greedy(state, carry, obs, first)
        own_action, own_carry = exported(own_carry, obs, first)
        np.testing.assert_allclose(own_action, action, rtol=1e-6, atol=1e-6)
        assert own_action.dtype == action.dtype
        actions.append(action)
    assert len(np.unique(actions)) > 1  # it is a policy of which something can be seen
    assert policy.batch_size == batch_size


def test_only_what_actions_depend_on_is_exported(tmp_path):
    """A critic's memory reads the global state; the actor does not."""
    env, learner, state = learner_of("mappo")
    export.export_policy(learner, state, env.spec, tmp_path / "policy.jax")
    policy = export.load_policy(tmp_path / "policy.jax")
    assert policy.reads == ("action_mask", "agents")
    assert {name: x.shape for name, x in policy.init_carry((7,)).items()} == {"actor": (7, 2, 4)}
    assert export.load_policy(exported(tmp_path, "masac")).reads == ("agents",)


def exported(folder, name):
    env, learner, state = learner_of(name)
    export.export_policy(learner, state, env.spec, folder / "other.jax")
    return folder / "other.jax"


def test_any_number_of_environments_and_mappings(tmp_path):
    policy = export.load_policy(exported(tmp_path, "qmix"))
    for num in (1, 3):
        obs = {"agents": jnp.ones((num, 2, 1)), "action_mask": jnp.ones((num, 2, 3), bool), "unread": None}
        action, _ = policy.greedy(policy.init_carry((num,)), obs, jnp.ones(num, bool))
        assert action.shape == (num, 2)


def test_a_policy_that_keeps_a_key(tmp_path):
    """The random one draws from a key that is part of its state, and counts steps in its carry."""
    env, learner, state = learner_of("random")
    policy = export.load_policy(exported(tmp_path, "random"))
    obs, first = next(observations(env)), jnp.ones(5, bool)
    action, _ = policy.greedy(policy.init_carry((5,)), obs, first)
    np.testing.assert_array_equal(action, learner.greedy(state, learner.init_carry((5,)), obs, first)[0])


def test_plain_jax_runs_the_policy_without_jmarl(tmp_path):
    """The lines of the module's docstring, in a process that cannot import jmarl."""
    env, learner, state = learner_of("mappo")
    export.export_policy(learner, state, env.spec, tmp_path / "policy.jax", batch_size=5)
    obs = next(observations(env))
    np.savez(tmp_path / "obs.npz", agents=obs.agents, action_mask=obs.action_mask)
    code = """
import sys
sys.modules["jmarl"] = None
import jax, jax.numpy as jnp, numpy as np
policy = jax.export.deserialize(open("policy.jax", "rb").read())
(carry, obs, first), _ = jax.tree.unflatten(policy.in_tree, policy.in_avals)
carry, first = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), carry), jnp.ones(first.shape, bool)
given = np.load("obs.npz")
action, carry = policy.call(carry, {name: given[name] for name in obs}, first)
print(action.tolist())
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    action, _ = learner.greedy(state, learner.init_carry((5,)), obs, jnp.ones(5, bool))
    assert json.loads(result.stdout) == action.tolist()


def test_a_seed_is_picked_from_several(tmp_path):
    env, learner, state = learner_of("qmix")
    states = jax.tree.map(lambda x: jnp.stack([jnp.zeros_like(x), x]), state)
    with pytest.raises(ValueError, match=r"The state is of 2 seeds, and a policy of one: give a seed, 0 to 1"):
        export.export_policy(learner, states, env.spec, tmp_path / "policy.jax")
    with pytest.raises(ValueError, match="seed=2 is none of the 2 seeds"):
        export.export_policy(learner, states, env.spec, tmp_path / "policy.jax", seed=2)
    with pytest.raises(ValueError, match="seed=1, but the state is of one seed"):
        export.export_policy(learner, state, env.spec, tmp_path / "policy.jax", seed=1)
    assert not (tmp_path / "policy.jax").exists()
    run = jax.eval_shape(lambda: jmarl.training.start(env, learner, jax.random.key(0), num_envs=1))
    run = run.replace(train_state=states)
    export.export_policy(learner, run, env.spec, tmp_path / "picked.jax", seed=1)
    export.export_policy(learner, state, env.spec, tmp_path / "one.jax")
    export.export_policy(learner, jax.tree.map(lambda x: x[None], state), env.spec, tmp_path / "alone.jax")
    played = []
    for name in ("picked", "one", "alone"):
        policy = export.load_policy(tmp_path / f"{name}.jax")
        obs = next(observations(env))
        played.append(policy.greedy(policy.init_carry((5,)), obs, jnp.ones(5, bool))[0])
    np.testing.assert_array_equal(played[0], played[1])
    np.testing.assert_array_equal(played[0], played[2])


def test_another_state_is_refused(tmp_path):
    env, learner, state = learner_of("qmix")
    with pytest.raises(ValueError, match=r"step is float32 \[\] in the state, but the learner makes int32 \[\]"):
        export.export_policy(learner, state.replace(step=jnp.zeros(())), env.spec, tmp_path / "policy.jax")
    with pytest.raises(ValueError, match="batch_size=0 must be at least 1, or None"):
        export.export_policy(learner, state, env.spec, tmp_path / "policy.jax", 0)


def test_networks_that_fix_the_number_of_environments_ask_for_it(tmp_path):
    env = envs.matrix_game([[1.0, 0.0], [0.0, 0.0]])

    def policy(obs: Observation):
        return (
            jnp.zeros(obs.agent_mask.shape, jnp.int32) if len(obs.agents) > 3 else jnp.ones((len(obs.agents), 2), int)
        )

    learner = jmarl.scripted(policy)
    state = compiled.init(learner, jax.random.key(0))
    with pytest.raises(ValueError, match="want to know the number of environments: give a batch_size"):
        export.export_policy(learner, state, env.spec, tmp_path / "policy.jax")
    export.export_policy(learner, state, env.spec, tmp_path / "policy.jax", batch_size=4)
    assert export.load_policy(tmp_path / "policy.jax").greedy({}, {}, jnp.ones(4, bool))[0].sum() == 0


def test_other_files_are_no_policies(tmp_path):
    (tmp_path / "policy.jax").write_bytes(b"precious")
    with pytest.raises(ValueError, match="is damaged, or no policy that this version of jax can read"):
        export.load_policy(tmp_path / "policy.jax")


# ---------------------------------------------------------------------------------------------------------- damage


def damages(data, num=60):
    """Bits flipped, bytes lost at the end, and runs of zeros."""
    rng = np.random.default_rng(0)
    for place in rng.integers(len(data), size=num).tolist():
        flipped = bytearray(data)
        flipped[place] ^= 1 << int(rng.integers(8))
        yield bytes(flipped)
        yield data[:place]
        yield data[:place] + bytes(min(64, len(data) - place)) + data[place + 64 :]


def test_no_damaged_parameters_are_taken_for_whole_ones(tmp_path):
    params = {"kernel": jnp.arange(300.0).reshape(3, 100) + 1, "half": jnp.ones(9, jnp.bfloat16)}
    path = tmp_path / "params"
    export.save_parameters(params, path)
    data = path.read_bytes()
    export.load_parameters(path, params)
    for damaged in damages(data):
        path.write_bytes(damaged)
        try:
            again = export.load_parameters(path, params)
        except ValueError as error:
            assert "damaged" in str(error) or "is expected here" in str(error)
        else:  # a bit of the checksum's name, or of the space after the header
            jax.tree.map(np.testing.assert_array_equal, again, params)


def test_no_damaged_policy_is_taken_for_a_whole_one(tmp_path):
    path = exported(tmp_path, "qmix")
    data = path.read_bytes()
    num_read = 0
    for damaged in damages(data):
        path.write_bytes(damaged)
        try:
            export.load_policy(path)
            num_read += damaged[: -len(export._FOOTER) - 4] != data[: -len(export._FOOTER) - 4]
        except ValueError as error:
            assert "damaged" in str(error)
    assert not num_read


def test_files_of_before_have_no_checksum_and_are_read(tmp_path):
    from safetensors.numpy import save_file

    save_file({"w": np.ones(2, np.float32)}, tmp_path / "old")
    assert export.load_parameters(tmp_path / "old", {"w": jnp.zeros(2)})["w"].sum() == 2
    path = exported(tmp_path, "qmix")
    data = path.read_bytes()[: -len(export._FOOTER) - 4]
    path.write_bytes(data.replace(export._NAME.encode(), b"policy_of_ol"))
    assert export.load_policy(path).reads == ("action_mask", "agents")
    path.write_bytes(data)  # a new one whose end was lost
    with pytest.raises(ValueError, match="is damaged: it is not what was exported"):
        export.load_policy(path)


def test_what_is_handed_on_holds_no_path_and_has_the_mode_of_other_files(tmp_path):
    env, learner, state = learner_of("mappo")
    mask = os.umask(0o027)
    try:
        export.export_policy(learner, state, env.spec, tmp_path / "policy.jax")
        export.save_parameters(PARAMS, tmp_path / "params")
    finally:
        os.umask(mask)
    assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [0o640, 0o640]
    data = (tmp_path / "policy.jax").read_bytes()
    assert b".py" not in data and str(Path(__file__).parents[1]).encode() not in data
    assert jax.config.jax_traceback_in_locations_limit != 0


# ------------------------------------------------------------------------------------------------------ run folders


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two seeds, evaluated twice, with an absolute metric of three rounds."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = ["iql", "--env", "CartPole-v1", "--env-kwargs", "max_steps_in_episode=8"]
    words += ["--num-envs", "2", "--rollout-length", "8", "--warmup-steps", "16", "--num-updates", "1"]
    words += ["--buffer-size", "64", "--batch-size", "4", "--hidden-sizes", "8", "--seeds", "2", "--total-steps", "32"]
    words += ["--eval-episodes", "3", "--eval-every", "1", "--absolute-episodes", "8", "--no-gif"]
    return train.main([*words, "--run-dir", str(folder)])


def test_a_run_has_the_absolute_metric_of_its_best_parameters(trained):
    content = json.loads((trained / "metrics.json").read_text())
    assert content["env_steps"] == [16, 32]  # in the last row, not in one more
    absolute = content["metrics"]["absolute/return_sum"]
    assert [seed[0] for seed in absolute] == [None, None] and np.isfinite([seed[1] for seed in absolute]).all()
    assert {"absolute/return_mean", "absolute/episode_length"} <= set(content["metrics"])


def test_the_absolute_metric_is_a_mean_over_all_rounds():
    env = envs.matrix_game([[1.0, 0.0], [0.0, 3.0]])
    learner = jmarl.scripted(lambda obs: jnp.ones(obs.agent_mask.shape, jnp.int32))
    states = jax.vmap(learner.init)(jax.random.split(jax.random.key(0), 2))
    metrics = experiment._absolute(env, learner, states, jax.random.key(1), num_episodes=10, at_once=4)
    np.testing.assert_allclose(metrics["absolute/return_mean"], [3.0, 3.0])


def test_last_and_best_learners_are_loaded(trained):
    env, _, states = run_folders.load_run(trained)
    assert states.env_steps.tolist() == [48, 48] and env.spec.num_agents == 1  # 16 were the warm-up
    saved = export.load_parameters(trained / "params.safetensors", states.params)
    jax.tree.map(np.testing.assert_array_equal, saved, states.params)
    scores = json.loads((trained / "metrics.json").read_text())["metrics"]["eval/return_sum"]
    best = run_folders.load_run(trained, best=True)[2]
    assert best.env_steps.tolist() == [16 + 16 * (1 + int(np.argmax(seed))) for seed in scores]


def test_evaluating_a_run(trained, tmp_path, capsys):
    out, artefact = tmp_path / "evaluation.json", tmp_path / "policy.jax"
    words = [str(trained), "--episodes", "4", "--out", str(out)]
    metrics = evaluate.main([*words, "--gif", "--export", str(artefact), "--pick", "1"])
    content = json.loads(out.read_text())
    assert metrics["eval/return_sum"].shape == (2,)
    assert content["metrics"] == {name: values.tolist() for name, values in metrics.items()}
    assert (content["algorithm"], content["episodes"], content["env_steps"]) == ("iql", 4, [48, 48])
    printed = capsys.readouterr().out
    assert "No GIF: there is no picture of CartPole-v1" in printed and "policy of seed 1" in printed

    # The artefact plays the very episodes that the learner of this seed plays.
    env, learner, states = run_folders.load_run(trained)
    policy, state = export.load_policy(artefact), jmarl.checkpoint.take_seed(states, 1)
    other = learner._replace(
        greedy=lambda state, carry, obs, first: policy.greedy(carry, obs, first), init_carry=policy.init_carry
    )
    key = jax.random.key(3)
    play = jax.jit(lambda key: [jmarl.evaluate(env, player, state, key, num_episodes=4) for player in (learner, other)])
    jax.tree.map(np.testing.assert_array_equal, *play(key))

    again = evaluate.main([*words, "--exploring", "--best", "--overwrite"])
    assert json.loads(out.read_text())["exploring"] and again.keys() == metrics.keys()


def test_exploring_draws_anew_at_each_step():
    env = envs.matrix_game([[0.0, 1.0], [2.0, 3.0]], num_steps=64)
    learner = jmarl.random_policy(env.spec, jmarl.RandomConfig())
    state = compiled.init(learner, jax.random.key(0))
    player = evaluate.as_in_training(learner, jax.random.key(1))
    metrics = jax.jit(lambda key: jmarl.evaluate(env, player, state, key, num_episodes=16))(jax.random.key(2))
    assert 1.3 < metrics["eval/return_mean"] / 64 < 1.7


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--pick", "2"), "--pick 2 is none of the 2 seeds"),
        (("--episodes", "0"), "--episodes 0 must be at least 1"),
        (("--out", "config.json"), "config.json exists already"),
    ],
)
def test_bad_options_are_refused(trained, monkeypatch, capsys, words, sentence):
    monkeypatch.chdir(trained)
    with pytest.raises(SystemExit) as error:
        evaluate.main([".", *words])
    assert error.value.code == 2 and sentence in capsys.readouterr().err


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        evaluate.main([str(tmp_path)])
    assert "is no run folder of jmarl train" in capsys.readouterr().err


def test_parameters_alone_serve(trained, tmp_path):
    for name in ("config.json", "metrics.json"):
        (tmp_path / name).write_bytes((trained / name).read_bytes())
    with pytest.raises(UsageError, match="holds nothing learnt"):
        run_folders.load_run(tmp_path)
    (tmp_path / "params.safetensors").write_bytes((trained / "params.safetensors").read_bytes())
    states = run_folders.load_run(tmp_path)[2]
    assert states.env_steps.tolist() == [48, 48]  # on which exploration depends
    jax.tree.map(np.testing.assert_array_equal, states.params, run_folders.load_run(trained)[2].params)
    with pytest.raises(UsageError, match="has no best learner"):
        run_folders.load_run(tmp_path, best=True)


def test_an_absolute_metric_needs_evaluations_and_checkpoints(tmp_path, capsys):
    for words in (["--eval-episodes", "0"], ["--checkpoint-every", "0"]):
        with pytest.raises(SystemExit):
            train.main(["mappo", "--absolute-episodes", "5", *words, "--run-dir", str(tmp_path / "run")])
        assert "positive with evaluations and checkpoints" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
