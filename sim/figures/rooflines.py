"""Figures of rooflines: speed against what a token moves through each resource, below what it can carry.

Both axes are logarithmic. What moves A bytes a token at R bytes a second gives at most R / A tokens/s, a
line that falls; a run is a point below it, and the distance is how much faster it would be if nothing
else took time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke

from sim.figures.panels import Line, lines_of
from sim.figures.source import RUN, NotDrawableError, Source, Wanted
from sim.labels import Row
from sim.league import names_by_row
from sim.plot_style import COLUMN, PAGE, caption, new_figure, new_panels, save, styled
from sim.report_roofline import amount
from sim.roofline import BYTES

# Okabe-Ito, a marker each for grey print; by what the resource's name holds.
_LOOKS = {
    "link to": ("#0072B2", "o"),
    "link from": ("#56B4E9", "v"),
    "storage": ("#CC79A7", "s"),
    "host memory": ("#8C6D31", "P"),
    "weights": ("#E69F00", "D"),
    "launches": ("#000000", "X"),
    "memory": ("#009E73", "^"),
    "operations": ("#D55E00", "*"),
}
_FARTHEST = 100.0
"""A resource whose roof is farther above the run is left out of a figure: it does not matter."""
_LEAST_USED = 0.05
_MOST_PANELS = 3
_ALIKE = 0.1
_CLOSE = 1.5
"""Level roofs that are closer than this factor are named on both sides of them."""
_ROOM = 1.8
"""Factor by which axes reach beyond the points."""
_HALO = withStroke(linewidth=2, foreground="white")
"""Keeps words readable where a roof crosses them."""


def plot_run(run: Row, stem: Path) -> Path:
    """Draw the roofline of one run; return the PNG's path."""
    with styled():
        return save(run_figure(run["roofline"], run), stem)


def draw_roofline(source: Source, wanted: Wanted | None = None) -> Figure:
    """Draw the roofline of a run, or the points of a sweep below the roofs of what binds them."""
    rows = source.timed
    if not any(row.get("roofline") for row in rows):
        raise NotDrawableError("needs a run with output.roofline=true")
    if source.kind == RUN:
        return run_figure(rows[0]["roofline"], rows[0])
    figure = points_figure(rows)
    if figure is None:
        raise NotDrawableError("needs a resource that moves bytes and is in use, and there is none")
    return figure


# -- one run ---------------------------------------------------------------------------------------


def run_figure(roofline: Sequence[Mapping[str, Any]], run: Row | None = None) -> Figure:
    """Draw one run, or prediction, from the rows of a roofline: a mark a resource below its roof.

    What is no bytes (operations, launches) has a level roof. ``run`` is the summary whose origin stands
    below.
    """
    shown = _distinct([row for row in roofline if row["times_from_limit"] <= _FARTHEST])
    first, speed = roofline[0], roofline[0]["tokens_per_s"]
    falling = [row for row in shown if row["unit"] == BYTES]
    moved = [row["amount_per_token"] / 1e6 for row in falling] or [1.0]
    span = min(moved) / (2 * _ROOM), max(moved) * 2 * _ROOM
    figure, axes = new_figure(4.6, 3.5)
    axes.set(xscale="log", yscale="log", xlim=span)
    axes.set_ylim(speed / (1.4 * _ROOM), _ROOM * max(row["tokens_per_s_limit"] for row in shown))
    axes.axhline(speed, color="0.35", linewidth=0.8, linestyle="--", zorder=1.5)
    _write_speed(axes, speed, moved, span)
    for row in falling:
        _falling(axes, row, speed, span)
    levels = sorted((row for row in shown if row["unit"] != BYTES), key=_limit)
    for row, above in zip(levels, [*levels[1:], None], strict=True):
        is_close = above is not None and _limit(above) < _CLOSE * _limit(row)
        _level(axes, row, span[1], is_below=is_close)
    if any(map(_is_derated, falling)):
        axes.plot([], [], color="0.4", linewidth=0.7, linestyle=":", label="dotted: as rated")
    bound = f"bound by {first['resource']}, {_times(first)} from its limit"
    axes.set_title(bound, fontsize=7.5)
    axes.set_xlabel("MB moved for an output token")
    axes.set_ylabel("tokens/s")
    for axis in (axes.xaxis, axes.yaxis):
        _plain_ticks(axis)
    figure.legend(loc="outside upper center", ncols=2)
    if run is not None:
        caption(figure, [run])
    return figure


