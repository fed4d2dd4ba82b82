"""Where experts wait on storage: one file of page-aligned records, read past the page cache.

The file is a header, one checksum a record, then the records in key order. The header says what the
experts are and where they come from. All of it is little-endian::

    8 bytes  magic      4 bytes  version      4 bytes  length of the JSON      4 bytes  checksum
    JSON: num_layers, num_experts, formats (those there are), banks (format of each), source, sizes
    4 bytes a key: CRC-32 of its record
    zeros up to the next page, then the records

The checksum in the header is that of the JSON and of all that follows it up to the padding.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from real.aligned_io import (
    OpenFile,
    aligned_bytes,
    bytes_view,
    fault_of,
    open_for_reads,
    read_exactly,
    write_exactly,
    written_whole,
)
from real.errors import RealError
from real.experts import PAGE_BYTES, ExpertFormat
from real.store import ExpertSource, Progress, Store, StoreShape, records, shape_of
from sim.types import ConfigError

MAGIC = b"GRNROOM1"
VERSION = 1
_PREFIX = struct.Struct("<8sIII")
_LONGEST_JSON_BYTES = 1 << 28


class Header(NamedTuple):
    """What the head of a file says."""

    shape: StoreShape
    source: dict[str, Any]
    checksums: NDArray[np.uint32]
    first_record_bytes: int
    """Where the records begin; also the length of the header with its padding."""

    @property
    def file_bytes(self) -> int:
        """Length of the whole file."""
        return self.first_record_bytes + self.shape.total_bytes


class FileStore(Store):
    """Experts in one file.

    Parameters
    ----------
    path
        A file that :func:`build_file` wrote.
    expected
        What it must hold, or None if anything will do.
    direct
        Whether to ask for O_DIRECT.

    Attributes
    ----------
    is_direct, why_not
        Whether reads pass the page cache by, and if not why.
    source
        Where the weights come from, as the header says.

    Raises
    ------
    RealError
        The file is missing, cut, of another version, or its header is damaged.
    ConfigError
        It holds other experts than expected.
    """

    def __init__(
        self, path: Path | str, expected: StoreShape | None = None, direct: bool = True
    ) -> None:
        self.path = Path(path)
        with fault_of(self.path, "cannot open"):
            header = read_header(self.path)
        super().__init__(header.shape)
        if expected is not None and expected != header.shape:
            raise ConfigError(
                f"{self.path}: holds {describe(header.shape)}: must hold {describe(expected)}; "
                "build it again, or name another file"
            )
        self.source = header.source
        self._header = header
        self._file: OpenFile | None = open_for_reads(self.path, direct)
        self.is_direct, self.why_not = self._file.is_direct, self._file.why_not
        self._identity = _identity(os.fstat(self._file.descriptor))

    def read(self, key: int, offset: int, target: Tensor) -> None:
        """Read a piece of an expert's record; blocks, and other threads run meanwhile.

        Parameters
        ----------
        key
            Which expert.
        offset
            First byte within the record, a multiple of 4096.
        target
            uint8[n] on the host that begins at a page; n is a multiple of 4096.

        Raises
        ------
        RealError
            A short read, or a fault of the device.
        """
        if self._file is None:
            raise ValueError(f"{self.path}: the store is closed")
        start, size = self.shape.record(key)
        num_bytes = target.numel()
        if offset % PAGE_BYTES or num_bytes % PAGE_BYTES or target.data_ptr() % PAGE_BYTES:
            raise ValueError(f"offset, length and address must be multiples of {PAGE_BYTES}")
        if offset < 0 or offset + num_bytes > size:
            raise ValueError(
                f"bytes {offset} to {offset + num_bytes} are outside a record of {size}"
            )
        first = self._header.first_record_bytes + start + offset
        read_exactly(self._file, self.path, first, bytes_view(target), self._name(key))

    def check_unchanged(self) -> None:
        """Raise RealError if the file is no longer the one that was opened."""
        with fault_of(self.path, "the file went away while in use"):
            now = _identity(os.stat(self.path))
        if now != self._identity:
            raise RealError(
                f"{self.path}: the file changed while in use: its size, time or inode is another; "
                "build it again and leave it alone during a run"
            )

    def verify(self, key: int | None = None) -> None:
        """Compare the bytes of one expert, or of all, with their checksums.

        Raises
        ------
        RealError
            A record is corrupt, or cannot be read.
        """
        keys = range(len(self.keys)) if key is None else (key,)
        buffer = aligned_bytes(max(format.slot_bytes for format in self.formats))
        for each in keys:
            target = buffer[: self.format_of(each).slot_bytes]
            self.read(each, 0, target)
            if zlib.crc32(bytes_view(target)) != self._header.checksums[each]:
                raise RealError(
                    f"{self.path}: {self._name(each)}: its checksum is wrong, so the file is corrupt; "
                    "build it again"
                )

    def close(self) -> None:
        """Close the file; no read may be under way."""
        if self._file is not None:
            os.close(self._file.descriptor)
            self._file = None

    def _name(self, key: int) -> str:
        layer, expert = self.keys.unpack(key)
        low = " (low precision)" if self.keys.is_low(key) else ""
        return f"layer {layer}, expert {expert}{low}"


def build_file(source: ExpertSource, path: Path | str, progress: Progress | None = None) -> Path:
    """Write all experts of ``source`` to a file and return its path.

    The file appears when it is whole and on the device: an interrupted build leaves nothing behind, and a
    file of that name stays as it was until then.

    Raises
    ------
    RealError
        No space, or the folder cannot be written to.
    """
    path = Path(path)
    shape = shape_of(source)
    checksums = np.zeros(len(shape.keys), dtype="<u4")
    head = _header_bytes(shape, source.source, checksums)
    buffer = aligned_bytes(max(format.slot_bytes for format in shape.formats))
    with written_whole(path, len(head) + shape.total_bytes) as descriptor:
        for key, weights in records(source, shape):
            offset, size = shape.record(key)
            target = buffer[:size]
            shape.formats[key // shape.num_experts].pack(weights, target)
            checksums[key] = zlib.crc32(bytes_view(target))
            write_exactly(descriptor, path, len(head) + offset, bytes_view(target))
            if progress is not None:
                progress(key + 1, len(shape.keys))
        head = _header_bytes(shape, source.source, checksums)
        write_exactly(descriptor, path, 0, memoryview(head))
    return path


def read_header(path: Path) -> Header:
    """Return what the head of a file says, after checking that it is whole.

    Raises
    ------
    RealError
        It is no such file, of another version, damaged or cut.
    OSError
        It cannot be read.
    """
    with path.open("rb") as file:
        prefix = file.read(_PREFIX.size)
        if len(prefix) < _PREFIX.size or not prefix.startswith(MAGIC):
            raise RealError(f"{path}: is no file of experts; build one, or name another")
        _, version, json_bytes, checksum = _PREFIX.unpack(prefix)
        if version != VERSION:
            raise RealError(
                f"{path}: version = {version}: must be {VERSION}; build it again with this version"
            )
        body = file.read(min(json_bytes, _LONGEST_JSON_BYTES))
        table = file.read(min(_table_bytes(path, body), _LONGEST_JSON_BYTES))
        header = _parsed(path, body, table, checksum)
        actual_bytes = os.fstat(file.fileno()).st_size
    if actual_bytes != header.file_bytes:
        raise RealError(
            f"{path}: has {actual_bytes} bytes: must have {header.file_bytes}, as its header says; "
            "it was cut or added to, so build it again"
        )
    return header


def describe(shape: StoreShape) -> str:
    """Return the shape of a store in words for a message."""
    words = []
    for format in dict.fromkeys(shape.formats):
        marks = [name for name in ("has_bias", "is_transposed") if getattr(format, name)]
        if not format.has_gate:
            marks.append("no gate")
        size = f"{format.hidden_size} x {format.intermediate_size} {format.dtype}"
        words.append(" ".join([size, *(f"({mark})" for mark in marks)]))
    return f"{shape.num_layers} layers x {shape.num_experts} experts of {' and '.join(words)}"


def _header_bytes(
    shape: StoreShape, source: dict[str, Any], checksums: NDArray[np.uint32]
) -> bytes:
    """Return the head of a file, padded to a page."""
    formats = list(dict.fromkeys(shape.formats))
    said = {
        "num_layers": shape.num_layers,
        "num_experts": shape.num_experts,
        "formats": [asdict(format) for format in formats],
        "banks": [formats.index(format) for format in shape.formats],
        "record_bytes": [format.slot_bytes for format in formats],
        "source": source,
    }
    body = json.dumps(said, sort_keys=True).encode()
    table = checksums.tobytes()
    prefix = _PREFIX.pack(MAGIC, VERSION, len(body), zlib.crc32(body + table))
    head = prefix + body + table
    return head + bytes(-len(head) % PAGE_BYTES)


def _table_bytes(path: Path, body: bytes) -> int:
    """Return the length of the checksums, which the JSON tells; the JSON is not trusted yet."""
    try:
        said = json.loads(body)
        return max(0, 4 * len(said["banks"]) * int(said["num_experts"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise _damaged(path) from error


def _parsed(path: Path, body: bytes, table: bytes, checksum: int) -> Header:
    if zlib.crc32(body + table) != checksum:
        raise _damaged(path)
    said = json.loads(body)
    formats = [ExpertFormat(**fields) for fields in said["formats"]]
    shape = StoreShape(
        said["num_layers"], said["num_experts"], tuple(formats[index] for index in said["banks"])
    )
    length = _PREFIX.size + len(body) + len(table)
    first_record_bytes = length + -length % PAGE_BYTES
    return Header(shape, said["source"], np.frombuffer(table, dtype="<u4"), first_record_bytes)


def _damaged(path: Path) -> RealError:
    return RealError(f"{path}: its header is damaged; build it again")


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
