"""Speed against bytes moved: which runs no other one beats in both."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sim.figures.panels import (
    from_zero,
    label_edges,
    lines_of,
    panels_with_legend,
    settings_by_title,
)
from sim.figures.source import Source, Wanted
from sim.labels import Row
from sim.league import kind_of, names_by_row
from sim.plot_style import caption

_LOG_FROM = 20.0
"""Bytes that span more than this factor are drawn on a logarithmic axis."""
_ROOM = 0.035
"""Of the axis, beyond 0, for the marks of runs that move nothing."""


def draw_pareto(source: Source, wanted: Wanted | None = None) -> Figure:
    """Draw tokens/s over the bytes moved for an output token; a line a policy, the larger caches larger.

    The stairs are the front of the policies that are lossless and know no future: no other such run is
    faster and moves less.
    """
    rows = source.several
    panels, lines = settings_by_title(rows), lines_of(rows)
    handles = [line.handle() for line in lines.values()]
    front = Line2D([], [], color="0.55", linewidth=0.9, label="front: lossless, no future")
    figure, grid = panels_with_legend(len(panels), [*handles, front], 2.2)
    named = names_by_row(rows)
    for axes, (title, members) in zip(grid, panels.items(), strict=True):
        _draw_front(axes, members)
        for name, line in lines.items():
            own = sorted(
                (r for r in members if named[id(r)] == name), key=lambda r: r["cache_ratio"]
            )
            style = line.style()
            axes.plot([moved_mb(r) for r in own], [r["tokens_per_s"] for r in own],
                      label=line.label, **{**style, "marker": "", "linewidth": 0.6})  # fmt: skip
            for place, row in enumerate(own):
                size = 3.0 + 3.0 * (place + 1) / len(own)
                axes.plot(moved_mb(row), row["tokens_per_s"], **{**style, "markersize": size})
        axes.set_title(title)
        from_zero(axes)
        _scale(axes, members)
    label_edges(grid, "MB moved for an output token", "tokens/s")
    caption(figure, rows)
    return figure


def moved_mb(row: Row) -> float:
    """Return the MB that a run moves for an output token: over the link, or from storage."""
    return float((row["h2d_bytes"] or row["read_bytes"]) / row["output_tokens"] / 1e6)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the (bytes, speed) that no other point beats: by bytes, each faster than those before."""
    kept: list[tuple[float, float]] = []
    for moved, speed in sorted(set(points), key=lambda point: (point[0], -point[1])):
        if not kept or speed > kept[-1][1]:
            kept.append((moved, speed))
    return kept


def _draw_front(axes: Axes, rows: Sequence[Row]) -> None:
    honest = [row for row in rows if kind_of(row) == "lossless"]
    front = pareto_front([(moved_mb(row), row["tokens_per_s"]) for row in honest])
    if front:
        xs, ys = zip(*front, strict=True)
        right = max(moved_mb(row) for row in rows)
        axes.step([*xs, max(right, xs[-1])], [*ys, ys[-1]], where="post", color="0.55",
                  linewidth=0.9, zorder=1)  # fmt: skip


def _scale(axes: Axes, rows: Sequence[Row]) -> None:
    moved = [moved_mb(row) for row in rows]
    least = min((value for value in moved if value > 0), default=1.0)
    if max(moved) <= _LOG_FROM * least:
        right = 1.06 * max(moved) or 1.0
        axes.set_xlim(-_ROOM * right if min(moved) < _ROOM * right else 0, right)
        return
    axes.set_xscale("symlog", linthresh=least)  # 0 has a place too
    axes.set_xlim(-0.1 * least if min(moved) < least else least / 1.3, 1.5 * max(moved))
    ticks = [0.0, *(10.0**power for power in range(-6, 9))]
    axes.set_xticks([tick for tick in ticks if not 0 < tick < least and tick <= 1.5 * max(moved)])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
