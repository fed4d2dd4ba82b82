"""Reads ``llama-moe-trace`` archives (cacheable-by-design): ids of a teacher-forced text.

The ``.npz`` holds ``experts`` int16 [num_layers, num_tokens, top_k] and ``meta``, a JSON text with
``model``, ``num_experts``, ``n_moe_layers``, ``top_k`` (or ``k``) and ``source``. It has no
weights, tokens, phases or context boundaries: see the notes of the header for what is assumed. Archives that
Greenroom exported name ``layer_indices`` and ``context_tokens`` too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.importers.artefacts import refuse_rankings
from traces.importers.assemble import assemble
from traces.importers.npz_file import load_npz
from traces.importers.routed import Origin, Routed
from traces.importers.told import Told
from traces.schema import NO_EXPERT, Provenance, Trace, TraceError

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
    """Return the archive as a trace; each context becomes one request.

    An archive tells the context length only if Greenroom exported it; else 512 is what its recorder uses.

    Raises
    ------
    TraceError
        For another archive, ids that are no experts, and whole rankings read flat.
    """
    ids, header = _load(path)
    num_experts = _num_experts(path, ids, header)
    if (ids < 0).any():
        layer, token, slot = np.argwhere(ids < 0)[0].tolist()
        where = f"row {token}: experts[layer {layer}, slot {slot}]"
        raise TraceError(f"{path}: {where} is {ids[layer, token, slot]}: must be >= 0")
    refuse_rankings(ids, num_experts, str(path))
    context_tokens = told.context_tokens or _stated_context(path, header)
    by_token = np.ascontiguousarray(ids.transpose(1, 0, 2))
    requests = [
        Routed(f"context {number}", by_token[start : start + context_tokens], 1)
        for number, start in enumerate(range(0, len(by_token), context_tokens))
    ]
    notes = (*_NOTES, f"contexts of {context_tokens} tokens assumed, one request each")
    trace = assemble(requests, told, _origin(path, ids, header, notes))
    if header.get("kind") != "synthetic":
        return trace
    provenance: Provenance = replace(trace.meta.provenance, kind="synthetic")
    return replace(trace, meta=replace(trace.meta, provenance=provenance))


def read_experts_npz(
    path: str | os.PathLike[str], context_tokens: int | None = None, licence: str | None = None
) -> Trace:
    """Return the archive as a trace; ``licence`` is the source's, which an archive does not name."""
    return read(Path(path), Told(context_tokens=context_tokens, licence=licence))


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


def _num_experts(path: Path, ids: NDArray[np.integer], header: dict[str, Any]) -> int:
    """Return the number of experts that the header states; refuse a header of another shape than the ids."""
    num_layers, _, top_k = ids.shape
    for key, found in (("n_moe_layers", num_layers), ("top_k", top_k), ("k", top_k)):
        if header.get(key, found) != found:
            rule = f"must be {found}, as experts is {ids.shape}"
            raise TraceError(f"{path}: meta key '{key}' is {header[key]!r}: {rule}")
    experts = header.get("num_experts")
    if not isinstance(experts, int) or not top_k <= experts < NO_EXPERT:
        rule = f"must be a whole number in {top_k}..{NO_EXPERT - 1}"
        raise TraceError(f"{path}: meta key 'num_experts' is {experts!r}: {rule}")
    return experts


def _origin(
    path: Path, ids: NDArray[np.integer], header: dict[str, Any], notes: Sequence[str]
) -> Origin:
    return Origin(
        file=str(path),
        what="experts npz",
        recorder="llama-moe-trace",
        detail=str(header.get("source", "")),
        model=str(header.get("model", "unknown")),
        num_experts=header["num_experts"],
        layer_indices=_layer_indices(path, header, len(ids)),
        notes=tuple(notes),
    )


def _layer_indices(path: Path, header: dict[str, Any], num_layers: int) -> tuple[int, ...] | None:
    """Return the absolute indices where the archive names them, else None."""
    named = header.get("layer_indices")
    if named is None:
        return None
    good = isinstance(named, list) and all(type(index) is int for index in named)
    if not good or len(named) != num_layers:
        rule = f"must be {num_layers} numbers, one a layer of experts"
        raise TraceError(f"{path}: meta key 'layer_indices' is {named!r}: {rule}")
    return tuple(named)
