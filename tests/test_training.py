"""Rollouts, loops, runs, sweeps, evaluation: seeds, traces, statistics, interruptions."""

import os
import signal

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmarl
from jmarl import envs, training
from jmarl.logging import Sink

CFG = jmarl.PPOConfig(hidden_sizes=(8,), num_epochs=1, num_minibatches=2)
LOOP = jmarl.on_policy(
    envs.matrix_game([[1.0, 0.0], [0.0, 3.0]], num_steps=3), jmarl.ippo, num_envs=4, rollout_length=4
)


def memory_sink(rows):
    return Sink(
        start=lambda info: rows.append(info), write=lambda *row: rows.append(row), close=lambda: rows.append("end")
    )


@pytest.fixture(scope="module")
def train():
    return jax.jit(jax.vmap(jmarl.make_train(LOOP, 10), in_axes=(0, None)))


@pytest.fixture(scope="module")
def trained(train):
    return train(jax.random.split(jax.random.key(0), 3), CFG)


def test_seeds_differ_and_repeat(train, trained):
    run, _ = trained
    for leaf in jax.tree.leaves(run.train_state.params):
        assert not np.array_equal(leaf[0], leaf[1]) or not leaf[0].any()  # biases may still be zero
    again, _ = train(jax.random.split(jax.random.key(0), 3), CFG)
    jax.tree.map(np.testing.assert_array_equal, run.train_state, again.train_state)


def test_vmapped_seeds_equal_single_seeds(trained):
    run, metrics = trained
    single, single_metrics = jax.jit(jmarl.make_train(LOOP, 10))(jax.random.split(jax.random.key(0), 3)[1], CFG)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a[1], b, atol=1e-5), run.train_state.params, single.train_state.params
    )
    np.testing.assert_allclose(metrics["train/return_sum"][1], single_metrics["train/return_sum"], atol=1e-5)


def test_a_sweep_is_one_trace_and_equals_the_single_runs():
    rates = [1e-4, 1e-2]
    cfgs, axes = jmarl.sweep(CFG, learning_rate=rates)
    keys = jax.random.split(jax.random.key(1), 2)
    train = chex.assert_max_traces(jmarl.make_train(LOOP, 10), n=1)
    run, _ = jax.jit(jax.vmap(jax.vmap(train, (0, None)), (None, axes)))(keys, cfgs)
    one = jax.jit(jmarl.make_train(LOOP, 10))
    for i, rate in enumerate(rates):
        single, _ = one(keys[1], CFG.replace(learning_rate=rate))
        compare = lambda a, b, i=i: np.testing.assert_allclose(a[i, 1], b, atol=1e-5)  # noqa: E731
        jax.tree.map(compare, run.train_state.params, single.train_state.params)


def test_sweep_refuses_what_would_need_another_compilation():
    with pytest.raises(ValueError, match=r"num_epochs is not a numeric hyperparameter of PPOConfig.*learning_rate"):
        jmarl.sweep(CFG, num_epochs=[1, 2])
    with pytest.raises(ValueError, match="equally many values"):
        jmarl.sweep(CFG, gamma=[0.9], learning_rate=[1e-3, 1e-4])


@pytest.mark.parametrize("recurrent", [False, True])
def test_step_compiles_once_and_keeps_its_avals(recurrent):
    cfg = CFG.replace(recurrent=recurrent, cell_size=4)
    run = jax.jit(LOOP.init)(jax.random.key(0), cfg)
    chex.clear_trace_counter()  # it counts by name
    step = jax.jit(chex.assert_max_traces(LOOP.step, n=1))
    for _ in range(4):
        new, _ = step(run, cfg)
        before, after = (
            jax.tree.map(
                lambda x: (
                    x.shape,
                    x.dtype,
                    jax.typeof(x).weak_type if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else False,
                ),
                r,
            )
            for r in (run, new)
        )
        assert before == after
        run = new


