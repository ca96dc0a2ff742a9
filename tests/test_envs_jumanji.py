"""Jumanji's environments beside Jumanji itself: views, masks, rewards, what ends a return, names, objects."""

import dataclasses
import doctest
import functools
import re
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jumanji
import numpy as np
import pytest
from jumanji import specs
from jumanji.environments import LevelBasedForaging
from jumanji.types import TimeStep, restart, termination, transition

import jmarl
from jmarl import envs
from jmarl.cli import lists, rendering
from jmarl.envs import jumanji_adapter

SMALL = {
    "rware tiny-2ag": {"column_height": 3, "max_steps": 12},
    "lbf 2s-6x6-2p-2f": {"max_steps": 12},
    "con 5x5x3a": {},
    "clean 5x5x3a": {"max_steps": 12},
    "SearchAndRescue-v0": {"num_targets": 4, "max_steps": 12},
}


@functools.cache
def small(name, **options):
    return jmarl.make(name, **SMALL[name], **options)


@functools.cache
def stepping(name, **options):
    """A compiled step: what jmarl answers, and Jumanji's own state and time step after the same action."""
    env = small(name, **options)

    @jax.jit
    def step(state, action, key):
        raw = state.raw if name.startswith("con") else dataclasses.replace(state.raw, key=key)
        return env.step(state, action, key), env.unwrapped.step(raw, action)

    return step


def with_raw(state, **changes):
    """An environment's state with something of Jumanji's state in it replaced."""
    return state._replace(raw=dataclasses.replace(state.raw, **changes))


def idle(env):
    return jnp.zeros(env.spec.num_agents, jnp.int32) if env.spec.is_discrete else jnp.zeros((env.spec.num_agents, 2))


def view_of_grids(observation, channels):
    return np.stack([np.stack(layers, axis=-1) for layers in channels]).astype(np.float32)


def views_by_hand(name, observation):
    """In numpy, agent by agent."""
    if name.startswith("rware") or name.startswith("lbf"):
        return np.asarray(observation.agents_view, np.float32)
    if name.startswith("Search"):
        return np.asarray(observation.searcher_views).reshape(2, -1)
    grid = np.asarray(observation.grid)
    if name.startswith("con"):
        kind = np.where(grid == 0, -1, (grid - 1) % 3)  # path, head, target
        shared = [kind == 1, kind == 2, kind == 0]
        return view_of_grids(observation, [[*shared, grid == 3 * i + 2, grid == 3 * i + 3] for i in range(3)])
    layers = []
    for row, column in np.asarray(observation.agents_locations):
        here = np.zeros(grid.shape)
        here[row, column] = 1
        layers.append(here)
    return view_of_grids(observation, [[grid == 0, grid == 2, sum(layers), own] for own in layers])


@pytest.mark.parametrize("name", SMALL)
def test_it_is_jumanjis_environment(name):
    env, step = small(name), stepping(name)
    state, obs = jax.jit(envs.check_env(env).reset)(jax.random.key(3))
    key = jax.random.key(4)
    for t in range(6):  # noqa: B007  read below
        key, key_act, key_step = jax.random.split(key, 3)
        if env.spec.is_discrete:
            action = jax.random.categorical(key_act, jnp.where(obs.action_mask, 0.0, -jnp.inf))
        else:
            action = jax.random.uniform(key_act, (2, 2), minval=-1.0)
        (state, obs, outcome), (_, timestep) = step(state, action, key_step)
        views = views_by_hand(name, timestep.observation)
        np.testing.assert_allclose(obs.agents.reshape(len(views), -1), views.reshape(len(views), -1))
        if env.spec.is_discrete:
            np.testing.assert_array_equal(obs.action_mask, timestep.observation.action_mask)
        np.testing.assert_allclose(outcome.reward, np.broadcast_to(timestep.reward, len(views)))
        assert bool(outcome.last) == bool(timestep.last())
        for told in timestep.extras:
            np.testing.assert_allclose(outcome.info[told], timestep.extras[told])
        if outcome.last:
            break
    assert t > 0
    envs.check_env(env, play=True)


def test_states_hold_what_all_share():
    def first(name):
        return jax.jit(small(name).reset)(jax.random.key(0))[1]

    for name in ("rware tiny-2ag", "lbf 2s-6x6-2p-2f"):
        obs = first(name)
        np.testing.assert_array_equal(obs.state, np.concatenate(obs.agents))
    for name in ("con 5x5x3a", "clean 5x5x3a"):
        obs = first(name)
        np.testing.assert_array_equal(obs.state, obs.agents[0, ..., :3])
    obs = first("SearchAndRescue-v0")
    assert len(obs.state) == obs.agents.size + 2 * 2 + 2 and obs.state[-2] == 1.0


