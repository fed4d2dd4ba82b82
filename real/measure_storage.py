"""Reads as pieces of work to be timed: blocks at random places of a file, and whole experts."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from torch import Tensor

from real.aligned_io import fault_of
from real.carriers import StorageCarrier
from real.copies import Copy
from real.device import Device
from real.errors import RealError
from real.machine_facts import file_system_of
from real.measure import Facts
from real.measure_copies import CarriedProbe
from real.store import Progress, shape_of
from real.store_file import FileStore, build_file
from real.synthetic import Synthetic
from real.weight_pool import WeightPool, plain_format
from sim.events import Kind
from sim.types import ConfigError

RECORD_BYTES = 1 << 24
FILE_NAME = "greenroom_scratch.experts"
_MEMORY = ("tmpfs", "ramfs", "zram")
_SPARE_BYTES = 1 << 28


def open_scratch(
    folder: Path | None, num_bytes: int, keep: bool = False, progress: Progress | None = None
) -> FileStore:
    """Return a file of experts to read from, on storage; written if none was kept there before.

    One that is not to be kept has no name any more once it is open, so that nothing is left of it,
    whatever ends the process.

    Parameters
    ----------
    folder
        Where; None: the system's folder for temporary files, or this one if that is in memory.
    num_bytes
        Its size, at least 1 GiB to be worth something.
    keep
        Leave it there.

    Raises
    ------
    ConfigError, RealError
        No such folder, one in memory, no space.
    """
    folder = _checked(_default_folder() if folder is None else folder)
    path = folder / FILE_NAME
    source = Synthetic(1, max(2, num_bytes // RECORD_BYTES), plain_format(RECORD_BYTES))
    if path.exists():
        return FileStore(path, shape_of(source))
    with fault_of(path, "cannot tell the free space"):
        free_bytes = shutil.disk_usage(folder).free
    if free_bytes < num_bytes + _SPARE_BYTES:
        raise RealError(
            f"{folder}: has {free_bytes} bytes free: must have {num_bytes + _SPARE_BYTES}; name another "
            "folder by --scratch, or leave storage out by --no-storage"
        )
    build_file(source, path, progress)
    try:
        return FileStore(path)
    finally:
        if not keep:
            path.unlink()


def _default_folder() -> Path:
    folder = Path(tempfile.gettempdir())
    return Path.cwd() if file_system_of(folder).kind in _MEMORY else folder


def _checked(folder: Path) -> Path:
    if not folder.is_dir():
        raise ConfigError(f"--scratch {folder}: no such folder")
    kind = file_system_of(folder).kind
    if kind in _MEMORY:
        raise ConfigError(
            f"--scratch {folder}: lies in memory ({kind}); must be a folder on storage"
        )
    return folder


class _RandomBlocks:
    """Carries blocks from random places of a file, ``queue_depth`` at one time."""

    num_ahead = 0

    def __init__(self, store: FileStore, block_bytes: int, queue_depth: int, seed: int) -> None:
        self.num_workers = queue_depth
        self._store = store
        self._block_bytes = block_bytes
        self._random = random.Random(seed)

    def pieces(self, copy: Copy) -> Sequence[tuple[int, int]]:
        """Return the blocks that the target has room for."""
        size = self._block_bytes
        return [(offset, size) for offset in range(0, copy.num_bytes, size)]

    def carry(self, copy: Copy, offset: int, size: int) -> None:
        """Read a block from anywhere."""
        place = self._random.randrange(self._store.shape.total_bytes // size)
        key, at = divmod(place * size, RECORD_BYTES)
        self._store.read(key, at, copy.target[offset : offset + size])

    def close(self) -> None:
        """Nothing is held."""


class BlockProbe:
    """Blocks at random places, so many asked for at one time: the time of one, were they one by one.

    Parameters
    ----------
    store
        From where.
    memory
        Host memory to read to.
    block_bytes
        A power of two.
    queue_depth
        Blocks under way at one time.
    """

    def __init__(
        self,
        store: FileStore,
        memory: WeightPool,
        block_bytes: int,
        queue_depth: int,
        seed: int = 0,
    ) -> None:
        self.facts: Facts = {
            "kind": "storage",
            "block_bytes": block_bytes,
            "queue_depth": queue_depth,
        }
        self._count = blocks_of(block_bytes, queue_depth)
        num_bytes = self._count * block_bytes

        def next_copy() -> Copy:
            return Copy(0, Kind.LOAD, memory.window(num_bytes))

        carrier = _RandomBlocks(store, block_bytes, queue_depth, seed)
        self._reads = CarriedProbe(self.facts, carrier, next_copy)

    def run(self) -> float:
        """Read some, and return the ns of one."""
        return self._reads.run() / self._count

    def close(self) -> None:
        """End the threads."""
        self._reads.close()


def blocks_of(block_bytes: int, queue_depth: int) -> int:
    """Return how many blocks one repetition reads: several times what is under way at one time."""
    return queue_depth * (4 if block_bytes <= 1 << 20 else 2)


def read_probe(
    store: FileStore,
    device: Device,
    target: WeightPool,
    num_bytes: int,
    block_bytes: int,
    queue_depth: int,
    seed: int = 0,
) -> CarriedProbe:
    """Return a probe of whole experts from a file to the device, as the executor has them read."""
    facts = {
        "kind": "storage_read",
        "num_bytes": num_bytes,
        "block_bytes": block_bytes,
        "queue_depth": queue_depth,
    }
    keys = list(range(len(store.keys)))
    random.Random(seed).shuffle(keys)
    turn = cycle(keys)

    def next_copy() -> Copy:
        slot: Tensor = target.window(num_bytes)
        return Copy(next(turn), Kind.LOAD, slot, device.fence())

    return CarriedProbe(facts, StorageCarrier(store, device, block_bytes, queue_depth), next_copy)
