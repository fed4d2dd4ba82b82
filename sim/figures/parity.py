"""Predicted against actual: what figures of predictions and their errors share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

Bands = Sequence[tuple[float, str]]
"""Relative errors, the largest first, and the grey of those within."""


def draw_parity(
    axes: Axes, values: Sequence[float], room: float, bands: Bands, ticks: Sequence[float]
) -> None:
    """Make a panel of predicted over actual ``values``: bands around the diagonal, both axes alike.

    ``room`` is the factor by which axes reach beyond the values; ``ticks`` are marked where they fit.
    """
    ends = min(values) / room, max(values) * room
    for size, grey in bands:
        low, high = ([end * (1 + sign * size) for end in ends] for sign in (-1, 1))
        axes.fill_between(ends, low, high, color=grey, linewidth=0, zorder=1)
    axes.plot(ends, ends, color="0.45", linewidth=0.8, zorder=1.5, marker="")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    shown = [tick for tick in ticks if ends[0] <= tick <= ends[1]]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(shown, [f"{tick:g}" for tick in shown])
    axes.minorticks_off()
    axes.set_anchor("N")


def shade_errors(axes: Axes, bands: Bands) -> None:
    """Draw the bands, and no error at all, behind errors in percent along the horizontal axis."""
    for size, grey in bands:
        axes.axvspan(-100 * size, 100 * size, color=grey, linewidth=0, zorder=1)
    axes.axvline(0, color="0.45", linewidth=0.8, zorder=1.5)


def band_handles(bands: Bands) -> list[Patch]:
    """Return the bands' entries of a legend, the narrowest first."""
    return [Patch(color=grey, label=f"within {size:.0%}") for size, grey in bands[::-1]]


def mark_beyond(
    axes: Axes, percent: float, at: tuple[float, float], colour: str, **look: Any
) -> None:
    """Write how large an error is beside its mark ``at`` the edge of a panel that ends before it."""
    side = 1 if percent > 0 else -1
    axes.annotate(
        f"{percent:+.0f}%",
        at,
        xytext=(-4 * side, 0),
        textcoords="offset points",
        ha="right" if side > 0 else "left",
        va="center",
        fontsize=5,
        color=colour,
        **look,
    )