def test_flat_views_have_flat_states():
    spec = small("con 5x5x3a", flatten=True).spec
    assert spec.obs_shape == (125,) and spec.state_shape == (75,)


# Jumanji's discount is 0 after the last three of these.
TIME_LIMITED = ["lbf 2s-6x6-2p-2f", "rware tiny-2ag", "clean 5x5x3a", "SearchAndRescue-v0"]
LAST_STEP = {"SearchAndRescue-v0": "step"}


def at_its_limit(name, key=0):
    """The state before the last step of the time limit."""
    env = small(name)
    state, obs = jax.jit(env.reset)(jax.random.key(key))
    count = LAST_STEP.get(name, "step_count")
    return with_raw(state, **{count: jnp.full_like(getattr(state.raw, count), 11)}), obs


@pytest.mark.parametrize("name", TIME_LIMITED)
def test_a_time_limit_truncates(name):
    state, obs = at_its_limit(name)
    action = jnp.argmax(obs.action_mask, axis=-1) if small(name).spec.is_discrete else idle(small(name))
    (_, obs, outcome), (_, timestep) = stepping(name)(state, action, jax.random.key(0))
    assert outcome.last and timestep.last() and not outcome.terminated.any() and obs.agent_mask.all()


@pytest.mark.parametrize("is_last_step", [False, True])
@pytest.mark.parametrize("name", TIME_LIMITED)
def test_the_tasks_own_end_terminates_also_on_the_last_step(name, is_last_step):
    state, obs = at_its_limit(name) if is_last_step else jax.jit(small(name).reset)(jax.random.key(0))
    raw = state.raw
    action = jnp.argmax(obs.action_mask, axis=-1) if small(name).spec.is_discrete else idle(small(name))
    if name.startswith("rware"):  # one robot on the other's cell
        x, y = raw.agents.position
        state = with_raw(state, grid=raw.grid.at[1, x[0], y[0]].set(2))
        action = idle(small(name))
    elif name.startswith("lbf"):
        food = dataclasses.replace(raw.food_items, eaten=jnp.ones_like(raw.food_items.eaten))
        state = with_raw(state, food_items=food)
    elif name.startswith("clean"):
        state = with_raw(state, grid=jnp.where(raw.grid == 0, 1, raw.grid).astype(raw.grid.dtype))
    else:
        targets = dataclasses.replace(raw.targets, found=jnp.ones_like(raw.targets.found))
        state = with_raw(state, targets=targets)
    (_, _, outcome), (_, timestep) = stepping(name)(state, action, jax.random.key(0))
    assert outcome.last and timestep.last() and outcome.terminated.all()


def test_who_is_connected_retires_unless_the_reward_is_the_teams():
    state, obs = jax.jit(small("con 5x5x3a").reset)(jax.random.key(0))
    agents = state.raw.agents
    connected = dataclasses.replace(agents, target=agents.target.at[1].set(agents.position[1]))
    state = with_raw(state, agents=connected)
    (_, obs, outcome), _ = stepping("con 5x5x3a")(state, idle(small("con 5x5x3a")), jax.random.key(0))
    assert outcome.terminated.tolist() == [False, True, False] and not outcome.last
    assert obs.agent_mask.tolist() == [True, False, True]
    np.testing.assert_allclose(outcome.reward, [-0.03, 0.0, -0.03], atol=1e-6)
    team = stepping("con 5x5x3a", reward="team")
    (_, obs, outcome), _ = team(state, idle(small("con 5x5x3a")), jax.random.key(0))
    assert not outcome.terminated.any() and obs.agent_mask.all()
    np.testing.assert_allclose(outcome.reward, [-0.06] * 3, atol=1e-6)


def test_a_reward_that_jumanji_gives_once_is_not_summed():
    env, both = small("clean 5x5x3a"), []
    for options in ({}, {"reward": "team"}):
        state, obs = jax.jit(env.reset)(jax.random.key(0))
        action = jnp.argmax(obs.action_mask, axis=-1)
        (_, _, outcome), (_, timestep) = stepping("clean 5x5x3a", **options)(state, action, jax.random.key(0))
        both.append(outcome.reward.tolist())
    assert both[0] == both[1] == [float(timestep.reward)] * 3


def test_episodes_from_one_state_differ_by_the_keys_of_their_steps():
    step, env = stepping("SearchAndRescue-v0"), small("SearchAndRescue-v0")
    state, _ = jax.jit(env.reset)(jax.random.key(0))
    places = [step(state, idle(env), jax.random.key(i))[0][0].raw.targets.pos for i in (0, 0, 1)]
    assert jnp.array_equal(places[0], places[1]) and not jnp.array_equal(places[0], places[2])


