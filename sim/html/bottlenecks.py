"""What binds each run: a bar of where its time goes, rooflines, and what changes would bring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sim.html.elements import Html, element, join, paragraph
from sim.html.grid import from_rich, grid
from sim.html.words import cause_words, percent, setting_words, share_of_cause
from sim.labels import Row, device, value
from sim.league import names_of, rows_by_name, setting_fields
from sim.metrics import STALLS
from sim.report import what_if_table
from sim.report_roofline import roofline_line, roofline_table
from sim.report_table import natural

_CAUSES = ("gpu", *STALLS)
_WIDTH, _HEIGHT = 160, 12
_MOST_BARS = 60


def where_time_goes(rows: Sequence[Row]) -> Html:
    """Return a bar a run, of many one a policy with the mean shares of its runs."""
    served = [row for row in rows if row["total_ns"]]
    if not served:
        return Html("")
    if len(served) > _MOST_BARS:
        return _means(served)
    fields, names = setting_fields(served), names_of(served)
    used = [c for c in _CAUSES if any(share_of_cause(row, c) >= _SHOWS for row in served)]
    keyed = []
    for name, row in zip(names, served, strict=True):
        key = (*(value(row, field) for field in fields), row["cache_ratio"])
        keyed.append(
            (natural(key), -(row["tokens_per_s"] or 0.0), setting_words(fields, key), name, row)
        )
    keyed.sort(key=lambda one: one[:3])
    lines, ends = [], []
    for number, (_, _, words, name, row) in enumerate(keyed):
        shares = {cause: share_of_cause(row, cause) for cause in _CAUSES}
        shown = [percent(shares[cause]) for cause in used]
        lines.append((name, words, cause_words(row["bottleneck"], row), bar(shares), *shown))
        if number and keyed[number - 1][2] != words:
            ends.append(number - 1)
    heads = ("policy", "setting", "bound by", "time", *(heading(c, served[0]) for c in used))
    caption = "Where the time of each run goes: working, or waiting for what"
    return join([key_of(used, served[0]), grid(heads, lines, caption, words=4, ends=ends)])


_SHOWS = 0.0005


def _means(rows: Sequence[Row]) -> Html:
    lines = []
    for name, own in rows_by_name(rows).items():
        shares = {c: sum(share_of_cause(row, c) for row in own) / len(own) for c in _CAUSES}
        causes = [row["bottleneck"] for row in own]
        known = sorted({c for c in causes if c}, key=lambda c: (-causes.count(c), c))
        told = ", ".join(f"{cause_words(c, own[0])} in {causes.count(c)}" for c in known)
        lines.append((name, f"{told} of {len(own)}", bar(shares), *map(percent, shares.values())))
    heads = ("policy", "bound by", "time", *(heading(cause, rows[0]) for cause in _CAUSES))
    caption = "Where the time goes: mean over the runs of each policy"
    return join([key_of(_CAUSES, rows[0]), grid(heads, lines, caption, words=3)])


def heading(cause: str, row: Row) -> str:
    """Return the heading of a cause's share of the time."""
    who = device(row)
    return {"gpu": who, "dram": "host memory", "host": "host thread", "cpu": "CPU experts"}.get(
        cause, cause
    )


def bar(shares: Mapping[str, float]) -> Html:
    """Return a bar of shares of the time; what is left of it is idle."""
    parts, left = [], 0.0
    for cause, share in shares.items():
        wide = round(_WIDTH * share, 2)
        if wide > 0:
            parts.append(
                element(
                    "rect", x=round(left, 2), y=0, width=wide, height=_HEIGHT, class_=f"c-{cause}"
                )
            )
        left += wide
    told = ", ".join(
        f"{cause} {percent(share)}" for cause, share in shares.items() if share >= _SHOWS
    )
    return element(
        "svg",
        *parts,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        width=_WIDTH,
        height=_HEIGHT,
        role="img",
        aria_label=f"Time: {told}",
        class_="bar",
    )


def key_of(causes: Sequence[str], row: Row) -> Html:
    """Return what the colours of the bars mean."""
    entries = []
    for cause in causes:
        patch = element("rect", x=0, y=0, width=_HEIGHT, height=_HEIGHT, class_=f"c-{cause}")
        size = f"0 0 {_HEIGHT} {_HEIGHT}"
        mark = element(
            "svg", patch, viewBox=size, width=_HEIGHT, height=_HEIGHT, aria_hidden="true"
        )
        words = "works" if cause == "gpu" else "is waited for"
        entries.append(element("span", mark, " ", f"{heading(cause, row)} {words}"))
    return paragraph(join(entries, " "), class_="key")


# -- rooflines and changes -------------------------------------------------------------------------


def _having(rows: Sequence[Row], column: str) -> list[tuple[str, Row, list[Any]]]:
    """Return the names and rows of the runs that have a list under ``column``, and the list."""
    named = zip(names_of(rows), rows, strict=True)
    return [(name, row, own) for name, row in named if (own := row.get(column))]


def rooflines(rows: Sequence[Row]) -> Html:
    """Return a run's roofline, or of several runs which resource binds each; empty without any."""
    found = _having(rows, "roofline")
    if not found:
        return Html("")
    if len(rows) == 1:
        own = found[0][2]
        return join([paragraph(roofline_line(own)), from_rich(roofline_table(own), _ROOFLINE)])
    fields = setting_fields(rows)
    lines = [(name, _setting(fields, row), *_roof(own[0])) for name, row, own in found[:_MOST_BARS]]
    more = "" if len(lines) == len(found) else f" The first {len(lines)} of {len(found)} runs."
    heads = ("policy", "setting", "lowest roof", "tokens/s", "roof tokens/s", "times from it")
    return grid(heads, lines, f"{_ROOFLINE}.{more}", words=3, sortable=True)


_ROOFLINE = (
    "Roofline: what a token moves through each resource, and how far the run is from its limit"
)


def _roof(first: Mapping[str, Any]) -> tuple[str, str, str, str]:
    limit, distance = first["tokens_per_s_limit"], first["times_from_limit"]
    return first["resource"], f"{first['tokens_per_s']:.1f}", f"{limit:.1f}", f"{distance:.2f}"


def _setting(fields: Sequence[str], row: Row) -> str:
    return setting_words(fields, (*(value(row, field) for field in fields), row["cache_ratio"]))


def changes(rows: Sequence[Row]) -> Html:
    """Return what other machines would bring: a run's table, or the best change of each; maybe empty."""
    found = _having(rows, "what_if")
    if not found:
        return Html("")
    if len(rows) == 1:
        run = {**rows[0], "what_if": found[0][2]}
        return from_rich(what_if_table(run), f"{_CHANGES}: each is a run of its own")
    fields = setting_fields(rows)
    lines = []
    for name, row, own in found[:_MOST_BARS]:
        best = own[0]
        speed, gain = best["tokens_per_s"], best["tokens_per_s_change"]
        told = ("-", "-") if speed is None else (f"{speed:.1f}", f"{100 * gain:+.1f}%")
        lines.append((name, _setting(fields, row), best["name"], *told))
    heads = ("policy", "setting", "best change", "tokens/s", "gain")
    return grid(heads, lines, f"{_CHANGES}: the change that brings most", words=3, sortable=True)


_CHANGES = "What if the machine, the memory or the batch were another"
