"""Small games with known solutions, environments of one's own, and what is said about mistakes."""

import doctest
import importlib.util
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmarl import envs
from jmarl.types import Env, EnvSpec, Outcome, zero_observation

# ------------------------------------------------------------------------------------------------------------- games


def play(env, actions, seed=0):
    """Observations [T + 1], rewards, terminated and last [T] of one episode with these actions [T, N]."""
    state, obs = env.reset(jax.random.key(seed))
    observations, outcomes = [obs], []
    for action in actions:
        state, obs, outcome = env.step(state, jnp.asarray(action), jax.random.key(seed))
        observations.append(obs)
        outcomes.append(outcome)
    stack = lambda *xs: np.stack(xs)  # noqa: E731
    return jax.tree.map(stack, *observations), jax.tree.map(stack, *outcomes)


def test_matrix_game_pays_everybody_the_entry_of_the_joint_action():
    payoff = np.arange(24.0).reshape(2, 3, 4)
    env = envs.check_env(envs.matrix_game(payoff, num_steps=2))
    assert env.spec.action_sizes == (2, 3, 4) and env.spec.num_actions == 4
    obs, outcome = play(env, [[1, 2, 3], [0, 1, 2]])
    np.testing.assert_array_equal(outcome.reward, [[payoff[1, 2, 3]] * 3, [payoff[0, 1, 2]] * 3])
    assert outcome.last.tolist() == [False, True] and outcome.terminated.tolist() == [[False] * 3, [True] * 3]
    np.testing.assert_array_equal(obs.action_mask[0], np.arange(4) < np.array([[2], [3], [4]]))
    assert (obs.agents == obs.agents[0]).all()


@pytest.mark.parametrize("num_agents", [1, 3])
@pytest.mark.parametrize("kind", envs.PROBES)
def test_probes_are_well_formed(kind, num_agents):
    env = envs.check_env(envs.probe(kind, num_agents=num_agents))
    assert env.spec.num_agents == num_agents


def test_probe_constant_and_action():
    assert play(envs.probe("constant"), [[0]])[1].reward.tolist() == [[1.0]]
    assert play(envs.probe("action", num_agents=2), [[0, 1]])[1].reward.tolist() == [[0.0, 1.0]]


def test_probe_observation_pays_what_is_seen():
    env = envs.probe("observation", num_agents=64)
    obs, outcome = play(env, [[0] * 64])
    np.testing.assert_array_equal(outcome.reward[0], obs.agents[0, :, 0])
    assert set(np.unique(outcome.reward)) == {-1.0, 1.0}  # every agent has a cue of its own


def test_probe_delayed_pays_at_the_end():
    obs, outcome = play(envs.probe("delayed"), [[0], [0]])
    assert outcome.reward.tolist() == [[0.0], [1.0]] and outcome.terminated.tolist() == [[False], [True]]
    assert obs.agents[:2, 0].tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_probe_action_observation_pays_the_right_answer():
    env = envs.probe("action_observation", num_agents=8)
    cue = play(env, [[0] * 8])[0].agents[0, :, 0]
    assert (play(env, [(cue > 0).astype(int)])[1].reward == 1).all()
    assert (play(env, [(cue < 0).astype(int)])[1].reward == -1).all()


def test_probe_memory_shows_the_cue_once_and_asks_later():
    env = envs.probe("memory", num_agents=8)
    cue = play(env, [[0] * 8])[0].agents[0, :, 0]
    right = (cue > 0).astype(int)
    obs, outcome = play(env, [1 - right, 1 - right, 1 - right, right])
    assert not obs.agents[1:, :, 0].any() and obs.agents[:4, 0, 1].tolist() == [0, 0, 0, 1]
    assert (outcome.reward[-1] == 1).all() and not outcome.reward[:-1].any()
    assert outcome.last.tolist() == [False, False, False, True]


def test_probe_time_limit_truncates_and_never_terminates():
    outcome = play(envs.probe("time_limit", num_steps=3), [[0]] * 3)[1]
    assert outcome.last.tolist() == [False, False, True] and not outcome.terminated.any()
    assert (outcome.reward == 1).all()


def test_probe_continuous_is_solved_by_half_the_cue():
    env = envs.probe("continuous", num_agents=4)
    cue = play(env, [np.zeros((4, 1))])[0].agents[0]
    assert not play(env, [cue / 2])[1].reward.any()
    np.testing.assert_allclose(play(env, [cue / 2 + 0.1])[1].reward, -0.01, atol=1e-6)


def test_probe_mistakes():
    with pytest.raises(ValueError, match=r"kind='actoin' is not one of \('constant', "):
        envs.probe("actoin")
    with pytest.raises(ValueError, match="num_steps=3 has no meaning for the one-step probe 'action'"):
        envs.probe("action", num_steps=3)
    for game in (lambda: envs.matrix_game(np.eye(2), num_steps=0), lambda: envs.probe("delayed", num_steps=0)):
        with pytest.raises(ValueError, match="num_steps=0 must be at least 1: every episode has a step"):
            game()


# -------------------------------------------------------------------------------- an environment of one's own

