"""Cross-play: does a policy play with partners that it did not learn with?

    jmarl crossplay runs/mappo --episodes 256

Agent 0 follows the policy of one seed and all others that of another, for each pair of seeds: a matrix with self-play
on its diagonal. A team that relies on conventions of its own earns less beside the diagonal. Hu et al., 2020,
"Other-Play" for Zero-Shot Coordination (https://arxiv.org/abs/2003.02979).
"""

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import tyro
from jaxtyping import PRNGKeyArray

import jmarl
from jmarl.cli import drawing, experiment, plotting
from jmarl.cli.errors import (
    UsageError,
    new_folder,
    require_at_least_one,
    require_free,
    require_seed,
    usage_errors,
)
from jmarl.cli.run_folders import load_run
from jmarl.types import Env, Learner, Metrics, TrainState


def cross_play(
    env: Env, learner: Learner, states: TrainState, key: PRNGKeyArray, *, num_episodes: int = 256, agent: int = 0
) -> Metrics:
    """Greedy evaluation of each pair of seeds, all of them from the same start states.

    Args:
      env: the environment.
      learner: plays with its `greedy` policy.
      states: what it has learnt, leading axis `[S]` for seeds.
      key: source of start states and of the environment's chance.
      num_episodes: of each pair.
      agent: who plays with strangers.

    Returns:
      The metrics of `jmarl.evaluate`, `[S, S]`: the row is the seed of `agent`, the column that of all others.
    """
    others = [i for i in range(env.spec.num_agents) if i != agent]
    seeds = [jmarl.tournament.Player("seed", learner, states)]
    matches = jmarl.tournament.play(env, seeds, key, members=[[agent], others], num_episodes=num_episodes)
    means = functools.partial(jmarl.evaluation.mean_metrics, env.spec)
    return jax.vmap(jax.vmap(means))(matches.episodes)


def self_and_cross(matrix: np.ndarray) -> tuple[float, float]:
    """Mean of the diagonal and mean of everything else."""
    is_self = np.eye(len(matrix), dtype=bool)
    return float(matrix[is_self].mean()), float(matrix[~is_self].mean())


def draw_matrix(matrix: np.ndarray, path: Path, *, label: str, title: str, agent: int = 0) -> Path:
    """A heat map with a number in each cell."""
    side = len(matrix)
    cell = 0.6 if side <= drawing.MOST_NUMBERED else 0.25
    figure, axes = drawing.new_figure(3.4 + cell * side, 2.0 + 0.9 * cell * side)
    drawing.heat_map(axes, matrix, list(map(str, range(side))), label=label)
    axes.set_xlabel("seed of all other agents")
    axes.set_ylabel(f"seed of agent {agent}")
    axes.set_title(drawing.wrapped(title, 2.2 + cell * side), fontsize="medium")
    figure.savefig(path, dpi=130)
    return path


def crossplay(
    run: tyro.conf.Positional[Path],
    out: Path | None = None,
    overwrite: bool = False,
    episodes: int = 256,
    metric: str = "eval/return_sum",
    agent: int = 0,
    seed: int = 0,
    env: str | None = None,
    algorithm: str | None = None,
    max_eval_steps: int | None = None,
) -> None:
    """Lets each seed of a run play with each other; leaves a heat map and the numbers.

    Args:
      run: run folder of jmarl train, with its parameters.
      out: a new folder; None: RUN/crossplay.
      overwrite: replace the files of an earlier call.
      episodes: greedy episodes of each pair.
      metric: of jmarl.evaluate.
      agent: number of the agent that plays with strangers.
      seed: decides the start states.
      env: of a run in an environment of your own: its name, module:function or file.py:function, once more.
      algorithm: of a run whose algorithm is a function of your own: its name once more.
      max_eval_steps: of an episode, where the environment has no limit; None: as in training.
    """
    out = out or run / "crossplay"
    require_free(out, overwrite)
    require_at_least_one(episodes=episodes)
    require_seed(seed)
    if max_eval_steps is not None:
        require_at_least_one(max_eval_steps=max_eval_steps)
    plays_in, learner, states = load_run(run, env=env, algorithm=algorithm, max_eval_steps=max_eval_steps)
    num_seeds = len(states.step)
    if num_seeds < 2 or plays_in.spec.num_agents < 2:
        raise UsageError(
            f"cross-play needs two seeds and two agents: {run} has {num_seeds} and {plays_in.spec.num_agents}."
        )
    if not 0 <= agent < plays_in.spec.num_agents:
        raise UsageError(f"--agent {agent} must be one of 0 to {plays_in.spec.num_agents - 1}.")
    with experiment.refused():
        metrics = cross_play(plays_in, learner, states, jax.random.key(seed), num_episodes=episodes, agent=agent)
    if metric not in metrics:
        raise UsageError(f"--metric {metric} is not evaluated: choose one of {', '.join(sorted(metrics))}.")
    matrix = np.asarray(metrics[metric], float)
    new_folder(out, overwrite)
    self_play, others = self_and_cross(matrix)
    facts = {
        "env": plays_in.spec.name,
        "metric": metric,
        "agent": agent,
        "episodes": episodes,
        "seed": seed,
        "self_play_mean": self_play,
        "cross_play_mean": others,
        "gap": self_play - others,
        "matrix": matrix.tolist(),
    }
    (out / "crossplay.json").write_text(json.dumps(facts, indent=1, allow_nan=False) + "\n")
    label = plotting.LABELS.get(metric.split("/")[-1], metric)
    title = f"{run.name}: self-play {self_play:.3g}, cross-play {others:.3g}"
    draw_matrix(matrix, out / "crossplay.png", label=label, title=title, agent=agent)
    print(f"{metric} of {num_seeds} x {num_seeds} pairs of seeds, {episodes} episodes each")
    print(f"self-play mean {self_play:.4g}, cross-play mean {others:.4g}, gap {self_play - others:.4g}")
    print(f"crossplay.png and crossplay.json are in {out}")


def main(argv: Sequence[str] | None = None, prog: str = "jmarl crossplay") -> None:
    """The command line."""
    with usage_errors():
        tyro.cli(crossplay, prog=prog, args=argv)


if __name__ == "__main__":
    main()
