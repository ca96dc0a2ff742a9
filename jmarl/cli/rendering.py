"""A GIF of one greedy episode.

MPE, SMAX, Overcooked, predator-prey, all of Jumanji and two of Pgx's games have pictures; other environments that are
compiled have none. Those of Python draw themselves: see `trial`.
"""

import io
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from jmarl.envs import host
from jmarl.envs.predator_prey import PredatorPrey
from jmarl.types import Env, Learner, TrainState

SIZE = 320  # pixels of the picture's side
HOLD_MS = 1500  # of an episode's last picture
SCALE = 3  # drawn larger and reduced: smooth edges
Number = float | int | np.number
INK, PAPER = (40, 40, 40), (255, 255, 255)
ALLY, ENEMY = (0, 114, 178), (213, 94, 0)


def render_episode(
    env: Env, learner: Learner, state: TrainState, key: jax.Array, path: str | Path, *, max_steps: int = 100
) -> Path | None:
    """Plays one episode with greedy actions and draws it into the GIF `path`; None where there is no picture.

    Args:
      env: what to play.
      learner: who plays.
      state: of one seed.
      key: decides the episode.
      path: the file.
      max_steps: longer episodes are cut.
    """
    draw = renderer(env.unwrapped)
    if draw is None:
        return None
    states, rewards, _ = record_episode(env, learner, state, key, max_steps)
    frames, milliseconds = draw(env.unwrapped, states, rewards)
    save_gif(frames, [milliseconds] * (len(frames) - 1) + [HOLD_MS], path)
    return Path(path)


def no_picture(env: Env, folder: Path) -> str:
    """What is said where `render_episode` draws nothing."""
    if isinstance(env.unwrapped, host.Pool):
        return f"No GIF: jmarl evaluate {folder} --render films what environments in Python draw of themselves."
    return f"No GIF: there is no picture of {env.spec.name}."


def save_gif(frames: list[Image.Image], durations: list[Any], path: str | Path) -> None:
    """Pictures, each shown for so many milliseconds, again and again."""
    small = [frame.quantize(64, dither=Image.Dither.NONE) for frame in frames]
    small[0].save(path, save_all=True, append_images=small[1:], duration=durations, loop=0, optimize=True)


def has_picture(env: Env) -> bool:
    """Whether `render_episode` can draw this environment."""
    return renderer(env.unwrapped) is not None


def record_episode(
    env: Env, learner: Learner, state: TrainState, key: jax.Array, max_steps: int
) -> tuple[list[Any], np.ndarray, bool]:
    """The states from the first to the one after the last step, the rewards `[T, N]` between them, whether it ended."""

    def step(loop: tuple[Any, ...], key: jax.Array) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        env_state, carry, obs, first = loop
        batch_of_one = jax.tree.map(lambda x: x[None], (obs, first))
        action, carry = learner.greedy(state, carry, *batch_of_one)
        env_state, obs, outcome = env.step(env_state, action[0], key)
        return (env_state, carry, obs, outcome.last), (env_state, outcome.reward, outcome.last)

    @jax.jit
    def play(key: jax.Array) -> tuple[Any, tuple[Any, ...]]:
        key_reset, *keys = jax.random.split(key, max_steps + 1)
        env_state, obs = env.reset(key_reset)
        loop = (env_state, learner.init_carry((1,)), obs, jnp.array(True))
        return env_state, jax.lax.scan(step, loop, jnp.stack(keys))[1]

    start, (later, rewards, last) = jax.device_get(_without_keys(play(key)))
    length = int(np.argmax(last)) + 1 if last.any() else max_steps
    return (
        [start, *(jax.tree.map(lambda x, t=t: x[t], later) for t in range(length))],
        rewards[:length],
        bool(last.any()),
    )


def _without_keys(tree: Any) -> Any:
    """Typed keys cannot be brought to the host, and pictures do not need them."""
    return jax.tree.map(lambda x: () if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, tree)


