"""A recorded trace made ready for a fit: request after request, each row with a stage."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from traces.locality_requests import choice_counts
from traces.schema import PREFILL, Trace, TraceError, TraceMeta, concat
from traces.store import iter_trace, stored_columns
from traces.synth_stages import cluster_windows

MOST_TOKENS = 60_000
"""Rows that are read: a fit holds them in memory several times."""
_OPTIONAL = ("stage", "expert_weights")
_WINDOW_TOKENS = 64
_MOST_CLUSTERS = 8
_WINDOWS_A_CLUSTER = 8


@dataclass(frozen=True, slots=True)
class Source:
    """A trace in the order of its requests, and what its stages are.

    ``trace`` has one token a step and no optional columns but ``stage``, int16 without -1, and
    weights where the recording has them. ``told``: the stages are the recording's own.
    """

    trace: Trace
    stage_names: tuple[str, ...]
    told: bool

    @property
    def stages(self) -> NDArray[np.int16]:
        """The stage of each row, int16[num_tokens]."""
        assert self.trace.stage is not None
        return self.trace.stage

    def half(self, number: int) -> Source:
        """Return every second request, from the first (0) or the second (1)."""
        requests = np.unique(self.trace.request_id)
        chosen = np.isin(self.trace.request_id, requests[number::2])
        return replace(self, trace=ordered(self.trace.take(chosen)))

    def layers(self, layers: list[int]) -> Source:
        """Return some of the layers only."""
        return replace(self, trace=some_layers(self.trace, layers))

    def sequences(self, phase: int | None = None) -> list[NDArray[np.int16]]:
        """Return the stages of each request's rows of a phase; None: of all. Empty ones are left out."""
        wanted = slice(None) if phase is None else self.trace.phase == phase
        requests, stages = self.trace.request_id[wanted], self.stages[wanted]
        edges = np.flatnonzero(np.diff(requests)) + 1
        return [part for part in np.split(stages, edges) if len(part)]

    def lengths_tokens(self) -> NDArray[np.int64]:
        """Return each request's rows of prefill and decode, int64[num_requests, 2]."""
        requests, place = np.unique(self.trace.request_id, return_inverse=True)
        lengths = np.zeros((len(requests), 2), dtype=np.int64)
        np.add.at(lengths, (place, (self.trace.phase != PREFILL).astype(np.intp)), 1)
        return lengths


def read_source(
    path: str | os.PathLike[str], seed: int = 0, most_tokens: int = MOST_TOKENS
) -> Source:
    """Read the first ``most_tokens`` rows of a trace file, which may be larger than memory."""
    parts: list[Trace] = []
    rows = 0
    columns = [name for name in stored_columns(path) if name in _OPTIONAL]
    for chunk in iter_trace(path, columns):
        parts.append(chunk.take(slice(0, most_tokens - rows)))
        rows += len(parts[-1])
        if rows >= most_tokens:
            break
    return make_source(concat(parts), seed)


def make_source(trace: Trace, seed: int = 0) -> Source:
    """Put a trace in order; without stages, cluster its windows of 64 tokens into at most eight."""
    trace = ordered(trace)
    rows, requests = len(trace), trace.num_requests
    if rows < 2 * _WINDOW_TOKENS or requests < 2 or rows < 2 * requests:
        rule = "a fit needs 2 requests and 128 rows, and two rows a request"
        raise TraceError(f"the source has {rows} rows of {requests} requests: {rule}")
    if trace.meta.top_k >= trace.meta.num_experts:
        raise TraceError("the source uses all experts for each token: there is nothing to fit")
    if trace.stage is not None and (np.asarray(trace.stage) >= 0).any():
        stages = _filled(np.asarray(trace.stage))
        return Source(_with_stages(trace, stages), trace.meta.stage_names, True)
    stages = _clusters(trace, seed)
    names = tuple(f"cluster_{number}" for number in range(int(stages.max()) + 1))
    return Source(_with_stages(trace, stages), names, False)


def ordered(trace: Trace) -> Trace:
    """Return the rows request after request, one a step; requests are renumbered from 0."""
    order = np.argsort(trace.request_id, kind="stable")
    kept = {
        name: getattr(trace, name)[order]
        for name in ("phase", "expert_ids", *_OPTIONAL)
        if getattr(trace, name) is not None
    }
    _, requests = np.unique(trace.request_id[order], return_inverse=True)
    rows = np.arange(len(trace), dtype=np.int32)
    first = np.searchsorted(requests, requests)
    return Trace(
        trace.meta,
        request_id=requests.astype(np.int32),
        position=(rows - first).astype(np.int32),
        step=rows,
        **kept,
    )


def some_layers(trace: Trace, layers: list[int]) -> Trace:
    """Return a trace of some of its layers, without weights."""
    indices = tuple(trace.meta.layer_indices[layer] for layer in layers)
    meta = _shortened(trace.meta, indices)
    ids = np.ascontiguousarray(trace.expert_ids[:, layers])
    return replace(trace, meta=meta, expert_ids=ids, expert_weights=None)


def _shortened(meta: TraceMeta, indices: tuple[int, ...]) -> TraceMeta:
    return replace(
        meta,
        num_layers=len(indices),
        layer_indices=indices,
        incomplete_layers=(),
        expert_bytes=None,
    )


def _with_stages(trace: Trace, stages: NDArray[np.int16]) -> Trace:
    return replace(trace, stage=stages)


def _filled(stages: NDArray[np.int16]) -> NDArray[np.int16]:
    """Let an unknown stage (-1) continue the one before it; at the beginning, the first known one."""
    known = np.flatnonzero(stages >= 0)
    at = np.searchsorted(known, np.arange(len(stages)), side="right") - 1
    return np.asarray(stages[known[np.maximum(at, 0)]])


def _clusters(trace: Trace, seed: int) -> NDArray[np.int16]:
    """Return the cluster of the window that each row lies in.

    A request's first window is half as long as the others, for coherence is measured in windows that
    begin with the request, and would take the clusters' edges for its own.
    """
    position, request = np.asarray(trace.position), np.asarray(trace.request_id)
    begins = np.concatenate([[True], np.diff(request) != 0]) | (
        position % _WINDOW_TOKENS == _WINDOW_TOKENS // 2
    )
    window = np.cumsum(begins) - 1
    count = int(window[-1]) + 1
    choices = choice_counts(trace.expert_ids, window, count, trace.meta.num_experts)
    shares = choices / np.bincount(window)[:, None, None]
    number = max(1, min(_MOST_CLUSTERS, count // _WINDOWS_A_CLUSTER))
    return cluster_windows(shares, number, seed)[window]
