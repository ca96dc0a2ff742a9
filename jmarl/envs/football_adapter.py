"""Google Research Football, by scenario: several players of the left team are agents, the game plays all others."""

import contextlib
import io
from typing import Any

import numpy as np

from jmarl.envs import host, stacked
from jmarl.envs.slots import HostStep, Seen
from jmarl.types import Env, EnvSpec

INSTALL = 'pip install "jmarl[football]", which the page of Python environments says how to build'
VIEW_SIZE = 115  # of the package's "simple115v2"
_ACTIVE = slice(97, 108)  # there: which player this is, one-hot

_SOME = (
    "academy_3_vs_1_with_keeper",
    "academy_counterattack_easy",
    "academy_counterattack_hard",
    "academy_corner",
    "academy_pass_and_shoot_with_keeper",
    "academy_run_pass_and_shoot_with_keeper",
    "5_vs_5",
    "11_vs_11_stochastic",
)
_GRASS, _LINES, _BALL = (86, 125, 70), (235, 240, 230), (255, 255, 255)
_LEFT, _RIGHT, _OURS = (43, 87, 154), (176, 58, 46), (250, 219, 95)
_SCALE = 220  # pixels for half of the pitch's length


def names() -> list[str]:
    """Those that the literature uses, and others."""
    return [f"football:{name}" for name in _SOME]


def make(name: str, options: dict[str, Any], *, agent_ids: bool, time_limit: str, flatten: bool) -> Env:
    """The scenario `name`. Options are those of `Football`, and `workers`, `on` and `timeout_s`, see `from_host`.

    Views are vectors, with `flatten` or without.
    """
    where, options = host.split_options(options)

    def make_one() -> Football:
        return Football(name, **options)

    return host.from_host(make_one, **where, agent_ids=agent_ids, time_limit=time_limit)


class Football:
    """A scenario of Google Research Football (Kurach et al., 2020) as a `HostEnv`.

    A view is the package's "simple115v2": where all players and the ball are and move to, who has it, which player
    this is. The global state is the same with all agents' players marked. A goal ends the return of everybody, as
    does whatever else ends an episode before its time. `info["scored"]` is 1 where the left team is ahead at the end.

    Args:
      scenario: such as "academy_3_vs_1_with_keeper".
      num_agents: players of the left team that are agents; by default all but its goalkeeper.
      shaped_reward: this multiple of the package's "checkpoints" is added to the reward, which is 1 for a goal and -1
        for the other team's, to everybody: 0.1 to who has the ball for each tenth of the way to the goal, once an
        episode, and what is left of 1 to everybody for a goal. 0 by default, and in evaluations.
    """

    info = ("scored",)
    fps = 10.0

    def __init__(self, scenario: str, num_agents: int | None = None, shaped_reward: float = 0.0):
        package = _import(scenario)
        known = package.scenario_builder.all_scenarios()
        if scenario not in known:
            raise stacked.unknown("scenario of Google Research Football", scenario, known, ValueError)
        config = package.config.Config({"level": scenario, "players": ["agent:left_players=1"]})
        most = len(config.ScenarioConfig().left_team)
        num_agents = max(1, most - 1) if num_agents is None else num_agents
        if not 1 <= num_agents <= most:
            raise ValueError(f"num_agents={num_agents} of football:{scenario}, whose left team has {most} players.")
        self._config = package.config.Config(
            {"level": scenario, "players": [f"agent:left_players={num_agents}"], "game_engine_random_seed": 0}
        )
        # The game below the package's environment, which for each step copies for each player what all see, twice.
        self.env = package.football_env_core.FootballEnvCore(self._config)
        self._checkpoints = package.wrappers.CheckpointRewardWrapper(_Views(self))
        self._shaped_reward = float(shaped_reward)
        self._view = package.wrappers.Simple115StateWrapper.convert_observation
        num_actions = len(package.football_action_set.get_action_set(self._config))
        self.spec = EnvSpec(
            name=f"football:{scenario}",
            agents=tuple(f"player_{i}" for i in range(num_agents)),
            obs_shape=(VIEW_SIZE,),
            state_shape=(VIEW_SIZE,),
            num_actions=num_actions,
            max_steps=config.ScenarioConfig().game_duration + 1,  # its clock stands still for the first step
            always_act=True,
        )
        self.views: list[dict[str, Any]] = []

    def reset(self, seed: int) -> Seen:
        self._config.update({"game_engine_random_seed": seed, "reverse_team_processing": bool(seed % 2)})
        self.env.reset()
        self._checkpoints.reset()
        return self._seen(self.env.observation())

    def step(self, action: np.ndarray) -> HostStep:
        shown, goal, last, _ = self.env.step(action.tolist())
        seen = self._seen(shown)
        reward = np.full(self.spec.num_agents, goal, np.float32)
        if self._shaped_reward:
            reward += self._shaped_reward * (self._checkpoints.reward(reward.copy()) - reward)
        left, right = shown["score"]
        is_out_of_time = shown["steps_left"] <= 0
        return HostStep(seen, reward, last and not is_out_of_time, last, {"scored": float(left > right)})

    def render(self) -> np.ndarray:
        """The pitch from above, `[H, W, 3]`: the agents have a rim, the ball is larger as it flies higher."""
        from PIL import Image, ImageDraw

        seen = self.views[0]
        margin, half = 24, round(0.42 * _SCALE)
        picture = Image.new("RGB", (2 * (_SCALE + margin), 2 * (half + margin)), _GRASS)
        draw = ImageDraw.Draw(picture)

        def disc(position: Any, radius: Any, fill: Any, rim: Any = None) -> None:
            x, y = margin + (1 + position[0]) * _SCALE, margin + half + position[1] * _SCALE
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill, rim, 2)

        right, bottom, goal = margin + 2 * _SCALE, margin + 2 * half, round(0.044 * _SCALE)
        draw.rectangle((margin, margin, right, bottom), outline=_LINES)
        draw.line((margin + _SCALE, margin, margin + _SCALE, bottom), _LINES)
        for x, end in ((margin, margin - 8), (right, right + 8)):
            draw.rectangle((min(x, end), margin + half - goal, max(x, end), margin + half + goal), outline=_LINES)
        ours = {view["active"] for view in self.views}
        for i, position in enumerate(seen["left_team"]):
            disc(position, 7, _LEFT, _OURS if i in ours else _LEFT)
        for position in seen["right_team"]:
            disc(position, 7, _RIGHT)
        disc(seen["ball"], 3 + 2 * max(0.0, seen["ball"][2]), _BALL)
        return np.asarray(picture)

    def close(self) -> None:
        self.env.close()

    def _seen(self, shown: dict[str, Any]) -> Seen:
        self.views = [{**shown, "active": which} for which in shown["left_agent_controlled_player"]]
        views = self._view(self.views, True)
        state = views[0].copy()
        state[_ACTIVE] = views[:, _ACTIVE].max(0)
        return Seen(views, state)


class _Views:
    """What the package's wrapper of rewards asks an environment for."""

    def __init__(self, game: Football):
        self._game, self.unwrapped = game, self

    def observation(self) -> list[dict[str, Any]]:
        return self._game.views

    def reset(self) -> None:
        pass


def _import(scenario: str) -> Any:
    """The package's module `env`, with the modules in it that are used here."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # Gym tells that it is no longer kept
            import gfootball.env as package
            from gfootball.env import football_action_set, football_env_core, scenario_builder, wrappers  # noqa: F401
    except ImportError as error:
        raise ImportError(f"football:{scenario} needs Google Research Football: {INSTALL}.") from error
    return package
