"""Environments in Python: what compiled rollouts make of them, runs and resumes, Gymnasium, PettingZoo."""

import doctest
import subprocess
import sys
import warnings

import compiled
import failing
import gymnasium
import gymnax  # noqa: F401  which imports Gymnasium itself
import jax
import jax.numpy as jnp
import numpy as np
import pettingzoo
import pytest
from gymnasium import spaces
from pettingzoo.utils.wrappers import BaseParallelWrapper

import jmarl
from jmarl import envs
from jmarl.cli import lists, own, train
from jmarl.envs import HostStep, Seen, gymnasium_adapter, host, pettingzoo_adapter
from jmarl.envs.workers import Process, Workers
from jmarl.types import EnvSpec

TINY = jmarl.PPOConfig(hidden_sizes=(4,), num_minibatches=1, num_epochs=1)


class Count:
    """Two agents see their episode's length, its number and the time. The episode ends after 1 to 4 steps.

    Its odd episodes terminate, its even ones truncate.
    """

    spec = EnvSpec(name="count", agents=("ann", "bob"), obs_shape=(3,), state_shape=(6,), num_actions=3, max_steps=4)
    info = ("length",)
    made, steps, closed = 0, 0, 0

    def __init__(self):
        type(self).made += 1
        self.episode, self.views = 0, np.zeros((2, 3), np.float32)

    def reset(self, seed):
        self.time, self.length, self.episode = 0, seed % 4 + 1, self.episode + 1
        return self.seen()

    def seen(self):
        self.views[:] = self.length, self.episode, self.time  # one array for all steps, as many environments have
        return Seen(self.views)

    def step(self, action):
        type(self).steps += 1
        self.time += 1
        last = self.time == self.length
        terminated = last and self.episode % 2 == 1
        return HostStep(self.seen(), action * [1.0, 10.0], terminated, last, {"length": self.length})

    def close(self):
        type(self).closed += 1


def fresh(base=Count):
    """A class of its own, whose counts begin at 0."""
    return type("Fresh", (base,), {"made": 0, "steps": 0, "closed": 0})


def test_a_rollout_has_true_successors_and_goes_on_with_the_next_episode():
    env = envs.check_env(envs.from_host(fresh()), play=True)
    learner = jmarl.random_policy(env.spec, jmarl.RandomConfig())
    run = jax.jit(lambda key: jmarl.training.start(env, learner, key, num_envs=3))(jax.random.key(0))
    roll = jax.jit(lambda run: jmarl.training.rollout(env, learner, run, length=9))
    for _ in range(2):  # the second one goes on where the first one stopped
        run, batch, measured = roll(run)
        steps = batch.steps
        length, episode, time = np.moveaxis(np.asarray(steps.obs.agents[:, :, 0]), -1, 0)
        next_length, next_episode, next_time = np.moveaxis(np.asarray(steps.next_obs.agents[:, :, 0]), -1, 0)
        np.testing.assert_array_equal(next_time, time + 1)
        np.testing.assert_array_equal([next_length, next_episode], [length, episode])
        np.testing.assert_array_equal(steps.last, next_time == length)
        np.testing.assert_array_equal(steps.first, time == 0)
        np.testing.assert_array_equal(steps.terminated[..., 0], steps.last & (episode % 2 == 1))
        np.testing.assert_array_equal(episode[1:], episode[:-1] + steps.last[:-1])
        np.testing.assert_array_equal(steps.reward, steps.action * np.array([1.0, 10.0]))
        np.testing.assert_allclose(measured["train/length"], length[steps.last].mean(), rtol=1e-6)
    assert len({tuple(row) for row in length.T.tolist()}) > 1  # each environment has a seed of its own


def test_it_is_the_same_where_callbacks_go_through_jax(monkeypatch):
    def played():
        env = envs.from_host(Count)
        learner = jmarl.random_policy(env.spec, jmarl.RandomConfig())
        run = jmarl.training.start(env, learner, jax.random.key(0), num_envs=3)
        return jax.jit(lambda run: jmarl.rollout(env, learner, run, length=6)[1].steps)(run)

    in_place = played()
    monkeypatch.setattr(host, "buffer_callback", None)  # as on a GPU
    jax.tree.map(np.testing.assert_array_equal, in_place, played())


