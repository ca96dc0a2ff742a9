"""Tournaments: who beats whom, ratings against numpy, intervals that cover, and the command from run folders."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jmarl
from jmarl import envs, evaluation, tournament
from jmarl.cli import crossplay, drawing, main
from jmarl.cli import tournament as command
from jmarl.tournament import Player
from jmarl.types import Learner, TrainState

RPS = [[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]]  # rock, paper, scissors
WINS = np.array(RPS) > 0


def zero_sum(payoff):
    """What agent 0 is paid; agent 1 pays it."""
    game = envs.matrix_game(payoff)

    def step(state, action, key):
        state, obs, outcome = game.step(state, action, key)
        return (
            state,
            obs,
            outcome.replace(reward=outcome.reward * jnp.array([1.0, -1.0]), info={"paid": outcome.reward[0]}),
        )

    return game._replace(step=step, spec=game.spec._replace(teams=(0, 1)))


def acts_as_told():
    """Its parameter is its action."""

    def greedy(state, carry, obs, first):
        return jnp.broadcast_to(state.params, obs.agent_mask.shape), carry

    return Learner(None, lambda shape: (), None, greedy, None)


def told(*actions):
    return TrainState(params=jnp.array(actions), step=jnp.zeros(len(actions), jnp.int32))


def one(action):
    return TrainState(params=jnp.array(action), step=jnp.int32(0))


KEY = jax.random.key(0)

# -------------------------------------------------------------------------------------------------------- playing


@pytest.fixture(scope="module")
def rps():
    players = [Player("hand", acts_as_told(), told(0, 1, 2))]
    return tournament.play(zero_sum(RPS), players, KEY, num_episodes=3)


def test_rock_beats_scissors_and_all_are_rated_alike(rps):
    table = tournament.standings(rps)
    assert rps.players == ("hand/0", "hand/1", "hand/2") and rps.sides == ((0,), (1,))
    np.testing.assert_array_equal(table.win, WINS)
    np.testing.assert_array_equal(table.loss, WINS.T)
    np.testing.assert_array_equal(table.draw, np.eye(3))
    np.testing.assert_array_equal(tournament.returns(rps).value, [RPS, -np.array(RPS)])
    for estimate in (table.rating, table.advantage, table.role_rating):
        np.testing.assert_allclose(estimate.value, 0, atol=1e-9)
        assert (estimate.low < -1).all() and (estimate.high > 1).all()


def test_players_of_several_learners_and_in_any_order_play_the_same(rps):
    shared = acts_as_told()
    players = [
        Player("scissors", shared, one(2)),
        Player("rock", jmarl.scripted(lambda obs: jnp.zeros(obs.agent_mask.shape, jnp.int32)), one(0)),
        Player("paper", shared, one(1)),
    ]
    matches = tournament.play(zero_sum(RPS), players, KEY, num_episodes=3, pairs_at_once=3)
    assert matches.players == ("scissors", "rock", "paper")
    order = np.array([2, 0, 1])
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y[order][:, order]), matches.episodes, rps.episodes)


def test_the_better_player_is_rated_higher():
    env = zero_sum(np.sign(np.subtract.outer(range(4), range(4))).astype(float))  # the higher number wins
    players = [Player("", acts_as_told(), told(2, 0, 3, 1))]
    rating = tournament.standings(tournament.play(env, players, KEY, num_episodes=2, pairs_at_once=7)).rating
    assert np.argsort(rating.value).tolist() == [1, 3, 0, 2]
    assert np.isfinite(rating.high).all() and (np.diff(np.sort(rating.value)) > 50).all()
    assert rating.value.mean() == pytest.approx(0)


def test_every_pair_meets_the_same_start_states():
    env = envs.probe("observation", num_agents=3)  # pays the cue, whatever is done
    players = [Player("a", acts_as_told(), told(0, 0)), Player("b", acts_as_told(), told(0))]
    returns = tournament.play(
        env, players, KEY, members=[[1], [0, 2]], num_episodes=8, pairs_at_once=2
    ).episodes.returns
    assert returns.shape == (3, 3, 8, 3) and len(np.unique(returns)) == 2
    np.testing.assert_array_equal(returns, np.broadcast_to(returns[0, 0], returns.shape))


def test_what_cannot_be_played_is_refused_in_one_sentence():
    env, learner = zero_sum(RPS), acts_as_told()
    play = tournament.play
    with pytest.raises(ValueError, match=r"players=\['a'\]: a tournament needs two"):
        play(env, [Player("a", learner, one(0))], KEY)
    with pytest.raises(ValueError, match="a/1 is the name of two players"):
        play(env, [Player("a", learner, told(0, 1)), Player("a/1", learner, one(1))], KEY)
    with pytest.raises(ValueError, match="The parameters of a/1 are not finite"):
        play(env, [Player("a", learner, told(0.0, jnp.nan))], KEY)
    with pytest.raises(ValueError, match=r"matrix_game has no teams that oppose each other, .* give members"):
        play(envs.matrix_game(RPS), [Player("a", learner, told(0, 1))], KEY)
    with pytest.raises(ValueError, match=r"members=\[\[0\], \[1\], \[2\]\] must be of two sides"):
        play(env, [Player("a", learner, told(0, 1))], KEY, members=[[0], [1], [2]])
    with pytest.raises(ValueError, match="pairs_at_once=0 must be at least 1"):
        play(env, [Player("a", learner, told(0, 1))], KEY, pairs_at_once=0)


def test_evaluation_plays_the_episodes_of_a_python_loop_bit_for_bit():
    """An environment of chance and of episodes of several lengths; draws in the documented order."""
    game = envs.probe("observation", num_agents=2)

    def step(state, action, key):
        state, obs, outcome = game.step(state, action, key)
        chance = jax.random.uniform(key)
        last = chance < 0.1
        reward = outcome.reward * chance
        return state, obs, outcome.replace(reward=reward, last=last, info={"chance": chance})

    env = game._replace(step=step, spec=game.spec._replace(max_steps=4))
    learner, num = acts_as_told(), 6
    key, key_reset = jax.random.split(KEY)
    returns, length = np.zeros((num, 2), np.float32), np.zeros(num, np.int32)
    chance = np.full(num, np.nan, np.float32)
    resets = jax.random.split(key_reset, num)
    for i in range(num):
        state, _ = env.reset(resets[i])
        for t in range(4):
            state, _, outcome = env.step(state, jnp.zeros(2), jax.random.split(jax.random.fold_in(key, t), num)[i])
            returns[i] += np.asarray(outcome.reward)
            length[i] += 1
            if outcome.last:
                chance[i] = outcome.info["chance"]
                break
    episodes = evaluation.play_episodes(env, learner, one(0), KEY, num_episodes=num)
    np.testing.assert_array_equal(episodes.returns, returns)
    np.testing.assert_array_equal(episodes.length, length)
    np.testing.assert_array_equal(episodes.has_ended, np.isfinite(chance))
    np.testing.assert_array_equal(episodes.info["chance"][episodes.has_ended], chance[np.isfinite(chance)])
    assert 0 < np.isfinite(chance).sum() < num  # one of them was cut off
    expected = {
        "eval/return_sum": jnp.mean(jnp.sum(jnp.array(returns), axis=-1)),
        "eval/return_mean": jnp.mean(jnp.array(returns)),
        "eval/return/agent_0": jnp.mean(jnp.array(returns[:, 0])),
        "eval/return/agent_1": jnp.mean(jnp.array(returns[:, 1])),
        "eval/episode_length": jnp.mean(jnp.array(length, jnp.float32)),
        "eval/chance": jnp.sum(jnp.nan_to_num(chance)) / np.isfinite(chance).sum(),
    }
    assert evaluation.evaluate(env, learner, one(0), KEY, num_episodes=num) == expected


# -------------------------------------------------------------------------------------------------------- results


def test_an_entry_of_the_info_says_who_won(rps):
    def with_info(info, has_ended=True):
        shape = rps.episodes.has_ended.shape
        info = {name: np.broadcast_to(np.float32(x), shape) for name, x in info.items()}
        return rps._replace(episodes=rps.episodes.replace(info={"foe": info}, has_ended=np.full(shape, has_ended)))

    assert (tournament.points(with_info({"beaten": 1}), "foe/beaten") == 1).all()
    assert (tournament.points(with_info({"beaten": 1}, has_ended=False), "foe/beaten") == 0.5).all()
    assert (tournament.points(with_info({"beaten": np.nan}), "foe/beaten") == 0.5).all()
    with pytest.raises(ValueError, match=r"wins='won' is nothing that .* choose one of return, duplicate, paid"):
        tournament.points(rps, "won")
    with pytest.raises(ValueError, match="wins='paid' is between -1 and 1: it must be 1 where side 0 won"):
        tournament.points(rps, "paid")


def test_duplicate_compares_pairs_that_began_alike(rps):
    """Side 1 is always paid more, and more in some start states: who plays better wins nevertheless."""
    skill = np.array([0.0, 1.0, 2.0])
    margin = (skill[:, None] - skill)[..., None] - np.array([10.0, 1000.0])
    returns = np.stack([margin, np.zeros_like(margin)], axis=-1)
    matches = rps._replace(episodes=rps.episodes.replace(returns=returns))
    assert (tournament.points(matches) == 0).all()
    expected = [[0.5, 0.0, 0.0], [1.0, 0.5, 0.0], [1.0, 1.0, 0.5]]
    np.testing.assert_array_equal(
        tournament.points(matches, "duplicate"), np.repeat(np.array(expected)[..., None], 2, -1)
    )


def test_the_interval_of_groups_is_of_players_and_covers():
    """Means of players drawn from a population: its interval holds the true value about as often as it says."""
    rng, held = np.random.default_rng(0), []
    for _ in range(60):
        skill = rng.normal(size=24)
        values = skill[:, None] + rng.normal(size=24) + 0.01 * rng.normal(size=(2, 24, 24))
        estimate = tournament.group_means(values, [range(12), range(12, 24)])
        np.testing.assert_allclose(estimate.value[0, 0, 1], values[0, :12, 12:].mean())
        held.append((estimate.low <= 0) & (estimate.high >= 0))
    assert 0.85 < np.mean(held) < 0.98
    alone = tournament.group_means(np.eye(3), [[0], [1, 2]])
    assert alone.low[0, 0] == alone.value[0, 0] == alone.high[0, 0] == 1
    assert alone.value[1, 1] == 0.5 and alone.low[1, 1] == 0 and alone.high[1, 1] == 1


def test_a_side_earns_the_mean_of_its_members(rps):
    """In single precision the mean of three equal numbers may be another one, and a draw would be won."""
    returns = np.random.default_rng(1).uniform(size=(2, 2, 50, 1)).astype(np.float32).repeat(4, axis=-1)
    matches = rps._replace(sides=((0,), (1, 2, 3)), episodes=rps.episodes.replace(returns=returns))
    assert (tournament.points(matches) == 0.5).all()
    rng = np.random.default_rng(0)
    returns = rng.normal(size=(2, 2, 5, 4)).astype(np.float32)
    mean, low, high = tournament.returns(matches._replace(episodes=rps.episodes.replace(returns=returns)))
    sides = returns[0, 1, :, 0], returns[0, 1, :, 1:].mean(-1)
    np.testing.assert_allclose(mean[:, 0, 1], np.mean(sides, axis=-1), rtol=1e-5)
    half_width = 1.96 * np.std(sides, axis=-1, ddof=1) / np.sqrt(5)
    np.testing.assert_allclose((high - low)[:, 0, 1] / 2, half_width, rtol=1e-4)


def test_wilsons_interval_is_that_of_scipy_and_covers():
    for wins in (0, 3, 10):
        expected = stats.binomtest(wins, 10).proportion_ci(method="wilson")
        estimate = tournament.wilson(np.array(float(wins)), np.array(10))
        np.testing.assert_allclose(estimate, (wins / 10, expected.low, expected.high), atol=1e-12)
    wins = np.arange(129.0)
    _, low, high = tournament.wilson(wins, np.array(128))
    for p in (0.03, 0.5, 0.9):
        assert stats.binom.pmf(wins, 128, p)[(low <= p) & (p <= high)].sum() > 0.93


def minorised(points, games, prior, num_iterations=20_000):
    """Hunter's MM algorithm on strengths γ: γ_i = wins_i / Σ_j games_ij / (γ_i + γ_j), draws with a player of γ = 1."""
    wins = points.sum(1) + (games - points).sum(0) + prior / 2
    met, strength = games + games.T, np.ones(len(points))
    for _ in range(num_iterations):
        rates = met / np.add.outer(strength, strength) * (1 - np.eye(len(points)))
        strength = (wins - games.diagonal()) / (rates.sum(1) + prior / (strength + 1))
    return 400 * np.log10(strength)


