"""Environments as objects: JaxMARL's own, those with its interface, and gymnax's."""

import doctest
import re
import warnings
from pathlib import Path
from typing import NamedTuple

import gymnax
import jax
import jax.numpy as jnp
import jaxmarl
import numpy as np
import pytest
from flax import struct
from gymnax.environments import environment as gymnax_environment
from gymnax.environments import spaces as gymnax_spaces
from jaxmarl.environments import Hanabi, JaxNav, MultiAgentEnv, Overcooked, SimpleSpreadMPE, spaces
from jaxmarl.wrappers.baselines import LogWrapper

import jmarl
from jmarl import envs
from jmarl.envs import gymnax_adapter, jaxmarl_adapter
from jmarl.learners import checks

AGENTS = ("blue", "red", "green")


class Count(NamedTuple):
    time: jax.Array
    ends_at: jax.Array


class Race(MultiAgentEnv):
    """Each agent sees the time; red is done from step `red_stops` on; the episode from `ends_at` or `limit` on."""

    def __init__(self, *, red_stops=2, ends_at=4, limit=None):
        super().__init__(num_agents=3)
        self.agents = list(AGENTS)
        self.red_stops, self.ends_at = red_stops, ends_at
        if limit is not None:
            self.max_steps = limit

    def action_space(self, agent):
        return spaces.Discrete(2)

    def reset(self, key):
        return self.views(0), Count(jnp.int32(0), jnp.int32(self.ends_at))

    def views(self, time):
        return {agent: jnp.array([time, i], jnp.int32) for i, agent in enumerate(self.agents)}

    def step_env(self, key, state, actions):
        time = state.time + 1
        over = (time >= state.ends_at) | (time >= getattr(self, "max_steps", 1000))
        dones = {agent: over | ((agent == "red") & (time >= self.red_stops)) for agent in self.agents}
        rewards = {agent: 1.0 * actions[agent] for agent in self.agents}
        info = {"laps": time, "each": {agent: time + i for i, agent in enumerate(self.agents)}, "path": jnp.zeros(5)}
        return self.views(time), state._replace(time=time), rewards, dones | {"__all__": over}, info


def play(env, num_steps=10, action=1):
    """Observations, the first of them the reset's, and outcomes up to the last step."""
    step = jax.jit(env.step)
    state, obs = jax.jit(env.reset)(jax.random.key(0))
    observations, outcomes = [obs], []
    for _ in range(num_steps):
        state, obs, outcome = step(state, jnp.full(env.spec.num_agents, action), jax.random.key(0))
        observations.append(obs)
        outcomes.append(outcome)
        if outcome.last:
            break
    stacked = lambda *xs: np.stack(xs)  # noqa: E731
    return jax.tree.map(stacked, *observations), jax.tree.map(stacked, *outcomes)


def test_an_object_keeps_the_order_of_its_agents_and_tells_its_scalars():
    env = envs.check_env(jmarl.make(Race()), play=True)
    assert env.spec.agents == AGENTS and env.spec.name == "Race" and env.spec.max_steps is None
    obs, outcome = play(env)
    np.testing.assert_array_equal(obs.agents[:, 2], [[t, 2] for t in range(5)])
    assert outcome.reward.shape == (4, 3) and (outcome.reward == 1).all()
    told = {name: x[-1] for name, x in outcome.info.items()}
    assert told == {"laps": 4, "each/blue": 4, "each/red": 5, "each/green": 6}
    assert all(x.dtype == np.float32 for x in outcome.info.values())


def test_without_max_steps_every_end_is_a_termination():
    obs, outcome = play(jmarl.make(Race()))
    assert outcome.last.tolist() == [False, False, False, True]
    assert outcome.terminated.tolist() == [[False] * 3, [False, True, False], [False, True, False], [True] * 3]
    assert obs.agent_mask.tolist() == [[True] * 3, [True] * 3, [True, False, True], [True, False, True], [False] * 3]


@pytest.mark.parametrize("make", [lambda: jmarl.make(Race(limit=3)), lambda: jmarl.make(Race(ends_at=3), max_steps=3)])
def test_an_end_at_max_steps_truncates_those_who_still_act(make):
    env = envs.check_env(make(), play=True)
    obs, outcome = play(env)
    assert env.spec.max_steps == 3 and outcome.last.tolist() == [False, False, True]
    assert outcome.terminated.tolist() == [[False] * 3, [False, True, False], [False, True, False]]
    assert obs.agent_mask[-1].tolist() == [True, False, True]
    assert play(jmarl.make(Race(limit=3), time_limit="terminal"))[1].terminated[-1].all()


def test_an_end_before_max_steps_terminates():
    outcome = play(jmarl.make(Race(ends_at=2, limit=3, red_stops=9)))[1]
    assert outcome.terminated.tolist() == [[False] * 3, [True] * 3]


