"""Greedy evaluation: what counts, what is cut off, who plays, and under which names."""

import doctest

import compiled
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_env_flags import enable_x64, strict

import jmarl
from jmarl import envs, evaluation
from jmarl.types import Env, EnvSpec, Outcome, zero_observation

SPEC = EnvSpec(name="drift", agents=("a",), obs_shape=(1,), state_shape=(1,), num_actions=2)


def endless(max_steps):
    """1 a step; half of the environments end after 3 steps, the others never."""

    def reset(key):
        return (jnp.int32(0), jax.random.bernoulli(key)), zero_observation(SPEC)

    def step(state, action, key):
        time, ends = state[0] + 1, state[1]
        last = ends & (time == 3)
        outcome = Outcome(reward=jnp.ones(1), terminated=last[None], last=last, info={"mark": jnp.float32(5.0)})
        return (time, ends), zero_observation(SPEC), outcome

    return Env(reset, step, SPEC._replace(max_steps=max_steps))


def play(env, **options):
    learner = jmarl.random_policy(env.spec, jmarl.RandomConfig())
    state = compiled.init(learner, jax.random.key(0))
    return compiled.evaluate(env, learner, state, jax.random.key(1), num_episodes=32, **options)


def test_episodes_that_never_end_are_cut_off_at_the_specs_limit():
    metrics = play(endless(10))
    num_cut = (float(metrics["eval/episode_length"]) - 3.0) / 7.0
    assert 0 < num_cut < 1 and (num_cut * 32) % 1 == pytest.approx(0, abs=1e-4)
    np.testing.assert_allclose(metrics["eval/return_sum"], metrics["eval/episode_length"])
    assert metrics["eval/mark"] == 5.0  # of those that ended


def test_without_an_end_in_sight_a_limit_is_asked_for():
    with pytest.raises(ValueError, match=r"max_steps=None must be at least 1, .* spec of drift"):
        play(endless(None))
    with pytest.raises(ValueError, match="max_steps=-3 must be at least 1"):
        play(endless(None), max_steps=-3)
    assert jnp.isnan(play(endless(None), max_steps=2)["eval/mark"])  # nothing has ended


def test_teams_must_be_of_the_environments_agents():
    env = envs.probe("action", num_agents=3)
    random = jmarl.random_policy(env.spec, jmarl.RandomConfig())
    match = evaluation.teams([random, random], [[0], [1]])
    with pytest.raises(ValueError, match=r"members=\[\[0\], \[1\]\] must name every agent once, and there are 3"):
        evaluation.evaluate(env, match, match.init(jax.random.key(0)), jax.random.key(1), num_episodes=2)


# ------------------------------------------------------------------------------------------------- names of the info


def telling(info, length=3):
    """1 a step for each of two agents; `info(t)` is told at time t."""
    spec = SPEC._replace(agents=("a", "b"), max_steps=length, min_steps=length)

    def step(time, action, key):
        last = time == length - 1
        outcome = Outcome(reward=jnp.ones(2), terminated=jnp.full(2, last), last=last, info=info(time))
        return time + 1, zero_observation(spec), outcome

    return Env(lambda key: (jnp.int32(0), zero_observation(spec)), step, spec)


def test_an_environments_info_never_replaces_what_is_measured():
    names = ("return_sum", "return_mean", "episode_length", "return/a", "return/c", "info/return_sum", "lives")
    metrics = play(telling(lambda t: {name: jnp.float32(-99.0) for name in names}))
    measured = {name: metrics.pop(f"eval/{name}") for name in ("return_sum", "return_mean", "episode_length")}
    assert measured == {"return_sum": 6, "return_mean": 3, "episode_length": 3}
    assert metrics.pop("eval/return/a") == 3 and metrics.pop("eval/return/b") == 3
    moved = {f"eval/info/{name}" for name in names if name != "lives"}
    assert set(metrics) == moved | {"eval/lives"} and all(x == -99 for x in metrics.values())