def test_ratings_are_those_of_hunters_algorithm():
    rng = np.random.default_rng(1)
    upper = np.triu(rng.integers(0, 21, (5, 5)).astype(float), 1)
    points = upper + np.tril(20 - upper.T, -1) + 10 * np.eye(5)  # no side is better
    points[0, 1:], points[1:, 0] = 20, 0  # and one player has won everything
    games = np.full((5, 5), 20)
    rating, advantage = tournament.bradley_terry(points, games, prior=2.0)
    expected = minorised(points, games, 2.0)
    np.testing.assert_allclose(rating.value, expected - expected.mean(), atol=1e-3)
    np.testing.assert_allclose(advantage.value, 0, atol=1e-6)
    assert np.isfinite(rating).all() and rating.high[0] - rating.low[0] > rating.high[1] - rating.low[1]


def test_ratings_explain_what_players_and_sides_have_won():
    """Where the prior is weak, a maximum of the likelihood expects of each as many points as it made."""
    rng = np.random.default_rng(2)
    points = rng.integers(20, 90, (4, 4)).astype(float)
    rating, advantage = tournament.bradley_terry(points, 100, prior=1e-9)
    difference = np.subtract.outer(rating.value, rating.value)
    expected = 100 / (1 + 10 ** (-(difference + advantage.value) / 400))
    np.testing.assert_allclose(expected.sum(), points.sum(), rtol=1e-6)
    np.testing.assert_allclose(expected.sum(1) - expected.sum(0), points.sum(1) - points.sum(0), atol=1e-5)
    roles = tournament.role_ratings(points, 100, prior=1e-9).value
    expected = 100 / (1 + 10 ** (-np.subtract.outer(*roles) / 400))
    np.testing.assert_allclose(expected.sum(1), points.sum(1), rtol=1e-6)
    np.testing.assert_allclose(expected.sum(0), points.sum(0), rtol=1e-6)
    assert roles.mean() == pytest.approx(0, abs=1e-9)
    with pytest.raises(ValueError, match=r"prior=0.0 must be positive"):
        tournament.role_ratings(points, 100, prior=0.0)


