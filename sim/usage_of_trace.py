"""The curves of a model's expert use, measured on a trace: what a prediction needs of it."""

from __future__ import annotations

from typing import Any

from traces.locality_batches import RequestBatches
from traces.locality_caches import HitCurve, lru_curve
from traces.locality_working_set import Touched, WorkingSet
from traces.schema import DECODE, Trace, TraceMeta

_PER_MILLE = 1000
_DOUBLINGS = 19
_RATIOS = (31, 63, 94, 125, 188, 250, 313, 375, 438, 500, 563, 625, 688, 750, 813, 875, 938)


def usage_of(trace: Trace, name: str, max_tokens: int = 4000) -> dict[str, Any]:
    """Return a trace's usage as the plain values of ``conf/usage/*.yaml``.

    ``distinct`` counts the experts of a layer that runs of 1, 2, 4, ... consecutive tokens of a request
    touch, in the mean over layers and runs; ``apart`` those that one decoded token each of 1, 2, 4, ...
    requests touch, from different places of their texts (null for a trace of one request). ``hits`` is
    the hit rate of an event-atomic LRU cache in each layer, one token at a time, by its share of the
    experts (from stack distances, so that one pass serves all sizes); the first use of an expert misses.
    ``max_tokens``: how many of the trace's first tokens are replayed for the others than ``apart``.
    """
    meta, first = trace.meta, trace.take(slice(0, max_tokens))
    runs = WorkingSet(meta, doublings=_DOUBLINGS)
    runs.add(first)
    apart = RequestBatches(meta, DECODE, tuple(2**power for power in range(_DOUBLINGS)))
    apart.add(trace)
    batches = apart.result()
    return {
        "name": name,
        "source": f"{meta.provenance.kind}: {meta.model}, {len(first)} tokens",
        "distinct": _shares(runs.result(), meta),
        "hits": _hits(lru_curve([first], meta, events="token"), meta),
        "apart": _shares(batches, meta) if len(batches.tokens) > 1 else None,
    }


def _shares(touched: Touched, meta: TraceMeta) -> list[list[int]]:
    """Return [visits an expert, share of the experts touched], both in thousandths."""
    rows: list[list[int]] = []
    means = touched.experts.mean(axis=0)
    for size, mean in zip(touched.tokens.tolist(), means.tolist(), strict=True):
        visits = round(_PER_MILLE * size * meta.top_k / meta.num_experts)
        share = round(_PER_MILLE * mean / meta.num_experts)
        if visits > 0 and share > 0 and (not rows or visits > rows[-1][0]):
            rows.append([visits, share])
    return rows


def _hits(curve: HitCurve, meta: TraceMeta) -> list[list[int]]:
    """Return [share of the experts that a layer's cache holds, share of the uses that hit] in thousandths."""
    rows = []
    for ratio in _RATIOS:
        slots = ratio * meta.num_experts // _PER_MILLE
        if slots >= meta.top_k:  # below, the order within an event decides
            rows.append([ratio, max(1, round(_PER_MILLE * float(curve.pooled[slots - 1])))])
    return rows
