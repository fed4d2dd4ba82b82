"""Hit rate by cache size, and what no policy that loads on demand can do better."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from sim.figures.panels import draw_by_size
from sim.figures.source import Source, Wanted
from sim.labels import Row
from sim.plot_style import caption

_BAND, _ABOVE = "0.86", "0.35"


def draw_hit_rate(source: Source, wanted: Wanted | None = None) -> Figure:
    """Draw hit rates over the share of experts on the GPU, with the band of Belady's optimum.

    The band reaches from the optimum that lets every miss in to the one that may keep newcomers out.
    """
    rows = source.several
    known = any(row.get("belady_hit_rate") is not None for row in rows)
    behind, more = (_draw_band, _band_handles()) if known else (None, ())
    figure, grid = draw_by_size(rows, _percent, "hit rate (%)", behind=behind, more=more)
    for axes in grid:
        axes.set_ylim(0, min(104, axes.get_ylim()[1]))
    caption(figure, rows, _told(rows) if known else "no band: output.belady was false")
    return figure


def _told(rows: Sequence[Row]) -> str:
    """Say whose optimum the band is, where policies share their slots in different ways."""
    scopes = sorted(
        {str(row.get("scope")) for row in rows if row.get("belady_hit_rate") is not None}
    )
    return f"band: over pools by {', '.join(scopes)}" if len(scopes) > 1 else ""


def _percent(row: Row) -> float | None:
    return None if row["hit_rate"] is None else 100 * row["hit_rate"]


def _draw_band(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw the optimum of each size.

    The same work at the same size has one whatever the policy, unless some have their slots by layer and
    others in one pool. Then the band reaches from the least optimum to the largest.
    """
    sizes = sorted({row["cache_ratio"] for row in rows if row.get("belady_hit_rate") is not None})
    low, high = zip(*(optima(rows, size) for size in sizes), strict=True) if sizes else ((), ())
    at = [100 * size for size in sizes]
    axes.fill_between(at, low, high, color=_BAND, linewidth=0, zorder=0.5)
    axes.plot(at, high, color=_ABOVE, linewidth=0.8, zorder=0.6)


def optima(rows: Sequence[Row], size: float) -> tuple[float, float]:
    """Return the least and the largest optimal hit rate of a cache size, in percent."""
    names = ("belady_hit_rate", "belady_forced_hit_rate")
    own = [row for row in rows if row["cache_ratio"] == size]
    known = [100 * row[name] for row in own for name in names if row.get(name) is not None]
    return min(known), max(known)


def _band_handles() -> tuple[Artist, ...]:
    line = Line2D([], [], color=_ABOVE, linewidth=0.8, label="Belady's optimum")
    return line, Patch(color=_BAND, label="down to: lets every miss in")
