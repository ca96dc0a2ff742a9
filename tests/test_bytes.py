"""Views of bytes are stored as they are, and every network reads the numbers that floats would have held."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmarl
from jmarl import buffers, training
from jmarl.combinators import ICMConfig, NormalizedConfig, RNDConfig, ShapedConfig, icm, normalized, rnd, shaped
from jmarl.envs import check_env
from jmarl.envs.host import from_host
from jmarl.envs.slots import HostStep, Seen
from jmarl.types import Env, EnvSpec, Outcome, zero_observation

SMALL = {"hidden_sizes": (8,)}


@functools.cache
def counting(dtype="uint8", image=False):
    """A count goes up or down with the agents' actions, until one of eight steps; differences of views are below 0."""
    view_shape = (2, 2, 3) if image else (3,)
    state_shape = (2, 2, 6) if image else (6,)
    spec = EnvSpec("counting", ("a", "b"), view_shape, state_shape, num_actions=2, max_steps=8, obs_dtype=dtype)

    def observe(count, time):
        rows = jnp.stack([jnp.stack([count, 1 + time, 8 - time]), jnp.stack([time, count, 9 - count])])
        views = jnp.broadcast_to(rows[:, None, None], (2, *view_shape)) if image else rows
        state = jnp.concatenate([views[0], views[1]], axis=-1)
        return zero_observation(spec).replace(agents=views.astype(dtype), state=state.astype(dtype))

    def reset(key):
        count = jax.random.randint(key, (), 0, 10)
        return (count, jnp.int32(0)), observe(count, jnp.int32(0))

    def step(state, action, key):
        count, time = state[0] + jnp.sum(2 * action - 1), state[1] + 1
        count = jnp.clip(count, 0, 9)
        last = time == 8
        outcome = Outcome(reward=jnp.full(2, count / 9), terminated=jnp.zeros(2, bool) | last, last=last)
        return (count, time), observe(count, time), outcome

    return Env(reset, step, spec)


def off_policy(env, algorithm):
    buffer = buffers.uniform(64, 4)
    return training.off_policy(env, algorithm, buffer=buffer, num_envs=2, rollout_length=8, num_updates=2)


def on_policy(env, algorithm):
    return training.on_policy(env, algorithm, num_envs=2, rollout_length=8)


def falling(obs):
    return obs.agents[..., 2] - obs.agents[..., 1]


PPO = jmarl.PPOConfig(**SMALL, num_minibatches=1)
CASES = {
    "ippo image": (on_policy, jmarl.ippo, PPO),
    "mappo state_id": (on_policy, jmarl.mappo, PPO.replace(critic_view="state_id")),
    "mat": (on_policy, jmarl.mat, jmarl.MATConfig(embed_size=8, num_heads=1)),
    "sable": (on_policy, jmarl.sable, jmarl.SableConfig(embed_size=8, num_heads=1, num_minibatches=1)),
    "pqn_qmix": (on_policy, jmarl.pqn_qmix, jmarl.PQNQMIXConfig(**SMALL)),
    "qplex": (off_policy, jmarl.qplex, jmarl.QPLEXConfig(**SMALL)),
    "qtran": (off_policy, jmarl.qtran, jmarl.QTRANConfig(**SMALL)),
    "masac": (off_policy, jmarl.masac, jmarl.SACConfig(**SMALL)),
    "hasac": (off_policy, jmarl.hasac, jmarl.HASACConfig(**SMALL)),
    "normalized": (on_policy, normalized(jmarl.ippo), NormalizedConfig(inner=PPO)),
    "icm image": (on_policy, icm(jmarl.ippo), ICMConfig(inner=PPO)),
    "rnd": (on_policy, rnd(jmarl.ippo), RNDConfig(inner=PPO)),
    "shaped": (on_policy, shaped(jmarl.ippo, potential=falling), ShapedConfig(inner=PPO)),
}


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_learnt_from_as_floats_are(name):
    loop_of, algorithm, cfg = CASES[name]

    def learnt(dtype):
        loop = loop_of(counting(dtype, image="image" in name), algorithm)
        run, metrics = jax.jit(training.make_train(loop, 2))(jax.random.key(0), cfg)
        return run, (run.train_state.params, metrics)

    (run, of_bytes), (_, of_floats) = learnt("uint8"), learnt("float32")
    assert run.obs.agents.dtype == run.obs.state.dtype == jnp.uint8
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), of_bytes, of_floats)


