"""Reads the uses of experts out of a llama.cpp importance matrix (imatrix GGUF).

Beside the sums of each expert tensor ``blk.<layer>.ffn_{gate,up,down}_exps.weight`` is a tensor ``.counts``,
F32 [1, num_experts]: the tokens routed to each expert. ``imatrix.chunk_count`` chunks of
``imatrix.chunk_size`` tokens were run, which tells top-k. The order is lost: counts, all of them one sample.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from traces.counts import ExpertCounts
from traces.importers.counted import counted
from traces.importers.gguf_file import GGUFFile, read_gguf_file
from traces.importers.routed import Origin
from traces.importers.told import Told
from traces.trace import TraceError

_COUNTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|gate_up|down)_exps\.weight\.counts")
_KINDS = ("gate", "up", "gate_up", "down")  # the first three see a token before the last does


def read(path: Path, told: Told) -> ExpertCounts:
    """Return the uses of each expert; raises TraceError for a file without them.

    A matrix in the older binary form, or made of one, holds no uses by expert.
    """
    file = read_gguf_file(path)
    counts = _by_layer(path, file)
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
        detail=", ".join(_texts(file, "imatrix.datasets")),
        layer_indices=layers,
    )
    return counted(values[None], told, origin, "recording", _top_k(file, values))


def _by_layer(path: Path, file: GGUFFile) -> dict[int, NDArray[np.float64]]:
    """Return the counts of each layer's experts, of the first kind of tensor that has them."""
    found: dict[tuple[int, str], NDArray[np.float64]] = {}
    for name, values in file.tensors.items():
        if match := _COUNTS.fullmatch(name):
            found[int(match[1]), match[2]] = values.astype(np.float64).reshape(-1)
    if not found:
        raise TraceError(
            f"{path}: no tensor blk.*.ffn_*_exps.weight.counts: a model without experts, or no imatrix"
        )
    layers = sorted({layer for layer, _ in found})
    return {
        layer: next(found[layer, kind] for kind in _KINDS if (layer, kind) in found)
        for layer in layers
    }


def _top_k(file: GGUFFile, values: NDArray[np.float64]) -> int | None:
    """Return the experts a token had: a layer's uses over the tokens that were run, if that is whole.

    The last layer may have seen fewer tokens, those with an output.
    """
    number, size = (_whole(file, f"imatrix.{name}") for name in ("chunk_count", "chunk_size"))
    if not number or not size:
        return None
    uses = np.median(values.sum(axis=1)) / (number * size)
    return int(uses) if uses >= 1 and uses == int(uses) else None


def _whole(file: GGUFFile, key: str) -> int:
    value = file.values.get(key)
    return value if isinstance(value, int) else 0


def _texts(file: GGUFFile, key: str) -> list[str]:
    value = file.values.get(key)
    return (
        [Path(item).name for item in value if isinstance(item, str)]
        if isinstance(value, list)
        else []
    )
