"""Traces larger than memory: opened in place, read by row group as rows are asked for.

The flat columns (request, position, phase, step, tokens, stage, text) are in memory, some 20 bytes a
row and the text; the nested ones, hundreds or thousands of bytes a row, stay in the file. Row groups that
were read last are kept, up to a limit.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from traces.arrow import to_column
from traces.store import group_sizes, iter_trace, one_line_errors, read_meta, stored_columns
from traces.trace import COLUMNS, Trace, TraceMeta, inner_shape

KEPT_BYTES = 256 * 2**20
"""Bytes of row groups that an open trace keeps, at least one group a column."""


class StoredColumn:
    """A nested column that stays in its file; indexed by row like an array, it gives arrays.

    Rows of one row group come as a read-only view, others as a copy. Not safe for several threads.
    """

    def __init__(
        self,
        read: Callable[[str, int], NDArray[Any]],
        name: str,
        starts: NDArray[np.int64],
        shape: tuple[int, ...],
    ) -> None:
        self._read, self._name = read, name
        self._starts = starts
        self._first_rows: list[int] = starts.tolist()
        self.shape = (int(starts[-1]), *shape)
        self.dtype = np.dtype(COLUMNS[name].dtype)
        self._at = 0  # the group used last, by far the likeliest

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> Any:
        """Return rows: an index, a slice, integers or a mask."""
        if isinstance(rows, slice):
            first, last, step = rows.indices(len(self))
            if step == 1:
                return self._span(first, max(first, last))
            rows = np.arange(first, last, step)
        if isinstance(rows, int | np.integer):
            row = int(rows) + len(self) * int(rows < 0)
            if not 0 <= row < len(self):
                raise IndexError(f"row {rows}: must be < {len(self)}")
            return self._span(row, row + 1)[0]
        rows = np.asarray(rows)
        return self._gather(np.flatnonzero(rows) if rows.dtype == bool else rows)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return the whole column in memory; numpy calls this."""
        whole = self._span(0, len(self))
        return whole if dtype is None else whole.astype(dtype)

    def _span(self, first: int, last: int) -> NDArray[Any]:
        begins, at = self._first_rows, self._at
        if not begins[at] <= first < begins[at + 1]:
            at = self._at = self._group_of(first)
        if last <= begins[at + 1]:
            return self._read(self._name, at)[first - begins[at] : last - begins[at]]
        return self._gather(np.arange(first, last))

    def _group_of(self, row: int) -> int:
        place = int(np.searchsorted(self._starts, row, side="right")) - 1
        return min(place, len(self._first_rows) - 2)

    def _gather(self, rows: NDArray[np.integer]) -> NDArray[Any]:
        rows = np.where(rows < 0, rows + len(self), rows)
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(self):
            raise IndexError(f"rows {rows.min()} to {rows.max()}: must be < {len(self)}")
        out = np.empty((len(rows), *self.shape[1:]), dtype=self.dtype)
        groups = np.searchsorted(self._starts, rows, side="right") - 1
        for group in np.unique(groups).tolist():
            here = np.flatnonzero(groups == group)
            out[here] = self._read(self._name, group)[rows[here] - self._first_rows[group]]
        return out


class _Groups:
    """The row groups of one file, of which it keeps those used last."""

    def __init__(self, path: Path, meta: TraceMeta, kept_bytes: int) -> None:
        self._path, self._meta, self._kept_bytes = path, meta, kept_bytes
        with one_line_errors(path):
            self._file = pq.ParquetFile(path, page_checksum_verification=True)
        self._kept: OrderedDict[tuple[str, int], NDArray[Any]] = OrderedDict()
        self._bytes = 0

    def read(self, name: str, group: int) -> NDArray[Any]:
        """Return one column of a row group."""
        key = (name, group)
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
            return found
        with one_line_errors(self._path):
            table = self._file.read_row_group(group, columns=[name], use_threads=False)
            values: NDArray[Any] = to_column(table, name, self._meta, str(self._path))
        values = values.copy()  # a view would keep more of Arrow's memory than is counted here
        values.flags.writeable = False
        self._kept[key] = values
        self._bytes += values.nbytes
        while self._bytes > self._kept_bytes and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.nbytes
        return values


def open_trace(
    path: str | os.PathLike[str],
    columns: Iterable[str] | None = None,
    kept_bytes: int = KEPT_BYTES,
) -> Trace:
    """Return a trace whose nested columns are :class:`StoredColumn`; the whole file is validated once.

    ``columns`` as in ``iter_trace``. Raises TraceError as ``read_trace`` does. The file must not change
    while the trace is in use.
    """
    path = Path(path)
    meta = read_meta(path)
    names = stored_columns(path, columns)
    nested = [name for name in names if COLUMNS[name].axes]
    flat: dict[str, list[Any]] = {name: [] for name in names if name not in nested}
    for chunk in iter_trace(path, [name for name in names if not COLUMNS[name].required]):
        for name, parts in flat.items():
            values = getattr(chunk, name)
            parts.append(values if name == "text" else values.copy())  # not Arrow's whole group
    starts = np.concatenate([[0], np.cumsum(group_sizes(path))])
    groups = _Groups(path, meta, kept_bytes)
    made: dict[str, Any] = {
        name: StoredColumn(groups.read, name, starts, inner_shape(meta, name)) for name in nested
    }
    for name, parts in flat.items():
        made[name] = [piece for part in parts for piece in part] if name == "text" else _join(parts)
    return Trace(meta, **made)


def decoded_bytes(path: str | os.PathLike[str]) -> int:
    """Return what a trace file takes in memory, text not counted, from its header and footer."""
    meta = read_meta(path)
    row = sum(
        np.dtype(COLUMNS[name].dtype).itemsize * int(np.prod(inner_shape(meta, name), dtype=int))
        for name in stored_columns(path)
        if COLUMNS[name].dtype is not None
    )
    return row * int(sum(group_sizes(path)))


def _join(parts: list[NDArray[Any]]) -> NDArray[Any]:
    joined = np.concatenate(parts)
    joined.flags.writeable = False
    return joined
