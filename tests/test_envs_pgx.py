"""Pgx's games: turns, masks and pay beside the rules in numpy, and self-play that beats chance."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jmarl
from jmarl import combinators, envs
from jmarl.cli import lists, rendering, trial
from jmarl.envs import pgx_adapter

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]


def four_in_a_row(board):
    """Whether 6 x 7 booleans hold four in a row."""
    steps = [(0, 1), (1, 0), (1, 1), (1, -1)]
    inside = lambda y, x: 0 <= y < 6 and 0 <= x < 7  # noqa: E731
    return any(
        all(inside(y + k * dy, x + k * dx) and board[y + k * dy, x + k * dx] for k in range(4))
        for y in range(6)
        for x in range(7)
        for dy, dx in steps
    )


class Rules:
    """Tic-Tac-Toe or Connect Four, in numpy: the stones of each player, whoever begins."""

    def __init__(self, name, begins):
        self.name, self.player = name, begins
        self.stones = np.zeros((2, 3, 3) if name == "tic_tac_toe" else (2, 6, 7), bool)

    def legal(self):
        taken = self.stones.any(0)
        return ~taken.reshape(-1) if self.name == "tic_tac_toe" else ~taken[0]

    def play(self, move):
        """Both players' pay, and whether it was the last move."""
        own = self.stones[self.player]
        if self.name == "tic_tac_toe":
            own.reshape(-1)[move] = True
            won = any(own.reshape(-1)[list(line)].all() for line in LINES)
        else:
            own[5 - self.stones.any(0)[:, move].sum(), move] = True
            won = four_in_a_row(own)
        pay = np.zeros(2)
        if won:
            pay[self.player], pay[1 - self.player] = 1, -1
        self.player = 1 - self.player
        return pay, won or not self.legal().any()


@pytest.mark.parametrize("name", ["tic_tac_toe", "connect_four"])
def test_games_are_those_of_the_rules_and_whoever_is_not_to_move_waits(name):
    env = jmarl.make(f"pgx:{name}")
    spec = env.spec
    assert spec.may_wait and not spec.always_act and spec.teams == (0, 1)
    assert (spec.min_steps, spec.max_steps) == {"tic_tac_toe": (5, 9), "connect_four": (7, 42)}[name]
    reset, step = jax.jit(env.reset), jax.jit(env.step)
    rng, began, ends = np.random.default_rng(0), set(), set()
    for game in range(8):
        state, obs = reset(jax.random.key(game))
        rules = Rules(name, int(np.argmax(obs.agent_mask)))
        began.add(rules.player)
        for _ in range(spec.max_steps):
            assert obs.agent_mask.tolist() == [i == rules.player for i in range(2)]
            np.testing.assert_array_equal(obs.action_mask[rules.player], rules.legal())
            assert obs.action_mask[1 - rules.player].all()
            for i in range(2):  # one's own stones, then the other's
                np.testing.assert_array_equal(obs.agents[i], np.stack([rules.stones[i], rules.stones[1 - i]], -1))
            move = rng.choice(np.flatnonzero(rules.legal()))
            action = np.full(2, rng.integers(spec.num_actions))  # of who waits: whatever it is, it changes nothing
            action[rules.player] = move
            state, obs, outcome = step(state, action, jax.random.key(0))
            pay, is_last = rules.play(move)
            np.testing.assert_array_equal(outcome.reward, pay)
            assert bool(outcome.last) == is_last and outcome.terminated.tolist() == [is_last] * 2
            if is_last:
                ends.add(tuple(pay.tolist()))
                break
        assert is_last
    assert began == {0, 1} and len(ends) >= 2


def test_those_of_one_player_and_of_hidden_cards_are_environments_as_well():
    alone = jmarl.make("pgx:2048").spec
    assert alone.agents == ("player_0",) and alone.teams == () and alone.always_act and alone.max_steps is None
    poker = envs.check_env(jmarl.make("pgx:kuhn_poker", agent_ids=True))
    assert poker.spec.obs_shape == (9,) and poker.spec.max_steps == 3


def test_self_play_trains_where_players_take_turns():
    env = jmarl.make("pgx:tic_tac_toe", flatten=True)
    inner = jmarl.PPOConfig(hidden_sizes=(8,), num_epochs=1, num_minibatches=1)
    cfg = combinators.SelfPlayConfig(inner=inner, pool_size=2, add_every=1, latest_share=0.5)
    loop = jmarl.on_policy(env, combinators.self_play(jmarl.ippo), num_envs=16, rollout_length=9)
    _, metrics = jax.jit(jmarl.make_train(loop, 4))(jax.random.key(0), cfg)
    assert all(np.isfinite(metrics[name]).all() for name in ("loss/actor", "loss/critic", "policy/entropy"))
    np.testing.assert_array_equal(metrics["train/return_sum"], np.zeros(4))
    np.testing.assert_array_equal(metrics["train/return/player_0"], -metrics["train/return/player_1"])
    assert np.isfinite(metrics["self_play/win_share"][1:]).all()  # old selves were met
    assert ((metrics["train/episode_length"] >= 5) & (metrics["train/episode_length"] <= 9)).all()


def test_the_committed_self_play_beats_a_random_player_on_both_sides():
    told = json.loads((RESULTS / "self_play-tic_tac_toe-tournament" / "tournament.json").read_text())
    names = [player["name"] for player in told["players"]]
    chance = names.index("random")
    first, second = (np.array(told["returns"]["low"][side]) for side in (0, 1))
    for k in range(len(names)):
        assert k == chance or min(first[k, chance], second[chance, k]) > 0.5


def test_a_game_is_drawn_move_by_move(tmp_path, capsys):
    lists.list_envs("pgx:tic_tac_toe", render=tmp_path / "game.gif")
    told = capsys.readouterr().out
    assert "episode 1: return 0.00 in" in told and f"{tmp_path}/game.gif shows it" in told
    env = jmarl.make("pgx:tic_tac_toe")
    chance = jmarl.random_policy(env.spec, jmarl.RandomConfig())
    [played] = trial.play(env, chance, chance.init(jax.random.key(0)), jax.random.key(3), 1)
    assert len(played.frames) == played.length + 1 and played.has_ended
    pixels = [np.asarray(frame) for frame in played.frames]
    inks = [[int((x == colour).all(-1).sum()) > 500 for colour in (rendering.ALLY, rendering.ENEMY)] for x in pixels]
    key = jax.random.split(jax.random.split(jax.random.key(3), 1)[0], env.spec.max_steps + 1)[0]
    begins = int(np.argmax(env.reset(key)[1].agent_mask))
    assert inks[0] == [False, False] and inks[2] == [True, True] and inks[1][1 - begins] is False


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("tic_tac_to", {}, ValueError, "'tic_tac_to' is no game of Pgx: did you mean 'tic_tac_toe'"),
        ("tic_tac_toe", {"size": 4}, TypeError, "'size' is no option of pgx:tic_tac_toe: it takes none"),
    ],
)
def test_what_pgx_does_not_make_is_refused_in_a_sentence(name, options, error, message):
    with pytest.raises(error, match=message):
        jmarl.make(f"pgx:{name}", **options)


def test_without_pgx_it_is_said_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pgx", None)
    with pytest.raises(ImportError, match=r'^pgx:hex needs Pgx: pip install "jmarl\[pgx\]"\.$'):
        jmarl.make("pgx:hex")
    assert pgx_adapter.names() == []
    lists.list_envs()
    assert 'not installed: pip install "jmarl[pgx]"\n' in capsys.readouterr().out
