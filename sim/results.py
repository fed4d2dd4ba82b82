"""What a run leaves on disk, and how a sweep's runs become one table.

Files of a run, each written whole or not at all: ``summary.json`` (one row: choices, metrics,
provenance), ``steps.parquet``, ``requests.parquet``, ``events.parquet`` on request, ``config.yaml``
(resolved). A sweep adds ``results.parquet`` and ``results.csv``, one row a run.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sim.events import EVENT_COLUMNS, Kind, Lane
from sim.metrics import REQUEST_COLUMNS, STEP_COLUMNS
from sim.types import Phase

SUMMARY = "summary.json"
ERROR = "error.json"
EVENTS = "events.parquet"


def write_run(folder: Path, summary: Mapping[str, Any], config_yaml: str, tables: Any) -> None:
    """Write a run's files; the summary comes last, so that its presence means all are there."""
    folder.mkdir(parents=True, exist_ok=True)
    for earlier in (ERROR, EVENTS):  # what another run into the same folder left
        (folder / earlier).unlink(missing_ok=True)
    origin = summary["provenance"]
    steps, requests = folder / "steps.parquet", folder / "requests.parquet"
    write_table(steps, STEP_COLUMNS, tables.steps, {"phase": Phase}, origin)
    write_table(requests, REQUEST_COLUMNS, tables.requests, {}, origin)
    if tables.events is not None:
        rows, names = tables.events.rows, {"lane": Lane, "kind": Kind}
        write_table(folder / EVENTS, EVENT_COLUMNS, rows, names, origin)
    write_text(folder / "config.yaml", config_yaml)
    write_text(folder / SUMMARY, json.dumps(summary, indent=1) + "\n")


def write_table(
    path: Path,
    columns: Sequence[str],
    rows: Sequence[tuple[int, ...]],
    names: Mapping[str, Any],
    provenance: Mapping[str, Any],
) -> None:
    """Write int rows as Parquet; columns of ``names`` become words by their enum.

    The provenance goes into the file's metadata, as JSON under ``greenroom_provenance``.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    by_column = list(zip(*rows, strict=True)) if rows else [()] * len(columns)
    arrays: dict[str, Any] = {}
    for column, values in zip(columns, by_column, strict=True):
        array = pa.array(values, pa.int64())
        if column in names:
            words = pa.array([member.name.lower() for member in names[column]])
            array = pa.DictionaryArray.from_arrays(array.cast(pa.int8()), words)
        arrays[column] = array
    metadata = {"greenroom_provenance": json.dumps(provenance)}
    with whole_file(path) as partial:
        pq.write_table(pa.table(arrays, metadata=metadata), partial, compression="zstd")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a path to write to, which takes the name ``path`` when the block ends well, or vanishes."""
    partial = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def read_sweep(folder: Path, since_s: float = 0.0) -> tuple[list[dict[str, Any]], int]:
    """Return the summary rows below a sweep's folder, in order of their numbers, and how many failed.

    Files older than ``since_s`` (seconds since the epoch) are of an earlier sweep into the same folder.
    """
    found = {
        name: [f for f in folder.glob(f"**/{name}") if f.stat().st_mtime >= since_s]
        for name in (SUMMARY, ERROR)
    }
    ordered = sorted(found[SUMMARY], key=lambda file: _number(file.parent.name))
    rows = [json.loads(file.read_text(encoding="utf-8")) for file in ordered]
    return rows, len(found[ERROR])


def _number(name: str) -> tuple[bool, int, str]:
    return (not name.isdigit(), int(name) if name.isdigit() else 0, name)


def write_sweep(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows of a sweep as Parquet and CSV, nested fields as dotted columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    flat = [flatten(row) for row in rows]
    columns = list(dict.fromkeys(key for row in flat for key in row))
    table = pa.table({column: [row.get(column) for row in flat] for column in columns})
    with whole_file(folder / "results.parquet") as partial:
        pq.write_table(table, partial, compression="zstd")
    with (
        whole_file(folder / "results.csv") as partial,
        partial.open("w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(flat)


def flatten(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested mapping with dotted keys; lists become text."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = json.dumps(value) if isinstance(value, list) else value
    return flat
