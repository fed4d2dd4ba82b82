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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

from sim.counter import STEP_COLUMNS
from sim.events import COUNTER_COLUMNS, EVENT_COLUMNS, Counter, EventLog, Kind, Lane
from sim.ledger import LEDGER_COLUMNS
from sim.metrics import RunTables, Totals
from sim.requests import REQUEST_COLUMNS, Outcome
from sim.tables import Block, Table
from sim.types import Phase

SUMMARY = "summary.json"
ERROR = "error.json"
CONFIG = "config.yaml"
STEPS = "steps.parquet"
REQUESTS = "requests.parquet"
LEDGER = "ledger.parquet"
EVENTS = "events.parquet"
COUNTERS = "counters.parquet"

UNFINISHED = ".tmp-"
"""How a file is called that is not whole yet, or not to last; then comes the number of the process."""
_EVENT_ROWS = 1 << 16  # a Parquet writer holds some kilobytes a block until the end: few and large


class TableFile:
    """A Parquet file that grows by a row group a block and takes its name only when it is whole.

    Parameters
    ----------
    path
        Its name; until :meth:`publish` the rows are in a file of another one.
    columns, words
        Names of the columns; those of ``words`` are written as the words of their enum.
    provenance
        Goes into the file's metadata, as JSON under ``greenroom_provenance``.
    """

    def __init__(
        self,
        path: Path,
        columns: Sequence[str],
        words: Mapping[str, type[IntEnum]],
        provenance: Mapping[str, Any],
    ) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._path = path
        self._partial = _partial(path)
        word = pa.dictionary(pa.int8(), pa.string())
        fields = [pa.field(name, word if name in words else pa.int64()) for name in columns]
        metadata = {"greenroom_provenance": json.dumps(provenance)}
        self._schema = pa.schema(fields, metadata=metadata)
        self._words = {
            name: pa.array([member.name.lower() for member in members])
            for name, members in words.items()
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._file = pq.ParquetWriter(self._partial, self._schema, compression="zstd")
        except BaseException:  # a full disk: the file is there, and nobody would take it away
            self._partial.unlink(missing_ok=True)
            raise

    def write(self, block: Block) -> None:
        """Add a block of rows."""
        import pyarrow as pa

        arrays = []
        for name, values in zip(self._schema.names, block.T, strict=True):
            if name in self._words:
                codes = pa.array(values.astype(np.int8))
                arrays.append(pa.DictionaryArray.from_arrays(codes, self._words[name]))
            else:
                arrays.append(pa.array(np.ascontiguousarray(values)))
        self._file.write_table(pa.Table.from_arrays(arrays, schema=self._schema))

    def publish(self) -> None:
        """Give the file its name: all rows are in it."""
        self._file.close()
        os.replace(self._partial, self._path)

    def discard(self) -> None:
        """Take away what is not published."""
        self._file.close()
        self._partial.unlink(missing_ok=True)


class _Files:
    """The table files of one run."""

    def __init__(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        self._folder = folder
        self._provenance = provenance
        self._files: list[TableFile] = []
        self._tables: list[Table] = []

    def table(
        self,
        name: str,
        columns: Sequence[str],
        words: Mapping[str, type[IntEnum]],
        read: Callable[[Block], None] | None = None,
        block_rows: int = 4096,
    ) -> Table:
        """Return a table whose blocks ``read`` sees before they go to a file of this name."""
        file = TableFile(self._folder / name, columns, words, self._provenance)
        self._files.append(file)

        def sink(block: Block) -> None:
            if read is not None:
                read(block)
            file.write(block)

        self._tables.append(Table(columns, sink, block_rows))
        return self._tables[-1]

    def publish(self) -> None:
        """Write what still waits, take away what an earlier run left, and give the files their names."""
        for table in self._tables:
            table.close()
        for name in (SUMMARY, ERROR, CONFIG, LEDGER, EVENTS, COUNTERS):
            (self._folder / name).unlink(missing_ok=True)
        for file in self._files:
            file.publish()

    def discard(self) -> None:
        """Take away what is not published."""
        for file in self._files:
            file.discard()


@contextmanager
def streamed_tables(
    folder: Path,
    totals: Totals,
    provenance: Mapping[str, Any],
    num_experts: int,
    record_events: bool = False,
    num_layers: int | None = None,
    lossy: bool = False,
) -> Iterator[RunTables]:
    """Give a run tables that go to files below ``folder`` and to ``totals`` while it goes on.

    The files take their names, and those of an earlier run vanish, only when the block ends well.
    """
    _clear_leftovers(folder)
    files = _Files(folder, provenance)
    try:
        phase, outcome = {"phase": Phase}, {"outcome": Outcome}
        steps = files.table(STEPS, STEP_COLUMNS, phase, totals.add_steps)
        requests = files.table(REQUESTS, REQUEST_COLUMNS, outcome, totals.add_requests)
        tables = RunTables(steps, requests)
        if lossy:
            tables.ledger = files.table(LEDGER, LEDGER_COLUMNS, phase, totals.add_ledger)
        if record_events:
            lane, counter, rows = {"lane": Lane, "kind": Kind}, {"counter": Counter}, _EVENT_ROWS
            events = files.table(EVENTS, EVENT_COLUMNS, lane, block_rows=rows)
            counters = files.table(COUNTERS, COUNTER_COLUMNS, counter, block_rows=rows)
            tables.events = EventLog(num_experts, events, counters, num_layers)
        yield tables
        files.publish()
    finally:
        files.discard()


class StoredTable:
    """The rows of a table file, by row group and as often as one likes; words are their codes again."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __iter__(self) -> Iterator[Block]:
        """Yield blocks, int64[rows, columns]."""
        import pyarrow.parquet as pq

        with pq.ParquetFile(self._path) as file:
            for group in range(file.num_row_groups):
                columns = [column.combine_chunks() for column in file.read_row_group(group).columns]
                arrays = [getattr(column, "indices", column).to_numpy() for column in columns]
                yield np.stack(arrays, axis=1).astype(np.int64)


def finish_run(folder: Path, summary: Mapping[str, Any], config_yaml: str) -> None:
    """Write what a run's tables lack; the summary comes last, so that its presence means all are there."""
    write_text(folder / CONFIG, config_yaml)
    write_text(folder / SUMMARY, json.dumps(summary, indent=1) + "\n")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a path to write to, which takes the name ``path`` when the block ends well, or vanishes."""
    partial = _partial(path)
    try:
        yield partial
        os.replace(partial, path)
    except OSError as error:
        if error.filename == str(partial):  # speak of the file that is meant
            error.filename = str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    """Return the name of a file that is not whole yet: it tells which process writes it."""
    return path.with_name(f"{UNFINISHED}{os.getpid()}-{path.name}")


def _clear_leftovers(folder: Path) -> None:
    """Take away what a killed process left unfinished."""
    for file in folder.glob(f"{UNFINISHED}*"):
        number = file.name.removeprefix(UNFINISHED).partition("-")[0]
        if number.isdigit() and not _is_alive(int(number)):
            file.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
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
    write_csv(folder / "results.csv", flat, columns)


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