def test_ratings_of_very_unequal_numbers_of_games_are_found():
    """Where Newton's steps alone lead away."""
    points, games = np.array([[0.0, 0.0], [10.0, 0.0]]), np.array([[0.0, 1e5], [10.0, 1e5]])
    rating, advantage = tournament.bradley_terry(points, games)
    difference = np.subtract.outer(rating.value, rating.value)
    expected = games / (1 + 10 ** (-(difference + advantage.value) / 400))
    np.testing.assert_allclose(expected.sum(), points.sum(), atol=0.5)  # up to the drawn games of the prior


def test_a_role_is_rated_apart():
    """Player 0 is the best on side 0 and the worst on side 1."""
    points = np.array([[50.0, 90.0, 90.0], [80.0, 50.0, 50.0], [80.0, 50.0, 50.0]])
    first, second = tournament.role_ratings(points, 100).value
    assert first[0] > first[1] + 50 and second[0] < second[1] - 50


def test_intervals_of_ratings_cover():
    rng = np.random.default_rng(3)
    true = np.array([-150.0, -50.0, 0.0, 60.0, 140.0])
    share = 1 / (1 + 10 ** (-(np.subtract.outer(true, true) + 40) / 400))
    covered = []
    for _ in range(200):
        rating, advantage = tournament.bradley_terry(rng.binomial(40, share).astype(float), 40)
        covered.append([*((rating.low <= true) & (true <= rating.high)), advantage.low <= 40 <= advantage.high])
    assert 0.92 < np.mean(covered) < 0.98


