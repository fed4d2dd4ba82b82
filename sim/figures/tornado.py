"""What each change of the machine or the engine would bring: a tornado."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sim.figures.source import NotDrawableError, Source, Wanted
from sim.figures.stalls import WAITS
from sim.labels import Row, device, names
from sim.plot_style import PAGE, caption, new_panels
from sim.policy_looks import BLUE, VERMILION

MOST_RUNS = 4
_ROW_INCHES = 0.17
_LONGEST_NOTE = 70
_LEAST_SPAN = 1.1


def draw_what_if(source: Source, wanted: Wanted | None = None) -> Figure:
    """Draw speed over that of the run as it is for each variant, the greatest change on top."""
    runs = [row for row in source.timed if row.get("what_if")]
    if not runs:
        raise NotDrawableError("needs a run with output.what_if=true")
    if len(runs) > MOST_RUNS:
        raise NotDrawableError(
            f"would have a panel for each of {len(runs)} runs, and at most {MOST_RUNS} are drawn: name the "
            "folder of one run, or --policies A,B,..."
        )
    most = max(len(row["what_if"]) for row in runs)
    figure, grid = new_panels(len(runs), 1, PAGE, _ROW_INCHES * most + 0.55, 0.3)
    titles = names(runs) if len({row["cache_ratio"] for row in runs}) == 1 else _with_size(runs)
    for axes, run, title in zip(grid, runs, titles, strict=True):
        _panel(axes, run)
        axes.set_title(f"{title}: {run['tokens_per_s']:.4g} tokens/s as it is")
    caption(figure, runs)
    return figure


def _with_size(runs: Sequence[Row]) -> list[str]:
    return [
        f"{name}, {100 * row['cache_ratio']:.3g}%"
        for name, row in zip(names(runs), runs, strict=True)
    ]


def _panel(axes: Axes, run: Row) -> None:
    """Draw the variants of one run; those that were not run say why instead of a bar."""
    variants = sorted(run["what_if"], key=lambda row: (_ratio(row) is None, -_size(row)))
    ratios = [_ratio(row) for row in variants]
    spread = max([_LEAST_SPAN, *(max(r, 1 / r) for r in ratios if r)])
    low, high = min([1.0, *(r for r in ratios if r)]), spread * 1.55
    axes.set_xscale("log", base=2)
    axes.set_xlim(low / 1.12, high)
    for place, (row, ratio) in enumerate(zip(variants, ratios, strict=True)):
        if ratio is None:
            _write(axes, place, 1.0, f"not run: {_short(row['note'] or 'no speed')}", "0.4")
            continue
        colour, hatch = (BLUE, "") if ratio >= 1 else (VERMILION, "////")
        axes.barh(place, ratio - 1, 0.72, left=1.0, color=colour, hatch=hatch, edgecolor="white",
                  linewidth=0.3)  # fmt: skip
        bound = device(run) if row["bottleneck"] == "gpu" else WAITS.get(row["bottleneck"], "-")
        words = f"{100 * (ratio - 1):+.1f}%, then bound by {bound}"
        _write(axes, place, max(ratio, 1.0), words, "0.15")
    axes.axvline(1.0, color="0.2", linewidth=0.8)
    axes.set_yticks(range(len(variants)), [row["name"] for row in variants])
    axes.set_ylim(len(variants) - 0.4, -0.6)
    ticks = [t for t in (0.25, 0.5, 0.75, 0.9, 1, 1.25, 1.5, 2, 3, 4, 6, 8, 16) if low <= t <= high]
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.minorticks_off()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("speed over that of the run as it is")


def _ratio(row: Row) -> float | None:
    change = row["tokens_per_s_change"]
    return None if change is None else 1 + change


def _size(row: Row) -> float:
    """Return how large a change is, up or down."""
    ratio = _ratio(row)
    return max(ratio, 1 / ratio) if ratio else 0.0


def _write(axes: Axes, place: int, at: float, words: str, colour: str) -> None:
    axes.annotate(words, (at, place), xytext=(3, 0), textcoords="offset points", va="center",
                  fontsize=6.5, color=colour)  # fmt: skip


def _short(note: str) -> str:
    return note if len(note) <= _LONGEST_NOTE else f"{note[: _LONGEST_NOTE - 1]}…"