# ---------------------------------------------------------------------------------------------------------------- names

SCENARIOS = [
    ("rware tiny-4ag", {"num_agents": 4, "request_queue_size": 4, "grid_size": (11, 10)}, 500),
    ("rware-medium-6ag-hard", {"num_agents": 6, "request_queue_size": 3, "grid_size": (20, 16)}, 500),
    ("rware tiny-2ag-easy", {"num_agents": 2, "request_queue_size": 4}, 500),
    ("lbf 8x8-2p-2f-coop", {"grid_size": 8, "num_agents": 2, "num_food": 2, "fov": 8}, 100),
    ("lbf-2s-10x10-3p-3f", {"grid_size": 10, "num_agents": 3, "num_food": 3, "fov": 2}, 100),
    ("con-5x5x3a", {"grid_size": 5, "num_agents": 3}, 25),
    ("clean-6x8x2a", {"num_rows": 6, "num_cols": 8, "num_agents": 2}, 48),
]


@pytest.mark.parametrize(("name", "facts", "max_steps"), SCENARIOS)
def test_scenarios_have_the_names_of_the_papers(name, facts, max_steps):
    env = jmarl.make(name)
    assert env.spec.name == name and env.spec.max_steps == max_steps
    assert {fact: getattr(env.unwrapped, fact) for fact in facts} == facts


def test_a_scenario_says_whether_foragers_must_cooperate():
    for name, is_forced in (("lbf 8x8-2p-2f-coop", True), ("lbf 8x8-2p-2f", False)):
        assert jmarl.make(name).unwrapped._generator.force_coop is is_forced


def test_every_registered_name_has_jumanjis_defaults():
    for name in jumanji_adapter._REGISTERED:
        made, own = jmarl.make(name).unwrapped, jumanji.make(name)
        a, b = (vars(getattr(env, "_generator", None) or env.generator) for env in (made, own))
        assert made.time_limit == own.time_limit and type(made) is type(own)
        assert {k: v for k, v in a.items() if not jnp.ndim(v)} == {k: v for k, v in b.items() if not jnp.ndim(v)}


REFUSED = [
    ("rware tinny-4ag", {}, ValueError, "'tinny-4ag' is no scenario of rware: did you mean 'tiny-4ag'"),
    ("lbf 8x9-2p-2f", {}, ValueError, "Jumanji's grid is a square, not 8 by 9 cells: write 8x8."),
    ("lbf 5x5-4p-3f", {}, ValueError, "lbf 5x5-4p-3f: Ensure enough non-edge positions for food"),
    ("RobotWarehouse-v7", {}, ValueError, "is no environment of Jumanji: did you mean 'RobotWarehouse-v0'"),
    ("con-5x5x3a", {"agents": 3}, TypeError, "'agents' is no option of con-5x5x3a: did you mean 'num_agents'"),
    ("con-5x5x3a", {"reward": "shared"}, ValueError, r"reward='shared' is not one of \('individual', 'team'\)"),
    ("con-5x5x3a", {"time_limit": "50"}, ValueError, r"time_limit='50' is not one of \('truncated', 'terminal'\)"),
]


@pytest.mark.parametrize(("name", "options", "error", "message"), REFUSED)
def test_what_cannot_be_made_is_refused_in_a_sentence(name, options, error, message):
    with pytest.raises(error, match=message) as raised:
        jmarl.make(name, **options)
    assert "\n" not in str(raised.value)


def test_without_jumanji_it_is_said_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jumanji", None)
    with pytest.raises(ImportError, match=r'^RobotWarehouse needs Jumanji: pip install "jmarl\[jumanji\]"\.$'):
        jmarl.make("rware tiny-4ag")
    lists.list_envs()
    assert 'Jumanji, not installed: pip install "jmarl[jumanji]"\n  RobotWarehouse-v0\n' in capsys.readouterr().out


def test_presets_know_jumanjis_names():
    for name in ("lbf 8x8-2p-2f-coop", "LevelBasedForaging-v0"):
        for algorithm in ("mappo", "qmix"):
            preset = jmarl.presets.for_environment(algorithm, name)
            assert preset.env_kwargs == {"agent_ids": True, "reward": "team"}
            jmarl.make(preset.env, **preset.env_kwargs)
    assert jmarl.presets.for_environment("mappo", "rware tiny-4ag").env_kwargs == {"agent_ids": True}


# -------------------------------------------------------------------------------------------------------------- objects


