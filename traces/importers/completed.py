"""Completes the header of a trace that its own reader made with what a user told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from traces.importers.told import Told, agreed
from traces.trace import Trace, TraceError

_WORDS = (
    "model",
    "num_shared_experts",
    "hidden_size",
    "intermediate_size",
    "scoring",
    "normalized",
    "tokenizer",
    "licence",
)


def completed(trace: Trace, told: Told, name: str) -> Trace:
    """Return the trace with the facts that were told in its header; ``name`` is the file.

    Raises
    ------
    TraceError
        If the file says another number of experts, choices a token or MoE layers.
    """
    meta = trace.meta
    agreed(name, "num_experts", told.num_experts, meta.num_experts)
    agreed(name, "top_k", told.top_k, meta.top_k)
    changes: dict[str, Any] = {
        word: getattr(told, word) for word in _WORDS if getattr(told, word) is not None
    }
    if told.layer_indices is not None:
        if len(told.layer_indices) != meta.num_layers:
            rule = f"must be the {len(told.layer_indices)} that were told"
            raise TraceError(f"{name}: has {meta.num_layers} MoE layers: {rule}")
        changes["layer_indices"] = told.layer_indices
    native, forced = told.native_top_k, f"top_k forced from {told.native_top_k} to {meta.top_k}"
    if native not in (None, meta.top_k) and forced not in meta.notes:
        changes["notes"] = (*meta.notes, f"warning: {forced}")
    return replace(trace, meta=replace(meta, **changes))
