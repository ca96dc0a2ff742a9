"""Statistics of few training runs: robust aggregates, with intervals.

Scores are arrays whose last axis is the runs (seeds) of one algorithm on one task. A function of several such arrays
takes one for each task; all are in the same unit, so scores of different tasks must be normalised first. Leading axes,
such as time, are kept.

References:
  Agarwal et al., 2021, Deep Reinforcement Learning at the Edge of the Statistical Precipice
  (https://arxiv.org/abs/2108.13264).
  Gorsane et al., 2022, Towards a Standardised Performance Evaluation Protocol for Cooperative MARL
  (https://arxiv.org/abs/2209.10485).
"""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from scipy import stats

Values = np.ndarray | np.floating  # `[..]`, and numpy makes a number of an array without axes
Interval = Literal["iqm", "mean"]
INTERVALS: dict[str, str] = {
    "iqm": "IQM and 95 % interval (stratified bootstrap)",
    "mean": "mean and 95 % interval (Student's t)",
}


def summary(*scores: np.ndarray, interval: Interval = "iqm") -> tuple[Values, Values, Values]:
    """What curves, tables and reports say of runs: centre, lower and upper bound, as `INTERVALS` names them.

    Args:
      scores: `[.., R]` for each task; NaN counts as absent, and of one run there is no interval: its bounds are NaN.
      interval: "iqm" or "mean".

    Returns:
      Three arrays `[..]`.
    """
    leading = np.shape(scores[0])[:-1]
    rows = [np.asarray(x, float).reshape(-1, np.shape(x)[-1]) for x in scores]
    of_rows = [_summary([x[np.isfinite(x)] for x in row], interval) for row in zip(*rows, strict=True)]
    centre, low, high = np.array(of_rows).T.reshape(3, *leading)
    return centre, low, high


def _summary(runs: list[np.ndarray], interval: Interval) -> tuple[float, float, float]:
    runs = [x for x in runs if len(x)]
    number = sum(map(len, runs))
    if not number:
        return np.nan, np.nan, np.nan
    if interval == "iqm":
        centre = float(interquartile_mean(*runs))
        low, high = stratified_bootstrap(interquartile_mean, *runs) if number > 1 else (np.nan, np.nan)
        return centre, float(low), float(high)
    centre, freedom = float(np.concatenate(runs).mean()), number - len(runs)
    if not freedom:
        return centre, np.nan, np.nan
    variance = sum(((x - x.mean()) ** 2).sum() for x in runs) / freedom  # within tasks, which are taken as given
    half_width = float(stats.t.ppf(0.975, freedom) * np.sqrt(variance / number))
    return centre, centre - half_width, centre + half_width


def interquartile_mean(*scores: np.ndarray) -> Values:
    """Mean of the middle half of all runs: as robust as the median to one failed seed, but it reads more of them.

    Agarwal et al., section 4. Cuts floor(n / 4) of n runs from either end, as their code does: exact where 4 divides
    n, a little more than the middle half elsewhere, and the plain mean of 3 runs or fewer.

    Args:
      scores: `[.., R]` for each task; a task with more runs weighs more.

    Returns:
      `[..]`, in the unit of the scores.
    """
    return stats.trim_mean(np.concatenate(scores, axis=-1), 0.25, axis=-1)


def performance_profile(*scores: np.ndarray, thresholds: np.ndarray) -> Values:
    """Share of runs whose score lies above each threshold τ: the whole distribution rather than one point of it.

    Agarwal et al., section 4, the run-score distribution.

    Args:
      scores: `[.., R]` for each task.
      thresholds: τ `[K]`, in the unit of the scores.

    Returns:
      `[K, ..]`, between 0 and 1.
    """
    together = np.concatenate(scores, axis=-1)
    return np.stack([(together > threshold).mean(-1) for threshold in thresholds])


def probability_of_improvement(x: Sequence[np.ndarray], y: Sequence[np.ndarray]) -> Values:
    """How probable it is that a run of algorithm X beats a run of Y, on a task drawn at random; a tie counts half.

    Agarwal et al., section 4: the Mann-Whitney U statistic over the number of pairs, averaged over the tasks. It
    says how often X is better, not by how much.

    Args:
      x: scores of X, `[.., R]` for each task.
      y: scores of Y, `[.., Q]` for the same tasks.

    Returns:
      `[..]`, between 0 and 1.
    """

    def on_one_task(x: np.ndarray, y: np.ndarray) -> Values:
        x, y = x[..., :, None], y[..., None, :]
        return ((x > y) + 0.5 * (x == y)).mean((-2, -1))

    return np.mean([on_one_task(*pair) for pair in zip(x, y, strict=True)], axis=0)


def stratified_bootstrap(
    statistic: Callable[..., Values],
    *scores: np.ndarray,
    level: float = 0.95,
    num_resamples: int = 2000,
    seed: int = 0,
) -> tuple[Values, Values]:
    """Percentile interval of a statistic: runs are drawn again, with replacement, within each task (stratum).

    Agarwal et al., section 4. It takes the tasks as given, and is too narrow for very few runs: of 4 seeds, an
    interval of 95 % holds the true value less often than that.

    Args:
      statistic: takes the arrays and reduces their last axis, as the functions above do.
      scores: one array `[.., R]` for each stratum.
      level: of confidence.
      num_resamples: how often the runs are drawn.
      seed: of the draws, so that a report is the same each time.

    Returns:
      Lower and upper bound, of the statistic's shape.
    """
    rng = np.random.default_rng(seed)
    draws = [x[..., rng.integers(x.shape[-1], size=(num_resamples, x.shape[-1]))] for x in map(np.asarray, scores)]
    low, high = np.quantile(statistic(*draws), [(1 - level) / 2, (1 + level) / 2], axis=-1)
    return low, high


def when_reached(scores: np.ndarray, at: np.ndarray, threshold: float) -> Values:
    """When each run was first evaluated at `threshold` or above; infinite where it never was.

    Args:
      scores: `[T, R]`.
      at: environment steps or seconds of each evaluation, `[T]` or `[T, R]`.
      threshold: in the unit of the scores.

    Returns:
      `[R]`, in the unit of `at`.
    """
    at = at[:, None] if at.ndim == 1 else at
    return np.where(scores >= threshold, at, np.inf).min(0)


def prediction_interval(scores: np.ndarray, num_new: int, level: float = 0.95) -> tuple[float, float]:
    """Where the mean of `num_new` further runs lies, with probability `level`, if nothing has changed.

    Wider than the interval of the mean, since the new runs vary too: m ± t s √(1/R + 1/num_new), with the quantile t
    of Student's distribution of R - 1 degrees of freedom. Runs are taken to be normally distributed.

    Args:
      scores: `[R]`, two at least.
      num_new: number of new runs.
      level: probability.
    """
    num_runs = len(scores)
    spread = np.std(scores, ddof=1) * np.sqrt(1 / num_runs + 1 / num_new)
    half_width = stats.t.ppf((1 + level) / 2, num_runs - 1) * spread
    return float(np.mean(scores) - half_width), float(np.mean(scores) + half_width)
