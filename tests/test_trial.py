"""Trial mode: what episodes earn, and films of them."""

import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import jmarl
from jmarl import envs
from jmarl.cli import evaluate, lists, train, trial
from jmarl.cli.errors import UsageError
from jmarl.envs import HostStep, Seen
from jmarl.types import EnvSpec


class Clock:
    """Draws the time: its picture after t steps of episode k is of the grey 10 k + t. Episodes have 3 steps."""

    spec = EnvSpec(name="clock", agents=("ann", "bob"), obs_shape=(1,), state_shape=(2,), num_actions=2, max_steps=3)
    info, fps = (), 20

    def __init__(self):
        self.episode = -1

    def reset(self, seed):
        self.time, self.episode = 0, self.episode + 1
        return Seen(np.zeros((2, 1)))

    def step(self, action):
        self.time += 1
        return HostStep(Seen(np.zeros((2, 1))), [1.0, 10.0], False, self.time == 3)

    def render(self):
        return np.full((20, 33, 3), 10 * self.episode + self.time, np.uint8)

    def close(self):
        pass


def at_random(env, num, seed=0):
    chance = jmarl.random_policy(env.spec, jmarl.RandomConfig())
    return trial.play(env, chance, chance.init(jax.random.key(0)), jax.random.key(seed), num)


def greys(played):
    return [int(np.asarray(frame)[-1, -1, 0]) for frame in played.frames]


def test_an_episode_has_its_own_pictures_from_the_first_to_the_true_last_one():
    one, other = at_random(envs.from_host(Clock), 2)
    assert one.returns.tolist() == [3.0, 30.0] and one.length == 3 and one.has_ended and one.milliseconds == 50
    assert greys(one) == [0, 1, 2, 3]
    assert greys(other) == [other.frames[0].getpixel((0, 40))[0] + t for t in range(4)]  # of another episode, all of it
    assert greys(other)[0] % 10 == 0 and greys(other)[0] > 0
    env = envs.from_host(Clock)
    [cut] = at_random(env._replace(spec=env.spec._replace(max_steps=2)), 1)
    assert cut.length == 2 and not cut.has_ended and greys(cut) == [0, 1, 2]


def test_nothing_is_drawn_unless_it_is_watched():
    env = envs.from_host(type("Blind", (Clock,), {"render": lambda self: 1 / 0}))
    state, _ = env.reset(jax.random.key(0))
    assert not env.step(state, jnp.zeros(2, int), jax.random.key(0))[2].last
    del Clock.render
    try:
        [played] = at_random(envs.from_host(Clock), 1)
    finally:
        Clock.render = lambda self: np.full((20, 33, 3), 10 * self.episode + self.time, np.uint8)
    assert played.frames == [] and played.returns.tolist() == [3.0, 30.0]


def test_a_gif_has_all_frames_and_their_time(tmp_path):
    played = at_random(envs.from_host(Clock), 2)
    for fps, pause in ((None, 50), (5.0, 200)):
        trial.save(played, tmp_path / "a.gif", fps)
        film = Image.open(tmp_path / "a.gif")
        assert film.n_frames == 8 and film.size == (34, 46)  # even sides, with a line of text above
        pauses = []
        for i in range(8):
            film.seek(i)
            pauses.append(film.info["duration"])
        assert pauses == [pause] * 3 + [1500] + [pause] * 3 + [1500]


def test_an_mp4_lasts_as_long_as_its_episodes(tmp_path):
    import imageio_ffmpeg

    trial.save(at_random(envs.from_host(Clock), 2), tmp_path / "a.mp4")
    facts = next(imageio_ffmpeg.read_frames(str(tmp_path / "a.mp4")))
    assert facts["fps"] == 20 and facts["size"] == (34, 46)
    np.testing.assert_allclose(facts["duration"], 2 * (3 * 0.05 + 1.5), atol=0.05)