SPEC = EnvSpec(name="meet", agents=("ann", "bob"), obs_shape=(2,), state_shape=(2,), num_actions=3, max_steps=20)


def observe(position):
    return zero_observation(SPEC).replace(agents=jnp.stack([position, position[::-1]]), state=position)


def reset(key):
    position = jax.random.uniform(key, (2,), minval=-1.0)
    return (position, jnp.int32(0)), observe(position)


def step(state, action, key):
    position, time = state[0] + 0.1 * (action - 1), state[1] + 1
    distance = jnp.abs(position[0] - position[1])
    met = distance < 0.1
    outcome = Outcome(reward=jnp.full(2, -distance), terminated=jnp.full(2, met), last=met | (time == 20))
    return (position, time), observe(position), outcome


MEET = Env(reset, step, SPEC)


def test_own_environment_steps_under_vmap():
    assert envs.check_env(MEET) is MEET
    state, obs = jax.vmap(MEET.reset)(jax.random.split(jax.random.key(0), 5))
    towards = jnp.where(obs.agents[..., 0] < obs.agents[..., 1], 2, 0)
    state, next_obs, outcome = jax.jit(jax.vmap(MEET.step))(state, towards, jax.random.split(jax.random.key(1), 5))
    np.testing.assert_allclose(next_obs.agents[..., 0], obs.agents[..., 0] + 0.1 * (towards - 1), atol=1e-6)
    assert outcome.reward.shape == (5, 2)


def changed(where, **fields):
    """MEET with other fields in its step's outcome or observation, in its reset's observation, or in its spec."""

    def replaced(value):
        return value.replace(**{k: f(getattr(value, k)) for k, f in fields.items()})

    def other_reset(key):
        state, obs = reset(key)
        return state, replaced(obs) if where == "reset" else obs

    def other_step(state, action, key):
        state, obs, outcome = step(state, action, key)
        return state, replaced(obs) if where == "obs" else obs, replaced(outcome) if where == "outcome" else outcome

    return Env(other_reset, other_step, SPEC._replace(**fields) if where == "spec" else SPEC)


BOUNDED = {"num_actions": None, "action_size": 1, "action_low": ((0.0,),) * 2}
MISTAKES = [
    (lambda: changed("outcome", reward=lambda r: r[0]), r"step returns reward of shape \(\); the spec asks for \(2,\)"),
    (lambda: changed("outcome", reward=lambda r: r.astype(int)), "step returns reward as int32; it must be float32"),
    (lambda: changed("outcome", last=lambda x: x[None]), r"step returns last of shape \(1,\); the spec asks for \(\)"),
    (
        lambda: changed("outcome", terminated=lambda x: x.astype(float)),
        "step returns terminated as float32; it must be bool",
    ),
    (
        lambda: changed("outcome", info=lambda _: {"won": jnp.ones(2)}),
        r"info\['won'\] as float32\[2\]; it must be one number",
    ),
    (
        lambda: changed("obs", state=lambda x: jnp.full((2,), 1.0 * jnp.asarray(1.0))),
        r"step returns obs.state as weakly typed float32; it must be float32: use jnp.asarray\(x, jnp.float32\)",
    ),
    (lambda: changed("obs", agents=lambda x: x[:, :1]), r"step returns obs.agents of shape \(2, 1\); .* \(2, 2\)"),
    (lambda: changed("reset", action_mask=lambda x: x[:, :2]), r"reset returns obs.action_mask of shape \(2, 2\)"),
    (lambda: changed("reset", action_mask=lambda x: None), "discrete actions need obs.action_mask; all True if"),
    (lambda: changed("reset", agent_mask=lambda x: x[0]), r"reset returns obs.agent_mask of shape \(\)"),
    (lambda: changed("spec", num_actions=None), "num_actions .* or action_size .*, and not both"),
    (lambda: changed("spec", agents=("ann", "ann")), r"spec.agents=\('ann', 'ann'\) must be distinct names"),
    (lambda: changed("spec", obs_sizes=(2,)), r"spec.obs_sizes=\(2,\) needs one number for each of 2 agents"),
    (lambda: changed("spec", **BOUNDED), "action_low and action_high need 2 tuples of 1 numbers"),
    (lambda: changed("spec", **BOUNDED, action_high=((np.inf,),) * 2), "action bounds must be finite with low < high"),
    (lambda: changed("spec", **BOUNDED, action_high=((1.0,),) * 2), "obs.action_mask must be None for continuous"),
    (lambda: Env(lambda key: reset(key)[1], step, SPEC), r"reset must return \(env_state, obs\), not Observation"),
    (lambda: Env(reset, lambda s, a, k: step(s, a, k)[:2], SPEC), r"step must return \(env_state, obs, outcome\)"),
    (lambda: Env(lambda key: (reset(key)[0], 1.0), step, SPEC), "reset must return an Observation, not"),
    (lambda: Env(reset, lambda s, a, k: (*step(s, a, k)[:2], 1.0), SPEC), "step must return an Outcome third, not"),
    (
        lambda: Env(lambda key: ((reset(key)[0][0], 0), reset(key)[1]), step, SPEC),
        r"env_state\[1\] is weakly typed int32\[\] after reset",
    ),
    (
        lambda: Env(reset, lambda s, a, k: ((s[0], s[1] + 0.5), *step(s, a, k)[1:]), SPEC),
        r"env_state\[1\] is int32\[\] after reset and .*float32\[\] after step; both must be the same",
    ),
    (lambda: Env(reset, lambda s, a, k: (s[0], *step(s, a, k)[1:]), SPEC), "step returns an env_state of structure"),
]