# ---------------------------------------------------------------------------------------------------- the command

GAME = """
import jax.numpy as jnp
from jmarl import envs

def game(is_won=True):
    env = envs.matrix_game([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]])

    def step(state, action, key):
        state, obs, outcome = env.step(state, action, key)
        reward = outcome.reward * jnp.array([1.0, -1.0])
        return state, obs, outcome.replace(reward=reward, info={"won": (1 + reward[0]) / 2})

    return env._replace(step=step, spec=env.spec._replace(name="game", teams=(0, 1)))

def team():
    return envs.matrix_game([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]])

def rock(obs):
    return jnp.zeros(obs.agent_mask.shape, jnp.int32)
"""


def run_folder(folder, env, name, *, seed=0, num_seeds=2, **env_kwargs):
    """A run that learnt nothing: jmarl train's files without the training."""
    config = jmarl.PPOConfig(hidden_sizes=(4,))
    init = jmarl.ippo(env.spec, config).init
    states = jax.vmap(init)(jax.random.split(jax.random.key(seed), num_seeds))
    facts = {"format": 2, "algorithm": "ippo", "env": name, "seeds": num_seeds, "env_kwargs": env_kwargs}
    facts["config"] = {name: getattr(config, name) for name in config.__dataclass_fields__}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(facts))
    jmarl.export.save_parameters(states.params, folder / "params.safetensors")
    return states


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tournament_game.py").write_text(GAME)
    name = "tournament_game.py:game"
    states = [run_folder(tmp_path / run, zero_sum(RPS), name, seed=i) for i, run in enumerate("ab")]
    return tmp_path, states