def test_a_run_is_played_episode_by_episode_into_a_film(tmp_path, capsys):
    words = ["random", "--env", "gymnasium:CartPole-v1", "--total-steps", "16", "--num-envs", "1", "--seeds", "1"]
    words += ["--rollout-length", "16", "--eval-episodes", "0", "--run-dir", str(tmp_path / "run")]
    folder = train.main([*words, "--env-kwargs", "vector=sync"])
    capsys.readouterr()
    evaluate.main([str(folder), "--episodes", "2", "--render", "--trials", "2", "--max-eval-steps", "12"])
    told = capsys.readouterr().out
    lengths = [int(x) for x in re.findall(r"episode \d: return \d+\.00 in (\d+) steps", told)]
    assert len(lengths) == 2 and f"{folder}/trial.gif shows them" in told
    assert Image.open(folder / "trial.gif").n_frames == sum(lengths) + 2
    with pytest.raises(SystemExit):
        evaluate.main([str(folder), "--render"])  # there is one already
    for more, said in (
        (["--render", str(tmp_path / "a.avi")], "a.avi is neither .gif nor .mp4"),
        (["--render", "a.gif", "b.gif"], "--render takes one file, not 2"),
        (["--fps", "0"], "--fps 0.0 must be positive"),
        (["--trials", "0"], "--trials 0 must be at least 1"),
    ):
        with pytest.raises(SystemExit):
            evaluate.main([str(folder), "--overwrite", *more])
        assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", ["pettingzoo:mpe2.simple_v3", "envpool:CartPole-v1", "CartPole-v1"], ids=lambda x: x)
def test_random_actions_are_filmed_where_there_are_pictures(name, tmp_path, capsys):
    if name.startswith("envpool"):
        pytest.importorskip("envpool")
    lists.list_envs(name, render=tmp_path / "a.gif", steps=3)
    told = capsys.readouterr().out
    assert "episode 1: return" in told and "in 3 steps, cut off" in told
    if name == "CartPole-v1":
        assert "No film: there is no picture of CartPole-v1." in told and not (tmp_path / "a.gif").exists()
    else:
        assert Image.open(tmp_path / "a.gif").n_frames > 1


@pytest.mark.parametrize("name", ["gymnasium:CartPole-v1", "pettingzoo:mpe2.simple_v3"])
def test_a_window_shows_episodes_in_real_time(name, tmp_path, capsys, monkeypatch):
    pygame = pytest.importorskip("pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    shown = []
    show = pygame.display.set_mode
    monkeypatch.setattr(pygame.display, "set_mode", lambda *args, **kwargs: shown.append(args) or show(*args, **kwargs))
    begin = time.perf_counter()
    lists.list_envs(name, window=True, steps=4)
    assert shown and time.perf_counter() - begin > 4 / 60
    assert "in 4 steps, cut off" in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_a_run_is_watched_in_a_window(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    words = ["random", "--env", "gymnasium:CartPole-v1", "--total-steps", "16", "--num-envs", "1", "--seeds", "1"]
    words += ["--rollout-length", "16", "--eval-episodes", "0", "--no-gif", "--run-dir", str(tmp_path / "run")]
    folder = train.main(words)
    evaluate.main([str(folder), "--episodes", "1", "--window", "--trials", "2", "--max-eval-steps", "5"])
    assert len(re.findall(r"episode \d: return", capsys.readouterr().out)) == 2 and not list(folder.glob("trial*"))
    with pytest.raises(SystemExit):
        evaluate.main([str(folder), "--window", "--render", "--overwrite"])
    assert "--render films them: leave one of them out" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(
        UsageError, match=r"--window is for environments of Gymnasium and PettingZoo: --render films Cart"
    ):
        lists.list_envs("CartPole-v1", window=True)


def test_what_an_environment_raises_while_it_is_watched_is_told_in_its_own_words():
    env = envs.from_host(type("Broken", (Clock,), {"step": lambda self, action: 1 / 0}))
    with pytest.raises(RuntimeError, match=r"^clock raised ZeroDivisionError: division by zero$"):
        at_random(env, 1)


def test_without_ffmpeg_it_is_said_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "imageio_ffmpeg", None)
    with pytest.raises(UsageError, match=r'a.mp4 needs imageio-ffmpeg: pip install "jmarl\[video\]", or choose .gif'):
        trial.require_film(tmp_path / "a.mp4")
