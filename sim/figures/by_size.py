"""Speed and time of a token by cache size."""

from __future__ import annotations

from matplotlib.figure import Figure

from sim.figures.panels import draw_by_size
from sim.figures.source import Source, Wanted
from sim.labels import Row
from sim.plot_style import caption


def draw_throughput(source: Source, wanted: Wanted | None = None) -> Figure:
    """Draw tokens/s over the share of experts on the GPU."""
    rows = source.several
    figure, _ = draw_by_size(rows, lambda row: row["tokens_per_s"], "tokens/s")
    caption(figure, rows)
    return figure


def draw_tpot(source: Source, wanted: Wanted | None = None) -> Figure:
    """Draw the time of an output token over the share of experts on the GPU."""
    rows = source.several
    figure, _ = draw_by_size(rows, _tpot_ms, "TPOT, median (ms)")
    caption(figure, rows)
    return figure


def _tpot_ms(row: Row) -> float | None:
    found = row["tpot_ns_p50"]
    return None if found is None else found / 1e6
