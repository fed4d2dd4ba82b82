"""Predicted against measured time of a decode step, and the error of each policy: a validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from sim.figures.parity import band_handles, draw_parity, mark_beyond, shade_errors
from sim.figures.source import NotDrawableError, Source, Wanted
from sim.plot_style import PAGE, look, write_below

Row = Mapping[str, Any]
"""A run: ``tier``, ``batch_size``, ``policy``, ``measured_ns``, ``predicted_ns``, ``error`` and ``noise``."""
_MARKERS = {"ram": "o", "storage": "s", "link": "^"}
_NAMES = {"link": "link (emulated)"}
_BANDS = ((0.25, "0.93"), (0.10, "0.85"))
"""The bars of the verdict of ``greenroom validate``: the worst error, and the median one."""
_ROW_INCHES, _POINT_INCHES = 0.1, 0.04
"""Height of a policy's row, and what each block adds to it."""
_NOISES = 2.0
_EDGE = 0.45
"""Errors beyond are drawn at the edge, with their figure."""


def draw_validation(source: Source, wanted: Wanted | None = None) -> Figure:
    """Draw the runs that ``greenroom validate`` has written."""
    rows = [row for row in source.rows if not row["is_reference"]]
    if not rows:
        raise NotDrawableError("needs a run that was measured, and all are references")
    machine = source.about["machine"]
    return validation_figure(rows, origin_of(machine))


def origin_of(machine: Mapping[str, Any]) -> str:
    """Say where the numbers of a validation come from."""
    return (
        f"{machine['cpu']}, device {machine['device']['name']}, torch {machine['torch']}; greenroom "
        f"{machine['greenroom']}; bars: 2 standard errors"
    )


def validation_figure(rows: Sequence[Row], text: str) -> Figure:
    """Draw predicted against measured time of a decode step, and the error by policy."""
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    colours = {policy: look(policy).colour for policy in policies}
    num_blocks = len({(row["tier"], row["batch_size"]) for row in rows})
    height = max(3.9, (_ROW_INCHES + _POINT_INCHES * num_blocks) * len(policies) + 1.4)
    figure = Figure(figsize=(PAGE, height))
    times, errors = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _times(times, rows, colours)
    _errors(errors, rows, policies, colours)
    figure.legend(handles=_handles(rows), loc="outside upper left", ncols=7, columnspacing=1.2)
    write_below(figure, text)
    return figure


def _handles(rows: Sequence[Row]) -> list[Line2D | Patch]:
    handles: list[Line2D | Patch] = []
    for tier in dict.fromkeys(row["tier"] for row in rows):
        label = _NAMES.get(tier, tier)
        handles.append(Line2D([], [], color="0.3", marker=_MARKERS[tier], ls="", label=label))
    sizes = dict.fromkeys(row["batch_size"] for row in rows)
    for size in sizes if len(sizes) > 1 else ():
        face = _face("0.3", size, rows)
        handles.append(
            Line2D([], [], color="0.3", marker="D", mfc=face, ls="", label=f"batch {size}")
        )
    return [*handles, *band_handles(_BANDS)]


def _face(colour: str, batch_size: int, rows: Sequence[Row]) -> str:
    """Return how a marker is filled: hollow for all but the smallest batch."""
    return colour if batch_size == min(row["batch_size"] for row in rows) else "white"


# -- times -----------------------------------------------------------------------------------------


def _times(axes: Axes, rows: Sequence[Row], colours: Mapping[str, str]) -> None:
    values = [value / 1e6 for row in rows for value in (row["measured_ns"], row["predicted_ns"])]
    draw_parity(axes, values, 1.3, _BANDS, _TICKS)
    for row in rows:
        colour = colours[row["policy"]]
        axes.errorbar(
            [row["measured_ns"] / 1e6],
            [row["predicted_ns"] / 1e6],
            xerr=_NOISES * min(row["noise"], 1 / _NOISES) * row["measured_ns"] / 1e6,
            color=colour,
            marker=_MARKERS[row["tier"]],
            mfc=_face(colour, row["batch_size"], rows),
            mew=0.8,
            markersize=4,
            elinewidth=0.6,
            zorder=3,
        )
    axes.set_xlabel("measured time of a decode step (ms)")
    axes.set_ylabel("predicted (ms)")


_TICKS = [step * 10**power for power in range(-3, 6) for step in (1, 2, 5)]


# -- errors ----------------------------------------------------------------------------------------


def _errors(
    axes: Axes, rows: Sequence[Row], policies: Sequence[str], colours: Mapping[str, str]
) -> None:
    """Draw every run's error in its policy's row, tier by tier from above."""
    shade_errors(axes, _BANDS)
    blocks = list(dict.fromkeys((row["tier"], row["batch_size"]) for row in rows))
    for row in rows:
        place = policies.index(row["policy"])
        offset = 0.68 * ((blocks.index((row["tier"], row["batch_size"])) + 0.5) / len(blocks) - 0.5)
        _point(axes, row, place + offset, colours[row["policy"]], rows)
    for place in range(1, len(policies)):
        axes.axhline(place - 0.5, color="0.85", linewidth=0.5, zorder=1.2)
    axes.set_yticks(range(len(policies)), policies)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(policies) - 0.4, -0.6)
    axes.set_xlim(*_limits(rows))
    axes.set_xlabel("predicted over measured - 1 (%)")
    axes.grid(axis="y", visible=False)


def _limits(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the ends of the errors' axis, in percent: the bands fit, and what is far is cut off."""
    edge = min(_EDGE, max(1.15 * _BANDS[0][0], 1.1 * max(abs(row["error"]) for row in rows)))
    return -100 * edge, 100 * edge


def _point(axes: Axes, row: Row, place: float, colour: str, rows: Sequence[Row]) -> None:
    edge = _limits(rows)[1]
    error = 100 * row["error"]
    shown = max(-0.97 * edge, min(0.97 * edge, error))
    noise = 100 * _NOISES * min(row["noise"], 1.0) * (1 + row["error"])
    axes.errorbar(
        [shown],
        [place],
        xerr=noise if shown == error else None,
        color=colour,
        marker=_MARKERS[row["tier"]],
        mfc=_face(colour, row["batch_size"], rows),
        mew=0.7,
        markersize=3.2,
        elinewidth=0.6,
        zorder=3,
    )
    if shown != error:
        mark_beyond(axes, error, (shown, place), colour)
