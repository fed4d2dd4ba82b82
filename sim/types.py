"""The words that policies, mechanism and drivers share: keys, routing, plans, the read-only view.

Knows nothing of policies, drivers or hardware. In the hot path an expert is one int, its *key*:
``key = layer * num_experts + expert``; :class:`KeySpace` translates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sim.choices import Choices as Choices
from sim.routing import LayerRouting as LayerRouting
from traces.schema import DECODE, PREFILL
from traces.schema import NO_EXPERT as NO_EXPERT

if TYPE_CHECKING:
    from sim.residency import Residency


class Phase(IntEnum):
    """What a step does."""

    PREFILL = PREFILL
    DECODE = DECODE
    MIXED = 2  # prompt chunks and decoded tokens together


ABSENT, QUEUED, LOADING, RESIDENT = range(4)
"""Where an expert is: not in GPU memory, waiting for its copy, on its way, there."""


class ConfigError(ValueError):
    """A user's mistake in a configuration; one line that names field, value and rule."""


class ExpertKey(NamedTuple):
    """An expert by name; ``expert`` is an index within ``layer``."""

    layer: int
    expert: int


@dataclass(frozen=True, slots=True)
class KeySpace:
    """Translates between int keys and (layer, expert).

    With ``num_copies`` = 2 every expert has a second copy of lower precision, with a key of its own. The
    keys of a layer's copies of one precision are a *bank*: bank ``layer`` holds those of full precision,
    bank ``num_layers + layer`` the low ones. Bytes and costs are by bank, which without low copies is just
    the layer.
    """

    num_layers: int
    num_experts: int
    num_copies: int = 1

    def key(self, layer: int, expert: int) -> int:
        """Return the int key of one expert."""
        return layer * self.num_experts + expert

    def unpack(self, key: int) -> ExpertKey:
        """Return (layer, expert) of an int key, whatever its precision."""
        bank, expert = divmod(key, self.num_experts)
        return ExpertKey(bank % self.num_layers, expert)

    @property
    def num_banks(self) -> int:
        """Number of banks."""
        return self.num_layers * self.num_copies

    def bank(self, key: int) -> int:
        """Return the bank of a key."""
        return key // self.num_experts

    def low(self, key: int) -> int:
        """Return the key of the low-precision copy of an expert, given that of the other one."""
        return key + self.num_layers * self.num_experts

    def high(self, key: int) -> int:
        """Return the key of the full-precision copy of an expert, given that of either."""
        return key % (self.num_layers * self.num_experts)

    def is_low(self, key: int) -> bool:
        """Tell whether a key is that of a low-precision copy."""
        return key >= self.num_layers * self.num_experts

    def layer_keys(self, layer: int) -> range:
        """Return all keys of a layer (or bank), in full precision unless it is a bank of low copies."""
        return range(layer * self.num_experts, (layer + 1) * self.num_experts)

    def check(self, key: int, source: str) -> None:
        """Raise ConfigError if ``key``, which ``source`` named, is no expert's."""
        if not 0 <= key < len(self):
            raise ConfigError(f"{source}: key = {key}: must be in [0, {len(self)})")

    def __len__(self) -> int:
        return self.num_layers * self.num_experts * self.num_copies


@dataclass(frozen=True, slots=True)
class StepInfo:
    """What anybody may know of a step before it runs.

    ``texts`` are the decoded pieces of the tokens that this step *processes* (already sampled, so no
    future), one a token, or None where the trace has no text. ``kv_tokens`` is the number of KV
    entries the step's attention reads, summed over its sequences, ``attention_pairs`` that of (new
    token, KV entry) pairs it computes, ``held_kv_tokens`` that of tokens whose keys and values are in
    memory when the step ends, those of requests that sit it out included. ``num_outputs`` sequences
    yield a token. The first ``num_decoding`` tokens are decoded ones; prompt tokens follow. ``stages``
    are the annotated stages of the tokens, -1 unknown, or None where the trace has none.
    """

    step: int
    phase: Phase
    num_tokens: int
    num_sequences: int = 1
    kv_tokens: int = 0
    request_ids: tuple[int, ...] = ()
    texts: tuple[str, ...] | None = None
    attention_pairs: int = 0
    held_kv_tokens: int = 0
    num_outputs: int = 1
    num_decoding: int = 0
    stages: tuple[int, ...] | None = None


class Service(IntEnum):
    """How an expert is served."""

    LOAD = 0  # over the link into the cache, if the cache admits it
    BYPASS = 1  # over the link into a staging slot, used once
    CPU = 2  # computed where its weights lie
    DEFER = (
        3  # computed there as well, but added at the next MoE layer: lossy; in the last one as CPU
    )
    STAY = 4  # on the GPU already, and computed there


class ExpertWork(NamedTuple):
    """One expert's share of a layer, as a PlacementPolicy sees it."""

    key: int
    num_tokens: int
    resident: bool = False


