"""Reads the heads of safetensors files: name, shape and bytes of each tensor; no weights.

A file begins with the length of a JSON text in 8 bytes, little-endian, and that text, which maps each name
to its type, shape and place (huggingface/safetensors README, "Format").
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hwmodels.errors import HardwareError
from hwmodels.gguf_header import Tensor

_MOST_BYTES = 100_000_000
"""The longest header that the format allows."""
_LONGEST_NAME = 255
_MOST_PLACE = 2**63
_BROKEN = (ValueError, KeyError, TypeError, AttributeError, OverflowError)


def read_safetensors(path: Path) -> tuple[Tensor, ...]:
    """Return the tensors of a file, an index (``*.safetensors.index.json``), or a folder with either.

    A tensor's bits are the bytes of its place: packed formats show fewer elements than weights. Raises
    HardwareError for a file that is broken, or a part that is missing; OSError if it cannot be opened.
    """
    files = _files(path)
    return tuple(tensor for file in files for tensor in _read(file))


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        indexes = sorted(path.glob("*.safetensors.index.json"))
        if indexes:
            return _indexed(indexes[0])
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise HardwareError(f"{path}: no *.safetensors file in this folder")
        return files
    return _indexed(path) if path.name.endswith(".json") else [path]


def _indexed(index: Path) -> list[Path]:
    try:
        places = json.loads(index.read_text(encoding="utf-8")).get("weight_map")
    except (ValueError, AttributeError, RecursionError) as error:
        raise HardwareError(f"{index}: no index: it is not JSON of the right form") from error
    if not isinstance(places, dict) or not places:
        raise HardwareError(f"{index}: weight_map: missing, must be given")
    names = sorted(set(map(str, places.values())))
    for name in names:
        if (
            not name
            or len(name) > _LONGEST_NAME
            or not name.isprintable()
            or Path(name).name != name
        ):
            raise HardwareError(f"{index}: weight_map: {name[:60]!r}: must be a file beside it")
    files = [index.with_name(name) for name in names]
    for file in files:
        if not file.exists():
            raise HardwareError(f"{file}: missing, a part of {index.name}")
    return files


def _read(path: Path) -> list[Tensor]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= _MOST_BYTES:
            raise HardwareError(f"{path}: no safetensors file: its header has {size} bytes")
        text = file.read(size)
    if len(text) < size:
        raise HardwareError(
            f"{path}: cut short: its header has {size} bytes, {len(text)} are there"
        )
    try:
        entries = json.loads(text)
        return [_tensor(name, e) for name, e in entries.items() if name != "__metadata__"]
    except (*_BROKEN, RecursionError) as error:
        raise HardwareError(f"{path}: no safetensors file: its header is not understood") from error


def _tensor(name: str, entry: Any) -> Tensor:
    first, last = entry["data_offsets"]
    if not (isinstance(first, int) and isinstance(last, int) and 0 <= first <= last < _MOST_PLACE):
        raise ValueError
    return Tensor(name, tuple(int(size) for size in entry["shape"]), 8.0 * (last - first))
