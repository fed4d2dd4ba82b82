"""Figures of a sweep: read result rows, define no metric. PNG to look at, PDF for print."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from sim.labels import Row, names
from sim.league import league
from sim.plot_style import caption, look, new_figure, save
from sim.plots_relative import relative_by_cache
from sim.report_league import league_figure
from sim.roofline_plot import plot_points

_DASHES = ("-", "--", ":", "-.", (0, (6, 1)), (0, (1, 4)))
_PARTS = (
    ("gpu_share", "GPU busy", "#009E73", ""),
    ("link_stall_share", "waits for link", "#0072B2", "//"),
    ("storage_stall_share", "waits for storage", "#56B4E9", "xx"),
    ("dram_stall_share", "waits for host memory", "#CC79A7", "\\\\"),
    ("host_stall_share", "waits for host thread", "#D55E00", "++"),
    ("cpu_stall_share", "waits for CPU", "#E69F00", ".."),
    ("idle_ns", "nothing to run", "#DDDDDD", ""),
)
_LEGEND_COLUMNS = 3
_MOST_LINES = 16
_MOST_BARS = 40
"""Above these a figure is a tangle and is left out."""


def plot_sweep(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw what the rows allow: throughput by cache size if there are several, and where time goes."""
    style = resources.files("sim") / "paper.mplstyle"
    drawn: list[Path] = []
    rows = [row for row in rows if row["total_ns"]]  # all requests refused: nothing to draw
    if not rows:
        return drawn
    with plt.style.context([str(style)]):
        several_sizes = len({row["cache_ratio"] for row in rows}) > 1
        if several_sizes and len(_series(rows)) <= _MOST_LINES:
            drawn.append(save(throughput_by_cache(rows), folder / "throughput_by_cache"))
        if len(_of_middle_size(rows)) <= _MOST_BARS:
            drawn.append(save(stall_breakdown(rows), folder / "stall_breakdown"))
        baseline, standings = league(rows, rows[0].get("baseline"))
        if standings:
            drawn.append(save(league_figure(rows, baseline, standings), folder / "league"))
        if standings and several_sizes:
            figure = relative_by_cache(rows, baseline)
            drawn += [] if figure is None else [save(figure, folder / "relative_by_cache")]
    pointed = plot_points(rows, folder / "roofline")
    return drawn if pointed is None else [*drawn, pointed]


def throughput_by_cache(rows: Sequence[Row]) -> Figure:
    """Draw tokens/s over the share of experts on the GPU, a line a policy; oracles have hollow marks."""
    figure, axes = new_figure(4.8, 3.0)
    variants: list[str] = []  # what sets lines of one policy apart: one dash pattern each
    for name, series in _series(rows).items():
        variant = name.removeprefix(series[0]["policy"])
        if variant not in variants:
            variants.append(variant)
        points = sorted((row["cache_ratio"], row["tokens_per_s"]) for row in series)
        colour, marker = look(series[0]["policy"])
        oracle = series[0]["oracle"]
        axes.plot(
            [100 * ratio for ratio, _ in points],
            [speed for _, speed in points],
            color=colour,
            marker=marker,
            linestyle=_DASHES[variants.index(variant) % len(_DASHES)],
            markerfacecolor="none" if oracle else colour,
            label=f"{name} (oracle)" if oracle else name,
        )
    sizes = sorted({100 * row["cache_ratio"] for row in rows})
    if len(sizes) <= 8:
        axes.set_xticks(sizes, [f"{size:.3g}" for size in sizes])
    axes.set_xlabel("experts in GPU memory (%)")
    axes.set_ylabel("tokens/s")
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside right center")
    caption(figure, rows)
    return figure


def stall_breakdown(rows: Sequence[Row]) -> Figure:
    """Draw, for the middle cache size of the sweep, time for each output token by what it goes to."""
    chosen = _of_middle_size(rows)
    size = chosen[0]["cache_ratio"]
    chosen.sort(key=lambda row: row["tokens_per_s"])
    labels = names(chosen)
    width = 3.9 + 0.065 * max(map(len, labels))  # the labels take room beside the bars
    spent = {part: [_spent_ms(row, part[0]) for row in chosen] for part in _PARTS}
    parts = [part for part, widths in spent.items() if any(widths)]
    legend_rows = -(-len(parts) // _LEGEND_COLUMNS)
    height = 0.28 * len(chosen) + 1.1 + 0.2 * legend_rows
    figure, axes = new_figure(width, height)
    left = [0.0] * len(chosen)
    for part in parts:
        _, label, colour, hatch = part
        axes.barh(labels, spent[part], left=left, color=colour, hatch=hatch, edgecolor="white",
                  linewidth=0.3, label=label)  # fmt: skip
        left = [start + width for start, width in zip(left, spent[part], strict=True)]
    axes.set_xlim(right=1.04 * max(left))
    axes.set_xlabel(f"ms for an output token, {100 * size:.3g}% of experts in GPU memory")
    axes.grid(axis="y", visible=False)
    figure.legend(loc="outside upper center", ncols=_LEGEND_COLUMNS)
    caption(figure, rows)
    return figure


def _of_middle_size(rows: Sequence[Row]) -> list[Row]:
    sizes = sorted({row["cache_ratio"] for row in rows})
    return [row for row in rows if row["cache_ratio"] == sizes[(len(sizes) - 1) // 2]]


def _spent_ms(row: Row, column: str) -> float:
    """Return what a share of the time is for an output token."""
    share = row[column] / row["total_ns"] if column.endswith("_ns") else row[column]
    return float(share * 1e3 / row["tokens_per_s"])


def _series(rows: Sequence[Row]) -> dict[str, list[Row]]:
    series: dict[str, list[Row]] = {}
    for name, row in zip(names(rows), rows, strict=True):
        series.setdefault(name, []).append(row)
    return series
