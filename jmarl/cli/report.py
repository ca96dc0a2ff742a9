"""A report of many runs: interquartile means with bootstrap intervals, curves, profiles, pairwise comparisons.

    jmarl report runs/mappo runs/qmix --out report --threshold -30
    jmarl report runs/* --out report --score-range MPE_simple_spread_v3=-80,-20 predator_prey=0,20

Folders are those that `jmarl train` leaves. Seeds of one algorithm on one task are put together, also from
several folders; runs whose settings differ stay apart and are named after the difference. `docs/results.md` says what
each number means, `statistics_of_runs.py` how it is computed.
"""

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from jmarl.cli import own, plotting, run_folders
from jmarl.cli import report_figures as figures
from jmarl.cli import statistics_of_runs as statistics
from jmarl.cli.errors import UsageError, new_folder, usage_errors

# What may differ between runs that learn the same thing in the same way.
NOT_A_SETTING = {"algorithm", "command", "config", "env", "env_kwargs", "gif", "log_every", "run_dir", "seed", "seeds"}
NOT_A_SETTING |= {"absolute_episodes", "devices", "distributed", "split", "shard", "tensorboard", "wandb", "wandb_id"}
NOT_A_SETTING |= {"checkpoint_every", "eval_episodes", "eval_every", "num_updates", "horizon", "preset", "system"}
NOT_A_SETTING |= {"format", "diverged", "max_eval_steps"}
# Arguments of `jmarl.make` about how an environment is learnt from; they leave what is evaluated as it is.
NOT_THE_TASK = ("agent_ids", "flatten", "shaped_reward", "time_limit")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run folder.

    Attributes:
      folder: where it is.
      facts: its config.json.
      env_steps: of one seed at each evaluation, `[T]`.
      wall_s: seconds since the run started, compilation included, all seeds side by side, `[T]`.
      metrics: by name, without "eval/", `[T, R]`.
      absolute: the metrics of the best parameters that were found, without "absolute/", `[R]`; {} where there are none.
    """

    folder: Path
    facts: dict[str, Any]
    env_steps: np.ndarray
    wall_s: np.ndarray
    metrics: dict[str, np.ndarray]
    absolute: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """All seeds of one algorithm on one task.

    Attributes:
      task, algorithm: names.
      runs: where the seeds come from.
      env_steps: at each evaluation that all runs have, `[T]`.
      wall_s: `[T, R]`.
      scores: `[T, R]`, normalised if the task has a range.
    """

    task: str
    algorithm: str
    runs: list[Run]
    env_steps: np.ndarray
    wall_s: np.ndarray
    scores: np.ndarray

    @property
    def final(self) -> np.ndarray:
        """The score of each seed, `[R]`."""
        return self.scores[-1]


_CENTRE = {"iqm": "IQM", "mean": "mean"}

# --------------------------------------------------------------------------------------------------------- reading


def read_run(folder: Path, metric: str) -> Run:
    """Reads a run folder; of its rows, those in which every seed has a value of `metric`."""
    facts = run_folders.read_config(folder)
    env_steps, wall_s, of_seeds = run_folders.read_metrics(folder)
    if absent := {"eval_episodes", "seed"} - facts.keys():
        raise UsageError(f"{folder}/config.json was not written by jmarl train: it has no {min(absent)}.")
    series = {name: values.T for name, values in of_seeds.items()}
    if metric not in series:
        raise UsageError(f"{folder} has no metric {metric}: choose one of {', '.join(sorted(series))}.")
    seen = np.isfinite(series[metric]).all(1)
    if not seen.any():
        raise UsageError(f"{folder} has no row in which every seed has a value of {metric}.")
    prefix = metric.split("/")[0] + "/"

    def named(prefix: str) -> dict[str, np.ndarray]:
        return {name.removeprefix(prefix): values for name, values in series.items() if name.startswith(prefix)}

    return Run(
        folder=folder,
        facts=facts,
        env_steps=env_steps[seen],
        wall_s=wall_s[seen],
        metrics={name: values[seen] for name, values in named(prefix).items()},
        absolute={name: run_folders.latest(values.T) for name, values in named("absolute/").items()},
    )


def names_with_differences(names: Sequence[str], settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names, followed by those settings in which equally named runs differ: "mappo learning_rate=0.001"."""

    def name_of(i: int) -> str:
        others = [s for name, s in zip(names, settings, strict=True) if name == names[i]]
        differing = [k for k, v in settings[i].items() if any(k in s and s[k] != v for s in others)]
        return " ".join([names[i], *(f"{k}={settings[i][k]}" for k in differing)])

    return [name_of(i) for i in range(len(names))]


