r"""Reads moepager's ``.mpt``, version 1: which experts were used, by token and layer, with times.

Little-endian: magic ``MPTRACE\0``, u16 version, u16 kind (1 experts, 2 pages), u32 length of a JSON header,
the header, then records of 16 bytes: u64 t_ns, u32 token, u16 layer, u16 expert. Black-box recorders see
only what missed the page cache, and infer the tokens; such files are no routing.
"""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.importers.assemble import assemble
from traces.importers.cells import EMPTY, Cells, pivot
from traces.importers.routed import Origin
from traces.importers.sources import read_bytes
from traces.importers.told import Told, agreed
from traces.trace import NO_EXPERT, Provenance, Trace, TraceError

_MAGIC = b"MPTRACE\0"
_PREAMBLE = struct.Struct("<8sHHI")
_EXPERTS, _PAGES = 1, 2
_RECORD = np.dtype([("t_ns", "<u8"), ("token", "<u4"), ("layer", "<u2"), ("expert", "<u2")])
_INFERRED = ("mincore-scan", "sentinel", "bpftrace")
_NOTES = (
    "decode steps only: position 0 is the first of them; ids only, no weights, token ids or text",
    "slots are in the order of time, which is not that of weight",
)


def read(path: Path, told: Told) -> Trace:
    """Return the records as one request of decoded tokens; a synthetic source stays called synthetic.

    Raises
    ------
    TraceError
        For another version or kind, a partial record, misses only, or more experts a token than top_k.
    """
    header, records = _load(path)
    top_k = agreed(str(path), "top_k", told.top_k, header.get("top_k"))
    cells, found = _cells(path, records, top_k)
    pivoted, layers = pivot(cells, str(path), lambda _: "the request")
    request = replace(pivoted[0].routed, num_prompt=0, first_position=0)
    trace = assemble([request], told, _origin(path, header, layers, found))
    if header["source"] != "synth":
        return trace
    detail = f"moepager generator {json.dumps(header.get('params'))}"
    provenance = Provenance("synthetic", trace.meta.provenance.source, detail)
    return replace(trace, meta=replace(trace.meta, provenance=provenance))


def _load(path: Path) -> tuple[dict[str, Any], NDArray[np.void]]:
    """Return the header and the records, at least one."""
    data = read_bytes(path)
    if len(data) < _PREAMBLE.size or not data.startswith(_MAGIC):
        raise TraceError(f"{path}: begins with {data[:8]!r}: must be {_MAGIC!r} and a header")
    _, version, kind, length = _PREAMBLE.unpack_from(data)
    if version != 1:
        raise TraceError(f"{path}: version is {version}: this Greenroom reads 1")
    if kind != _EXPERTS:
        what = "events of the page cache" if kind == _PAGES else "not known"
        raise TraceError(f"{path}: kind of record is {kind} ({what}): must be {_EXPERTS}, experts")
    body = data[_PREAMBLE.size + length :]
    if len(data) < _PREAMBLE.size + length or len(body) % _RECORD.itemsize or not body:
        rule = f"must be whole ones of {_RECORD.itemsize} bytes, at least one"
        raise TraceError(f"{path}: {len(body)} bytes of records: {rule} (cut short?)")
    header = _header(path, data[_PREAMBLE.size : _PREAMBLE.size + length])
    return header, np.frombuffer(body, dtype=_RECORD)


def _header(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: the header is not JSON: {error}") from None
    if not isinstance(header, dict) or not isinstance(header.get("source"), str):
        raise TraceError(f"{path}: the header is {str(header)[:60]}: must name its source")
    for key in ("n_layers", "n_experts", "top_k"):
        value = header.get(key)
        good = type(value) is int and 0 < value < NO_EXPERT
        if not good and not (key == "top_k" and value is None):
            raise TraceError(f"{path}: header '{key}' is {value!r}: must be a whole number >= 1")
    observation = header.get("observation", "full")
    if observation != "full":
        rule = (
            "must be 'full': what the page cache held is not in the file, so that it is no routing"
        )
        raise TraceError(f"{path}: observation is {observation!r}: {rule}")
    return header


def _cells(path: Path, records: NDArray[np.void], top_k: int | None) -> tuple[Cells, list[str]]:
    """Return one cell a token and layer, experts in order of time, each once."""
    keys = np.stack([records[name].astype(np.int64) for name in ("token", "layer", "expert")], 1)
    keys, first = np.unique(keys, axis=0, return_index=True)
    found = []
    if len(keys) < len(records):
        count = len(records) - len(keys)
        found.append(f"repaired: {count} records that name an expert of a token again were dropped")
    order = np.lexsort((first, records["t_ns"][first], keys[:, 1], keys[:, 0]))
    token, layer, expert = keys[order].T
    begins = np.append(True, (np.diff(token) != 0) | (np.diff(layer) != 0))
    cell = np.cumsum(begins) - 1
    slot = np.arange(len(token)) - np.flatnonzero(begins)[cell]
    if top_k is not None and (slot >= top_k).any():
        at = int(np.argmax(slot >= top_k))
        count = int(slot[cell == cell[at]].max()) + 1
        rule = f"must be at most top_k {top_k} (tokens of a prompt or a batch taken for one?)"
        raise TraceError(f"{path}: token {token[at]}, layer {layer[at]}: {count} experts: {rule}")
    ids = np.full((int(cell[-1]) + 1, int(slot.max()) + 1), EMPTY, dtype=np.int32)
    ids[cell, slot] = expert
    request = np.zeros(len(ids), dtype=np.int64)
    cells = Cells(request=request, token=token[begins], layer=layer[begins], expert_ids=ids)
    return cells, found


def _origin(
    path: Path, header: dict[str, Any], layers: tuple[int, ...], found: list[str]
) -> Origin:
    source, notes = header["source"], [*_NOTES, *found]
    if source in _INFERRED:
        notes.append(
            f"warning: {source} sees no tokens: where one ends was inferred from the layers"
        )
    if layers[-1] >= header["n_layers"]:
        rule = f"must be < n_layers {header['n_layers']}"
        raise TraceError(f"{path}: layer {layers[-1]}: {rule}")
    model = header.get("model_file")
    return Origin(
        file=str(path),
        what="moepager .mpt",
        recorder=f"moepager {source}",
        recorder_version="1",
        model=str(model).removesuffix(".gguf") if model else None,
        num_experts=header["n_experts"],
        top_k=header.get("top_k"),
        layer_indices=layers,
        notes=tuple(notes),
    )
