"""Tensors of a Hugging Face folder, read one by one out of its safetensors files, single or sharded.

A file is 8 bytes of length, a JSON head that says where each tensor lies, and the tensors. Reads go
straight into the tensor's memory: a file that is cut meanwhile is a short read with a message, where a
memory map would end the process.
"""

from __future__ import annotations

import json
import os
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from real.aligned_io import OpenFile, bytes_view, fault_of, read_exactly
from real.errors import RealError

_LONGEST_HEAD_BYTES = 100_000_000
"""The longest head that the format allows."""

FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Entry(NamedTuple):
    """One tensor of a file: its type as the file names it, its shape, and where its bytes lie."""

    file: TensorFile
    name: str
    type: str
    shape: tuple[int, ...]
    first_byte: int

    @property
    def where(self) -> str:
        """File and name, for a message."""
        return f"{self.file.path}: {self.name}"

    def read(self, target: Tensor, index: int | None = None) -> None:
        """Fill a contiguous tensor with this one, or with its ``index``-th part along the first axis.

        Raises
        ------
        RealError
            Another shape or type than the target's, or a short read.
        """
        shape = self.shape if index is None else self.shape[1:]
        if tuple(target.shape) != shape or FLOATS.get(self.type) != target.dtype:
            raise RealError(
                f"{self.where}: is {self.type} of shape {list(shape)}: must be {target.dtype} of shape "
                f"{list(target.shape)}, as the other experts"
            )
        place = self.first_byte + (index or 0) * target.nbytes
        flat = bytes_view(target.view(-1).view(torch.uint8))
        read_exactly(self.file.opened, self.file.path, place, flat, self.name)


class TensorFile:
    """One safetensors file, open until closed.

    Raises
    ------
    RealError
        It cannot be opened, is cut, or its head makes no sense.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with fault_of(path, "cannot open"):
            self.opened = OpenFile(
                os.open(path, os.O_RDONLY), True, ""
            )  # True: cache kept as it is
        try:
            self.entries = self._read_head()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; more than once is fine."""
        if self.opened.descriptor >= 0:
            os.close(self.opened.descriptor)
            self.opened = self.opened._replace(descriptor=-1)

    def _read_head(self) -> dict[str, Entry]:
        file_bytes = os.fstat(self.opened.descriptor).st_size
        head_bytes = int.from_bytes(self._bytes(0, min(8, file_bytes)), "little")
        if not 2 <= head_bytes <= min(_LONGEST_HEAD_BYTES, file_bytes - 8):
            raise RealError(
                f"{self.path}: its head has {head_bytes} bytes and the file {file_bytes}: "
                "it is cut, or no safetensors file"
            )
        try:
            said = json.loads(self._bytes(8, head_bytes))
            said.pop("__metadata__", None)
            entries = {name: self._entry(name, s, 8 + head_bytes) for name, s in said.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RealError(f"{self.path}: its head is damaged: {error}") from error
        ends = [8 + head_bytes, *(8 + head_bytes + s["data_offsets"][1] for s in said.values())]
        if max(ends) != file_bytes:
            raise RealError(
                f"{self.path}: has {file_bytes} bytes: must have {max(ends)}, as its head says; "
                "it is cut or damaged, so download or save it again"
            )
        return entries

    def _entry(self, name: str, said: dict[str, Any], first_byte: int) -> Entry:
        first, last = said["data_offsets"]
        shape, known = tuple(said["shape"]), FLOATS.get(said["dtype"])
        fits = all(isinstance(number, int) for number in (first, last, *shape))
        fits = fits and (known is None or last - first == prod(shape) * known.itemsize)
        if not (0 <= first <= last and min(shape, default=0) >= 0 and fits):
            raise ValueError(f"{name} has bytes {first} to {last}, and its shape is {list(shape)}")
        return Entry(self, name, said["dtype"], shape, first_byte + first)

    def _bytes(self, offset: int, count: int) -> bytes:
        target = bytearray(count)
        read_exactly(self.opened, self.path, offset, memoryview(target), "its head")
        return bytes(target)


class Shards:
    """All tensors of a folder, by name; a context manager that closes the files.

    Parameters
    ----------
    folder
        With ``model.safetensors.index.json`` and its shards, or ``*.safetensors`` alone.

    Raises
    ------
    RealError
        No such folder, a shard is missing or broken, or lacks a tensor that the index promises.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[TensorFile] = []
        self.entries: dict[str, Entry] = {}
        promised, paths = _promised(folder)
        try:
            for path in paths:
                self.files.append(TensorFile(path))
                self.entries.update(self.files[-1].entries)
            for name, file in promised.items():
                if name not in self.entries:
                    raise RealError(f"{folder / file}: {name}: missing, though the index names it")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close all files."""
        for file in self.files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_json(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file; RealError if there is none."""
    try:
        with fault_of(path, "cannot read"):
            said = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise RealError(f"{path}: is no JSON: {error}") from error
    if not isinstance(said, dict):
        raise RealError(f"{path}: must be a mapping")
    return said


def _promised(folder: Path) -> tuple[dict[str, str], list[Path]]:
    """Return the file of each tensor, as an index says if there is one, and the files."""
    if not folder.is_dir():
        raise RealError(f"{folder}: no such folder; name one with config.json and *.safetensors")
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if indexes:
        places = read_json(indexes[0]).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise RealError(f"{indexes[0]}: weight_map: missing, must be given")
        files = sorted({str(file) for file in places.values()})
        return {name: str(file) for name, file in places.items()}, [folder / f for f in files]
    single = folder / "model.safetensors"
    paths = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if not paths:
        raise RealError(f"{folder}: no *.safetensors file in this folder")
    return {}, paths
