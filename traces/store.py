"""Traces in Parquet files: written whole or not at all, read by row group and validated.

Every failure is a ``TraceError`` of one line; no pyarrow or operating system error reaches the
caller. A file's bytes depend on the rows and the header only, not on how the rows were appended.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType

import pyarrow as pa
import pyarrow.parquet as pq

from traces.arrow import to_table, to_trace, writer_options
from traces.schema import (
    COLUMNS,
    COUNTS_KEY,
    METADATA_KEY,
    Trace,
    TraceError,
    TraceMeta,
    Validator,
    arrow_schema,
    concat,
    near_match,
)

REQUIRED = tuple(name for name, column in COLUMNS.items() if column.required)


class TraceWriter:
    """Context manager that writes chunks of one trace to ``path``.

    The rows go to ``path`` + ``.tmp-PID``, which takes the name ``path`` only when the block ends
    well; after an error nothing stays behind. Chunks are validated as they come, and held back
    until a row group of ``row_group_tokens`` rows is full (logits make rows large: 12 kB a token
    for 48 layers of 128 experts).
    """

    def __init__(
        self, path: str | os.PathLike[str], meta: TraceMeta, row_group_tokens: int = 8192
    ) -> None:
        if row_group_tokens < 1:
            raise TraceError(f"row_group_tokens is {row_group_tokens}: must be >= 1")
        self.path, self.meta, self.row_group_tokens = Path(path), meta, row_group_tokens
        self._temporary = Path(f"{self.path}.tmp-{os.getpid()}")
        self._validator = Validator(meta, str(path))
        self._file: pq.ParquetWriter | None = None
        self._pending: list[Trace] = []

    def __enter__(self) -> TraceWriter:
        return self

    def append(self, chunk: Trace) -> None:
        """Add rows; all chunks share the writer's header and the first chunk's columns."""
        if chunk.meta != self.meta:
            raise TraceError(f"{self.path}: the chunk's header differs from the writer's")
        if self._pending and chunk.columns != self._pending[0].columns:
            rule = f"must be {self._pending[0].columns} as in the first chunk"
            raise TraceError(f"{self.path}: the chunk's columns are {chunk.columns}: {rule}")
        self._validator.check(chunk)
        self._pending.append(chunk)
        if sum(map(len, self._pending)) >= self.row_group_tokens:
            self._write_groups(self.row_group_tokens)

    def _write_groups(self, least: int) -> None:
        """Write row groups while at least ``least`` rows wait; keep the rest (maybe no row)."""
        rows = concat(self._pending)
        start = 0
        while len(rows) - start >= least:
            self._write(rows.take(slice(start, start + self.row_group_tokens)))
            start += self.row_group_tokens
        self._pending = [rows.take(slice(start, None))]

    def _write(self, rows: Trace) -> None:
        with one_line_errors(self.path):
            if self._file is None:
                schema, options = (
                    arrow_schema(self.meta, rows.columns),
                    writer_options(rows.columns),
                )
                self._file = pq.ParquetWriter(self._temporary, schema, **options)
            table = to_table(rows, self._file.schema)
            self._file.write_table(table, row_group_size=self.row_group_tokens)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            if self._file is not None and self._file.is_open:
                with contextlib.suppress(OSError, pa.ArrowException):
                    self._file.close()
            self._temporary.unlink(missing_ok=True)

    def _finish(self) -> None:
        if self._pending:
            self._write_groups(least=1)
        if self._file is None:
            raise TraceError(f"{self.path}: no rows were appended: a trace has at least one")
        with one_line_errors(self.path):
            self._file.close()
            self._temporary.replace(self.path)


def write_trace(path: str | os.PathLike[str], trace: Trace, row_group_tokens: int = 8192) -> None:
    """Write a whole trace, atomically; see ``TraceWriter``."""
    with TraceWriter(path, trace.meta, row_group_tokens) as writer:
        writer.append(trace)


def read_meta(path: str | os.PathLike[str]) -> TraceMeta:
    """Read the header of a trace file, no rows."""
    with _open(path) as file:
        return _meta_of(file, path)


def iter_trace(
    path: str | os.PathLike[str], columns: Iterable[str] | None = None
) -> Iterator[Trace]:
    """Yield the trace by row group, validated across groups; memory holds one group.

    ``columns`` names the optional columns wanted (the required ones always come); None means all
    that the file has. The arrays are read-only.
    """
    with _open(path) as file:
        meta = _meta_of(file, path)
        names = _columns_of(file, meta, path, columns)
        validator = Validator(meta, str(path))
        for group in range(file.num_row_groups):
            with one_line_errors(path):
                table = file.read_row_group(group, columns=names)
                chunk = to_trace(table, meta, str(path))
            validator.check(chunk)
            yield chunk


def is_trace_file(path: str | os.PathLike[str]) -> bool:
    """Tell whether a file is Parquet with a trace's header; what is wrong with others is not said."""
    if not Path(path).is_file():  # a pipe may be read once only
        return False
    try:
        return METADATA_KEY in (pq.read_schema(path).metadata or {})
    except (pa.ArrowException, OSError, UnicodeError):
        return False


