"""Statistics of runs, reports, cross-play and checks: values computed by hand, and tiny runs written by hand."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jmarl
from jmarl import envs
from jmarl.cli import check, crossplay, evaluate, experiment, report, run_folders
from jmarl.cli import statistics_of_runs as statistics
from jmarl.cli.errors import UsageError
from jmarl.types import Learner, TrainState

# ------------------------------------------------------------------------------------------------------ statistics


@pytest.mark.parametrize(
    "scores, expected",
    [
        ([[1, 2, 3, 100]], 2.5),  # the middle two
        ([[7, 0, 6, 1, 5, 2, 4, 3]], 3.5),  # 2, 3, 4, 5
        ([[1, 2, 3, 4, 100]], 3.0),  # one from either end
        ([[0, 3, 9]], 4.0),  # too few to drop any
        ([[0, 0], [10, 20]], 5.0),  # two tasks: 0 and 10
    ],
)
def test_interquartile_mean_by_hand(scores, expected):
    assert statistics.interquartile_mean(*map(np.array, scores)) == expected


def test_interquartile_mean_keeps_time():
    curves = np.array([[1, 2, 3, 100], [4, 4, 4, 4]])
    np.testing.assert_allclose(statistics.interquartile_mean(curves), [2.5, 4])


def test_performance_profile_by_hand():
    thresholds = np.array([0, 1, 2.5, 4])
    profile = statistics.performance_profile(np.array([1, 2]), np.array([3, 4]), thresholds=thresholds)
    np.testing.assert_allclose(profile, [1, 0.75, 0.5, 0])  # above, not at, a threshold


def test_probability_of_improvement_by_hand():
    x, y = np.array([3, 1]), np.array([2, 1])  # 3 > 2, 3 > 1, 1 < 2, 1 = 1
    assert statistics.probability_of_improvement([x], [y]) == 2.5 / 4
    assert statistics.probability_of_improvement([x, np.array([0])], [y, np.array([1])]) == 2.5 / 8
    assert statistics.probability_of_improvement([y], [x]) == 1.5 / 4


def test_probability_of_improvement_is_mann_whitney_u():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 5, 6), rng.integers(1, 6, 9)  # with ties
    expected = stats.mannwhitneyu(x, y).statistic / (6 * 9)
    np.testing.assert_allclose(statistics.probability_of_improvement([x], [y]), expected)


def test_bootstrap_of_two_runs_has_three_outcomes():
    """The mean of two draws of 0 and 1 is 0, 0.5 and 1 with probability 1/4, 1/2 and 1/4."""

    def mean(scores):
        return scores.mean(-1)

    scores = np.array([0.0, 1.0])
    assert statistics.stratified_bootstrap(mean, scores, level=0.95) == (0, 1)
    assert statistics.stratified_bootstrap(mean, scores, level=0.4) == (0.5, 0.5)


def test_bootstrap_draws_within_each_task():
    """Tasks of equal runs leave nothing to chance; draws across tasks would."""
    low, high = statistics.stratified_bootstrap(statistics.interquartile_mean, np.zeros(4), np.ones(4))
    assert (low, high) == (0.5, 0.5)


def test_bootstrap_agrees_with_scipy():
    scores = np.random.default_rng(1).normal(size=20)
    ours = statistics.stratified_bootstrap(statistics.interquartile_mean, scores, num_resamples=20_000)
    theirs = stats.bootstrap(
        (scores,), lambda x, axis: statistics.interquartile_mean(x), method="percentile", n_resamples=20_000
    )
    np.testing.assert_allclose(ours, theirs.confidence_interval, atol=0.05)


def test_bootstrap_keeps_time_and_thresholds():
    scores = np.array([[0.0, 1, 2, 3], [5, 5, 5, 5]])
    low, high = statistics.stratified_bootstrap(statistics.interquartile_mean, scores)
    assert low.shape == (2,) and low[0] < 1.5 < high[0] and low[1] == high[1] == 5

    def profile(*scores):
        return statistics.performance_profile(*scores, thresholds=np.array([-1.0, 1.5, 4]))

    low, high = statistics.stratified_bootstrap(profile, scores[0])
    np.testing.assert_allclose([low, high], [[1, 0, 0], [1, 1, 0]])


def test_when_reached_is_the_first_evaluation_at_the_threshold():
    scores = np.array([[0, 5, 1], [4, 1, 1], [3, 6, 2]])
    np.testing.assert_allclose(statistics.when_reached(scores, np.array([10, 20, 30]), 4.0), [20, 10, math.inf])
    seconds = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    np.testing.assert_allclose(statistics.when_reached(scores, seconds, 4.0), [4, 2, math.inf])


def test_prediction_interval_by_hand():
    """Mean 2, deviation √2, t = 12.706 with one degree of freedom, √(1/2 + 1/2) = 1."""
    low, high = statistics.prediction_interval(np.array([1.0, 3.0]), 2)
    np.testing.assert_allclose([low, high], [2 - 12.7062 * math.sqrt(2), 2 + 12.7062 * math.sqrt(2)], rtol=1e-5)


def test_prediction_interval_holds_what_it_says():
    rng = np.random.default_rng(0)
    hits = []
    for _ in range(2000):
        low, high = statistics.prediction_interval(rng.normal(size=4), 2)
        hits.append(low <= rng.normal(size=2).mean() <= high)
    assert abs(np.mean(hits) - 0.95) < 0.02


# --------------------------------------------------------------------------------------------------------- reports


def run_folder(path, scores, *, algorithm="qmix", env="MPE_simple_spread_v3", env_kwargs=None, seed=0, **config):
    """A run of `scores [seed][t]` at 100, 200, .. steps, one row without evaluation in between."""
    path.mkdir(parents=True)
    num_rows = 2 * len(scores[0])

    def with_gaps(series):
        return [x for value in series for x in (None, value)]

    facts = {"command": f"jmarl train {algorithm}", "algorithm": algorithm, "env": env}
    facts |= {"env_kwargs": env_kwargs or {}, "seed": seed, "seeds": len(scores), "eval_episodes": 8}
    facts |= {"config": {"learning_rate": 0.001, **config}}
    metrics = {"eval/return_sum": [with_gaps(series) for series in scores]}
    metrics["train/return_sum"] = [[0.0] * num_rows for _ in scores]
    content = {"env_steps": [50 * (i + 1) for i in range(num_rows)], "wall_s": [float(i) for i in range(num_rows)]}
    (path / "config.json").write_text(json.dumps(facts))
    (path / "metrics.json").write_text(json.dumps(content | {"metrics": metrics}))
    return path


@pytest.fixture
def two_runs(tmp_path):
    low = run_folder(tmp_path / "low", [[0, 1], [1, 2], [2, 3], [3, 4]])
    high = run_folder(tmp_path / "high", [[5, 11], [4, 12], [3, 13], [2, 20]], algorithm="mappo")
    return low, high


def refused(capsys, *words):
    """What the user reads: exit code 2, one sentence."""
    with pytest.raises(SystemExit) as error:
        report.main([str(word) for word in words])
    assert error.value.code == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ") and text.count("\n") == 1
    return text


def test_report_of_two_algorithms(two_runs, tmp_path, capsys):
    report.main([*map(str, two_runs), "--out", str(tmp_path / "out"), "--threshold", "3"])
    text = (tmp_path / "out" / "report.md").read_text()
    assert text in capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    table = {row[0]: row[1:] for row in rows[2:4]}
    assert list(table) == ["mappo", "qmix"]  # best first
    assert table["mappo"][:2] == ["4", "200"] and table["mappo"][2].startswith("12.5 (") and table["mappo"][3] == "14.0"
    # The seeds of mappo reach 3 at 100, 100, 100 and 200 steps, two of qmix's never do.
    assert table["mappo"][-4:] == ["100", "1", "unknown", "4 of 4"]
    assert table["qmix"][-4:] == ["-", "-", "unknown", "2 of 4"]
    assert rows[-1] == ["mappo", "1.00 (1.00 to 1.00)"]
    for name in ("iqm", "curves", "profiles", "improvement"):
        assert (tmp_path / "out" / f"MPE_simple_spread_v3-{name}.png").stat().st_size > 1000
        assert f"MPE_simple_spread_v3-{name}.png" in text


def test_report_never_overwrites_in_silence(two_runs, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "note").write_text("mine")
    assert "exists already" in refused(capsys, *two_runs, "--out", tmp_path / "out")
    report.main([*map(str, two_runs), "--out", str(tmp_path / "out"), "--overwrite"])
    assert (tmp_path / "out" / "note").read_text() == "mine"


def test_report_says_what_is_wrong(two_runs, tmp_path, capsys):
    out = ("--out", tmp_path / "out")
    assert "it has no config.json that can be read" in refused(capsys, tmp_path / "nowhere", *out)
    assert "choose one of eval/return_sum" in refused(capsys, two_runs[0], *out, "--metric", "eval/won")
    assert "hold the same seeds" in refused(capsys, two_runs[0], two_runs[0], *out)
    assert "no task of these runs" in refused(capsys, *two_runs, *out, "--score-range", "chess=0,1")
    assert "ENVIRONMENT=LOW,HIGH" in refused(capsys, *two_runs, *out, "--score-range", "chess=0")
    assert "LOW below HIGH" in refused(capsys, *two_runs, *out, "--score-range", "chess=1,0")
    assert "up to 10 environment steps" in refused(capsys, *two_runs, *out, "--env-steps", "10")
    (two_runs[0] / "metrics.json").write_text('{"env_steps": [1, 2')
    assert "metrics.json is damaged" in refused(capsys, two_runs[0], *out)
    assert not (tmp_path / "out").exists()


def groups(folders, **kwargs):
    runs = [report.read_run(folder, "eval/return_sum") for folder in folders]
    return report.group_runs(runs, "eval/return_sum", **{"ranges": {}, "env_steps": None} | kwargs)


def test_seeds_of_several_folders_are_put_together(tmp_path):
    one = run_folder(tmp_path / "one", [[1, 2, 3]])
    other = run_folder(tmp_path / "other", [[4, 5], [6, 7]], seed=1)  # interrupted
    (group,) = groups([one, other])
    np.testing.assert_allclose(group.scores, [[1, 4, 6], [2, 5, 7]])
    np.testing.assert_allclose(group.env_steps, [100, 200])
    np.testing.assert_allclose(group.final, [2, 5, 7])


def test_runs_with_other_settings_stay_apart(tmp_path):
    rates = [run_folder(tmp_path / f"{rate}", [[1.0]], learning_rate=rate) for rate in (0.1, 0.2)]
    assert [group.algorithm for group in groups(rates)] == ["qmix learning_rate=0.1", "qmix learning_rate=0.2"]
    maps = [run_folder(tmp_path / m, [[1.0]], env="SMAX", env_kwargs={"map_name": m}) for m in ("3m", "8m")]
    assert [group.task for group in groups(maps)] == ["SMAX map_name=3m", "SMAX map_name=8m"]
    ids = [run_folder(tmp_path / f"ids{i}", [[1.0]], env_kwargs={"agent_ids": i}) for i in (True, False)]
    assert [group.algorithm for group in groups(ids)] == ["qmix agent_ids=True", "qmix agent_ids=False"]
    assert {group.task for group in groups(ids)} == {"MPE_simple_spread_v3"}


def test_where_a_run_was_computed_is_no_setting():
    facts = {"config": {}, "env_kwargs": {}, "devices": 2, "shard": "envs", "distributed": True, "num_envs": 4}
    assert report.settings_of(facts) == {"num_envs": 4} | dict.fromkeys(report.NOT_THE_TASK)


def test_scores_are_normalised_and_cut_at_a_step(tmp_path):
    (group,) = groups(
        [run_folder(tmp_path / "run", [[-10, 0, 30]])], ranges={"MPE_simple_spread_v3": (-10.0, 10.0)}, env_steps=250
    )
    np.testing.assert_allclose(group.scores, [[0], [0.5]])


def test_aggregate_over_tasks_needs_ranges(tmp_path):
    folders = [
        run_folder(tmp_path / "spread", [[0], [1], [2], [3]]),
        run_folder(tmp_path / "prey", [[0], [10], [20], [30]], env="predator_prey"),
        run_folder(tmp_path / "other", [[4], [4], [4], [4]], algorithm="vdn"),
    ]
    assert "it needs --score-range for each" in report.write_report(folders, tmp_path / "raw")
    ranges = {"MPE_simple_spread_v3": (0.0, 4.0), "predator_prey": (0.0, 40.0)}
    text = report.write_report(folders, tmp_path / "normalised", ranges=ranges)
    aggregate = text[text.index("## All tasks") :]
    # 0, 0, 1/4, 1/4, 1/2, 1/2, 3/4, 3/4: the middle four
    assert "| qmix | 8 | 0.375 (" in aggregate and "vdn" not in aggregate


def test_marl_eval_layout(tmp_path):
    one = run_folder(tmp_path / "one", [[1.0, 2.0], [3.0, 4.0]], env_kwargs={"num_agents": 5})
    content = report.marl_eval(groups([one]))
    seeds = content["mpe"]["simple_spread_v3 num_agents=5"]["qmix"]
    assert list(seeds) == ["seed_0", "seed_1"]
    assert seeds["seed_1"] == {
        "step_0": {"step_count": 100, "elapsed_time": 1.0, "return_sum": [3.0]},
        "step_1": {"step_count": 200, "elapsed_time": 3.0, "return_sum": [4.0]},
        "absolute_metrics": {"return_sum": [4.0]},
    }
    assert list(seeds["seed_1"])[-1] == "absolute_metrics"  # marl-eval takes the last key for it


def test_marl_eval_takes_the_absolute_metric_of_a_run_that_has_one(tmp_path):
    one = run_folder(tmp_path / "one", [[1.0, 2.0], [3.0, 4.0]])
    content = json.loads((one / "metrics.json").read_text())
    content["metrics"]["absolute/return_sum"] = [[None, None, None, 5.0], [None, None, None, 6.0]]
    (one / "metrics.json").write_text(json.dumps(content))
    seeds = report.marl_eval(groups([one]))["mpe"]["simple_spread_v3"]["qmix"]
    assert seeds["seed_1"]["absolute_metrics"] == {"return_sum": [6.0]}


# ------------------------------------------------------------------------------------------------------ cross-play


def test_cross_play_of_conventions():
    """Seeds that always meet in room 0, 1 and 1: a team earns 2 if both go to the same room."""

    def greedy(state, carry, obs, first):
        return jnp.broadcast_to(state.params, obs.agent_mask.shape), carry

    learner = Learner(None, lambda shape: (), None, greedy, None)
    states = TrainState(params=jnp.array([0, 1, 1]), step=jnp.zeros(3, jnp.int32), env_steps=jnp.zeros(3, jnp.int32))
    env = envs.matrix_game([[1.0, 0.0], [0.0, 1.0]])
    metrics = crossplay.cross_play(env, learner, states, jax.random.key(0), num_episodes=2)
    np.testing.assert_allclose(metrics["eval/return_sum"], [[2, 0, 0], [0, 2, 2], [0, 2, 2]])
    assert crossplay.self_and_cross(np.array([[2, 0, 0], [0, 2, 2], [0, 2, 2]])) == (2, 4 / 6)


@pytest.mark.parametrize("agent, expected", [(0, [[0, 10], [1, 11]]), (1, [[0, 1], [10, 11]])])
def test_cross_play_gives_one_agent_the_policy_of_the_row(agent, expected):
    """The payoff spells the joint action: the tens are agent 1's, the ones agent 0's."""

    def greedy(state, carry, obs, first):
        return jnp.broadcast_to(state.params, obs.agent_mask.shape), carry

    learner = Learner(None, lambda shape: (), None, greedy, None)
    states = TrainState(params=jnp.array([0, 1]), step=jnp.zeros(2, jnp.int32), env_steps=jnp.zeros(2, jnp.int32))
    env = envs.matrix_game([[0.0, 10.0], [1.0, 11.0]])
    metrics = crossplay.cross_play(env, learner, states, jax.random.key(0), num_episodes=1, agent=agent)
    np.testing.assert_allclose(metrics["eval/return_mean"], expected)


@pytest.fixture
def saved_run(tmp_path):
    config = jmarl.PPOConfig(hidden_sizes=(8,), recurrent=True, cell_size=8)
    env = jmarl.make("predator_prey", size=3, num_predators=2, num_prey=1, max_steps=4)
    states = jax.vmap(jmarl.ippo(env.spec, config).init)(jax.random.split(jax.random.key(1), 2))
    facts = {"algorithm": "ippo", "env": "predator_prey", "seeds": 2}
    facts |= {"env_kwargs": {"size": 3, "num_predators": 2, "num_prey": 1, "max_steps": 4}}
    facts |= {"config": {name: getattr(config, name) for name in config.__dataclass_fields__}}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    jmarl.export.save_parameters(states.params, tmp_path / "params.safetensors")
    return tmp_path, states


def test_loading_gives_the_saved_parameters(saved_run):
    folder, states = saved_run
    jax.tree.map(np.testing.assert_array_equal, crossplay.load_run(folder)[2].params, states.params)


def test_cross_play_from_the_command_line(saved_run, capsys):
    folder, _ = saved_run
    crossplay.main([str(folder), "--episodes", "2"])
    content = json.loads((folder / "crossplay" / "crossplay.json").read_text())
    assert np.shape(content["matrix"]) == (2, 2)
    assert content["gap"] == content["self_play_mean"] - content["cross_play_mean"]
    assert (folder / "crossplay" / "crossplay.png").exists()
    assert "gap" in capsys.readouterr().out
    with pytest.raises(SystemExit) as error:
        crossplay.main([str(folder)])
    assert error.value.code == 2 and "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "words", "sentence"),
    [
        (crossplay, ["--episodes", "0"], "--episodes 0 must be at least 1"),
        (crossplay, ["--seed", "-1"], "--seed -1 must be at least 0"),
        (evaluate, ["--episodes", "0"], "--episodes 0 must be at least 1"),
        (evaluate, ["--seed", "4294967296"], "--seed 4294967296 must be at least 0 and less than 2**32"),
        (evaluate, ["--out", "nowhere/numbers.json"], "numbers.json has no place, since nowhere is no folder"),
        (evaluate, ["--export", "nowhere/policy.jax"], "it, or give another --export"),
    ],
)
def test_what_plays_a_run_refuses_before_it_plays(saved_run, script, words, sentence, capsys):
    folder, _ = saved_run
    before = sorted(folder.rglob("*"))
    with pytest.raises(SystemExit) as error:
        script.main([str(folder), *words])
    assert error.value.code == 2 and sentence in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before


def test_other_parameters_are_refused(saved_run):
    folder, states = saved_run
    jmarl.export.save_parameters(jax.tree.map(lambda x: x[..., :1], states.params), folder / "params.safetensors")
    with pytest.raises(UsageError, match="is expected here"):
        crossplay.load_run(folder)
    (folder / "params.safetensors").write_bytes(b"torn")
    with pytest.raises(UsageError, match="damaged"):
        crossplay.load_run(folder)


# ---------------------------------------------------------------------------------------------------------- checks


def test_check_repeats_the_command_with_other_seeds(tmp_path):
    folder = run_folder(tmp_path / "old", [[0, 1]], algorithm="vdn")
    facts = json.loads((folder / "config.json").read_text())
    facts["command"] = "python benchmarks/train.py vdn --seeds 4 --split envs --no-gif --run-dir=runs/old --seed 0"
    (folder / "config.json").write_text(json.dumps(facts))
    words = check.command_of(run_folders.read_config(folder), seeds=2, seed=1, run_dir=None)
    assert words == ["vdn", "--shard", "envs", "--seeds", "2", "--seed", "1", "--no-gif"]


def test_check_trains_and_compares(tmp_path, monkeypatch, capsys):
    committed = run_folder(tmp_path / "old", [[0, 1], [0, 3]])

    def train(algorithm, options, *_, **__):
        assert (algorithm, options.seeds, options.seed) == ("qmix", 2, 1)
        return run_folder(tmp_path / "new", [[0, 25], [0, 13]], seed=1, learning_rate=0.5)

    monkeypatch.setattr(experiment, "train", train)
    assert check.main([str(committed)]) == 0  # 19 is inside 2 ± 18: two seeds say little
    printed = capsys.readouterr().out
    assert "learning_rate was 0.001, is 0.5" in printed and "inside" in printed
    assert not check.verdict(np.array([1.0, 3.0]), np.array([25.0, 15.0]))[0]
    assert check.verdict(np.full(8, 500.0), np.full(2, 500.0))[0]  # no spread at all
