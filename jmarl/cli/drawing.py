"""What figures are drawn with: matplotlib without a display, whatever backend the environment asks for."""

import contextlib
import os
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

# An inherited one may name a module that is not installed here, which matplotlib refuses while it is imported.
_backend = os.environ.pop("MPLBACKEND", None)

import matplotlib  # noqa: E402
from matplotlib import colormaps, colors, ticker  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

__all__ = ["Figure", "colormaps", "colors", "heat_map", "legend", "new_figure", "room_for_names", "ticker", "wrapped"]

MOST_BANDS = 12  # curves whose bands do not hide each other
MOST_NUMBERED = 16  # rows of a matrix whose cells have room for a number

if _backend is not None:
    os.environ["MPLBACKEND"] = _backend
    with contextlib.suppress(ValueError):
        matplotlib.rcParams["backend"] = _backend


def new_figure(width: float, height: float) -> tuple[Figure, Any]:
    """A figure and its axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def wrapped(text: str, width: float) -> str:
    """In lines that fit so many inches of medium size."""
    return textwrap.fill(text, max(16, int(width * 10.5)))


def room_for_names(names: Sequence[str]) -> float:
    """Inches that the longest takes beside an axis."""
    return 0.095 * max(map(len, names))


def legend(figure: Figure, axes: Any, title: str) -> None:
    """Of a few lines within the axes, of many beside them, where they hide nothing, and the figure is wider."""
    labels = axes.get_legend_handles_labels()[1]
    text = {"frameon": False, "title": title, "title_fontsize": "small", "fontsize": "small", "handlelength": 2.6}
    if len(labels) <= 6:
        axes.legend(**text)
        return
    width, height = figure.get_size_inches()
    columns = -(-len(labels) // 24)
    each = 0.8 + 0.8 * room_for_names(labels)
    figure.set_size_inches(
        width + max(columns * each, room_for_names([title])), max(height, 1.0 + 0.19 * min(len(labels), 24))
    )
    figure.legend(loc="outside right upper", ncols=columns, **text)


def heat_map(
    axes: Any,
    matrix: np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str] | None = None,
    *,
    label: str,
    colours: Any = None,
    is_share: bool = False,
    between: tuple[np.ndarray, np.ndarray] | None = None,
) -> None:
    """A matrix, with a number in each cell where there is room, and the ends of an interval if given.

    Args:
      axes: where to.
      matrix: values; NaN is left empty.
      rows: their names.
      columns: their names; by default those of the rows.
      label: what the values are.
      colours: a colour map; by default from red to blue for shares.
      is_share: values are from 0 to 1.
      between: lower and upper ends.
    """
    columns, num = rows if columns is None else columns, max(matrix.shape)
    colours = colours or ("RdBu" if is_share else "cividis")
    image = axes.imshow(matrix, cmap=colours, aspect="auto", **({"vmin": 0.0, "vmax": 1.0} if is_share else {}))
    if num <= MOST_NUMBERED:
        largest = np.nanmax(np.abs(matrix), initial=1e-9)
        digits = 2 if is_share else int(np.clip(2 - np.floor(np.log10(largest)), 0, 3))
        for (row, column), value in np.ndenumerate(matrix):
            if not np.isfinite(value):
                continue
            red, green, blue, _ = image.cmap(image.norm(value))
            ink = "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else "black"
            text = f"{value:.{digits}f}"
            if between is not None and num <= MOST_NUMBERED // 2:
                low, high = (x[row, column] for x in between)
                text += f"\n{low:.{digits}f} to {high:.{digits}f}" if low < high else ""
            axes.text(column, row, text, ha="center", va="center", color=ink, fontsize=8)
    size = 8 if num <= 24 else 6
    axes.set_xticks(range(len(columns)), columns, rotation=90 if max(map(len, columns)) > 3 else 0, fontsize=size)
    axes.set_yticks(range(len(rows)), rows, fontsize=size)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    bar = axes.figure.colorbar(image, ax=axes, shrink=0.9)
    bar.set_label(textwrap.fill(label, 24 if len(rows) < 6 else 60), fontsize="small" if len(rows) < 3 else None)
