"""How pieces of experts come from a slow tier: host memory, a file, or a link that is slower than it is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from threading import local

from torch import Tensor

from real.copies import Carrier, Copy
from real.device import Device
from real.experts import PAGE_BYTES
from real.store import RAMStore
from real.store_file import FileStore
from sim.types import ConfigError


class RAMCarrier:
    """Copies from host memory, one at a time; ``chunks`` is 1, or 3 (gate, up, down).

    On CUDA a second thread asks for the next piece while one is on the link; on a CPU it would only take
    turns with the first.
    """

    num_workers = 1

    def __init__(self, store: RAMStore, device: Device, chunks: int = 1) -> None:
        self.num_ahead = 1 if device.kind == "cuda" else 0
        self._store = store
        self._device = device
        self._chunks = chunks

    def pieces(self, copy: Copy) -> Sequence[tuple[int, int]]:
        """Return equal parts of the expert's bytes."""
        return _parts(copy.num_bytes, -(-copy.num_bytes // self._chunks))

    def carry(self, copy: Copy, offset: int, size: int) -> None:
        """Copy one piece to the device."""
        self._device.copies_wait_for(copy.fence)
        source = self._store.bytes_of(copy.key)
        end = offset + size
        self._device.copy(copy.target[offset:end], source[offset:end])

    def close(self) -> None:
        """Nothing is held."""


class StorageCarrier:
    """Reads from a file in blocks, ``queue_depth`` of them at one time, each by a thread of its own.

    On CUDA a block comes through a pinned buffer of the thread's own.
    """

    def __init__(
        self, store: FileStore, device: Device, block_bytes: int, queue_depth: int
    ) -> None:
        if block_bytes < PAGE_BYTES or block_bytes % PAGE_BYTES:
            raise ConfigError(
                f"engine.storage_block_bytes = {block_bytes}: must be a multiple of {PAGE_BYTES}"
            )
        self.num_workers = queue_depth
        self.num_ahead = 0
        self._store = store
        self._device = device
        self._block_bytes = block_bytes
        self._own = local()

    def pieces(self, copy: Copy) -> Sequence[tuple[int, int]]:
        """Return the expert's blocks."""
        return _parts(copy.num_bytes, self._block_bytes)

    def carry(self, copy: Copy, offset: int, size: int) -> None:
        """Read one block."""
        target = copy.target[offset : offset + size]
        if self._device.kind == "cpu":
            self._store.read(copy.key, offset, target)
            return
        bounce = self._bounce()[:size]
        self._store.read(copy.key, offset, bounce)
        self._device.copies_wait_for(copy.fence)
        self._device.copy(target, bounce)

    def _bounce(self) -> Tensor:
        if not hasattr(self._own, "buffer"):
            self._own.buffer = self._device.host_buffer(self._block_bytes)
        buffer: Tensor = self._own.buffer
        return buffer

    def close(self) -> None:
        """Nothing is held."""


class ThrottledCarrier:
    """An emulated link: each piece takes as long as on a link of ``bytes_per_s``, or longer.

    ``setup_ns`` comes before a copy that finds the link idle. What comes of it is labelled as emulated.
    """

    num_workers = 1
    num_ahead = 0

    def __init__(self, inner: Carrier, bytes_per_s: int, setup_ns: int = 0) -> None:
        if inner.num_workers != 1:
            raise ConfigError(
                "an emulated link carries one piece at a time; must stand on host memory"
            )
        if bytes_per_s < 1:
            raise ConfigError(f"real.link_bytes_per_s = {bytes_per_s}: must be >= 1")
        self._inner = inner
        self._bytes_per_s = bytes_per_s
        self._setup_ns = setup_ns
        self._free_ns = 0

    def pieces(self, copy: Copy) -> Sequence[tuple[int, int]]:
        """Return the pieces as without the throttle."""
        return self._inner.pieces(copy)

    def carry(self, copy: Copy, offset: int, size: int) -> None:
        """Carry one piece and wait until the emulated link would have carried it."""
        is_busy = self._free_ns >= copy.queued_ns
        begin_ns = self._free_ns if is_busy else copy.queued_ns + self._setup_ns
        self._free_ns = begin_ns + size * 1_000_000_000 // self._bytes_per_s
        self._inner.carry(copy, offset, size)
        left_ns = self._free_ns - time.perf_counter_ns()
        if left_ns > 0:
            time.sleep(left_ns / 1e9)
        else:
            self._free_ns -= left_ns

    def close(self) -> None:
        """Close what it stands on."""
        self._inner.close()


def _parts(num_bytes: int, part_bytes: int) -> list[tuple[int, int]]:
    """Return (offset, size) of parts of ``part_bytes``, the last of which has the rest."""
    return [
        (offset, min(part_bytes, num_bytes - offset)) for offset in range(0, num_bytes, part_bytes)
    ]
