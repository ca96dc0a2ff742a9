"""`run` among people: other versions and environments, exceptions, full disks, numbers that are none, warm starts."""

import builtins
import dataclasses
import errno
import json
import os
import subprocess
import sys
import textwrap
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import jmarl
from jmarl import checkpoint, envs, keys, metrics, rows, running, saving
from jmarl.logging import Sink
from jmarl.types import Loop

CFG = jmarl.PPOConfig(hidden_sizes=(4,), num_epochs=1, num_minibatches=1)
GAME = envs.matrix_game([[1.0, 0.0], [0.0, 3.0]], num_steps=3)


def loop_of(env=GAME, **sizes):
    return jmarl.on_policy(env, jmarl.ippo, **{"num_envs": 4, "rollout_length": 4} | sizes)


LOOP = loop_of()


def run(folder=None, cfg=CFG, loop=LOOP, *, resume=False, stop=False, num_iterations=4, **options):
    """Four chunks of one iteration, or the first alone, saved after each where there is a folder."""
    if folder is not None:
        options["checkpoint"] = jmarl.Checkpointing(folder, every_s=0, resume=resume)
    if stop:
        options["callback"] = lambda *_: True
    arguments = {"iterations_per_chunk": 1} | options
    return jmarl.run(loop, jax.random.key(0), cfg, num_iterations=num_iterations, **arguments)


def sink_of(write=lambda *_: None, **options):
    return Sink(lambda info: None, write, lambda: None, **options)


