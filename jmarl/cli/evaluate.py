"""Evaluates the policies of a run: a table per seed, evaluation.json, and on request a GIF and a policy to hand on.

    jmarl evaluate runs/mappo --episodes 256 --gif
    jmarl evaluate runs/mappo --best --export policy.jax
    jmarl evaluate runs/vdn-3m --env-kwargs map_name=8m --out 8m.json
    jmarl evaluate runs/mappo --render trial.mp4 --trials 3

From Python, `evaluate.main(["runs/mappo"])` returns the metrics, `[seed]` each. The exported policy needs neither the
run nor jmarl: see `jmarl.export`.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import PRNGKeyArray
from rich.console import Console
from rich.table import Table

import jmarl
from jmarl.cli import rendering, trial
from jmarl.cli.errors import UsageError, require_at_least_one, require_free_file, require_seed, usage_errors
from jmarl.cli.options import key_values
from jmarl.cli.run_folders import changed_kwargs, load_run, read_config
from jmarl.envs import host
from jmarl.types import Env, Learner, Metrics, TrainState


def as_in_training(learner: Learner, key: PRNGKeyArray) -> Learner:
    """The same learner, but what it plays as `greedy` is what it does while it learns. `key` decides its chance."""

    def greedy(state, carry, obs, first):
        memory, time = carry
        action, memory, _ = learner.act(state, memory, obs, first, jax.random.fold_in(key, time))
        return action, (memory, time + 1)

    return learner._replace(greedy=greedy, init_carry=lambda shape: (learner.init_carry(shape), jnp.int32(0)))


def evaluate(
    env: Env, learner: Learner, states: TrainState, key: PRNGKeyArray, *, num_episodes: int, exploring: bool = False
) -> Metrics:
    """The metrics of `jmarl.evaluate`, `[S]`, of states with a leading axis `[S]`: seeds, each in its own episodes."""

    def play(state: TrainState, key: PRNGKeyArray) -> Metrics:
        key_play, key_act = jax.random.split(key)
        player = as_in_training(learner, key_act) if exploring else learner
        return jmarl.evaluate(env, player, state, key_play, num_episodes=num_episodes)

    # As in `jmarl.run`: compiling takes far longer than playing.
    play_all = jax.jit(jax.vmap(play), compiler_options=jmarl.rows.compiler_options(1))
    return play_all(states, jax.random.split(key, len(states.step)))


def print_table(metrics: dict[str, np.ndarray], title: str) -> None:
    """A row for each seed and one for their mean; returns of single agents are left to the file."""
    shown = {name.removeprefix("eval/"): v for name, v in metrics.items() if not name.startswith("eval/return/")}
    table = Table(title=title, title_justify="left", title_style="")
    for heading in ("seed", *shown):
        table.add_column(heading, justify="right")
    for seed in range(len(next(iter(shown.values())))):
        table.add_row(str(seed), *(f"{values[seed]:.2f}" for values in shown.values()))
    table.add_section()
    table.add_row("mean", *(f"{values.mean():.2f}" for values in shown.values()))
    Console().print(table)


def evaluate_run(
    run: tyro.conf.Positional[Path],
    episodes: int = 128,
    exploring: bool = False,
    best: bool = False,
    seed: int = 0,
    out: Path | None = None,
    gif: bool = False,
    export: Path | None = None,
    pick: int | None = None,
    overwrite: bool = False,
    env: str | None = None,
    algorithm: str | None = None,
    max_eval_steps: int | None = None,
    env_kwargs: tuple[str, ...] = (),
    render: tuple[Path, ...] | None = None,
    trials: int = 1,
    fps: float | None = None,
    window: bool = False,
) -> dict[str, np.ndarray]:
    """Evaluates every seed of a run.

    Args:
      run: run folder of jmarl train.
      episodes: of each seed.
      exploring: act as in training instead of greedily.
      best: each seed as it was when it scored best in an evaluation, not as it is at the end.
      seed: decides start states and chance.
      out: file for the numbers; None: RUN/evaluation.json.
      gif: draw an episode into a file beside the numbers.
      export: file for the greedy policy of one seed, as a jax.export artefact.
      pick: number of the seed that is drawn and exported; None: the one with the highest return.
      overwrite: replace the files of an earlier call.
      env: of a run in an environment of your own: its name, module:function or file.py:function, once more.
      algorithm: of a run whose algorithm is a function of your own: its name once more.
      max_eval_steps: of an episode, where the environment has no limit; None: as in training.
      env_kwargs: KEY=VALUE that are other than in training, such as map_name=8m; None leaves one out.
      render: play episodes one by one, print what each earns, and film them, as a GIF or MP4; without a name: trial.gif
        beside the numbers.
      trials: episodes that --render and --window play.
      fps: pictures in a second of the film; None: real time, where the environment knows it.
      window: play episodes one by one in a window, in real time, and print what each earns; for environments of
        Gymnasium and PettingZoo.
    """
    out = out or run / "evaluation.json"
    if window:
        trial.require_window(env or read_config(run)["env"], render)
    film = require_film(render, out.with_name("trial.gif"), overwrite)
    require_at_least_one(trials=trials)
    if fps is not None and not 0 < fps <= 1000:
        raise UsageError(f"--fps {fps} must be positive, and at most 1000.")
    picture = out.with_suffix(".gif")
    for path in (out, *([picture] if gif else [])):
        require_free_file(path, overwrite)
    if export:
        require_free_file(export, overwrite, "--export")
    require_at_least_one(episodes=episodes)
    require_seed(seed)
    if max_eval_steps is not None:
        require_at_least_one(max_eval_steps=max_eval_steps)
    changed = key_values(env_kwargs)
    plays_in, learner, states = load_run(
        run, best=best, env=env, algorithm=algorithm, max_eval_steps=max_eval_steps, env_kwargs=changed
    )
    num_seeds = len(states.step)
    if pick is not None and not 0 <= pick < num_seeds:
        raise UsageError(f"--pick {pick} is none of the {num_seeds} seeds of {run}: choose 0 to {num_seeds - 1}.")
    key_play, key_gif = jax.random.split(jax.random.key(seed))
    with host.failures_named(plays_in):
        measured = evaluate(plays_in, learner, states, key_play, num_episodes=episodes, exploring=exploring)
        metrics = {name: np.asarray(values, float) for name, values in measured.items()}
    name = read_config(run)["algorithm"]
    how = f"{'exploring' if exploring else 'greedy'}, {'best' if best else 'last'} parameters"
    facts = {
        "run": str(run),
        "algorithm": name,
        "env": plays_in.spec.name,
        "env_kwargs": changed_kwargs(read_config(run)["env_kwargs"], changed),
        "episodes": episodes,
        "exploring": exploring,
        "best": best,
        "seed": seed,
        "env_steps": np.asarray(states.env_steps).tolist(),
        "metrics": {name: [x if np.isfinite(x) else None for x in v.tolist()] for name, v in metrics.items()},
    }
    out.write_text(json.dumps(facts, indent=1) + "\n")
    print_table(metrics, f"{name} on {plays_in.spec.name}, {how}, {episodes} episodes of each seed")
    print(f"All numbers are in {out}")
    if gif or export or film or window:
        score = metrics["eval/return_sum"]
        if pick is None and not np.isfinite(score).any():
            raise UsageError(f"No seed of {run} has a finite return: --pick one all the same.")
        chosen = int(np.nanargmax(score)) if pick is None else pick
        state = jmarl.checkpoint.take_seed(states, chosen)
    if gif:
        key_episode, key_act = jax.random.split(key_gif)
        player = as_in_training(learner, key_act) if exploring else learner
        drawn = rendering.render_episode(plays_in, player, state, key_episode, picture)
        print(f"{picture} shows seed {chosen}" if drawn else rendering.no_picture(plays_in, run))
    if film or window:
        kwargs = facts["env_kwargs"]
        seen_in = trial.visible_env(env or read_config(run)["env"], kwargs, max_eval_steps, window=window)
        seen_in = seen_in._replace(spec=seen_in.spec._replace(max_steps=plays_in.spec.max_steps))
        player = as_in_training(learner, key_gif) if exploring else learner
        played = trial.play(seen_in, player, state, key_gif, trials, window=window)
        print(f"Seed {chosen}, {how}:")
        trial.tell(played, plays_in.spec.agents)
        if film:
            trial.film(played, film, plays_in.spec.name, fps)
    if export:
        jmarl.export.export_policy(learner, state, plays_in.spec, export)
        print(f"{export} is the greedy policy of seed {chosen}: jmarl.export says how to use it.")
    return metrics


def require_film(given: tuple[Path, ...] | None, default: Path, overwrite: bool) -> Path | None:
    """The file that --render names; None where there is none to be."""
    if given is None:
        return None
    if len(given) > 1:
        raise UsageError(f"--render takes one file, not {len(given)}.")
    path = given[0] if given else default
    trial.require_film(path)
    require_free_file(path, overwrite, "--render" if given else "--overwrite")
    return path


def main(argv: Sequence[str] | None = None, prog: str = "jmarl evaluate") -> dict[str, np.ndarray]:
    """The command line. Returns the metrics by name, one value for each seed."""
    with usage_errors():
        return tyro.cli(evaluate_run, prog=prog, args=argv)


if __name__ == "__main__":
    main()
