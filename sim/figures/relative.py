"""A sweep's policies against one of them, by cache size: a panel for each setting beside that."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sim.figures.panels import (
    Line,
    from_zero,
    label_edges,
    lines_of,
    need_sizes,
    panels_with_legend,
    settings_by_title,
    size_axis,
)
from sim.figures.source import NotDrawableError, Source, Wanted
from sim.figures.stalls import shortened
from sim.figures.standings import check_baseline
from sim.labels import Row
from sim.league import names_by_row, names_of, usual_baseline
from sim.plot_style import caption

_FIELD = "0.78"
"""The colour of policies that are not highlighted: the field."""


def draw_relative(source: Source, wanted: Wanted | None = None) -> Figure:
    """Draw speed over the baseline's by the share of experts on the GPU.

    Policies named by ``output.highlight`` are drawn in colour, the others as the field behind them.
    """
    rows, asked = source.several, None if wanted is None else wanted.baseline
    check_baseline(rows, asked)
    names = list(dict.fromkeys(names_of(rows)))
    baseline = asked or rows[0].get("baseline") or usual_baseline(names)
    if baseline not in names:
        raise NotDrawableError(
            "needs a baseline: ablation_base, lru, on_demand, or --baseline NAME"
        )
    if len(names) < 2:
        raise NotDrawableError("needs another policy beside the baseline")
    need_sizes(rows)
    if not _meet(rows, baseline):
        raise NotDrawableError(f"needs a policy that ran with a setting and a size of {baseline}'s")
    return relative_figure(rows, baseline)


def _meet(rows: Sequence[Row], baseline: str) -> bool:
    """Tell whether any other policy ran where the baseline did; of drawn settings often none."""
    named = names_by_row(rows)
    for members in settings_by_title(rows).values():
        base = {row["cache_ratio"] for row in members if named[id(row)] == baseline}
        others = {row["cache_ratio"] for row in members if named[id(row)] != baseline}
        if base & others:
            return True
    return False


def relative_figure(rows: Sequence[Row], baseline: str) -> Figure:
    """Draw rows against a baseline that is among them."""
    panels = settings_by_title(rows)
    shown = set(rows[0].get("highlight") or [row["policy"] for row in rows])
    lines = lines_of([row for row in rows if row["policy"] in shown])
    field = any(row["policy"] not in shown for row in rows)
    handles = [line.handle() for line in lines.values()]
    if field:
        handles.append(Line2D([], [], color=_FIELD, linewidth=0.8, label="the other policies"))
    figure, grid = panels_with_legend(len(panels), handles)
    named = names_by_row(rows)
    for axes, (title, members) in zip(grid, panels.items(), strict=True):
        by_name: dict[str, list[Row]] = {}
        for row in members:
            by_name.setdefault(named[id(row)], []).append(row)
        _panel(axes, by_name, baseline, lines)
        axes.set_title(title)
    label_edges(grid, "experts in GPU memory (%)", f"speed over {shortened(baseline)}'s")
    caption(figure, rows)
    return figure


def _panel(
    axes: Axes, by_name: dict[str, list[Row]], baseline: str, lines: dict[str, Line]
) -> None:
    base = {row["cache_ratio"]: row["tokens_per_s"] for row in by_name.get(baseline, [])}
    for name in [*(n for n in by_name if n not in lines), *(n for n in lines if n in by_name)]:
        own = [row for row in by_name[name] if row["cache_ratio"] in base]
        points = sorted((r["cache_ratio"], r["tokens_per_s"] / base[r["cache_ratio"]]) for r in own)
        sizes, ratios = [100 * size for size, _ in points], [ratio for _, ratio in points]
        if not points:
            continue
        if name in lines:
            axes.plot(sizes, ratios, **lines[name].style(), label=lines[name].label)
        else:
            axes.plot(sizes, ratios, color=_FIELD, linewidth=0.8, zorder=1)
    axes.set_xscale("log", base=2)
    size_axis(axes, [row for own in by_name.values() for row in own if row["cache_ratio"] in base])
    axes.minorticks_off()
    from_zero(axes)
