"""What agents see: dicts of arrays as one vector, ids before it."""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmarl import envs
from jmarl.envs import views
from jmarl.types import Env, EnvSpec, Outcome, zero_observation


def test_flat_views_stand_in_the_order_of_sorted_names_row_by_row():
    pose, grid = np.array([[1.0, 2.0], [3.0, 4.0]]), np.arange(8).reshape(2, 2, 2)
    flat = envs.flatten_views({"b": {"y": pose, "x": grid}, "a": np.array([True, False]), "c": np.array([9, 8])})
    assert flat.dtype == jnp.float32
    np.testing.assert_array_equal(flat, [[1, 0, 1, 2, 3, 1, 2, 9], [0, 4, 5, 6, 7, 3, 4, 8]])


@pytest.mark.parametrize("parts", [{"a": np.zeros((2, 3)), "b": np.zeros(3)}, {"a": np.float32(0.0)}, {}])
def test_flat_views_need_an_axis_of_agents(parts):
    with pytest.raises(ValueError, match="each needs an axis of agents first, N long"):
        envs.flatten_views(parts)


def own(obs_shape, **fields):
    spec = EnvSpec(
        name="own", agents=("a", "b"), obs_shape=obs_shape, state_shape=(3,), num_actions=2, max_steps=2, **fields
    )

    def observe():
        return zero_observation(spec).replace(agents=jnp.full((2, *obs_shape), 5.0), state=jnp.arange(3.0))

    def step(time, action, key):
        last = time == 1
        return time + 1, observe(), Outcome(reward=jnp.ones(2), terminated=jnp.full(2, last), last=last)

    return Env(lambda key: (jnp.int32(0), observe()), step, spec, "underneath")


def test_ids_of_an_own_environment_stand_before_the_features():
    env = envs.check_env(envs.with_agent_ids(own((3,), obs_sizes=(3, 2))), play=True)
    assert env.spec.obs_shape == (5,) and env.spec.obs_sizes == (5, 4) and env.unwrapped == "underneath"
    state, obs = env.reset(jax.random.key(0))
    for seen in (obs, env.step(state, jnp.zeros(2, jnp.int32), jax.random.key(1))[1]):
        np.testing.assert_array_equal(seen.agents, [[1, 0, 5, 5, 5], [0, 1, 5, 5, 5]])
        np.testing.assert_array_equal(seen.state, np.arange(3.0))
    assert envs.with_agent_ids(own((3,))).spec.obs_sizes == ()


def test_ids_of_images_are_channels():
    env = envs.check_env(envs.with_agent_ids(own((4, 5, 3))))
    assert env.spec.obs_shape == (4, 5, 5)
    seen = env.reset(jax.random.key(0))[1].agents
    np.testing.assert_array_equal(seen[1], np.broadcast_to([0.0, 1, 5, 5, 5], (4, 5, 5)))


def test_make_gives_the_same_ids():
    plain = envs.make("MPE_simple_speaker_listener_v4")
    with_ids = envs.make("MPE_simple_speaker_listener_v4", agent_ids=True)
    assert envs.with_agent_ids(plain).spec == with_ids.spec
    key = jax.random.key(0)
    seen = [jax.jit(env.reset)(key)[1].agents for env in (envs.with_agent_ids(plain), with_ids)]
    np.testing.assert_array_equal(*seen)


JOINED = [
    ("MPE_simple_spread_v3", {}),
    ("MPE_simple_tag_v3", {}),  # views of two widths
    ("MPE_simple_speaker_listener_v4", {"agent_ids": True}),
    ("overcooked", {"max_steps": 3}),  # images
    ("CartPole-v1", {}),
]


@pytest.mark.parametrize(("name", "options"), JOINED, ids=[name for name, _ in JOINED])
def test_a_state_that_is_views_is_made_of_them(name, options):
    """On random steps of three environments side by side: what the environment says, to the bit."""
    env = envs.make(name, **options)
    assert env.spec.state_is_views
    keys = jax.random.split(jax.random.key(0), 3)
    state, obs = jax.jit(jax.vmap(env.reset))(keys)
    step = jax.jit(jax.vmap(env.step))
    for i in range(3):
        joined = views.joined(obs.agents, 1, views.own_blocks(env.spec))
        assert joined.dtype == obs.state.dtype and len(np.unique(joined)) > 1
        np.testing.assert_array_equal(joined, obs.state)
        action = jnp.full((3, env.spec.num_agents), i % env.spec.num_actions, jnp.int32)
        state, obs, _ = step(state, action, keys)


def test_a_state_of_its_own_is_not_made_of_views():
    assert not envs.make("MPE_simple_facmac_3a_v1").spec.state_is_views
    assert not envs.make("HeuristicEnemySMAX", map_name="3m").spec.state_is_views


def test_examples_in_docstrings_run():
    failed, attempted = doctest.testmod(views)
    assert attempted and not failed
