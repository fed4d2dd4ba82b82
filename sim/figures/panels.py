"""A panel for each setting of a sweep, a line for each policy in it: what figures by cache size share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sim.figures.source import NotDrawableError
from sim.figures.stalls import shortened
from sim.labels import Row, value
from sim.league import kind_of, names_by_row, names_of, setting_fields
from sim.plot_style import COLUMN, PAGE, new_panels
from sim.policy_looks import DASHES, Look, look
from sim.report_table import natural

MOST_LINES = 24
MOST_PANELS = 6
_FEW_LINES = 6
"""Up to so many have their legend above a column of a paper; more have it beside, over the whole page."""
_LEGEND_ROW = 0.155
_MOST_TICKS = 8
_LONGEST_TITLE = 60
_VARIANTS = "sDv^oPXph"
_MARKS = {"oracle": " (oracle)", "lossy": " (lossy)", "lossless": ""}
Number = Callable[[Row], float | None]


@dataclass(frozen=True)
class Line:
    """The rows of one policy, with its own parameters, in all panels."""

    name: str
    policy: str
    kind: str
    look: Look

    @property
    def label(self) -> str:
        """Its name, and what game it plays."""
        return f"{shortened(self.name)}{_MARKS[self.kind]}"

    def handle(self) -> Line2D:
        """Return its entry of a legend."""
        return Line2D([], [], **self.style(), label=self.label)

    def style(self) -> dict[str, Any]:
        """Return how it is drawn: those that know the future have hollow marks."""
        colour, marker, dash = self.look
        face = "none" if self.kind == "oracle" else colour
        size = 6.0 if marker in "*1234+x" else 4.0
        return {"color": colour, "marker": marker, "linestyle": dash, "markerfacecolor": face,
                "markersize": size}  # fmt: skip


def lines_of(rows: Sequence[Row]) -> dict[str, Line]:
    """Return the lines of a sweep by name, in the order of its rows.

    Those of one policy, with other parameters, differ in their marks and dashes.
    """
    found: dict[str, Line] = {}
    seen: dict[str, int] = {}
    for name, row in zip(names_of(rows), rows, strict=True):
        if name not in found:
            policy = row["policy"]
            place = seen[policy] = seen.get(policy, -1) + 1
            own = look(policy)
            found[name] = Line(name, policy, kind_of(row), _variant(own, place))
    if len(found) > MOST_LINES:
        raise NotDrawableError(
            f"would have {len(found)} lines, and more than {MOST_LINES} are a tangle: --policies A,B,... "
            "names those to draw"
        )
    return found


def _variant(own: Look, place: int) -> Look:
    """Return the look of a policy with other parameters: its colour, and other marks and dashes."""
    if not place:
        return own
    marker = _VARIANTS[(place - 1) % len(_VARIANTS)]
    return Look(own.colour, marker, DASHES[(DASHES.index(own.dash) + place) % len(DASHES)])


def settings_by_title(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each setting beside policy and cache size, by its words."""
    fields = setting_fields(rows)
    panels: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        panels.setdefault(tuple(value(row, field) for field in fields), []).append(row)
    if len(panels) > MOST_PANELS:
        raise NotDrawableError(
            f"would have {len(panels)} panels, one for each of {_listed(fields)}, and at most {MOST_PANELS} "
            "are drawn"
        )
    return {
        ", ".join(map(_words, fields, setting)): members
        for setting, members in sorted(panels.items(), key=lambda panel: natural(panel[0]))
    }


def need_sizes(rows: Sequence[Row]) -> None:
    """Raise NotDrawableError unless the rows have several cache sizes."""
    sizes = {row["cache_ratio"] for row in rows}
    if len(sizes) < 2:
        shown = f"{100 * min(sizes):.4g} %"
        raise NotDrawableError(f"needs at least two cache sizes, and all runs have {shown}")