def test_scalars_of_every_kind_reach_the_metrics_by_their_path():
    info = {"won": jnp.bool_(True), "foe": {"lives": jnp.int8(3), "gone": {"by": jnp.float16(0.5)}}}
    metrics = play(telling(lambda t: info | {"time": t}))
    told = {name: x for name, x in metrics.items() if name.split("/")[1] in ("won", "foe", "time")}
    assert told == {"eval/won": 1, "eval/foe/lives": 3, "eval/foe/gone/by": 0.5, "eval/time": 2}
    assert all(x.dtype == jnp.float32 for x in told.values())


def test_training_names_and_casts_what_an_environment_tells_alike():
    env = telling(lambda t: {"return_sum": jnp.int32(-99), "won": t == 2, "foe": {"lives": jnp.int8(3)}})
    learner = jmarl.random_policy(env.spec, jmarl.RandomConfig())
    run = compiled.start(env, learner, jax.random.key(0), num_envs=2)
    metrics = compiled.rollout(env, learner, run, length=6)[2]
    told = {name: float(x) for name, x in metrics.items() if name.startswith("train/")}
    assert told.pop("train/return_sum") == 6 and told.pop("train/episode_length") == 3
    assert told == {"train/return_mean": 3, "train/info/return_sum": -99, "train/won": 1, "train/foe/lives": 3}


def test_the_rule_of_names_is_the_same_under_any_prefix():
    info = {"a": 1, "return": {"a": 2}, "returns": 3, "info": 4}
    expected = {"train/a": 1, "train/info/return/a": 2, "train/returns": 3, "train/info/info": 4}
    assert evaluation.info_metrics("train/", info) == expected


# ------------------------------------------------------------------------------------------ numbers that are not finite


def value_learner(spec):
    return jmarl.iql(spec, jmarl.QConfig(hidden_sizes=(4,)))


def damaged(state, number=jnp.nan):
    """The state with one parameter that is not finite."""
    leaves, structure = jax.tree.flatten(state.params)
    leaves[-1] = leaves[-1].at[..., 0].set(number)
    return state.replace(params=jax.tree.unflatten(structure, leaves))


@pytest.mark.parametrize("number", [jnp.nan, jnp.inf])
def test_parameters_that_are_not_finite_score_nan(number):
    env = telling(lambda t: {"won": jnp.bool_(True)})
    learner = value_learner(env.spec)
    state, key = compiled.init(learner, jax.random.key(0)), jax.random.key(1)
    score = jax.jit(lambda state: evaluation.evaluate(env, learner, state, key, num_episodes=2))
    assert all(jnp.isfinite(x) for x in score(state).values())
    assert all(jnp.isnan(x) for x in score(damaged(state, number)).values())


def test_a_team_with_parameters_that_are_not_finite_scores_nan():
    env = telling(lambda t: {})
    random = jmarl.random_policy(env.spec, jmarl.RandomConfig())
    match = evaluation.teams([random, value_learner(env.spec)], [[0], [1]])
    first, second = compiled.init(match, jax.random.key(0))
    key = jax.random.key(1)
    assert compiled.evaluate(env, match, (first, second), key, num_episodes=2)["eval/return_sum"] == 6
    metrics = compiled.evaluate(env, match, (first, damaged(second)), key, num_episodes=2)
    assert all(jnp.isnan(x) for x in metrics.values())


def test_a_healthy_evaluation_runs_under_jaxs_search_for_nan():
    with jax.debug_nans(True):
        for env in (telling(lambda t: {"won": jnp.int32(1)}), endless(4)):
            assert all(jnp.isfinite(x) for x in play(env).values())


def test_info_that_is_nan_is_left_out():
    def step_info(t):
        return {"arrived_at": jnp.float32(jnp.nan), "won": jnp.int32(2)}

    metrics = play(telling(step_info))
    assert jnp.isnan(metrics["eval/arrived_at"]) and metrics["eval/won"] == 2


