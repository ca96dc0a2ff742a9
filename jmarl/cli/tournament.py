"""A tournament: every seed of every run against every other, on both sides of a game.

    jmarl tournament runs/mappo runs/ippo --random
    jmarl tournament runs/mappo --checkpoints --scripted heuristics.py:chase

Leaves tournament.json and tournament.png, by_run.png where runs have several seeds, with intervals over them, and
training.png of checkpoints, ratings against environment steps; and prints a table. Where the environment has two teams,
players are rated by the episodes that they win; where it has none, one agent plays with strangers and returns are
compared, as in `jmarl crossplay`. `jmarl.tournament` says what the numbers are.
"""

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import jmarl
from jmarl.cli import drawing, experiment, own, plotting
from jmarl.cli.errors import (
    UsageError,
    nearest,
    new_folder,
    require_at_least_one,
    require_free,
    require_seed,
    usage_errors,
)
from jmarl.cli.run_folders import load_run, plain_env, read_config
from jmarl.envs import views
from jmarl.tournament import Estimate, Matches, Player, Standings
from jmarl.types import Env, EnvSpec, Learner, TrainState

# Arguments of `jmarl.make` in which runs may differ and meet all the same: ids are put before a player's own views.
_HOW = ("agent_ids", "shaped_reward", "time_limit")


class Entrants(NamedTuple):
    """Who plays, where, and what a file says of each."""

    env: Env
    players: list[Player]
    facts: list[dict[str, Any]]


# -------------------------------------------------------------------------------------------------------- players


def entrants(
    runs: Sequence[Path],
    *,
    best: bool = False,
    checkpoints: bool = False,
    env: str | None = None,
    algorithms: Sequence[str] = (),
    max_eval_steps: int | None = None,
) -> Entrants:
    """The seeds of runs in one environment, as they are at the end of each or in all checkpoints that it kept.

    A seed whose parameters are not finite is left out, and told.
    """
    configs = [read_config(run) for run in runs]
    for run, facts in zip(runs, configs, strict=True):
        if _task(facts) != _task(configs[0]):
            raise UsageError(
                f"{run} is of {_show_task(facts)}, but {runs[0]} of {_show_task(configs[0])}: "
                "a tournament is of one environment."
            )
    short = [run.resolve().name for run in runs]
    names = short if len(set(short)) == len(runs) else [str(run) for run in runs]
    learners: dict[str, Learner] = {}
    plays_in, players, about = None, [], []
    for run, name, facts in zip(runs, names, configs, strict=True):
        own_name = Path(facts["algorithm"]).name
        named = next((given for given in algorithms if Path(given).name == own_name), None)
        loaded, learner, states = load_run(run, best=best, env=env, algorithm=named, max_eval_steps=max_eval_steps)
        if plays_in is None:
            plays_in = _without_ids(facts, loaded)
        if loaded.spec.has_ids and not plays_in.spec.has_ids:
            learner = _with_ids(learner)
        # Equal settings are compiled once.
        settings = json.dumps([facts["algorithm"], facts["config"], loaded.spec.has_ids], sort_keys=True)
        learner = learners.setdefault(settings, learner)
        for at, state in _kept(run, states, best=best) if checkpoints else [("", states)]:
            is_finite = np.asarray(jax.vmap(jmarl.evaluation.all_finite)(state))
            for seed in range(len(is_finite)):
                who = name + at + (f"/{seed}" if len(is_finite) > 1 else "")
                if not is_finite[seed]:
                    print(f"{who} does not play: its parameters are not finite.")
                    continue
                players.append(Player(who, learner, jmarl.checkpoint.take_seed(state, seed)))
                env_steps = None if state.env_steps is None else int(state.env_steps[seed])
                about.append({"name": who, "run": str(run), "seed": seed, "env_steps": env_steps})
    assert plays_in is not None
    return Entrants(plays_in, players, about)


