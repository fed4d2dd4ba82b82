"""The tables of a run, written to files while it goes on, or passed on to its totals alone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from sim.results import (
    COUNTERS,
    EVENTS,
    LEDGER,
    REQUESTS,
    STEPS,
    clear_leftovers,
    forget_run,
    partial_of,
)
from sim.tables import Block, Table
from sim.types import ConfigError, Phase

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
        self._partial = partial_of(path)
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
        forget_run(self._folder)
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
    clear_leftovers(folder)
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


@contextmanager
def passing_tables(
    totals: Totals,
    lossy: bool = False,
) -> Iterator[RunTables]:
    """Give a run tables whose rows go to ``totals`` alone, and nowhere else."""
    steps = Table(STEP_COLUMNS, totals.add_steps)
    requests = Table(REQUEST_COLUMNS, totals.add_requests)
    ledger = Table(LEDGER_COLUMNS, totals.add_ledger) if lossy else None
    yield RunTables(steps, requests, ledger=ledger)
    for table in (steps, requests, *(() if ledger is None else (ledger,))):
        table.close()


class StoredTable:
    """The rows of a table file, by row group and as often as one likes; words are their codes again."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def columns(self) -> tuple[str, ...]:
        """Return the names of the columns."""
        import pyarrow.parquet as pq

        with self._told(), pq.ParquetFile(self._path) as file:
            return tuple(file.schema_arrow.names)

    def __iter__(self) -> Iterator[Block]:
        """Yield blocks, int64[rows, columns]."""
        import pyarrow.parquet as pq

        with self._told(), pq.ParquetFile(self._path) as file:
            for group in range(file.num_row_groups):
                yield _block(file.read_row_group(group))

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Say of which file it is that cannot be read."""
        import pyarrow as pa

        try:
            yield
        except (pa.ArrowException, OSError, ValueError, IndexError) as error:
            told = f"{self._path}: cannot be read, is it damaged? ({error})"
            raise ConfigError(told) from error


def _block(table: Any) -> Block:
    columns = [column.combine_chunks() for column in table.columns]
    arrays = [getattr(column, "indices", column).to_numpy() for column in columns]
    return np.stack(arrays, axis=1).astype(np.int64)