def _distinct(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows less those that would lie upon one before: as many bytes below nearly the same roof."""
    kept: list[Mapping[str, Any]] = []
    for row in rows:
        near = (
            other["unit"] == row["unit"] == BYTES
            and abs(other["amount_per_token"] / row["amount_per_token"] - 1) < _ALIKE
            and abs(other["tokens_per_s_limit"] / row["tokens_per_s_limit"] - 1) < _ALIKE
            for other in kept
        )
        if not any(near):
            kept.append(row)
    return kept


def _falling(axes: Axes, row: Mapping[str, Any], speed: float, span: tuple[float, float]) -> None:
    """Draw the roof of a resource that moves bytes, the run below it, and the distance."""
    colour, marker = _look(row["resource"])
    at, roof = row["amount_per_token"] / 1e6, row["tokens_per_s_limit"]
    ends = [roof * at / x for x in span]
    axes.plot(span, ends, color=colour, linewidth=1.2, zorder=2)
    if _is_derated(row):
        above = [y * row["rated_per_s"] / row["limit_per_s"] for y in ends]
        axes.plot(span, above, color=colour, linewidth=0.7, linestyle=":", zorder=1.8)
    axes.plot([at, at], [speed, roof], color=colour, linewidth=0.8, zorder=2.2)
    axes.plot(at, roof, color=colour, marker="_", markersize=7, zorder=2.4)
    label = f"{row['resource']}: {amount(row['limit_per_s'], BYTES)}/s"
    axes.plot(at, speed, color=colour, marker=marker, linestyle="", markersize=5.5, zorder=3,
              label=label)  # fmt: skip
    _write(axes, _times(row), (at, roof), (4, 2), colour)


def _write_speed(
    axes: Axes, speed: float, moved: Sequence[float], span: tuple[float, float]
) -> None:
    """Write the run's speed below its line, where marks are farthest apart."""
    places = sorted([span[0], *moved, span[1]])
    _, low, high = max((high / low, low, high) for low, high in pairwise(places))
    middle = math.sqrt(low * high)
    _write(axes, f"{speed:.4g} tokens/s", (middle, speed), (0, -8), "0.25", "center")


def _limit(row: Mapping[str, Any]) -> float:
    return float(row["tokens_per_s_limit"])


def _level(axes: Axes, row: Mapping[str, Any], right: float, *, is_below: bool) -> None:
    """Draw the roof of operations or launches, which no bytes lead to."""
    colour, _ = _look(row["resource"])
    roof = row["tokens_per_s_limit"]
    axes.axhline(roof, color=colour, linewidth=1, linestyle="-.", zorder=1.6)
    used = amount(row["amount_per_token"], row["unit"])
    words = f"{row['resource']}, {used} a token: {_times(row)}"
    _write(axes, words, (right, roof), (-2, -8 if is_below else 2), colour, "right")


def _write(
    axes: Axes,
    text: str,
    place: tuple[float, float],
    offset: tuple[int, int],
    colour: str,
    side: str = "left",
) -> None:
    axes.annotate(text, place, xytext=offset, textcoords="offset points", fontsize=6.5, color=colour,
                  va="bottom", ha=side, zorder=4, path_effects=[_HALO])  # fmt: skip


def _is_derated(row: Mapping[str, Any]) -> bool:
    rated = row["rated_per_s"]
    return rated is not None and rated > 1.02 * row["limit_per_s"]


def _times(row: Mapping[str, Any]) -> str:
    times = row["times_from_limit"]
    return f"{times:.2f}x" if times < 10 else f"{times:.0f}x"


def _plain_ticks(axis: Axis) -> None:
    """Mark a logarithmic axis at round numbers, written out: close ones where it spans little."""
    low, high = axis.get_view_interval()
    steps = (1, 2, 5) if high / low < 200 else (1, 3) if high / low < 5000 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [step * 10.0**power for power in powers for step in steps]
    ticks = [tick for tick in ticks if low <= tick <= high]
    axis.set_ticks(ticks, [f"{tick:,.10g}".replace(",", " ") for tick in ticks])
    axis.set_ticks([], minor=True)


def _look(resource: str) -> tuple[str, str]:
    return next(look for part, look in _LOOKS.items() if part in resource)


# -- the points of a sweep -------------------------------------------------------------------------


def points_figure(rows: Sequence[Row]) -> Figure | None:
    """Draw a panel for each of the resources that bind, or come closest: all runs, and the roofs.

    A mark is full where the resource is the one that binds the run.
    """
    rows = [row for row in rows if row.get("roofline")]
    panels = _panels(rows)
    if not panels:
        return None
    lines = lines_of(rows)
    columns = 2 if len(panels) == 1 else 4
    legend_rows = -(-(len(lines) + 2) // columns)
    size = (COLUMN, 2.2) if len(panels) == 1 else (PAGE / len(panels), 2.3)
    figure, grid = new_panels(1, len(panels), *size, 0.3 + 0.155 * legend_rows)
    speeds = [row["roofline"][0]["tokens_per_s"] for row in rows]
    for axes, resource in zip(grid, panels, strict=True):
        _panel(axes, rows, resource, lines)
        axes.set_ylim(min(speeds) / _ROOM, max(speeds) * _ROOM)
        axes.set_xlabel("MB moved for an output token")
        for axis in (axes.xaxis, axes.yaxis):
            _plain_ticks(axis)
    for axes in grid[1:]:
        axes.tick_params(axis="y", labelleft=False)
    grid[0].set_ylabel("tokens/s")
    handles = [_handle(line) for line in lines.values()]
    for face, words in (("0.3", "full: it binds the run"), ("white", "hollow: another does")):
        handles.append(Line2D([], [], color="0.3", marker="o", mfc=face, linestyle="", label=words))
    figure.legend(handles=handles, loc="outside upper center", ncols=columns)
    caption(figure, rows)
    return figure


def _handle(line: Line) -> Line2D:
    """Return a legend's entry with a full mark, for whether marks are hollow means something else here."""
    handle = line.handle()
    handle.set_markerfacecolor(line.look.colour)
    handle.set_linewidth(0.7)
    return handle


def _panels(rows: Sequence[Row]) -> list[str]:
    """Return the names of the resources to draw, the most used first."""
    used: dict[str, float] = {}
    for row in rows:
        for found in row["roofline"]:
            if found["unit"] == BYTES:
                most = max(used.get(found["resource"], 0.0), found["utilisation"])
                used[found["resource"]] = most
    kept = [name for name, most in used.items() if most >= _LEAST_USED]
    return sorted(kept, key=lambda name: -used[name])[:_MOST_PANELS]


def _panel(axes: Axes, rows: Sequence[Row], resource: str, lines: Mapping[str, Line]) -> None:
    axes.set(xscale="log", yscale="log")
    moved: list[float] = []
    named = names_by_row(rows)
    for name, line in lines.items():
        own = sorted((r for r in rows if named[id(r)] == name), key=lambda r: r["cache_ratio"])
        points = _draw_runs(axes, own, resource, line)
        moved += [x for x, _ in points]
    span = min(moved) / _ROOM, max(moved) * _ROOM
    for limit in _roofs(rows, resource):
        axes.plot(span, [limit / x for x in span], color="0.2", linewidth=1.1, zorder=1.8)
        axes.fill_between(
            span, [limit / x for x in span], 1e12, color="0.93", linewidth=0, zorder=1
        )
    axes.set_xlim(span)
    axes.set_title(_title(rows, resource), fontsize=7.5)


def _draw_runs(
    axes: Axes, rows: Sequence[Row], resource: str, line: Line
) -> list[tuple[float, float]]:
    """Draw the runs of one policy that use a resource, and a line between them; return the points."""
    colour, _, dash = line.look
    style = {**line.style(), "linestyle": ""}
    points = []
    for row in rows:
        found = next((f for f in row["roofline"] if f["resource"] == resource), None)
        if found is None:
            continue
        binds = row["roofline"][0]["resource"] == resource
        point = found["amount_per_token"] / 1e6, found["tokens_per_s"]
        style["markerfacecolor"] = colour if binds else "white"
        axes.plot(*point, **style, zorder=3)
        points.append(point)
    axes.plot([x for x, _ in points], [y for _, y in points], color=colour, linewidth=0.7,
              linestyle=dash, marker="", zorder=2)  # fmt: skip
    return points


def _roofs(rows: Sequence[Row], resource: str) -> list[float]:
    """Return the rates of a resource in MB/s, one for each machine or precision of the sweep."""
    rates = {
        float(f"{found['limit_per_s'] / 1e6:.3g}")
        for row in rows
        for found in row["roofline"]
        if found["resource"] == resource
    }
    return sorted(rates)


def _title(rows: Sequence[Row], resource: str) -> str:
    rates = _roofs(rows, resource)
    shown = amount(rates[-1] * 1e6, BYTES) if len(rates) == 1 else f"{len(rates)} roofs"
    return f"{resource} ({shown}/s)" if len(rates) == 1 else f"{resource} ({shown})"
