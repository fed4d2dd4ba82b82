"""The question that results answer, in words, from what was varied."""

from __future__ import annotations

from collections.abc import Sequence

from sim.html.words import listed, number_of, percent, span
from sim.labels import CHOICES, Row, value, varying
from sim.league import names_of

_PLURALS = {
    "trace": "trace",
    "model": "model",
    "machine": "machine",
    "engine": "engine",
    "batch_size": "batch size",
}
_MOST_VALUES = 4


def question_of(rows: Sequence[Row]) -> str:
    """Return what these runs were made to find out."""
    names = list(dict.fromkeys(names_of(rows)))
    where = _where(rows)
    if len(rows) == 1:
        size = percent(rows[0]["cache_ratio"])
        batch = f", batch {rows[0]['batch_size']}"
        return (
            f"How fast is {names[0]}{where} with {size} of the experts in the device's "
            f"memory{batch}, and what holds it back?"
        )
    varied = _varied(rows)
    fixed = _fixed(rows)
    if len(names) == 1:
        return f"How does the speed of {names[0]}{where} change over {listed(varied)}{fixed}?"
    which = names[0] if len({row["policy"] for row in rows}) == 1 else ""
    what = f"settings of {rows[0]['policy']}" if which else "policies"
    over = f", over {listed(varied)}" if varied else ""
    return f"Which of {len(names)} {what} is fastest{where}{over}{fixed}?"


def _where(rows: Sequence[Row]) -> str:
    """Return model and machine, each where it is the same in all rows."""
    models, machines = ({str(row[choice]) for row in rows} for choice in ("model", "machine"))
    model = f" for {next(iter(models))}" if len(models) == 1 else ""
    return model + (f" on {next(iter(machines))}" if len(machines) == 1 else "")


def _varied(rows: Sequence[Row]) -> list[str]:
    """Say in which fields, policies apart, the rows differ, and over which values."""
    found = []
    sizes = {row["cache_ratio"] for row in rows}
    if len(sizes) > 1:
        found.append(f"{len(sizes)} cache sizes ({span(list(sizes), percent)} of the experts)")
    for field in varying(rows):
        if field.startswith("policy."):
            continue
        values = list(dict.fromkeys(value(row, field) for row in rows))
        name = _PLURALS.get(field)
        told = f" ({', '.join(values)})" if len(values) <= _MOST_VALUES else ""
        what = number_of(len(values), name) if name else f"{len(values)} values of {field}"
        found.append(f"{what}{told}")
    return found


def _fixed(rows: Sequence[Row]) -> str:
    """Say what is the same in all rows and matters."""
    parts = []
    sizes = {row["cache_ratio"] for row in rows}
    if len(sizes) == 1:
        parts.append(f"{percent(next(iter(sizes)))} of the experts in the device's memory")
    batches = {row["batch_size"] for row in rows}
    if len(batches) == 1:
        parts.append(f"batch {next(iter(batches))}")
    return f", with {' and '.join(parts)}" if parts else ""


def title_of(rows: Sequence[Row]) -> str:
    """Return a title for the report."""
    names = list(dict.fromkeys(names_of(rows)))
    who = names[0] if len(names) == 1 else f"{len(names)} policies"
    labels = [value(rows[0], c) for c in CHOICES[1:3] if len({value(r, c) for r in rows}) == 1]
    return " on ".join([", ".join([who, *labels[:1]]), *labels[1:]])
