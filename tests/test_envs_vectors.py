"""Vectors of environments, Gymnasium's and EnvPool's: what rollouts make of them, beside the same episodes by hand."""

import doctest
import sys

import compiled
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

import jmarl
from jmarl import envs
from jmarl.cli import lists
from jmarl.cli.errors import UsageError
from jmarl.envs import gymnasium_adapter, host


class Walk(gymnasium.Env):
    """Shows its episode's length, which chance decides, its number and the time. Odd episodes terminate, even truncate.

    What is legal depends on the time.
    """

    observation_space = spaces.Box(0, 99, (3,), np.float32)
    action_space = spaces.Discrete(3, start=5)

    def __init__(self):
        self.episode, self.seeds = 0, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.time, self.length, self.episode = 0, int(self.np_random.integers(1, 5)), self.episode + 1
        return self.view(), self.info()

    def view(self):
        return np.array([self.length, self.episode, self.time], np.float32)

    def info(self):
        return {"action_mask": np.arange(3) != self.time % 3}

    def step(self, action):
        self.time += 1
        ends = self.time == self.length
        odd = self.episode % 2 == 1
        return self.view(), float(action), ends and odd, ends and not odd, self.info()


def walks(mode, kind=SyncVectorEnv, **options):
    """`make(num_envs)`, and the vectors that it made."""
    made = []

    def make(num_envs):
        made.append(kind([Walk] * num_envs, autoreset_mode=mode, **options))
        return made[-1]

    return make, made


def played(env, length, num_envs=3, num_rollouts=1):
    """Rollouts `[T, B, ..]` by a random policy."""
    learner = jmarl.random_policy(env.spec, jmarl.RandomConfig())
    run = jax.jit(lambda key: jmarl.training.start(env, learner, key, num_envs=num_envs))(jax.random.key(0))
    roll = jax.jit(lambda run: jmarl.training.rollout(env, learner, run, length=length))
    batches = []
    for _ in range(num_rollouts):
        run, batch, measured = roll(run)
        batches.append((jax.tree.map(np.asarray, batch.steps), measured))
    return batches


def by_hand(env, seed, actions):
    """The same steps of one environment: views, next views, rewards, terminated, truncated, first, legal actions."""
    (view, info), rows, first = env.reset(seed=seed), [], True
    for action in actions:
        next_view, reward, terminated, truncated, next_info = env.step(action)
        rows.append((view, next_view, reward, terminated, truncated, first, info.get("action_mask")))
        first = terminated or truncated
        view, info = env.reset() if first else (next_view, next_info)
    return [np.array(column) for column in zip(*rows, strict=True)]


def require_same(steps, b, hand):
    view, next_view, reward, terminated, truncated, first, mask = hand
    np.testing.assert_allclose(steps.obs.agents[:, b, 0], view, rtol=1e-6)
    np.testing.assert_allclose(steps.obs.state[:, b], view, rtol=1e-6)
    np.testing.assert_allclose(steps.next_obs.agents[:, b, 0], next_view, rtol=1e-6)
    np.testing.assert_allclose(steps.reward[:, b, 0], reward, rtol=1e-6)
    np.testing.assert_array_equal(steps.terminated[:, b, 0], terminated)
    np.testing.assert_array_equal(steps.last[:, b], terminated | truncated)
    np.testing.assert_array_equal(steps.first[:, b], first)
    if mask[0] is not None:
        np.testing.assert_array_equal(steps.obs.action_mask[:, b, 0], mask)


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
def test_every_way_of_beginning_episodes_is_the_same_episodes_stepped_by_hand(mode):
    make, made = walks(mode)
    env = envs.from_gymnasium_vector(make, name="walk", max_steps=4)
    (early, _), (late, measured) = played(env, 7, num_rollouts=2)  # the second goes on where the first stopped
    steps = jax.tree.map(lambda *x: np.concatenate(x), early, late)
    for b, walk in enumerate(made[-1].envs):
        require_same(steps, b, by_hand(Walk(), walk.seeds[0], steps.action[:, b, 0] + 5))
    mask = steps.obs.action_mask[:, :, 0]
    assert np.take_along_axis(mask, steps.action, -1).all()
    ended = steps.next_obs.agents[:, :, 0][steps.last]
    assert len(ended) > 8 and (steps.terminated[..., 0] != steps.last).any()
    last_lengths = late.next_obs.agents[:, :, 0, 0][late.last]
    np.testing.assert_allclose(measured["train/episode_length"], last_lengths.mean(), rtol=1e-6)


