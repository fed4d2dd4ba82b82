"""Host memory of our own: whole pages, huge ones where the system has them, locked where CUDA is there.

CUDA copies at full speed, and beside the thread that asks, only from memory that is locked. What torch pins
itself it rounds up to a power of two (33 GB become 64) and keeps; so pages of our own are registered, as many
as are wanted, and given back with the last tensor that shows them.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from real.errors import RealError

CHUNK_BYTES = 16 << 30
"""Locked by one call: newer drivers refuse 512 GiB at once, and Ctrl-C is heard between two calls."""


class Pages(mmap.mmap):
    """Private anonymous memory that begins at a page.

    Not shared, which is what ``mmap`` gives by default: shared memory gets no huge pages on most systems.
    """

    def __new__(cls, num_bytes: int) -> Pages:
        """Map ``num_bytes`` >= 1; RealError if they cannot be had."""
        try:
            pages = super().__new__(cls, -1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise RealError(f"{num_bytes} bytes of host memory cannot be had: {error}") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        return pages


class LockedPages(Pages):
    """Pages that CUDA knows; they are unlocked before they are unmapped.

    A ``weakref.finalize`` would come too late: it is called when the memory is gone.
    """

    _cudart: Any = None
    _locked: list[int]

    def lock(self, address: int, cudart: Any) -> int:
        """Lock all pages from ``address``, theirs; return CUDA's error code, 0 if all are locked."""
        self._cudart, self._locked = cudart, []
        for offset, size in chunks(len(self)):
            code = int(cudart.cudaHostRegister(address + offset, size, 0))
            if code:
                self.unlock()
                return code
            self._locked.append(address + offset)
        return 0

    def unlock(self) -> None:
        """Unlock what is locked; harmless twice."""
        while self._cudart is not None and self._locked:
            self._cudart.cudaHostUnregister(self._locked.pop())

    def __del__(self) -> None:
        if not sys.is_finalizing():  # the process ends, and CUDA is torn down already
            self.unlock()


def pages(num_bytes: int) -> Tensor:
    """Return uint8[num_bytes] of zeros that begins at a page."""
    if num_bytes < 1:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(Pages(num_bytes), dtype=torch.uint8)


def locked_pages(num_bytes: int, cudart: Any) -> tuple[Tensor, int]:
    """Return uint8[num_bytes] that begins at a page, and CUDA's error code: 0 if it is locked.

    ``cudart`` is :func:`torch.cuda.cudart`. Where it refuses, the memory is there but not locked.
    """
    if num_bytes < 1:
        return pages(num_bytes), 0
    mapped = LockedPages(num_bytes)
    found = torch.frombuffer(mapped, dtype=torch.uint8)
    return found, mapped.lock(found.data_ptr(), cudart)


def chunks(num_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, size) of what is locked by one call."""
    for offset in range(0, num_bytes, CHUNK_BYTES):
        yield offset, min(CHUNK_BYTES, num_bytes - offset)


def cuts(offset: int, size: int) -> list[tuple[int, int]]:
    """Return (begin, end) of the parts, counted from ``offset``, that each lie in one such chunk."""
    edges = range((offset // CHUNK_BYTES + 1) * CHUNK_BYTES, offset + size, CHUNK_BYTES)
    return list(pairwise([0, *(edge - offset for edge in edges), size]))
