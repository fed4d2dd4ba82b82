"""Reads the binary stream of ``llama-moe-trace`` (cacheable-by-design), which its npz archives are made of.

Records of little-endian int32: layer, n_tokens, k, then n_tokens * k expert ids; one a MoE layer and
evaluated piece of the text. Each context of the text was evaluated by itself, from an empty memory.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from traces.importers.assemble import assemble
from traces.importers.cells import EMPTY
from traces.importers.passes import Pass, passes_of
from traces.importers.routed import Origin, Routed
from traces.importers.sources import read_bytes
from traces.importers.told import Told
from traces.trace import Trace, TraceError

_HEAD = 3  # layer, n_tokens, k
_NOTES = (
    "teacher-forced: the text was given, not sampled by the model",
    "phase as if generated: position 0 of each context is prefill, the rest decode",
    "step derived: one token a step, contexts one after another",
    "ids only: no weights, token ids or text",
)


def read(path: Path, told: Told) -> Trace:
    """Return the stream as a trace; each context becomes one request.

    ``told`` must say the number of experts. A context is what was evaluated at once, or ``context_tokens``.

    Raises
    ------
    TraceError
        For bytes that are no such records, are cut short, or differ between layers.
    """
    layer, ids = _rows(path)
    passes, layers, found = passes_of(layer, ids, str(path))
    requests = _contexts(passes, told.context_tokens, path)
    cut = "the pieces that were evaluated"
    if told.context_tokens is not None:
        cut = f"{told.context_tokens} tokens each, as you said"
    origin = Origin(
        file=str(path),
        what="llama-moe-trace stream",
        recorder="llama-moe-trace",
        layer_indices=layers,
        notes=(*_NOTES, f"contexts are {cut}", *found),
    )
    return assemble(requests, told, origin)


def _rows(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return the layer [num_rows] and ids [num_rows, k] of each token and layer, in file order."""
    data = read_bytes(path)
    if data[:4] == b"MOE2":
        raise TraceError(
            f"{path}: is a MOE2 dump of tensors, which is another tool's: no stream of ids"
        )
    if not data or len(data) % 4:
        raise TraceError(f"{path}: {len(data)} bytes: must be whole int32, at least one record")
    numbers = np.frombuffer(data, dtype="<i4")
    layers: list[int] = []
    parts: list[NDArray[np.int32]] = []
    at = 0
    while at < len(numbers):
        part, layer, at = _record(path, numbers, at, len(parts))
        if parts and part.shape[1] != parts[0].shape[1]:
            where = (
                f"byte {4 * (at - part.size - _HEAD)}: k of record {len(parts)} is {part.shape[1]}"
            )
            raise TraceError(f"{path}: {where}: must be {parts[0].shape[1]} as in record 0")
        layers += [layer] * len(part)
        parts.append(part)
    ids = np.concatenate(parts)
    if (ids < 0).any():
        raise TraceError(f"{path}: expert {int(ids.min())}: must be >= 0")
    return np.array(layers, dtype=np.int64), ids


def _record(
    path: Path, numbers: NDArray[np.int32], at: int, place: int
) -> tuple[NDArray[np.int32], int, int]:
    """Return ids [n_tokens, k] and layer of the record at ``at``, and where the next one begins."""
    head = numbers[at : at + _HEAD].tolist()
    if len(head) < _HEAD or head[0] < 0 or min(head[1:]) < 1:
        rule = "must be layer >= 0, n_tokens >= 1, k >= 1"
        raise TraceError(f"{path}: byte {4 * at}: record {place} begins with {head}: {rule}")
    layer, num_tokens, top_k = head
    end = at + _HEAD + num_tokens * top_k
    if end > len(numbers):
        what = f"record {place} ({num_tokens} tokens, k {top_k}) is cut short"
        raise TraceError(f"{path}: byte {4 * at}: {what}: must have {4 * (end - at)} bytes")
    return numbers[at + _HEAD : end].reshape(num_tokens, top_k).astype(np.int32), layer, end


def _contexts(passes: list[Pass], context_tokens: int | None, path: Path) -> list[Routed]:
    """Return a request a pass, or for each ``context_tokens`` of them."""
    parts = [part.expert_ids for part in passes]
    if context_tokens is not None:
        whole = np.concatenate(parts)
        starts = np.cumsum([0, *map(len, parts)])
        cuts = np.arange(0, len(whole), context_tokens)
        if len(off := np.setdiff1d(cuts, starts)):
            before = int(starts[np.searchsorted(starts, off[0]) - 1])
            rule = f"must begin where a piece does (one does at {before})"
            raise TraceError(
                f"{path}: a context of {context_tokens} tokens begins at {off[0]}: {rule}"
            )
        parts = np.split(whole, cuts[1:])
    if any((part == EMPTY).all(axis=2).any() for part in parts):
        raise TraceError(
            f"{path}: the last layer has fewer tokens than the others: must be recorded for all (a text that "
            "is only read needs logits for each token)"
        )
    return [Routed(f"context {number}", part, 1) for number, part in enumerate(parts)]
