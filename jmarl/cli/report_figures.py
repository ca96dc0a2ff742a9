"""Figures of `jmarl report`. Scores are arrays whose last axis is runs, in a list with one for each task."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jmarl.cli import drawing, plotting
from jmarl.cli import statistics_of_runs as statistics
from jmarl.cli.drawing import colors, ticker

COLOURS = [*plotting.COLOURS, "#000000"]


class Look(NamedTuple):
    """What the figures of a task share: its name, what a score is, each algorithm's line, and the kind of interval."""

    title: str
    label: str
    lines: Mapping[str, dict[str, Any]]
    interval: statistics.Interval = "iqm"


def draw_curves(
    curves: Mapping[str, tuple[np.ndarray, np.ndarray]], path: Path, look: Look, goal: float | None = None
) -> Path:
    """Sample efficiency: the centre of the seeds and its interval over environment steps.

    Args:
      curves: of each algorithm, environment steps `[T]` and scores `[T, R]`.
      path: the figure.
      look: of the task.
      goal: a score to mark.
    """
    figure, axes = drawing.new_figure(7.0, 4.3)
    for name, (env_steps, scores) in curves.items():
        line = look.lines[name]
        centre, low, high = statistics.summary(scores, interval=look.interval)
        label = f"{name} ({scores.shape[1]} seeds)"
        marker = "o" if len(env_steps) < 25 else None
        axes.plot(env_steps, centre, **line, linewidth=2, marker=marker, markersize=3, label=label)
        if len(curves) <= drawing.MOST_BANDS:
            axes.fill_between(env_steps, low, high, color=line["color"], alpha=0.15, linewidth=0)
    if goal is not None:
        axes.axhline(goal, color="0.4", linewidth=1, linestyle=(0, (4, 3)), label="threshold")
    axes.set_xlabel("environment steps per seed")
    axes.set_ylabel(look.label)
    axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    drawing.legend(figure, axes, statistics.INTERVALS[look.interval])
    return _finish(figure, axes, path, look.title)


def draw_intervals(scores: Mapping[str, list[np.ndarray]], path: Path, look: Look) -> Path:
    """Centre and interval of each algorithm, best first, and every run as a dot."""
    figure, axes = drawing.new_figure(5.6 + drawing.room_for_names(list(scores)), 1.1 + 0.42 * len(scores))
    axes.use_sticky_edges = False  # or the lowest bar ends at the frame
    for i, (name, by_task) in enumerate(scores.items()):
        centre, low, high = statistics.summary(*by_task, interval=look.interval)
        runs, colour = np.concatenate(by_task), look.lines[name]["color"]
        low, high = (low, high) if np.isfinite(low) else (centre, centre)
        axes.barh(i, high - low, left=low, height=0.55, color=colour, alpha=0.35, linewidth=0)
        axes.plot([centre] * 2, [i - 0.275, i + 0.275], color=colour, linewidth=2.5)
        axes.plot(runs, np.full(len(runs), i), "o", markersize=3.5, markerfacecolor="white", markeredgecolor="0.25")
    axes.set_yticks(range(len(scores)), list(scores))
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"{look.label}\nline and bar: {statistics.INTERVALS[look.interval]}, dots: runs")
    return _finish(figure, axes, path, look.title)


def draw_profiles(scores: Mapping[str, list[np.ndarray]], path: Path, look: Look) -> Path:
    """Share of runs above τ: a panel with a band for each algorithm, the others in grey, for bands hide each other."""
    num_columns = min(4, len(scores))
    num_rows = math.ceil(len(scores) / num_columns)
    width = max(4.2, 0.6 + 2.4 * num_columns)
    figure = drawing.Figure(figsize=(width, 0.9 + 2.2 * num_rows), layout="constrained")
    panels = figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False)
    everything = np.concatenate([runs for by_task in scores.values() for runs in by_task])
    margin = 0.05 * np.ptp(everything) or 0.5
    thresholds = np.linspace(everything.min() - margin, everything.max() + margin, 201)

    def profile(*scores: np.ndarray) -> statistics.Values:
        return statistics.performance_profile(*scores, thresholds=thresholds)

    for axes, (name, by_task) in zip(panels.flat, scores.items(), strict=False):
        for other in scores.values():
            axes.step(thresholds, profile(*other), where="post", color="0.8", linewidth=1)
        low, high = statistics.stratified_bootstrap(profile, *by_task)
        axes.fill_between(thresholds, low, high, step="post", color=look.lines[name]["color"], alpha=0.25, linewidth=0)
        axes.step(thresholds, profile(*by_task), where="post", color=look.lines[name]["color"], linewidth=2)
        axes.set_title(drawing.wrapped(name, 1.9), fontsize="medium" if len(name) < 20 else "small")
        axes.set_ylim(-0.03, 1.03)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels.flat[len(scores) :]:
        axes.set_visible(False)
    for column in range(num_columns):  # the lowest panel of each column has the numbers
        panels.flat[max(range(column, len(scores), num_columns))].tick_params(labelbottom=True)
    figure.suptitle(drawing.wrapped(look.title, width), fontsize="medium")
    figure.supxlabel(f"τ: {look.label}", fontsize="medium")
    figure.supylabel("share of runs above τ, 95 % band", fontsize="medium")
    figure.savefig(path, dpi=130)
    return path


def draw_improvement(improvement: Mapping[tuple[str, str], tuple[float, float, float]], path: Path, title: str) -> Path:
    """P(row > column) of each pair, as a table of colours and numbers."""
    rows, columns = (list(dict.fromkeys(names)) for names in zip(*improvement, strict=True))
    values = np.full((3, len(rows), len(columns)), np.nan)
    for (x, y), value in improvement.items():
        values[:, rows.index(x), columns.index(y)] = value
    cell = 0.95 if len(rows) <= drawing.MOST_NUMBERED // 2 else 0.5 if len(rows) < drawing.MOST_NUMBERED else 0.25
    names = drawing.room_for_names([*rows, *columns])
    width = max(5.0, 1.6 + names + cell * len(columns))
    figure, axes = drawing.new_figure(width, max(2.6, 1.0 + names + min(cell, 0.6) * len(rows)))
    pale = colors.LinearSegmentedColormap.from_list("pale", drawing.colormaps["PuOr"](np.linspace(0.2, 0.8, 256)))
    drawing.heat_map(
        axes,
        values[0],
        rows,
        columns,
        label="P(row > column)",
        colours=pale,
        is_share=True,
        between=(values[1], values[2]),
    )
    axes.xaxis.tick_top()  # beside the cells that are filled
    figure.suptitle(drawing.wrapped(title, width), fontsize="medium")
    figure.savefig(path, dpi=130)
    return path


def _finish(figure: Any, axes: Any, path: Path, title: str) -> Path:
    axes.set_title(drawing.wrapped(title, figure.get_size_inches()[0] - 1.5), fontsize="medium")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    return path


def lines(algorithms: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A colour for each algorithm, the same in all figures."""
    return {
        name: {
            "color": COLOURS[i % len(COLOURS)],
            "linestyle": plotting.STYLES[i // len(COLOURS) % len(plotting.STYLES)],
        }
        for i, name in enumerate(algorithms)
    }