def renderer(unwrapped: Any) -> Any:
    """`(env, states, rewards) -> (frames, milliseconds)` for an environment underneath; None where nothing draws it."""
    if isinstance(unwrapped, PredatorPrey):
        return _draw_predator_prey
    if type(unwrapped).__name__ in ("TicTacToe", "ConnectFour") and type(unwrapped).__module__.startswith("pgx"):
        return _draw_board
    if any(cls.__module__.startswith("jumanji") for cls in type(unwrapped).__mro__):
        return _draw_jumanji
    if not type(unwrapped).__module__.startswith("jaxmarl"):
        return None
    from jaxmarl.environments.mpe.simple import SimpleMPE
    from jaxmarl.environments.overcooked.overcooked import Overcooked
    from jaxmarl.environments.smax.heuristic_enemy_smax_env import EnemySMAX
    from jaxmarl.environments.smax.smax_env import SMAX

    renderers = {SimpleMPE: _draw_mpe, SMAX: _draw_smax, EnemySMAX: _draw_smax, Overcooked: _draw_overcooked}
    return next((draw for kind, draw in renderers.items() if isinstance(unwrapped, kind)), None)


def _draw_mpe(env: Any, states: list[Any], rewards: np.ndarray) -> tuple[list[Image.Image], int]:
    """Discs: landmarks dark, agents in JaxMARL's colours with their numbers. What is said appears below."""
    radius, colours = np.asarray(env.rad), np.asarray(env.colour).astype(int)
    reach = float(np.clip(max(np.abs(s.p_pos).max() for s in states) + 0.2, 1.2, 2.5))
    returns = np.concatenate([[0.0], rewards.sum(1).cumsum()])
    frames = []
    for t, (state, so_far) in enumerate(zip(states, returns, strict=True)):
        canvas = _Canvas(2 * reach, (-reach, reach))
        for i in np.argsort(-radius, kind="stable"):  # the large below the small: a covered landmark is seen
            canvas.disc(state.p_pos[i], radius[i], tuple(colours[i].tolist()), str(i + 1) if i < env.num_agents else "")
        said = [
            f"{env.agents[i]} says {'ABCDEFGHIJ'[int(np.argmax(state.c[i]))]}"
            for i in range(env.num_agents)
            if not np.asarray(env.silent)[i] and np.any(state.c[i])
        ]
        frames.append(canvas.image(f"step {t}   return {so_far:.1f}", "   ".join(said)))
    return frames, 160


def _draw_smax(env: Any, states: list[Any], rewards: np.ndarray) -> tuple[list[Image.Image], int]:
    """Discs with health bars, allies blue, enemies orange, lines for shots; one picture between two steps."""
    battle = getattr(env, "_env", env)
    states = [getattr(state, "state", state) for state in states]
    letters, kinds = battle.unit_type_shorthands, states[0].unit_types
    radius, full = np.asarray(battle.unit_type_radiuses)[kinds], np.asarray(battle.unit_type_health)[kinds]
    everywhere = np.concatenate([s.unit_positions for s in states])
    side = float(np.ptp(everywhere, axis=0).max()) + 4
    corner = (everywhere.min(0) + everywhere.max(0)) / 2 + [-side / 2, side / 2]
    radius = np.maximum(radius, 0.035 * side)  # a marine is a few pixels else
    frames = []
    for t in range(len(states)):
        before, state = states[max(t - 1, 0)], states[t]
        for part in (0.5, 1.0) if t else (1.0,):
            at = (1 - part) * before.unit_positions + part * state.unit_positions
            canvas = _Canvas(side, tuple(corner))
            for i in np.flatnonzero(before.unit_alive):
                action = int(state.prev_attack_actions[i]) - battle.num_movement_actions
                is_ally = i < battle.num_allies
                target = battle.num_allies + action if is_ally else battle.num_allies - 1 - action
                if t and action >= 0 and before.unit_alive[target]:
                    canvas.line(at[i], at[target], ALLY if is_ally else ENEMY)
            for i in np.flatnonzero(before.unit_alive if part < 1 else state.unit_alive):
                canvas.disc(at[i], radius[i], ALLY if i < battle.num_allies else ENEMY, letters[kinds[i]], PAPER)
                health = (1 - part) * before.unit_health[i] + part * state.unit_health[i]
                canvas.bar(at[i] + [0, radius[i] + 0.35], 2 * radius[i], float(health / full[i]))
            allies, enemies = state.unit_alive[: battle.num_allies].sum(), state.unit_alive[battle.num_allies :].sum()
            frames.append(canvas.image(f"step {t}   {allies} against {enemies}"))
    return frames, 110


