"""Reads a trace file of any kind that its name tells: the project's own, or one that an importer knows."""

from __future__ import annotations

import os
from pathlib import Path

from traces.importers.experts_npz import read_experts_npz
from traces.importers.route_csv import read_route_csv
from traces.schema import Trace
from traces.store import read_trace

_READERS = {".csv": read_route_csv, ".npz": read_experts_npz}


def read_any(path: str | os.PathLike[str]) -> Trace:
    """Return the trace of a ``route_trace`` CSV, a ``llama-moe-trace`` archive, or else a stored trace."""
    reader = _READERS.get(Path(path).suffix.lower(), read_trace)
    return reader(path)
