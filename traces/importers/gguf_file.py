"""Reads a small GGUF file whole: its values and its float tensors; every length is held against the file.

The layout is that of the GGUF specification, version 2 and 3, little-endian (ggml-org/ggml docs/gguf.md).
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from traces.trace import TraceError

MAGIC = b"GGUF"
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_TEXT, _ARRAY = 8, 9
_FLOATS = {0: "<f4", 1: "<f2"}
"""ggml's numbers of the types of plain floats."""
_ALIGNMENT = 32
_DEEPEST = 8


class GGUFFile(NamedTuple):
    """Values by key, and tensors by name; tensors of packed formats are left out."""

    values: dict[str, Any]
    tensors: dict[str, NDArray[np.floating]]


def read_gguf_file(path: Path) -> GGUFFile:
    """Return what a file holds; raises TraceError for one that is no GGUF, is cut short, or lies."""
    data = _mapped(path)
    magic = bytes(data[:4])
    if magic != MAGIC:
        rule = "must be GGUF (an older binary imatrix has no counts by expert)"
        raise TraceError(f"{path}: begins with {magic!r}: {rule}")
    try:
        return _Walk(data).file()
    except (struct.error, ValueError, OverflowError) as error:
        reason = " ".join(str(error).split())[:120]
        raise TraceError(f"{path}: not a whole GGUF file: {reason}") from None


def _mapped(path: Path) -> memoryview:
    """Return a view of the file, which may be one of weights, larger than memory."""
    try:
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None


class _Walk:
    """Goes through the bytes once; whatever reaches beyond their end is a ValueError."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 4

    def file(self) -> GGUFFile:
        version = self._scalar("I")
        if version not in (2, 3):
            raise ValueError(f"version {version}: must be 2 or 3")
        num_tensors, num_pairs = self._scalar("Q"), self._scalar("Q")
        values = {}
        for _ in range(num_pairs):
            key = self._text()
            values[key] = self._value(self._scalar("I"))
        heads = [self._head() for _ in range(num_tensors)]
        align = values.get("general.alignment", _ALIGNMENT)
        if not isinstance(align, int) or not 0 < align <= len(self._data):
            raise ValueError(f"general.alignment = {align}: must be a number of bytes")
        begin = -(-self._at // align) * align
        return GGUFFile(
            values,
            {
                n: self._tensor(begin + at, shape, kind)
                for n, shape, kind, at in heads
                if kind in _FLOATS
            },
        )

    def _head(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return a tensor's name, shape (innermost first), type and place."""
        name, num_dims = self._text(), self._scalar("I")
        if not 0 < num_dims <= _DEEPEST:
            raise ValueError(f"{name[:40]!r} has {num_dims} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(num_dims))
        return name, shape, self._scalar("I"), self._scalar("Q")

    def _tensor(self, at: int, shape: tuple[int, ...], kind: int) -> NDArray[np.floating]:
        dtype = np.dtype(_FLOATS[kind])
        count = 1
        for size in shape:
            count *= size
        if at + count * dtype.itemsize > len(self._data):
            raise ValueError(f"a tensor of shape {shape} reaches beyond the end")
        found: NDArray[np.floating] = np.frombuffer(
            self._data, dtype, count, min(at, len(self._data))
        )
        return found.reshape(shape[::-1])

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            return self._scalar(_SCALARS.get(kind, ""))
        item, count = self._scalar("I"), self._scalar("Q")
        least = struct.calcsize(f"<{_SCALARS[item]}") if item in _SCALARS else 8
        if depth == _DEEPEST or count * least > len(self._data) - self._at:
            raise ValueError(
                f"an array of {count} values reaches beyond the end, or is nested too deep"
            )
        return [self._value(item, depth + 1) for _ in range(count)]

    def _text(self) -> str:
        return self._bytes(self._scalar("Q")).decode("utf-8")

    def _scalar(self, code: str) -> Any:
        if not code:
            raise ValueError("a value of a type that is not known")
        return struct.unpack(f"<{code}", self._bytes(struct.calcsize(f"<{code}")))[0]

    def _bytes(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise ValueError("cut short: it ends in its header")
        self._at, begin = end, self._at
        return bytes(self._data[begin:end])
