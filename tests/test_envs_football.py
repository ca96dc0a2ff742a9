"""Google Research Football: its views, rewards and ends, where it is installed, and what is said where it is not."""

import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmarl
from jmarl import envs
from jmarl.cli import lists
from jmarl.envs import football_adapter

THREE = "academy_3_vs_1_with_keeper"
RIGHT, SHOT = 5, 12


def football(*args, **options):
    pytest.importorskip("gfootball")
    return football_adapter.Football(*args, **options)


def test_without_the_package_it_is_said_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gfootball", None)
    monkeypatch.setitem(sys.modules, "gfootball.env", None)
    with pytest.raises(
        ImportError, match=r'^football:5_vs_5 needs Google Research Football: pip install "jmarl\[footba'
    ):
        jmarl.make("football:5_vs_5")
    lists.list_envs()
    told = capsys.readouterr().out
    assert f"football:{THREE}" in told and "Google Research Football, not installed: pip install" in told


def test_the_reward_for_the_way_is_for_training():
    preset = jmarl.presets.for_environment("mappo", f"football:{THREE}")
    assert preset.env == f"football:{THREE}" and preset.env_kwargs == {"shaped_reward": 1.0}


def test_views_are_the_115_numbers():
    game = football(THREE)
    seen, chance = game.reset(1), np.random.default_rng(0)
    for _ in range(20):
        for view, raw in zip(seen.agents, game.views, strict=True):
            np.testing.assert_allclose(view[:8].reshape(4, 2), raw["left_team"], atol=1e-6)
            np.testing.assert_allclose(view[22:30].reshape(4, 2), raw["left_team_direction"], atol=1e-6)
            np.testing.assert_allclose(view[44:48].reshape(2, 2), raw["right_team"], atol=1e-6)
            np.testing.assert_allclose(view[66:70].reshape(2, 2), raw["right_team_direction"], atol=1e-6)
            assert (view[8:22] == -1).all() and (view[48:66] == -1).all()
            np.testing.assert_allclose(view[88:94], [*raw["ball"], *raw["ball_direction"]], atol=1e-6)
            assert view[94:97].argmax() == raw["ball_owned_team"] + 1 and view[97:108].argmax() == raw["active"]
            assert view[108:].argmax() == raw["game_mode"] and view[94:].sum() == 3
        ours = sorted({raw["active"] for raw in game.views})
        assert len(ours) == 3 and np.flatnonzero(seen.state[97:108]).tolist() == ours
        np.testing.assert_array_equal(np.delete(seen.state, range(97, 108)), np.delete(seen.agents[0], range(97, 108)))
        seen = game.step(chance.integers(19, size=3)).seen
    assert game.render().shape == (232, 488, 3)


def test_it_is_the_packages_environment():
    game = football(THREE)
    package = importlib.import_module("gfootball.env")
    theirs = package.create_environment(
        THREE,
        representation="raw",
        number_of_left_players_agent_controls=3,
        other_config_options={"game_engine_random_seed": 7, "reverse_team_processing": True},
    ).unwrapped
    convert = package.wrappers.Simple115StateWrapper.convert_observation
    seen, chance = game.reset(7), np.random.default_rng(1)
    np.testing.assert_array_equal(seen.agents, convert(theirs.reset(), True))
    step = None
    while step is None or not step.last:
        action = chance.integers(19, size=3)
        step, (raw, reward, done, _) = game.step(action), theirs.step(action)
        np.testing.assert_array_equal(step.seen.agents, convert(raw, True))
        assert step.reward.tolist() == reward.tolist() and step.last == done


@pytest.mark.parametrize("shaped_reward", [0.0, 2.0])
def test_a_goal_pays_one_and_the_way_there_another_one(shaped_reward):
    game = football("academy_empty_goal_close", shaped_reward=shaped_reward)
    for seed in (3, 4):  # what was paid for in one episode is paid for in the next
        game.reset(seed)
        steps = [game.step(np.array([RIGHT if t < 8 else SHOT])) for t in range(6)]
        while not steps[-1].last:
            steps.append(game.step(np.array([SHOT])))
        assert sum(float(step.reward[0]) for step in steps) == pytest.approx(1 + shaped_reward)
        assert steps[-1].terminated and steps[-1].info == {"scored": 1.0}
        assert not any(step.terminated or step.info["scored"] for step in steps[:-1])


def test_the_clock_truncates(monkeypatch):
    pytest.importorskip("gfootball")
    scenario = importlib.import_module(f"gfootball.scenarios.{THREE}")
    build = scenario.build_scenario

    def build_short(builder):
        build(builder)
        builder.config().game_duration = 5

    monkeypatch.setattr(scenario, "build_scenario", build_short)
    game = football(THREE)
    assert game.spec.max_steps == 6
    game.reset(0)
    steps = [game.step(np.array([0, 0, 0])) for _ in range(6)]
    assert [step.last for step in steps] == [False] * 5 + [True]
    assert not any(step.terminated for step in steps) and steps[-1].info == {"scored": 0.0}


def test_a_seed_decides_an_episode_whoever_plays_beside_it():
    def episode(game, seed):
        views = [game.reset(seed).agents]
        for action in np.random.default_rng(0).integers(19, size=(400, 3)):
            step = game.step(action)
            views.append(step.seen.agents)
            if step.last:
                return np.stack(views)

    game, other = football(THREE), football(THREE)
    first = episode(game, 5)
    other.reset(1)
    assert not np.array_equal(first[:5], episode(game, 6)[:5])
    np.testing.assert_array_equal(first, episode(other, 5))


def test_it_is_an_environment_like_others():
    pytest.importorskip("gfootball")
    env = envs.check_env(jmarl.make(f"football:{THREE}", agent_ids=True), play=True)
    assert env.spec.num_agents == 3 and env.spec.obs_shape == (118,) and env.spec.state_shape == (115,)
    assert env.spec.num_actions == 19 and env.spec.max_steps == 401
    state, _ = env.reset(jax.random.key(0))
    _, _, outcome = env.step(state, jnp.array([RIGHT] * 3), jax.random.key(0))
    assert set(outcome.info) == {"scored"}


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("academy_3_vs_1", {}, ValueError, f"academy_3_vs_1.*scenario of Google Research Football.*{THREE}"),
        (THREE, {"num_agents": 5}, ValueError, f"num_agents=5 of football:{THREE}, whose left team has 4 players"),
        (THREE, {"num_agent": 3}, TypeError, "num_agent"),
    ],
    ids=["scenario", "players", "option"],
)
def test_what_it_does_not_have_is_refused(name, options, error, message):
    pytest.importorskip("gfootball")
    with pytest.raises(error, match=message) as raised:
        jmarl.make(f"football:{name}", **options)
    assert "\n" not in str(raised.value)
