"""Trial mode: episodes one by one, with what each of them earned and, where there are pictures, a film or a window.

A film is a GIF, or an MP4 through imageio-ffmpeg. What jmarl draws itself is drawn from states; what is Python or C++
draws itself as it is stepped, by its `rgb_array` render.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from jmarl import presets
from jmarl.cli import rendering, run_folders
from jmarl.cli.errors import UsageError
from jmarl.envs import host
from jmarl.types import Env, Learner, TrainState

INSTALL = 'pip install "jmarl[video]"'
SUFFIXES = (".gif", ".mp4")
_MOST_STEPS = 1_000  # of an episode that has no limit
WITH_WINDOWS = ("gymnasium:", "pettingzoo:")
_OF_VECTORS = ("vector", "workers", "on", "timeout_s")  # options of how environments are stepped side by side


class Trial(NamedTuple):
    """One episode.

    Attributes:
      returns: of each agent.
      length: in steps.
      has_ended: False where it was cut off.
      frames: what there is to see, one more than steps or several for each; [] where there is no picture.
      milliseconds: between two frames, in real time where the environment knows it.
    """

    returns: np.ndarray
    length: int
    has_ended: bool
    frames: list[Image.Image]
    milliseconds: float


def require_film(path: Path) -> None:
    """Refuses a name that says no format, and MP4 without what writes it."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--render {path} is neither .gif nor .mp4.")
    if path.suffix == ".mp4":
        try:
            import imageio_ffmpeg  # noqa: F401
        except ImportError as error:
            raise UsageError(f"--render {path} needs imageio-ffmpeg: {INSTALL}, or choose .gif.") from error


def require_window(name: str, path: Any) -> None:
    """Refuses an environment whose package opens none, and a film beside it."""
    if path is not None:
        raise UsageError("--window shows episodes while they are played, --render films them: leave one of them out.")
    if not name.startswith(WITH_WINDOWS):
        raise UsageError(f"--window is for environments of Gymnasium and PettingZoo: --render films {name}.")


def visible_env(
    name: str, env_kwargs: Mapping[str, Any], max_eval_steps: int | None = None, *, window: bool = False
) -> Env:
    """The environment of evaluation, which draws itself where it is Python or C++; in a window, it takes real time."""
    if name.startswith(presets.IN_PYTHON):
        how = "human" if window else "rgb_array"
        is_told = {} if name.startswith("football:") else {"render_mode": how}  # football always draws itself
        env_kwargs = {k: v for k, v in env_kwargs.items() if k not in _OF_VECTORS} | is_told
    return run_folders.plain_env(name, env_kwargs, max_eval_steps)


def play(
    env: Env, learner: Learner, state: TrainState, key: jax.Array, num_episodes: int, *, window: bool = False
) -> list[Trial]:
    """Greedy episodes, one after the other, each of at most `env.spec.max_steps` steps, or 1,000.

    Args:
      env: as `visible_env` makes it.
      learner: who plays.
      state: of one seed.
      key: decides the episodes.
      num_episodes: how many.
      window: the environment shows itself: no frames are kept.
    """
    limit = env.spec.max_steps or _MOST_STEPS
    keys = jax.random.split(key, num_episodes)
    if isinstance(env.unwrapped, host.Pool):
        with host.failures_named(env):
            return _watched(env, learner, state, keys, limit, window)
    return [_drawn(env, learner, state, key, limit) for key in keys]


def save(trials: list[Trial], path: Path, fps: float | None = None) -> None:
    """The frames of all trials as a film; `fps` in place of real time."""
    pause = trials[0].milliseconds if fps is None else 1000 / fps
    width, height = (max(frame.size[axis] for trial in trials for frame in trial.frames) for axis in (0, 1))
    frames, durations = [], []
    for trial in trials:
        for frame in trial.frames:
            whole = Image.new("RGB", (width + width % 2, height + height % 2), rendering.PAPER)  # MP4 wants even sides
            whole.paste(frame, (0, 0))
            frames.append(whole)
        durations += [pause] * (len(trial.frames) - 1) + [rendering.HOLD_MS]
    if path.suffix == ".mp4":
        _save_mp4(frames, durations, path, 1000 / pause)
    else:
        rendering.save_gif(frames, durations, path)


def _save_mp4(frames: list[Image.Image], durations: list[Any], path: Path, fps: float) -> None:
    import imageio_ffmpeg

    # Python warns of the threads of jax, which the program that it begins does not have.
    warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
    writer = imageio_ffmpeg.write_frames(str(path), frames[0].size, fps=fps, macro_block_size=2)
    writer.send(None)
    for frame, duration in zip(frames, durations, strict=True):
        for _ in range(max(1, round(duration * fps / 1000))):
            writer.send(np.asarray(frame).tobytes())
    writer.close()


def _drawn(env: Env, learner: Learner, state: TrainState, key: jax.Array, limit: int) -> Trial:
    draw = rendering.renderer(env.unwrapped)
    states, rewards, has_ended = rendering.record_episode(env, learner, state, key, limit)
    frames, pause = ([], 100) if draw is None else draw(env.unwrapped, states, rewards)
    return Trial(rewards.sum(0), len(rewards), has_ended, frames, pause)


def _watched(env: Env, learner: Learner, state: TrainState, keys: jax.Array, limit: int, window: bool) -> list[Trial]:
    pool: Any = env.unwrapped

    @jax.jit
    def step(env_state: Any, carry: Any, obs: Any, first: jax.Array, key: jax.Array) -> Any:
        action, carry = learner.greedy(state, carry, *jax.tree.map(lambda x: x[None], (obs, first)))
        env_state, obs, outcome = env.step(env_state, action[0], key)
        return env_state, carry, obs, outcome

    trials = []
    for key in keys:
        pool.pictures = None if window else []
        env_state, obs = env.reset(key)
        carry, first, last = learner.init_carry((1,)), jnp.array(True), False
        rewards: list[np.ndarray] = []
        while not last and len(rewards) < limit:
            env_state, carry, obs, outcome = step(env_state, carry, obs, first, jax.random.fold_in(key, len(rewards)))
            rewards.append(np.asarray(outcome.reward))
            first, last = outcome.last, bool(outcome.last)
        pictures = (pool.pictures or [])[: len(rewards) + 1]  # without the first of the next episode
        pool.pictures = None
        so_far = np.concatenate([[0.0], np.sum(rewards, 1).cumsum()])
        frames = [
            rendering.below(f"step {t}   return {so_far[t]:.1f}", Image.fromarray(np.asarray(picture, np.uint8)))
            for t, picture in enumerate(pictures)
            if picture is not None
        ]
        trials.append(Trial(np.sum(rewards, 0), len(rewards), last, frames, 1000 / pool.fps))
        if env.release is not None:
            env.release(env_state)
    return trials


def tell(trials: list[Trial], agents: tuple[str, ...]) -> None:
    """Prints what each episode earned."""
    for number, trial in enumerate(trials, 1):
        end = "" if trial.has_ended else ", cut off"
        each = ""
        if len(agents) > 1:
            each = ": " + ", ".join(f"{agent} {value:.2f}" for agent, value in zip(agents, trial.returns, strict=True))
        print(f"episode {number}: return {trial.returns.sum():.2f} in {trial.length} steps{end}{each}")


def film(trials: list[Trial], path: Path, name: str, fps: float | None) -> None:
    """Writes the film and says where it is, or that there is none."""
    if not all(trial.frames for trial in trials):
        print(f"No film: there is no picture of {name}.")
        return
    save(trials, path, fps)
    print(f"{path} shows {'it' if len(trials) == 1 else 'them'}")
