"""Predicted against published speeds: how far off, and which rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from sim.figures.parity import band_handles, draw_parity, mark_beyond, shade_errors
from sim.figures.source import Source, Wanted
from sim.interval import SHARE, Interval
from sim.plot_style import PAGE, save, styled, write_below
from sim.published import Outcome, Unseen

# Okabe-Ito and two darker ones; each with a marker of its own, so that grey print tells them apart too.
_LOOKS = {
    "llama_cpp": ("#0072B2", "o"),
    "llama_cpp_2025": ("#56B4E9", "p"),
    "ik_llama": ("#009E73", "^"),
    "ik_llama_unpacked": ("#7F3C8D", "v"),
    "ktransformers": ("#D55E00", "D"),
    "ktransformers_2025": ("#E69F00", "X"),
    "freetoken": ("#CC79A7", "s"),
    "imp": ("#000000", "P"),
    "phone_stream": ("#882255", "*"),
    "vllm_like": ("#8C6D31", "<"),
    "hf_offload": ("#666666", ">"),
}
_SPARE = (("#332288", "H"), ("#661100", "1"), ("#117733", "d"), ("#999933", "8"))
_BANDS = ((0.20, "0.93"), (0.08, "0.84"))
_LEAST_SHOWN, _MOST_SHOWN = 0.25, 0.45
"""Between these the largest error drawn is chosen; those beyond are at the edge, with their figure."""
_ROW_INCHES = 0.125


def plot_published(found: Sequence[Outcome], stem: Path) -> Path:
    """Draw the figure; return the PNG's path."""
    with styled():
        return save(published_figure(found), stem)


def draw_published(source: Source, wanted: Wanted | None = None) -> Figure:
    """Draw the table that ``greenroom published`` has written."""
    return published_figure([_outcome(row) for row in source.rows])


def _outcome(row: Mapping[str, str]) -> Outcome:
    """Return a row of the table as what it was made of; its times are those of the row's own unit."""
    numbers = {name: _number(row.get(name)) for name in _NUMBERS}
    low, high, predicted = (numbers[name] or 0.0 for name in _NUMBERS[:3])
    tokens = int(numbers["tokens"] or 1)
    middle, is_speed = math.sqrt(low * high), row["unit"] == "tokens/s"
    published_ns, predicted_ns = (
        tokens * 1e9 / value if is_speed else value * _NS_OF[row["unit"]]
        for value in (middle, predicted)
    )
    return Outcome(
        name=row["id"],
        **{key: row[key] for key in ("model", "machine", "engine", "metric", "unit")},
        low=low,
        high=high,
        predicted=predicted,
        published_ns=published_ns,
        predicted_ns=predicted_ns,
        tokens=tokens,
        complete=row["complete"] == "True",
        bottleneck=row["bottleneck"],
        problems=(),
        note=row["note"],
        missing=row["missing"],
        unseen=Unseen(numbers["error_left_out"], numbers["error_machine_left_out"]),
        interval=Interval(numbers["interval_low"], numbers["interval_high"], ""),
    )


_NUMBERS = ("published_low", "published_high", "predicted", "tokens", "error_left_out",
            "error_machine_left_out", "interval_low", "interval_high")  # fmt: skip
_NS_OF = {"s": 1e9, "ms": 1e6}


def _number(text: str | None) -> float | None:
    return float(text) if text else None


def published_figure(found: Sequence[Outcome]) -> Figure:
    """Draw predicted over published speed, how many rows are how close, and the error of each row."""
    rows = _in_order(found)
    height = max(5.6, _ROW_INCHES * len(rows) + 1.2)
    figure = Figure(figsize=(PAGE, height))
    panels = figure.subplot_mosaic(
        [["speeds", "errors"], ["close", "errors"]],
        width_ratios=(1.25, 1),
        height_ratios=(3.3, height - 4.6),
    )
    _speeds(panels["speeds"], rows)
    largest = max(abs(outcome.error) for outcome in rows)
    edge = min(_MOST_SHOWN, max(_LEAST_SHOWN, 1.1 * largest))
    _closeness(panels["close"], rows, edge)
    _errors(panels["errors"], rows, edge)
    figure.legend(handles=_handles(rows), loc="outside upper left", ncols=5, columnspacing=1.0)
    text = "machine, model and engine files as they come; *: inputs are not fully known"
    if any(outcome.interval.low is not None for outcome in rows):
        text += f"; bars: {SHARE:.0%} interval, from the errors on rows left out of the fit"
    write_below(figure, text)
    return figure


def look_of(engine: str) -> tuple[str, str]:
    """Return the colour and marker of an engine."""
    return _LOOKS.get(engine, _SPARE[sum(map(ord, engine)) % len(_SPARE)])


def _in_order(found: Sequence[Outcome]) -> list[Outcome]:
    """Return the rows engine by engine, decoding before prompts, in the order in which they came."""
    engines = list(dict.fromkeys(outcome.engine for outcome in found))
    return sorted(found, key=lambda o: (engines.index(o.engine), o.is_prompt))