def test_ids_and_time_limits_are_those_of_every_environment():
    env = envs.from_host(fresh(), agent_ids=True, time_limit="terminal")
    assert env.spec.obs_shape == (5,) and env.spec.has_ids
    state, obs = env.reset(jax.random.key(0))
    for _ in range(2):  # the second episode would be truncated
        for _ in range(int(obs.agents[0, 2])):
            state, obs, outcome = env.step(state, jnp.zeros(2, int), jax.random.key(0))
        assert outcome.last and outcome.terminated.all()
        state, obs = env.restart(state)
        assert obs.agents[:, :2].tolist() == [[1, 0], [0, 1]] and obs.agents[0, 4] == 0
    with pytest.raises(ValueError, match=r"time_limit='never' is not one of \('truncated', 'terminal'\)"):
        envs.from_host(fresh(), time_limit="never")


def test_continuous_actions_stay_within_their_bounds():
    class Push(Count):
        spec = Count.spec._replace(num_actions=None, action_size=1, action_low=((-1,), (0,)), action_high=((1,), (2,)))

        def step(self, action):
            return super().step(action[:, 0])

    env = envs.check_env(envs.from_host(Push), play=True)
    _, _, outcome = env.step(env.reset(jax.random.key(0))[0], jnp.array([[-5.0], [5.0]]), jax.random.key(0))
    assert outcome.reward.tolist() == [-1.0, 20.0]


def test_an_evaluation_counts_each_episode_once_and_gives_its_environments_back():
    kind = fresh()
    env = envs.from_host(kind)
    learner = jmarl.random_policy(env.spec, jmarl.RandomConfig())
    state = compiled.init(learner, jax.random.key(0))
    play = jax.jit(lambda key: jmarl.evaluate(env, learner, state, key, num_episodes=5))
    for i in range(3):
        before = kind.steps
        metrics = play(jax.random.key(i))
        assert kind.steps - before == round(5 * float(metrics["eval/episode_length"]))  # none goes on after its end
        np.testing.assert_allclose(metrics["eval/length"], metrics["eval/episode_length"], rtol=1e-6)
    assert kind.made == 5


def test_a_step_is_taken_once_and_none_from_the_past():
    kind = fresh()
    env = envs.from_host(kind)
    state, _ = env.reset(jax.random.key(1))
    answers = [env.step(state, jnp.zeros(2, int), jax.random.key(0)) for _ in range(2)]
    assert kind.steps == 1
    jax.tree.map(np.testing.assert_array_equal, *answers)
    env.step(answers[0][0], jnp.zeros(2, int), jax.random.key(0))
    with (
        pytest.raises(
            RuntimeError, match=r"^count raised RuntimeError: it is at step 2 and was asked to go on from step 0"
        ),
        host.failures_named(env),
    ):
        env.step(state, jnp.zeros(2, int), jax.random.key(0))


def test_environments_are_closed_with_what_made_them():
    kind = fresh()
    env = envs.from_host(kind)
    jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 3))
    env.unwrapped.close()
    assert kind.made == kind.closed == 3


def run(env, folder=None, num_iterations=4, resume=False, **options):
    """What it measured, and the last state."""
    loop = jmarl.on_policy(env, jmarl.ippo, num_envs=2, rollout_length=4)
    if folder is not None:
        options["checkpoint"] = jmarl.Checkpointing(folder, 0, resume=resume)
    history = jmarl.logging.memory()
    state = jmarl.run(
        loop,
        jax.random.key(0),
        TINY,
        num_iterations=num_iterations,
        iterations_per_chunk=1,
        num_seeds=2,
        evaluation=jmarl.Evaluation(2, 2),
        sinks=[history],
        **options,
    )
    return history.metrics, state


