"""Reads ``llama-moe-trace`` archives (cacheable-by-design): ids of a teacher-forced text.

The ``.npz`` holds ``experts`` int16 [num_layers, num_tokens, top_k] and ``meta``, a JSON text with
``model``, ``num_experts``, ``n_moe_layers``, ``top_k`` (or ``k``) and ``source``. It has no
weights, tokens, phases or context boundaries: see the notes of the header for what is assumed. Archives that
Greenroom exported name ``layer_indices`` and ``context_tokens`` too.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.importers.artefacts import refuse_rankings
from traces.importers.completed import completed
from traces.importers.npz_file import load_npz
from traces.importers.told import Told
from traces.schema import (
    DECODE,
    NO_EXPERT,
    PREFILL,
    Provenance,
    Trace,
    TraceError,
    TraceMeta,
    validate,
)

_NOTES = (
    "teacher-forced: the text was given, not sampled by the model",
    "phase as if generated: position 0 of each context is prefill, the rest decode",
    "step derived: one token a step, contexts one after another",
    "ids only: no weights, token ids or text; the order of the slots is not stated",
    "scoring, absolute layer indices (0.. assumed) and expert sizes are not in the source",
)


_CONTEXT_TOKENS = 512
"""Length of a context as the recorder of the public archives cut it."""


def read(path: Path, told: Told) -> Trace:
    """Return the archive as a trace, completed with what the user told."""
    trace = read_experts_npz(path, told.context_tokens, told.licence)
    return completed(trace, told, str(path))


def read_experts_npz(
    path: str | os.PathLike[str], context_tokens: int | None = None, licence: str | None = None
) -> Trace:
    """Return the archive as a trace; each context of ``context_tokens`` becomes one request.

    An archive tells the context length only if Greenroom exported it; else 512 is what its recorder uses.
    ``licence`` is the source's licence, which the archive does not name either.
    """
    path = Path(path)
    if context_tokens is not None and context_tokens < 1:
        raise TraceError(f"context_tokens is {context_tokens}: must be >= 1")
    ids, header = _load(path)
    if context_tokens is None:
        context_tokens = _stated_context(path, header)
    meta = _meta(path, ids, header, context_tokens, licence)
    wrong = np.argwhere((ids < 0) | (ids >= meta.num_experts))
    if len(wrong):
        layer, token, slot = wrong[0].tolist()
        raise TraceError(
            f"{path}: row {token}: experts[layer {layer}, slot {slot}] is "
            f"{ids[layer, token, slot]}: must lie in 0..{meta.num_experts - 1}"
        )
    refuse_rankings(ids, meta.num_experts, str(path))
    rows = np.arange(ids.shape[1], dtype=np.int32)
    position = rows % np.int32(context_tokens)
    trace = Trace(
        meta,
        request_id=rows // np.int32(context_tokens),
        position=position,
        phase=np.where(position == 0, PREFILL, DECODE).astype(np.uint8),
        step=rows,
        expert_ids=np.ascontiguousarray(ids.transpose(1, 0, 2)).astype(np.uint16),
    )
    validate(trace, str(path))
    return trace


def _stated_context(path: Path, header: dict[str, Any]) -> int:
    value = header.get("context_tokens", _CONTEXT_TOKENS)
    if type(value) is not int or value < 1:
        raise TraceError(f"{path}: meta key 'context_tokens' is {value!r}: must be a number >= 1")
    return value


def _load(path: Path) -> tuple[NDArray[np.integer], dict[str, Any]]:
    """Return the ids and the parsed header."""
    arrays = load_npz(path)
    if not {"experts", "meta"} <= arrays.keys():
        held = ", ".join(arrays) or "nothing"
        raise TraceError(
            f"{path}: holds {held}: must be a llama-moe-trace archive: experts and meta"
        )
    ids = np.asarray(arrays["experts"])
    try:
        header = json.loads(str(arrays["meta"]))
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: meta is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise TraceError(f"{path}: meta is {header!r}: must be a JSON object")
    if ids.ndim != 3 or ids.dtype.kind not in "iu" or 0 in ids.shape:
        rule = "must be integers [layers, tokens, k], none of them 0"
        raise TraceError(f"{path}: experts is {ids.dtype}{ids.shape}: {rule}")
    return ids, header


def _meta(
    path: Path,
    ids: NDArray[np.integer],
    header: dict[str, Any],
    context_tokens: int,
    licence: str | None,
) -> TraceMeta:
    num_layers, _, top_k = ids.shape
    for key, found in (("n_moe_layers", num_layers), ("top_k", top_k), ("k", top_k)):
        if header.get(key, found) != found:
            rule = f"must be {found}, as experts is {ids.shape}"
            raise TraceError(f"{path}: meta key '{key}' is {header[key]!r}: {rule}")
    experts = header.get("num_experts")
    if not isinstance(experts, int) or not top_k <= experts < NO_EXPERT:
        rule = f"must be a whole number in {top_k}..{NO_EXPERT - 1}"
        raise TraceError(f"{path}: meta key 'num_experts' is {experts!r}: {rule}")
    return TraceMeta(
        model=str(header.get("model", "unknown")),
        num_layers=num_layers,
        num_experts=experts,
        top_k=top_k,
        layer_indices=_layer_indices(path, header, num_layers),
        scoring="unknown",
        sorted_by_weight=False,
        recorder="llama-moe-trace",
        notes=(*_NOTES, f"contexts of {context_tokens} tokens assumed, one request each"),
        licence=licence,
        provenance=Provenance(
            "synthetic" if header.get("kind") == "synthetic" else "imported",
            f"{path.name}: experts npz",
            str(header.get("source", "")),
        ),
    )


def _layer_indices(path: Path, header: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the absolute indices where the archive names them."""
    named = header.get("layer_indices", list(range(num_layers)))
    good = isinstance(named, list) and all(type(index) is int for index in named)
    if not good or len(named) != num_layers:
        rule = f"must be {num_layers} numbers, one a layer of experts"
        raise TraceError(f"{path}: meta key 'layer_indices' is {named!r}: {rule}")
    return tuple(named)