def test_rollout_keeps_the_true_successor_and_starts_episodes_fresh():
    env = envs.probe("memory", num_agents=2, num_steps=3)
    learner = jmarl.ippo(env.spec, CFG)

    def collect(key):
        return training.rollout(env, learner, training.start(env, learner, key, num_envs=5), length=8)

    run, batch, _ = jax.jit(collect)(jax.random.key(0))
    steps, next_obs = batch.steps, batch.steps.next_obs
    last = np.asarray(steps.last)
    assert last[2].all() and last[5].all() and last.sum() == 10
    np.testing.assert_array_equal(steps.first[0], True)
    np.testing.assert_array_equal(steps.first[1:], steps.last[:-1])
    # The successor is what is seen next, except at an end, where an episode's own last view is kept.
    np.testing.assert_array_equal(next_obs.agents[:-1][~last[:-1]], steps.obs.agents[1:][~last[:-1]])
    np.testing.assert_array_equal(next_obs.agents[last][..., 0], 0)  # the cue is hidden after the first step
    assert np.all(np.asarray(steps.obs.agents)[np.asarray(steps.first)][..., 0] != 0)
    assert int(run.env_steps) == 40


def test_start_states_differ_between_environments_and_episodes():
    env = envs.probe("continuous")
    learner = jmarl.ippo(env.spec, CFG)

    def collect(key, num_resets):
        run = training.start(env, learner, key, num_envs=6)
        return training.rollout(env, learner, run, length=12, num_resets=num_resets)[1].steps.obs.agents[..., 0, 0]

    cues = np.asarray(jax.jit(collect, static_argnums=1)(jax.random.key(0), None))
    assert 0.25 < (cues > 0).mean() < 0.75
    assert not np.array_equal(cues[1], cues[2])
    reused = np.asarray(jax.jit(collect, static_argnums=1)(jax.random.key(0), 2))
    np.testing.assert_array_equal(reused[1:-2], reused[3:])  # two start states, used in turn


@pytest.mark.parametrize(
    ("min_steps", "max_steps", "num"),
    [(1, None, 4), (1, 500, 4), (10, 500, 3), (25, 25, 2), (1, 1, 26), (2, 8, 13), (1, 9, 4)],
)
def test_start_states_suffice_for_the_shortest_episodes_but_seldom_for_one_at_each_step(min_steps, max_steps, num):
    spec = envs.probe("continuous").spec._replace(min_steps=min_steps, max_steps=max_steps)
    assert training._enough_resets(spec, 26) == num


def test_episode_statistics_match_a_python_loop():
    rng = np.random.default_rng(0)
    length, num_envs, num_agents = 9, 4, 2
    episodes = jmarl.types.EpisodeStats(
        returns=jnp.ones((num_envs, num_agents)),
        length=jnp.full(num_envs, 2),
        is_over=jnp.zeros((num_envs, num_agents), bool),
    )
    returns, lengths = np.ones((num_envs, num_agents)), np.full(num_envs, 2)
    finished, finished_lengths, won = [], [], []
    reward = rng.normal(size=(length, num_envs, num_agents)).astype(np.float32)
    last = rng.random((length, num_envs)) < 0.3
    info = {"won": rng.random((length, num_envs)).astype(np.float32)}
    for t in range(length):
        returns, lengths = returns + reward[t], lengths + 1
        for b in np.flatnonzero(last[t]):
            finished.append(returns[b].copy())
            finished_lengths.append(lengths[b])
            won.append(info["won"][t, b])
            returns[b], lengths[b] = 0, 0
    new_returns, new_lengths, metrics = training._count_episodes(
        episodes, jnp.asarray(reward), jnp.asarray(last), jax.tree.map(jnp.asarray, info)
    )
    np.testing.assert_allclose(new_returns, returns, atol=1e-5)
    np.testing.assert_array_equal(new_lengths, lengths)
    assert metrics["train/return_sum"] == pytest.approx(np.sum(finished, axis=-1).mean(), abs=1e-5)
    assert metrics["train/return_mean"] == pytest.approx(np.mean(finished), abs=1e-5)
    assert metrics["train/episode_length"] == pytest.approx(np.mean(finished_lengths))
    assert metrics["train/won"] == pytest.approx(np.mean(won), abs=1e-6)


