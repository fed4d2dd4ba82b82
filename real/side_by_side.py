"""A measured run beside the simulated one of the same configuration, in one Chrome trace.

Both begin at the same moment: that of the first step that is shown. Processes are called "real: ..." and
"simulated: ...".
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Iterator, Mapping
from heapq import merge
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from sim.perfetto import write_timeline
from sim.result_tables import StoredTable
from sim.results import COUNTERS, EVENTS, whole_file

SIDE_BY_SIDE = "side_by_side.json.gz"
_APART = 100
"""Between the numbers of processes of two sides; those of threads are a thousand times as far apart."""
_FLOWS_APART = 10**8
"""Between the numbers of arrows, which the UI takes as numbers only."""


class Side(NamedTuple):
    """One run: how it is called, the folder with its tables, its summary row, and copies an expert."""

    name: str
    folder: Path
    about: Mapping[str, Any]
    chunks: int = 1


def write_side_by_side(path: Path, sides: list[Side], steps: tuple[int, int | None]) -> None:
    """Write steps [first, last + 1) of several runs as one trace, compressed; None: to the end.

    Raises ConfigError if one of them has no such steps.
    """
    parts = [_Part(number, side, _timeline(side, steps)) for number, side in enumerate(sides)]
    first_ns = max(part.lead_ns for part in parts)
    with whole_file(path) as unfinished, unfinished.open("wb") as raw, _packed(raw) as file:
        about = {part.side.name: part.side.about for part in parts}
        head = f'{{"displayTimeUnit":"ns","otherData":{json.dumps(about)},"traceEvents":[\n'
        file.write(head.encode())
        file.write(",\n".join(line for part in parts for line in part.names()).encode())
        timed = (part.timed(first_ns) for part in parts)
        for _, line in merge(*timed, key=lambda entry: entry[0]):  # stable within a side
            file.write(f",\n{line}".encode())
        file.write(b"\n]}\n")


def _packed(raw: BinaryIO) -> gzip.GzipFile:
    """Compress, without the time of day, so that the same runs give the same bytes."""
    return gzip.GzipFile(filename="", mode="wb", fileobj=raw, compresslevel=6, mtime=0)


def _timeline(side: Side, steps: tuple[int, int | None]) -> list[dict[str, Any]]:
    """Return the events of one side alone."""
    events, counters = (StoredTable(side.folder / name) for name in (EVENTS, COUNTERS))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timeline.json"
        write_timeline(path, events, counters, side.about, steps=steps, chunks=side.chunks)
        found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        return found


class _Part:
    """The events of one side, with numbers that no other side has."""

    def __init__(self, number: int, side: Side, events: list[dict[str, Any]]) -> None:
        self.side = side
        self._number = number
        self._names = [event for event in events if event["ph"] == "M"]
        self._timed = [event for event in events if event["ph"] != "M"]
        starts_ns = [_ns(event["ts"]) for event in self._timed]
        self._step_ns = min(
            _ns(event["ts"]) for event in self._timed if event["name"].startswith("step ")
        )
        self.lead_ns = self._step_ns - min(starts_ns)
        """By how much what is shown begins before the first step: copies that reach into it."""

    def names(self) -> Iterator[str]:
        """Yield the names of processes and threads."""
        for event in self._names:
            args = dict(event["args"])
            if event["name"] == "process_name":
                args["name"] = f"{self.side.name}: {args['name']}"
            if event["name"] == "process_sort_index":
                args["sort_index"] += _APART * self._number
            yield _line({**self._apart(event), "args": args})

    def timed(self, first_ns: int) -> Iterator[tuple[int, str]]:
        """Yield time and JSON of each event, the first step being at ``first_ns``."""
        shift_ns = first_ns - self._step_ns
        for event in self._timed:
            time_ns = _ns(event.pop("ts")) + shift_ns
            spans = {"ts": time_ns}
            if "dur" in event:
                spans["dur"] = _ns(event.pop("dur"))
            yield time_ns, _line(self._apart(event), spans)

    def _apart(self, event: dict[str, Any]) -> dict[str, Any]:
        """Return an event with the numbers of its process, thread and flow moved."""
        moved = {**event, "pid": event["pid"] + _APART * self._number}
        if "tid" in event:
            moved["tid"] = event["tid"] + 1000 * _APART * self._number
        if "id" in event:
            moved["id"] = event["id"] + _FLOWS_APART * self._number
        return moved


def _ns(time_us: float) -> int:
    return round(time_us * 1000)


def _line(fields: Mapping[str, Any], spans_ns: Mapping[str, int] | None = None) -> str:
    """Return an event as JSON, its times in microseconds digit by digit."""
    text = json.dumps(fields, separators=(",", ":"))
    times = [f',"{name}":{ns // 1000}.{ns % 1000:03}' for name, ns in (spans_ns or {}).items()]
    return text[:-1] + "".join(times) + "}"
