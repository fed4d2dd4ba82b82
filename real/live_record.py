"""Records the trace of a live run while it goes on, as ``greenroom record`` does in a run of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from traces.record import PROBE_TOKENS, DroppedRows, Generation, RouterRecorder, header
from traces.record_hooks import ForwardRecord
from traces.record_rows import Annotation, Request, assemble, join_records
from traces.schema import TraceMeta
from traces.store import TraceWriter


class LiveRecorder:
    """Watches a model from its first batch to its last, and writes a file; a context manager.

    Parameters
    ----------
    model, path
        What is recorded, and the file.
    generation
        How the model generates, its end tokens filled in.
    annotation, described
        As for ``record_batches``.
    logits, gates_ahead
        As for ``RouterRecorder``.
    """

    def __init__(
        self,
        model: Any,
        path: Path,
        generation: Generation,
        annotation: Annotation,
        described: Mapping[str, Any],
        *,
        logits: bool = False,
        gates_ahead: int = 1,
    ) -> None:
        self._model = model
        self._path = path
        self._said = generation, annotation, described
        self._keep_logits = logits
        # The header tells how routers score, which is found out from the logits of the first prompt.
        self._recorder = RouterRecorder(model, logits=True, gates_ahead=gates_ahead)
        self._meta: TraceMeta | None = None
        self._writer: TraceWriter | None = None
        self._open = ExitStack()
        self.dropped = DroppedRows()
        self.num_rows = 0

    def __enter__(self) -> LiveRecorder:
        self._open.enter_context(self._recorder)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def end_batch(self, requests: Sequence[Request]) -> None:
        """Write what was recorded of a batch that has ended."""
        generation, annotation, described = self._said
        records = self._recorder.take()
        if self._meta is None:
            probe = _first_prompt(records[0])
            said = (generation, annotation, described)
            self._meta = header(self._model, self._recorder.layers, probe, *said)
            self._writer = self._open.enter_context(TraceWriter(self._path, self._meta))
        if not self._keep_logits:
            records = [replace(record, router_logits=None) for record in records]
        self.dropped.padding = self._recorder.num_padding_rows
        piece = assemble(self._meta, join_records(records), requests, annotation, self.dropped)
        assert self._writer is not None
        self._writer.append(piece)
        self.num_rows += len(piece)


def _first_prompt(record: ForwardRecord) -> ForwardRecord:
    """Return the first tokens of the first sequence of a record."""
    rows = np.flatnonzero((record.batch_row == 0) & (record.position < PROBE_TOKENS))
    parts: dict[str, Any] = {
        item.name: part[rows]
        for item in fields(record)
        if isinstance(part := getattr(record, item.name), np.ndarray)
    }
    return replace(record, **parts)
