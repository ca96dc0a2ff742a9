"""What figures are drawn with: matplotlib without a display, whatever backend the environment asks for."""

import contextlib
import os
from typing import Any

# An inherited one may name a module that is not installed here, which matplotlib refuses while it is imported.
_backend = os.environ.pop("MPLBACKEND", None)

import matplotlib  # noqa: E402
from matplotlib import colormaps, colors, ticker  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

__all__ = ["Figure", "colormaps", "colors", "new_figure", "ticker"]

if _backend is not None:
    os.environ["MPLBACKEND"] = _backend
    with contextlib.suppress(ValueError):
        matplotlib.rcParams["backend"] = _backend


def new_figure(width: float, height: float) -> tuple[Figure, Any]:
    """A figure and its axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()
