"""Any window of a run as a Chrome trace, which https://ui.perfetto.dev opens: one lane a resource.

A slice is one row of the event table; arrows lead from each storage read and each copy to the first
work that used what it brought; counters show bytes and queues. Reads event rows only, so that simulated
and real runs look alike.
"""

from __future__ import annotations

import gzip
import heapq
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from sim.events import EVENT_COLUMNS, LANE_OF_COPY, Counter, Kind, Lane
from sim.flows import find_flows
from sim.labels import device, origin
from sim.result_tables import StoredTable
from sim.results import COUNTERS, EVENTS, whole_file
from sim.results import TIMELINE as TIMELINE
from sim.types import ConfigError

Rows = NDArray[np.int64]
Timed = tuple[int, str]
"""A time in ns and the JSON of what happens then."""

_START, _END, _LANE, _UNIT, _KIND, _STEP, _LAYER, _EXPERT, _TOKENS, _BYTES = range(10)
_COPIES = (*LANE_OF_COPY, Kind.ENTER, Kind.LEAVE)
"""What goes on beside a step's own work."""
_RUN, _GPU, _LINKS, _HOST, _STORAGE = range(1, 6)
_PROCESSES = {_RUN: "run", _GPU: "GPU", _LINKS: "links", _HOST: "host", _STORAGE: "storage"}
_HOMES = {
    Lane.GPU: (_GPU, "kernels", "kernels of GPU {}"),
    Lane.H2D: (_LINKS, "host to GPU", "host to GPU {}"),
    Lane.D2H: (_LINKS, "GPU to host", "GPU {} to host"),
    Lane.CPU: (_HOST, "CPU experts", "CPU experts of team {}"),
    Lane.HANDOVER: (_HOST, "handover", "handover of GPU {}"),
    Lane.DEFERRAL: (_HOST, "handover of deferred experts", "handover of deferred experts, slot {}"),
    Lane.STORAGE: (_STORAGE, "reads", "reads of device {}"),
}
"""The process of each lane, and its name where there is one of it and where there are several."""
_COUNTERS = {
    Counter.CACHE_BYTES: (_GPU, "expert cache", "bytes"),
    Counter.KV_BYTES: (_GPU, "KV cache", "bytes"),
    Counter.QUEUE: (_LINKS, "queue", "copies"),
}
_TITLES = {Kind.DENSE: "attention", Kind.STEP: "embedding and head", Kind.PACK: "permute"}
_RUN_LANE, _STEPS_LANE = 11, 12
_ALL_TIME = (0, 1 << 62)


def write_run_timeline(folder: Path, config: Mapping[str, Any], summary: dict[str, Any]) -> None:
    """Write the window that a run's configuration asks for, from the tables in the run's folder.

    A run that came to an end before its window has no timeline, but a note in its summary.
    """
    events, counters = (StoredTable(folder / name) for name in (EVENTS, COUNTERS))
    steps, chunks = tuple(config["output"]["perfetto"]), config["engine"]["chunks"]
    try:
        write_timeline(folder / TIMELINE, events, counters, summary, steps=steps, chunks=chunks)
    except ConfigError as error:
        summary["notes"].append(f"no timeline: {error}")


def check_window(config: Mapping[str, Any], num_steps: int | None) -> None:
    """Raise ConfigError if a run of ``num_steps`` never reaches its window.

    None: the number is not known yet; 0: every request is refused, which the run itself tells.
    """
    steps = config["output"]["perfetto"]
    if steps is not None and num_steps and steps[0] >= num_steps:
        raise _no_such_steps(steps, num_steps)


def _no_such_steps(steps: Sequence[int | None], num_steps: int) -> ConfigError:
    low, high = ("null" if step is None else step for step in steps)
    return ConfigError(
        f"output.perfetto = [{low}, {high}]: must begin at a step of the run, which has {num_steps}"
    )