def test_an_agent_that_is_done_for_a_while_acts_again():
    class Respawn(Race):
        def step_env(self, *args):
            *rest, dones, info = super().step_env(*args)
            return *rest, dones | {"red": dones["red"] & (rest[1].time != 3)}, info

    assert play(jmarl.make(Respawn()))[0].agent_mask[:4, 1].tolist() == [True, True, False, True]


def test_rules_are_arguments():
    env = envs.from_jaxmarl(
        Race(),
        terminated=lambda step: jnp.array([False, True, False]) & step.last & (step.previous.time == 3),
        alive=lambda state: state.time < jnp.array([9, 9, 1]),
        legal=lambda state: {agent: jnp.array([True, state.time > 1]) for agent in AGENTS},
        world=lambda views, state: jnp.array([state.ends_at, views["red"][0]]),
        info=lambda step: {"laps": step.state.time, "went": step.actions["red"], "half": step.info["laps"] / 2},
        max_steps=7,
        agent_ids=True,
    )
    assert envs.check_env(env).spec.max_steps == 7 and env.spec.obs_shape == (5,) and env.spec.state_shape == (2,)
    obs, outcome = play(env)
    assert outcome.terminated.tolist() == [[False] * 3] * 3 + [[False, True, False]]
    assert obs.agent_mask.tolist() == [[True] * 3] + [[True, True, False]] * 4
    assert obs.action_mask[:, 0, 1].tolist() == [False, False, True, True, True]
    assert obs.state.tolist() == [[4, t] for t in range(5)]
    assert {name: x[-1] for name, x in outcome.info.items()} == {"laps": 4, "went": 1, "half": 2}


def test_with_one_rule_given_the_others_hold():
    obs, outcome = play(jmarl.make(Race(), terminated=lambda step: step.last & (step.state.time == 4)))
    assert outcome.terminated.tolist() == [[False] * 3] * 3 + [[True] * 3] and obs.agent_mask[:4].all()
    obs, outcome = play(jmarl.make(Race(limit=4), alive=lambda state: state.time < jnp.array([9, 9, 1])))
    assert obs.agent_mask[:, 1].all() and not obs.agent_mask[1:, 2].any()
    assert outcome.terminated[:, 1].tolist() == [False, True, True, True] and not outcome.terminated[-1, 0]


def test_what_an_object_says_of_legal_actions_and_of_the_world_is_read():
    class Says(Race):
        def get_avail_actions(self, state):
            return {agent: jnp.array([1, state.time != 1]) for agent in self.agents}

        def views(self, time):
            return super().views(time) | {"world_state": jnp.full(4, time, jnp.int32)}

    obs, _ = play(jmarl.make(Says()), action=0)
    assert obs.action_mask[:, 2].tolist() == [[True, t != 1] for t in range(5)]
    assert obs.state.tolist() == [[t] * 4 for t in range(5)]
    assert play(jmarl.make(Race()))[0].action_mask.all()  # the method of the base class only raises


def test_objects_of_known_classes_have_their_familys_rules():
    named, made = envs.make("MPE_simple_spread_v3", num_agents=2), envs.make(SimpleSpreadMPE(num_agents=2))
    assert made.spec == named.spec._replace(name="SimpleSpreadMPE")

    class Mine(SimpleSpreadMPE):
        pass

    assert envs.make(Mine(num_agents=2, max_steps=3)).spec.max_steps == 4  # as in all of MPE
    assert envs.make(Hanabi()).spec == envs.make("hanabi").spec._replace(name=Hanabi().name)
    shaped = envs.make(Overcooked(max_steps=5), shaped_reward=0.5)
    assert shaped.spec == envs.make("overcooked", max_steps=5).spec._replace(name=Overcooked().name)


def test_gymnax_objects_come_with_their_parameters():
    env, params = gymnax.make("CartPole-v1")
    made = envs.make((env, params.replace(max_steps_in_episode=7)))
    assert made.spec == envs.make("CartPole-v1", max_steps_in_episode=7).spec and made.unwrapped is env
    assert envs.from_gymnax(env).spec.max_steps == 500


def test_an_own_class_of_gymnax_tells_its_info():
    @struct.dataclass
    class State(gymnax_environment.EnvState):
        pass

    class Walk(gymnax_environment.Environment):
        default_params = gymnax_environment.EnvParams(max_steps_in_episode=3)

        def action_space(self, params):
            return gymnax_spaces.Discrete(2)

        def reset_env(self, key, params):
            return jnp.zeros(2), State(time=0)

        def step_env(self, key, state, action, params):
            time = state.time + 1
            info = {"discount": jnp.float32(1.0), "steps": {"all": time}, "path": jnp.zeros(3)}
            return jnp.full(2, time), State(time=time), jnp.float32(2.0), action == 0, info

    env = envs.check_env(envs.make((Walk(), Walk.default_params)), play=True)
    outcome = play(env)[1]
    assert outcome.last.tolist() == [False, False, True] and not outcome.terminated.any()
    assert {name: x.tolist() for name, x in outcome.info.items()} == {"steps/all": [1.0, 2.0, 3.0]}
    assert play(env, action=0)[1].terminated.tolist() == [[True]]


