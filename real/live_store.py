"""Where the experts of a live run wait: host memory, or a file that is made once and used again."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from real.aligned_io import aligned_bytes
from real.device import Device
from real.rig import Tier
from real.store import ExpertSource, Progress, Store, StoreShape, build_ram, shape_of
from real.store_file import FileStore, build_file
from sim.types import ConfigError

_FILE_NAME = "experts.bin"


@contextmanager
def open_store(
    source: ExpertSource,
    tier: Tier,
    device: Device,
    path: Path | None = None,
    progress: Progress | None = None,
) -> Iterator[Store]:
    """Give a store of a source's experts for a tier; a file is written unless it is there.

    ``path`` None: a temporary file, away afterwards.

    Raises
    ------
    ConfigError
        The file holds experts of another shape, or other weights.
    RealError
        The file is damaged, or cannot be written.
    """
    if tier.kind != "storage":
        with build_ram(source, device, progress) as store:
            yield store
        return
    if path is not None:
        with _file(source, path, progress) as store:
            yield store
        return
    with (
        tempfile.TemporaryDirectory(prefix="greenroom-") as folder,
        _file(source, Path(folder) / _FILE_NAME, progress) as store,
    ):
        yield store


def _file(source: ExpertSource, path: Path, progress: Progress | None) -> FileStore:
    shape = shape_of(source)
    if not path.exists():
        build_file(source, path, progress)
    store = FileStore(path, shape)
    try:
        _check_weights(store, source, shape)
    except BaseException:
        store.close()
        raise
    return store


def _check_weights(store: FileStore, source: ExpertSource, shape: StoreShape) -> None:
    """Refuse a file whose first, middle or last expert is not the source's."""
    last = shape.num_layers * shape.num_experts - 1
    for key in sorted({0, last // 2, last}):
        form = shape.formats[key // shape.num_experts]
        wanted = torch.empty(form.slot_bytes, dtype=torch.uint8)
        form.pack(source.expert(*shape.keys.unpack(key)), wanted)
        found: Tensor = aligned_bytes(form.slot_bytes)
        store.read(key, 0, found)
        if not torch.equal(found, wanted):
            raise ConfigError(
                f"--store {store.path}: holds the experts of another model; name another file, which is "
                "then written"
            )
