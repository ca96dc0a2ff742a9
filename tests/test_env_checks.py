"""`check_env`: the sentence that each mistake gets, without running the environment and in an episode."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmarl import envs
from jmarl.envs import checks
from jmarl.types import Env, EnvSpec, Outcome, zero_observation

SPEC = EnvSpec(name="own", agents=("a", "b"), obs_shape=(2,), state_shape=(2,), num_actions=3, max_steps=5)


def own(*, obs=lambda t: {}, outcome=lambda t: {}, length=5, **fields):
    """A game of `length` steps; `obs` and `outcome` say what is otherwise at a time, `fields` of its spec."""
    spec = SPEC._replace(**fields)

    def observe(t):
        return zero_observation(spec).replace(**obs(t))

    def step(t, action, key):
        last = t == length - 1
        told = Outcome(reward=jnp.ones(2), terminated=jnp.full(2, last), last=last).replace(**outcome(t))
        return t + 1, observe(t + 1), told

    return Env(lambda key: (jnp.int32(0), observe(jnp.int32(0))), step, spec)


def continuous(**fields):
    bounds = {"action_low": ((-1.0,),) * 2, "action_high": ((1.0,),) * 2}
    return own(**{"num_actions": None, "action_size": 1, **bounds, **fields})


views = {"map": jnp.zeros((2, 4)), "pose": jnp.zeros((2, 3))}
told = lambda **info: own(outcome=lambda t: {"info": info})  # noqa: E731
BEFORE_PLAY = [
    (lambda: own(obs_shape=(5, 3)), r"spec.obs_shape=(5, 3) must be (O,) for vectors or (H, W, C) for images"),
    (lambda: own(obs_shape=()), "spec.obs_shape=() must be (O,) for vectors"),
    (lambda: own(obs_shape=(2, 5, 5, 3)), "spec.obs_shape=(2, 5, 5, 3) must be (O,)"),
    (lambda: own(obs_shape=(0,)), "spec.obs_shape=(0,) must be (O,) for vectors or (H, W, C) for images, of positive"),
    (lambda: own(state_shape=(4, 4)), "spec.state_shape=(4, 4) must be (S,) for vectors"),
    (
        lambda: own(obs=lambda t: {"agents": views}),
        "obs.agents as dict; it must be one array of shape (2, 2): jmarl.env",
    ),
    (lambda: own(action_sizes=(3, 9)), "spec.action_sizes=(3, 9) must be between 1 and num_actions=3"),
    (lambda: own(action_sizes=(0, 3)), "spec.action_sizes=(0, 3) must be between 1 and num_actions=3"),
    (lambda: continuous(action_sizes=(1, 2)), "spec.action_sizes=(1, 2) must be between 1 and action_size=1"),
    (lambda: own(obs_sizes=(2, 7)), "spec.obs_sizes=(2, 7) must be between 1 and obs_shape[-1]=2"),
    (lambda: own(obs_shape=(4, 4, 2), obs_sizes=(2, 2)), "spec.obs_sizes=(2, 2) must be () for images"),
    (lambda: own(num_actions=0), "spec.num_actions=0 must be at least 1"),
    (lambda: own(min_steps=0), "1 <= min_steps <= max_steps, not min_steps=0 and max_steps=5"),
    (lambda: own(max_steps=0), "1 <= min_steps <= max_steps, not min_steps=1 and max_steps=0"),
    (lambda: own(min_steps=6), "1 <= min_steps <= max_steps, not min_steps=6 and max_steps=5"),
    (lambda: told(won=jnp.ones(2)), "info['won'] as float32[2]; it must be one number"),
    (lambda: told(foe={"lives": jnp.ones((2, 1))}), "info['foe/lives'] as float32[2, 1]; it must be one number"),
    (lambda: told(won=[jnp.int32(1)]), "info['won'] as list; it must be one number"),
    (lambda: told(won=[jnp.int32(1), jnp.int32(2)]), "two are the same, or one is a list"),
    (lambda: told(**{"foe/lives": jnp.int32(1), "foe": {"lives": jnp.int32(2)}}), "two are the same, or one is a list"),
    (lambda: told(key=jax.random.key(0)), "info['key'] as key<fry>[]; it must be one number"),
    (lambda: own(outcome=lambda t: {"info": jnp.ones(())}), "info as ShapeDtypeStruct; it must be a dict by name"),
]


@pytest.mark.parametrize(("make", "message"), BEFORE_PLAY, ids=[message for _, message in BEFORE_PLAY])
def test_what_is_wrong_is_said_without_running_it(make, message):
    with pytest.raises((TypeError, ValueError), match=f"^own: .*{re.escape(message)}") as error:
        envs.check_env(make())
    assert "\n" not in str(error.value)


def test_numbers_of_any_kind_are_info():
    info = {"won": jnp.bool_(True), "kills": jnp.int8(3), "foe": {"lives": jnp.float16(0.5), "x": {"y": jnp.uint32(1)}}}
    envs.check_env(told(**info), play=True)


def here(*is_here):
    return {"agent_mask": jnp.stack([jnp.asarray(x, bool) for x in is_here])}


def legal(*rows):
    return {"action_mask": jnp.array(rows, bool)}


def nan_after(t, when, shape):
    return jnp.full(shape, jnp.where(t == when, jnp.nan, 1.0), jnp.float32)


IN_PLAY = [
    (
        lambda: own(state_is_views=True, state_shape=(4,), obs=lambda t: {"state": jnp.ones(4)}),
        "after reset obs.state is not all views joined, but spec.state_is_views=True: leave it out",
    ),
    (
        lambda: own(action_sizes=(3, 1), obs=lambda t: legal([1, 1, 1], [1, 0, 1])),
        "after reset action 2 of b is legal, and it has only 1: obs.action_mask must be False for padding",
    ),
    (
        lambda: own(obs=lambda t: {"action_mask": jnp.stack([jnp.full(3, True), jnp.full(3, t != 2)])}),
        "after step 2 b acts and has no legal action",
    ),
    (lambda: own(length=6), "has not ended on step 5, which is spec.max_steps"),
    (lambda: own(length=4, min_steps=5), "ended on step 4, before spec.min_steps=5"),
    (lambda: own(outcome=lambda t: {"reward": nan_after(t, 2, 2)}), "step 3 pays {'a': nan, 'b': nan}; every reward"),
    (
        lambda: own(outcome=lambda t: {"reward": jnp.full(2, jnp.float32(jnp.inf))}),
        "step 1 pays {'a': inf, 'b': inf}; every reward",
    ),
    (lambda: own(obs=lambda t: {"agents": nan_after(t, 3, (2, 2))}), "after step 3 the view of a, which acts, is not"),
    (
        lambda: own(obs=lambda t: {"agents": nan_after(t, 5, (2, 2))}),
        "after the last step, 5, the view of a, which acts",
    ),
    (lambda: own(obs=lambda t: {"state": nan_after(t, 1, 2)}), "after step 1 obs.state is not finite everywhere"),
    (
        lambda: own(outcome=lambda t: {"terminated": jnp.array([False, True])}),
        "b acted and was terminated on 3 steps in a row, up to step 3: once its return has ended for good",
    ),
    (lambda: continuous(length=6), "has not ended on step 5"),
]


@pytest.mark.parametrize(("make", "message"), IN_PLAY, ids=[message for _, message in IN_PLAY])
def test_what_is_wrong_is_said_when_it_is_played(make, message):
    env = envs.check_env(make())  # not to be seen in shapes
    with pytest.raises(ValueError, match=f"^own: .*{re.escape(message)}") as error:
        envs.check_env(env, play=True)
    assert "\n" not in str(error.value)


def test_an_episode_without_a_limit_is_given_up(monkeypatch):
    assert checks._MOST_STEPS == 10_000
    monkeypatch.setattr(checks, "_MOST_STEPS", 20)
    with pytest.raises(ValueError, match=r"has not ended on step 20\.$"):
        envs.check_env(own(length=30, max_steps=None), play=True)


def test_what_is_right_passes_in_play():
    absent = jnp.array([[1.0, 1.0], [jnp.nan, jnp.nan]])
    envs.check_env(own(obs=lambda t: {"agents": absent, **here(True, False)}), play=True)  # nobody reads it
    envs.check_env(own(obs=lambda t: here(True, False) | legal([1, 1, 1], [0, 0, 0])), play=True)  # it does not act
    dies = own(obs=lambda t: here(True, t < 2), outcome=lambda t: {"terminated": jnp.stack([t == 4, t >= 1])})
    envs.check_env(dies, play=True)
    respawns = own(obs=lambda t: here(True, t != 2), outcome=lambda t: {"terminated": jnp.stack([t == 4, t == 1])})
    envs.check_env(respawns, play=True)
    unlucky = own(outcome=lambda t: {"terminated": jnp.stack([t == 4, (t == 1) | (t == 2)])})
    envs.check_env(unlucky, play=True)
    assert envs.check_env(continuous(), play=True, key=jax.random.PRNGKey(3)).spec.action_size == 1


@pytest.mark.parametrize("make", [envs.two_step_game, lambda: envs.matrix_game(np.eye(3)), lambda: envs.make("hanabi")])
def test_given_environments_pass_in_play(make):
    env = make()
    assert envs.check_env(env, play=True) is env