def write_timeline(
    path: Path,
    events: Iterable[Rows],
    counters: Iterable[Rows],
    about: Mapping[str, Any],
    *,
    steps: tuple[int, int | None] | None = None,
    span_ns: tuple[int, int] | None = None,
    chunks: int = 1,
) -> int:
    """Write what happened in a window, compressed if the name ends in ``.gz``; return its slices.

    Parameters
    ----------
    events, counters
        Blocks of rows, int64[n, columns], of EVENT_COLUMNS and of COUNTER_COLUMNS. ``events`` is read
        twice, so no generator.
    about
        What ran, and where its numbers come from: a run's summary row.
    steps, span_ns
        The window: steps [first, last + 1), or nanoseconds [first, last) instead; None for both is the
        whole run. A slice that reaches into the window is there in full.
    chunks
        Copies an expert is split into.

    Raises ConfigError if there is nothing in the window.
    """
    window = span_ns or (_ALL_TIME if steps is None else _span(events, steps))
    rows = _within(events, window)
    if not len(rows):
        raise ConfigError(f"timeline: nothing happens from {window[0]} to {window[1]} ns")
    parts = (_run_slices(rows, about), *_slices(rows, chunks), _samples(counters, window))
    with whole_file(path) as unfinished, _opened(unfinished, path.suffix == ".gz") as file:
        file.write(f'{{"displayTimeUnit":"ns","otherData":{json.dumps(about)},"traceEvents":[\n')
        file.write(",\n".join(_names(rows, device(about))))
        for _, text in heapq.merge(*parts, key=lambda entry: entry[0]):  # stable: slices first
            file.write(",\n" + text)
        file.write("\n]}\n")
    return len(rows)


@contextmanager
def _opened(path: Path, is_compressed: bool) -> Iterator[TextIO]:
    """Open for text; a compressed file has no time in it, so that the same run gives the same bytes."""
    with path.open("wb") as raw:
        if not is_compressed:
            with io.TextIOWrapper(raw, encoding="utf-8") as file:
                yield file
            return
        packed = gzip.GzipFile(filename="", mode="wb", fileobj=raw, compresslevel=6, mtime=0)
        with packed, io.TextIOWrapper(packed, encoding="utf-8", write_through=False) as file:
            yield file


# -- the window ------------------------------------------------------------------------------------


def _span(events: Iterable[Rows], steps: tuple[int, int | None]) -> tuple[int, int]:
    """Return the time from the first to the last work of some steps, the copies beside it left out."""
    low, high = steps
    num_steps, spans = 0, []
    for block in events:
        num_steps = max(num_steps, int(block[:, _STEP].max(initial=-1)) + 1)
        inside = (block[:, _STEP] >= low) & ~np.isin(block[:, _KIND], _COPIES)
        if high is not None:
            inside &= block[:, _STEP] < high
        if inside.any():
            spans.append((int(block[inside, _START].min()), int(block[inside, _END].max())))
    if not spans:
        raise _no_such_steps(steps, num_steps)
    return min(span[0] for span in spans), max(span[1] for span in spans)


def _within(events: Iterable[Rows], window: tuple[int, int]) -> Rows:
    """Return the rows that reach into a window, by start; what takes no time cannot be shown."""
    kept = [np.empty((0, len(EVENT_COLUMNS)), np.int64)]
    for block in events:
        starts, ends = block[:, _START], block[:, _END]
        kept.append(block[(starts < window[1]) & (ends > window[0]) & (ends > starts)])
    rows = np.concatenate(kept)
    return rows[np.lexsort((rows[:, _UNIT], rows[:, _LANE], rows[:, _START]))]


# -- what is shown ---------------------------------------------------------------------------------


def _names(rows: Rows, computes: str) -> Iterator[str]:
    """Yield the names of processes and lanes, and the order in which to show them."""
    for pid, name in {**_PROCESSES, _GPU: computes}.items():
        yield _json(ph="M", name="process_name", pid=pid, args={"name": name})
        yield _json(ph="M", name="process_sort_index", pid=pid, args={"sort_index": pid})
    lanes = sorted({(int(lane), int(unit)) for lane, unit in rows[:, [_LANE, _UNIT]]})
    several = {lane for lane, unit in lanes if unit > 0}
    threads = [(_RUN, _RUN_LANE, "run"), (_RUN, _STEPS_LANE, "steps")]
    for lane, unit in lanes:
        pid, name, name_of_several = _HOMES[Lane(lane)]
        name = name_of_several.format(unit) if lane in several else name
        threads.append((pid, _tid(lane, unit), name))
    for pid, tid, name in threads:
        yield _json(ph="M", name="thread_name", pid=pid, tid=tid, args={"name": name})
        yield _json(ph="M", name="thread_sort_index", pid=pid, tid=tid, args={"sort_index": tid})


def _tid(lane: int, unit: int) -> int:
    """Return a thread number that no other lane has (units are < 1000); the UI shows it too."""
    return 1000 * (lane + 1) + unit


