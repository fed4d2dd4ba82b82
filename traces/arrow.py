"""Between a trace's numpy arrays and Arrow tables, without copying the nested columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from traces.trace import COLUMNS, PHASE_NAMES, Trace, TraceError, TraceMeta, inner_shape, near_match

# Measured on 8,000 real tokens of 48 layers x top-8 (Qwen3-30B-A3B), zstd level 1, bytes a token:
# expert_ids 337 with a dictionary (it packs 7 bits an id), 468 plain, 386 delta; weights (top-6 of
# 48 layers, 576 raw) 414 byte-stream-split, 467 plain, 480 dictionary. Higher zstd levels gain
# 1-2% on weights. Read time differs by less than the noise. Splitting float16 needs pyarrow >= 16.
_FLOAT_ENCODING = "BYTE_STREAM_SPLIT"
_INT_ENCODINGS = dict.fromkeys(("request_id", "position", "step"), "DELTA_BINARY_PACKED")


def writer_options(columns: tuple[str, ...]) -> dict[str, Any]:
    """Return the keyword arguments of ``ParquetWriter`` for a trace with these columns."""
    paths = {name: f"{name}.list.element" if COLUMNS[name].axes else name for name in columns}
    encodings = {name: code for name, code in _INT_ENCODINGS.items() if name in columns}
    encodings |= {
        paths[name]: _FLOAT_ENCODING for name in columns if COLUMNS[name].dtype == "float16"
    }
    return {
        "compression": "zstd",
        "use_dictionary": [path for path in paths.values() if path not in encodings],
        "column_encoding": encodings,
        "write_page_checksum": True,  # so that a flipped bit is an error, not another expert
    }


def to_table(trace: Trace, schema: pa.Schema) -> pa.Table:
    """Return the trace as a table of ``schema`` (from ``arrow_schema``)."""
    return pa.Table.from_arrays(
        [_to_array(field, getattr(trace, field.name)) for field in schema], schema=schema
    )


def _to_array(field: pa.Field, values: Any) -> pa.Array:
    if field.name == "phase":
        names = pa.array(PHASE_NAMES, pa.string())
        return pa.DictionaryArray.from_arrays(pa.array(values.astype(np.int8)), names)
    if field.name == "text":
        return pa.array(values, pa.string())
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return (
        pa.FixedSizeListArray.from_arrays(flat, type=field.type) if field.type.num_fields else flat
    )


def to_trace(table: pa.Table, meta: TraceMeta, name: str) -> Trace:
    """Return the table's rows as a trace; nested columns are read-only views of Arrow's memory.

    The caller has compared the column types with ``arrow_schema``; ``name`` is the file that
    errors speak of.
    """
    return Trace(
        meta, **{column: to_column(table, column, meta, name) for column in table.column_names}
    )


def to_column(table: pa.Table, column: str, meta: TraceMeta, name: str) -> Any:
    """Return one column of the table as a trace has it; see ``to_trace``."""
    array = _one_chunk(table.column(column))
    if array.null_count:
        row = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise TraceError(f"{name}: row {row} of its row group: {column} is null: must be set")
    if column == "text":
        return array.to_pylist()
    if column == "phase":
        return _phase_codes(array, name)
    if shape := inner_shape(meta, column):
        return _nested(array, column, name).reshape(-1, *shape)
    return array.to_numpy()


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    """Join chunks only where there are several: a single one (the usual case) is not copied."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _nested(array: pa.FixedSizeListArray, column: str, name: str) -> NDArray[Any]:
    """Return the cells in one run; ``flatten`` (unlike ``values``) respects a slice's offset."""
    cells = array.flatten()
    if cells.null_count:
        raise TraceError(f"{name}: {column} has null cells: must be numbers")
    return cells.to_numpy(zero_copy_only=True)


def _phase_codes(array: pa.Array, name: str) -> NDArray[np.uint8]:
    if not isinstance(array, pa.DictionaryArray):
        array = array.dictionary_encode()
    words = array.dictionary.to_pylist()
    for word in words:
        if word not in PHASE_NAMES:
            rule = f"must be {' or '.join(PHASE_NAMES)}{near_match(str(word), PHASE_NAMES)}"
            raise TraceError(f"{name}: column phase holds {word!r}: {rule}")
    codes = np.array([PHASE_NAMES.index(word) for word in words], dtype=np.uint8)
    return codes[array.indices.to_numpy()]
