"""Cuts a trace into the events that caches see: one step at one layer, the union over its tokens.

An event is a run of neighbouring rows with the same ``step``, so that a file that is ordered by step
gives its recorded batches, and one that holds request after request gives the prompt of each at once
and then one token at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from traces.schema import NO_EXPERT, Trace, TraceError, TraceMeta

EVENTS = ("step", "token")


@dataclass(frozen=True, slots=True)
class Block:
    """Events one after another.

    ``ids`` is uint16[num_events, num_layers, width]: the distinct experts of each event and layer in
    the order of their first choice, ``NO_EXPERT`` where there are fewer than ``width``. ``counted``
    bool[num_events]: whether the event is among those whose hits are wanted.
    """

    ids: NDArray[np.uint16]
    counted: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.ids)


class EventCutter:
    """Turns chunks of a trace, in file order, into blocks of events.

    Parameters
    ----------
    meta
        The header of the trace.
    phase
        Events with at least one row of this phase are marked as counted; None: all.
    events
        "step": an event is a run of rows of one step; "token": each row is an event of its own.
    """

    def __init__(self, meta: TraceMeta, phase: int | None = None, events: str = "step") -> None:
        if events not in EVENTS:
            raise TraceError(f"events is {events!r}: must be one of {', '.join(EVENTS)}")
        self._num_experts, self._phase, self._by_token = meta.num_experts, phase, events == "token"
        self._held: list[Trace] = []

    def cut(self, chunk: Trace) -> Iterator[Block]:
        """Yield the events that end in ``chunk``; rows of its last step wait for the next chunk."""
        if not len(chunk):
            return
        if self._by_token:
            yield Block(np.asarray(chunk.expert_ids), self._wanted(chunk.phase))
            return
        begins = np.flatnonzero(np.diff(chunk.step)) + 1
        if self._held and self._held[-1].step[-1] != chunk.step[0]:
            yield from self.rest()
        last = int(begins[-1]) if len(begins) else 0
        if last and self._held:  # what was held ends here
            first = int(begins[0])
            self._held.append(chunk.take(slice(0, first)))
            yield from self.rest()
            yield from self._blocks(chunk.take(slice(first, last)), begins[1:-1] - first)
        elif last:
            yield from self._blocks(chunk.take(slice(0, last)), begins[:-1])
        self._held.append(chunk.take(slice(last, None)))

    def rest(self) -> Iterator[Block]:
        """Yield the event that waits, if any; call it once after the last chunk."""
        if self._held:
            ids = np.concatenate([part.expert_ids for part in self._held])
            phase = np.concatenate([part.phase for part in self._held])
            self._held = []
            yield self._event(ids, phase)

    def _blocks(self, rows: Trace, begins: NDArray[np.intp]) -> Iterator[Block]:
        """Yield single rows by the run, and every larger event by itself."""
        if not len(rows):
            return
        edges = np.concatenate([[0], begins, [len(rows)]])
        lengths = np.diff(edges)
        # A run of events of one row is a block; any other event is one by itself.
        single = lengths == 1
        starts = np.flatnonzero(~single | np.concatenate([[True], ~single[:-1]]))
        for at, end in zip(starts, [*starts[1:], len(lengths)], strict=True):
            own = slice(edges[at], edges[end])
            ids, phase = rows.expert_ids[own], rows.phase[own]
            yield Block(ids, self._wanted(phase)) if single[at] else self._event(ids, phase)

    def _event(self, ids: NDArray[np.uint16], phase: NDArray[np.uint8]) -> Block:
        """Join the rows of one event."""
        wanted = np.array([bool(self._wanted(phase).any())])
        return Block(ids if len(ids) == 1 else union(ids, self._num_experts)[None], wanted)

    def _wanted(self, phase: NDArray[np.uint8]) -> NDArray[np.bool_]:
        return np.full(len(phase), True) if self._phase is None else phase == self._phase


def union(ids: NDArray[np.uint16], num_experts: int) -> NDArray[np.uint16]:
    """Return the distinct experts of uint16[num_rows, num_layers, top_k] by layer, padded to a width.

    uint16[num_layers, width], in the order of their first choice.
    """
    layers = ids.shape[1]
    by_layer = np.moveaxis(ids, 1, 0).reshape(layers, -1)
    layer, place = np.nonzero(by_layer != NO_EXPERT)
    keys = layer * num_experts + by_layer[layer, place]
    keys, first = np.unique(keys, return_index=True)
    keys = keys[np.argsort(first, kind="stable")]  # rows of ``layer`` ascend: grouped by layer
    layer = keys // num_experts
    counts = np.bincount(layer, minlength=layers)
    found = np.full((layers, max(1, int(counts.max(initial=0)))), NO_EXPERT, dtype=np.uint16)
    slot = np.arange(len(keys)) - np.repeat(np.cumsum(counts) - counts, counts)
    found[layer, slot] = keys % num_experts
    return found
