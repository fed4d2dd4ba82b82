"""Where the numbers come from, what to be warned of, and by which versions the report was written."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sim.html.elements import Html, code, element, folded, join, listing
from sim.html.grid import pairs
from sim.html.source import Source
from sim.labels import Row, how
from sim.results import flatten

_MOST_VALUES = 4
_NAMES = {
    "trace_kind": "trace: kind",
    "trace_source": "trace: source",
    "trace_model": "trace: model",
    "trace_sha256": "trace: SHA-256",
    "priced_as": "priced as",
    "requests_made": "requests",
    "calibration_requests": "calibrated on requests",
    "calibration_overlaps_workload": "calibration overlaps workload",
    "inputs_sha256": "digest of all inputs of a run",
    "greenroom_version": "greenroom that ran it",
}
_PACKAGES = ("greenroom", "numpy", "pyarrow", "matplotlib", "hydra-core")


def warnings(rows: Sequence[Row]) -> list[str]:
    """Return what a reader must know before believing the numbers."""
    kinds = [row["provenance"]["trace_kind"] for row in rows]
    found = []
    if "synthetic" in kinds:
        which = (
            "The trace is SYNTHETIC"
            if set(kinds) == {"synthetic"}
            else (f"{kinds.count('synthetic')} of {len(kinds)} runs are of a SYNTHETIC trace")
        )
        found.append(f"{which}: its routing was made by a model of routing, not recorded.")
    overlaps = sum(bool(row["provenance"].get("calibration_overlaps_workload")) for row in rows)
    if overlaps:
        found.append(
            f"In {overlaps} of {len(rows)} runs policies were calibrated on requests of the workload itself: "
            "calibrated policies look too good."
        )
    parts = sorted({p for row in rows if " of " in (p := str(row["provenance"]["priced_as"]))})
    if parts:
        found.append(
            f"Priced as {'; '.join(parts)}: the trace is smaller than the model, so tokens/s are of that "
            "part, not of the whole model. Compare policies, not absolute speeds."
        )
    made = {str(row["provenance"].get("requests_made", "as recorded")) for row in rows}
    found += [f"Not as recorded: {one}." for one in sorted(made - {"as recorded"})]
    return [*found, *_measured(rows)]


def _measured(rows: Sequence[Row]) -> Iterator[str]:
    measured = [row for row in rows if how(row) == "measured"]
    if not measured:
        return
    many = (
        "Times" if len(measured) == len(rows) else f"Times of {len(measured)} of {len(rows)} runs"
    )
    where = sorted({str(row["provenance"]["measurement"].get("machine", "?")) for row in measured})
    yield f"{many} were measured, with random weights of the model's sizes, on: {'; '.join(where)}."
    if any(row["provenance"]["measurement"].get("is_emulated") for row in measured):
        yield "The link was emulated: copies were held back to its rate."


def provenance_table(source: Source) -> Html:
    """Return where the rows come from; of what differs between them how many values there are."""
    flat = [flatten(row["provenance"]) for row in source.rows]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    lines, folds = [], []
    for key in keys:
        values = list(dict.fromkeys(_text(one[key]) for one in flat if one.get(key) is not None))
        if values in ([], [""]):
            continue
        name = _NAMES.get(key, key.replace("_", " ").replace(".", ": "))
        lines.append((name, _values(values)))
        if len(values) > _MOST_VALUES:
            folds.append(folded(f"{len(values)} values: {name}", code("\n".join(values))))
    lines += [
        (f"SHA-256 of {file.name}", element("code", _digest(file))) for file in source.digests
    ]
    return join([pairs(lines, "Provenance of the runs"), *folds])


def _text(value: Any) -> str:
    return "yes" if value is True else "no" if value is False else str(value)


def _values(values: Sequence[str]) -> Html | str:
    if len(values) > _MOST_VALUES:
        digest = hashlib.sha256("\n".join(sorted(values)).encode()).hexdigest()
        return f"{len(values)} different ones, listed below; SHA-256 of the sorted list {digest}"
    return listing(values, class_="values") if len(values) > 1 else "".join(values)


def _digest(file: Any) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def writer_table(date: str | None) -> Html:
    """Return what wrote the report: versions, the machine, and the date if there is to be one."""
    lines = [(name, _version(name)) for name in _PACKAGES]
    lines += [
        ("Python", f"{platform.python_implementation()} {platform.python_version()}"),
        ("platform", platform.platform()),
    ]
    lines += [("date", date)] if date is not None else []
    return pairs(lines, "What wrote this report")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
