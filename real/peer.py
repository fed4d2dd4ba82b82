"""The peer: a plain transformers model whose experts accelerate offloads to disk, timed token by token.

Our backend holds the dense weights and an arena of experts. The peer may hold the same: all dense
weights, and as many whole experts modules (one a layer, all its experts fused) as fit in the bytes of
the arena. The others lie on disk and are brought in by accelerate's hooks at every token. What is in
use for the moment comes on top, in the peer's favour.

Two ways that the documentations recommend:

``safetensors``
    ``from_pretrained(device_map=..., offload_folder=...)``. The file is mapped: a token's experts are
    read by page faults, with as much read-ahead as the system is set to.
``dat``
    ``accelerate.dispatch_model(device_map=..., offload_dir=...)``. All experts of a layer are copied out
    of a mapped file for every token.

Both read through the page cache. With ``drop_cache`` the files' pages are dropped before every token, as
our own reads go past the page cache; without it a token may find in the cache all it needs, which is
memory beyond the bytes allowed. A peer has no cache of single experts, so hit rates play no part.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from real.page_cache import (
    drop_pages,
    files_below,
    load_pages,
    read_ahead_bytes,
    storage_bytes_read,
    write_through,
)
from real.peer_config import peer_config as peer_config
from real.peer_load import (
    choose_held,
    load_offloaded,
    loaded_bytes,
    need_accelerate,
    quiet,
    save_source,
    tells_of_room,
)
from sim.types import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

WAYS = ("safetensors", "dat")
PROMPT_TOKENS = 4


@dataclass(frozen=True, slots=True)
class PeerRun:
    """One greedy decoding: the time of each step, and what each read from storage.

    A step gives one token to each sequence of the batch. ``read_bytes`` counts read-ahead; None where the
    system does not count reads.
    """

    per_token_ns: tuple[int, ...]
    read_bytes: tuple[int, ...] | None

    @property
    def tpot_ns(self) -> int:
        """Median time of a step."""
        return median_low(self.per_token_ns)

    @property
    def median_read_bytes(self) -> int | None:
        """Median bytes that a step read from storage."""
        return None if self.read_bytes is None else median_low(self.read_bytes)


@dataclass(frozen=True, slots=True)
class PeerResult:
    """What the peer took.

    ``tpot_ns`` and ``per_token_ns`` are of the run with dropped cache if that was asked for, else of the
    warm one; ``warm`` is always timed, ``cold`` is None unless asked for. ``peak_bytes`` are the most
    bytes of weights that were loaded at once, measured; in the way ``safetensors`` the pages of experts
    that no token chose count too, though they may never be read. ``held_bytes`` of experts stay loaded,
    ``disk_bytes`` of experts are brought in for every token.
    """

    tpot_ns: int
    per_token_ns: tuple[int, ...]
    peak_bytes: int
    note: str
    warm: PeerRun
    cold: PeerRun | None
    held_bytes: int
    disk_bytes: int


def time_peer(
    model_or_config: PreTrainedModel | PreTrainedConfig,
    memory_bytes: int,
    *,
    num_tokens: int,
    batch_size: int,
    folder: Path,
    drop_cache: bool = True,
    way: str = "safetensors",
    device: str = "cpu",
) -> PeerResult:
    """Time greedy decoding of a model whose experts beyond ``memory_bytes`` lie on disk.

    For ``num_tokens`` steps of ``batch_size`` sequences, after a short prompt that is not timed. Files go
    to a temporary folder in ``folder``, whose file system is the storage that is timed, and are removed at
    the end. See :func:`open_peer` for the other arguments and for errors.
    """
    with open_peer(model_or_config, memory_bytes, folder=folder, way=way, device=device) as peer:
        cold = peer.decode(num_tokens, batch_size, drop_cache=True) if drop_cache else None
        warm = peer.decode(num_tokens, batch_size, drop_cache=False)
        shown = cold or warm
        return PeerResult(
            tpot_ns=shown.tpot_ns,
            per_token_ns=shown.per_token_ns,
            peak_bytes=peer.peak_bytes,
            note=peer.note(cold),
            warm=warm,
            cold=cold,
            held_bytes=peer.held_bytes,
            disk_bytes=peer.disk_bytes,
        )


@contextmanager
def open_peer(
    model_or_config: PreTrainedModel | PreTrainedConfig,
    memory_bytes: int,
    *,
    folder: Path,
    way: str = "safetensors",
    device: str = "cpu",
) -> Iterator[Peer]:
    """Build a peer that can be timed several times, in turn with other things; removes its files.

    A model is saved and loaded again, and left as it is; of a configuration a model with random weights
    is built. ``way`` is one of :data:`WAYS`. Raises ConfigError for a wrong argument, an absent
    accelerate or a model without fused experts; RealError where the file system has no room.
    """
    if memory_bytes < 0:
        raise ConfigError(f"peer: memory_bytes = {memory_bytes}: must be >= 0")
    if way not in WAYS:
        raise ConfigError(f"peer: way = {way!r}: must be one of {', '.join(WAYS)}")
    need_accelerate()
    with ExitStack() as stack:
        with tells_of_room(folder), quiet():
            own = stack.enter_context(tempfile.TemporaryDirectory(prefix="peer-", dir=folder))
            peer = Peer(model_or_config, memory_bytes, Path(own), way, device)
        yield peer


class Peer:
    """A model with offloaded experts; made by :func:`open_peer`.

    ``tokens`` are those of the last decoding, int64[batch_size, prompt and steps].
    """

    def __init__(
        self,
        model_or_config: PreTrainedModel | PreTrainedConfig,
        memory_bytes: int,
        folder: Path,
        way: str,
        device: str,
    ) -> None:
        self.tokens: Tensor = torch.empty(0, dtype=torch.int64)
        self.peak_bytes = 0
        self._folder, self._way, self._device = folder, way, torch.device(device)
        checkpoint, offload = folder / "checkpoint", folder / "offload"
        sizes = save_source(model_or_config, checkpoint)
        held = choose_held(sizes, memory_bytes)
        self.held_bytes = sum(sizes[name] for name in held)
        self.disk_bytes = sum(sizes.values()) - self.held_bytes
        self._shares = (len(held), len(sizes))
        self._model = load_offloaded(checkpoint, offload, set(sizes) - held, way, str(self._device))
        if len(files_below(offload)) >= sum(1 for p in self._model.parameters() if p.is_meta):
            shutil.rmtree(checkpoint)  # all that is read at a token is in the other folder
        write_through(folder)
        self._measure_peak([self._model.get_submodule(name) for name in set(sizes) - held])

    def decode(self, num_tokens: int, batch_size: int, drop_cache: bool) -> PeerRun:
        """Decode ``num_tokens`` steps greedily and time each; drops the cached pages before every one.

        With ``drop_cache`` False all pages are read once before the first. Dropping is not timed, nor is
        the choice of the tokens.
        """
        if num_tokens < 1 or batch_size < 1:
            raise ConfigError(
                f"peer: num_tokens = {num_tokens}, batch_size = {batch_size}: must be >= 1"
            )
        if not drop_cache:
            load_pages(self._folder)
        clock = _StepClock(self._folder if drop_cache else None, self._device)
        handles = (
            self._model.register_forward_pre_hook(clock.begin),
            self._model.register_forward_hook(clock.end),
        )
        try:
            self.tokens = self._generate(num_tokens + 1, batch_size)
        finally:
            for handle in handles:
                handle.remove()
        return clock.run()

    def note(self, cold: PeerRun | None) -> str:
        """Say in one line what was timed and how, with the versions."""
        import accelerate
        import transformers

        held, modules = self._shares
        return (
            f"transformers {transformers.__version__}, accelerate {accelerate.__version__}, "
            f"way {self._way}: {held} of {modules} experts modules held ({self.held_bytes / 1e6:.1f} MB), "
            f"{self.disk_bytes / 1e6:.1f} MB on disk; {self._cache_note(cold)}"
        )

    def _cache_note(self, cold: PeerRun | None) -> str:
        if cold is None:
            return "page cache warm"
        note = "page cache dropped before every token"
        if (ahead := read_ahead_bytes(self._folder)) is not None:
            note += f", read-ahead {ahead // 1024} KiB"
        if (read := cold.median_read_bytes) is not None:
            note += f", {read / 1e6:.1f} MB read from storage a token"
        if self.disk_bytes and read == 0:
            note += " (the folder lies in memory, or its pages cannot be dropped)"
        return note

    def _generate(self, num_tokens: int, batch_size: int) -> Tensor:
        """Return int64[batch_size, prompt and ``num_tokens``]; the prompts are random and the same always."""
        generator = torch.Generator().manual_seed(0)
        size = (batch_size, PROMPT_TOKENS)
        prompts = torch.randint(self._model.config.vocab_size, size, generator=generator)
        prompts = prompts.to(self._device)
        generate: Any = self._model.generate
        return generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=num_tokens)

    def _measure_peak(self, modules: list[nn.Module]) -> None:
        """Decode once and note the bytes of weights that are loaded while each of ``modules`` runs."""
        from accelerate.hooks import ModelHook, add_hook_to_module

        peer = self

        class Watch(ModelHook):
            is_watching = True

            def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                if Watch.is_watching:
                    peer.peak_bytes = max(peer.peak_bytes, loaded_bytes(peer._model))
                return args, kwargs

        self.peak_bytes = loaded_bytes(self._model)
        for module in modules:
            add_hook_to_module(module, Watch(), append=True)  # after the hook that loads
        self._generate(1, 1)
        Watch.is_watching = False


class _StepClock:
    """Times the forward passes of one decoding; the first, of the prompt, does not count."""

    def __init__(self, dropped: Path | None, device: torch.device) -> None:
        self._dropped, self._device = dropped, device
        self._begin_ns = 0
        self._read_before: int | None = None
        self._ns: list[int] = []
        self._read: list[int] = []

    def begin(self, module: nn.Module, args: Any) -> None:
        if self._dropped is not None:
            drop_pages(self._dropped)
        self._read_before = storage_bytes_read()
        self._begin_ns = perf_counter_ns()

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._ns.append(perf_counter_ns() - self._begin_ns)
        read_after = storage_bytes_read()
        if read_after is not None and self._read_before is not None:
            self._read.append(read_after - self._read_before)

    def run(self) -> PeerRun:
        return PeerRun(tuple(self._ns[1:]), tuple(self._read[1:]) if self._read else None)
