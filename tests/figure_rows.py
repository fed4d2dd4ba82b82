"""Sources for tests of figures: rows made by hand, and what is drawn in an axes."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from sim.figures.source import SWEEP, Source
from tests.test_report import row


def run(
    policy: str = "lru", ratio: float = 0.25, speed: float = 100.0, **other: Any
) -> dict[str, Any]:
    """Return a result row; 700 output tokens, and 700 MB over the link unless said."""
    usual = {"tpot_ns_p50": 1e9 / speed, "h2d_bytes": 700_000_000, "assumed": False}
    return row(policy, ratio, speed, **{**usual, **other})


def sweep_of(*rows: dict[str, Any]) -> Source:
    """Return the source of a sweep of these rows."""
    return Source(SWEEP, rows)


def lines_in(axes: Axes) -> dict[str, list[tuple[float, float]]]:
    """Return the points of each labelled line of an axes."""
    return {
        str(line.get_label()): [(float(x), float(y)) for x, y in np.asarray(line.get_xydata())]
        for line in axes.get_lines()
        if not str(line.get_label()).startswith("_")
    }


def texts_of_legend(figure: Any) -> list[str]:
    """Return the words in a figure's legend."""
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def close(one: Any, other: Any) -> bool:
    """Tell whether two lists of points are the same but for rounding."""
    return np.shape(one) == np.shape(other) and bool(np.allclose(one, other, rtol=1e-9))