def _task(facts: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """What must be the same for two policies to meet."""
    may_differ = () if own.is_own(facts["env"]) else _HOW
    return Path(facts["env"]).name, {k: v for k, v in facts["env_kwargs"].items() if k not in may_differ}


def _without_ids(facts: Mapping[str, Any], env: Env) -> Env:
    """The environment of a run, with views that have no ids added to them."""
    if own.is_own(facts["env"]) or not facts["env_kwargs"].get("agent_ids"):
        return env
    plain = plain_env(facts["env"], {k: v for k, v in facts["env_kwargs"].items() if k != "agent_ids"})
    return plain._replace(spec=plain.spec._replace(max_steps=env.spec.max_steps))


def _with_ids(learner: Learner) -> Learner:
    """One that learnt from views with ids, for an environment without."""

    def greedy(state, carry, obs, first):
        return learner.greedy(state, carry, views.identified(obs), first)

    return learner._replace(greedy=greedy)


def _show_task(facts: Mapping[str, Any]) -> str:
    name, kwargs = _task(facts)
    return f"{name}({', '.join(f'{k}={v}' for k, v in kwargs.items())})" if kwargs else name


def _kept(run: Path, like: TrainState, *, best: bool) -> list[tuple[str, TrainState]]:
    """All checkpoints of a run, with what their names end with: the environment steps of a seed."""
    folder, part = run / "checkpoints", "best.train_state" if best else "run.train_state"
    if not folder.is_dir():
        raise UsageError(f"{run} has no checkpoints: leave --checkpoints out.")
    shapes = jax.eval_shape(lambda: like)
    try:
        kept = [
            jmarl.checkpoint.restore(folder, shapes, step=step, part=part) for step in jmarl.checkpoint.steps(folder)
        ]
    except (OSError, ValueError) as error:
        raise UsageError(f"{run}: {error}") from error
    return [(f"@{int(np.max(state.env_steps))}", state) for state in kept]


def without_learning(env: Env, *, random: bool, scripted: Sequence[str], seed: int) -> list[Player]:
    """Random and scripted players."""
    learners = {"random": jmarl.random_policy(env.spec, jmarl.RandomConfig())} if random else {}
    for name in scripted:
        if not own.is_own(name):
            raise UsageError(f"--scripted {name} names no function: write module:function or file.py:function.")
        learners[name.rpartition(":")[2]] = jmarl.scripted(own.find_algorithm(name))  # type: ignore[arg-type]
    return [Player(name, learner, learner.init(jax.random.key(seed))) for name, learner in learners.items()]


def members_of(spec: EnvSpec, agent: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The two teams; where there are none, one agent and all others."""
    if spec.teams:
        return jmarl.tournament.sides_of(spec)
    if spec.num_agents < 2:
        raise UsageError(f"{spec.name} has one agent: players cannot meet there.")
    if not 0 <= agent < spec.num_agents:
        raise UsageError(f"--agent {agent} must be one of 0 to {spec.num_agents - 1}.")
    return (agent,), tuple(i for i in range(spec.num_agents) if i != agent)


def require_told(env: Env, player: Player, wins: str) -> None:
    """Refuses an entry that the environment's info does not have, before anybody plays."""

    def play(key):
        return jmarl.evaluation.play_episodes(env, player.learner, player.state, key, num_episodes=1)

    told = jmarl.evaluation.flat_info(jax.eval_shape(play, jax.random.key(0)).info)
    if wins not in (known := ["return", "duplicate", *told]):
        raise UsageError(f"--wins {wins} is nothing that {env.spec.name} tells: {nearest(wins, known)}")


def side_name(spec: EnvSpec, side: Sequence[int]) -> str:
    """Agents in few words: agent_0, or adversary (3)."""
    names = [spec.agents[i] for i in side]
    kinds = {name.rstrip("_-0123456789") or "agents" for name in names}
    return names[0] if len(names) == 1 else f"{' and '.join(sorted(kinds))} ({len(names)})"


# -------------------------------------------------------------------------------------------------------- results


def team_returns(matches: Matches) -> np.ndarray:
    """Mean return of an episode over all agents, `[P, P]`."""
    return np.asarray(matches.episodes.returns, float).mean((-2, -1))


def with_strangers(matches: Matches) -> Estimate:
    """Each player's mean return with all others, on either side, `[P]`; the normal interval over start states."""
    of_episodes = np.asarray(matches.episodes.returns, float).mean(-1)
    num, num_episodes = len(of_episodes), of_episodes.shape[-1]
    of_episodes[range(num), range(num)] = 0
    mine = (of_episodes.sum(0) + of_episodes.sum(1)) / (2 * (num - 1))
    mean = mine.mean(-1)
    half_width = 1.96 * mine.std(-1, ddof=1) / np.sqrt(num_episodes) if num_episodes > 1 else np.full(num, np.nan)
    return Estimate(mean, mean - half_width, mean + half_width)


def as_json(value: Any) -> Any:
    """Arrays as lists of numbers with seven digits, NaN as null, bundles by the names of their fields."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: as_json(x) for name, x in value._asdict().items()}
    if isinstance(value, np.ndarray):
        return as_json(value.tolist())
    if isinstance(value, list):
        return [as_json(x) for x in value]
    return float(f"{value:.7g}") if np.isfinite(value) else None


def print_table(names: Sequence[str], columns: Mapping[str, Estimate], title: str, style: str) -> None:
    """A row for each player, the best of the first column on top; `style` formats numbers."""
    table = Table(title=title, title_justify="left", title_style="")
    table.add_column("player", overflow="fold")
    for heading in columns:
        table.add_column(heading, justify="right")
    for i in best_first(columns):
        cells = (f"{x.value[i]:{style}} ({x.low[i]:{style}} to {x.high[i]:{style}})" for x in columns.values())
        table.add_row(names[i], *cells)
    Console().print(table)


def best_first(columns: Mapping[str, Estimate]) -> np.ndarray:
    """The numbers of the players, by the first column."""
    return np.argsort(-next(iter(columns.values())).value, kind="stable")


# -------------------------------------------------------------------------------------------------------- figures


def draw(
    matrix: np.ndarray,
    series: Mapping[str, Estimate],
    names: Sequence[str],
    path: Path,
    *,
    label: str,
    sides: tuple[str, str],
    title: str,
    is_share: bool,
) -> Path:
    """The matrix, and beside it numbers of each player with intervals; the best of the first series on top."""
    num = len(names)
    order = best_first(series)
    shown = [_shortened(names[i]) for i in order]
    room = 0.07 * max(map(len, shown))  # for a name, in inches
    side = num * (0.55 if num <= 16 else 0.19) + 0.6
    figure = drawing.Figure(figsize=(side + room + 1.6 + 3.4, max(side + room, 2.2) + 0.9), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(side + 1.0, 3.0), sharey=True, gridspec_kw={"wspace": 0.06})
    drawing.heat_map(left, matrix[order][:, order], shown, label=label, is_share=is_share)
    left.set_aspect("auto")  # so that the rows of both are in line
    left.set_xlabel(f"as {sides[1]}")
    left.set_ylabel(f"as {sides[0]}")
    for i, (name, estimate) in enumerate(series.items()):
        y = np.arange(num) + 0.22 * (i - (len(series) - 1) / 2)
        value, low, high = (x[order] for x in estimate)
        colour = plotting.COLOURS[i] if i else "black"
        right.hlines(y, low, high, color=colour, linewidth=1.2)
        right.plot(value, y, "o", color=colour, markersize=3.5 if num <= 16 else 2.5, label=name)
    right.tick_params(axis="y", labelleft=False, length=0)
    right.grid(axis="x", alpha=0.25)
    right.spines[["top", "right", "left"]].set_visible(False)
    right.set_xlabel(next(iter(series)))
    if len(series) > 1:
        right.legend(frameon=False, fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(series))
    figure.suptitle(textwrap.fill(title, 110 if num > 8 else 70), fontsize="medium")
    figure.savefig(path, dpi=130)
    return path


def draw_by_run(of_runs: Estimate, names: Sequence[str], path: Path, *, sides: tuple[str, str]) -> Path:
    """Returns of either side, averaged over the seeds of two runs, with intervals over seeds where there is room."""
    num = len(names)
    shown = [_shortened(name) for name in names]
    room = 0.07 * max(map(len, shown))
    side = num * (0.95 if num <= 8 else 0.4 if num <= 16 else 0.19) + 0.6
    figure = drawing.Figure(figsize=(2 * (side + room + 1.3), side + room + 0.9), layout="constrained")
    for i, axes in enumerate(figure.subplots(1, 2)):
        value, low, high = (x[i] for x in of_runs)
        drawing.heat_map(axes, value, shown, label="", between=(low, high))
        axes.set_title(f"return of {sides[i]}", fontsize="medium")
        axes.set_xlabel(f"as {sides[1]}")
        axes.set_ylabel(f"as {sides[0]}")
    figure.savefig(path, dpi=130)
    return path


def draw_training(series: Mapping[str, Estimate], players: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Each number of `series` against environment steps: thin lines of seeds, a thick one for their mean."""
    seeds: dict[tuple[str, int], list[int]] = {}
    for i, player in enumerate(players):
        if player["run"] is not None:
            seeds.setdefault((player["run"], player["seed"]), []).append(i)
    runs = list(dict.fromkeys(run for run, _ in seeds))
    figure = drawing.Figure(figsize=(4.2 * len(series), 3.4), layout="constrained")
    for axes, (name, estimate) in zip(figure.subplots(1, len(series), squeeze=False)[0], series.items(), strict=True):
        for number, run in enumerate(runs):
            colour = plotting.COLOURS[number % len(plotting.COLOURS)]
            curves = [np.array(who) for (of, _), who in seeds.items() if of == run]
            for seed, who in enumerate(curves):
                steps = [players[i]["env_steps"] for i in who]
                label = None if seed else _shortened(Path(run).name)
                axes.plot(steps, estimate.value[who], color=colour, linewidth=0.7, alpha=0.5, label=label)
                axes.fill_between(steps, estimate.low[who], estimate.high[who], color=colour, alpha=0.08, linewidth=0)
            if len({len(who) for who in curves}) == 1:
                steps = [players[i]["env_steps"] for i in curves[0]]
                mean = np.mean([estimate.value[who] for who in curves], axis=0)
                axes.plot(steps, mean, color=colour, linewidth=1.8)
        for i, player in enumerate(players):
            if player["run"] is None:
                axes.axhline(estimate.value[i], color="0.4", linestyle=":", linewidth=1, label=player["name"])
        axes.set_xlabel("environment steps")
        axes.set_title(name, fontsize="medium")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    return path


def _shortened(name: str) -> str:
    """The end of a long name, where players of one run differ."""
    return name if len(name) <= 28 else f"..{name[-26:]}"


# ----------------------------------------------------------------------------------------------------- the command


def tournament(
    runs: tyro.conf.Positional[tuple[Path, ...]],
    out: Path = Path("tournament"),
    overwrite: bool = False,
    episodes: int = 128,
    wins: str | None = None,
    best: bool = False,
    checkpoints: bool = False,
    random: bool = False,
    scripted: tuple[str, ...] = (),
    agent: int = 0,
    seed: int = 0,
    pairs_at_once: int = 64,
    env: str | None = None,
    algorithm: tuple[str, ...] = (),
    max_eval_steps: int | None = None,
) -> None:
    """Lets every player meet every other, on both sides; leaves a picture, ratings and all numbers.

    Args:
      runs: run folders of jmarl train, in one environment, with their parameters; every seed is a player.
      out: a new folder.
      overwrite: replace the files of an earlier call.
      episodes: greedy episodes of each pair, from the same start states.
      wins: who wins an episode. return: the side that earns more for each of its members; duplicate: the one that does
        better than most did from the same start, for sides that are paid unlike; or an entry of the environment's info
        that tells whether side 0 won, such as won. None: return where teams oppose each other; elsewhere nobody, so
        that returns are compared instead.
      best: each seed as it was when it scored best in an evaluation, not as it is at the end.
      checkpoints: every checkpoint that a run has kept is a player, not the last one alone; see --keep-checkpoints of
        jmarl train.
      random: a random player takes part.
      scripted: functions of your own that take part, module:function or file.py:function, observation -> actions.
      agent: number of the agent that plays with strangers, where there are no teams.
      seed: decides start states and chance.
      pairs_at_once: how many pairs of players of one algorithm play side by side.
      env: of runs in an environment of your own: its name, module:function or file.py:function, once more.
      algorithm: of runs whose algorithms are functions of your own: their names once more.
      max_eval_steps: of an episode, where the environment has no limit; None: as in training.
    """
    if not runs:
        raise UsageError("name at least one run folder.")
    require_free(out, overwrite)
    require_at_least_one(episodes=episodes, pairs_at_once=pairs_at_once)
    require_seed(seed)
    if max_eval_steps is not None:
        require_at_least_one(max_eval_steps=max_eval_steps)
    plays_in, players, about = entrants(
        runs, best=best, checkpoints=checkpoints, env=env, algorithms=algorithm, max_eval_steps=max_eval_steps
    )
    with experiment.refused():
        extra = without_learning(plays_in, random=random, scripted=scripted, seed=seed)
        members = members_of(plays_in.spec, agent)
        players += extra
        if len(players) < 2:
            raise UsageError(f"{runs[0]} has one seed: name further runs, or --random, for somebody to meet.")
        for learner in {player.learner for player in players}:
            at_once = min(pairs_at_once, len(players) ** 2)
            experiment.require_room(
                plays_in,
                learner,
                episodes * at_once,
                f"--episodes {episodes} of {at_once} pairs side by side",
                "play fewer episodes, or --pairs-at-once",
            )
        wins = wins or ("return" if plays_in.spec.teams else None)
        if wins is not None:
            require_told(plays_in, players[0], wins)
        matches = jmarl.tournament.play(
            plays_in,
            players,
            jax.random.key(seed),
            members=members,
            num_episodes=episodes,
            pairs_at_once=pairs_at_once,
        )
        table = None if wins is None else jmarl.tournament.standings(matches, wins)
    new_folder(out, overwrite)
    about += [{"name": player.name, "run": None, "seed": None, "env_steps": None} for player in extra]
    spec, names = plays_in.spec, matches.players
    sides = side_name(spec, members[0]), side_name(spec, members[1])
    facts = {
        "env": spec.name,
        "players": about,
        "sides": [[spec.agents[i] for i in side] for side in members],
        "episodes": episodes,
        "seed": seed,
        "best": best,
        "wins": wins,
        "returns": as_json(jmarl.tournament.returns(matches)),
        **({} if table is None else as_json(table)),
    }
    title = f"{len(names)} players on {spec.name}, {episodes} episodes of each pair"
    groups = by_run(about)
    if 2 <= len(groups) < len(names):
        of_runs = jmarl.tournament.group_means(jmarl.tournament.returns(matches).value, list(groups.values()))
        facts["by_run"] = {"names": list(groups), "returns": as_json(of_runs)}
        draw_by_run(of_runs, list(groups), out / "by_run.png", sides=sides)
    # One row of a matrix in each line.
    text = re.sub(
        r"\[[^\[\]{}\"]*\]", lambda row: " ".join(row[0].split()), json.dumps(facts, indent=1, allow_nan=False)
    )
    (out / "tournament.json").write_text(text + "\n")
    if table is None:
        matrix, series = team_returns(matches), {"return with others": with_strangers(matches)}
        label = "return of an episode, averaged over agents"
    else:
        matrix, series = table.score.value, ratings_by_name(table, sides)
        label = f"share won by {sides[0]}, a draw counting half"
    is_share = table is not None
    draw(matrix, series, names, out / "tournament.png", sides=sides, title=title, label=label, is_share=is_share)
    if checkpoints:
        draw_training(series, about, out / "training.png")
    print_table(names, series, title, ".0f" if is_share else ".4g")
    written = sorted(path.name for path in out.glob("*.png"))
    print(f"{', '.join(written)} and tournament.json are in {out}")


def by_run(players: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """The numbers of those players who are seeds of one run, as they were at one time."""
    groups: dict[str, list[int]] = {}
    for i, player in enumerate(players):
        name = player["name"] if player["seed"] is None else player["name"].removesuffix(f"/{player['seed']}")
        groups.setdefault(name, []).append(i)
    return groups


def ratings_by_name(table: Standings, sides: tuple[str, str]) -> dict[str, Estimate]:
    """Ratings on both sides together, and on each."""
    roles = [Estimate(*(x[side] for x in table.role_rating)) for side in (0, 1)]
    return {"rating": table.rating, f"as {sides[0]}": roles[0], f"as {sides[1]}": roles[1]}


def main(argv: Sequence[str] | None = None, prog: str = "jmarl tournament") -> None:
    """The command line."""
    with usage_errors():
        tyro.cli(tournament, prog=prog, args=argv)


if __name__ == "__main__":
    main()
