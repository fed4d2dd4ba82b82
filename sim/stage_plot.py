"""The figure of a test of a trace's stages: one page of four panels."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from sim.plot_style import PAGE, new_panels, save, styled, write_below
from sim.stage_findings import Findings, PairResult

_INSIDE, _OUTSIDE, _PLAIN, _FIXED = "#0072B2", "#D55E00", "0.45", "#E69F00"
_RULES = (
    ("itself", "the stage itself (oracle)", "black", "<"),
    ("kind", "same kind, other requests", "#009E73", "^"),
    ("all", "all stages, other requests", _FIXED, "v"),
    ("before", "the stage before", "#CC79A7", "*"),
)


def draw_findings(found: Findings, stem: Path) -> Path:
    """Draw the four panels; write them beside ``stem`` as PNG and PDF, return the PNG's path."""
    with styled():
        figure, (distance, bands, splits, sets) = new_panels(2, 2, PAGE / 2, 2.5, 0.2)
        _draw_distance(distance, found)
        _draw_bands(bands, found)
        _draw_splits(splits, found)
        if found.captures:
            _draw_sets(sets, found)
        else:
            sets.set_axis_off()
        write_below(
            figure,
            f"{found.source}; {found.num_stages} stages ({found.by}) of {found.num_texts} requests, "
            f"{found.mean_length} tokens in the mean; {found.draws} random cuts; "
            f"greenroom {version('greenroom')}",
        )
        return save(figure, stem)


def _draw_distance(axes: Axes, found: Findings) -> None:
    pairs = found.pairs
    apart = np.arange(1, len(pairs.within) + 1)
    enough = pairs.weights >= 0.05 * pairs.weights.max()  # the rest is noise
    for side, colour, dash, label in (
        (pairs.within, _INSIDE, "-", "within a stage"),
        (pairs.across, _OUTSIDE, "--", "across a boundary"),
    ):
        axes.plot(apart, np.where(enough, 100 * side, np.nan), dash, color=colour, label=label)
    if not np.isnan(found.unrelated):
        axes.axhline(100 * found.unrelated, color=_PLAIN, ls=":", lw=1, label="different requests")
    axes.set(xlabel="tokens apart", ylabel="experts in common (% of top-k)")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_title("Pairs of tokens at equal distance")
    axes.legend()


def _draw_bands(axes: Axes, found: Findings) -> None:
    names = [
        f"{low + 1}-{high}"
        for low, high in zip(found.pairs.edges[:-1], found.pairs.edges[1:], strict=True)
    ]
    _draw_contrasts(axes, found.pairs, -0.12, (_INSIDE, "o"), "all")
    if found.beyond is not None:
        _draw_contrasts(axes, found.beyond, 0.12, ("#009E73", "s"), "beyond the token's identity")
    axes.axhline(0, color="black", lw=0.5)
    axes.set_xticks(range(len(names)), names)
    axes.set(xlabel="tokens apart", ylabel="within less across (points)")
    axes.set_title("Difference; bars: 95 % of shifted cuts")
    axes.legend()


def _draw_contrasts(
    axes: Axes, pairs: PairResult, shift: float, look: tuple[str, str], label: str
) -> None:
    colour, mark = look
    places = np.arange(len(pairs.by_band)) + shift
    mean = 100 * np.array([c.null_mean for c in pairs.by_band])
    spread = 196 * np.array([c.null_sd for c in pairs.by_band])
    axes.bar(places, 2 * spread, 0.2, mean - spread, color=colour, alpha=0.25)
    value = 100 * np.array([c.value for c in pairs.by_band])
    ends = 100 * np.array([(c.value - c.low, c.high - c.value) for c in pairs.by_band]).T
    bars = None if np.isnan(ends).all() else np.nan_to_num(ends)
    axes.errorbar(places, value, bars, fmt=mark, ms=3, lw=1, color=colour, label=label)


def _draw_splits(axes: Axes, found: Findings) -> None:
    groups = (
        ("middle of a stage", _INSIDE, "", [split.within for split in found.splits]),
        ("boundary of two stages", _OUTSIDE, "////", [split.across for split in found.splits]),
        ("fixed windows, middle", _FIXED, "....", [s.windows_within for s in found.splits]),
        ("fixed windows, boundary", _PLAIN, "xxxx", [s.windows_across for s in found.splits]),
    )
    for number, (label, colour, hatch, values) in enumerate(groups):
        places = np.arange(len(values)) + 0.2 * number - 0.3
        axes.bar(
            places, values, 0.2, color=colour, hatch=hatch, edgecolor="white", lw=0.3, label=label
        )
    axes.set_xticks(range(len(found.splits)), [str(split.window) for split in found.splits])
    axes.set(xlabel="tokens of each of two adjacent windows", ylabel="cosine")
    axes.set(ylim=(0, 1.3), yticks=np.linspace(0, 1, 6))  # above it is room for the legend
    axes.set_title("Coherence of adjacent windows")
    axes.legend(ncols=2, loc="upper center", fontsize=6)


def _draw_sets(axes: Axes, found: Findings) -> None:
    slots = [capture.slots for capture in found.captures]
    for rule, label, colour, marker in _RULES:
        if rule == "kind" and found.kinds is None:
            continue
        held = [100 * capture.held[rule] for capture in found.captures]
        axes.plot(slots, held, color=colour, marker=marker, ms=4, lw=1, label=label)
    number = [100 * capture.held["kind"] for capture in found.window_captures]
    axes.plot(slots, number, color=_PLAIN, marker="s", ms=3, lw=1, ls="--", label="window's number")
    axes.set(xlabel="experts a layer holds", ylabel="uses held (%)", ylim=(0, None))
    axes.set_xticks(slots)
    axes.set_title("A set fixed before the stage, learnt from")
    axes.legend(fontsize=6.5)