def _handles(rows: Sequence[Outcome]) -> list[Line2D | Patch]:
    """Return the legend's entries: engines, and what else marks mean."""
    handles: list[Line2D | Patch] = []
    for engine in dict.fromkeys(outcome.engine for outcome in rows):
        colour, marker = look_of(engine)
        handles.append(Line2D([], [], color=colour, marker=marker, linestyle="", label=engine))
    if any(outcome.is_prompt for outcome in rows):
        hollow = Line2D([], [], color="0.3", marker="o", mfc="white", linestyle="")
        hollow.set_label("a prompt")
        handles.append(hollow)
    if any(outcome.unseen.row is not None for outcome in rows):
        tick = Line2D([], [], color="0.3", marker="|", mew=1.2, linestyle="")
        tick.set_label("row left out of the fit")
        handles.append(tick)
    return [*handles, *band_handles(_BANDS)]


# -- speeds ----------------------------------------------------------------------------------------


def _speeds(axes: Axes, rows: Sequence[Outcome]) -> None:
    speeds = [speed for outcome in rows for speed in outcome.speeds]
    draw_parity(axes, speeds, 1.6, _BANDS, _TICKS)
    for outcome in rows:
        _point(axes, outcome)
    axes.set_xlabel("published tokens/s")
    axes.set_ylabel("predicted tokens/s")


_TICKS = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000)


def _point(axes: Axes, outcome: Outcome) -> None:
    colour, marker = look_of(outcome.engine)
    low, high, predicted = outcome.speeds
    middle = (low * high) ** 0.5
    around = outcome.interval.of(predicted)
    up_down = None
    if around is not None:  # a bias may put the prediction itself outside
        up_down = [[max(0.0, predicted - around[0])], [max(0.0, around[1] - predicted)]]
    axes.errorbar(
        [middle],
        [predicted],
        xerr=[[middle - low], [high - middle]] if high > low else None,
        yerr=up_down,
        color=colour,
        marker=marker,
        mfc="white" if outcome.is_prompt else colour,
        mew=0.8,
        markersize=4.2,
        elinewidth=0.6,
        alpha=1 if outcome.complete else 0.55,
        zorder=3,
    )


# -- how many rows are how close --------------------------------------------------------------------


def _closeness(axes: Axes, rows: Sequence[Outcome], edge: float) -> None:
    """Draw the share of the complete decode rows whose error is at most so large."""
    decoding = [outcome for outcome in rows if outcome.complete and not outcome.is_prompt]
    kinds: dict[tuple[str, str], Sequence[float | None]] = {
        ("files as they come", "-"): [outcome.error for outcome in decoding],
        ("row left out", "--"): [outcome.unseen.row for outcome in decoding],
        ("machine left out", ":"): [outcome.unseen.machine for outcome in decoding],
    }
    for size, grey in _BANDS:
        axes.axvspan(0, 100 * size, color=grey, linewidth=0, zorder=1)
    for (name, dash), errors in kinds.items():
        sizes = sorted(100 * abs(error) for error in errors if error is not None)
        if not sizes:
            continue
        shares = [100 * count / len(sizes) for count in range(len(sizes) + 1)]
        axes.step([0, *sizes, 100], [*shares, 100], where="post", color="0.15", linestyle=dash,
                  linewidth=1, label=name)  # fmt: skip
    axes.axhline(50, color="0.6", linewidth=0.5, zorder=1.5)
    axes.set(xlim=(0, 100 * edge), ylim=(0, 102), yticks=(0, 50, 100))
    axes.set_xlabel("absolute error at most (%)")
    axes.set_ylabel(f"% of {len(decoding)} decode rows")
    axes.legend(loc="lower right")


# -- errors ----------------------------------------------------------------------------------------


def _errors(axes: Axes, rows: Sequence[Outcome], edge: float) -> None:
    places = range(len(rows))
    shade_errors(axes, _BANDS)
    for place, outcome in zip(places, rows, strict=True):
        _row_errors(axes, place, outcome, edge)
    for place in places[1:]:
        if rows[place].engine != rows[place - 1].engine:
            axes.axhline(place - 0.5, color="0.75", linewidth=0.5, zorder=1.2)
    names = [f"{o.model}  {o.name}{'' if o.complete else '*'}" for o in rows]
    axes.set_yticks(places, names, fontsize=5)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(-100 * edge, 100 * edge)
    axes.set_xlabel("error of predicted speed (%)")
    axes.grid(axis="y", visible=False)


def _row_errors(axes: Axes, place: int, outcome: Outcome, edge: float) -> None:
    colour, marker = look_of(outcome.engine)
    face = "white" if outcome.is_prompt else colour
    faint = 1 if outcome.complete else 0.55
    shown, left_out = 100 * _within(outcome.error, edge), outcome.unseen.row
    if left_out is not None:
        other = 100 * _within(left_out, edge)
        axes.plot([shown, other], [place, place], color=colour, linewidth=0.7, alpha=0.7 * faint,
                  zorder=2, marker="")  # fmt: skip
        axes.plot(other, place, color=colour, marker="|", markersize=4.5, mew=1.2, alpha=faint,
                  zorder=2.5)  # fmt: skip
    axes.plot(shown, place, color=colour, marker=marker, mfc=face, mew=0.8, markersize=4,
              alpha=faint, zorder=3)  # fmt: skip
    if abs(outcome.error) > edge:
        backing = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
        mark_beyond(axes, 100 * outcome.error, (shown, place), colour, bbox=backing)


def _within(error: float, edge: float) -> float:
    """Return where an error is drawn: within the panel."""
    edge *= 0.975
    return max(-edge, min(edge, error))