def test_replay_holds_bytes():
    def memory(dtype):
        loop = off_policy(counting(dtype), jmarl.vdn)
        return jax.eval_shape(lambda key: loop.init(key, jmarl.VDNConfig(**SMALL)), jax.random.key(0)).buffer

    of_bytes, of_floats = (
        [x for x in jax.tree.leaves(memory(dtype)) if x.dtype == dtype and x.ndim > 2] for dtype in ("uint8", "float32")
    )
    assert of_bytes and len(of_bytes) <= len(of_floats)


def test_scripted_players_see_floats():
    learner = jmarl.scripted(lambda obs: (falling(obs) < 0).astype(jnp.int32))
    env = counting()
    _, obs = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 3))
    action, _ = learner.greedy(learner.init(jax.random.key(0)), (), obs, jnp.ones(3, bool))
    views = np.asarray(obs.agents, int)
    assert action.tolist() == (views[..., 2] < views[..., 1]).tolist() and action.any()


@pytest.mark.parametrize(
    "name, kwargs",
    [("overcooked", {}), ("overcooked", {"flatten": True, "agent_ids": True}), ("Breakout-MinAtar", {})],
)
def test_environments_of_bytes(name, kwargs):
    env = jmarl.make(name, **kwargs)
    assert env.spec.obs_dtype == "uint8"
    check_env(env, play=True)


def test_bytes_lose_nothing_of_minatar():
    import gymnax

    raw, _ = gymnax.make("Seaquest-MinAtar")
    env = jmarl.make("Seaquest-MinAtar")

    def step(state, key):
        action = jax.random.randint(key, (1,), 0, env.spec.num_actions)
        state, obs, _ = env.step(state, action, key)
        return state, (obs.agents[0], raw.get_obs(state))

    keys = jax.random.split(jax.random.key(0), 300)
    _, (ours, theirs) = jax.jit(lambda: jax.lax.scan(step, env.reset(keys[0])[0], keys))()
    np.testing.assert_array_equal(ours, theirs)


def test_what_an_environment_shows_is_checked_against_its_spec():
    env = counting()
    wrong = env._replace(spec=env.spec._replace(obs_dtype="float32"))
    with pytest.raises((TypeError, ValueError), match=r"obs\.agents.*uint8.*float32"):
        check_env(wrong)
    odd = env._replace(spec=env.spec._replace(obs_dtype="int8"))
    with pytest.raises(ValueError, match="obs_dtype='int8' is neither"):
        check_env(odd)


class Frames:
    """An environment in Python whose frames are bytes, or so it says."""

    spec = EnvSpec("frames", ("a",), (4,), (4,), num_actions=2, max_steps=3, obs_dtype="uint8")
    info = ()

    def __init__(self, dtype):
        self.dtype = dtype

    def reset(self, seed):
        self.time = 0
        return Seen(np.full((1, 4), 250, self.dtype))

    def step(self, action):
        self.time += 1
        return HostStep(Seen(np.full((1, 4), 250 + self.time, self.dtype)), 1.0, False, self.time == 3)

    def close(self):
        pass


def test_frames_of_an_environment_in_python_stay_bytes():
    env = from_host(lambda: Frames(np.uint8))
    _, obs = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 2))
    assert obs.agents.dtype == obs.state.dtype == np.uint8 and (np.asarray(obs.agents) == 250).all()
    with pytest.raises(Exception, match=r"agents of float64, and its spec has obs_dtype='uint8'"):
        jax.block_until_ready(jax.vmap(from_host(lambda: Frames(float)).reset)(jax.random.split(jax.random.key(0), 2)))


def test_images_of_gymnasium_stay_bytes():
    pytest.importorskip("gymnasium")
    from gymnasium import spaces

    from jmarl.envs.gymnasium_adapter import Reader

    image = spaces.Box(0, 255, (4, 4, 3), np.uint8)
    assert Reader(image, "image", False).dtype == Reader(image, "image", True).dtype == "uint8"
    assert Reader(spaces.Box(-1, 1, (3,)), "vector", False).dtype == "float32"
    assert Reader(spaces.Discrete(3), "one-hot", False).dtype == "float32"