class NoDicts(Race):
    def views(self, time):
        return jnp.zeros((3, 2))


REFUSED = [
    (
        lambda: jmarl.make(3),
        TypeError,
        "int has no agents: jmarl.make takes a name, an object with JaxMARL's agents, r",
    ),
    (lambda: jmarl.make(envs.probe("action")), TypeError, "Env has no agents"),
    (lambda: jmarl.make(gymnax.make("CartPole-v1")[0]), TypeError, "CartPole has no agents: .* gymnax's .env, params."),
    (lambda: jmarl.make((3, None)), TypeError, "int has no reset_env, which gymnax's environments have since 1.0"),
    (
        lambda: jmarl.make(LogWrapper(Race())),
        TypeError,
        "LogWrapper is a wrapper of JaxMARL's: give the environment in",
    ),
    (lambda: jmarl.make(NoDicts()), TypeError, r"NoDicts.reset must return \(views, state\) with a dict of views"),
]


@pytest.mark.parametrize(("make", "error", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_what_is_no_environment_is_refused_in_a_sentence(make, error, message):
    with pytest.raises(error, match=message) as raised:
        make()
    assert "\n" not in str(raised.value)


# ---------------------------------------------------------------------------------------------------------- pickles


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("options", [{"map_id": "Grid-Buffer"}, {}, {"map_id": "Grid-Buffer", "dir_path": "maps"}])
def test_no_option_reaches_a_pickle(tmp_path, options):
    import pickle

    (tmp_path / "map_buffer_0").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    map_params = {"map_size": (7, 7), "dir_path": str(tmp_path)}
    with pytest.raises(ValueError, match=r"^jaxnav with map_id='Grid-Buffer' or a dir_path reads pickles, .* own code"):
        jmarl.make("jaxnav", map_params=map_params, **options)
    assert not (tmp_path / "ran").exists()
    if options.get("map_id") and "dir_path" not in options:  # what the files would have done
        with pytest.raises(Exception):  # noqa: B017  whatever their content leads to
            JaxNav(map_params=map_params, **options)
        assert (tmp_path / "ran").exists()


def test_nothing_else_that_is_adapted_reads_pickles_or_runs_strings():
    """A new release that does shows up here."""
    risky = re.compile(r"\b(pickle|joblib|dill|exec\(|eval\(|import_module|__import__|(np|jnp)\.load\()")
    roots = [Path(jaxmarl.__file__).parent / "environments", Path(gymnax.__file__).parent / "environments"]
    found = {path.name for root in roots for path in root.rglob("*.py") if risky.search(path.read_text())}
    assert found == {"grid_map.py"}


@pytest.mark.parametrize("module", [jaxmarl_adapter, gymnax_adapter], ids=lambda module: module.__name__)
def test_examples_in_docstrings_run(module):
    failed, attempted = doctest.testmod(module)
    assert attempted and not failed


@pytest.mark.parametrize(
    ("name", "teams"),
    [
        ("MPE_simple_tag_v3", (1, 1, 1, 0)),
        ("MPE_simple_crypto_v3", (1, 0, 0)),
        ("MPE_simple_speaker_listener_v4", ()),
        ("MPE_simple_facmac_v1", ()),
    ],
)
def test_specs_say_who_opposes_whom(name, teams):
    assert jmarl.make(name).spec.teams == teams


def test_specs_say_whether_views_hold_ids():
    assert jmarl.make("MPE_simple_spread_v3", agent_ids=True).spec.has_ids
    assert not jmarl.make("MPE_simple_spread_v3").spec.has_ids


def test_one_network_for_agents_of_different_kinds_is_warned_of_once():
    spec = jmarl.make("MPE_simple_speaker_listener_v4").spec
    checks._warn_of_different_agents.cache_clear()
    with pytest.warns(UserWarning, match="sharing='shared' gives them one network that cannot tell who is who"):
        jmarl.ippo(spec, jmarl.PPOConfig())
    with warnings.catch_warnings(action="error"):
        jmarl.ippo(spec, jmarl.PPOConfig())
        jmarl.ippo(spec, jmarl.PPOConfig(sharing="per_group"))
        jmarl.ippo(jmarl.make("MPE_simple_speaker_listener_v4", agent_ids=True).spec, jmarl.PPOConfig())


def test_only_rules_that_are_known_say_that_nobody_waits():
    env = SimpleSpreadMPE(num_agents=2)
    assert not envs.from_jaxmarl(env).spec.may_wait
    assert envs.from_jaxmarl(env, alive=lambda state: jnp.arange(2) == state.step % 2).spec.may_wait
    assert envs.from_jaxmarl(env, terminated=lambda step: jnp.zeros(2, bool)).spec.may_wait