def test_a_run_is_resumed_with_what_it_learnt_and_new_episodes(tmp_path, capsys):
    kind = fresh()
    whole, state = run(envs.from_host(kind))
    assert kind.made == 2 * 2 + 2 * 2  # of two seeds, in training and in evaluation
    begun, _ = run(envs.from_host(fresh()), tmp_path / "a", callback=lambda env_steps, *_: env_steps >= 16)
    for name, values in begun.items():  # the same seed, the same run
        np.testing.assert_array_equal(values, whole[name][:2])
    capsys.readouterr()
    later, resumed = run(envs.from_host(fresh()), tmp_path / "a", resume=True)
    assert "count is not in the checkpoint: the episodes that were under way begin anew" in capsys.readouterr().out
    assert resumed.train_state.env_steps.tolist() == state.train_state.env_steps.tolist() == [32, 32]
    assert resumed.train_state.step.tolist() == state.train_state.step.tolist()
    assert len(later["train/return_sum"]) == 2 and np.isfinite(later["train/return_sum"]).all()


class Broken(Count):
    def step(self, action):
        if self.time == 0:
            raise ZeroDivisionError("the wheel came off")
        return super().step(action)


def test_what_an_environment_raises_ends_a_run_in_its_own_words(caplog):
    with pytest.raises(RuntimeError, match=r"^count raised ZeroDivisionError: the wheel came off$") as raised:
        run(envs.from_host(Broken))
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert not caplog.records  # jax would show the traceback once more


def test_a_view_of_another_shape_is_named():
    class Wide(Count):
        def seen(self):
            return Seen(np.zeros((2, 4)))

    with pytest.raises(Exception, match=r"it shows agents \(2, 4\), and its spec asks for \(2, 3\)"):
        envs.from_host(Wide).reset(jax.random.key(0))


def test_masks_and_states_are_passed_on():
    class Masked(Count):
        spec = Count.spec._replace(state_shape=(1,), action_sizes=(3, 2), may_wait=True)

        def seen(self):
            turn = self.time % 2
            mask = None if self.time else [[True, False, True], [True, True, False]]
            return super().seen()._replace(state=[self.time], action_mask=mask, agent_mask=[turn == 0, turn == 1])

    env = envs.check_env(envs.from_host(Masked), play=True)
    state, obs = env.reset(jax.random.key(1))
    assert obs.action_mask.tolist() == [[True, False, True], [True, True, False]]
    assert obs.agent_mask.tolist() == [True, False]
    _, obs, _ = env.step(state, jnp.zeros(2, int), jax.random.key(0))
    assert obs.action_mask.tolist() == [[True] * 3, [True, True, False]]
    assert obs.agent_mask.tolist() == [False, True] and obs.state.tolist() == [1]


# -------------------------------------------------------------------------------------------------------------- workers


def test_processes_that_die_or_hang_are_replaced_and_what_they_raise_is_told(capsys):
    import cloudpickle

    cloudpickle.register_pickle_by_value(failing)  # tests are much to import
    workers = failing.require_that_the_lost_are_replaced(Process, capsys)
    assert not any(worker._process.is_alive() for worker in workers._workers)


UNGUARDED = """
import jax
import jmarl
env = jmarl.make("gymnasium:CartPole-v1", workers=2)
loop = jmarl.on_policy(env, jmarl.random_policy, num_envs=2, rollout_length=4)
jmarl.run(loop, jax.random.key(0), jmarl.RandomConfig(), num_iterations=2)
"""


def test_a_script_that_begins_workers_as_it_is_imported_is_told_so_once(tmp_path):
    (tmp_path / "script.py").write_text(UNGUARDED)
    ran = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True)
    assert ran.returncode == 1 and "replaced" not in ran.stdout
    *_, last = ran.stderr.strip().splitlines()
    assert last.startswith("RuntimeError: gymnasium:CartPole-v1 raised RuntimeError: workers import the script")
    assert ran.stderr.count("put what it runs under") == 2  # the exception, and that it was raised from


