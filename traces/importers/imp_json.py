"""Reads the ``diagnostics.moe_expert_trace`` of kekzl/imp: decode only, a record a token and MoE layer.

JSON: a list of records ``[layer, e0, e1, ...]``, or of the same numbers without the inner lists, by itself or
under ``trace``, ``entries`` or ``data`` of an object that may name ``top_k``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.importers.assemble import assemble
from traces.importers.cells import EMPTY, padded
from traces.importers.checked import is_whole
from traces.importers.routed import Origin, Routed
from traces.importers.sources import read_json
from traces.importers.told import Told, agreed, needed
from traces.trace import Trace, TraceError

_KEYS = ("trace", "entries", "data")
_NOTES = (
    "decode only: position 0 is the first sampled token; where a request ends is not in the source",
    "ids only: no weights, token ids or text; the order of the slots is the file's",
)


def read(path: Path, told: Told) -> Trace:
    """Return the records as one request of decoded tokens; ``told`` must say the number of experts.

    Raises
    ------
    TraceError
        For JSON of another shape, a token that lacks a layer, and numbers without lists where nobody tells
        the top-k.
    """
    records, header = _records(path)
    top_k = agreed(str(path), "top_k", told.top_k, _whole(header.get("top_k"), path))
    rows = _rows(path, records, top_k)
    layers = np.unique(rows[:, 0])
    ids, found = _tokens(path, rows, layers)
    origin = Origin(
        file=str(path),
        what="imp moe_expert_trace",
        recorder="imp",
        num_experts=_whole(header.get("num_experts"), path),
        top_k=top_k,
        layer_indices=tuple(layers.tolist()),
        notes=(*_NOTES, *found),
    )
    return assemble([Routed("the request", ids, 0)], told, origin)


def _records(path: Path) -> tuple[list[Any], dict[str, Any]]:
    loaded = read_json(path)
    header = loaded if isinstance(loaded, dict) else {}
    found = next((header[key] for key in _KEYS if isinstance(header.get(key), list)), loaded)
    if not isinstance(found, list) or not found:
        rule = f"must be a list of records, or an object with one as {', '.join(_KEYS)}"
        raise TraceError(f"{path}: {rule}, not empty")
    return found, header


def _whole(value: object, path: Path) -> int | None:
    if value is None or (isinstance(value, int) and is_whole(value, 1)):
        return value
    raise TraceError(f"{path}: top_k or num_experts is {value!r}: must be a whole number >= 1")


def _rows(path: Path, records: list[Any], top_k: int | None) -> NDArray[np.int32]:
    """Return layer and experts of each record, int32[num_records, 1 + k], ``EMPTY`` behind short ones."""
    if not isinstance(records[0], list):
        width = 1 + needed(str(path), "the choices a token has", top_k, "--top-k")
        if len(records) % width:
            rule = f"must be a multiple of {width}: a layer and {width - 1} experts a record"
            raise TraceError(f"{path}: {len(records)} numbers: {rule}")
        records = [records[at : at + width] for at in range(0, len(records), width)]
    for number, record in enumerate(records):
        if not isinstance(record, list) or len(record) < 2 or not all(map(is_whole, record)):
            rule = "must be [layer, expert, ...], whole numbers >= 0"
            raise TraceError(f"{path}: record {number} is {str(record)[:60]}: {rule}")
        if top_k is not None and len(record) > 1 + top_k:
            rule = f"must be at most top_k {top_k}"
            raise TraceError(f"{path}: record {number} has {len(record) - 1} experts: {rule}")
    return padded(records, EMPTY, np.int32)


def _tokens(
    path: Path, rows: NDArray[np.int32], layers: NDArray[np.int32]
) -> tuple[NDArray[np.int32], list[str]]:
    """Return ids int32[num_tokens, num_layers, k]; a last token that broke off is dropped."""
    whole = len(rows) // len(layers) * len(layers)
    if not whole:
        raise TraceError(
            f"{path}: {len(rows)} records of {len(layers)} layers: must be a token at least"
        )
    expected = np.resize(layers, len(rows))
    wrong = np.flatnonzero(rows[:, 0] != expected)
    if len(wrong):
        at = int(wrong[0])
        rule = f"must be {expected[at]}: the layers of a token follow one another"
        raise TraceError(f"{path}: record {at} is of layer {rows[at, 0]}: {rule}")
    found = ["repaired: the last token broke off and was dropped"] * (whole < len(rows))
    return rows[:whole, 1:].reshape(-1, len(layers), rows.shape[1] - 1), found
