"""The tables of results: runs, league, winners by setting, failed points, ledger, batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median

from sim.html.contest import Contest, contests
from sim.html.elements import Html, folded, join, listing, paragraph
from sim.html.grid import from_rich, grid
from sim.html.source import Failed
from sim.html.words import bound_by, cause_words, listed, number_of, percent, span, times
from sim.labels import Row
from sim.league import CLASSES, kind_of, league, rows_by_name, title_of
from sim.report import details
from sim.report_league import standings_table
from sim.report_table import (
    COLUMNS_LEGEND,
    UNION_LEGEND,
    note_lines,
    results_table,
    wanted_columns,
)

MOST_ROWS = 200
"""Above so many runs only the fastest and the slowest are shown."""
_ENDS = 25
_MOST_SETTINGS, _FEW_SETTINGS = 60, 20
_MOST_FAILED, _FEW_FAILED = 100, 5


def results(rows: Sequence[Row], where: str) -> Html:
    """Return the table of runs; of many the fastest, the slowest and a summary by policy.

    ``where`` names what holds all of them.
    """
    columns = wanted_columns(rows)
    legends = [COLUMNS_LEGEND, UNION_LEGEND if "union" in columns else "", *note_lines(rows)]
    notes = [paragraph(note, class_="note") for note in legends if note]
    if len(rows) == 1:
        notes = [listing(details(rows[0]))]
    if len(rows) <= MOST_ROWS:
        many = f"{len(rows)} runs; in each setting the fastest first"
        caption = many if len(rows) > 1 else "The run"
        return join([_runs(rows, columns, caption), *notes])
    ordered = sorted(rows, key=lambda row: -(row["tokens_per_s"] or 0.0))
    told = (
        f"{len(rows)} runs are too many for one page: shown are a summary by policy, the {_ENDS} fastest "
        f"and the {_ENDS} slowest runs; all are in {where}."
    )
    fast, slow = f"The {_ENDS} fastest runs", f"The {_ENDS} slowest runs"
    parts = [by_policy(rows), _runs(ordered[:_ENDS], columns, fast)]
    return join([paragraph(told), *parts, _runs(ordered[-_ENDS:], columns, slow), *notes])


def _runs(rows: Sequence[Row], columns: Sequence[str], caption: str) -> Html:
    return from_rich(results_table(rows, columns), caption, sortable=True)


def by_policy(rows: Sequence[Row]) -> Html:
    """Return a summary a policy: how many runs, their speeds, hits and what bound them."""
    groups = rows_by_name(rows)
    lines = []
    for name, own in sorted(groups.items(), key=lambda item: -_median(item[1], "tokens_per_s")):
        speeds = [row["tokens_per_s"] for row in own if row["tokens_per_s"]]
        shown = (
            [f"{s:.1f}" for s in (median(speeds), min(speeds), max(speeds))]
            if speeds
            else ["-"] * 3
        )
        hits = percent(_median(own, "hit_rate"))
        lines.append((name, kind_of(own[0]), str(len(own)), *shown, hits, _causes(own)))
    heads = ("policy", "class", "runs", "median tokens/s", "slowest", "fastest", "median hit rate")
    return grid((*heads, "bound by (runs)"), lines, "Summary by policy", words=2, sortable=True)


def _median(rows: Sequence[Row], column: str) -> float:
    known = [row[column] for row in rows if row.get(column) is not None]
    return float(median(known)) if known else 0.0


def _causes(rows: Sequence[Row]) -> str:
    causes = [row["bottleneck"] for row in rows if row["bottleneck"]]
    known = sorted(set(causes), key=lambda cause: (-causes.count(cause), cause))
    return ", ".join(f"{cause} {causes.count(cause)}" for cause in known) or "-"


def league_tables(rows: Sequence[Row], baseline: str | None) -> Html:
    """Return the league, a table a class; empty where there is none."""
    against, standings = league(rows, baseline or rows[0].get("baseline"))
    parts = []
    for kind in CLASSES:
        members = [standing for standing in standings if standing.kind == kind]
        if members:
            caption = f"Speed over {against}'s: {title_of(kind)}"
            parts.append(from_rich(standings_table(members), caption, sortable=True))
    if parts:
        parts.append(paragraph(_LEAGUE_LEGEND, class_="note"))
    return join(parts)


_LEAGUE_LEGEND = (
    "mean: geometric mean over the settings in which both ran; wins: settings in which nobody of the class "
    "was faster; bytes moved: over the baseline's."
)


def winners(rows: Sequence[Row]) -> Html:
    """Return who is the fastest of each class, setting by setting; empty where there is one setting."""
    played = contests(rows)
    if not played or max(len(contest.settings) for contest in played.values()) < 2:
        return Html("")
    if sum(len(contest.names) for contest in played.values()) < 2:
        return Html("")
    main = next(iter(played.values()))
    others = [kind for kind in played if kind != main.kind]
    heads = ["setting", f"fastest {main.kind}", "what binds it", "tokens/s", "over the next"]
    heads += [f"fastest {kind}, over it" for kind in others]
    lines = [list(_winner(main, number, others)) for number in range(len(main.settings))]
    shown = lines[:_MOST_SETTINGS]
    more = "" if len(lines) == len(shown) else f"; the first {len(shown)} of {len(lines)}"
    caption = f"The fastest in each setting{more}"
    table = grid(heads, shown, caption, words=3, sortable=True)
    return table if len(lines) <= _FEW_SETTINGS else folded(caption, table)


def _winner(main: Contest, number: int, others: Sequence[str]) -> Iterator[object]:
    setting = main.settings[number]
    names = setting.of(main.kind)
    first = setting.fastest(names)
    speed = setting.speed(first[0])
    after = next((name for name in names if name not in first), None)
    yield setting.words
    yield listed(first) + (" (tie)" if len(first) > 1 else "")
    yield cause_words(setting.rows[first[0]]["bottleneck"], setting.rows[first[0]])
    yield f"{speed:.1f}"
    yield "-" if after is None else f"{times(speed / setting.speed(after))} {after}"
    for kind in others:
        best = setting.of(kind)
        yield f"{times(setting.speed(best[0]) / speed)} {best[0]}" if best else "-"


def failed_table(failed: Sequence[Failed]) -> Html:
    """Return why points have no result, and which; empty where there are none."""
    if not failed:
        return Html("")
    rows = [(one.number, one.overrides, one.error) for one in failed[:_MOST_FAILED]]
    more = "" if len(rows) == len(failed) else f"; the first {len(rows)}"
    caption = f"{number_of(len(failed), 'point')} without a result{more}"
    every = grid(("point", "settings", "error"), rows, caption, words=3)
    if len(failed) <= _FEW_FAILED:
        return every
    groups: dict[str, list[str]] = {}
    for one in failed:
        groups.setdefault(one.error, []).append(one.number)
    lines = [(error, str(len(points)), listed(points)) for error, points in groups.items()]
    shown = lines[:_MOST_FAILED]
    reasons = grid(
        ("error", "points", "which"), shown, f"Why {len(failed)} points failed", words={0, 2}
    )
    return join([reasons, folded(caption, every)])


# -- what only some runs have ----------------------------------------------------------------------


def ledger(rows: Sequence[Row]) -> Html:
    """Return what lossy policies gave up: the range over their runs; empty where none is lossy."""
    lossy = [row for row in rows if row["lossy"]]
    if not lossy:
        return Html("")
    lines = [
        (name, str(len(own)), *(_range(own, column) for column in _LEDGER.values()))
        for name, own in rows_by_name(lossy).items()
    ]
    caption = "Quality ledger: what lossy policies changed, while decoding; range over their runs"
    return grid(("policy", "runs", *_LEDGER), lines, caption)


_LEDGER = {
    "agreement": "route_agreement",
    "replaced": "substituted_slot_rate",
    "dropped": "dropped_slot_rate",
    "low bits": "low_slot_rate",
    "late": "deferred_slot_rate",
    "weight replaced": "substituted_mass_rate",
    "weight dropped": "dropped_mass_rate",
    "divergence": "route_kl",
}
LEDGER_COLUMNS = ("agreement", "low bits", "late", "divergence")


def _range(rows: Sequence[Row], column: str) -> str:
    decoded = [row.get(f"decode_{column}") for row in rows]
    found = [row.get(column) for row in rows] if None in decoded else decoded
    known = [value for value in found if value is not None]
    write: Callable[[float], str] = percent
    if column == "route_kl":

        def write(value: float) -> str:
            return f"{value:.4f}"

    return span(known, write) if known else "-"


def batches(rows: Sequence[Row]) -> Html:
    """Return what tokens of a batch share; empty where no run decodes several that share experts."""
    if not any((row.get("decode_union_ratio") or 1.0) < 1.0 for row in rows):
        return Html("")
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(int(row["batch_size"]), []).append(row)
    lines = [
        (str(size), str(len(own)), *(_figures(own, *how) for how in _BATCH.values()))
        for size, own in sorted(groups.items())
    ]
    caption = "What the tokens of a batch share: range over the runs of each batch size"
    return grid(("batch", "runs", *_BATCH), lines, caption)


_BATCH: dict[str, tuple[str, Callable[[float], str]]] = {
    "union": ("union_size", lambda value: f"{value:.1f}"),
    "share of pairs": ("decode_union_ratio", percent),
    "pool pressure": ("pool_pressure", lambda value: f"{value:.2f}"),
    "kernels a layer": ("kernels_per_layer", lambda value: f"{value:.1f}"),
    "padding": ("padding_ratio", percent),
    "waits": ("wait_steps_mean", lambda value: f"{value:.1f}"),
}
BATCH_COLUMNS = tuple(_BATCH)


def _figures(rows: Sequence[Row], column: str, write: Callable[[float], str]) -> str:
    known = [row[column] for row in rows if row.get(column) is not None]
    return span(known, write) if known else "-"


def bound_line(rows: Sequence[Row]) -> str:
    """Say what binds the runs, in a sentence."""
    told = bound_by([row for row in rows if row["bottleneck"]], "runs")
    return f"The runs are {told}." if told else ""