NAMED = ["--env", "tournament_game.py:game", "--episodes", "2"]


def refused(capsys, *words):
    with pytest.raises(SystemExit) as error:
        main.main(["tournament", *words])
    assert error.value.code == 2
    return capsys.readouterr().err


def test_the_command_lets_runs_random_and_scripted_players_meet(runs, capsys):
    folder, states = runs
    with jmarl.checkpoint.Writer(folder / "b" / "checkpoints") as writer:
        for step in (1, 2):
            state = states[1].replace(env_steps=jnp.full(2, 10 * step, jnp.int32))
            params = jax.tree.map(lambda x, step=step: x.at[0].set(jnp.nan if step == 2 else x[0]), state.params)
            writer.save(step, {"run": {"train_state": state.replace(params=params)}}, {"parts": ["run"]})
    words = [*NAMED, "--random", "--scripted", "tournament_game.py:rock"]
    main.main(["tournament", "a", "b", *words])
    content = json.loads((folder / "tournament" / "tournament.json").read_text())
    names = ["a/0", "a/1", "b/1", "random", "rock"]
    assert [player["name"] for player in content["players"]] == names
    assert content["players"][2] == {"name": "b/1", "run": "b", "seed": 1, "env_steps": 20}
    assert content["sides"] == [["agent_0"], ["agent_1"]] and content["wins"] == "return"
    assert np.shape(content["returns"]["value"]) == np.shape(content["returns"]["low"]) == (2, 5, 5)
    win, draw, loss = (np.array(content[name]) for name in ("win", "draw", "loss"))
    np.testing.assert_array_equal(win + draw + loss, 1)
    assert draw[4, 4] == 1 and np.shape(content["role_rating"]["value"]) == (2, 5)
    printed = capsys.readouterr().out
    assert "b/0 does not play: its parameters are not finite." in printed and "rating" in printed
    assert {path.name for path in (folder / "tournament").glob("*.png")} == {"tournament.png", "by_run.png"}
    groups = content["by_run"]
    assert groups["names"] == ["a", "b", "random", "rock"] and np.shape(groups["returns"]["low"]) == (2, 4, 4)
    paid = np.array(content["returns"]["value"])
    np.testing.assert_allclose(np.array(groups["returns"]["value"])[:, 0, 2], paid[:, :2, 3].mean(-1))
    assert "tournament exists already" in refused(capsys, "a", "b", *words)

    main.main(["tournament", "b", *NAMED, "--checkpoints", "--wins", "won", "--out", "again"])
    again = json.loads((folder / "again" / "tournament.json").read_text())
    assert [player["name"] for player in again["players"]] == ["b@10/0", "b@10/1", "b@20/1"]
    np.testing.assert_array_equal(np.array(again["win"])[1:, 1:], win[2, 2])  # the same policy, twice
    assert again["by_run"]["names"] == ["b@10", "b@20"] and (folder / "again" / "training.png").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "name at least one run folder"),
        (
            ["a", "b", "other", *NAMED],
            "other is of tournament_game.py:game(is_won=False), but a of tournament_game.py:game: a",
        ),
        (["single", *NAMED], "single has one seed: name further runs, or --random"),
        (["a", "b"], "add --env tournament_game.py:game"),
        (["a", *NAMED, "--wins", "wom"], "--wins wom is nothing that game tells: did you mean won?"),
        (["a", *NAMED, "--scripted", "rock"], "--scripted rock names no function"),
        (["a", *NAMED, "--checkpoints"], "a has no checkpoints: leave --checkpoints out"),
        (["a", *NAMED, "--pairs-at-once", "0"], "--pairs-at-once 0 must be at least 1"),
        (["a", "--env", NAMED[1], "--episodes", "2000000000"], "pairs side by side take"),
    ],
)
def test_the_command_refuses_in_one_sentence(runs, capsys, words, sentence):
    folder, _ = runs
    run_folder(folder / "other", zero_sum(RPS), NAMED[1], is_won=False)
    run_folder(folder / "single", zero_sum(RPS), NAMED[1], num_seeds=1)
    text = refused(capsys, *words)
    assert sentence in text and "Traceback" not in text
    assert not (folder / "tournament").exists()


