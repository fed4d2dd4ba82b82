"""What a validation's runs share: experts in host memory and in a file, each made once and taken away."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from real.device import Device
from real.experts import ExpertFormat
from real.machine_facts import file_system_of
from real.store import Progress, Store, build_ram
from real.store_file import FileStore, build_file
from real.synthetic import Synthetic
from sim.types import ConfigError

_IN_MEMORY = ("tmpfs", "ramfs", "zram")


class Stores:
    """Random experts by tier, made when first asked for; a context manager that leaves nothing behind.

    Parameters
    ----------
    device
        Whose copies come from them.
    scratch
        Folder in which a temporary one is made for the files; None: see :func:`scratch_folder`.
    seed
        Of the weights.
    progress
        Is told what is made, then how many experts are, and of how many.
    """

    def __init__(
        self,
        device: Device,
        scratch: str | None,
        seed: int,
        progress: Callable[[str], Progress | None] = lambda what: None,
    ) -> None:
        self._device = device
        self._scratch = scratch
        self._seed = seed
        self._progress = progress
        self._found: dict[tuple[str, ExpertFormat], Store] = {}
        self._stack = ExitStack()
        self._folder: Path | None = None

    def __enter__(self) -> Stores:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def folder(self) -> Path:
        """A temporary folder on the storage that is meant, which goes at the end."""
        if self._folder is None:
            parent = scratch_folder(self._scratch)
            made = tempfile.TemporaryDirectory(prefix="greenroom-validate-", dir=parent)
            self._folder = Path(self._stack.enter_context(made))
        return self._folder

    def of(self, tier: str, form: ExpertFormat, num_layers: int, num_experts: int) -> Store:
        """Return the store of a tier: a file for storage, host memory for the others."""
        place = "file" if tier == "storage" else "memory"
        if (place, form) not in self._found:
            source = Synthetic(num_layers, num_experts, form, self._seed)
            path = self.folder / f"experts-{len(self._found)}.bin" if place == "file" else None
            progress = self._progress(f"experts in {'memory' if path is None else 'a file'}")
            if path is not None:
                store: Store = FileStore(build_file(source, path, progress))
            else:
                store = build_ram(source, self._device, progress)
            self._stack.callback(store.close)
            self._found[place, form] = store
        return self._found[place, form]


def scratch_folder(asked: str | None) -> Path:
    """Return a folder on storage: the one asked for, that for temporary files, or this one.

    Raises ConfigError where it is missing, or in memory.
    """
    if asked is None:
        folder = Path(tempfile.gettempdir())
        return Path.cwd() if file_system_of(folder).kind in _IN_MEMORY else folder
    folder = Path(asked).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"scratch = {folder}: no such folder")
    kind = file_system_of(folder).kind
    if kind in _IN_MEMORY:
        raise ConfigError(f"scratch = {folder}: lies in memory ({kind}); must be on storage")
    return folder
