"""How far the real backend is from what its storage and kernels allow, and from a plain peer.

The limit of a step that loads on demand: with overlap the larger of (bytes / storage rate) and kernel time,
without it their sum. The storage rate is that of whole experts read one after another by the same reader
with nothing else going on, the kernel time that of the run's own kernels; both in the same minutes, turn and
turn about with the run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from real.copies import Copy, CopyEngine
from real.observed import Mean
from real.peer import Peer, open_peer, peer_config
from real.rig import real_scenario
from real.slots import Arena
from real.store_file import FileStore
from real.validate_runs import Run, Setting, config_of, decode_ns, opened
from sim.counter import STEP_COLUMNS
from sim.events import Kind

BARS = {"overlapped": 1.15, "serial": 1.10}
"""How much longer than the limit a step may take where copies overlap with kernels, and where they do not."""
_OVERRIDES = {
    "overlapped": (),
    "serial": ("engine.copies_overlap=false", "engine.cpu_overlaps=false", "engine.order=routing"),
}
FEW_HEADS = ("model.num_attention_heads=4", "model.num_kv_heads=1")
"""Little attention: loading on demand can overlap with a layer's experts only, so all else comes on top."""
PEER_BAR = 3.0
"""How much faster than the peer the backend must be, at equal memory."""
_PROBE_READS = 8


@dataclass(frozen=True, slots=True)
class LimitResult:
    """A run against its limit: times of a decode step in ns, their ratio, and the bar it must not exceed.

    For the peer the "limit" is the peer's time and the ratio how much faster we are, at least ``bar``.
    """

    name: str
    measured_ns: float
    limit_ns: float
    ratio: float
    bar: float
    is_met: bool
    note: str


class ReadProbe:
    """Reads of whole experts, one after another, by the run's own reader: what storage gives alone."""

    def __init__(self, setting: Setting, store: FileStore, machine: Mapping[str, Any]) -> None:
        config = config_of(setting, "on_demand", 0.25, machine)
        engine = real_scenario(config).costs.engine
        self._copies = CopyEngine(setting.tier.carrier(store, setting.device, engine))
        form = store.format_of(0)
        self._arena = Arena(setting.device, [form], [_PROBE_READS], [0] * len(store.keys))
        self._rng = np.random.default_rng(setting.seed)
        self._num_keys = len(store.keys)
        self.reads = Mean()

    def run(self) -> None:
        """Read some experts, chosen by chance."""
        keys = self._rng.choice(self._num_keys, _PROBE_READS, replace=False).tolist()
        begin_ns = time.perf_counter_ns()
        for key in keys:
            self._copies.submit(Copy(key, Kind.LOAD, self._arena.take(key)))
        num_bytes = 0
        while self._copies.num_under_way or self._copies.has_news:
            for copy in self._copies.wait():
                num_bytes += copy.num_bytes
        self.reads.add(time.perf_counter_ns() - begin_ns, num_bytes)
        self._copies.take_started()
        for key in keys:
            self._arena.free(key)

    @property
    def bytes_per_s(self) -> float:
        """Rate so far."""
        return self.reads.count * 1e9 / self.reads.total

    def close(self) -> None:
        """End the reader's threads."""
        self._copies.close()
        self._arena.close()


def distance_to_limit(
    setting: Setting,
    store: FileStore,
    machine: Mapping[str, Any],
) -> list[LimitResult]:
    """Time loading on demand from storage, with and without overlap, against the limit of each."""
    settings = {
        name: replace(setting, overrides=(*setting.overrides, *FEW_HEADS, *own))
        for name, own in _OVERRIDES.items()
    }
    probe = ReadProbe(setting, store, machine)
    try:
        with (
            opened(settings["overlapped"], store, machine, [("on_demand", 0.0)]) as ready,
            opened(settings["serial"], store, machine, [("on_demand", 0.0)]) as waiting,
        ):
            runs = {"overlapped": ready[0], "serial": waiting[0]}
            while not all(run.is_done for run in runs.values()):
                for run in runs.values():
                    run.play(setting.turn_steps)
                    probe.run()
            rate = probe.bytes_per_s
            return [_result(name, run, rate, setting.batch_size) for name, run in runs.items()]
    finally:
        probe.close()


def _result(name: str, run: Run, rate: float, batch_size: int) -> LimitResult:
    rows = run.steps()
    steps = decode_ns(rows)
    accounts = run.executor.accounts
    decoding = rows[rows[:, STEP_COLUMNS.index("phase")] == 1]
    num_bytes = float(decoding[:, STEP_COLUMNS.index("demand_bytes")].mean())
    kernels_ns = float(decoding[:, STEP_COLUMNS.index("gpu_busy_ns")].mean())
    copies_ns = num_bytes / rate * 1e9
    limit_ns = max(copies_ns, kernels_ns) if name == "overlapped" else copies_ns + kernels_ns
    measured_ns = float(steps.mean())
    host_ns = (accounts.step_ns - accounts.kernels_ns - accounts.waited_ns) / accounts.num_layers
    note = (
        f"{num_bytes / 1e6:.1f} MB a step at {rate / 1e9:.2f} GB/s = {copies_ns / 1e6:.2f} ms, kernels "
        f"{kernels_ns / 1e6:.2f} ms; Python {host_ns / 1e3:.0f} us a layer-step"
    )
    ratio = measured_ns / limit_ns
    title = f"on demand from storage, {name}, batch {batch_size}"
    return LimitResult(title, measured_ns, limit_ns, ratio, BARS[name], ratio <= BARS[name], note)


def against_peer(
    setting: Setting,
    store: FileStore,
    machine: Mapping[str, Any],
    folder: Path,
    num_tokens: int = 16,
) -> list[LimitResult]:
    """Time the backend (LRU, a quarter of the experts) and the peer at equal memory, turn and turn about."""
    found = []
    with opened(setting, store, machine, [("lru", 0.25)]) as (run,):
        shape = real_scenario(run.config).shape
        held_bytes = run.executor.parts.arena.num_bytes
        for way in ("safetensors", "dat"):
            with open_peer(peer_config(shape), held_bytes, folder=folder, way=way) as peer:
                found.append(_race(run, peer, setting, num_tokens, way))
    return found


def _race(run: Run, peer: Peer, setting: Setting, num_tokens: int, way: str) -> LimitResult:
    first = len(run.turns)
    cold, warm = [], []
    for _ in range(2):
        run.play(num_tokens)
        cold.append(peer.decode(num_tokens, setting.batch_size, True))
        warm.append(peer.decode(num_tokens, setting.batch_size, False))
    rows = run.steps()
    turns = run.turns[first:]
    own_ns = float(np.median(np.concatenate([decode_ns(rows, *turn) for turn in turns])))
    peer_ns = float(np.median([step for one in cold for step in one.per_token_ns]))
    warm_ns = float(np.median([step for one in warm for step in one.per_token_ns]))
    note = f"{peer.note(cold[-1])}; with a warm page cache the peer takes {warm_ns / 1e6:.1f} ms"
    ratio = peer_ns / own_ns
    title = f"transformers + accelerate on disk ({way}), batch {setting.batch_size}"
    return LimitResult(title, own_ns, peer_ns, ratio, PEER_BAR, ratio >= PEER_BAR, note)
