"""The figure of a search: tokens/s over memory, a line a precision."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hwmodels.units import GB
from sim.advise import Point
from sim.plot_style import PAGE, new_figure, save, styled, write_below

_MARKS = {
    "llama_cpp": "o",
    "ik_llama": "s",
    "ktransformers": "^",
    "vllm_like": "D",
    "freetoken": "v",
    "hf_offload": "x",
    "phone_stream": "*",
}
_OTHER = "P"
_MOST_LINES = 9
"""Precisions drawn, those with the fastest points that fit."""


def plot_frontier(points: Sequence[Point], folder: Path) -> Path | None:
    """Draw the frontier to ``frontier.png`` and ``.pdf``; None where there is nothing to draw."""
    if not points:
        return None
    with styled():
        return save(frontier_figure(points), folder / "frontier")


def frontier_figure(points: Sequence[Point]) -> Figure:
    """Draw speed against memory, a line a precision of weights, a mark an engine."""
    figure, axes = new_figure(PAGE, 3.4)
    quants = _drawn(points)
    colours = colormaps["cividis"]
    engines: dict[str, None] = {}
    for number, (bits, quant) in enumerate(quants):
        colour = colours(0.9 * number / max(1, len(quants) - 1))
        line = rising([p for p in points if p.quant == quant and p.bits == bits])
        xs, ys = [p.memory_bytes / GB for p in line], [p.speed for p in line]
        axes.step(
            xs, ys, where="post", color=colour, linewidth=0.9, label=f"{quant}, {bits:.3g} bits"
        )
        for point in line:
            engines[point.engine] = None
            axes.plot(
                point.memory_bytes / GB,
                point.speed,
                marker=_MARKS.get(point.engine, _OTHER),
                markersize=3,
                linestyle="none",
                color=colour,
                markerfacecolor=colour if point.fits else "none",
            )
    _memory_line(axes, points[0])
    for engine in engines:
        axes.plot(
            [], [], marker=_MARKS.get(engine, _OTHER), linestyle="none", color="0.4", label=engine
        )
    machine = points[0].case.costs.machine
    axes.set_xlabel(
        f"{'GPU memory' if machine.gpu else 'memory'} needed (GB); hollow: does not fit"
    )
    axes.set_ylabel("tokens/s, predicted")
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside right center")
    _caption(figure, points[0])
    return figure


def _drawn(points: Sequence[Point]) -> list[tuple[float, str]]:
    """Return the (bits, name) of the precisions that have a line, the most bits first."""
    best = {(p.bits, p.quant): 0.0 for p in points}
    for point in points:
        key = point.bits, point.quant
        best[key] = max(best[key], point.speed if point.fits else 0.0)
    fastest = sorted(best, key=lambda key: -best[key])[:_MOST_LINES]
    return sorted(fastest, reverse=True)


def rising(points: Sequence[Point]) -> list[Point]:
    """Return the points by memory of which each is faster than all before."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.memory_bytes, -p.speed)):
        if not kept or point.speed > kept[-1].speed:
            kept.append(point)
    return kept


def _memory_line(axes: Axes, point: Point) -> None:
    machine = point.case.costs.machine
    gpu = machine.gpu
    have = gpu.memory_bytes * gpu.count if gpu and machine.link else machine.cpu.memory_bytes
    axes.axvline(
        have / GB, color="0.3", linestyle=":", linewidth=0.9, label=f"there is: {have / GB:.0f} GB"
    )


def _caption(figure: Figure, point: Point) -> None:
    case = point.case
    text = (
        f"{case.costs.shape.name} on {case.costs.machine.name}, {case.batch_size} at one time, context "
        f"{case.context_tokens}; expert use {case.usage.name}; closed form; greenroom {version('greenroom')}"
    )
    write_below(figure, text)