def test_workers_that_do_not_fit_are_refused_or_told_of(capsys):
    for options, words in (
        ({"workers": 2, "on": "raay"}, r"^on='raay' is not one of \('processes', 'ray'\)\.$"),
        ({"on": "ray"}, r"^on='ray' is about workers, and there are none: say how many, workers=4\.$"),
        ({"workers": -1}, r"^workers=-1 must not be negative"),
    ):
        with pytest.raises(ValueError, match=words):
            envs.from_host(Count, **options)
    workers = Workers(Count, 3, 60.0, lambda make: None)
    workers._ask = lambda method, numbers, *_: [None] * len(numbers)
    with pytest.raises(RuntimeError, match=r"^3 workers one after the other were lost when they were to begin"):
        workers.reset([0, 1], [0, 0])
    assert capsys.readouterr().out == "workers=3 for 2 environments of count: 1 of them will have nothing to do.\n"


def test_ray_is_asked_for_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"^on='ray' needs Ray: pip install \"jmarl\[ray\]\"\.$"):
        envs.from_host(Count, workers=2, on="ray")


# ------------------------------------------------------------------------------------------------------------ Gymnasium


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_it_is_gymnasiums_environment(name):
    env, other = jmarl.make(f"gymnasium:{name}", max_episode_steps=12), gymnasium.make(name, max_episode_steps=12)
    assert env.spec.num_agents == 1 and env.spec.max_steps == 12 and env.spec.is_discrete == (name == "CartPole-v1")
    state, obs = env.reset(jax.random.key(0))
    seed = jax.random.bits(jax.random.key(0), dtype=jnp.uint32)
    seeds = np.random.default_rng(int(seed))
    view, _ = other.reset(seed=int(seeds.integers(2**31)))
    step = jax.jit(env.step)
    for t in range(12):
        np.testing.assert_allclose(obs.agents[0], view, rtol=1e-6)
        np.testing.assert_array_equal(obs.state, obs.agents[0])
        action = np.array([t % 2]) if env.spec.is_discrete else np.array([[5.0 * (-1) ** t]])  # beyond the bounds
        state, obs, outcome = step(state, action, jax.random.key(0))
        action = int(action[0]) if env.spec.is_discrete else np.clip(action[0], -2, 2)
        view, reward, terminated, truncated, _ = other.step(action)
        np.testing.assert_allclose(outcome.reward[0], reward, rtol=1e-5)
        assert bool(outcome.terminated[0]) == terminated and bool(outcome.last) == (terminated or truncated)
        if outcome.last:
            break
    assert outcome.last
    np.testing.assert_allclose(obs.agents[0], view, rtol=1e-6)


class Odd(gymnasium.Env):
    """Every kind of space."""

    observation_space = spaces.Dict(
        {
            "where": spaces.Box(-1, 1, (2, 2)),
            "both": spaces.Tuple((spaces.Discrete(2), spaces.MultiBinary(2))),
            "kind": spaces.MultiDiscrete([2, 3]),
        }
    )
    action_space = spaces.MultiDiscrete([2, 3])

    def __init__(self, observation_space=None, action_space=None):
        self.observation_space = observation_space or self.observation_space
        self.action_space = action_space or self.action_space

    def view(self):
        return {"where": np.array([[1, 2], [3, 4]]) / 4, "both": (1, np.array([1, 0])), "kind": np.array([0, 2])}

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return self.view(), {"action_mask": np.array([1, 0, 1, 0, 0, 0], np.int8)}

    def step(self, action):
        self.time += 1
        return self.view(), float(action[0] * 10 + action[1]), False, self.time == 3, {}


def test_spaces_are_flattened_in_the_documented_order():
    single = gymnasium_adapter.Single(Odd(), "odd")
    seen = single.reset(0)
    both, kind, where = [0, 1, 1, 0], [1, 0, 0, 0, 1], [0.25, 0.5, 0.75, 1.0]  # names in alphabetical order
    assert seen.agents.tolist() == [both + kind + where] and single.spec.obs_shape == (13,)
    assert seen.action_mask.tolist() == [[True, False, True, False, False, False]]
    assert single.spec.num_actions == 6 and single.spec.max_steps is None
    assert [single.step(np.array([a])).reward for a in range(6)] == [0, 1, 2, 10, 11, 12]


