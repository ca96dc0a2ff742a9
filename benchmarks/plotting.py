"""Learning curves: mean and 95 % band over seeds.

python benchmarks/plotting.py runs/one runs/two --metric train/return_sum --out comparison.png
"""

import json
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display needed

import matplotlib.pyplot as plt
import numpy as np
from scipy import stats

from command_line import UsageError, require_free_file, usage_errors

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]  # Okabe and Ito: colour-blind safe

# What an axis says about a metric; others are labelled with their names.
LABELS = {
    "return_sum": "return of an episode, summed over agents",
    "return_mean": "return of an episode, averaged over agents",
    "episode_length": "length of an episode (environment steps)",
    "won": "share of episodes won",
}


def mean_and_interval(values: np.ndarray, level: float = 0.95) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean over the first axis (seeds) and the its t-interval. NaN counts as absent; one value has no interval."""
    values = np.asarray(values, float)
    measured = np.isfinite(values)
    n = measured.sum(0)
    mean = np.where(measured, values, 0).sum(0) / np.where(n, n, np.nan)
    deviation = np.where(measured, values - mean, 0)
    variance = (deviation**2).sum(0) / np.where(n > 1, n - 1, np.nan)
    half_width = stats.t.ppf((1 + level) / 2, np.maximum(n - 1, 1)) * np.sqrt(variance / np.maximum(n, 1))
    return mean, mean - half_width, mean + half_width


def load_metrics(folder: str | Path) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Reads a run folder: environment steps `[t]` and metrics by name `[seed, t]`, NaN where nothing was measured."""
    content = json.loads((Path(folder) / "metrics.json").read_text())
    return np.array(content["env_steps"]), {name: np.array(v, float) for name, v in content["metrics"].items()}


def plot_curves(
    folders: Sequence[str | Path],
    out: str | Path,
    *,
    metrics: Sequence[str] = ("train/return_sum",),
    labels: Sequence[str] | None = None,
    title: str = "",
) -> Path:
    """Draws one curve per run folder and metric into `out`: the mean over seeds, its 95 % band, and each seed, thin.

    Several metrics share the axes, so they should share a unit, such as train/return_sum and eval/return_sum.
    """
    figure, axes = plt.subplots(figsize=(7, 4.3), layout="constrained")
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
        mean, low, high = mean_and_interval(values)
        axes.plot(env_steps, values.T, color=colour, linewidth=0.6, alpha=0.35)
        axes.plot(env_steps, mean, color=colour, linewidth=2, marker=marker, markersize=3.5, label=label)
        axes.fill_between(env_steps, low, high, color=colour, alpha=0.2, linewidth=0)
    unit = metrics[0].split("/")[-1]
    axes.set_xlabel("environment steps per seed")
    axes.set_ylabel(LABELS.get(unit, metrics[0]))
    axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        seeds = f"{min(seed_counts)}" if len(seed_counts) == 1 else f"{min(seed_counts)} to {max(seed_counts)}"
        axes.legend(
            frameon=False, title=f"mean and 95 % interval of {seeds} seeds", title_fontsize="small", fontsize="small"
        )
    axes.set_title(title, fontsize="medium")
    figure.savefig(out, dpi=130)
    plt.close(figure)
    return Path(out)


def require_metric(folders: Sequence[Path], metric: str) -> None:
    """Refuses what would be an empty figure, and says which curves it will not have."""
    names = {}
    for folder in folders:
        try:
            names[folder] = sorted(load_metrics(folder)[1])
        except OSError as error:
            raise UsageError(f"{folder} is no run folder of train.py: its metrics.json cannot be read.") from error
        except (ValueError, KeyError) as error:
            raise UsageError(f"{folder}/metrics.json is damaged: {error}.") from error
    without = [str(folder) for folder in folders if metric not in names[folder]]
    if len(without) == len(folders):
        known = ", ".join(sorted({name for of_run in names.values() for name in of_run})) or "none"
        raise UsageError(f"no run has the metric {metric}: choose one of {known}.")
    if without:
        print(f"No curve of {', '.join(without)}: it has no {metric}.")


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    import tyro

    def plot(
        folders: tyro.conf.Positional[tuple[Path, ...]],
        out: Path = Path("curves.png"),
        metric: str = "train/return_sum",
        title: str = "",
        overwrite: bool = False,
    ) -> None:
        """Draws one curve per run folder.

        Args:
          folders: run folders, as benchmarks/train.py leaves them.
          out: the figure, a new file.
          metric: what to draw.
          title: above the figure.
          overwrite: replace the figure of an earlier call.
        """
        if not folders:
            raise UsageError("name at least one run folder.")
        require_free_file(out, overwrite)
        require_metric(folders, metric)
        try:
            print(plot_curves(folders, out, metrics=[metric], title=title))
        except ValueError as error:  # of matplotlib, which does not know every ending
            raise UsageError(f"{out} cannot be drawn: {error}.") from error

    with usage_errors():
        tyro.cli(plot, prog="plotting.py", args=argv)


if __name__ == "__main__":
    main()
