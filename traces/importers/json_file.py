"""Reads JSON lines one at a time, so that a file larger than memory passes through."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from traces.importers.sources import read_json
from traces.trace import TraceError


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield line number (from 1) and value of each line that is not empty.

    Raises TraceError for a line that is no JSON; the last one may have been cut off with its writer.
    """
    number, last = 0, False
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    last = not line.endswith("\n")
                    yield number, json.loads(line)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    except UnicodeError:
        raise TraceError(f"{path}: not UTF-8 text: must be JSON lines") from None
    except ValueError as error:
        cut = " (the file ends in it: cut short?)" if last else ""
        raise TraceError(f"{path}: line {number} is not JSON: {error}{cut}") from None
    except RecursionError:
        raise TraceError(f"{path}: line {number} is not JSON of ours: nested too deep") from None


def json_values(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield a label and a value for each line of ``.jsonl``, or for each entry of a list in ``.json``."""
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        for number, value in json_lines(path):
            yield f"line {number}", value
        return
    loaded = read_json(path)
    if not isinstance(loaded, list):
        yield "entry 0", loaded
        return
    for place, value in enumerate(loaded):
        yield f"entry {place}", value