def require_identical(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        x, y = (jax.random.key_data(z) if jnp.issubdtype(z.dtype, jax.dtypes.prng_key) else z for z in (x, y))
        np.testing.assert_array_equal(x, y)


@pytest.fixture(scope="module")
def whole():
    return run()


# ---------------------------------------------------------------------------------------------- other configs and tasks


@struct.dataclass(kw_only=True)
class Newer(jmarl.PPOConfig):
    """As of a later version, with a field whose default changes nothing."""

    new_field: float = 0.0


def test_a_field_that_the_checkpoint_does_not_know_counts_as_its_default(tmp_path, whole):
    run(tmp_path / "ckpt", stop=True)
    newer = Newer(**{field.name: getattr(CFG, field.name) for field in dataclasses.fields(CFG)})
    with pytest.raises(ValueError, match=r"new_field is 0.0 in the checkpoint, but 1.0 here"):
        run(tmp_path / "ckpt", newer.replace(new_field=1.0), resume=True)
    require_identical(run(tmp_path / "ckpt", newer, resume=True), whole)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_field_that_is_gone_counts_as_its_old_default(tmp_path, value):
    newer = Newer(**{field.name: getattr(CFG, field.name) for field in dataclasses.fields(CFG)}, new_field=value)
    run(tmp_path / "ckpt", newer, stop=True)
    if value == 0.0:
        run(tmp_path / "ckpt", CFG, resume=True)
        return
    with pytest.raises(ValueError, match=r"new_field is 1.0 in the checkpoint, but 0.0 here"):
        run(tmp_path / "ckpt", CFG, resume=True)


def test_fields_of_configs_in_configs_have_dotted_names():
    @struct.dataclass(kw_only=True)
    class Outer:
        inner: jmarl.PPOConfig = CFG.replace(gamma=0.5)
        scale: float = 2.0

    assert saving._fields(Outer())["inner.gamma"] == 0.5
    defaults = saving._fields(Outer(scale=1.0), of_class=True)
    assert defaults["scale"] == 2.0 and defaults["inner.gamma"] == jmarl.PPOConfig().gamma


def test_numbers_are_compared_as_numbers(tmp_path):
    run(tmp_path / "ckpt", CFG.replace(gamma=1), stop=True)
    run(tmp_path / "ckpt", CFG.replace(gamma=1.0), resume=True)


def test_another_config_is_refused(tmp_path):
    run(tmp_path / "ckpt", stop=True)
    with pytest.raises(ValueError, match=r"gamma is 0.99 in the checkpoint, but 0.5 here: a run goes on with the arg"):
        run(tmp_path / "ckpt", CFG.replace(gamma=0.5), resume=True)


class Told(Loop):
    """A loop that says what it was made with."""

    settings: ClassVar = {"num_resets": 3}


@pytest.mark.parametrize(
    ("loop", "sentence"),
    [
        (loop_of(envs.matrix_game([[1.0, 0.0], [0.0, 3.1]], num_steps=3)), "computes something else than when"),
        (loop_of(envs.matrix_game([[1.0, 0.0], [0.0, 3.0]], num_steps=4)), "env.max_steps is 3 in the checkpoint"),
        (loop_of(num_envs=8), "is (16|4) in the checkpoint, but (32|8) here"),
        (Told(*LOOP[:5]), r"loop.num_resets is 2 in the checkpoint, but 3 here"),
        (Told(*LOOP[:2], GAME._replace(unwrapped=Told(*LOOP[:5])), *LOOP[3:5]), None),
    ],
)
def test_another_task_is_not_gone_on_with(tmp_path, monkeypatch, loop, sentence):
    is_told = sentence is None or "num_resets" in sentence
    monkeypatch.setattr(Told, "settings", {"num_resets": 2} if is_told else LOOP.settings)
    run(tmp_path / "ckpt", loop=Told(*LOOP[:5]), stop=True)
    monkeypatch.setattr(Told, "settings", {"num_resets": 3} if sentence and "num_resets" in sentence else {})
    if sentence is None:  # what only one side knows is not compared
        run(tmp_path / "ckpt", loop=loop, resume=True)
        return
    with pytest.raises(ValueError, match=sentence):
        run(tmp_path / "ckpt", loop=loop, resume=True)


def test_options_of_the_environment_underneath_are_compared(tmp_path):
    class Inner:
        def __init__(self, speed):
            self.speed, self.layout = speed, object()

    run(tmp_path / "ckpt", loop=loop_of(GAME._replace(unwrapped=Inner(1.0))), stop=True)
    with pytest.raises(ValueError, match=r"env.unwrapped.speed is 1.0 in the checkpoint, but 2.0 here"):
        run(tmp_path / "ckpt", loop=loop_of(GAME._replace(unwrapped=Inner(2.0))), resume=True)


def test_the_checksum_of_an_environment_is_the_same_in_another_process_whatever_the_order():
    code = "from test_run import GAME, saving; print(saving._program(GAME))"
    paths = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7"}
    result = subprocess.run([sys.executable, "-c", code], env=paths, capture_output=True, text=True, check=True)
    assert int(result.stdout) == saving._program(GAME)


def test_another_version_may_compute_an_environment_in_another_way(tmp_path, monkeypatch):
    run(tmp_path / "ckpt", stop=True)
    monkeypatch.setattr(saving, "_versions", lambda: "jax 99")
    monkeypatch.setattr(saving, "_program", lambda env: 0)
    run(tmp_path / "ckpt", resume=True)


def test_a_checkpoint_with_the_names_of_before_is_gone_on_with(tmp_path, monkeypatch, whole):
    old = {
        **{"algorithm": "ippo", "environment": GAME.spec.name, "num_steps": "4", "steps_per_chunk": "1"},
        **{"num_seeds": "1", "env_steps_per_step": "16", "updates_per_step": "1", "evaluation": "None"},
    }
    run(tmp_path / "ckpt", stop=True)
    info = checkpoint.describe(tmp_path / "ckpt")["info"]
    config = {{"horizon": "num_updates"}.get(name, name): x for name, x in info["config"].items()}
    tree = checkpoint.restore(tmp_path / "ckpt", {"run": whole})
    parts = {**vars(tree["run"]), "learner": tree["run"].train_state}
    tree = {"run": {name: part for name, part in parts.items() if name != "train_state"}}
    with checkpoint.Writer(tmp_path / "old") as writer:
        writer.save(1, tree, {"settings": old | config, "progress": info["progress"], "parts": ["run"]})
    with pytest.raises(ValueError, match=r"num_seeds is 1 in the checkpoint, but 2 here"):
        run(tmp_path / "old", resume=True, num_seeds=2)
    require_identical(run(tmp_path / "old", resume=True), whole)


# ------------------------------------------------------------------------------------------------------ trained longer


def test_a_finished_run_is_trained_longer(tmp_path, capsys):
    seen = []
    linear = CFG.replace(learning_rate_schedule="linear", learning_rate=1e-2)
    run(tmp_path / "ckpt", linear, iterations_per_chunk=None)
    state = run(
        tmp_path / "ckpt",
        linear,
        resume=True,
        num_iterations=6,
        iterations_per_chunk=None,
        sinks=[sink_of(lambda env_steps, *_: seen.append(env_steps))],
    )
    assert "A run of 4 iterations is trained longer, to 6. Schedules stay where they ended" in capsys.readouterr().out
    assert seen == [5 * 16, 6 * 16] and int(state.env_steps[0]) == 6 * 16
    before = checkpoint.restore(tmp_path / "ckpt", {"run": state}, step=4)["run"]
    require_identical(before.train_state.params, state.train_state.params)  # the rate has reached its end, 0
    stretched = run(tmp_path / "ckpt", linear.replace(horizon=8), resume=True, num_iterations=8)
    assert "Schedules" not in capsys.readouterr().out
    changes = jax.tree.map(lambda x, y: np.abs(x - y).max(), stretched.train_state.params, state.train_state.params)
    assert max(jax.tree.leaves(changes)) > 0


@pytest.mark.parametrize("num_seeds", [1, 2])
def test_a_run_begins_with_the_state_of_another(whole, num_seeds):
    copy = jax.tree.map(lambda x: jnp.array(x, copy=True), whole)
    by_seed = jax.tree.map(lambda x: jnp.concatenate([x] * num_seeds), whole)
    one = jax.tree.map(lambda x: x[0], whole)
    for initial in (by_seed, one):
        state = run(initial=initial, num_iterations=2, num_seeds=num_seeds)
        assert state.env_steps.tolist() == [4 * 16 + 2 * 16] * num_seeds
    require_identical(whole, copy)  # it was not donated
    if num_seeds == 1:
        step = jax.jit(lambda state: LOOP.step(state, CFG.replace(horizon=2))[0])
        longer = step(step(one))
        state = run(initial=whole, num_iterations=2)
        np.testing.assert_allclose(state.obs.agents[0], longer.obs.agents, atol=1e-6)
    else:
        state = run(initial=one, num_iterations=2, num_seeds=2)
        assert state.key[0] != state.key[1]


def test_a_run_begins_with_what_another_has_learnt(whole):
    learner = whole.train_state
    still = CFG.replace(learning_rate=0.0)
    one = jax.tree.map(lambda x: x[0], learner)
    for initial in (learner, one, dataclasses.replace(one, env_steps=None)):
        state = run(cfg=still, initial=initial, num_iterations=1).train_state
        require_identical(state.params, learner.params)
        assert int(state.step[0]) == int(learner.step[0]) + 1
    assert int(state.env_steps[0]) == 16  # as none were counted
    for initial in (learner.params, one.params):
        state = run(cfg=still, initial=initial, num_iterations=1).train_state
        require_identical(state.params, learner.params)
        assert int(state.step[0]) == 1 and int(state.env_steps[0]) == 16


def test_target_networks_begin_with_the_parameters():
    params = {"actor": {"w": jnp.ones(2)}, "critic": {"w": jnp.full(2, 2.0)}}
    zeros = jax.tree.map(jnp.zeros_like, params)
    require_identical(saving._as_targets(zeros, params), params)
    require_identical(saving._as_targets({"critic": zeros["critic"]}, params), {"critic": params["critic"]})
    assert saving._as_targets((), params) == ()


def test_what_does_not_fit_is_refused_before_anything_is_opened(whole, tmp_path):
    params = whole.train_state.params
    wide = run(cfg=CFG.replace(hidden_sizes=(5,)), num_iterations=1).train_state
    for initial, sentence in [
        (
            wide,
            r"initial has .* float32 \[1, 5, 2\], but float32 \[1, 4, 2\] is trained here: give the state of one seed",
        ),
        ({**params, "more": jnp.zeros(1)}, "initial has more, unlike what is trained here"),
        (jax.tree.map(lambda x: jnp.stack([x[0]] * 3), whole), "give the state of one seed, or of all 1"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            run(tmp_path / "ckpt", initial=initial)
        assert not (tmp_path / "ckpt").exists()


# ------------------------------------------------------------------------------------------- exceptions and full disks


@pytest.mark.parametrize("error", [RuntimeError("oh"), SystemExit(3)])
@pytest.mark.parametrize("where", ["callback", "sink"])
def test_an_exception_goes_on_after_the_state_was_saved(tmp_path, whole, error, where):
    def fail(env_steps, *_):
        if env_steps == 3 * 16:
            raise error

    options = {"callback": fail} if where == "callback" else {"sinks": [sink_of(fail)]}
    save = jmarl.Checkpointing(tmp_path / "ckpt", every_s=1e9)
    with pytest.raises(type(error)) as caught:
        run(checkpoint=save, **options)
    assert "after 3 iterations" in caught.value.__notes__[0]
    assert checkpoint.steps(tmp_path / "ckpt") == [3]
    assert int(caught.value.run_state.env_steps[0]) == 3 * 16
    require_identical(run(tmp_path / "ckpt", resume=True), whole)


def test_without_checkpoints_the_exception_has_the_state(whole):
    def fail(env_steps, *_):
        if env_steps == 4 * 16:
            raise ValueError("oh")

    with pytest.raises(ValueError, match="oh") as caught:
        run(callback=fail)
    require_identical(caught.value.run_state, whole)


def test_a_display_that_fails_is_left_out(whole):
    written = []

    def fail(*_):
        raise OSError("the terminal is gone")

    with pytest.warns(RuntimeWarning, match="display has failed .*the terminal is gone"):
        state = run(sinks=[sink_of(fail, is_display=True), sink_of(lambda *row: written.append(row))])
    require_identical(state, whole)
    assert len(written) == 4 and jmarl.logging.terminal().is_display


def test_a_save_that_fails_is_told_once_and_tried_again(tmp_path, monkeypatch, capsys, whole):
    save, attempts = checkpoint.Writer.save, []

    def full(self, step, *more):
        attempts.append(step)
        if step in (2, 3):
            raise OSError(f"Could not write a checkpoint to {self.folder}: No space left on device.")
        save(self, step, *more)

    monkeypatch.setattr(checkpoint.Writer, "save", full)
    require_identical(run(tmp_path / "ckpt"), whole)
    out = capsys.readouterr().out
    assert out.count("No space left on device. The run goes on, and will try again") == 1 and attempts == [1, 2, 3, 4]
    assert str(tmp_path / "ckpt") in out and checkpoint.steps(tmp_path / "ckpt") == [1, 4]


def test_a_save_that_fails_in_the_background_is_told_and_tried_again(tmp_path, monkeypatch, capsys, whole):
    wait, failures = checkpoint.Writer.wait, [None, OSError("full"), None, OSError("full")]

    def fail(self):
        wait(self)
        if failures and (error := failures.pop(0)):
            raise error

    monkeypatch.setattr(checkpoint.Writer, "wait", fail)
    require_identical(run(tmp_path / "ckpt"), whole)
    assert "full. The run goes on" in capsys.readouterr().out
    assert checkpoint.steps(tmp_path / "ckpt")[-1] == 4


def test_rows_that_cannot_be_written_are_no_reason_to_end_a_run(tmp_path, monkeypatch, capsys, whole):
    """Nothing fits from the second row on, until the last."""
    files = jmarl.logging.files
    append, replace, num = files.append, files.replace, 0

    def full(function, path, *more):
        if num in (2, 3):
            raise OSError(f"Could not write {path}: No space left on device.")
        return function(path, *more)

    def count(*_):
        nonlocal num
        num += 1

    monkeypatch.setattr(files, "append", lambda *words: full(append, *words))
    monkeypatch.setattr(files, "replace", lambda *words: full(replace, *words))
    paths = [tmp_path / "metrics.csv", tmp_path / "metrics.json"]
    sinks = [jmarl.logging.csv_file(paths[0]), jmarl.logging.json_file(paths[1], every_s=0.0)]
    require_identical(run(tmp_path / "ckpt", sinks=[sink_of(count), *sinks]), whole)
    out = capsys.readouterr().out
    assert [out.count(f"Could not write {path}: No space left on device. Its rows wait") for path in paths] == [1, 1]
    assert checkpoint.steps(tmp_path / "ckpt") == [1, 4]  # none without its rows
    assert json.loads(paths[1].read_text())["env_steps"] == [16, 32, 48, 64]
    assert [line.split(",")[0] for line in paths[0].read_text().splitlines()] == ["env_steps", "16", "32", "48", "64"]


# ----------------------------------------------------------------------------------------------- numbers that are none


def measuring(step_metrics):
    """The loop with more metrics, a function of the state."""

    def step(state, cfg):
        state, values = LOOP.step(state, cfg)
        return state, values | step_metrics(state)

    return LOOP._replace(step=step)


def test_each_seed_that_diverges_is_named_once_with_its_step(capsys):
    watch = running._Watch()
    values = {"loss/a": np.zeros(3), "loss/b": np.zeros(3)}
    watch.metrics(16, values)
    watch.metrics(32, values | {"loss/b": np.array([0.0, np.nan, 0.0])})
    watch.metrics(48, {"loss/a": np.array([np.inf, np.nan, 0.0]), "loss/b": np.array([np.nan, np.nan, 0.0])})
    watch.parameters(1048, np.array([False, False, False]))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "loss/b is not finite after 32 steps, for seed 1 of 3",
        "loss/a is not finite after 48 steps, for seed 0 of 3",
        "A parameter is not finite after 1,048 steps, for seed 2 of 3",
    ]
    assert all("lower learning rate" in line for line in lines)


def test_the_environment_is_blamed_for_what_it_returns(capsys):
    watch = running._Watch()
    fine = {"env/nonfinite_rewards": np.zeros(3), "env/nonfinite_views": np.zeros(3), "loss/a": np.zeros(3)}
    assert watch.metrics(60, fine).keys() == {"loss/a"}
    lost = fine | {"env/nonfinite_rewards": np.array([0.0, 2.0, 0.0]), "loss/a": np.array([0.0, np.nan, np.nan])}
    for steps in (120, 240):
        assert watch.metrics(steps, lost).keys() == {"loss/a", "env/nonfinite_rewards"}
    watch.metrics(300, fine | {"env/nonfinite_views": np.ones(3)})
    assert capsys.readouterr().out.splitlines() == [
        "The reward of seed 1 was not finite after 120 steps: the environment returned it.",
        "loss/a is not finite after 120 steps, for seed 1 of 3: they may never recover; they learnt from what the "
        "environment returned.",
        "loss/a is not finite after 120 steps, for seed 2 of 3: they may never recover; try a lower learning rate.",
        "The view of seeds 0, 1, 2 was not finite after 300 steps: the environment returned it.",
    ]


def test_run_reports_and_drops_what_rollouts_count(capsys):
    loop = measuring(lambda state: {"env/nonfinite_rewards": jnp.where(state.env_steps == 32, 2.0, 0.0)})
    names = []
    run(loop=loop, sinks=[sink_of(lambda env_steps, wall_s, values: names.append("env/nonfinite_rewards" in values))])
    assert names == [False, True, False, False]
    assert "The reward of seed 0 was not finite after 32 steps" in capsys.readouterr().out


def test_parameters_that_are_not_finite_never_become_the_best(tmp_path, capsys):
    """The second action is played first, and from the third iteration on the first, as they are NaN, with its score."""
    loop = loop_of(envs.matrix_game([[9.0, 0.0], [0.0, 1.0]], num_steps=3))

    def step(state, cfg):
        new, values = loop.step(state, cfg)
        second = lambda x: jnp.zeros_like(x) + (jnp.arange(2.0) if x.shape[-1] == 2 else 0.0)  # noqa: E731
        lost = jax.tree.map(lambda x: jnp.where(new.env_steps >= 48, jnp.nan, second(x)), new.train_state.params)
        return new.replace(train_state=dataclasses.replace(new.train_state, params=lost)), values

    evaluation = jmarl.Evaluation(num_episodes=2, every=1)
    state = run(tmp_path / "ckpt", loop=loop._replace(step=step), evaluation=evaluation)
    like = jmarl.running.Best(train_state=state.train_state, score=jnp.zeros(1))
    best = checkpoint.restore(tmp_path / "ckpt", like, part="best")
    assert np.isfinite(best.score).all() and int(best.train_state.env_steps[0]) <= 32
    assert running._has_finite_parameters(best.train_state).all()
    assert "A parameter is not finite after 48 steps, for seed 0 of 1" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------ keys and jax's flags


def test_keys_of_the_old_kind_work(whole):
    state = jmarl.run(LOOP, jax.random.PRNGKey(0), CFG, num_iterations=4, iterations_per_chunk=1)
    require_identical(state, whole)
    for key in (0, jnp.zeros(2), jax.random.split(jax.random.key(0))):
        with pytest.raises(TypeError, match=r"give a key, such as jax.random.key\(0\)"):
            keys.as_key(key)


def test_a_healthy_run_trains_while_jax_looks_for_nan():
    """An episode is longer than a rollout, so that there is no return at first."""
    loop = loop_of(envs.probe("delayed", num_steps=9))

    def step(state, cfg):
        state, values = loop.step(state, cfg)
        return state, {name: jnp.where(jnp.isnan(x), metrics.missing(), x) for name, x in values.items()}

    seen = []
    jax.config.update("jax_debug_nans", True)
    try:
        state = run(loop=loop._replace(step=step), sinks=[sink_of(lambda *row: seen.append(row[2]))])
    finally:
        jax.config.update("jax_debug_nans", False)
    assert running._has_finite_parameters(state.train_state).all()
    assert [bool(np.isnan(row["train/return_sum"][0])) for row in seen] == [True, True, False, True]


def test_means_are_numbers_until_they_are_read():
    one = rows.Means.of({"a": jnp.float32(1.0), "b": jnp.nan * jnp.ones(()), "loss/c": jnp.float32(jnp.nan)})
    two = rows.Means.of({"a": jnp.int32(4), "b": jnp.nan * jnp.ones(()), "loss/c": jnp.float32(1.0)})
    both = jax.tree.map(jnp.add, one, two)
    np.testing.assert_array_equal(both.total[:2], [5.0, 0.0])
    means = jax.tree.map(lambda x: x[None], both).on_host()
    np.testing.assert_equal(means, {"a": np.array([2.5]), "b": np.array([np.nan]), "loss/c": np.array([np.nan])})


def test_strict_promotion_and_ranks_are_no_trouble_for_chunks():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        rows.Means.of({"a": jnp.float32(1.0), "b": jnp.int32(1), "c": jnp.bool_(True)})


# ------------------------------------------------------------------------------------------------- arguments, notebooks


def test_the_old_names_of_arguments_work_and_warn(whole):
    with pytest.warns(DeprecationWarning, match="num_steps is called num_iterations now"):
        state = jmarl.run(LOOP, jax.random.key(0), CFG, num_steps=4, steps_per_chunk=1, split="seeds")
    require_identical(state, whole)


def test_relative_folders_are_meant_where_they_were_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    sinks = [jmarl.logging.csv_file("logs/metrics.csv"), jmarl.logging.json_file("logs/deep/metrics.json")]
    run("ckpt", sinks=sinks, callback=lambda *_: os.chdir(tmp_path / "elsewhere"))
    assert checkpoint.steps(tmp_path / "ckpt")[-1] == 4 and not list((tmp_path / "elsewhere").iterdir())
    assert len((tmp_path / "logs" / "metrics.csv").read_text().splitlines()) == 5
    assert json.loads((tmp_path / "logs" / "deep" / "metrics.json").read_text())["env_steps"] == [16, 32, 48, 64]


def test_wrong_arguments_are_refused_in_one_sentence():
    """In a process of its own: here, the type checker of the tests would come first."""
    code = """
        import jax, jmarl
        from jmarl import envs
        loop = jmarl.on_policy(envs.matrix_game([[1.0]]), jmarl.ippo, num_envs=2, rollout_length=2)
        cfg = jmarl.PPOConfig(hidden_sizes=(4,))
        sink = jmarl.logging.memory()
        for options in ({"num_iterations": 1.5}, {"num_seeds": 2.0}, {"iterations_per_chunk": True}, {"sinks": sink},
                        {"sinks": [print]}, {"evaluation": 32}, {"checkpoint": "folder"}, {"callback": 3},
                        {"num_iterations": 0}, {"iterations_per_chunk": 2**31}, {"loop": None}, {"key": 0}):
            arguments = {"loop": loop, "key": jax.random.key(0), "cfg": cfg, "num_iterations": 2, **options}
            try:
                jmarl.run(**arguments)
            except (ValueError, TypeError) as error:
                print(error)
        with jax.disable_jit():
            try:
                jmarl.run(loop, jax.random.key(0), cfg, num_iterations=2)
            except ValueError as error:
                print(error)
    """
    paths = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", textwrap.dedent(code)]
    result = subprocess.run(words, env=paths, capture_output=True, text=True, check=True)
    sentences = [
        "num_iterations=1.5 must be a whole number",
        "num_seeds=2.0 must be a whole number",
        "iterations_per_chunk=True must be a whole number",
        "sinks must be a list of sinks, also for one",
        "sinks must be a list of sinks, also for one",
        "evaluation=32 must be a jmarl.Evaluation or None",
        "checkpoint='folder' must be a jmarl.Checkpointing or None",
        "callback=3 must be a function",
        "num_iterations=0 must be at least 1",
        "iterations_per_chunk=2147483648 must be at most 2147483647",
        "loop=None must be a jmarl.Loop",
        "key is int 0: give a key",
        "run compiles whole chunks, which jax.disable_jit() forbids",
    ]
    lines = result.stdout.splitlines()
    assert len(lines) == len(sentences), result.stdout
    assert all(line.startswith(sentence) for line, sentence in zip(lines, sentences, strict=True)), result.stdout


def test_a_history_holds_all_rows_of_a_run():
    history = jmarl.logging.memory()
    run(num_seeds=2, sinks=[history], evaluation=jmarl.Evaluation(num_episodes=2, every=2))
    np.testing.assert_array_equal(history.env_steps, [16, 32, 48, 64])
    assert history.metrics["train/return_sum"].shape == (4, 2) and (np.diff(history.wall_s) > 0).all()
    np.testing.assert_array_equal(np.isnan(history.metrics["eval/return_sum"][:, 0]), [True, False, True, False])


def test_a_history_is_drawn_in_one_line(monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    history = jmarl.logging.memory()
    history.start({"num_seeds": 2})
    history.write(10, 1.0, {"a": np.array([1.0, np.nan])})
    history.write(20, 1.0, {"a": np.array([2.0, 3.0])})
    lines = history.plot("a").lines
    assert [line.get_ydata().tolist() for line in lines] == [[1.0, 2.0], [3.0]]
    with pytest.raises(ValueError, match="'b' was not measured: choose one of a"):
        history.plot("b")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        history.plot("a")


def test_a_file_that_takes_a_part_is_written_to_its_end(tmp_path, monkeypatch):
    """Of a write to a disk that is nearly full the system may take the first bytes alone."""
    path = tmp_path / "file"
    path.write_bytes(b"kept, torn")
    open_ = builtins.open

    class Narrow:
        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, data):
            if self.file.tell() >= 8:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.file.write(data[:3])

    files = jmarl.logging.files
    with monkeypatch.context() as patched:
        patched.setattr(type(path), "open", lambda self, *words, **more: Narrow(open_(self, *words, **more)))
        with pytest.raises(OSError, match=f"Could not write {path}: No space left on device"):
            files.append(path, b"a long row", 5)
    assert files.append(path, b" whole", 5) == 11
    assert path.read_bytes() == b"kept, whole"
