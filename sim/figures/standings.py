"""The league table as a picture: each policy's speed over the baseline's, and the numbers beside it."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from sim.figures.source import NotDrawableError, Source, Wanted
from sim.figures.stalls import shortened
from sim.labels import Row
from sim.league import CLASSES, Standing, league, names_of, title_of
from sim.plot_style import PAGE, caption, look
from sim.settings import did_you_mean
from sim.types import ConfigError

MOST_STANDINGS = 100
_HATCHES = {"lossless": "", "lossy": "////", "oracle": "...."}
_COLUMNS = {"mean": 1.0, "worst": 2.0, "best": 3.0, "wins": 4.4, "hit rate": 5.5, "bytes": 6.5}
"""Where each column of the numbers ends."""
_LONGEST = 30
_WIDTHS = (1.0, 0.85)
"""Of the bars, and of the numbers beside them."""
_ROW_INCHES = 0.165


def draw_league(source: Source, wanted: Wanted | None = None) -> Figure:
    """Draw the mean speed of each policy over the baseline, the range over all settings, and numbers."""
    rows = source.several
    baseline, standings = standings_of(rows, None if wanted is None else wanted.baseline)
    return league_figure(rows, baseline, standings)


def standings_of(rows: Sequence[Row], baseline: str | None) -> tuple[str, list[Standing]]:
    """Return the league of some rows; NotDrawableError where they have none."""
    check_baseline(rows, baseline)
    found, standings = league(rows, baseline or rows[0].get("baseline"))
    if not standings:
        raise NotDrawableError(
            "needs three policies or more in two settings or more, one of them the baseline: ablation_base, "
            f"lru, on_demand, or --baseline NAME, which may be {_some(names_of(rows))}"
        )
    if len(standings) > MOST_STANDINGS:
        raise NotDrawableError(
            f"would have {len(standings)} rows, and at most {MOST_STANDINGS} are drawn"
        )
    return found, standings


def _some(names: Sequence[str]) -> str:
    """Return the first names in quotes."""
    different = list(dict.fromkeys(names))
    more = ", ..." if len(different) > 3 else ""
    return ", ".join(f"'{name}'" for name in different[:3]) + more


def check_baseline(rows: Sequence[Row], baseline: str | None) -> None:
    """Raise ConfigError for a baseline that did not run."""
    known = list(dict.fromkeys(names_of(rows)))
    if baseline is not None and baseline not in known:
        near = did_you_mean(baseline, known)
        raise ConfigError(f"--baseline {baseline}: no such policy in these results{near}")


def league_figure(rows: Sequence[Row], baseline: str, standings: Sequence[Standing]) -> Figure:
    """Draw standings that are known."""
    shown = list(reversed(standings))
    kinds = [kind for kind in CLASSES if any(s.kind == kind for s in standings)]
    figure = Figure(figsize=(PAGE, 1.05 + 0.15 * (len(kinds) > 1) + _ROW_INCHES * len(shown)))
    axes, numbers = figure.subplots(1, 2, sharey=True, width_ratios=_WIDTHS)
    for place, standing in enumerate(shown):
        colour = look(standing.policy.split()[0]).colour
        axes.barh(place, standing.mean, 0.74, color=colour, hatch=_HATCHES[standing.kind],
                  edgecolor="white", linewidth=0.3)  # fmt: skip
        axes.plot([standing.worst, standing.best], [place, place], color="white", linewidth=2.2)
        axes.plot([standing.worst, standing.best], [place, place], color="black", linewidth=0.9)
    axes.axvline(1.0, color="0.4", linewidth=0.8)
    axes.set_yticks(range(len(shown)), [shortened(s.policy, _LONGEST) for s in shown])
    axes.set_ylim(-0.6, len(shown) - 0.4)
    axes.set_xlim(0, 1.03 * max(max(s.best, s.mean) for s in shown))
    axes.set_xlabel(
        f"speed over {shortened(baseline, _LONGEST)}'s: geometric mean; line: worst to best setting"
    )
    axes.grid(axis="y", visible=False)
    _write_numbers(numbers, shown)
    if len(kinds) > 1:
        figure.legend(handles=[_handle(kind) for kind in kinds], loc="outside upper left", ncols=3)
    caption(figure, rows)
    return figure


def _handle(kind: str) -> Patch:
    words = title_of(kind).partition(":")[0].partition(",")[0]
    return Patch(facecolor="0.55", edgecolor="white", hatch=_HATCHES[kind], label=words)


def _write_numbers(axes: Axes, shown: Sequence[Standing]) -> None:
    """Write a table beside the bars, a row a standing."""
    axes.set_axis_off()
    axes.set_xlim(0, max(_COLUMNS.values()))
    for place, (name, column) in enumerate(_COLUMNS.items()):
        axes.text(column, len(shown) - 0.35, name, ha="right", va="bottom", fontsize=7, color="0.3")
        for row, standing in enumerate(shown):
            text = _cells(standing)[place]
            axes.text(column, row, text, ha="right", va="center", fontsize=7)


def _cells(standing: Standing) -> tuple[str, ...]:
    hit_rate, moved = standing.hit_rate, standing.moved
    return (
        *(_times(ratio) for ratio in (standing.mean, standing.worst, standing.best)),
        f"{standing.wins}/{standing.settings}",
        "-" if hit_rate is None else f"{100 * hit_rate:.1f}%",
        "-" if moved is None else _times(moved),
    )


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x"