def _run_slices(rows: Rows, about: Mapping[str, Any]) -> Iterator[Timed]:
    """Yield one slice for the run, which carries all that is known about it, and one for each step."""
    start_ns, end_ns = int(rows[0, _START]), int(rows[:, _END].max())
    title = f"{about['policy']}: {origin([about])}"
    yield _slice((_RUN, _RUN_LANE), (start_ns, end_ns), title, about)
    work = rows[~np.isin(rows[:, _KIND], _COPIES)]
    work = work[np.argsort(work[:, _STEP], kind="stable")]
    steps, firsts = np.unique(work[:, _STEP], return_index=True)
    for step, own in zip(steps.tolist(), np.split(work, firsts[1:]), strict=True):
        whole = own[np.isin(own[:, _KIND], (Kind.DENSE, Kind.STEP))]
        args = {"step": step, "tokens": int(whole[:, _TOKENS].max(initial=0))}
        span = int(own[:, _START].min()), int(own[:, _END].max())
        yield _slice((_RUN, _STEPS_LANE), span, f"step {step}", args)


def _slices(rows: Rows, chunks: int) -> tuple[Iterator[Timed], Iterator[Timed]]:
    """Return the rows' slices, each followed by the flows that begin there, and the flows' ends."""
    begins: dict[int, list[int]] = {}
    ends: list[Timed] = []
    for number, (source, target) in enumerate(find_flows(rows, chunks)):
        begins.setdefault(source, []).append(number)
        ends.append(_flow(number, rows[target], "f"))

    def slices() -> Iterator[Timed]:
        for place, row in enumerate(rows.tolist()):
            yield _row_slice(row)
            for number in begins.get(place, ()):
                yield _flow(number, row, "s")

    return slices(), iter(sorted(ends, key=lambda entry: entry[0]))


def _row_slice(row: list[int]) -> Timed:
    kind, layer, expert, tokens = Kind(row[_KIND]), row[_LAYER], row[_EXPERT], row[_TOKENS]
    words = [_TITLES.get(kind, kind.name.lower())]
    words += [f"L{layer}"] if layer >= 0 else []
    words += [f"e{expert}"] if expert >= 0 else []
    words += [f"x{tokens} tokens"] if kind == Kind.EXPERT and tokens > 1 else []
    named = {"step": row[_STEP], "layer": layer, "expert": expert}
    args = {name: number for name, number in named.items() if number >= 0}
    counts = {"tokens": tokens, "bytes": row[_BYTES]}
    args |= {name: number for name, number in counts.items() if number > 0}
    return _slice(_lane(row), (row[_START], row[_END]), " ".join(words), args)


def _flow(number: int, row: Any, phase: str) -> Timed:
    """Return one end of a flow, at the beginning of the slice that it binds to."""
    pid, tid = _lane(row)
    start_ns = int(row[_START])
    fields: dict[str, Any] = {"name": "brings", "cat": "flow", "id": number}
    fields |= {"bp": "e"} if phase == "f" else {}
    return start_ns, _json(start_ns, ph=phase, pid=pid, tid=tid, **fields)


def _lane(row: Any) -> tuple[int, int]:
    lane = int(row[_LANE])
    return _HOMES[Lane(lane)][0], _tid(lane, int(row[_UNIT]))


def _slice(
    lane: tuple[int, int], span_ns: tuple[int, int], name: str, args: Mapping[str, Any]
) -> Timed:
    start_ns, end_ns = span_ns
    fields = {"pid": lane[0], "tid": lane[1], "name": name, "args": args}
    return start_ns, _json(start_ns, end_ns - start_ns, ph="X", **fields)


def _samples(counters: Iterable[Rows], window: tuple[int, int]) -> Iterator[Timed]:
    """Yield the counters' values in a window, and as it opens those that they have from before."""
    before: dict[tuple[int, int], int] = {}
    inside: dict[tuple[int, int, int], int] = {}  # the last of several values at one time
    for block in counters:
        for time_ns, counter, unit, value in block[block[:, 0] < window[1]].tolist():
            if time_ns <= window[0]:
                before[counter, unit] = value
            else:
                inside[time_ns, counter, unit] = value
    opening = [(window[0], *which, value) for which, value in before.items()]
    several = {which[-2] for which in [*before, *inside] if which[-1] > 0}
    for time_ns, counter, unit, value in opening + sorted((*w, v) for w, v in inside.items()):
        pid, name, of = _COUNTERS[Counter(counter)]
        name = f"{name} {unit}" if counter in several else name
        yield time_ns, _json(time_ns, ph="C", pid=pid, name=name, args={of: value})


def _json(time_ns: int | None = None, duration_ns: int | None = None, **fields: Any) -> str:
    """Return an event as JSON; its times in microseconds, digit by digit, for a float would round."""
    times = [
        f',"{name}":{ns // 1000}.{ns % 1000:03}'
        for name, ns in (("ts", time_ns), ("dur", duration_ns))
        if ns is not None
    ]
    return json.dumps(fields, separators=(",", ":"))[:-1] + "".join(times) + "}"