def test_the_view_of_an_agent_that_is_not_there_yet_is_not_remembered():
    """It comes at t = 2; a recurrent network that had read its NaN would choose action 0 for ever."""
    spec = EnvSpec(name="late", agents=("a",), obs_shape=(1,), state_shape=(1,), num_actions=2, max_steps=4)

    def observe(t):
        is_here = t >= 2
        view = jnp.where(is_here, 1.0, jnp.nan).astype(jnp.float32)[None, None]
        return zero_observation(spec).replace(agents=view, agent_mask=is_here[None])

    def step(t, action, key):
        outcome = Outcome(reward=action.astype(jnp.float32), terminated=jnp.full(1, t == 3), last=t == 3)
        return t + 1, observe(t + 1), outcome

    def greedy(state, carry, obs, first):  # it remembers what it saw, and answers 1 if that is a number
        carry = jnp.where(first, 0.0, carry) + obs.agents[:, 0, 0]
        return jnp.isfinite(carry).astype(jnp.int32)[:, None], carry

    learner = jmarl.random_policy(spec, jmarl.RandomConfig())
    learner = learner._replace(greedy=greedy, init_carry=lambda shape: jnp.zeros(shape))
    env = Env(lambda key: (jnp.int32(0), observe(jnp.int32(0))), step, spec)
    state = compiled.init(learner, jax.random.key(0))
    assert compiled.evaluate(env, learner, state, jax.random.key(1), num_episodes=2)["eval/return_sum"] == 4


@pytest.mark.parametrize("flags", [enable_x64, strict])
def test_an_evaluation_runs_under_jaxs_strict_flags(flags):
    learner = jmarl.random_policy(SPEC, jmarl.RandomConfig())
    learner = learner._replace(greedy=lambda state, carry, obs, first: (jnp.zeros((len(first), 2), jnp.int32), carry))
    env = telling(lambda t: {"won": t == 2})
    state = compiled.init(learner, jax.random.key(0))
    usual = compiled.evaluate(env, learner, state, jax.random.key(1), num_episodes=3)
    with flags():
        env = telling(lambda t: {"won": t == 2})
        assert compiled.evaluate(env, learner, state, jax.random.key(1), num_episodes=3) == usual


def test_older_keys_play_the_same_episodes():
    env = envs.probe("observation")

    def reset(key):
        assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        return envs.probe("observation").reset(key)

    env = env._replace(reset=reset)
    learner = jmarl.random_policy(env.spec, jmarl.RandomConfig())
    state = compiled.init(learner, jax.random.key(0))
    scores = [
        evaluation.evaluate(env, learner, state, key, num_episodes=9)["eval/return_sum"]
        for key in (jax.random.key(4), jax.random.PRNGKey(4))
    ]
    assert scores[0] == scores[1]


def test_examples_in_docstrings_run():
    failed, attempted = doctest.testmod(evaluation)
    assert attempted and not failed


def test_states_of_several_seeds_play_side_by_side():
    loop = jmarl.on_policy(envs.probe("action"), jmarl.ippo, num_envs=4, rollout_length=4)
    cfg = jmarl.PPOConfig(hidden_sizes=(4,))
    run = jmarl.run(loop, jax.random.key(0), cfg, num_iterations=2, num_seeds=3)
    learner = jmarl.ippo(loop.env.spec, cfg)
    key = jax.random.key(1)
    together = compiled.evaluate(loop.env, learner, run.train_state, key, num_episodes=4)
    for seed, own_key in enumerate(jax.random.split(key, 3)):
        state = jmarl.checkpoint.take_seed(run.train_state, seed)
        alone = compiled.evaluate(loop.env, learner, state, own_key, num_episodes=4)
        assert {name: float(x[seed]) for name, x in together.items()} == {name: float(x) for name, x in alone.items()}