def test_processes_of_gymnasiums_play_the_same_episodes_as_one():
    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # this module is much to import
    try:
        told = []
        for kind, options in ((SyncVectorEnv, {}), (AsyncVectorEnv, {"context": "spawn"})):
            make, made = walks(AutoresetMode.SAME_STEP, kind, **options)
            told.append(played(env := envs.from_gymnasium_vector(make, name="walk", max_steps=4), 7, 2)[0][0])
            env.unwrapped.close()
            assert all(vector.closed for vector in made)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    jax.tree.map(np.testing.assert_array_equal, *told)


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED], ids=lambda mode: mode.name)
def test_an_evaluation_counts_each_episode_once_and_gives_its_vector_back(mode):
    make, made = walks(mode)
    env = envs.from_gymnasium_vector(make, name="walk", max_steps=4)
    learner = jmarl.random_policy(env.spec, jmarl.RandomConfig())
    state = compiled.init(learner, jax.random.key(0))
    play = jax.jit(lambda key: jmarl.evaluation.play_episodes(env, learner, state, key, num_episodes=5))
    for i in range(2):
        episodes = play(jax.random.key(i))
        seeds = [[s for s in walk.seeds if s is not None][i] for walk in made[1].envs]
        lengths = [by_hand(Walk(), seed, [5] * 9)[0][0, 0] for seed in seeds]
        np.testing.assert_array_equal(episodes.length, lengths)
        assert (5 * episodes.length <= episodes.returns[:, 0]).all() and (
            episodes.returns[:, 0] <= 7 * episodes.length
        ).all()
    assert len(made) == 2  # one to ask, one to play in
    assert not np.array_equal(seeds, [walk.seeds[0] for walk in made[1].envs])


def test_seeds_of_a_run_share_a_vector_and_do_what_each_does_alone():
    make, made = walks(AutoresetMode.SAME_STEP)
    env = envs.from_gymnasium_vector(make, name="walk", max_steps=4)
    learner = jmarl.random_policy(env.spec, jmarl.RandomConfig())

    def play(key):
        run = jmarl.training.start(env, learner, key, num_envs=2)
        return jmarl.training.rollout(env, learner, run, length=5)[1].steps.replace(carry=())

    keys = jax.random.split(jax.random.key(0), 2)
    both = jax.jit(jax.vmap(play))(keys)
    assert [vector.num_envs for vector in made] == [1, 4]
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x: x[1], both), jax.jit(play)(keys[1]))


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_a_vector_by_name_plays_gymnasiums_environment(name):
    env = jmarl.make(f"gymnasium:{name}", vector="sync", max_episode_steps=12)
    assert env.spec == jmarl.make(f"gymnasium:{name}", max_episode_steps=12).spec
    (steps, _), *_ = played(env, 30, num_envs=2)
    [group] = env.unwrapped._groups
    seeds = [walk.unwrapped.np_random_seed for walk in group.env.envs]
    for b, seed in enumerate(seeds):
        other = gymnasium.make(name, max_episode_steps=12)
        require_same(steps, b, by_hand(other, seed, steps.action[:, b, 0]))


def test_parts_of_a_vector_cannot_be_stepped_and_whole_vectors_in_any_order_can():
    make, _ = walks(AutoresetMode.SAME_STEP)
    env = envs.from_gymnasium_vector(make, name="walk", max_steps=4)
    keys = jax.random.split(jax.random.key(0), 3)
    (one, _), (other, _) = (jax.vmap(env.reset)(keys[:num]) for num in (2, 3))
    both = jax.tree.map(lambda x, y: jnp.concatenate([x, y])[jnp.array([4, 0, 3, 1, 2])], one, other)
    action = jnp.arange(5)[:, None] % 3
    _, obs, outcome = jax.vmap(env.step)(both, action, jax.random.split(keys[0], 5))
    np.testing.assert_array_equal(outcome.reward[:, 0], action[:, 0] + 5)
    np.testing.assert_array_equal(obs.agents[:, 0, 2], np.ones(5))
    again, _, _ = jax.vmap(env.step)(both, action, jax.random.split(keys[0], 5))  # asked for once more, taken once
    with (
        pytest.raises(
            RuntimeError, match=r"^walk raised RuntimeError: 3 environments are stepped together, and a step"
        ),
        host.failures_named(env),
    ):
        jax.vmap(env.step)(jax.tree.map(lambda x: x[:2], again), action[:2], keys[:2])
    with (
        pytest.raises(RuntimeError, match=r"it is at step 1 and was asked to go on from step 2"),
        host.failures_named(env),
    ):
        jax.vmap(env.step)(again._replace(clock=again.clock + 1), action, jax.random.split(keys[0], 5))


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
def test_seeds_whose_evaluation_ends_early_wait_for_the_others(mode):
    """They are asked the same again and again meanwhile: each seed's returns are those that it has alone."""
    env = envs.from_gymnasium_vector(walks(mode)[0], name="walk", max_steps=4)
    learner = jmarl.random_policy(env.spec, jmarl.RandomConfig())
    keys = jax.random.split(jax.random.key(0), 6)
    states = jax.jit(jax.vmap(learner.init))(keys)
    evaluate = lambda state, key: jmarl.evaluate(env, learner, state, key, num_episodes=1)  # noqa: E731
    together = jax.jit(jax.vmap(evaluate))(states, keys)
    play = jax.jit(evaluate)
    alone = [play(*jax.tree.map(lambda x, i=i: x[i], (states, keys))) for i in range(6)]
    for name, value in together.items():
        np.testing.assert_allclose(value, [float(of_one[name]) for of_one in alone], rtol=1e-6, err_msg=name)
    assert np.ptp(together["eval/episode_length"]) >= 2


