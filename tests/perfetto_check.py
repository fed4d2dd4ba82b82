"""Checks a Chrome trace JSON as the Perfetto UI reads it; what the UI would drop in silence is an error here.

Knows nothing of the simulator. Phases: X slice, M name, C counter, s and f flow. A flow's ends bind to
the slice of their lane that is open at that moment. Times are microseconds with three decimals.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

_NEEDED = {
    "X": ("name", "pid", "tid", "ts", "dur"),
    "M": ("name", "pid", "args"),
    "C": ("name", "pid", "ts", "args"),
    "s": ("name", "cat", "id", "pid", "tid", "ts"),
    "f": ("name", "cat", "id", "pid", "tid", "ts", "bp"),
}
_NAMES = ("process_name", "thread_name")

Lane = tuple[int, int]
Slice = tuple[int, int, str]
"""start_ns, end_ns, name."""


def read(path: Path) -> Any:
    """Return the document in a .json or .json.gz file."""
    raw = path.read_bytes()
    return json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)


def problems(document: Any) -> list[str]:
    """Return what is wrong with a trace, one line each; an empty list means that it is good."""
    if not isinstance(document, Mapping) or not isinstance(document.get("traceEvents"), list):
        return ["document: must be an object with a list traceEvents"]
    events = document["traceEvents"]
    malformed = [line for place, event in enumerate(events) for line in _shape(place, event)]
    if malformed:
        return malformed
    lanes = slices_by_lane(document)
    return [
        *_order(events),
        *_names(events),
        *(line for lane, slices in lanes.items() for line in _overlaps(lane, slices)),
        *_flows(events, lanes),
        *_counters(events),
    ]


def slices_by_lane(document: Mapping[str, Any]) -> dict[Lane, list[Slice]]:
    """Return the slices of each (pid, tid), by start."""
    lanes: dict[Lane, list[Slice]] = defaultdict(list)
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            start_ns = _ns(event["ts"])
            end_ns = start_ns + _ns(event["dur"])
            lanes[event["pid"], event["tid"]].append((start_ns, end_ns, event["name"]))
    return {lane: sorted(slices) for lane, slices in lanes.items()}


def flows(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the names of the two slices that each flow joins, in the order of the flows' ends."""
    lanes = slices_by_lane(document)
    begun = {}
    found = []
    for event in document["traceEvents"]:
        if event["ph"] in "sf":
            bound = _bound(event, lanes)
            name = "" if bound is None else bound[2]
            if event["ph"] == "s":
                begun[event["cat"], event["id"]] = name
            else:
                found.append((begun[event["cat"], event["id"]], name))
    return found


def lane_names(document: Mapping[str, Any]) -> dict[Lane, str]:
    """Return 'process / thread' of each (pid, tid)."""
    found: dict[str, dict[Any, str]] = {name: {} for name in _NAMES}
    for event in document["traceEvents"]:
        if event["ph"] == "M" and event["name"] in _NAMES:
            key = event["pid"] if event["name"] == _NAMES[0] else (event["pid"], event["tid"])
            found[event["name"]][key] = event["args"]["name"]
    return {
        lane: f"{found['process_name'][lane[0]]} / {name}"
        for lane, name in found["thread_name"].items()
    }


def _ns(time_us: float) -> int:
    return round(time_us * 1000)


def _shape(place: int, event: Any) -> Iterable[str]:
    """Yield what keeps one event from being read at all."""
    if not isinstance(event, Mapping):
        yield f"event {place}: must be an object"
        return
    phase = event.get("ph")
    if phase not in _NEEDED:
        yield f"event {place}: ph = {phase}: must be one of {', '.join(_NEEDED)}"
        return
    yield from (f"event {place} ({phase}): no {key}" for key in _NEEDED[phase] if key not in event)
    for key in ("ts", "dur"):
        value = event.get(key, 0)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < float("inf"):
            yield f"event {place} ({phase}): {key} = {value}: must be a number >= 0"
        elif abs(value * 1000 - round(value * 1000)) > 1e-3:
            yield f"event {place} ({phase}): {key} = {value}: must be whole nanoseconds"
    for key in ("pid", "tid"):
        if not isinstance(event.get(key, 0), int):
            yield f"event {place} ({phase}): {key} = {event[key]}: must be a whole number"


def _order(events: list[Any]) -> Iterable[str]:
    times = [event["ts"] for event in events if event["ph"] != "M"]
    for before, after in pairwise(times):
        if after < before:
            yield f"ts = {after} comes after ts = {before}: must not fall"
            return


def _names(events: list[Any]) -> Iterable[str]:
    named = {
        (name, event["pid"], event.get("tid") if name == "thread_name" else None)
        for event in events
        if event["ph"] == "M" and (name := event["name"]) in _NAMES and event["args"].get("name")
    }
    used = [(event["pid"], event.get("tid")) for event in events if event["ph"] != "M"]
    for pid in sorted({pid for pid, _ in used}):
        if ("process_name", pid, None) not in named:
            yield f"pid {pid}: has no process_name"
    for pid, tid in sorted({(pid, tid) for pid, tid in used if tid is not None}):
        if ("thread_name", pid, tid) not in named:
            yield f"pid {pid} tid {tid}: has no thread_name"


def _overlaps(lane: Lane, slices: list[Slice]) -> Iterable[str]:
    for before, after in pairwise(slices):
        if after[0] < before[1]:
            yield (
                f"pid {lane[0]} tid {lane[1]}: {after[2]!r} at {after[0]} ns overlaps {before[2]!r}, "
                f"which ends at {before[1]} ns"
            )


def _bound(event: Mapping[str, Any], lanes: Mapping[Lane, list[Slice]]) -> Slice | None:
    """Return the slice that is open in a flow end's lane at its time."""
    slices = lanes.get((event["pid"], event["tid"]), [])
    time_ns = _ns(event["ts"])
    place = bisect_right(slices, time_ns, key=lambda slice_: slice_[0]) - 1
    if place < 0 or time_ns >= max(slices[place][1], slices[place][0] + 1):
        return None
    return slices[place]


def _flows(events: list[Any], lanes: Mapping[Lane, list[Slice]]) -> Iterable[str]:
    ends: dict[Any, dict[str, list[Any]]] = defaultdict(lambda: {"s": [], "f": []})
    for event in events:
        if event["ph"] in "sf":
            ends[event["cat"], event["id"]][event["ph"]].append(event)
    for (cat, number), found in ends.items():
        flow = f"flow {cat} {number}"
        if len(found["s"]) != 1 or len(found["f"]) != 1:
            yield f"{flow}: {len(found['s'])} starts and {len(found['f'])} ends: must be one of each"
            continue
        start, end = found["s"][0], found["f"][0]
        source, target = _bound(start, lanes), _bound(end, lanes)
        if end["bp"] != "e":
            yield f"{flow}: bp = {end['bp']}: must be e, to bind to the slice around it"
        for word, slice_ in (("start", source), ("end", target)):
            if slice_ is None:
                yield f"{flow}: its {word} lies in no slice"
        # What is brought is used later, and not before all of it has come.
        if source is not None and target is not None and _ns(end["ts"]) < source[1]:
            yield f"{flow}: goes back in time, from {source[2]!r} to {target[2]!r}"


def _counters(events: list[Any]) -> Iterable[str]:
    for event in events:
        if event["ph"] == "C":
            values = event["args"].values()
            if not values or not all(isinstance(v, int | float) and v >= 0 for v in values):
                yield f"counter {event['name']} at {event['ts']}: {event['args']}: must be numbers >= 0"