def _draw_overcooked(env: Any, states: list[Any], rewards: np.ndarray) -> tuple[list[Image.Image], int]:
    """JaxMARL's own tiles."""
    from jaxmarl.viz.overcooked_visualizer import OvercookedVisualizer

    margin = env.agent_view_size - 2
    returns = np.concatenate([[0.0], rewards.sum(1).cumsum()])
    frames = []
    for t, (state, so_far) in enumerate(zip(states, returns, strict=True)):
        grid = np.asarray(state.maze_map[margin:-margin, margin:-margin])
        tiles = OvercookedVisualizer._render_grid(grid, agent_dir_idx=state.agent_dir_idx, agent_inv=state.agent_inv)
        picture = Image.fromarray(tiles).resize((tiles.shape[1] * 2, tiles.shape[0] * 2))
        frames.append(below(f"step {t}   return {so_far:.0f}", picture))
    return frames, 150


def _draw_board(env: Any, states: list[Any], rewards: np.ndarray) -> tuple[list[Image.Image], int]:
    """Discs on Pgx's boards: player_0 blue, player_1 orange, whoever begins."""
    height, width, _ = env.observation_shape
    side = max(height, width)
    frames = []
    for t, state in enumerate(states):
        canvas = _Canvas(side + 1, (-(side + 1 - width) / 2, (side + 1 - height) / 2))
        for x in range(width + 1):
            canvas.line(np.array([x, 0]), np.array([x, -height]), (200, 200, 200))
        for y in range(height + 1):
            canvas.line(np.array([0, -y]), np.array([width, -y]), (200, 200, 200))
        starts = int(states[0].current_player)
        for cell in np.flatnonzero(board := np.asarray(state._x.board) + 1):
            player = (board[cell] - 1) ^ starts
            canvas.disc(np.array([cell % width + 0.5, -(cell // width) - 0.5]), 0.38, (ALLY, ENEMY)[player])
        winner = "".join(f"   player_{i} has won" for i in np.flatnonzero(rewards[t - 1] > 0)) if t else ""
        frames.append(canvas.image(f"move {t}{winner}"))
    return frames, 700


def _draw_jumanji(env: Any, states: list[Any], rewards: np.ndarray) -> tuple[list[Image.Image], int]:
    """Jumanji's own pictures."""
    from matplotlib.animation import PillowWriter

    pictures = []

    class Keeping(PillowWriter):
        def grab_frame(self, **settings: Any) -> None:
            file = io.BytesIO()
            self.fig.savefig(file, format="png", dpi=self.dpi)
            pictures.append(Image.open(file).convert("RGB"))

        def finish(self) -> None:
            pass

    # Its viewers open a window for a single picture, and none for an animation. Their figures are 10 inches wide.
    env.animate([state.raw for state in states], interval=150).save("nowhere", Keeping(), dpi=SIZE / 10)
    returns = np.concatenate([[0.0], rewards.sum(1).cumsum()])
    titles = [f"step {t}   return {so_far:.2f}" for t, so_far in enumerate(returns)]
    return [below(title, picture) for title, picture in zip(titles, pictures, strict=True)], 150


def below(title: str, picture: Image.Image) -> Image.Image:
    """A picture with a line of text above it."""
    frame = Image.new("RGB", (picture.width, picture.height + 26), PAPER)
    frame.paste(picture, (0, 26))
    ImageDraw.Draw(frame).text((6, 4), title, INK, ImageFont.load_default(15))
    return frame


def _draw_predator_prey(rules: PredatorPrey, states: list[Any], rewards: np.ndarray) -> tuple[list[Image.Image], int]:
    """Discs, predators blue with numbers, prey orange. Who is in a capture is pale for one step, joined by lines."""
    size, outside, margin = rules.size, rules.size**2, 0.1 * rules.size  # the text stands in the margin
    returns = np.round(np.concatenate([[0.0], rewards.sum(1).cumsum()]), 1) + 0.0  # no -0.0
    place = lambda cell: np.array([cell % size + 0.5, -(cell // size) - 0.5])  # noqa: E731
    frames = []
    for t, (state, so_far) in enumerate(zip(states, returns, strict=True)):
        canvas = _Canvas(size + 2 * margin, (-margin, margin))
        for edge in range(size + 1):
            canvas.line(np.array([edge, 0]), np.array([edge, -size]), (225, 225, 225))
            canvas.line(np.array([0, -edge]), np.array([size, -edge]), (225, 225, 225))
        before = states[max(t - 1, 0)]  # a capture is drawn where it began: nobody in it moved
        leaves = np.flatnonzero((before.predators < outside) & (state.predators == outside))
        captured = np.flatnonzero((before.prey < outside) & (state.prey == outside))
        for i, p in itertools.product(leaves, captured):
            start, end = place(before.predators[i]), place(before.prey[p])
            if np.abs(start - end).sum() == 1:
                canvas.line(start, end, ALLY, 4)
        for p in captured:
            canvas.disc(place(before.prey[p]), 0.24, _pale(ENEMY))
        for i in leaves:
            canvas.disc(place(before.predators[i]), 0.38, _pale(ALLY), str(i + 1))
        is_here, is_free = state.predators < outside, state.prey < outside
        for p in np.flatnonzero(is_free):
            canvas.disc(place(state.prey[p]), 0.24, ENEMY)
        for i in np.flatnonzero(is_here):
            canvas.disc(place(state.predators[i]), 0.38, ALLY, str(i + 1), PAPER)
        left = f"{is_here.sum()} predators, {is_free.sum()} prey"
        frames.append(canvas.image(f"step {t}   return {so_far:.1f}", left))
    return frames, 200


def _pale(colour: tuple[int, ...]) -> tuple[int, ...]:
    return tuple((c + 2 * 255) // 3 for c in colour)


class _Canvas:
    """A square of the plane, `side` units wide, with its upper left corner at `corner`; y points up."""

    def __init__(self, side: Number, corner: tuple[Number, Number]):
        self._image = Image.new("RGB", (SIZE * SCALE, SIZE * SCALE), PAPER)
        self._draw = ImageDraw.Draw(self._image)
        self._unit, self._corner = SIZE * SCALE / side, corner

    def _pixel(self, point: np.ndarray) -> tuple[Any, Any]:
        return (point[0] - self._corner[0]) * self._unit, (self._corner[1] - point[1]) * self._unit

    def disc(self, centre: np.ndarray, radius: Number, colour: tuple[int, ...], text: str = "", ink: Any = INK) -> None:
        (x, y), r = self._pixel(centre), radius * self._unit
        edge = tuple(int(0.7 * c) for c in colour)
        self._draw.ellipse((x - r, y - r, x + r, y + r), fill=tuple(colour), outline=edge, width=SCALE)
        if text:
            self._draw.text((x, y), text, ink, ImageFont.load_default(max(r, 8)), anchor="mm")

    def line(self, start: np.ndarray, end: np.ndarray, colour: tuple[int, ...], width: int = 1) -> None:
        self._draw.line([self._pixel(start), self._pixel(end)], fill=colour, width=width * SCALE)

    def bar(self, centre: np.ndarray, width: Number, share: Number) -> None:
        (x, y), half, high = self._pixel(centre), width * self._unit / 2, 1.5 * SCALE
        self._draw.rectangle((x - half, y - high, x + half, y + high), fill=(210, 210, 210))
        if share > 0:
            self._draw.rectangle((x - half, y - high, x - half + 2 * half * share, y + high), fill=(0, 158, 115))

    def image(self, title: str, footer: str = "") -> Image.Image:
        frame = self._image.resize((SIZE, SIZE), Image.Resampling.LANCZOS)
        draw = ImageDraw.Draw(frame)
        draw.rectangle((0, 0, SIZE - 1, SIZE - 1), outline=(200, 200, 200))
        draw.text((8, 5), title, INK, ImageFont.load_default(15))
        draw.text((8, SIZE - 22), footer, INK, ImageFont.load_default(13))
        return frame
