"""Environments under jax's flags: 64 bits and strict promotion of ranks and dtypes."""

import contextlib
import pickle
import re

import gymnax
import jax
import jax.numpy as jnp
import jaxmarl
import numpy as np
import pytest

from jmarl import envs
from jmarl.types import Env, EnvSpec, Outcome, zero_observation


def enable_x64():
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64  # before jax 0.8

    return enable_x64(True)


@contextlib.contextmanager
def strict():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


@contextlib.contextmanager
def all_flags():
    with enable_x64(), strict():
        yield


SMALL = {"size": 4, "num_predators": 3, "num_prey": 2, "view": 3}
ENVS = {kind: lambda kind=kind: envs.probe(kind, num_agents=2) for kind in envs.PROBES} | {
    "matrix_game": lambda: envs.matrix_game([[1.0, 2.0], [3.0, 4.0]], num_steps=2),
    "two_step_game": envs.two_step_game,
    "predator_prey": lambda: envs.make("predator_prey", agent_ids=True, **SMALL),
    "spread": lambda: envs.make("MPE_simple_spread_v3", agent_ids=True),
    "SMAX": lambda: envs.make("SMAX", map_name="3m"),
    "Freeway": lambda: envs.make("Freeway-MinAtar"),
    "CartPole": lambda: envs.make("CartPole-v1"),
    "cleaner": lambda: envs.make("clean 5x5x2a"),
}


def rollout(env, length=3):
    """Two episodes' first steps with an action that is legal, as numpy arrays."""
    spec = env.spec

    def step(loop, key):
        state, obs = loop
        # An argmax has 64 bits where jax has them.
        action = jnp.argmax(obs.action_mask, axis=-1) if spec.is_discrete else jnp.zeros((spec.num_agents, 1))
        state, obs, outcome = env.step(state, action, key)
        return (state, obs), (obs, outcome)

    def play(key):
        return jax.lax.scan(step, env.reset(key), jax.random.split(key, length))

    return jax.tree.map(np.asarray, jax.jit(jax.vmap(play))(jax.random.split(jax.random.key(0), 2))[1])


@pytest.mark.parametrize("name", ENVS)
def test_an_environment_is_the_same_under_every_flag(name):
    usual = rollout(ENVS[name]())
    for flags in (enable_x64, strict):  # not both: with 64 bits continuous actions have them, too
        with flags():
            flagged = rollout(envs.check_env(ENVS[name]()))
        for a, b in zip(jax.tree.leaves(usual), jax.tree.leaves(flagged), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["rware tiny-2ag", "lbf 5x5-2p-1f", "con 5x5x2a", "SearchAndRescue-v0"])
def test_what_is_slow_to_compile_is_traced_to_the_same_program_under_all_flags(name):
    def program():
        env, key = envs.make(name), jax.random.key(0)
        state, _ = jax.eval_shape(env.reset, key)
        action = np.zeros(2, np.int32) if env.spec.is_discrete else np.zeros((2, 2), np.float32)
        traced = jax.make_jaxpr(env.reset)(key), jax.make_jaxpr(env.step)(state, action, key)
        return re.sub("0x[0-9a-f]+", "", str(traced))  # addresses of functions

    usual = program()
    with all_flags():
        assert program() == usual


def test_the_flags_are_the_callers_again_afterwards():
    with all_flags():
        envs.make("CartPole-v1").reset(jax.random.key(0))
        assert jnp.zeros(1).dtype == jnp.float64
        with pytest.raises(ValueError, match="rank_promotion"):
            jnp.zeros((2, 3)) + jnp.zeros(3)
        with pytest.raises(Exception, match="dtype_promotion"):
            jnp.zeros(2) + jnp.zeros(2, jnp.int32)


def drifting(reward_dtype=None, reset_dtype=None):
    """An environment that leaves all dtypes to jax, but for those given."""
    spec = EnvSpec(name="own", agents=("a",), obs_shape=(2,), state_shape=(2,), num_actions=2, max_steps=2)

    def observe(x, dtype=None):
        return zero_observation(spec).replace(agents=jnp.stack([x]).astype(dtype), state=x)

    def reset(key):
        x = jax.random.uniform(key, (2,))
        return (x, jnp.int32(0)), observe(x, reset_dtype)

    def step(state, action, key):
        x, time = state
        outcome = Outcome(reward=x[:1].astype(reward_dtype), terminated=jnp.full(1, time == 1), last=time == 1)
        return (x, time + 1), observe(x), outcome

    return Env(reset, step, spec)


def test_an_own_environment_may_have_either_precision_under_x64_and_keeps_it():
    envs.check_env(drifting(), play=True)
    with pytest.raises(TypeError, match="step returns reward as float16; it must be float32"):
        envs.check_env(drifting("float16"))
    with enable_x64():
        envs.check_env(drifting(), play=True)
        envs.check_env(drifting("float32"), play=True)
        with pytest.raises(TypeError, match=r"obs.agents is float32\[1, 2\] after reset and float64\[1, 2\] after"):
            envs.check_env(drifting(reset_dtype="float32"))


def test_a_spec_is_pickled_and_prints_its_fields():
    spec = envs.make("MPE_simple_spread_v3", action_type="Continuous").spec
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert "obs_shape=(18,)" in repr(spec) and "max_steps=26" in repr(spec)


@pytest.mark.parametrize("name", ["MPE_simple_spread_v3", "HeuristicEnemySMAX", "CartPole-v1"])
def test_an_object_that_was_made_in_64_bits_is_read_in_32(name):
    """Its arrays are attributes, also of the environment within SMAX's, and its methods are kept as attributes, too."""
    with enable_x64():
        inner = gymnax.make(name)[0] if "-" in name else jaxmarl.make(name)
        env = envs.from_gymnax(inner) if "-" in name else envs.from_jaxmarl(inner)
        state, obs = jax.eval_shape(env.reset, jax.random.key(0))
        action = jax.ShapeDtypeStruct((env.spec.num_agents,), jnp.int32)
        _, _, outcome = jax.eval_shape(env.step, state, action, jax.random.key(0))
    assert obs.agents.dtype == outcome.reward.dtype == jnp.float32
    same = envs.from_gymnax(inner) if "-" in name else envs.from_jaxmarl(jaxmarl.make(name))
    assert same.spec == env.spec
