"""Reads a trace file of any kind that it tells itself: the project's own, or one that an importer knows.

Only files that need no telling are read here; ``greenroom import`` reads the others.
"""

from __future__ import annotations

import os
from pathlib import Path

from traces.counts import ExpertCounts
from traces.importers.formats import FORMATS, format_named
from traces.importers.looks_like import looks_like
from traces.importers.told import NOTHING
from traces.schema import Trace, TraceError
from traces.store import is_trace_file, read_trace

_JSON = (".json", ".jsonl", ".ndjson")
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
    if is_trace_file(path) or not path.is_file():
        return None
    name = looks_like(path) or _BY_SUFFIX.get(path.suffix.lower())
    if name is None and path.suffix.lower() in _JSON:
        names = ", ".join(known.name for known in FORMATS)
        raise TraceError(
            f"{path}: JSON that looks like no format that is known: `greenroom import FORMAT` reads {names}"
        )
    return name