@pytest.mark.parametrize(("make", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_check_env_says_what_is_wrong(make, message):
    with pytest.raises((TypeError, ValueError), match=message) as error:
        envs.check_env(make())
    assert str(error.value).startswith("meet: ")


# ------------------------------------------------------------------------------------------------- mistakes in `make`

REFUSED = [
    (
        ("MPE_simple_spred_v3", {}),
        ValueError,
        "no environment of JaxMARL, gymnax or Jumanji: did you mean 'MPE_simple_spread_v3'",
    ),
    (("Cartpole-v1", {}), ValueError, "did you mean 'CartPole-v1'?"),
    (
        ("MPE_simple_spread_v3", {"num_agent": 4}),
        TypeError,
        "'num_agent' is no option of MPE_simple_spread_v3: .*'num_agents'",
    ),
    (("MPE_simple_facmac_3a_v1", {"max_steps": 4}), TypeError, "'max_steps' is no option of .*: it takes none"),
    (
        ("MPE_simple_v3", {"action_type": "continuous"}),
        ValueError,
        "no action_type of MPE_simple_v3: did you mean 'Continuous'?",
    ),
    (("SMAX", {"map_nam": "3m"}), TypeError, "did you mean 'map_name'?"),
    (("HeuristicEnemySMAX", {"atack_mode": "closest"}), TypeError, "did you mean 'attack_mode'?"),
    (("HeuristicEnemySMAX", {"map_name": "3n"}), ValueError, "'3n' is no map of SMAX: did you mean '3m'?"),
    (("SMAX", {"map_name": ""}), ValueError, "'' is no map of SMAX"),
    (("SMAX", {"scenario": "3n"}), ValueError, "'3n' is no map of SMAX: did you mean '3m'?"),
    (("SMAX", {"map_name": "3m", "scenario": 1}), TypeError, "SMAX takes map_name or scenario, not both"),
    (("overcooked", {"layout": "crammed_room"}), ValueError, "no layout of overcooked: did you mean 'cramped_room'?"),
    (
        ("overcooked_v2", {"layout": "crampt_room"}),
        ValueError,
        "no layout of overcooked_v2: did you mean 'cramped_room'?",
    ),
    (("MPE_simple_v3", {"shaped_reward": 1.0}), TypeError, "'shaped_reward' is no option of MPE_simple_v3"),
    (("CartPole-v1", {"max_steps": 3}), TypeError, "no option of CartPole-v1: did you mean 'max_steps_in_episode'?"),
    (
        ("CartPole-v1", {"time_limit": "none"}),
        ValueError,
        r"time_limit='none' is not one of \('truncated', 'terminal'\)",
    ),
    (("storm", {}), ValueError, "storm has an interface of its own"),
    (("storm_2p", {}), ValueError, "storm_2p has an interface of its own"),
    (("storm_np", {}), ValueError, "storm_np has an interface of its own"),
    (("JaxRobotarium_navigation", {}), ValueError, "JaxRobotarium_navigation needs JaxRobotarium, a git submodule"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=[f"{c[0]} {list(c[1])}" for c, _, _ in REFUSED])
def test_make_says_what_is_wrong(call, error, message):
    name, options = call
    with pytest.raises(error, match=message) as raised:
        envs.make(name, **options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("module", [envs, envs.checks, envs.games], ids=lambda module: module.__name__)
def test_examples_in_docstrings_run(module):
    failed, attempted = doctest.testmod(module)
    assert attempted and not failed


@pytest.mark.parametrize("name", ["ant_4x2", "halfcheetah_6x1", "hopper_3x1", "humanoid_9|8", "walker2d_2x3"])
def test_mabrax_works_or_says_what_to_install(name):
    if importlib.util.find_spec("brax"):
        assert envs.check_env(envs.make(name)).spec.max_steps == 1000
    else:
        with pytest.raises(ImportError, match=r'needs brax, which is not installed: pip install "jmarl\[mabrax\]"'):
            envs.make(name)


def test_every_environment_that_jaxmarl_registers_is_adapted_or_refused():
    import jaxmarl

    from jmarl.envs import jaxmarl_adapter

    for name in jaxmarl.registered_envs:
        assert (name in jaxmarl_adapter.names()) != (jaxmarl_adapter.refusal(name) is not None)


def test_jaxmarl_is_imported_late_in_silence_and_leaves_the_streams_alone():
    code = """
import sys
import jmarl
assert not {"jaxmarl", "gymnax"} & set(sys.modules)
before = sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__
jmarl.envs.make("MPE_simple_v3")
assert before == (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
