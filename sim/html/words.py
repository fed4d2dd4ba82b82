"""Numbers, names and settings in words, the same in every part of a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sim.labels import CHOICES, Row, device
from sim.report import CAUSES

_MOST_NAMED = 4


def percent(share: float) -> str:
    """Return a share as percent, one decimal."""
    return f"{100 * share:.1f}%"


def times(ratio: float) -> str:
    """Return a ratio of speeds."""
    return f"{ratio:.2f}x"


def span(values: Sequence[float], write: Any) -> str:
    """Return the least and the largest of values, or one text where they read the same."""
    low, high = write(min(values)), write(max(values))
    return str(low) if low == high else f"{low} to {high}"


def listed(names: Sequence[str], last: str = "and") -> str:
    """Return names in a row; of many the first ones and how many more there are."""
    if len(names) > _MOST_NAMED:
        names = [*names[: _MOST_NAMED - 1], f"{len(names) - _MOST_NAMED + 1} others"]
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} {last} {names[-1]}"


def number_of(count: int, thing: str) -> str:
    """Return a count and what is counted, in the plural where it is one."""
    if count == 1:
        return f"{count} {thing}"
    return f"{count} {thing[:-1]}ies" if thing.endswith("y") else f"{count} {thing}s"


def all_of(count: int, things: str) -> str:
    """Return that it is all of so many things, as ``both settings``."""
    return f"both {things}" if count == 2 else f"all {count} {things}"


def setting_words(fields: Sequence[str], values: Sequence[Any]) -> str:
    """Return a setting, as ``rtx4090, batch 2, cache 25%``; the last value is the cache ratio."""
    parts = [_pair(field, text) for field, text in zip(fields, values, strict=False)]
    return ", ".join([*parts, f"cache {100 * values[-1]:.4g}%"])


def _pair(field: str, text: str) -> str:
    if field == "batch_size":
        return f"batch {text}"
    return text if field in CHOICES else f"{field.rpartition('.')[2]} {text}"


def share_of_cause(row: Row, cause: str) -> float:
    """Return the share of a run's time in which it worked, or waited for this cause."""
    found = row["gpu_share"] if cause == "gpu" else row[f"{cause}_stall_share"]
    return float(found or 0.0)


def bound_by(rows: Sequence[Row], thing: str = "settings") -> str:
    """Say what binds these runs: a cause with its share of the time, or several with their counts.

    ``thing`` is what each row is called.
    """
    causes = [row["bottleneck"] for row in rows]
    known = sorted(
        {cause for cause in causes if cause}, key=lambda cause: (-causes.count(cause), cause)
    )
    if not known:
        return ""
    if len(known) == 1:
        cause = known[0]
        shares = span([share_of_cause(row, cause) for row in rows], percent)
        who = device(rows[0])
        if cause == "gpu":
            return f"bound by the {who} itself, which works {shares} of the time"
        return f"bound by {CAUSES[cause]}, for which the {who} waits {shares} of the time"
    counts = [f"{cause_words(c, rows[0])} in {causes.count(c)}" for c in known]
    return f"bound by {listed(counts)} of {len(rows)} {thing}"


def cause_words(cause: str | None, row: Row) -> str:
    """Return what a bottleneck is, in words."""
    if cause is None:
        return "-"
    return f"the {device(row)} itself" if cause == "gpu" else CAUSES[cause]