class LayerPlan:
    """Everything a driver may read to carry out one layer; lists hold int keys.

    routing     what is computed: the recorded routing, or what a RoutingPolicy made of it
    recorded    what the router chose
    resident    on the GPU: compute at once
    late        a prefetch in flight: now wanted, so move it ahead, then compute
    evicts      dropped to make room for loads and prefetches: their slots are free now
    loads       demand loads into the cache, in this order, then compute
    bypasses    demand loads into staging slots, in this order, then compute; the first ``num_held``
                keep their slots until the layer ends, the others take turns in ``bypass_slots``
    on_cpu      compute on the CPU, ``hits_on_cpu`` of them though they are on the GPU
    deferred    compute on the CPU after these; the end of the next layer waits for them, not this one's
    prefetches  loads nobody waits for
    cancels     queued prefetches that are given up before they start
    reads       not in host memory either: they come from storage before anything else happens to them
    host_evicts dropped from host memory to make room for what comes there
    demotes     evicted keys that go back to host memory, which did not keep them
    packed      tokens are laid out expert by expert, so that no expert gathers or scatters
    groups      a partition of the step's tokens into micro-batches; None is one of all tokens
    """

    # Class-level defaults: most layers hit, and then nothing but the first three is ever set.
    evicts: Sequence[int] = ()
    loads: Sequence[int] = ()
    bypasses: Sequence[int] = ()
    num_held: int = 0
    bypass_slots: int = 0
    on_cpu: Sequence[int] = ()
    hits_on_cpu: int = 0
    deferred: Sequence[int] = ()
    prefetches: Sequence[int] = ()
    cancels: Sequence[int] = ()
    reads: Sequence[int] = ()
    host_evicts: Sequence[int] = ()
    demotes: Sequence[int] = ()
    packed: bool = False
    groups: Sequence[NDArray[np.intp]] | None = None

    def __init__(
        self, routing: LayerRouting, resident: Sequence[int], late: Sequence[int] = ()
    ) -> None:
        self.routing = self.recorded = routing
        self.resident = resident
        self.late = late


class CostModel(Protocol):
    """What a decider may ask about time; all answers in int nanoseconds.

    A ``layer`` may be a bank (see KeySpace): what low-precision copies take is asked of theirs.
    """

    def load_ns(self, layer: int) -> int:
        """Copy one expert of ``layer`` from host to GPU memory over an idle link."""
        ...

    def expert_gpu_ns(self, layer: int, num_tokens: int, packed: bool) -> int:
        """Compute one expert whose weights are in GPU memory."""
        ...

    def expert_cpu_ns(self, layer: int, num_tokens: int) -> int:
        """Compute one expert on the CPU where its weights lie."""
        ...


@dataclass(slots=True)
class View:
    """The read-only world of a policy; it never holds the future.

    ``packed`` tells whether tokens are laid out by expert (see RepackPolicy);
    ``routing`` is what the event under way computes, as rewritten;
    ``event`` counts (step, layer) pairs from 0; ``stage`` counts reasoning stages seen so far;
    ``now_ns`` is the driver's clock (always 0 in lockstep).
    """

    keys: KeySpace
    costs: CostModel
    step: StepInfo
    _residency: Residency = field(repr=False)
    layer: int = 0
    event: int = -1
    stage: int = 0
    now_ns: int = 0
    packed: bool = False
    routing: LayerRouting = field(default_factory=lambda: LayerRouting(0, (), ()), repr=False)

    @property
    def num_layers(self) -> int:
        """Number of MoE layers."""
        return self.keys.num_layers

    @property
    def num_experts(self) -> int:
        """Number of experts in a layer."""
        return self.keys.num_experts

    def is_resident(self, key: int) -> bool:
        """Tell whether the expert's weights are in GPU memory now."""
        return self._residency.is_resident(key)

    def is_loading(self, key: int) -> bool:
        """Tell whether the expert is queued for, or on, the link."""
        return self._residency.is_loading(key)

    def resident(self) -> Iterable[int]:
        """Yield the keys in GPU memory, in key order."""
        return self._residency.resident()

    def states(self) -> NDArray[np.uint8]:
        """Return where every expert is, uint8[num_keys], ABSENT to RESIDENT; for looking at many at once."""
        return np.frombuffer(memoryview(self._residency.state).toreadonly(), dtype=np.uint8)

    def bank_states(self, bank: int) -> bytes:
        """Return where each expert of a layer (or bank) is, ABSENT to RESIDENT, by index in the layer."""
        first = bank * self.keys.num_experts
        return bytes(self._residency.state[first : first + self.keys.num_experts])

    def expert_bytes(self, key: int) -> int:
        """Return the bytes of one expert's weights, in the precision of that copy."""
        return self._residency.expert_bytes(key)

    @property
    def free_bytes(self) -> int:
        """Unused bytes of the pool that serves this layer, in full precision."""
        return self._residency.free_bytes(self.layer)