def stored_columns(path: str | os.PathLike[str], columns: Iterable[str] | None = None) -> list[str]:
    """Return the names of the columns to read, as ``iter_trace`` chooses them, in file order."""
    with _open(path) as file:
        return _columns_of(file, _meta_of(file, path), path, columns)


def group_sizes(path: str | os.PathLike[str]) -> list[int]:
    """Return the rows of each row group of a trace file."""
    with _open(path) as file:
        groups = range(file.num_row_groups)
        return [file.metadata.row_group(group).num_rows for group in groups]


def read_trace(path: str | os.PathLike[str], columns: Iterable[str] | None = None) -> Trace:
    """Read a whole trace into memory; see ``iter_trace``."""
    chunks = list(iter_trace(path, columns))
    return chunks[0] if len(chunks) == 1 else concat(chunks)


@contextlib.contextmanager
def one_line_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn what pyarrow and the system raise into a ``TraceError`` that names the file."""
    try:
        yield
    except TraceError:
        raise
    except (pa.ArrowException, OSError, ValueError, IndexError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise TraceError(f"{os.fspath(path)}: {reason}") from None


@contextlib.contextmanager
def _open(path: str | os.PathLike[str]) -> Iterator[pq.ParquetFile]:
    path = Path(path)
    if not path.is_file():
        raise TraceError(f"{path}: {_why_missing(path)}")
    if path.stat().st_size == 0:
        raise TraceError(f"{path}: the file is empty (0 bytes): must be Parquet")
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
    except (pa.ArrowException, OSError, UnicodeError) as error:
        reason = " ".join(str(error).split())
        raise TraceError(f"{path}: not Parquet, or cut short: {reason}") from None
    with file:
        if file.metadata.num_rows == 0:
            raise TraceError(f"{path}: no rows: a trace has at least one")
        yield file


def _why_missing(path: Path) -> str:
    if path.is_dir():
        return "is a folder: must be a trace file"
    if path.exists():
        return "is a pipe or a device: must be a trace file"
    if not path.parent.is_dir():
        return f"no such file, nor the folder {path.parent}"
    names = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
    close = get_close_matches(path.name, names, n=3)
    return "no such file" + (f"; did you mean {' or '.join(map(repr, close))}?" if close else "")


def _meta_of(file: pq.ParquetFile, path: str | os.PathLike[str]) -> TraceMeta:
    with one_line_errors(path):
        text = (file.schema_arrow.metadata or {}).get(METADATA_KEY)
    if text is None and COUNTS_KEY in (file.schema_arrow.metadata or {}):
        raise TraceError(
            f"{os.fspath(path)}: expert counts, not a trace: they have no order to replay"
        )
    if text is None:
        raise TraceError(
            f"{os.fspath(path)}: not a Greenroom trace: "
            f"the Parquet metadata has no '{METADATA_KEY.decode()}' header"
        )
    return TraceMeta.from_json(text.decode(errors="replace"), os.fspath(path))


def _columns_of(
    file: pq.ParquetFile,
    meta: TraceMeta,
    path: str | os.PathLike[str],
    wanted: Iterable[str] | None,
) -> list[str]:
    """Compare the file's columns with the schema; return those to read, in schema order."""
    with one_line_errors(path):
        found = {field.name: field.type for field in file.schema_arrow}
    if len(found) < len(file.schema_arrow):
        twice = next(n for n in found if file.schema_arrow.names.count(n) > 1)
        raise TraceError(f"{os.fspath(path)}: column '{twice}' is there twice: names must differ")
    names = set(found) if wanted is None else {*REQUIRED, *wanted}
    for name in sorted({*names, *REQUIRED}, key=[*COLUMNS, *names].index):
        if name not in found:
            hint = near_match(name, tuple(found))
            raise TraceError(f"{os.fspath(path)}: column '{name}' is missing{hint}")
    for name, kind in found.items():
        if name not in COLUMNS:
            hint = near_match(name, tuple(COLUMNS))
            raise TraceError(f"{os.fspath(path)}: column '{name}' is not known{hint}")
        expected = _describe(arrow_schema(meta, [name]).field(0).type)
        if _describe(kind) != expected:
            raise TraceError(
                f"{os.fspath(path)}: column '{name}' is {_describe(kind)}: "
                f"must be {expected} by the header"
            )
    return [name for name in COLUMNS if name in names]


def _describe(kind: pa.DataType) -> str:
    """Name a type without what may differ: inner names, nullability, how words are coded."""
    if pa.types.is_dictionary(kind):
        return _describe(kind.value_type)
    if pa.types.is_fixed_size_list(kind):
        return f"fixed_size_list<{kind.value_type}>[{kind.list_size}]"
    return str(kind)
