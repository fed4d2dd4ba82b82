"""Reads the head of a GGUF file: its metadata, and the name, shape and format of each tensor; no weights.

The layout is that of the GGUF specification, version 2 and 3, little-endian (ggml-org/ggml docs/gguf.md).
The formats of ik_llama.cpp are known as well, which the ``gguf`` package does not read.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hwmodels.errors import HardwareError
from hwmodels.quantisation import FORMATS, is_codebook

_MAGIC = b"GGUF"
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_TEXT, _ARRAY = 8, 9
_BROKEN = (struct.error, EOFError, OverflowError, MemoryError, UnicodeDecodeError)
_MOST_BYTES = 2**31
"""More than any header has: a length beyond it is a broken file."""
_KEPT = 4096
"""Arrays that are longer (vocabularies) are read past, not kept."""

_RUNS = (
    (0, "F32 F16 Q4_0 Q4_1"),
    (6, "Q5_0 Q5_1 Q8_0"),
    (10, "Q2_K Q3_K Q4_K Q5_K Q6_K"),
    (16, "IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS"),
    (29, "IQ1_M BF16"),
    (34, "TQ1_0 TQ2_0"),
    (39, "MXFP4 NVFP4"),
    (133, "Q6_0"),
    (137, "IQ2_K IQ3_K IQ4_K IQ5_K IQ6_K"),
    (144, "IQ4_KS IQ2_KS IQ4_KSS"),
    (152, "IQ5_KS IQ2_KT IQ3_KT IQ4_KT IQ3_KS IQ2_KL IQ1_KT"),
)
TYPES = {first + i: name for first, names in _RUNS for i, name in enumerate(names.split())}
"""ggml's numbers of formats; from 133 on those of ik_llama.cpp, which adds 200 for interleaved rows."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a weight file: its name, its shape (innermost first in GGUF), and its bits in all."""

    name: str
    shape: tuple[int, ...]
    bits: float
    is_codebook: bool = False
    """Its weights are indices into a codebook."""

    @property
    def num_weights(self) -> int:
        """How many weights it has."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """The metadata and tensors of a GGUF file, all its parts together."""

    metadata: dict[str, Any]
    tensors: tuple[Tensor, ...]


def read_gguf(path: Path) -> GGUFHeader:
    """Read the header of a file, and of its sister parts where it is one of several.

    Raises HardwareError for what is no GGUF file, is cut short, has a format that is not known, or lacks
    a part; OSError for what cannot be opened.
    """
    parts = _parts(path)
    headers = [_read_part(part) for part in parts]
    count = headers[0].metadata.get("split.count", 1)
    if len(parts) == 1 and isinstance(count, int) and count > 1:
        raise HardwareError(
            f"{path}: one of {count} parts whose name does not end in -00001-of-..."
        )
    tensors = tuple(tensor for header in headers for tensor in header.tensors)
    return GGUFHeader(headers[0].metadata, tensors)


def _parts(path: Path) -> list[Path]:
    found = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if not found:
        return [path]
    parts = [
        path.with_name(f"{found[1]}-{number:05}-of-{found[3]}.gguf")
        for number in range(1, int(found[3]) + 1)
    ]
    for part in parts:
        if not part.exists():
            raise HardwareError(f"{part}: missing, a part of {path.name}")
    return parts


def _read_part(path: Path) -> GGUFHeader:
    with path.open("rb") as file:
        try:
            return _Reader(file, path).header()
        except (*_BROKEN, RecursionError) as error:
            raise HardwareError(f"{path}: cut short or broken: its header ends early") from error


class _Reader:
    """Reads one file from its start."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path

    def header(self) -> GGUFHeader:
        magic = self._file.read(4)
        if magic != _MAGIC:
            raise HardwareError(f"{self._path}: no GGUF file: it begins with {magic!r}")
        version = self._scalar("I")
        if version not in (2, 3):
            raise HardwareError(f"{self._path}: GGUF version = {version}: must be 2 or 3")
        num_tensors, num_pairs = self._scalar("Q"), self._scalar("Q")
        metadata = {}
        for _ in range(num_pairs):
            key = self._text()
            metadata[key] = self._value(self._scalar("I"))
        return GGUFHeader(metadata, tuple(self._tensor() for _ in range(num_tensors)))

    def _tensor(self) -> Tensor:
        name = self._text()
        num_dims = self._scalar("I")
        if not 0 < num_dims <= 8:
            raise EOFError
        shape = tuple(self._scalar("Q") for _ in range(num_dims))
        number = self._scalar("I")
        self._scalar("Q")  # where the weights lie
        known = TYPES.get(number, TYPES.get(number - 200))
        if known is None:
            raise HardwareError(f"{self._path}: {name}: format {number} is not known")
        weights = Tensor(name, shape, 0).num_weights
        return Tensor(name, shape, weights * FORMATS[known], is_codebook(known))

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            return self._scalar(_SCALARS.get(kind, ""))
        item, count = self._scalar("I"), self._scalar("Q")
        code = _SCALARS.get(item)
        if code is not None:
            packed = self._bytes(struct.calcsize(f"<{code}") * count)
            return list(struct.unpack(f"<{count}{code}", packed)) if count <= _KEPT else count
        texts = [self._value(item) for _ in range(count)]
        return texts if count <= _KEPT else count

    def _text(self) -> str:
        return self._bytes(self._scalar("Q")).decode("utf-8")

    def _scalar(self, code: str) -> Any:
        if not code:
            raise EOFError
        return struct.unpack(f"<{code}", self._bytes(struct.calcsize(f"<{code}")))[0]

    def _bytes(self, count: int) -> bytes:
        if count > _MOST_BYTES:
            raise EOFError
        values = self._file.read(count)
        if len(values) < count:
            raise EOFError
        return values