class Everything(gymnasium.Env):
    """Views with a mask in them, and actions of several parts."""

    observation_space = spaces.Dict(
        {
            "observation": spaces.Tuple((spaces.Discrete(3), spaces.Box(0, 9, (2,)))),
            "action_mask": spaces.MultiBinary(6),
        }
    )
    action_space = spaces.MultiDiscrete([2, 3])

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return self.view(), {}

    def view(self):
        mask = np.zeros(6, np.int8)
        mask[[self.time, 5]] = 1
        return {"observation": (self.time % 3, np.array([self.time, 7], np.float32)), "action_mask": mask}

    def step(self, action):
        self.time += 1
        return self.view(), float(10 * action[0] + action[1]), False, self.time == 2, {}


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP], ids=lambda mode: mode.name)
def test_views_of_parts_and_masks_in_them_are_those_of_single_environments(mode):
    env = envs.from_gymnasium_vector(lambda num: SyncVectorEnv([Everything] * num, autoreset_mode=mode), max_steps=2)
    single = gymnasium_adapter.Single(Everything(), "SyncVectorEnv")
    assert env.spec == single.spec._replace(max_steps=2)
    state, obs = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 2))
    seen = single.reset(0)
    for t in range(2):
        np.testing.assert_array_equal(obs.agents, np.stack([seen.agents] * 2))
        np.testing.assert_array_equal(obs.action_mask, np.stack([seen.action_mask] * 2))
        state, obs, outcome = jax.vmap(env.step)(state, jnp.array([[5], [1]]), jax.random.split(jax.random.key(0), 2))
        seen = single.step(np.array([5])).seen
        assert outcome.reward[:, 0].tolist() == [12.0, 1.0] and outcome.last.tolist() == [t == 1] * 2
    np.testing.assert_array_equal(obs.action_mask, np.stack([seen.action_mask] * 2))  # of the true last view
    assert state.start.agents[0].tolist() == single.reset(0).agents.tolist()


class Forgetful(SyncVectorEnv):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)


REFUSED = [
    (lambda: jmarl.make("gymnasium:CartPole-v1", vector="both"), ValueError, r"vector='both' is not one of \('sync'"),
    (
        lambda: jmarl.make("gymnasium:CartPole-v1", vector="async", workers=2),
        TypeError,
        "workers is of environments that are stepped one by one: leave out vector='async'",
    ),
    (lambda: jmarl.make("gymnasium:CartPoll-v1", vector="sync"), ValueError, "gymnasium:CartPoll-v1: Environment"),
    (
        lambda: envs.from_gymnasium_vector(SyncVectorEnv([Walk])),
        TypeError,
        "make=.* is no function: give one that makes as many environments as it is told",
    ),
    (
        lambda: envs.from_gymnasium_vector(lambda num: SyncVectorEnv([Walk] * 2)),
        RuntimeError,
        "raised ValueError: it was to make 3 environments, and made 2",
    ),
    (
        lambda: envs.from_gymnasium_vector(lambda num: Forgetful([Walk] * num)),
        RuntimeError,
        r"where some episodes end it begins all anew, since its reset knows no options\['reset_mask'\]",
    ),
]