def test_images_stay_images_unless_they_are_to_be_flat():
    images = spaces.Box(0, 255, (4, 5, 3), np.uint8)
    for flatten, shape in ((False, (4, 5, 3)), (True, (60,))):
        single = gymnasium_adapter.Single(Odd(images, spaces.Discrete(3, start=5)), "odd", flatten=flatten)
        assert single.spec.obs_shape == single.spec.state_shape == shape
        assert single._decode(np.int32(2)) == 7


REFUSED = [
    (
        lambda: jmarl.make("gymnasium:CartPoll-v1"),
        ValueError,
        "gymnasium:CartPoll-v1: Environment `CartPoll` doesn't exist",
    ),
    (
        lambda: gymnasium_adapter.Single(Odd(action_space=spaces.Box(-np.inf, np.inf, (2,))), "odd"),
        ValueError,
        r"odd has the action space Box.*: jmarl knows Discrete, MultiDiscrete and bounded Box ones",
    ),
    (
        lambda: gymnasium_adapter.Single(Odd(action_space=spaces.MultiDiscrete([100, 100])), "odd"),
        ValueError,
        "odd has 10000 combinations of actions, .*: jmarl takes up to 4096",
    ),
    (
        lambda: gymnasium_adapter.Single(Odd(spaces.Sequence(spaces.Discrete(2))), "odd"),
        ValueError,
        "odd has the observation space Sequence.*, which has no fixed size",
    ),
    (
        lambda: jmarl.make("pettingzoo:mpe2.simple_spred_v3"),
        ValueError,
        "pettingzoo:mpe2.simple_spred_v3 names no module: python finds no mpe2.simple_spred_v3",
    ),
    (lambda: jmarl.make("pettingzoo:json"), ValueError, "pettingzoo:json makes no environment: json has neither"),
    (
        lambda: jmarl.make("pettingzoo:nowhere.at_all"),
        ImportError,
        "pettingzoo:nowhere.at_all needs nowhere, which is not installed",
    ),
]