def panels_with_legend(
    num_panels: int, handles: Sequence[Artist], height: float = 1.95
) -> tuple[Figure, list[Axes]]:
    """Return a figure with so many panels and a legend: above a few lines, beside many."""
    beside = len(handles) > _FEW_LINES
    columns = min(num_panels, 2 if beside or num_panels == 4 else 3)
    wide = beside or columns > 1
    rows = -(-num_panels // columns)
    legend_columns = 1 if beside else (3 if wide else 2)
    above = 0.0 if beside else _LEGEND_ROW * -(-len(handles) // legend_columns)
    least = 0.0 if not beside else _LEGEND_ROW * len(handles) + 0.1
    total = max(rows * height, least)
    size = (PAGE if wide else COLUMN) / columns, total / rows
    figure, grid = new_panels(rows, columns, *size, above + 0.3)
    for axes in grid[num_panels:]:
        axes.set_axis_off()
    if beside:
        figure.legend(handles=list(handles), loc="outside right upper")
    else:
        figure.legend(handles=list(handles), loc="outside upper center", ncols=legend_columns)
    return figure, grid[:num_panels]


def draw_by_size(
    rows: Sequence[Row],
    number: Number,
    ylabel: str,
    *,
    behind: Callable[[Axes, Sequence[Row]], None] | None = None,
    more: Sequence[Artist] = (),
) -> tuple[Figure, list[Axes]]:
    """Draw a number over the share of experts on the GPU: a panel a setting, a line a policy.

    ``behind`` draws into each panel what lies behind the lines; ``more`` are its entries of the legend.
    """
    need_sizes(rows)
    panels, lines = settings_by_title(rows), lines_of(rows)
    named = names_by_row(rows)
    handles = [line.handle() for line in lines.values()]
    figure, grid = panels_with_legend(len(panels), [*handles, *more])
    for axes, (title, members) in zip(grid, panels.items(), strict=True):
        if behind is not None:
            behind(axes, members)
        for name, line in lines.items():
            own = [row for row in members if named[id(row)] == name]
            _draw_line(axes, line, [(row["cache_ratio"], number(row)) for row in own])
        axes.set_title(shortened(title, _LONGEST_TITLE))
        from_zero(axes)
        size_axis(axes, members)
    label_edges(grid, "experts in GPU memory (%)", ylabel)
    return figure, grid


def _draw_line(axes: Axes, line: Line, points: Sequence[tuple[float, float | None]]) -> None:
    known = sorted((100 * size, y) for size, y in points if y is not None)
    if known:
        axes.plot([x for x, _ in known], [y for _, y in known], **line.style(), label=line.label)


def from_zero(axes: Axes) -> None:
    """Let a vertical axis begin at 0, with room for marks at its top."""
    top = axes.dataLim.y1
    axes.set_ylim(0, 1.07 * top if top > 0 else 1)


def size_axis(axes: Axes, rows: Sequence[Row]) -> None:
    """Mark a horizontal axis at the cache sizes, as far as they can be read."""
    sizes = sorted({100 * row["cache_ratio"] for row in rows})
    places = sizes if axes.get_xscale() == "linear" else [math.log(size) for size in sizes if size]
    sizes = sizes[len(sizes) - len(places) :]
    kept: list[int] = []
    for number, place in enumerate(places):
        if not kept or place - places[kept[-1]] > (places[-1] - places[0]) / _MOST_TICKS:
            kept.append(number)
    # Sizes that somebody chose are written out; those drawn at random have no end.
    digits = 4 if all(math.isclose(size, float(f"{size:.4g}")) for size in sizes) else 3
    axes.set_xticks([sizes[n] for n in kept], [f"{sizes[n]:.{digits}g}" for n in kept])


def label_edges(grid: Sequence[Axes], xlabel: str, ylabel: str) -> None:
    """Name the axes of the panels at the left and at the bottom."""
    shape = grid[0].get_subplotspec()
    assert shape is not None
    columns = shape.get_gridspec().ncols
    for place, axes in enumerate(grid):
        if place % columns == 0:
            axes.set_ylabel(ylabel)
        if place + columns >= len(grid):
            axes.set_xlabel(xlabel)


def _words(field: str, text: str) -> str:
    return f"batch {text}" if field == "batch_size" else _pair(field, text)


def _pair(field: str, text: str) -> str:
    return f"{field.rpartition('.')[2]} {text}" if "." in field else text


def _listed(fields: Sequence[str]) -> str:
    return " x ".join(fields)