def settings_of(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What decides how a run learns, but for its seeds and its task: options and hyperparameters, flat."""
    settings = {k: v for k, v in {**facts, **facts["config"]}.items() if k not in NOT_A_SETTING}
    return {**settings, **{k: facts["env_kwargs"].get(k) for k in NOT_THE_TASK}}


def task_settings(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What makes an environment the task that it is."""
    return {k: v for k, v in facts["env_kwargs"].items() if k not in NOT_THE_TASK}


def group_runs(
    runs: Sequence[Run], metric: str, *, ranges: Mapping[str, tuple[float, float]], env_steps: int | None
) -> list[Group]:
    """Puts the seeds of each algorithm on each task together.

    Args:
      runs: as read.
      metric: what a score is.
      ranges: (low, high) by task or environment, which become 0 and 1.
      env_steps: evaluations after this many are left out.
    """
    environments = [run.facts["env"] for run in runs]
    given = [task_settings(run.facts) for run in runs]
    everything = sorted({name for settings in given for name in settings})
    tasks = names_with_differences(environments, [{k: s.get(k, "default") for k in everything} for s in given])
    groups = []
    for task in dict.fromkeys(tasks):
        of_task = [run for run, its_task in zip(runs, tasks, strict=True) if its_task == task]
        names = names_with_differences([r.facts["algorithm"] for r in of_task], [settings_of(r.facts) for r in of_task])
        low, high = ranges.get(task, ranges.get(of_task[0].facts["env"], (0.0, 1.0)))
        for name in dict.fromkeys(names):
            together = [run for run, its_name in zip(of_task, names, strict=True) if its_name == name]
            groups.append(_merge(task, name, together, metric.split("/", 1)[-1], (low, high), env_steps))
    return groups


def _merge(
    task: str, algorithm: str, runs: list[Run], metric: str, score_range: tuple[float, float], env_steps: int | None
) -> Group:
    for one, other in itertools.combinations(runs, 2):
        if one.facts["seed"] == other.facts["seed"]:
            raise UsageError(
                f"{one.folder} and {other.folder} hold the same seeds (--seed {one.facts['seed']}): leave one out."
            )
    common = set.intersection(*(set(run.env_steps.tolist()) for run in runs))
    shared = np.array(sorted(step for step in common if env_steps is None or step <= env_steps))
    if not shared.size:
        folders = " and ".join(str(run.folder) for run in runs)
        limit = "" if env_steps is None else f" up to {env_steps:,} environment steps"
        raise UsageError(f"There is no evaluation at the same number of steps in {folders}{limit}.")
    low, high = score_range
    scores, wall_s = [], []
    for run in runs:
        rows = np.isin(run.env_steps, shared)
        scores.append(run.metrics[metric][rows])
        wall_s.append(np.broadcast_to(run.wall_s[rows, None], scores[-1].shape))
    return Group(
        task=task,
        algorithm=algorithm,
        runs=runs,
        env_steps=shared,
        wall_s=np.concatenate(wall_s, axis=1),
        scores=(np.concatenate(scores, axis=1) - low) / (high - low),
    )


# --------------------------------------------------------------------------------------------------------- writing


def write_report(
    folders: Sequence[Path],
    out: Path,
    *,
    metric: str = "eval/return_sum",
    ranges: Mapping[str, tuple[float, float]] | None = None,
    thresholds: Mapping[str, float] | None = None,
    env_steps: int | None = None,
    interval: statistics.Interval = "iqm",
    overwrite: bool = False,
) -> str:
    """Writes report.md, marl_eval.json and the figures into the folder `out`, and returns the text of the first.

    Args:
      folders: of runs.
      out: a new folder.
      metric: what a score is.
      ranges: (low, high) by task or environment, which become the scores 0 and 1.
      thresholds: a return by task or environment, in the unit of the metric; "" is for all.
      env_steps: compares what was reached after at most so many steps of each seed; None: at the end of each run.
      interval: of the seeds, "iqm" or "mean".
      overwrite: `out` may exist; its files are replaced.
    """
    ranges, thresholds = ranges or {}, thresholds or {}
    runs = [read_run(folder, metric) for folder in folders]
    groups = group_runs(runs, metric, ranges=ranges, env_steps=env_steps)
    tasks = {task: [g for g in groups if g.task == task] for task in dict.fromkeys(g.task for g in groups)}
    _require_known("--score-range", ranges, groups)
    _require_known("--threshold", [name for name in thresholds if name], groups)
    new_folder(out, overwrite)
    lines = figures.lines(sorted({group.algorithm for group in groups}))
    unit = plotting.LABELS.get(metric.split("/")[-1], metric)

    sections = ["# Report", _preamble(metric, runs, env_steps, interval)]
    for task, of_task in tasks.items():
        env = of_task[0].runs[0].facts["env"]
        score_range = ranges.get(task, ranges.get(env))
        threshold = thresholds.get(task, thresholds.get(env, thresholds.get("")))
        label = f"normalised score, 0 is {score_range[0]:g} and 1 is {score_range[1]:g}" if score_range else unit
        goal = None if threshold is None else _normalised(threshold, score_range)
        look = figures.Look(task, label, lines, interval)
        of_task.sort(key=lambda group: -statistics.interquartile_mean(group.final))
        curves = figures.draw_curves(
            {g.algorithm: (g.env_steps, g.scores) for g in of_task}, out / f"{_slug(task)}-curves.png", look, goal
        )
        sections += [
            f"## {task}",
            _which_task(of_task[0], score_range),
            _task_table(of_task, threshold, goal, interval),
        ]
        sections += _comparison({group.algorithm: [group.final] for group in of_task}, out, look, [curves])
    if len(tasks) > 1:
        sections += _all_tasks(tasks, out, ranges, lines, interval)

    text = "\n\n".join(section for section in sections if section) + "\n"
    (out / "report.md").write_text(text)
    (out / "marl_eval.json").write_text(json.dumps(marl_eval(groups), allow_nan=False) + "\n")
    return text


def _all_tasks(
    tasks: Mapping[str, list[Group]],
    out: Path,
    ranges: Mapping[str, Any],
    lines: Mapping[str, Any],
    interval: statistics.Interval,
) -> list[str]:
    """The section on all tasks together: scores must be normalised, and algorithms run everywhere."""
    if not all(task in ranges or groups[0].runs[0].facts["env"] in ranges for task, groups in tasks.items()):
        return ["There is no aggregate over tasks: it needs --score-range for each of them."]
    final = [{group.algorithm: group.final for group in groups} for groups in tasks.values()]
    common = [name for name in lines if all(name in of_task for of_task in final)]
    if not common:
        return ["There is no aggregate over tasks: no algorithm was run on all of them."]
    scores = {name: [of_task[name] for of_task in final] for name in common}
    scores = dict(sorted(scores.items(), key=lambda item: -statistics.interquartile_mean(*item[1])))
    table = _markdown(
        ["algorithm", "runs", _CENTRE[interval]],
        [
            [name, str(sum(map(len, by_task))), _centre(by_task, "{:.3f}".format, interval)]
            for name, by_task in scores.items()
        ],
    )
    look = figures.Look("all tasks", "normalised score", lines, interval)
    text = "Normalised scores of the algorithms that were run on every task."
    return ["## All tasks", text, table, *_comparison(scores, out, look, [])]


def marl_eval(groups: Sequence[Group]) -> dict[str, Any]:
    """The layout that marl-eval reads (https://github.com/instadeepai/marl-eval): environment, task, algorithm, run.

    Lists hold one number, the mean over the episodes of an evaluation: that is what a run folder has. The absolute
    metrics are those of the best parameters where the run has them, and those of the last evaluation where it does not.
    """
    content: dict[str, Any] = {}
    for group in groups:
        environment, task = _marl_eval_names(group.runs[0].facts)
        seeds = content.setdefault(environment, {}).setdefault(task, {}).setdefault(group.algorithm, {})
        for run in group.runs:
            for seed in range(next(iter(run.metrics.values())).shape[1]):
                evaluations = {
                    f"step_{t}": {
                        "step_count": int(steps),
                        "elapsed_time": float(run.wall_s[t]),
                        **{name: [value[t, seed]] for name, value in run.metrics.items() if np.isfinite(value).all()},
                    }
                    for t, steps in enumerate(run.env_steps)
                }
                last = {k: v for k, v in evaluations[f"step_{len(run.env_steps) - 1}"].items() if isinstance(v, list)}
                best = {k: [v[seed]] for k, v in run.absolute.items() if np.isfinite(v).all()}
                seeds[f"seed_{len(seeds)}"] = {**evaluations, "absolute_metrics": best or last}  # read as the last
    return content


def _marl_eval_names(facts: Mapping[str, Any]) -> tuple[str, str]:
    """Lower case, since marl-eval asks for its environments so. MPE's scenarios are tasks of one environment."""
    env = facts["env"]
    words = [str(v) if isinstance(v, str) else f"{k}={v}" for k, v in task_settings(facts).items()]
    if env.startswith("MPE_"):
        env, words = "MPE", [env.removeprefix("MPE_"), *words]
    return env.lower(), (" ".join(words) or env).lower()


def _preamble(metric: str, runs: Sequence[Run], env_steps: int | None, interval: statistics.Interval) -> str:
    episodes = sorted({run.facts["eval_episodes"] for run in runs})
    when = "at the end of each run" if env_steps is None else f"after at most {env_steps:,} environment steps"
    shown = " or ".join(str(number) for number in episodes)
    text = (
        f"Score: `{metric}` {when}, a mean over {shown} episodes per seed. Over seeds: {statistics.INTERVALS[interval]}"
    )
    text += "; IQM is the interquartile mean." if interval == "iqm" else "."
    for run in runs:
        for seed, steps in run.facts.get("diverged", {}).items():
            text += (
                f" Seed {seed} of {run.folder} diverged after {steps:,} steps: evaluations that it lacks are left out."
            )
    return text


def _which_task(group: Group, score_range: tuple[float, float] | None) -> str:
    facts = group.runs[0].facts
    settings = ", ".join(f"{k}={json.dumps(v)}" for k, v in task_settings(facts).items())
    scale = "" if score_range is None else ", scores normalised: {:g} becomes 0, {:g} becomes 1".format(*score_range)
    name = f"{facts['env']}(" if own.is_own(facts["env"]) else f'jmarl.make("{facts["env"]}", '
    return f"`{name}{settings}".removesuffix(", ") + f")`{scale}"


def _task_table(
    groups: Sequence[Group], threshold: float | None, goal: float | None, interval: statistics.Interval
) -> str:
    """A row for each algorithm. `goal` is the threshold as a score."""
    show = _decimals(np.concatenate([group.final for group in groups]))
    header = ["algorithm", "seeds", "env steps", "IQM", "mean", "lowest to highest"]
    if threshold is not None:
        header += [f"steps to {threshold:g}", f"seconds to {threshold:g}", "on", "seeds that reach it"]
    rows = []
    for group in groups:
        row = [
            group.algorithm,
            str(len(group.final)),
            f"{group.env_steps[-1]:,}",
            *_centres(group.final, show, interval),
            f"{show(group.final.min())} to {show(group.final.max())}",
        ]
        if goal is not None:
            steps, seconds = (
                np.asarray(statistics.when_reached(group.scores, at, goal)) for at in (group.env_steps, group.wall_s)
            )
            devices = sorted({run.facts.get("system", {}).get("device", "unknown") for run in group.runs})
            row += [_median(steps), _median(seconds), " and ".join(devices)]
            row += [f"{np.isfinite(steps).sum()} of {len(steps)}"]
        rows.append(row)
    return _markdown(header, rows)


def _centres(runs: np.ndarray, show: Callable[[float], str], interval: statistics.Interval) -> list[str]:
    """The cells IQM and mean: the one that was asked for has its interval."""
    plain = {"iqm": show(float(statistics.interquartile_mean(runs))), "mean": show(runs.mean())}
    return list((plain | {interval: _centre([runs], show, interval)}).values())


def _centre(scores: Sequence[np.ndarray], show: Callable[[float], str], interval: statistics.Interval) -> str:
    centre, low, high = map(float, statistics.summary(*scores, interval=interval))
    return f"{show(centre)} ({show(low)} to {show(high)})" if np.isfinite(low) else show(centre)


def _comparison(
    scores: Mapping[str, list[np.ndarray]], out: Path, look: figures.Look, others: Sequence[Path]
) -> list[str]:
    """Text and figures that need final scores only, and links to them and to `others`."""
    slug = _slug(look.title)
    drawn = [
        figures.draw_intervals(scores, out / f"{slug}-iqm.png", look),
        *others,
        figures.draw_profiles(scores, out / f"{slug}-profiles.png", look),
    ]
    text = ""
    if len(scores) > 1:
        # The other half of the pairs is one minus these.
        improvement = {(x, y): _improvement(scores[x], scores[y]) for x, y in itertools.combinations(scores, 2)}
        drawn.append(figures.draw_improvement(improvement, out / f"{slug}-improvement.png", look.title))
        text = "Probability that a run of the row scores higher than one of the column:\n\n"
        rows, columns = (list(dict.fromkeys(names)) for names in zip(*improvement, strict=True))
        shown = {pair: "{:.2f} ({:.2f} to {:.2f})".format(*value) for pair, value in improvement.items()}
        text += _markdown(["", *columns], [[x, *(shown.get((x, y), "") for y in columns)] for x in rows])
    return [text, "\n".join(f"![{path.stem}]({path.name})" for path in drawn)]


def _improvement(x: list[np.ndarray], y: list[np.ndarray]) -> tuple[float, float, float]:
    """P(X > Y) and its interval."""

    def statistic(*scores: np.ndarray) -> statistics.Values:
        return statistics.probability_of_improvement(scores[: len(x)], scores[len(x) :])

    low, high = statistics.stratified_bootstrap(statistic, *x, *y)
    return float(statistic(*x, *y)), float(low), float(high)


# ------------------------------------------------------------------------------------------------------ small things


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _decimals(values: np.ndarray) -> Callable[[float], str]:
    """Shows numbers with three digits, counted from the largest of `values`."""
    largest = np.abs(values).max()
    digits = 2 if largest == 0 else int(np.clip(2 - np.floor(np.log10(largest)), 0, 4))
    return lambda value: f"{value:.{digits}f}"


def _median(values: np.ndarray) -> str:
    """The median over seeds, of which those that never reach a threshold are the slowest."""
    median = np.median(values)
    return f"{median:,.0f}" if np.isfinite(median) else "-"


def _normalised(score: float, score_range: tuple[float, float] | None) -> float:
    low, high = score_range or (0.0, 1.0)
    return (score - low) / (high - low)


def _slug(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name)


def _require_known(option: str, names: Sequence[str] | Mapping[str, Any], groups: Sequence[Group]) -> None:
    known = {group.task for group in groups} | {group.runs[0].facts["env"] for group in groups}
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"{option} {unknown[0]} is no task of these runs: choose one of {', '.join(sorted(known))}.")


