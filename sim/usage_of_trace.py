"""The curves of a model's expert use, measured on a trace: what a prediction needs of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from traces.schema import DECODE, NO_EXPERT, Trace

_PER_MILLE = 1000
_MOST_REQUESTS = 256
"""Requests whose tokens are compared."""
_RATIOS = (31, 63, 94, 125, 188, 250, 313, 375, 438, 500, 563, 625, 688, 750, 813, 875, 938)


def usage_of(trace: Trace, name: str, max_tokens: int = 4000) -> dict[str, Any]:
    """Return a trace's usage as the plain values of ``conf/usage/*.yaml``.

    ``distinct`` counts the experts of a layer that runs of 1, 2, 4, ... consecutive tokens of a request
    touch, in the mean over layers and runs; ``apart`` those that one decoded token each of 1, 2, 4, ...
    requests touch, from different eighths of their lengths (null for a trace of one request). ``hits`` is
    the hit rate of an event-atomic LRU cache in each layer, one token at a time, by its share of the
    experts (from stack distances, so that one pass serves all sizes); the first use of an expert misses.
    ``max_tokens``: how many of the trace's first tokens are replayed for the others than ``apart``.
    """
    meta = trace.meta
    ids = np.asarray(trace.expert_ids).reshape(-1, meta.num_layers, meta.top_k)
    requests = np.asarray(trace.request_id)
    decoded = np.flatnonzero(np.asarray(trace.phase) == DECODE)
    apart = _apart(ids[decoded], requests[decoded], meta.num_experts)
    ids, requests = ids[:max_tokens], requests[:max_tokens]
    return {
        "name": name,
        "source": f"{meta.provenance.kind}: {meta.model}, {len(ids)} tokens",
        "distinct": _distinct(ids, requests, meta.num_experts),
        "hits": _hits(ids, meta.num_experts),
        "apart": apart,
    }


def _distinct(ids: np.ndarray, requests: np.ndarray, num_experts: int) -> list[list[int]]:
    """Return [visits an expert, share of the experts touched], both in thousandths."""
    sizes = [2**power for power in range(20)]
    return _curve(ids, num_experts, sizes, lambda size: _runs(ids, requests, size))


def _apart(ids: np.ndarray, requests: np.ndarray, num_experts: int) -> list[list[int]] | None:
    """Return the same of tokens of as many requests; None where there are fewer than two."""
    rows_of = [np.flatnonzero(requests == request) for request in np.unique(requests)]
    rows_of = rows_of[:_MOST_REQUESTS]
    if len(rows_of) < 2:
        return None
    sizes = [2**power for power in range(20) if 2**power <= len(rows_of)]
    return _curve(ids, num_experts, sizes, lambda size: _groups(ids, rows_of, size))


def _groups(ids: np.ndarray, rows_of: Sequence[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """Yield the ids of one token of each of ``size`` neighbouring requests."""
    for first in range(0, len(rows_of) - size + 1, size):
        members = rows_of[first : first + size]
        for shift in range(8):  # not all at the same place of their texts, which often begin alike
            eighths = [(shift + number) % 8 for number in range(size)]
            yield ids[[own[len(own) * e // 8] for own, e in zip(members, eighths, strict=True)]]


def _curve(
    ids: np.ndarray,
    num_experts: int,
    sizes: Sequence[int],
    runs: Callable[[int], Iterator[np.ndarray]],
) -> list[list[int]]:
    """Return a curve's rows from the runs of so many tokens, as far as there are any."""
    rows: list[list[int]] = []
    for size in sizes:
        counts = [_touched(run, num_experts) for run in runs(size)]
        if not counts:
            break
        visits = round(_PER_MILLE * size * ids.shape[2] / num_experts)
        share = round(_PER_MILLE * float(np.mean(counts)) / num_experts)
        if visits > 0 and share > 0 and (not rows or visits > rows[-1][0]):
            rows.append([visits, share])
    return rows


def _runs(ids: np.ndarray, requests: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Yield the ids of consecutive tokens that belong to one request, ``size`` of them at a time."""
    for first in range(0, len(ids) - size + 1, size):
        if requests[first] == requests[first + size - 1]:
            yield ids[first : first + size]


def _touched(run: np.ndarray, num_experts: int) -> float:
    """Return the mean number of distinct experts a layer over a run of tokens."""
    num_layers = run.shape[1]
    used = np.zeros((num_layers, num_experts), dtype=bool)
    layers = np.arange(num_layers)[:, None]
    for token in run:
        valid = token != NO_EXPERT
        used[np.broadcast_to(layers, token.shape)[valid], token[valid]] = True
    return float(used.sum() / num_layers)


def _hits(ids: np.ndarray, num_experts: int) -> list[list[int]]:
    """Return [share of the experts that a layer's cache holds, share of the uses that hit] in thousandths."""
    uses_at = np.zeros(num_experts + 1, dtype=np.int64)  # by stack distance; the last: first uses
    for layer in range(ids.shape[1]):
        _add_distances(ids[:, layer], num_experts, uses_at)
    hits = np.concatenate([[0], np.cumsum(uses_at[:-1])]) / max(1, uses_at.sum())
    top_k = ids.shape[2]
    rows = []
    for ratio in _RATIOS:
        slots = ratio * num_experts // _PER_MILLE
        if slots >= top_k:  # below, the order within an event decides
            rows.append([ratio, max(1, round(_PER_MILLE * float(hits[slots])))])
    return rows


def _add_distances(ids: np.ndarray, num_experts: int, uses_at: np.ndarray) -> None:
    """Count one layer's uses by how many other experts were used since the last time."""
    recent: list[int] = []
    for token in ids.tolist():
        event = [expert for expert in token if expert != NO_EXPERT]
        for expert in event:
            uses_at[recent.index(expert) if expert in recent else num_experts] += 1
        for expert in reversed(event):
            if expert in recent:
                recent.remove(expert)
            recent.insert(0, expert)
