"""Learning curves: a centre and a 95 % band over seeds.

jmarl plot runs/one runs/two --metric train/return_sum --out comparison.png
jmarl plot runs/sweep
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tyro

from jmarl.cli import drawing, statistics_of_runs
from jmarl.cli.errors import UsageError, require_free_file, usage_errors
from jmarl.cli.run_folders import load_metrics

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]  # Okabe and Ito: colour-blind safe
STYLES = ["-", "--", ":"]  # for more lines than colours

# What an axis says about a metric; others are labelled with their names.
LABELS = {
    "return_sum": "return of an episode, summed over agents",
    "return_mean": "return of an episode, averaged over agents",
    "episode_length": "length of an episode (environment steps)",
    "won": "share of episodes won",
}


def plot_curves(
    folders: Sequence[str | Path],
    out: str | Path,
    *,
    metrics: Sequence[str] = ("train/return_sum",),
    labels: Sequence[str] | None = None,
    title: str = "",
    interval: statistics_of_runs.Interval = "iqm",
) -> Path:
    """Draws one curve per run folder and metric into `out`: the centre of the seeds, its band, and each seed, thin.

    Several metrics share the axes, so they should share a unit, such as train/return_sum and eval/return_sum.
    """
    figure, axes = drawing.new_figure(7.0, 4.3)
    dense = len(folders) * len(metrics) > drawing.MOST_BANDS
    seed_counts = set()
    curves = [(folder, metric) for folder in folders for metric in metrics]
    for i, (folder, metric) in enumerate(curves):
        env_steps, series = load_metrics(folder)
        if metric not in series:
            continue
        values = series[metric]
        seen = np.isfinite(values).any(0)  # evaluation does not happen in every chunk
        env_steps, values = env_steps[seen], values[:, seen]
        seed_counts.add(len(values))
        run = labels[folders.index(folder)] if labels else Path(folder).name
        kind = {"train": "sampled actions (training)", "eval": "greedy actions (evaluation)"}.get(
            metric.split("/")[0], metric
        )
        label = " ".join([run] * (len(folders) > 1) + [kind] * (len(metrics) > 1 or len(folders) == 1))
        colour, marker = COLOURS[i % len(COLOURS)], "o" if len(env_steps) < 25 else None
        centre, low, high = statistics_of_runs.summary(values.T, interval=interval)
        style = STYLES[i // len(COLOURS) % len(STYLES)]
        axes.plot(env_steps, centre, style, color=colour, linewidth=2, marker=marker, markersize=3.5, label=label)
        if not dense:
            axes.plot(env_steps, values.T, color=colour, linewidth=0.6, alpha=0.35)
            axes.fill_between(env_steps, low, high, color=colour, alpha=0.2, linewidth=0)
        if len(env_steps) == 1:  # a band has no width there
            axes.vlines(env_steps, low, high, color=colour, linewidth=1.5)
    unit = metrics[0].split("/")[-1]
    axes.set_xlabel("environment steps per seed")
    axes.set_ylabel(LABELS.get(unit, metrics[0]))
    axes.xaxis.set_major_formatter(drawing.ticker.EngFormatter(sep=""))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        seeds = f"{min(seed_counts)}" if len(seed_counts) == 1 else f"{min(seed_counts)} to {max(seed_counts)}"
        about = f"{statistics_of_runs.INTERVALS[interval]} of {seeds} seeds"
        drawing.legend(figure, axes, about)
    axes.set_title(drawing.wrapped(title, 6.0), fontsize="medium")
    figure.savefig(out, dpi=130)
    return Path(out)


def runs_in(folders: Sequence[Path]) -> list[Path]:
    """Run folders; in place of a folder of several, such as a sweep's, those that it holds."""
    found = []
    for folder in folders:
        inner = sorted(path.parent for path in folder.glob("*/metrics.json"))
        found += [folder] if (folder / "metrics.json").exists() or not inner else inner
    return found


def require_metric(folders: Sequence[Path], metric: str) -> None:
    """Refuses what would be an empty figure, and says which curves it will not have."""
    names = {folder: sorted(load_metrics(folder)[1]) for folder in folders}
    without = [str(folder) for folder in folders if metric not in names[folder]]
    if len(without) == len(folders):
        known = ", ".join(sorted({name for of_run in names.values() for name in of_run})) or "none"
        raise UsageError(f"no run has the metric {metric}: choose one of {known}.")
    if without:
        print(f"No curve of {', '.join(without)}: it has no {metric}.")


def main(argv: Sequence[str] | None = None, prog: str = "jmarl plot") -> None:
    """The command line."""
    with usage_errors():
        tyro.cli(plot, prog=prog, args=argv)


def plot(
    folders: tyro.conf.Positional[tuple[Path, ...]],
    out: Path = Path("curves.png"),
    metric: str = "train/return_sum",
    title: str = "",
    interval: statistics_of_runs.Interval = "iqm",
    overwrite: bool = False,
) -> None:
    """Draws one curve per run folder.

    Args:
      folders: run folders of jmarl train, or folders of them, such as a sweep's.
      out: the figure, a new file.
      metric: what to draw.
      title: above the figure.
      interval: iqm: interquartile mean with a stratified bootstrap, as in a report; mean: with Student's t.
      overwrite: replace the figure of an earlier call.
    """
    if not folders:
        raise UsageError("name at least one run folder.")
    require_free_file(out, overwrite)
    found = runs_in(folders)
    require_metric(found, metric)
    try:
        print(plot_curves(found, out, metrics=[metric], title=title, interval=interval))
    except ValueError as error:  # of matplotlib, which does not know every ending
        raise UsageError(f"{out} cannot be drawn: {error}.") from error


if __name__ == "__main__":
    main()
