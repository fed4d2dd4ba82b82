"""Memory full of weights that probes walk through, so that none of them finds in a cache what it reads.

All probes share one place in it that only goes forward: what is read next is what was read longest ago.
"""

from __future__ import annotations

import torch
from torch import Tensor

from real.experts import PAGE_BYTES, ExpertFormat
from real.store import RAMStore, StoreShape

_BLOCK_BYTES = 1 << 24
_STD = 0.02
_WIDTH = 64


class WeightPool:
    """A buffer of random weights: as bfloat16, float32 or int8 they are all usual numbers.

    Parameters
    ----------
    buffer
        uint8[num_bytes] of the host or of a device, 4096-aligned; is filled.
    seed
        Of the numbers.
    """

    def __init__(self, buffer: Tensor, seed: int = 0) -> None:
        self.buffer = buffer
        self._next = 0
        block = _block(seed).to(buffer.device)
        for begin in range(0, buffer.numel(), _BLOCK_BYTES):
            part = buffer[begin : begin + _BLOCK_BYTES]
            part.copy_(block[: part.numel()])

    def window(self, num_bytes: int) -> Tensor:
        """Return the next ``num_bytes`` of it, from a page on."""
        begin = self.place(num_bytes, PAGE_BYTES)
        return self.buffer[begin : begin + num_bytes]

    def place(self, num_bytes: int, multiple: int) -> int:
        """Return where the next ``num_bytes`` begin, at a multiple of ``multiple`` bytes."""
        begin = -(-self._next // multiple) * multiple
        if begin + num_bytes > self.buffer.numel():
            begin = 0
        if num_bytes > self.buffer.numel():
            raise ValueError(f"{num_bytes} bytes of a pool of {self.buffer.numel()}")
        self._next = begin + num_bytes
        return begin

    def store(self, num_bytes: int) -> RAMStore:
        """Return the pool as a store of experts of so many bytes, which is a multiple of 4096."""
        form = plain_format(num_bytes)
        count = self.buffer.numel() // num_bytes
        shape = StoreShape(1, count, (form,))
        return RAMStore(shape, self.buffer[: count * num_bytes])


def plain_format(num_bytes: int) -> ExpertFormat:
    """Return a format of exactly ``num_bytes`` bytes, a multiple of 4096; nobody computes with it.

    Its weights are bfloat16, so that they are usual numbers in whatever dtype they are read.
    """
    columns = num_bytes // (2 * torch.bfloat16.itemsize * _WIDTH)
    return ExpertFormat(_WIDTH, columns, "bfloat16", has_gate=False)


def pool_bytes(cache_bytes: int, free_bytes: int, largest_bytes: int) -> int:
    """Return how large a pool should be: four times the caches, at most a sixth of what memory is free.

    At least three of the largest window.
    """
    wanted = 4 * cache_bytes
    return max(min(wanted, free_bytes // 6), 3 * largest_bytes) // PAGE_BYTES * PAGE_BYTES


def _block(seed: int) -> Tensor:
    """Return random weights as bytes.

    They are bfloat16: two of them read as one float32 are about the first, the second being what follows
    its leading digits, so that no dtype meets numbers that are slow or not finite.
    """
    generator = torch.Generator().manual_seed(seed)
    count = _BLOCK_BYTES // torch.bfloat16.itemsize
    normal = torch.randn(count, generator=generator).clamp_(-5, 5) * _STD
    return normal.to(torch.bfloat16).view(torch.uint8)
