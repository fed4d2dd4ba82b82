"""Writes the ``experts`` archive of llama-moe-trace: ids int16 [layers, tokens, k] and ``meta``, a JSON text.

Tokens go request after request. The archive has no requests: its readers cut the text into contexts, which
our own reader does right where all requests have one length (``context_tokens`` in ``meta``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.out_file import whole_output
from traces.trace import NO_EXPERT, Trace, TraceError, TraceMeta

_MOST_EXPERTS = 2**15


def write(chunks: Iterable[Trace], out: Path) -> tuple[str, ...]:
    """Write the chunks of one trace; return what the format has no place for. All ids are in memory at once.

    Raises
    ------
    TraceError
        If a token lacks an expert (the format has no empty cells), ids exceed 16 bits with a sign, or ``out``
        cannot be written.
    """
    parts: list[NDArray[np.int16]] = []
    keys: list[NDArray[np.int32]] = []
    columns: set[str] = set()
    meta: TraceMeta | None = None
    row = 0
    for chunk in chunks:
        meta = chunk.meta
        _refuse_empty(chunk, out, row)
        parts.append(chunk.expert_ids.transpose(1, 0, 2).astype(np.int16))
        keys.append(np.stack([np.asarray(chunk.request_id), np.asarray(chunk.position)]))
        columns |= {*chunk.columns}
        row += len(chunk)
    if meta is None:
        raise TraceError(f"{out}: no rows: a trace has at least one")
    request, position = np.concatenate(keys, axis=1)
    experts = np.concatenate(parts, axis=1)
    order = np.lexsort((position, request))
    if (np.diff(order) != 1).any():
        experts = experts[:, order]
    lengths = np.unique(request, return_counts=True)[1]
    _save(out, experts, _header(meta, lengths))
    return _lost(columns, lengths)


def _refuse_empty(chunk: Trace, out: Path, first_row: int) -> None:
    if chunk.meta.num_experts > _MOST_EXPERTS:
        rule = f"must be at most {_MOST_EXPERTS}, for ids are int16"
        raise TraceError(f"{out}: num_experts is {chunk.meta.num_experts}: {rule}")
    empty = np.argwhere(chunk.expert_ids == NO_EXPERT)
    if len(empty):
        row, layer, _ = empty[0].tolist()
        where = f"row {first_row + row}, layer {chunk.meta.layer_indices[layer]}"
        raise TraceError(f"{out}: {where} lacks an expert: the format has no empty cells")


def _header(meta: TraceMeta, lengths: NDArray[np.integer]) -> dict[str, Any]:
    header: dict[str, Any] = {
        "model": meta.model,
        "num_experts": meta.num_experts,
        "n_moe_layers": meta.num_layers,
        "top_k": meta.top_k,
        "k": meta.top_k,
        "source": f"Greenroom, {meta.provenance.kind}: {meta.provenance.source}",
        "layer_indices": list(meta.layer_indices),
        "kind": meta.provenance.kind,
    }
    if (lengths[:-1] == lengths[0]).all() and lengths[-1] <= lengths[0]:
        header["context_tokens"] = int(lengths[0])
    return header


def _save(out: Path, experts: NDArray[np.int16], header: dict[str, Any]) -> None:
    with whole_output(out) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, experts=experts, meta=np.array(json.dumps(header)))


def _lost(columns: set[str], lengths: NDArray[np.integer]) -> tuple[str, ...]:
    kept = ("request_id", "position", "phase", "step", "expert_ids")
    others = sorted(columns.difference(kept))
    lost = ["phases and steps", *([f"columns {', '.join(others)}"] if others else [])]
    if (lengths[:-1] != lengths[0]).any() or lengths[-1] > lengths[0]:
        lost.append(f"where the {len(lengths)} requests begin and end: they differ in length")
    return tuple(lost)