def named_numbers(option: str, words: Sequence[str], count: int) -> dict[str, tuple[float, ...]]:
    """Reads NAME=NUMBER,.. with `count` numbers; a word without = has the name ""."""
    result = {}
    for word in words:
        name, _, numbers = word.rpartition("=")
        try:
            result[name] = tuple(float(number) for number in numbers.split(","))
        except ValueError:
            result[name] = ()
        if len(result[name]) != count or not np.isfinite(result[name]).all():
            example = ",".join(["LOW", "HIGH"] if count == 2 else ["RETURN"])
            raise UsageError(f"{option} takes ENVIRONMENT={example}, not {word!r}.")
    return result


def report(
    runs: tyro.conf.Positional[tuple[Path, ...]],
    out: Path = Path("report"),
    overwrite: bool = False,
    metric: str = "eval/return_sum",
    score_range: tuple[str, ...] = (),
    threshold: tuple[str, ...] = (),
    env_steps: float | None = None,
    interval: statistics.Interval = "iqm",
) -> None:
    """Compares runs: a Markdown table, figures and a marl-eval JSON.

    Args:
      runs: run folders of jmarl train, or folders of them, such as a sweep's.
      out: a new folder.
      overwrite: replace the files of an earlier report.
      metric: the score; greedy evaluation by default.
      score_range: ENVIRONMENT=LOW,HIGH: returns that become the scores 0 and 1.
      threshold: RETURN or ENVIRONMENT=RETURN: how many steps and seconds until then.
      env_steps: compare after so many steps of each seed; None: at the end of each run.
      interval: iqm: interquartile mean with a stratified bootstrap; mean: with Student's t.
    """
    if not runs:
        raise UsageError("name at least one run folder.")
    ranges = {name: (low, high) for name, (low, high) in named_numbers("--score-range", score_range, 2).items()}
    for name, (low, high) in ranges.items():
        if not name or low >= high:
            raise UsageError(f"--score-range takes ENVIRONMENT=LOW,HIGH with LOW below HIGH, not {score_range}.")
    thresholds = {name: value for name, (value,) in named_numbers("--threshold", threshold, 1).items()}
    if env_steps is not None and not 1 <= env_steps < 2**63:
        raise UsageError(f"--env-steps {env_steps:g} must be at least 1 and finite.")
    text = write_report(
        plotting.runs_in(runs),
        out,
        metric=metric,
        ranges=ranges,
        thresholds=thresholds,
        env_steps=None if env_steps is None else int(env_steps),
        interval=interval,
        overwrite=overwrite,
    )
    print(text)
    print(f"Figures, report.md and marl_eval.json are in {out}")


def main(argv: Sequence[str] | None = None, prog: str = "jmarl report") -> None:
    """The command line."""
    with usage_errors():
        tyro.cli(report, prog=prog, args=argv)


if __name__ == "__main__":
    main()
