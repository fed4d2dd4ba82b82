"""How the runs of a sweep are told apart, the same in tables and figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

UNSET = "-"
"""What a row says of a setting that it leaves as it is by default."""
CHOICES = ("trace", "model", "machine", "engine", "batch_size")
_SIZES = {"cache.ratio", "cache.bytes", "cache.joint_bytes"}
_SHOWN = {*CHOICES, *_SIZES, "policy", "workload.batch_size"}
"""What has a column of its own; the sizes of the cache share one."""


def varying(rows: Sequence[Row]) -> list[str]:
    """Return the fields, beside policy and cache size, in which the rows of a sweep differ.

    These are the columns of ``CHOICES`` and whatever else was overridden, as ``policy.cache.decay``.
    """
    overridden = {key for row in rows for key in row.get("overrides", {})} - _SHOWN
    fields = [*CHOICES, *sorted(overridden)]
    return [field for field in fields if len({value(row, field) for row in rows}) > 1]


def value(row: Row, field: str) -> str:
    """Return a field of a row as text; the value of an override where it is no column."""
    found = row[field] if field in row else row.get("overrides", {}).get(field, UNSET)
    return f"{found:g}" if isinstance(found, float) else str(found)


def names(rows: Sequence[Row]) -> list[str]:
    """Return a label a row: the policy, and what else was set that sets it apart."""
    fields = varying(rows)
    return [", ".join([row["policy"], *_pairs(row, fields)]) for row in rows]


def origin(rows: Sequence[Row]) -> str:
    """Say where the numbers of the rows come from: the trace, its price, the machine, the engine."""
    kinds = {f"{row['provenance']['trace_kind']} trace {row['trace']}" for row in rows}
    prices = {row["provenance"]["priced_as"] for row in rows}
    machines, engines = ({row[choice] for row in rows} for choice in ("machine", "engine"))
    on = "measured on" if {how(row) for row in rows} == {"measured"} else "on"
    return f"{_all(kinds)}; priced as {_all(prices)}; {on} {_all(machines)}; engine {_all(engines)}"


def device(row: Row) -> str:
    """Return what computes: the GPU, or on a machine that has none the CPU."""
    return "CPU" if row["machine_kind"] == "cpu_only" else "GPU"


def how(row: Row) -> str:
    """Return whether a run's times are predicted, or those of this machine."""
    return "measured" if "measurement" in row["provenance"] else "simulated"


def short_names(fields: Sequence[str]) -> dict[str, str]:
    """Return what labels call fields: the last word, or all but ``policy`` where several end alike."""
    last = {field: field.rpartition(".")[2] for field in fields}
    ends = list(last.values())
    return {f: n if ends.count(n) == 1 else f.removeprefix("policy.") for f, n in last.items()}


def _pairs(row: Row, fields: Sequence[str]) -> Iterator[str]:
    for field, name in short_names(fields).items():
        text = value(row, field)
        if text != UNSET:
            yield text if field in CHOICES[:4] else f"{name} {text}"


def _all(words: set[str]) -> str:
    """Join the words; many are too long for a title, and then each row names its own."""
    return " | ".join(sorted(words)) if len(words) < 4 else f"{len(words)} of them, as labelled"