def test_no_finished_episode_is_nan_and_does_not_spoil_the_mean():
    loop = jmarl.on_policy(envs.matrix_game([[1.0]], num_steps=6), jmarl.ippo, num_envs=2, rollout_length=4)
    _, metrics = jax.jit(jmarl.make_train(loop, 3))(jax.random.key(0), CFG)
    np.testing.assert_array_equal(metrics["train/return_mean"], [np.nan, 6.0, 6.0])
    rows = []
    jmarl.run(loop, jax.random.key(0), CFG, num_iterations=3, iterations_per_chunk=3, sinks=[memory_sink(rows)])
    assert rows[1][2]["train/return_mean"] == 6.0


def test_a_loss_that_is_nan_once_is_no_mean_over_the_rest(capsys):
    def step(run, cfg):
        run, metrics = LOOP.step(run, cfg)
        return run, metrics | {"loss/total": jnp.where(run.env_steps == 32, jnp.nan, metrics["loss/total"])}

    rows = []
    loop = LOOP._replace(step=step)
    jmarl.run(loop, jax.random.key(0), CFG, num_iterations=4, iterations_per_chunk=2, sinks=[memory_sink(rows)])
    assert [bool(np.isnan(row[2]["loss/total"][0])) for row in rows[1:-1]] == [True, False]
    assert "loss/total is not finite after 32 steps, for seed 0 of 1" in capsys.readouterr().out
    assert not any(np.isnan(row[2]["loss/actor"][0]) for row in rows[1:-1])


def test_a_metric_is_one_number():
    loop = LOOP._replace(step=lambda run, cfg: (run, {"loss/each": jnp.zeros(3)}))
    with pytest.raises(ValueError, match=r"The metric 'loss/each' has shape \(3,\), but a metric is one number"):
        jmarl.run(loop, jax.random.key(0), CFG, num_iterations=1)


def test_run_writes_rows_with_a_seed_axis_and_evaluates():
    rows = []
    state = jmarl.run(
        LOOP,
        jax.random.key(0),
        CFG,
        num_iterations=5,
        iterations_per_chunk=2,
        num_seeds=2,
        sinks=[memory_sink(rows)],
        evaluation=jmarl.Evaluation(num_episodes=3, every=2),
    )
    info, *chunks, end = rows
    assert info["total_env_steps"] == 5 * 16 and end == "end"
    assert [row[0] for row in chunks] == [32, 64, 80]  # the last chunk is shorter
    assert all(row[2]["train/return_sum"].shape == (2,) for row in chunks)
    assert ["eval/return_sum" in row[2] for row in chunks] == [False, True, True]
    assert state.env_steps.tolist() == [80, 80]
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))


def test_run_equals_make_train(trained):
    """The same key gives the same run, chunk by chunk or all at once."""
    key_init, _ = jax.random.split(jax.random.key(0))
    state = jmarl.run(LOOP, jax.random.key(0), CFG, num_iterations=4, iterations_per_chunk=3)
    whole, _ = jax.jit(jmarl.make_train(LOOP, 4))(jax.random.split(key_init, 1)[0], CFG)
    compare = lambda a, b: np.testing.assert_allclose(a[0], b, atol=1e-6)  # noqa: E731
    jax.tree.map(compare, state.train_state.params, whole.train_state.params)