def test_without_teams_one_agent_plays_with_strangers_and_returns_are_compared(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tournament_game.py").write_text(GAME)
    team = envs.matrix_game(RPS)
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        run_folder(tmp_path / name / "run", team, "tournament_game.py:team", num_seeds=1)
    words = ["x/run", "y/run", "--env", "tournament_game.py:team", "--episodes", "1", "--agent"]
    main.main(["tournament", *words, "1"])
    content = json.loads((tmp_path / "tournament" / "tournament.json").read_text())
    assert [player["name"] for player in content["players"]] == ["x/run", "y/run"]
    assert content["sides"] == [["agent_1"], ["agent_0"]]
    assert content["wins"] is None and "rating" not in content and content["returns"]["low"][0][0][0] is None
    assert "return with others" in capsys.readouterr().out
    assert "--agent 2 must be one of 0 to 1" in refused(capsys, *words, "2", "--out", "other")


def test_ids_are_put_before_the_views_of_players_who_learnt_with_them(tmp_path):
    small = {"size": 3, "num_predators": 2, "num_prey": 1, "max_steps": 4}
    with_ids, without = (envs.make("predator_prey", **ids, **small) for ids in ({"agent_ids": True}, {}))
    state = run_folder(tmp_path / "ids", with_ids, "predator_prey", num_seeds=1, agent_ids=True, **small)
    run_folder(tmp_path / "none", without, "predator_prey", num_seeds=1, **small)
    learner, state = jmarl.ippo(with_ids.spec, jmarl.PPOConfig(hidden_sizes=(4,))), jmarl.checkpoint.take_seed(state, 0)
    (_, seen), (_, plain) = (jax.vmap(env.reset)(jax.random.split(KEY, 50)) for env in (with_ids, without))
    carry, first = learner.init_carry((50,)), jnp.ones(50, bool)
    expected = learner.greedy(state, carry, seen, first)[0]
    for runs in (["ids", "none"], ["none", "ids"]):
        env, players, _ = command.entrants([tmp_path / run for run in runs])
        player = players[runs.index("ids")]
        assert env.spec == without.spec and player.name == "ids"
        np.testing.assert_array_equal(player.learner.greedy(player.state, carry, plain, first)[0], expected)


def test_returns_with_strangers_leave_oneself_out(rps):
    returns = np.zeros((3, 3, 2, 2), np.float32)
    returns[range(3), range(3)] = 100
    returns[0, 1], returns[1, 0] = 4.0, 8.0
    matches = rps._replace(episodes=rps.episodes.replace(returns=returns))
    np.testing.assert_allclose(command.with_strangers(matches).value, [3, 3, 0])


# -------------------------------------------------------------------------------------------------------- figures


@pytest.mark.parametrize("num", [2, 20])
def test_everything_that_a_figure_says_is_inside_it(num, tmp_path, monkeypatch):
    figures = []
    save = drawing.Figure.savefig
    monkeypatch.setattr(
        drawing.Figure, "savefig", lambda self, *args, **kw: (save(self, *args, **kw), figures.append(self))
    )
    rng = np.random.default_rng(0)
    matrix = rng.uniform(size=(num, num))
    names = [f"a-very-long-name-of-a-run-folder/{i}" for i in range(num)]
    some = tournament.Estimate(*(rng.normal(size=num) + np.array([[0.0], [-1.0], [1.0]])))
    series = {"rating": some, "as agent_0": some, "as adversary (3)": some}
    look = {"label": "return of an episode, summed over agents", "title": "a-very-long-title " * 8}
    sides = ("agent_0", "adversary (3)")
    command.draw(matrix, series, names, tmp_path / "a.png", sides=sides, is_share=True, **look)
    crossplay.draw_matrix(matrix, tmp_path / "b.png", **look)
    of_runs = tournament.Estimate(*(x * np.ones((2, num, num)) for x in (1234.5, -1.0, 2345.6)))
    command.draw_by_run(of_runs, names, tmp_path / "c.png", sides=sides)
    players = [{"run": f"{i % 3}", "seed": 0, "name": name, "env_steps": i} for i, name in enumerate(names)]
    players[-1]["run"] = None
    command.draw_training(series, players, tmp_path / "d.png")
    for figure in figures:
        drawn, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
        outside = -drawn.x0, -drawn.y0, drawn.x1 - width, drawn.y1 - height
        assert max(outside) < 0.02, outside  # inches: two pixels
