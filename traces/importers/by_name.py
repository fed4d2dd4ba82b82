"""Reads a trace file of any kind that it tells itself: the project's own, or one that an importer knows.

Only files that need no telling are read here; ``greenroom import`` reads the others.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from traces.counts import ExpertCounts
from traces.importers.formats import FORMATS, format_named
from traces.importers.told import NOTHING
from traces.schema import Trace, TraceError
from traces.store import is_trace_file, read_trace

_BY_SUFFIX = {".csv": "route-csv", ".npz": "experts-npz", ".mpt": "mpt", ".pkl": "finemoe"}


def read_any(path: str | os.PathLike[str]) -> Trace:
    """Return the trace of a stored trace or of a foreign file that tells its own model.

    Raises
    ------
    TraceError
        If the file cannot be read, holds counts, or is of a format that tells too little.
    """
    path = Path(path)
    name = _format_of(path)
    if name is None:
        return read_trace(path)
    try:
        found = format_named(name).reader()(path, NOTHING)
    except TraceError as error:
        if "give --" not in str(error):
            raise
        raise TraceError(f"{error}, to `greenroom import {name}`") from None
    if isinstance(found, ExpertCounts):
        raise TraceError(
            f"{path}: holds expert counts: the order of tokens is lost, so it is no trace"
        )
    return found


def _format_of(path: Path) -> str | None:
    """Return the name of the foreign format that a file is in, None for what may be a trace of ours."""
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        return _jsonl_format(path)
    if suffix == ".parquet" and path.is_file() and not is_trace_file(path):
        return "moe-policylang" if _is_policylang(path) else None
    return _BY_SUFFIX.get(suffix)


def _jsonl_format(path: Path) -> str:
    """Return the format of JSON lines, as their first one tells."""
    try:
        with path.open(encoding="utf-8") as file:
            first: Any = json.loads(file.readline(2**20))
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(f"{path}: {' '.join(str(error).split())}") from None
    if isinstance(first, dict) and "records_full_softmax" in first:
        return "moe-policylang"
    if isinstance(first, dict) and first.get("type") == "meta":
        return "vllm-patch"
    names = ", ".join(known.name for known in FORMATS)
    raise TraceError(
        f"{path}: JSON lines that do not tell their model: `greenroom import FORMAT` makes a trace of them "
        f"(formats: {names})"
    )


def _is_policylang(path: Path) -> bool:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        names = {*pq.read_schema(path).names}
    except (pa.ArrowException, OSError, UnicodeError):
        return False
    return {"prompt_id", "token_idx", "layer_idx"} <= names
