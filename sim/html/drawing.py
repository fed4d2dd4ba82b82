"""Which figures a report shows, what to see in each, and why others are not there."""

from __future__ import annotations

from collections.abc import Sequence

from sim.figures.source import NotDrawableError, Source, Wanted
from sim.figures.table import FIGURES, draw
from sim.html.elements import Html, element, folded, join
from sim.html.figures import figure
from sim.html.grid import grid
from sim.html.words import number_of

SEE = {
    "throughput_by_cache": "The higher the better; where lines cross, the fastest policy depends on the size "
    "of the cache.",
    "relative_by_cache": "Above 1 a policy is faster than the baseline.",
    "league": "The bar is the geometric mean; where a range crosses 1, a policy is not always faster.",
    "stall_breakdown": "The longest part is what binds; a policy that shortens another one gains little.",
    "hit_rate_by_cache": "The distance to the band is what a better choice of victims could still gain.",
    "speed_by_bytes": "Runs at the upper left are faster and move less; others may be traded for those.",
    "roofline": "A run just below a resource's limit is bound by it; the distance is what there is to gain.",
    "what_if": "The longest bar is the change that pays most; a bar of no length says that nothing waits for "
    "that part.",
    "gantt": "Where the GPU waits, what works in the other lanes at that time is what it waits for.",
    "heatmap": "Rows that stay dark over a stage are experts worth keeping.",
    "residency": "Long bars are experts that stay; many short ones say that the cache churns.",
    "predicted_by_measured": "Points on the diagonal are predicted exactly; the band is the error allowed.",
}
"""What to see in the figures that a report shows, in its order."""
_RUN_ONLY = ("what_if", "gantt", "heatmap", "residency")
_SWEEP_ONLY = (
    *("throughput_by_cache", "relative_by_cache", "league", "hit_rate_by_cache"),
    "speed_by_bytes",
)


def figures_of(source: Source, baseline: str | None, names: Sequence[str]) -> Html:
    """Return the figures of these names that results allow, and below them why others are missing."""
    drawn, missing = [], []
    for name in names:
        try:
            made = draw(name, source, Wanted(baseline=baseline))
        except NotDrawableError as error:
            missing.append((name, FIGURES[name].shows, str(error)))
            continue
        drawn.append(figure(made, name, _title(FIGURES[name].shows), SEE[name]))
    shown = element("div", join(drawn), class_="figures") if drawn else ""
    return join([shown, _missing(missing) if missing else ""])


def names_of_figures(is_run: bool) -> list[str]:
    """Return the figures that a report of a run, or of a sweep, shows if it can."""
    others = {*(_SWEEP_ONLY if is_run else _RUN_ONLY), "predicted_by_measured"}
    return [name for name in SEE if name not in others]


def _missing(rows: Sequence[tuple[str, str, str]]) -> Html:
    heads = ("figure", "what it would show", "why it is not here")
    table = grid(heads, rows, "Figures that these results do not allow", words=3)
    return folded(f"{number_of(len(rows), 'figure')} not drawn, and why", table)


def _title(shows: str) -> str:
    return f"{shows[0].upper()}{shows[1:]}"