def test_seeds_one_by_one_equal_seeds_side_by_side():
    one, other = (
        jmarl.run(LOOP, jax.random.key(0), CFG, num_iterations=2, num_seeds=3, seed_axis=axis)
        for axis in ("map", "vmap")
    )
    compare = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6)  # noqa: E731
    jax.tree.map(compare, one.train_state.params, other.train_state.params)
    with pytest.raises(ValueError, match="seed_axis='scan' is not known: choose 'vmap' or 'map'"):
        jmarl.run(LOOP, jax.random.key(0), CFG, num_iterations=2, seed_axis="scan")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_a_run_with_what_it_has(number, capsys):
    rows, handler_before = [], signal.getsignal(number)
    sink = memory_sink(rows)

    def interrupting(*row):
        rows.append(row)
        if len(rows) == 3:
            os.kill(os.getpid(), number)

    state = jmarl.run(
        LOOP,
        jax.random.key(0),
        CFG,
        num_iterations=50,
        iterations_per_chunk=1,
        sinks=[sink._replace(write=interrupting)],
    )
    assert int(state.env_steps[0]) == 2 * 16
    assert rows[-1] == "end"
    assert "Stopped after 2 of 50 iterations" in capsys.readouterr().out
    assert signal.getsignal(number) is handler_before


def test_a_callback_sees_each_chunk_and_may_stop_the_run():
    seen = []

    def callback(env_steps, metrics, state):
        seen.append((env_steps, metrics["train/return_sum"].shape, state.env_steps.tolist()))
        return env_steps >= 64

    state = jmarl.run(
        LOOP, jax.random.key(0), CFG, num_iterations=50, iterations_per_chunk=2, num_seeds=2, callback=callback
    )
    assert seen == [(32, (2,), [32, 32]), (64, (2,), [64, 64])]
    assert state.env_steps.tolist() == [64, 64]


def test_evaluation_counts_each_episode_once_whatever_its_length():
    """Episodes that end early must not be played twice: with action 0 an episode lasts one step, else three."""
    base = envs.probe("action", num_agents=1)

    def reset(key):
        _, obs = base.reset(key)
        long = jax.random.bernoulli(key)
        return (long, jnp.int32(0)), obs

    def step(state, action, key):
        long, time = state
        last = jnp.where(long, time == 2, True)
        outcome = jmarl.types.Outcome(
            reward=jnp.ones(1), terminated=last[None], last=last, info={"long": long.astype(jnp.float32)}
        )
        return (long, time + 1), base.reset(key)[1], outcome

    env = jmarl.types.Env(reset, step, base.spec._replace(max_steps=3))
    learner = jmarl.ippo(env.spec, CFG)
    evaluate = jax.jit(lambda key: jmarl.evaluate(env, learner, learner.init(key), key, num_episodes=40))
    metrics = evaluate(jax.random.key(0))
    share = metrics["eval/long"]
    assert 0.2 < share < 0.8
    assert metrics["eval/return_sum"] == pytest.approx(1 + 2 * share)
    assert metrics["eval/episode_length"] == pytest.approx(1 + 2 * share)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"evaluation": jmarl.Evaluation(every=0)}, "evaluation.every=0 must be at least 1"),
        ({"evaluation": jmarl.Evaluation(num_episodes=0)}, "evaluation.num_episodes=0 must be at least 1"),
        ({"checkpoint": jmarl.Checkpointing("none", every_s=float("nan"))}, "every_s=nan must be 0 seconds or more"),
        ({"checkpoint": jmarl.Checkpointing("none", every_s=-1.0)}, "every_s=-1.0 must be 0 seconds or more"),
        ({"devices": []}, r"devices=\[\] names no device: name at least one"),
    ],
)
def test_run_refuses_what_it_cannot_do(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        jmarl.run(LOOP, jax.random.key(0), CFG, num_iterations=2, **options)


@pytest.mark.parametrize("name", ["num_envs", "rollout_length"])
def test_negative_sizes_are_refused(name):
    sizes = {"num_envs": 2, "rollout_length": 2, name: -1}
    with pytest.raises(ValueError, match=f"{name}=-1 must be at least 1"):
        jmarl.on_policy(LOOP.env, jmarl.ippo, **sizes)
    with pytest.raises(ValueError, match="num_iterations=0 must be at least 1"):
        jmarl.make_train(LOOP, 0)
