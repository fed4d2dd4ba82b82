"""Reads the uses of experts out of a llama.cpp importance matrix (imatrix GGUF).

Beside the sums of each expert tensor ``blk.<layer>.ffn_{gate,up,down}_exps.weight`` is a tensor ``.counts``,
F32 [1, num_experts]: the tokens routed to each expert. ``imatrix.chunk_count`` chunks of
``imatrix.chunk_size`` tokens were run, which tells top-k. The order is lost: counts, all of them one sample.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.counts import ExpertCounts
from traces.importers.counted import counted
from traces.importers.routed import Origin
from traces.importers.told import Told
from traces.trace import TraceError

_MAGIC = b"GGUF"
_COUNTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|gate_up|down)_exps\.weight\.counts")
_KINDS = ("gate", "up", "gate_up", "down")  # the first three see a token before the last does
_BROKEN = (
    ValueError,
    KeyError,
    IndexError,
    OSError,
    OverflowError,
    TypeError,
    UnicodeError,
    MemoryError,
    AssertionError,
)


def read(path: Path, told: Told) -> ExpertCounts:
    """Return the uses of each expert; raises TraceError for a file without them.

    A matrix in the older binary form, or made of one, holds no uses by expert.
    """
    reader = _open(path)
    counts = _by_layer(path, reader)
    layers = tuple(sorted(counts))
    sizes = {len(row) for row in counts.values()}
    if len(sizes) > 1:
        raise TraceError(f"{path}: layers of {sorted(sizes)} experts: must be of one size")
    values = np.stack([counts[layer] for layer in layers])
    if values.shape[1] > 1 and (values == values[:, :1]).all():
        raise TraceError(
            f"{path}: every expert of a layer has the same count: made of an older imatrix, which counted "
            "chunks, not the tokens of an expert"
        )
    origin = Origin(
        file=str(path),
        what="imatrix",
        recorder="llama.cpp imatrix",
        detail=", ".join(_texts(reader, "imatrix.datasets")),
        layer_indices=layers,
    )
    return counted(values[None], told, origin, "recording", _top_k(reader, values))


def _open(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    if magic != _MAGIC:
        rule = "must be GGUF (an older binary imatrix has no counts by expert)"
        raise TraceError(f"{path}: begins with {magic!r}: {rule}")
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError:
        raise TraceError(f"{path}: reading it needs the package gguf: pip install gguf") from None
    try:
        return GGUFReader(path)
    except _BROKEN as error:
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise TraceError(f"{path}: not a whole GGUF file: {reason}") from None


def _by_layer(path: Path, reader: Any) -> dict[int, NDArray[np.float64]]:
    """Return the counts of each layer's experts, of the first kind of tensor that has them."""
    found: dict[tuple[int, str], NDArray[np.float64]] = {}
    for tensor in reader.tensors:
        if match := _COUNTS.fullmatch(tensor.name):
            found[int(match[1]), match[2]] = np.asarray(tensor.data, dtype=np.float64).reshape(-1)
    if not found:
        raise TraceError(
            f"{path}: no tensor blk.*.ffn_*_exps.weight.counts: a model without experts, or no imatrix"
        )
    layers = sorted({layer for layer, _ in found})
    return {
        layer: next(found[layer, kind] for kind in _KINDS if (layer, kind) in found)
        for layer in layers
    }


def _top_k(reader: Any, values: NDArray[np.float64]) -> int | None:
    """Return the experts a token had: a layer's uses over the tokens that were run, if that is whole.

    The last layer may have seen fewer tokens, those with an output.
    """
    number, size = (_whole(reader, f"imatrix.{name}") for name in ("chunk_count", "chunk_size"))
    if not number or not size:
        return None
    uses = np.median(values.sum(axis=1)) / (number * size)
    return int(uses) if uses >= 1 and uses == int(uses) else None


def _whole(reader: Any, key: str) -> int:
    value = _value(reader, key)
    return value if isinstance(value, int) else 0


def _texts(reader: Any, key: str) -> list[str]:
    value = _value(reader, key)
    return [Path(item).name for item in value if isinstance(item, str)] if value else []


def _value(reader: Any, key: str) -> Any:
    """Return a value of the header; None where there is none that can be read."""
    field = reader.get_field(key)
    try:
        return None if field is None else field.contents()
    except _BROKEN:
        return None
