"""Turn decoder calls that requests share, join and leave into the rows of a trace.

Rows are ordered by step, and within a step as the engine packed them. A row is held back until
every request of its step has ended, for text and stages need whole requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from traces.record_hooks import ForwardRecord
from traces.record_rows import (
    Annotation,
    DroppedRows,
    Request,
    annotate,
    join_records,
    recorded_columns,
)
from traces.schema import DECODE, PREFILL, Trace, TraceError, TraceMeta


class Interleaved:
    """Takes records and ended requests as they come, and gives pieces of a trace.

    ``dropped`` is told of rows that were computed more than once: the first visit is the one that
    happened when the request was scheduled, later ones only fill a cache that was given up.
    """

    def __init__(self, meta: TraceMeta, annotation: Annotation, dropped: DroppedRows) -> None:
        self._meta = meta
        self._annotation = annotation
        self._dropped = dropped
        self._records: deque[tuple[frozenset[int], ForwardRecord]] = deque()
        self._ended: dict[int, Request] = {}
        self._num_rows: dict[int, int] = {}  # released, by request
        self._texts: dict[int, tuple[list[str] | None, np.ndarray | None]] = {}

    def add(self, records: Sequence[ForwardRecord]) -> None:
        """Add decoder calls, oldest first."""
        self._records.extend(
            (frozenset(np.unique(record.batch_row).tolist()), record) for record in records
        )

    def end(self, request: Request) -> None:
        """Learn that a request has ended, and what its tokens are."""
        self._ended[request.request_id] = request
        self._texts[request.request_id] = annotate([request], self._annotation)

    def release(self) -> Trace | None:
        """Return the rows of the oldest steps whose requests have all ended; None where none is."""
        ready = []
        while self._records and self._records[0][0] <= self._ended.keys():
            ready.append(self._records.popleft()[1])
        if not ready:
            return None
        rows = join_records(ready)
        first = self._first_visits(rows["batch_row"], rows["position"])
        self._dropped.recomputed += int((~first).sum())
        rows = {name: column[first] for name, column in rows.items()}
        return self._to_trace(rows) if first.any() else None

    def close(self) -> None:
        """Raise TraceError unless every row of every ended request has been released."""
        for number, request in self._ended.items():
            released, expected = self._num_rows.get(number, 0), len(request.tokens) - 1
            if released != expected:
                raise TraceError(
                    f"request {number}: {released} rows were recorded, must be {expected}"
                )
        if self._records:
            raise TraceError(f"{len(self._records)} steps have requests that never ended")

    def _first_visits(self, request: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Return bool[n], true where a row is the first of its request at its position."""
        first = np.zeros(len(request), dtype=bool)
        for number in np.unique(request).tolist():
            mine = np.flatnonzero(request == number)
            begin = self._num_rows.get(number, 0)
            reached = np.maximum.accumulate(np.append(begin - 1, position[mine]))[:-1]
            first[mine] = position[mine] > reached
        return first

    def _to_trace(self, rows: Mapping[str, np.ndarray]) -> Trace:
        count = len(rows["position"])
        token_id = np.empty(count, dtype=np.int32)
        phase = np.empty(count, dtype=np.uint8)
        text = [""] * count
        stage = np.full(count, -1, dtype=np.int16)
        for number in np.unique(rows["batch_row"]).tolist():
            mine = np.flatnonzero(rows["batch_row"] == number)
            span = self._next_rows(number, rows, mine)
            request, (pieces, stages) = self._ended[number], self._texts[number]
            token_id[mine] = request.tokens[span]
            prompt = rows["position"][mine] < request.num_prompt_tokens
            phase[mine] = np.where(prompt, PREFILL, DECODE)
            if stages is not None:
                stage[mine] = stages[span]
            for row, piece in zip(mine.tolist(), (pieces or [])[span], strict=False):
                text[row] = piece
        return Trace(
            self._meta,
            request_id=rows["batch_row"],
            phase=phase,
            token_id=token_id,
            text=None if self._annotation.piece is None else text,
            stage=None if self._annotation.stages is None else stage,
            **recorded_columns(self._meta, rows),
        )

    def _next_rows(self, number: int, rows: Mapping[str, np.ndarray], mine: np.ndarray) -> slice:
        """Hold a request's rows against its tokens; return the span of positions they are."""
        begin = self._num_rows.get(number, 0)
        end = self._num_rows[number] = begin + len(mine)
        request = self._ended[number]
        if not np.array_equal(rows["position"][mine], np.arange(begin, end)):
            raise TraceError(f"request {number}: its rows {begin} to {end - 1} are not consecutive")
        tokens = rows.get("token_id")
        if tokens is not None and tokens[mine].tolist() != request.tokens[begin:end]:
            raise TraceError(f"request {number}: the recorded token ids are not the generated ones")
        return slice(begin, end)