class Seen(NamedTuple):
    place: jax.Array  # of each
    clock: jax.Array  # of all
    action_mask: jax.Array
    step_count: jax.Array


@dataclasses.dataclass
class Place:
    at: jax.Array
    time: jax.Array


jax.tree_util.register_dataclass(Place, ["at", "time"], [])


class Walk:
    """Two agents on a line, as Jumanji would write it: over where both are at 2, or after 4 steps."""

    num_agents, time_limit = 2, 4
    action_spec = specs.MultiDiscreteArray(jnp.array([3, 3]))
    observation_spec = specs.Spec(Seen, "Seen", action_mask=specs.BoundedArray((2, 3), bool, False, True))

    def see(self, state):
        mask = jnp.stack([jnp.ones(2, bool), jnp.ones(2, bool), state.at < 2], axis=1)
        return Seen(place=state.at[:, None], clock=jnp.full(2 + 1, state.time), action_mask=mask, step_count=state.time)

    def reset(self, key):
        state = Place(jnp.zeros(2), jnp.int32(0))
        return state, restart(self.see(state), shape=(2,))

    def step(self, state, action) -> tuple[Any, TimeStep]:
        state = Place(state.at + jnp.asarray(action - 1, jnp.float32), state.time + 1)
        is_over = (state.at == 2).all() | (state.time >= self.time_limit)
        timestep = jax.lax.cond(
            is_over,
            lambda: termination(jnp.ones(2), self.see(state), {"far": jnp.max(state.at)}, shape=(2,)),
            lambda: transition(jnp.zeros(2), self.see(state), None, {"far": jnp.max(state.at)}, shape=(2,)),
        )
        return state, timestep


def walk(env, *actions):
    state, obs = env.reset(jax.random.key(0))
    for action in actions:
        state, obs, outcome = env.step(state, jnp.array(action), jax.random.key(0))
    return obs, outcome


def test_an_object_is_read_by_jumanjis_conventions():
    env = envs.check_env(envs.from_jumanji(Walk(), agent_ids=True), play=True)
    assert env.spec.obs_shape == (2 + 3 + 1,) and env.spec.max_steps == 4 and env.spec.may_wait
    obs, outcome = walk(env, (2, 1), (2, 2))
    assert obs.agents.tolist() == [[1, 0, 2, 2, 2, 2], [0, 1, 2, 2, 2, 1]]  # the id, the clock, the place
    assert obs.action_mask.tolist() == [[True, True, False], [True] * 3]
    assert not outcome.last and outcome.info == {"far": 2.0}
    assert walk(env, (2, 2), (2, 2))[1].terminated.tolist() == [True, True]
    obs, outcome = walk(env, *[(1, 1)] * 4)
    assert outcome.last and not outcome.terminated.any()  # the discount is 0: it is Jumanji's time limit


def test_the_rules_of_an_object_can_be_replaced():
    env = envs.from_jumanji(
        Walk(),
        views=lambda seen: seen.place,
        world=lambda state, seen: jnp.stack([state.time, seen.clock[0] * 2]),
        terminated=lambda state, timestep: state.at >= 1,
        reward="team",
    )
    obs, outcome = walk(envs.check_env(env), (2, 1), (2, 2))
    assert obs.agents.tolist() == [[2], [1]] and obs.state.tolist() == [2, 4] and outcome.terminated.all()
    assert walk(env, (2, 2), (2, 2))[1].reward.tolist() == [2, 2]


def test_an_object_of_a_known_class_has_its_rules():
    class Mine(LevelBasedForaging):
        pass

    env = envs.from_jumanji(Mine(time_limit=7))
    assert env.spec == jmarl.make("LevelBasedForaging-v0", max_steps=7).spec._replace(name="Mine")
    with pytest.raises(TypeError, match=r"^int has no num_agents: from_jumanji takes Jumanji's environments"):
        envs.from_jumanji(3)


def test_examples_in_docstrings_run():
    failed, attempted = doctest.testmod(jumanji_adapter)
    assert attempted and not failed


# ------------------------------------------------------------------------------------------------------------- pictures


@pytest.mark.parametrize("name", ["rware tiny-2ag", "con 5x5x3a"])
def test_an_episode_is_drawn(tmp_path, name):
    from PIL import Image

    env = small(name)
    player = jmarl.random_policy(env.spec, jmarl.RandomConfig())
    state = player.init(jax.random.key(0))
    path = rendering.render_episode(env, player, state, jax.random.key(0), tmp_path / "a.gif", max_steps=2)
    with Image.open(path) as gif:
        assert gif.n_frames == 3 and gif.size == (320, 346)
    assert re.match("GIF8", path.read_bytes()[:4].decode())