@pytest.mark.parametrize(("make", "error", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_what_is_not_understood_is_refused_in_a_sentence(make, error, message):
    with pytest.raises(error, match=message) as raised:
        env = make()
        with host.failures_named(env):
            played(env._replace(spec=env.spec._replace(max_steps=4)), 7)
    assert "\n" not in str(raised.value)


# -------------------------------------------------------------------------------------------------------------- EnvPool


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1"])
def test_envpool_plays_the_episodes_that_its_environments_play_alone(name):
    envpool = pytest.importorskip("envpool")
    env = envs.check_env(jmarl.make(f"envpool:{name}", max_episode_steps=18, num_threads=1))
    assert env.spec.max_steps == 18 and env.spec.num_agents == 1
    (early, _), (late, _) = played(env, 22, num_envs=3, num_rollouts=2)
    steps = jax.tree.map(lambda *x: np.concatenate(x), early, late)
    again = played(jmarl.make(f"envpool:{name}", max_episode_steps=18), 22, num_envs=3)[0][0]
    jax.tree.map(np.testing.assert_array_equal, early, again)  # the same seed, the same run
    [group] = env.unwrapped._groups
    for b, seed in enumerate(group.env.config["env_seed"]):
        alone = envpool.make_gymnasium(name, num_envs=1, seed=[seed], max_episode_steps=18)
        rows, first, (view, _) = [], True, alone.reset()
        for action in steps.action[:, b, 0]:
            next_view, reward, terminated, truncated, _ = alone.step(action[None])
            rows.append((view[0], next_view[0], reward[0], terminated[0], truncated[0], first, None))
            first, view = terminated[0] | truncated[0], next_view
            if first:  # the next step begins an episode, whatever is done
                view, reward, *_ = alone.step(action[None])
                assert reward[0] == 0
        view, next_view, *rest = [np.array(column) for column in zip(*rows, strict=True)]
        if name == "FrozenLake-v1":
            view, next_view = np.eye(16)[view], np.eye(16)[next_view]
        require_same(steps, b, [view, next_view, *rest])
    assert steps.last.sum() >= 3 and (name == "Pendulum-v1" or steps.terminated.any())


def test_envpools_images_have_their_channels_last_and_its_evaluations_repeat_themselves():
    envpool = pytest.importorskip("envpool")
    env = jmarl.make("envpool:Pong-v5", img_height=20, img_width=30, frame_skip=8, max_episode_steps=4)
    assert env.spec.obs_shape == env.spec.state_shape == (20, 30, 4) and env.spec.max_steps == 4
    state, obs = env.reset(jax.random.key(0))
    seed = int(jax.random.bits(jax.random.key(0), dtype=jnp.uint32)) % 2**31
    view, _ = envpool.make_gymnasium(
        "Pong-v5", num_envs=1, seed=[seed], img_height=20, img_width=30, frame_skip=8
    ).reset()
    np.testing.assert_array_equal(obs.agents[0], np.moveaxis(view[0], 0, -1))
    env = jmarl.make("envpool:CartPole-v1")
    learner = jmarl.random_policy(env.spec, jmarl.RandomConfig())
    state = compiled.init(learner, jax.random.key(0))
    play = jax.jit(lambda key: jmarl.evaluate(env, learner, state, key, num_episodes=4)["eval/return_sum"])
    scores = [float(play(jax.random.key(i))) for i in (1, 2, 1)]
    assert scores[0] == scores[2] != scores[1]
    assert [group.env for group in env.unwrapped._groups] == [None] * 3  # closed


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("CartPoll-v1", {}, ValueError, "'CartPoll-v1' is no environment of EnvPool: did you mean 'CartPole-v1'"),
        ("CartPole-v1", {"seed": 3}, TypeError, "envpool:CartPole-v1 takes no seed: it is as many"),
        ("CartPole-v1", {"colour": 3}, ValueError, r"envpool:CartPole-v1 with \{'colour': 3\}: "),
        ("IntersectionMultiAgent-v1", {}, ValueError, "has several players, and jmarl takes EnvPool's environments of"),
    ],
)
def test_what_envpool_does_not_make_is_refused_in_a_sentence(name, options, error, message):
    pytest.importorskip("envpool")
    with pytest.raises(error, match=message) as raised:
        jmarl.make(f"envpool:{name}", **options)
    assert "\n" not in str(raised.value)


def test_without_envpool_it_is_said_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(ImportError, match=r'^envpool:CartPole-v1 needs EnvPool: pip install "jmarl\[envpool\]"\.$'):
        jmarl.make("envpool:CartPole-v1")
    lists.list_envs()
    told = capsys.readouterr().out
    assert 'not installed: pip install "jmarl[envpool]"\n' in told and "  envpool:CartPole-v1\n" in told
    with pytest.raises(UsageError, match="needs EnvPool"):
        lists.list_envs("envpool:")


@pytest.mark.parametrize("module", [gymnasium_adapter], ids=lambda module: module.__name__)
def test_examples_in_docstrings_run(module):
    failed, attempted = doctest.testmod(module)
    assert attempted and not failed
