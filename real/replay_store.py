"""The experts of a replay: random weights in host memory, or in a file that is kept or goes with the run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hwmodels.model_shape import ModelShape
from real.device import Device
from real.experts import ExpertFormat
from real.replay_config import RealSettings
from real.store import ExpertSource, Progress, Store, build_ram, shape_of, with_low_copies
from real.store_file import FileStore, build_file
from real.synthetic import Synthetic
from sim.results import UNFINISHED
from sim.types import ConfigError


def source_of(shape: ModelShape, form: ExpertFormat, seed: int) -> ExpertSource:
    """Return random experts of a model, with low-precision copies where a policy has them."""
    source = Synthetic(shape.num_moe_layers, shape.num_experts, form, seed)
    return source if shape.low_bits is None else with_low_copies(source, "int8")


@contextmanager
def opened_store(
    source: ExpertSource,
    settings: RealSettings,
    device: Device,
    folder: Path,
    progress: Progress | None = None,
) -> Iterator[Store]:
    """Give the store of a replay, and take it back.

    A temporary file lies in ``folder`` and goes when the block ends, however it ends. One that a killed
    process left goes with the next run into that folder (see sim/results.py).
    """
    path = folder / f"{UNFINISHED}{os.getpid()}-experts.bin"
    try:
        with _store(source, settings, device, path, progress) as store:
            yield store
    finally:
        path.unlink(missing_ok=True)


def _store(
    source: ExpertSource,
    settings: RealSettings,
    device: Device,
    temporary: Path,
    progress: Progress | None,
) -> Store:
    if settings.tier != "storage":
        return build_ram(source, device, progress)
    if settings.store is not None:
        return _kept(source, Path(settings.store).expanduser(), progress)
    return FileStore(build_file(source, temporary, progress), shape_of(source))


def _kept(source: ExpertSource, path: Path, progress: Progress | None) -> FileStore:
    if not path.exists():
        build_file(source, path, progress)
    store = FileStore(path, shape_of(source))
    if store.source != source.source:
        store.close()
        raise ConfigError(
            f"real.store = {path}: holds weights from {store.source}: must be from {source.source}; set "
            "real.seed, or name another file"
        )
    return store
