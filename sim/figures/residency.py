"""Which experts of a layer are in GPU memory over time, and how full the cache is."""

from __future__ import annotations

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from sim.events import Counter
from sim.figures.boundaries import Boundaries, boundaries_of_run, draw_boundaries
from sim.figures.event_rows import (
    EXPERT,
    START,
    STEP,
    blocks,
    moves_of_layer,
    span_ns,
    spells,
    unit_of,
    uses_of_layer,
)
from sim.figures.heatmap import window_of
from sim.figures.source import NotDrawableError, Source, Wanted
from sim.plot_style import PAGE, caption
from sim.policy_looks import SKY, VERMILION
from sim.results import COUNTERS

MOST_SPELLS = 20_000
_MOST_USES = 6000
"""Above so many uses they are not drawn, for nobody could tell them apart."""
_IN = SKY


def draw_residency(source: Source, wanted: Wanted | None = None) -> Figure:
    """Draw when each expert of a layer was in the cache, and the bytes of the whole cache."""
    wanted = wanted or Wanted()
    run, layer = source.run, wanted.layer or 0
    moves = moves_of_layer(source, layer)
    window = window_of(source, wanted)
    span = span_ns(source, window)
    scale, unit = unit_of(span[1] - span[0])
    held = spells(moves, int(source.steps["end_ns"].max()))
    num_experts = 1 + max([0, *held, *uses_of_layer(source, layer)[:, EXPERT].tolist()])
    height = min(5.2, 1.9 + 0.045 * num_experts)
    figure = Figure(figsize=(PAGE, height))
    full, experts = figure.subplots(2, 1, sharex=True, height_ratios=(0.55, height - 1.7))
    handles = _draw_spells(experts, held, span, scale)
    handles += _draw_uses(experts, source, layer, held, span, scale)
    where = _in_time(source, boundaries_of_run(source), scale)
    handles += draw_boundaries(experts, where, (span[0] / scale, span[1] / scale))
    experts.set(
        xlabel=f"time ({unit})", ylabel=f"expert of layer {layer}", ylim=(-0.7, num_experts - 0.3)
    )
    experts.set_xlim(span[0] / scale, span[1] / scale)
    experts.yaxis.set_major_locator(MaxNLocator(integer=True))
    experts.grid(axis="y", visible=False)
    handles += _draw_bytes(full, source, span, int(run["cache_bytes"]), scale)
    figure.legend(handles=handles, loc="outside upper center", ncols=3)
    caption(figure, [run], f"{run['policy']}, layer {layer}, steps {window[0]} to {window[1]}")
    return figure


def _in_time(source: Source, where: Boundaries, scale: float) -> Boundaries:
    """Return boundaries at the times at which their steps begin."""
    start_ns = dict(
        zip(source.steps["step"].tolist(), source.steps["start_ns"].tolist(), strict=True)
    )

    def times(steps: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
        if steps is None:
            return None
        found: NDArray[np.int64] = np.array(
            [start_ns[s] / scale for s in steps.tolist() if s in start_ns]
        )
        return found

    return Boundaries(times(where.annotated), times(where.found), where.by)


def _draw_spells(
    axes: Axes, held: dict[int, list[tuple[int, int]]], span: tuple[int, int], scale: float
) -> list[Artist]:
    number = 0
    for expert, times in held.items():
        inside = [(low, high) for low, high in times if low < span[1] and high > span[0]]
        number += len(inside)
        if number > MOST_SPELLS:
            raise NotDrawableError(
                f"has more than {MOST_SPELLS} spells in the cache: --window FIRST LAST"
            )
        bars = [(low / scale, (high - low) / scale) for low, high in inside]
        axes.broken_barh(bars, (expert - 0.42, 0.84), facecolor=_IN, edgecolor="0.25", linewidth=0.25,
                         label=str(expert))  # fmt: skip
    return [Patch(facecolor=_IN, edgecolor="0.25", linewidth=0.25, label="in the cache")]


def _draw_uses(
    axes: Axes,
    source: Source,
    layer: int,
    held: dict[int, list[tuple[int, int]]],
    span: tuple[int, int],
    scale: float,
) -> list[Artist]:
    """Mark where an expert computes: in the cache, or not; nothing where they are too many to tell apart."""
    rows = uses_of_layer(source, layer)
    rows = rows[(rows[:, START] < span[1]) & (rows[:, START] >= span[0])]
    if len(rows) > _MOST_USES or len(np.unique(rows[:, STEP])) > _MOST_USES // 20:
        return []
    there = np.array([is_held(held, int(row[EXPERT]), int(row[START])) for row in rows], bool)
    handles: list[Artist] = []
    marks = (
        (there, "black", ".", "used there"),
        (~there, VERMILION, "x", "used, not in the cache"),
    )
    for chosen, colour, marker, label in marks:
        if chosen.any():
            axes.plot(rows[chosen, START] / scale, rows[chosen, EXPERT], marker, color=colour,
                      markersize=2.6, markeredgewidth=0.6)  # fmt: skip
            handles.append(Line2D([], [], color=colour, marker=marker, linestyle="", label=label))
    return handles


def is_held(held: dict[int, list[tuple[int, int]]], expert: int, now_ns: int) -> bool:
    """Tell whether an expert was in the cache at a time."""
    return any(low <= now_ns < high for low, high in held.get(expert, ()))


def _draw_bytes(
    axes: Axes, source: Source, span: tuple[int, int], capacity: int, scale: float
) -> list[Artist]:
    """Draw the bytes of the whole cache, those on their way included, as they were sampled."""
    kept = [np.empty((0, 4), np.int64)]
    for block in blocks(source, COUNTERS):
        kept.append(block[(block[:, 1] == Counter.CACHE_BYTES) & (block[:, 0] <= span[1])])
    rows = np.concatenate(kept)
    units = np.unique(rows[:, 2])
    for unit in units:
        own = rows[rows[:, 2] == unit]
        first = max(0, int(np.searchsorted(own[:, 0], span[0], side="right")) - 1)
        axes.plot(own[first:, 0] / scale, own[first:, 3] / 1e9, drawstyle="steps-post", color="0.2",
                  linewidth=0.9)  # fmt: skip
    most = capacity / 1e9 / max(1, len(units))
    axes.axhline(most, color="0.4", linestyle="--", linewidth=0.8)
    axes.set_ylim(0, 1.15 * max([most, 1e-9, *(rows[:, 3] / 1e9).tolist()]))
    axes.set_ylabel("GB")
    line = Line2D([], [], color="0.2", linewidth=0.9, label="whole cache, with loads under way")
    return [line, Line2D([], [], color="0.4", linestyle="--", linewidth=0.8, label="its size")]
