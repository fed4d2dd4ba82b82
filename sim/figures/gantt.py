"""What each resource does in some steps of a run, lane by lane, and where the GPU waits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from sim.events import Kind, Lane
from sim.figures.event_rows import (
    END,
    KIND,
    LANE,
    LAYER,
    START,
    STEP,
    UNIT,
    Rows,
    check_window,
    events_path,
    rows_in,
    span_ns,
    unit_of,
)
from sim.figures.source import NotDrawableError, Source, Wanted
from sim.labels import device
from sim.plot_style import PAGE, caption, new_figure
from sim.policy_looks import BLUE, BROWN, GREEN, GREY, OLIVE, ORANGE, PINK, SKY, TEAL, VERMILION

MOST_PIECES = 6000
_MANY_PIECES = 250
_MOST_STEP_LINES = 30
_MOST_LAYER_NAMES = 50
_NAME_SHARE = 0.08
"""What a step's name takes of the width; those that are closer are left out."""
_FEW_LAYERS = 10
_KINDS = {
    Kind.DENSE: ("attention", GREY, ""),
    Kind.STEP: ("embedding and head", BROWN, "----"),
    Kind.PACK: ("permute", OLIVE, "...."),
    Kind.EXPERT: ("expert", GREEN, ""),
    Kind.LOAD: ("load", BLUE, ""),
    Kind.BYPASS: ("load, not kept", SKY, "////"),
    Kind.PREFETCH: ("prefetch", ORANGE, "...."),
    Kind.READ: ("read", PINK, "xxxx"),
    Kind.DEMOTE: ("back to host", TEAL, "\\\\\\\\"),
    Kind.HANDOVER: ("activations", "0.35", ""),
    Kind.HOP: ("activations", "0.35", ""),
}
_LANES = (
    (Lane.GPU, "GPU"),
    (Lane.H2D, "host to GPU"),
    (Lane.D2H, "GPU to host"),
    (Lane.CPU, "CPU"),
    (Lane.HANDOVER, "handover"),
    (Lane.DEFERRAL, "handover, deferred"),
    (Lane.STORAGE, "storage"),
)
_WAIT = (VERMILION, "////")
_HEIGHT = 0.7


def draw_gantt(source: Source, wanted: Wanted | None = None) -> Figure:
    """Draw the lanes of a window of steps; by default one or two in the middle of the run."""
    events_path(source)
    steps = source.steps["step"]
    asked = None if wanted is None else wanted.window
    window = check_window(asked or _middle(source), int(steps.max()) + 1)
    begin_ns, end_ns = span_ns(source, window)
    rows = rows_in(source, (begin_ns, end_ns), MOST_PIECES)
    if not len(rows):
        raise NotDrawableError("has nothing that takes time in these steps")
    lanes = _lanes_of(rows, device(source.run))
    figure, axes = new_figure(PAGE, 0.34 * len(lanes) + 1.15)
    scale, unit = unit_of(end_ns - begin_ns)
    kinds: dict[str, Patch] = {}
    for place, (lane, number, _) in enumerate(lanes):
        own = rows[(rows[:, LANE] == lane) & (rows[:, UNIT] == number)]
        _draw_lane(axes, own, place, begin_ns, scale, kinds)
    waits = _draw_waits(axes, rows, lanes, (begin_ns, end_ns), scale)
    _draw_steps(axes, source, window, begin_ns, scale)
    _draw_layers(axes, rows, window, (begin_ns, end_ns), scale, len(lanes))
    axes.set_yticks(
        range(len(lanes)), [f"{name}{waits.get(p, '')}" for p, (_, _, name) in enumerate(lanes)]
    )
    axes.set_ylim(len(lanes) - 0.4, -0.75)
    axes.set_xlim(0, (end_ns - begin_ns) / scale)
    axes.set_xlabel(f"{unit} since the start of step {window[0]}")
    axes.grid(visible=False)
    handles = [*kinds.values(), _patch(f"{lanes[0][2].split()[0]} waits", *_WAIT)]
    figure.legend(handles=handles, loc="outside upper center", ncols=6, columnspacing=1.2)
    caption(figure, [source.run], f"{source.run['policy']}, {_named(window)}")
    return figure


