"""Where experts wait: all of them in host memory, and the shape that every store has.

A store holds the bytes of every expert, one record of ``slot_bytes`` each, in key order. It knows
nothing of policies or of the compute device's memory. Sources of weights are read once, when a store
is built: :class:`real.synthetic.Synthetic`, or a model or checkpoint (:mod:`real.checkpoint`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Protocol, Self

from torch import Tensor

from real.device import Device
from real.experts import DTYPES, ExpertFormat, ExpertWeights
from sim.types import ConfigError, KeySpace

Progress = Callable[[int, int], None]
"""Told how many experts are written, and of how many."""


class ExpertSource(Protocol):
    """Where weights come from; read one expert after another while a store is built."""

    @property
    def num_layers(self) -> int:
        """Number of MoE layers."""
        ...

    @property
    def num_experts(self) -> int:
        """Number of experts in each."""
        ...

    @property
    def format(self) -> ExpertFormat:
        """Shape and dtype of every expert, in full precision."""
        ...

    @property
    def source(self) -> dict[str, object]:
        """Where the weights come from, for the header of a file."""
        ...

    def expert(self, layer: int, expert: int) -> ExpertWeights:
        """Return the weights of one expert, in any float dtype; not to be written to."""
        ...


@dataclass(frozen=True)
class StoreShape:
    """What a store holds: how many experts, in which format each bank, and where each lies.

    Parameters
    ----------
    num_layers, num_experts
        MoE layers, and experts in each.
    formats
        One a bank; those from ``num_layers`` on are low-precision copies.
    """

    num_layers: int
    num_experts: int
    formats: tuple[ExpertFormat, ...]

    @cached_property
    def keys(self) -> KeySpace:
        """Keys of the experts, low-precision copies included."""
        return KeySpace(self.num_layers, self.num_experts, len(self.formats) // self.num_layers)

    @cached_property
    def bank_offsets(self) -> tuple[int, ...]:
        """First byte of each bank, and of what follows the last."""
        sizes = (format.slot_bytes * self.num_experts for format in self.formats)
        return tuple(accumulate(sizes, initial=0))

    @property
    def total_bytes(self) -> int:
        """Bytes of all records."""
        return self.bank_offsets[-1]

    def record(self, key: int) -> tuple[int, int]:
        """Return where the record of an expert begins, and its bytes."""
        bank, expert = divmod(key, self.num_experts)
        size = self.formats[bank].slot_bytes
        return self.bank_offsets[bank] + expert * size, size


class Store:
    """The experts' bytes, by key; a context manager that closes itself."""

    def __init__(self, shape: StoreShape) -> None:
        self.shape = shape

    @property
    def num_layers(self) -> int:
        """Number of MoE layers."""
        return self.shape.num_layers

    @property
    def num_experts(self) -> int:
        """Number of experts in a layer."""
        return self.shape.num_experts

    @property
    def num_copies(self) -> int:
        """Copies of each expert: 2 with low-precision ones."""
        return self.shape.keys.num_copies

    @property
    def keys(self) -> KeySpace:
        """Keys of the experts, low-precision copies included."""
        return self.shape.keys

    @property
    def formats(self) -> tuple[ExpertFormat, ...]:
        """Format of each bank."""
        return self.shape.formats

    def format_of(self, key: int) -> ExpertFormat:
        """Return the format of one expert."""
        return self.shape.formats[key // self.shape.num_experts]

    def close(self) -> None:
        """Give back memory and files; more than once is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class RAMStore(Store):
    """All experts in one buffer of host memory, which a CUDA device pins.

    Parameters
    ----------
    shape
        What it holds.
    buffer
        uint8[shape.total_bytes], 4096-aligned.
    """

    def __init__(self, shape: StoreShape, buffer: Tensor) -> None:
        super().__init__(shape)
        self._buffer: Tensor | None = buffer

    def bytes_of(self, key: int) -> Tensor:
        """Return the bytes of one expert: a uint8[slot_bytes] view of host memory."""
        if self._buffer is None:
            raise ValueError("the store is closed")
        offset, size = self.shape.record(key)
        return self._buffer[offset : offset + size]

    def close(self) -> None:
        """Let go of the memory; views that are still held keep it."""
        self._buffer = None


def shape_of(source: ExpertSource) -> StoreShape:
    """Return the shape of a store that would be built from a source."""
    full = (source.format,) * source.num_layers
    low = source.low_format if isinstance(source, LowCopies) else None
    formats = full if low is None else full + (low,) * source.num_layers
    return StoreShape(source.num_layers, source.num_experts, formats)


def build_ram(source: ExpertSource, device: Device, progress: Progress | None = None) -> RAMStore:
    """Return a store in host memory with all experts of ``source``."""
    shape = shape_of(source)
    buffer = device.host_buffer(shape.total_bytes)
    for key, weights in records(source, shape):
        offset, size = shape.record(key)
        shape.formats[key // shape.num_experts].pack(weights, buffer[offset : offset + size])
        if progress is not None:
            progress(key + 1, len(shape.keys))
    return RAMStore(shape, buffer)


def records(source: ExpertSource, shape: StoreShape) -> Iterator[tuple[int, ExpertWeights]]:
    """Yield every key and its weights, in key order, each expert's low copy after all full ones."""
    for key in range(len(shape.keys)):
        layer, expert = shape.keys.unpack(key)
        yield key, source.expert(layer, expert)


class LowCopies:
    """A source whose experts have a second copy each, of lower precision."""

    def __init__(self, full: ExpertSource, dtype: str) -> None:
        self._full = full
        format = full.format
        if dtype not in DTYPES or DTYPES[dtype].itemsize >= format.torch_dtype.itemsize:
            raise ConfigError(
                f"low-precision copies: dtype = {dtype}: must be smaller than {format.dtype}"
            )
        active = format.activation_dtype or format.dtype
        self.low_format = replace(format, dtype=dtype, activation_dtype=active)

    @property
    def num_layers(self) -> int:
        """Number of MoE layers."""
        return self._full.num_layers

    @property
    def num_experts(self) -> int:
        """Number of experts in each."""
        return self._full.num_experts

    @property
    def format(self) -> ExpertFormat:
        """Format of the full-precision copies."""
        return self._full.format

    @property
    def source(self) -> dict[str, object]:
        """Where the weights come from."""
        return self._full.source

    def expert(self, layer: int, expert: int) -> ExpertWeights:
        """Return the weights of one expert in full precision; a store converts them itself."""
        return self._full.expert(layer, expert)


def with_low_copies(source: ExpertSource, dtype: str = "int8") -> LowCopies:
    """Return ``source`` with a copy of every expert in ``dtype``, for policies that fall back on them.

    Raises
    ------
    ConfigError
        ``dtype`` is not smaller than the experts' own.
    """
    return LowCopies(source, dtype)
