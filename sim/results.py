"""What a run leaves on disk, and how a sweep's runs become one table.

Files of a run, each there whole or not at all: ``summary.json`` (one row: choices, metrics,
provenance), ``steps.parquet``, ``requests.parquet``, ``ledger.parquet`` of a lossy policy,
``events.parquet`` and ``counters.parquet`` on request, ``config.yaml`` (resolved). The tables are written
while the run goes on, so that its memory does not grow with its length. A sweep adds
``results.parquet`` and ``results.csv``, one row a run.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sim.types import ConfigError
from traces.out_file import UNFINISHED as UNFINISHED
from traces.out_file import partial_of as partial_of
from traces.out_file import whole_file as whole_file

SUMMARY = "summary.json"
ERROR = "error.json"
CONFIG = "config.yaml"
STEPS = "steps.parquet"
REQUESTS = "requests.parquet"
LEDGER = "ledger.parquet"
EVENTS = "events.parquet"
COUNTERS = "counters.parquet"
TIMELINE = "timeline.json.gz"
WHAT_IF = "whatif.csv"
ROOFLINE = "roofline.csv"
TABLE = "results.parquet"
ABOUT = "sweep.json"
"""What a sweep of ``greenroom sweep`` is: what was asked for, and how many points that makes."""
_HYDRA = ".hydra"
_JSON_COLUMNS = b"greenroom_json_columns"

OVERRIDES = "overrides"
"""The column of a summary that tells what was set, by key."""


def finish_run(folder: Path, summary: Mapping[str, Any], config_yaml: str | None) -> None:
    """Write what a run's tables lack; the summary comes last, so that its presence means all are there."""
    folder.mkdir(parents=True, exist_ok=True)
    if config_yaml is not None:
        write_text(folder / CONFIG, config_yaml)
    write_text(folder / SUMMARY, json.dumps(summary, indent=1) + "\n")


_OF_A_RUN = (
    *(SUMMARY, ERROR, CONFIG, TIMELINE, WHAT_IF, ROOFLINE),
    *(STEPS, REQUESTS, LEDGER, EVENTS, COUNTERS),
)


def forget_run(folder: Path) -> None:
    """Take away what an earlier run left in a folder."""
    for name in _OF_A_RUN:
        (folder / name).unlink(missing_ok=True)


def holds_run(folder: Path) -> bool:
    """Tell whether a folder is of a run, finished or not, and not of something else."""
    left = os.listdir(folder) if folder.is_dir() else []
    return any(name in (*_OF_A_RUN, _HYDRA) or name.startswith(UNFINISHED) for name in left)


def num_waiting(sweep: Path, num_rows: int, num_failed: int) -> int:
    """Return how many points of a sweep have no result and no error; 0 if nobody says how many it has."""
    try:
        total = read_json(sweep / ABOUT).get("num_points")
    except (OSError, ConfigError):
        return 0
    return max(0, total - num_rows - num_failed) if isinstance(total, int) else 0


def clear_leftovers(folder: Path) -> None:
    """Take away what a killed process left unfinished."""
    for file in folder.glob(f"{UNFINISHED}*"):
        number = file.name.removeprefix(UNFINISHED).partition("-")[0]
        if number.isdecimal() and not _is_alive(int(number)):
            file.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it is somebody else's
        return True
    return True


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
    return [read_json(file) for file in ordered], len(found[ERROR])


def read_json(file: Path) -> dict[str, Any]:
    """Return what a summary, or another JSON file of ours, holds.

    Raises ConfigError for one that is damaged.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: cannot be read, is it damaged? ({error})") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: must hold one JSON object")
    return found


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the summary rows, nested, of a run's folder, a sweep's folder, or a ``results.parquet``.

    Raises ConfigError where there are none, or they are damaged.
    """
    if path.is_file():
        return [read_json(path)] if path.name == SUMMARY else _read_table(path)
    if not path.is_dir():
        raise ConfigError(f"{path}: no such file or folder")
    for file in (path / SUMMARY, path / TABLE):
        if file.exists():
            return read_rows(file)
    rows, _ = read_sweep(path)
    if not rows:
        raise ConfigError(f"{path}: holds no results: neither {SUMMARY} nor {TABLE}, here or below")
    return rows


def _read_table(path: Path) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
        listed = json.loads((table.schema.metadata or {}).get(_JSON_COLUMNS, b"[]"))
        rows = [unflatten(row, listed) for row in table.to_pylist()]
    except (pa.ArrowException, OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as a table of results: {error}") from error
    if not rows or "tokens_per_s" not in rows[0] or "provenance" not in rows[0]:
        raise ConfigError(f"{path}: is no table of results: it has no rows, or not their columns")
    return rows


def _number(name: str) -> tuple[bool, int, str]:
    return (not name.isdecimal(), int(name) if name.isdecimal() else 0, name)


def write_sweep(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows of a sweep as Parquet and CSV, nested fields as dotted columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    flat = [flatten(row) for row in rows]
    columns = list(dict.fromkeys(key for row in flat for key in row))
    listed = sorted({key for row in rows for key in _lists(row)})
    table = pa.table({name: _column(name, [row.get(name) for row in flat]) for name in columns})
    table = table.replace_schema_metadata({_JSON_COLUMNS: json.dumps(listed)})
    with whole_file(folder / TABLE) as partial:
        pq.write_table(table, partial, compression="zstd")
    write_csv(folder / "results.csv", flat, columns)


def _column(name: str, values: list[Any]) -> Any:
    """Return the values of a column; ConfigError where they are of several kinds."""
    import pyarrow as pa

    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError) as error:
        raise ConfigError(f"{name}: differs in kind between the summaries: {error}") from error


def _lists(row: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of lists, which a table holds as text."""
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from _lists(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            yield f"{prefix}{key}"


def write_csv(
    path: Path, rows: Iterable[Mapping[str, Any]], columns: Sequence[str] | None = None
) -> None:
    """Write rows as CSV, whole or not at all; without ``columns`` those of all rows, as they first come."""
    if columns is None:
        rows = list(rows)
        columns = list(dict.fromkeys(key for row in rows for key in row))
    with whole_file(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def flatten(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested mapping with dotted keys; lists become text."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = json.dumps(value) if isinstance(value, list) else value
    return flat


def unflatten(flat: Mapping[str, Any], lists: Collection[str] = ()) -> dict[str, Any]:
    """Return a row of a table as the nested mapping that it was; ``lists`` are lists written as text.

    What was set by override has dots in its keys, and stays so.
    """
    row: dict[str, Any] = {}
    for key, value in flat.items():
        if value is not None and key in lists:
            value = json.loads(value)
        group, _, name = key.partition(".")
        if not name:
            row[key] = value
        elif group == OVERRIDES:
            row.setdefault(group, {}).update({} if value is None else {name: value})
        elif value is not None:  # None: other rows of the table have it
            _put(row, key.split("."), value)
    return row


def _put(row: dict[str, Any], names: Sequence[str], value: Any) -> None:
    for name in names[:-1]:
        row = row.setdefault(name, {})
    row[names[-1]] = value