def _middle(source: Source) -> tuple[int, int]:
    """Return a step in the middle of the run, and the next one too where few layers are to be shown."""
    steps = source.steps["step"]
    step = int(steps[len(steps) // 2])
    rows = rows_in(source, span_ns(source, (step, step)), MOST_PIECES)
    num_layers = len(np.unique(rows[rows[:, KIND] == Kind.DENSE, LAYER]))
    return step, step + (num_layers <= _FEW_LAYERS)


def _named(window: tuple[int, int]) -> str:
    return f"step {window[0]}" if window[0] == window[1] else f"steps {window[0]} to {window[1]}"


def _lanes_of(rows: Rows, computes: str) -> list[tuple[Lane, int, str]]:
    """Return the lanes that do something, each with its unit and name; those of GPUs first."""
    found = []
    for lane, name in _LANES:
        units = sorted({int(unit) for unit in rows[rows[:, LANE] == lane, UNIT]})
        name = computes if lane is Lane.GPU else name
        if lane is Lane.CPU and computes == "CPU":
            name = "CPU experts"
        found += [(lane, unit, f"{name} {unit}" if len(units) > 1 else name) for unit in units]
    return found


def _patch(label: str, colour: str, hatch: str) -> Patch:
    return Patch(facecolor=colour, hatch=hatch, edgecolor="white", linewidth=0.3, label=label)


def _draw_lane(
    axes: Axes, rows: Rows, place: int, begin_ns: int, scale: float, kinds: dict[str, Patch]
) -> None:
    """Draw the work of one lane, a collection a kind; add to the legend's entries."""
    for kind, (label, colour, hatch) in _KINDS.items():
        own = rows[rows[:, KIND] == kind]
        if not len(own):
            continue
        spans = [((row[START] - begin_ns) / scale, (row[END] - row[START]) / scale) for row in own]
        axes.broken_barh(spans, (place - _HEIGHT / 2, _HEIGHT), facecolor=colour, hatch=hatch,
                         edgecolor="white", linewidth=_edge(len(rows)), label=label)  # fmt: skip
        kinds.setdefault(label, _patch(label, colour, hatch))


def _edge(num_pieces: int) -> float:
    """Return the width of the edges between pieces of work, which would hide many small ones."""
    return 0.2 if num_pieces < _MANY_PIECES else 0.0


def gaps(rows: Rows, span: tuple[int, int]) -> list[tuple[int, int]]:
    """Return when none of these rows is under way within a span of time, in ns."""
    found, now_ns = [], span[0]
    for start, end in sorted((int(row[START]), int(row[END])) for row in rows):
        if start > now_ns:
            found.append((now_ns, min(start, span[1])))
        now_ns = max(now_ns, end)
    if now_ns < span[1]:
        found.append((now_ns, span[1]))
    return found


def _draw_waits(
    axes: Axes,
    rows: Rows,
    lanes: Sequence[tuple[Lane, int, str]],
    span: tuple[int, int],
    scale: float,
) -> dict[int, str]:
    """Draw where each GPU does nothing; return what share of the window that is, by place."""
    shares = {}
    for place, (lane, unit, _) in enumerate(lanes):
        if lane is not Lane.GPU:
            continue
        idle = gaps(rows[(rows[:, LANE] == lane) & (rows[:, UNIT] == unit)], span)
        bars = [((start - span[0]) / scale, (end - start) / scale) for start, end in idle]
        axes.broken_barh(bars, (place - 0.2, 0.4), facecolor=_WAIT[0], hatch=_WAIT[1], alpha=0.55,
                         edgecolor="white", linewidth=0, label="waits")  # fmt: skip
        share = sum(end - start for start, end in idle) / (span[1] - span[0])
        shares[place] = f"\nwaits {100 * share:.0f}%"
    return shares


def _draw_steps(
    axes: Axes, source: Source, window: tuple[int, int], begin_ns: int, scale: float
) -> None:
    """Draw where each step begins, if there are not too many."""
    steps = source.steps
    inside = (steps["step"] > window[0]) & (steps["step"] <= window[1])
    if inside.sum() > _MOST_STEP_LINES:
        return
    named_ns, apart_ns = begin_ns, _NAME_SHARE * (steps["end_ns"][inside].max(initial=0) - begin_ns)
    for step, start_ns in zip(steps["step"][inside], steps["start_ns"][inside], strict=True):
        at = (start_ns - begin_ns) / scale
        axes.axvline(at, color="black", linewidth=0.9)
        if start_ns - named_ns < apart_ns:
            continue
        named_ns = start_ns
        axes.annotate(f"step {step}", (at, 1), xycoords=("data", "axes fraction"), xytext=(2, -1),
                      textcoords="offset points", fontsize=6.5, va="bottom")  # fmt: skip


def _draw_layers(
    axes: Axes,
    rows: Rows,
    window: tuple[int, int],
    span: tuple[int, int],
    scale: float,
    num_lanes: int,
) -> None:
    """Mark where each layer begins, by its number below the lanes."""
    own = rows[(rows[:, KIND] == Kind.DENSE) & (rows[:, LAYER] >= 0) & (rows[:, STEP] >= window[0])]
    own = own[(own[:, STEP] <= window[1]) & (own[:, START] >= span[0])]
    if not 0 < len(own) <= _MOST_LAYER_NAMES:
        return
    for row in own:
        at = (row[START] - span[0]) / scale
        axes.plot([at, at], [-0.5, num_lanes - 0.55], color="0.6", linewidth=0.4, zorder=0.5)
        axes.annotate(f"{row[LAYER]}", (at, -0.5), xytext=(1, 0), textcoords="offset points",
                      fontsize=5.5, color="0.35", va="bottom")  # fmt: skip
    first = own[np.argmin(own[:, START])]
    axes.annotate("layer", ((first[START] - span[0]) / scale, -0.5), xytext=(-3, 0), ha="right",
                  textcoords="offset points", fontsize=5.5, color="0.35", va="bottom")  # fmt: skip