@pytest.mark.parametrize(("make", "error", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_what_is_not_understood_is_refused_in_a_sentence(make, error, message):
    with pytest.raises(error, match=message) as raised:
        make()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("package", "name", "install"),
    [("gymnasium", "CartPole-v1", "Gymnasium"), ("pettingzoo", "mpe2.simple_spread_v3", "PettingZoo")],
)
def test_without_a_package_it_is_said_what_to_install(package, name, install, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, "mpe2", None)
    sentence = rf'^{package}:{name} needs {install}: pip install "jmarl\[{package}\]"\.$'
    with pytest.raises(ImportError, match=sentence):
        jmarl.make(f"{package}:{name}")
    lists.list_envs()
    assert f'not installed: pip install "jmarl[{package}]"\n' in capsys.readouterr().out


# ---------------------------------------------------------------------------------- Gymnasium, one space for each agent


@pytest.mark.parametrize(
    "name", ["lbforaging:Foraging-5x5-2p-1f-v3", "rware:rware-tiny-2ag-easy-v2"], ids=["lbforaging", "rware"]
)
def test_a_tuple_of_spaces_is_one_for_each_agent(name):
    options = {"max_episode_steps" if "Foraging" in name else "max_steps": 9}  # Gymnasium's limit, and its own
    env = envs.check_env(jmarl.make(f"gymnasium:{name}", **options), play=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = gymnasium.make(name, disable_env_checker=True, **options)
    assert env.spec.agents == ("agent_0", "agent_1") and env.spec.max_steps == 9 and not env.spec.teams
    assert jmarl.presets.for_environment("mappo", f"gymnasium:{name}").env_kwargs == {"agent_ids": True}
    state, obs = env.reset(jax.random.key(0))
    seeds = np.random.default_rng(int(jax.random.bits(jax.random.key(0), dtype=jnp.uint32)))
    views, _ = other.reset(seed=int(seeds.integers(2**31)))
    step, chance = jax.jit(env.step), np.random.default_rng(3)
    for _ in range(9):
        np.testing.assert_allclose(obs.agents, views, rtol=1e-6)
        np.testing.assert_array_equal(obs.state, np.concatenate(views))
        action = chance.integers(env.spec.num_actions, size=2)
        state, obs, outcome = step(state, action, jax.random.key(0))
        views, reward, terminated, truncated, _ = other.step(tuple(action))
        np.testing.assert_allclose(outcome.reward, reward, rtol=1e-6)
        assert outcome.terminated.tolist() == [terminated] * 2 and bool(outcome.last) == (terminated or truncated)
        if outcome.last:
            break
    assert outcome.last
    np.testing.assert_allclose(obs.agents, views, rtol=1e-6)


class Couple(gymnasium.Env):
    """Two agents with views and actions of two sizes. The first one terminates at time 2, all is truncated at 3."""

    observation_space = spaces.Tuple((spaces.Box(0, 9, (1,)), spaces.Box(0, 9, (2,))))
    action_space = spaces.Tuple((spaces.Discrete(2), spaces.Discrete(3)))
    max_steps = 3

    def views(self):
        return (np.full(1, self.time, np.float32), np.full(2, self.time, np.float32))

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return self.views(), {"action_mask": [[1, 1], [0, 1, 1]]}

    def step(self, action):
        self.time += 1
        terminated, truncated = [self.time == 2, False], self.time == 3
        return self.views(), [float(a) for a in action], terminated, truncated, {}


def test_what_is_said_of_each_agent_or_of_all():
    several = gymnasium_adapter.Several(Couple(), "couple")
    env = envs.check_env(envs.from_pettingzoo(lambda: several, name="couple", max_steps=several.max_steps))
    assert env.spec.action_sizes == (2, 3) and env.spec.obs_sizes == (1, 2) and env.spec.max_steps == 3
    state, obs = env.reset(jax.random.key(0))
    assert obs.action_mask.tolist() == [[True, True, False], [False, True, True]]
    told = []
    for _ in range(3):
        state, obs, outcome = env.step(state, jnp.array([2, 2]), jax.random.key(0))
        told.append((outcome.reward.tolist(), outcome.terminated.tolist(), bool(outcome.last)))
    assert told == [([1, 2], [False, False], False), ([1, 2], [True, False], False), ([1, 2], [False, False], True)]
    assert obs.action_mask.tolist() == [[True, True, False], [True, True, True]]


def test_views_of_more_or_fewer_agents_than_act_are_refused():
    one_view = type("OneView", (Couple,), {"observation_space": spaces.Box(0, 9, (1,))})
    with pytest.raises(ValueError, match=r"couple has actions for 2 agents, .*, and views of Box.*as many"):
        gymnasium_adapter.Several(one_view(), "couple")


# ----------------------------------------------------------------------------------------------------------- PettingZoo


@pytest.mark.parametrize("scenario", ["simple_speaker_listener_v4", "simple_spread_v3"])
def test_it_is_pettingzoos_environment(scenario):
    import importlib

    options = {"continuous_actions": scenario == "simple_spread_v3", "max_cycles": 3}
    env = envs.check_env(jmarl.make(f"pettingzoo:mpe2.{scenario}", **options), play=True)
    other = importlib.import_module(f"mpe2.{scenario}").parallel_env(**options)
    state, obs = env.reset(jax.random.key(0))
    seeds = np.random.default_rng(int(jax.random.bits(jax.random.key(0), dtype=jnp.uint32)))
    views, _ = other.reset(seed=int(seeds.integers(2**31)))
    step = jax.jit(env.step)
    for t in range(3):
        for i, agent in enumerate(env.spec.agents):
            size = env.spec.obs_sizes[i]
            np.testing.assert_allclose(obs.agents[i, :size], views[agent], rtol=1e-6)
            assert not obs.agents[i, size:].any()
        np.testing.assert_allclose(obs.state, other.state(), rtol=1e-6)
        if env.spec.is_discrete:
            action = np.array([1, 4])
            assert obs.action_mask.tolist() == [[True] * 3 + [False] * 2, [True] * 5]
        else:
            action = np.full((3, 5), 0.1 * (t + 1), np.float32)
        state, obs, outcome = step(state, action, jax.random.key(0))
        views, rewards, terminated, truncated, _ = other.step(dict(zip(env.spec.agents, action, strict=True)))
        np.testing.assert_allclose(outcome.reward, list(rewards.values()), rtol=1e-5)
        assert outcome.terminated.tolist() == list(terminated.values())
    assert outcome.last and all(truncated.values()) and obs.agent_mask.all()  # to be bootstrapped


class Since(BaseParallelWrapper):
    """Rewards in cents, and the time before each view, as a user's or SuperSuit's wrappers change them."""

    def observation_space(self, agent):
        inner = super().observation_space(agent)
        return spaces.Box(-np.inf, np.inf, (1 + inner.shape[0],))

    def seen(self, views):
        return {agent: np.concatenate([[self.time], view]) for agent, view in views.items()}

    def reset(self, seed=None, options=None):
        self.time = 0
        views, info = super().reset(seed, options)
        return self.seen(views), info

    def step(self, actions):
        self.time += 1
        views, rewards, *others = super().step(actions)
        return self.seen(views), {agent: 100 * reward for agent, reward in rewards.items()}, *others


def test_wrappers_are_what_is_played():
    from mpe2 import simple_spread_v3

    bare, wrapped = (
        envs.check_env(envs.from_pettingzoo(make), play=True)
        for make in (
            lambda: simple_spread_v3.parallel_env(max_cycles=4),
            lambda: Since(simple_spread_v3.parallel_env(max_cycles=4)),
        )
    )
    assert wrapped.spec.obs_shape == (bare.spec.obs_shape[0] + 1,) and wrapped.spec.max_steps == 4
    states = [env.reset(jax.random.key(0))[0] for env in (bare, wrapped)]
    action = jnp.array([1, 2, 3])
    for t in range(1, 4):
        (states[0], seen, paid), (states[1], obs, outcome) = (
            env.step(state, action, jax.random.key(t)) for env, state in zip((bare, wrapped), states, strict=True)
        )
        np.testing.assert_array_equal(obs.agents, jnp.pad(seen.agents, ((0, 0), (1, 0)), constant_values=t))
        np.testing.assert_allclose(outcome.reward, 100 * paid.reward, rtol=1e-6)


class Party(pettingzoo.ParallelEnv):
    """Guests come and go. `late` comes at time 1, `early` terminates at time 2, all is over at time 4."""

    metadata = {"name": "party"}  # noqa: RUF012  as PettingZoo has it
    possible_agents = ["early", "host", "late"]  # noqa: RUF012

    def __init__(self, spaces_of=None):
        self.spaces_of = spaces_of or {agent: spaces.Discrete(2 + i) for i, agent in enumerate(self.possible_agents)}

    def observation_space(self, agent):
        seen = spaces.Box(0, 9, (1,))
        return spaces.Dict({"observation": seen, "action_mask": spaces.MultiBinary(2)}) if agent == "early" else seen

    def action_space(self, agent):
        return self.spaces_of[agent]

    def views(self, agents):
        view = np.array([self.time], np.float32)
        mask = np.array([1, self.time % 2], np.int8)
        return {a: {"observation": view, "action_mask": mask} if a == "early" else view for a in agents}

    def infos(self, agents):
        return {a: {"action_mask": np.array([0, 1, 1])} if a == "host" else {} for a in agents}

    def reset(self, seed=None, options=None):
        self.time, self.agents = 0, ["early", "host"]
        return self.views(self.agents), self.infos(self.agents)

    def step(self, actions):
        assert set(actions) == set(self.agents)
        self.time += 1
        acted = list(self.agents)
        terminated = {a: a == "early" and self.time == 2 for a in acted}
        truncated = {a: self.time == 4 for a in acted}
        self.agents = [] if self.time == 4 else [a for a in acted if not terminated[a]]
        if self.time == 1:
            self.agents.append("late")
        told = list(dict.fromkeys([*acted, *self.agents]))
        rewards = {a: float(actions[a]) for a in acted}
        return self.views(told), rewards, terminated, truncated, self.infos(told)


def test_agents_come_and_go():
    env = envs.check_env(envs.from_pettingzoo(Party, max_steps=4), play=True)
    assert env.spec.agents == ("early", "host", "late") and env.spec.action_sizes == (2, 3, 4) and env.spec.may_wait
    state, obs = env.reset(jax.random.key(0))
    acts, outcomes = [obs.agent_mask.tolist()], []
    assert obs.action_mask.tolist() == [[True, False, False, False], [False, True, True, False], [True] * 4]
    for _ in range(4):
        state, obs, outcome = env.step(state, jnp.array([3, 2, 3]), jax.random.key(0))
        acts.append(obs.agent_mask.tolist())
        outcomes.append(outcome)
    everybody, two = [True] * 3, [False, True, True]
    assert acts == [[True, True, False], everybody, two, two, two]
    assert [o.terminated.tolist() for o in outcomes] == [[False] * 3, [True, False, False], [False] * 3, [False] * 3]
    # Padding of `early` became its last action; who is not there earns nothing.
    assert [o.reward.tolist() for o in outcomes] == [[1, 2, 0], [1, 2, 3], [0, 2, 3], [0, 2, 3]]
    assert [bool(o.last) for o in outcomes] == [False, False, False, True]


def test_agents_of_two_kinds_of_actions_are_refused():
    mixed = {"early": spaces.Discrete(2), "host": spaces.Box(0, 1, (1,)), "late": spaces.Discrete(2)}
    with pytest.raises(
        ValueError, match="party has agents of discrete and agents of continuous actions: jmarl takes one"
    ):
        envs.from_pettingzoo(lambda: Party(mixed), name="party")


def test_turns_are_converted_by_pettingzoo():
    env = envs.check_env(
        envs.from_pettingzoo(
            lambda: pettingzoo.utils.aec_to_parallel(__import__("mpe2.simple_v3").simple_v3.env(max_cycles=2))
        ),
        play=True,
    )
    assert env.spec.agents == ("agent_0",)


@pytest.mark.parametrize("module", [host, pettingzoo_adapter], ids=lambda module: module.__name__)
def test_examples_in_docstrings_run(module):
    failed, attempted = doctest.testmod(module)
    assert attempted and not failed


# --------------------------------------------------------------------------------------------------------- command line


def test_the_command_line_trains_and_resumes(tmp_path, capsys):
    words = [
        "ippo",
        "--env",
        "gymnasium:CartPole-v1",
        "--total-steps",
        "64",
        "--num-envs",
        "2",
        "--rollout-length",
        "16",
    ]
    words += ["--log-every", "1", "--eval-episodes", "2", "--absolute-episodes", "0", "--hidden-sizes", "4"]
    folder = train.main(
        [*words, "--num-minibatches", "1", "--max-eval-steps", "10", "--run-dir", str(tmp_path / "run")]
    )
    train.main(["--resume", str(folder), "--total-steps", "96"])
    told = capsys.readouterr().out
    assert "begin anew" in told and f"No GIF: jmarl evaluate {folder} --render films" in told
    env_steps, metrics = jmarl.cli.run_folders.load_metrics(folder)
    assert env_steps.tolist() == [32, 64, 96] and np.isfinite(metrics["eval/return_sum"][:, -1]).all()


@pytest.mark.parametrize(
    ("name", "is_own", "runs_code"),
    [
        ("CartPole-v1", False, False),
        ("mine.py:make", True, True),
        ("gymnasium:CartPole-v1", False, False),
        ("gymnasium:lbforaging:Foraging-5x5-2p-1f-v3", False, False),
        ("gymnasium:mine:Env-v0", False, True),
        ("pettingzoo:mpe2.simple_spread_v3", False, False),
        ("pettingzoo:classic.chess_v6", False, False),
        ("pettingzoo:mine.env_v0", False, True),
    ],
)
def test_a_name_that_says_what_to_import_is_no_folders_to_say(name, is_own, runs_code):
    assert own.is_own(name) == is_own and own.runs_code(name) == runs_code
