"""Reads moe-balance traces: one ``.npz`` a request, or the JSON lines that its converter makes of them.

An archive has ``request_id``, ``prompt_token_ids``, ``output_token_ids`` and ``routed_experts`` [tokens,
layers, k], which may be pickled, or None where the engine returned nothing. A line has the ``topk_experts``
[tokens, k] of one ``layer`` and one ``batch_id``, and perhaps ``topk_weights`` and ``request_id``; what of it
is prompt is lost. Dense layers are zeros in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.importers.assemble import assemble
from traces.importers.checked import MOST_WEIGHT
from traces.importers.json_file import json_lines
from traces.importers.npz_file import load_npz
from traces.importers.routed import STEPS_DERIVED, Origin, Routed
from traces.importers.routed_arrays import request_of_arrays
from traces.importers.sequence import natural
from traces.importers.sources import files_of
from traces.importers.told import Told
from traces.trace import NO_EXPERT, Trace, TraceError

_JSON = (".jsonl", ".ndjson", ".json")
_AS_GENERATED = (
    "warning: the source does not tell prompt from output: the first token of a request is taken as its"
    " prompt (--prompt-tokens tells)"
)
_ONE_PASS = "batches without a request id are taken as one prompt pass each"
_WEIGHTS = "weights taken as applied: the source does not say"

_Batch = dict[int, tuple[NDArray[np.integer], NDArray[np.floating] | None]]  # by layer


def read(path: Path, told: Told) -> Trace:
    """Return the requests of a file, or of a folder with a file a request, as a trace.

    Raises
    ------
    TraceError
        If a file holds Python objects, rows do not fit the tokens, or a batch lacks a layer.
    """
    path = Path(path)
    files = sorted(files_of(path, ".npz", *_JSON), key=lambda file: natural(file.name))
    lines = [file for file in files if file.suffix.lower() in _JSON]
    if lines and len(lines) < len(files):
        rule = "must be one of the two: the lines are made of the archives"
        raise TraceError(f"{path}: has archives and {lines[0].name}: {rule}")
    if lines:
        return _of_lines(path, lines, told)
    requests, notes = _of_archives(files, told)
    if not requests:
        raise TraceError(f"{path}: no archive has routed_experts: nothing was recorded")
    return assemble(requests, told, _origin(path, "npz", (STEPS_DERIVED, *notes)))


def _of_archives(files: Iterable[Path], told: Told) -> tuple[list[Routed], list[str]]:
    requests, empty = list[Routed](), 0
    for file in files:
        arrays = load_npz(file)
        if "routed_experts" not in arrays:
            held = ", ".join(arrays) or "nothing"
            raise TraceError(f"{file}: holds {held}: must have routed_experts")
        request = request_of_arrays(arrays, str(file), told)
        if request is None:
            empty += 1
            continue
        request.name = f"{file.name}"
        requests.append(request)
    return requests, [f"{empty} requests have no routing and were left out"] if empty else []


def _of_lines(path: Path, files: Iterable[Path], told: Told) -> Trace:
    batches: dict[str, _Batch] = {}
    whole_pass: set[str] = set()
    for file in files:
        for number, record in json_lines(file):
            name = _take(record, f"{file}: line {number}", batches)
            if record.get("request_id") is None:
                whole_pass.add(name)
    if not batches:
        raise TraceError(f"{path}: no lines in it: a trace has at least one row")
    layers = tuple(sorted({layer for batch in batches.values() for layer in batch}))
    requests = []
    for name, batch in batches.items():
        request = _request(name, batch, layers, str(path))
        request.num_prompt = len(request)
        if name not in whole_pass:
            known = told.prompt_or_first
            request.num_prompt = min(known, len(request))
        requests.append(request)
    notes = [STEPS_DERIVED]
    if whole_pass:
        notes.append(_ONE_PASS)
    if told.prompt_tokens is None and len(whole_pass) < len(batches):
        notes.append(_AS_GENERATED)
    if requests[0].expert_weights is not None:
        notes.append(_WEIGHTS)
    first_layers = layers == tuple(range(len(layers)))  # then zeros tell which are dense
    origin = _origin(path, "JSON lines", notes, None if first_layers else layers)
    return assemble(requests, told, origin)


def _take(record: Any, where: str, batches: dict[str, _Batch]) -> str:
    """Put one line where it belongs; return the name of its batch."""
    if not isinstance(record, Mapping) or "topk_experts" not in record:
        keys = ", ".join(map(str, list(record)[:6])) if isinstance(record, Mapping) else record
        raise TraceError(f"{where} has {keys}: must have layer, batch_id and topk_experts")
    layer = record.get("layer")
    if not isinstance(layer, int) or isinstance(layer, bool) or layer < 0:
        raise TraceError(f"{where}: layer is {layer!r}: must be an index")
    key = record.get("request_id")
    key = record.get("batch_id") if key is None else key
    if key is None:
        raise TraceError(f"{where}: has no batch_id: must name its batch")
    source = record.get("source_file")
    name = f"{source}, request {key}" if source else f"request {key}"
    batch = batches.setdefault(name, {})
    if layer in batch:
        raise TraceError(f"{where}: layer {layer} of {name} is there twice: must be once")
    ids = _matrix(record["topk_experts"], "iu", f"{where}: topk_experts")
    if ids.max() >= NO_EXPERT or ids.min() < -1:
        raise TraceError(f"{where}: topk_experts go from {ids.min()} to {ids.max()}: must be ids")
    weights = record.get("topk_weights")
    held = None if weights is None else _matrix(weights, "fiu", f"{where}: topk_weights")
    if held is not None and held.shape != ids.shape:
        rule = f"must be {list(ids.shape)}, as topk_experts"
        raise TraceError(f"{where}: topk_weights are {list(held.shape)}: {rule}")
    if held is not None and not np.abs(held).max() <= MOST_WEIGHT:
        raise TraceError(
            f"{where}: topk_weights reach {held.max()}: must be at most {MOST_WEIGHT:g}"
        )
    batch[layer] = (ids.astype(np.int32), None if held is None else held.astype(np.float32))
    return name


def _matrix(value: Any, kinds: str, where: str) -> NDArray[Any]:
    try:
        array = np.asarray(value) if isinstance(value, list) else np.zeros(0)
    except ValueError:
        raise TraceError(f"{where}: rows of unequal lengths: must be [tokens, k]") from None
    if array.ndim != 2 or array.size == 0 or array.dtype.kind not in kinds:
        raise TraceError(
            f"{where}: is {array.dtype}{list(array.shape)}: must be numbers [tokens, k]"
        )
    return array


def _request(name: str, batch: _Batch, layers: tuple[int, ...], file: str) -> Routed:
    """Return a batch's layers side by side."""
    first = batch[next(iter(batch))]
    for layer in layers:
        if layer not in batch:
            raise TraceError(f"{file}: {name} lacks layer {layer}: must have all {len(layers)}")
        ids, held = batch[layer]
        if ids.shape != first[0].shape or (held is None) != (first[1] is None):
            rule = (
                f"must be {list(first[0].shape)}, with weights as in its other layers, or without"
            )
            raise TraceError(f"{file}: {name}: layer {layer} is {list(ids.shape)}: {rule}")
    weights = [part for layer in layers if (part := batch[layer][1]) is not None]
    return Routed(
        name,
        np.stack([batch[layer][0] for layer in layers], axis=1),
        len(first[0]),
        expert_weights=np.stack(weights, axis=1) if weights else None,
    )


def _origin(
    path: Path, form: str, notes: Iterable[str], layers: tuple[int, ...] | None = None
) -> Origin:
    return Origin(
        file=str(path),
        what=f"moe-balance {form}",
        recorder="moe-balance",
        weight_semantics="applied",
        zero_means_dense=True,
        layer_indices=layers,
        notes=tuple(notes),
    )
