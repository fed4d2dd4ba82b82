"""Policies that only tests use, and :data:`SETUPS`, the policy sets that every law is held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.policies.adaptive import ARC, SLRU
from sim.policies.base import (
    CachePolicy,
    Evictable,
    PlacementPolicy,
    PolicySet,
    PrefetchPolicy,
    RepackPolicy,
    RoutingPolicy,
    SizingPolicy,
)
from sim.policies.classic import FIFO, LFU, LRU, OnDemand, Static
from sim.policies.detectors import CueStageDetector
from sim.policies.hobbit import HOBBIT
from sim.policies.oracle import Belady, NextUse
from sim.policies.placement import InSituCPU
from sim.policies.repack import ExpertAligned
from sim.policies.stage import StageCache
from sim.types import ExpertWork, LayerRouting, Service, View
from sim.workload import Workload
from tests.strategies import all_events


class Preloaded(LRU):
    """LRU that begins with ``keys`` in memory."""

    def __init__(self, keys: Sequence[int] = ()) -> None:
        super().__init__()
        self._first = keys

    def preload(self, view: View) -> Sequence[int]:
        return self._first


class Chance(CachePolicy):
    """Drops whom chance picks; with ``bypass`` a newcomer may be picked too."""

    def __init__(self, rng: np.random.Generator, bypass: bool) -> None:
        self.admits_after = bypass
        self._rng = rng
        self._members: list[int] = []

    def choose_victim(self, evictable: Evictable, view: View) -> int | None:
        free = [key for key in self._members if evictable(key)]
        return int(self._rng.choice(free)) if free else None

    def on_insert(self, key: int, view: View) -> None:
        self._members.append(key)

    def on_evict(self, key: int) -> None:
        self._members.remove(key)


class ScriptedPrefetch(PrefetchPolicy):
    """Proposes what the script says at each event, counted from 0."""

    def __init__(self, script: Mapping[int, Sequence[int]]) -> None:
        self._script = script

    def propose(self, routing: LayerRouting, view: View) -> Sequence[int]:
        return self._script.get(view.event, ())


class Foresight(PrefetchPolicy):
    """Proposes exactly the experts of the next ``depth`` events: a prefetcher that is never wrong."""

    oracle = True

    def __init__(self, events: Sequence[LayerRouting], depth: int = 1) -> None:
        self._events = events
        self._depth = depth

    def propose(self, routing: LayerRouting, view: View) -> Sequence[int]:
        soon = self._events[view.event + 1 : view.event + 1 + self._depth]
        return [key for event in soon for key in event.experts]


class Noise(PrefetchPolicy):
    """Proposes any experts at all: a prefetcher that is nearly always wrong."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def propose(self, routing: LayerRouting, view: View) -> Sequence[int]:
        return self._rng.integers(len(view.keys), size=4).tolist()


class ScriptedPlacement(PlacementPolicy):
    """Serves each missing key as the script says; LOAD where it says nothing."""

    lossy = True  # a script may defer

    def __init__(self, script: Mapping[int, Service]) -> None:
        self._script = script

    def place(self, work: Sequence[ExpertWork], view: View) -> Sequence[Service]:
        return [self._script.get(key, Service.LOAD) for key, *_ in work]


class ScriptedEverywhere(ScriptedPlacement):
    """Is asked about hits too: they stay where the script says nothing."""

    places_hits = True

    def place(self, work: Sequence[ExpertWork], view: View) -> Sequence[Service]:
        default = (Service.LOAD, Service.STAY)
        return [self._script.get(key, default[resident]) for key, _, resident in work]


class InTurn(PlacementPolicy):
    """Runs missing experts on the CPU, defers them (or serves them as ``instead``) and loads them in turn."""

    lossy = True

    def __init__(self, instead: Service = Service.DEFER) -> None:
        self._turns = (Service.CPU, instead, Service.LOAD)

    def place(self, work: Sequence[ExpertWork], view: View) -> Sequence[Service]:
        return [self._turns[(view.event + place) % 3] for place in range(len(work))]


class Anywhere(PlacementPolicy):
    """Serves hits and misses in any way they may be, as chance picks; deferral most."""

    lossy = True
    places_hits = True

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def place(self, work: Sequence[ExpertWork], view: View) -> Sequence[Service]:
        hits = Service.STAY, Service.CPU
        misses = Service.LOAD, Service.BYPASS, Service.CPU, Service.DEFER, Service.DEFER
        picks = self._rng.random(len(work)).tolist()  # as many whatever is resident
        ways = (hits if one.resident else misses for one in work)
        return [way[int(pick * len(way))] for way, pick in zip(ways, picks, strict=True)]


class SplitTokens(RepackPolicy):
    """Splits the step's tokens into ``num_groups`` interleaved micro-batches, some maybe empty."""

    def __init__(self, num_groups: int = 2) -> None:
        self._num_groups = num_groups

    def repack(self, routing: LayerRouting, view: View) -> Sequence[NDArray[np.intp]]:
        tokens = np.arange(view.step.num_tokens)
        return [tokens[first :: self._num_groups] for first in range(self._num_groups)]


class LowWhereAbsent(RoutingPolicy):
    """Computes in low precision what is not on the GPU in full precision."""

    def rewrite(self, routing: LayerRouting, view: View) -> LayerRouting:
        ids, first = routing.topk_ids, routing.layer * view.num_experts
        assert ids is not None
        absent = [not view.is_resident(first + expert) for expert in range(view.num_experts)]
        low = np.array([*absent, False])[np.minimum(ids, view.num_experts)]
        return routing.rewritten(view.keys, ids, routing.topk_weights, low)


class EverySecondLow(RoutingPolicy):
    """Computes every second slot in low precision, so that an event may use both copies of an expert."""

    def rewrite(self, routing: LayerRouting, view: View) -> LayerRouting:
        ids = routing.topk_ids
        assert ids is not None
        low = (np.indices(ids.shape).sum(axis=0) + view.event) % 2 == 1
        return routing.rewritten(view.keys, ids, routing.topk_weights, low)


class Given(SizingPolicy):
    """Gives the layers what the configuration says; ``asked`` keeps how many slots there were."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.asked: list[int] = []

    def slots(self, num_slots: int) -> Sequence[int]:
        self.asked.append(num_slots)
        return self.sizes


# -- the sets that laws run over -------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """How to make a policy set for a workload, and what holds of its decisions.

    ``cache`` makes one pool's policy. ``per_layer``: one pool a layer. ``forced``: every miss enters
    where it fits. ``demand_only``: nothing enters unless it was missed. ``timed``: decisions depend on
    when loads arrive. ``copies``: 2 where experts have low-precision copies, in pools of their own.
    """

    cache: Callable[[Workload], CachePolicy]
    others: Callable[[Workload], dict[str, Any]] = lambda _: {}
    per_layer: bool = False
    forced: bool = False
    demand_only: bool = True
    timed: bool = False
    copies: int = 1

    def policies(self, workload: Workload) -> PolicySet:
        pools = (workload.num_layers if self.per_layer else 1) * self.copies
        return PolicySet([self.cache(workload) for _ in range(pools)], **self.others(workload))


def popularity(workload: Workload) -> NDArray[np.float64]:
    """Return scores that rank the experts of every layer by index."""
    shape = workload.num_layers, workload.num_experts
    return np.broadcast_to(np.arange(workload.num_experts, 0.0, -1.0), shape)


def _belady(bypass: bool) -> Callable[[Workload], CachePolicy]:
    return lambda workload: Belady(NextUse(all_events(workload)), bypass)


def _rng(_: Workload | None = None) -> np.random.Generator:
    return np.random.default_rng(7)


def _stages(_: Workload) -> dict[str, Any]:
    return {"stages": CueStageDetector(["wait"], min_steps=1, max_steps=3)}


def _saem(workload: Workload) -> dict[str, Any]:
    return {**_stages(workload), "placement": InSituCPU(), "repack": ExpertAligned()}


SETUPS: dict[str, Setup] = {
    "on_demand": Setup(lambda _: OnDemand()),
    "lru_by_layer": Setup(lambda _: LRU(), per_layer=True, forced=True),
    "lru_global": Setup(lambda _: LRU(), forced=True),
    "fifo": Setup(lambda _: FIFO(), per_layer=True, forced=True),
    "lfu_forced": Setup(lambda _: LFU(bypass=False), forced=True),
    "lfu_bypass": Setup(lambda _: LFU(), per_layer=True),
    "lfu_decay": Setup(lambda _: LFU(decay=0.9)),
    "slru": Setup(lambda _: SLRU(), per_layer=True),
    "arc": Setup(lambda _: ARC(), forced=True),
    "hobbit": Setup(lambda w: HOBBIT(w.trace.meta.top_k), forced=True),
    "chance_forced": Setup(lambda _: Chance(_rng(), bypass=False), forced=True),
    "chance_bypass": Setup(lambda _: Chance(_rng(), bypass=True)),
    "static": Setup(lambda w: Static(popularity(w)), demand_only=False),
    "belady_forced": Setup(_belady(bypass=False), forced=True),
    "belady_bypass": Setup(_belady(bypass=True), per_layer=True),
    "stage": Setup(
        lambda w: StageCache(popularity(w)), _stages, per_layer=True, demand_only=False, timed=True
    ),
    "stage_in_situ_aligned": Setup(
        lambda w: StageCache(popularity(w), 0.0, 1.0), _saem, demand_only=False, timed=True
    ),
    "lru_in_situ": Setup(lambda _: LRU(), lambda _: {"placement": InSituCPU()}),
    "lfu_in_situ": Setup(lambda _: LFU(), lambda _: {"placement": InSituCPU()}),
    "lru_in_turn": Setup(lambda _: LRU(), lambda _: {"placement": InTurn()}),
    "lru_anywhere": Setup(lambda _: LRU(), lambda _: {"placement": Anywhere(_rng())}, True),
    "lfu_anywhere": Setup(lambda _: LFU(), lambda _: {"placement": Anywhere(_rng())}),
    "lru_anywhere_ahead": Setup(
        lambda _: LRU(),
        lambda w: {"placement": Anywhere(_rng()), "prefetch": Foresight(all_events(w), 2)},
        demand_only=False,
        timed=True,
    ),
    "lru_aligned": Setup(lambda _: LRU(), lambda _: {"repack": ExpertAligned()}, forced=True),
    "lru_split": Setup(lambda _: LRU(), lambda _: {"repack": SplitTokens()}, forced=True),
    "lru_foresight": Setup(
        lambda _: LRU(),
        lambda w: {"prefetch": Foresight(all_events(w), 2)},
        demand_only=False,
        timed=True,
    ),
    "lfu_foresight": Setup(
        lambda _: LFU(),
        lambda w: {"prefetch": Foresight(all_events(w))},
        per_layer=True,
        demand_only=False,
        timed=True,
    ),
    "lru_noise": Setup(
        lambda _: LRU(), lambda _: {"prefetch": Noise(_rng())}, demand_only=False, timed=True
    ),
    "lru_capped": Setup(lambda _: LRU(), lambda _: {"insert_cap": 1}, per_layer=True),
    "lfu_capped": Setup(lambda _: LFU(), lambda _: {"insert_cap": 1}),
    "lru_low": Setup(
        lambda _: LRU(),
        lambda _: {"routing": LowWhereAbsent()},
        per_layer=True,
        demand_only=False,
        copies=2,
    ),
    "lfu_low_in_situ": Setup(
        lambda _: LFU(),
        lambda _: {"routing": EverySecondLow(), "placement": InSituCPU()},
        demand_only=False,
        copies=2,
    ),
    "lru_low_split_noise": Setup(
        lambda _: LRU(),
        lambda _: {
            "routing": EverySecondLow(),
            "repack": SplitTokens(),
            "prefetch": Noise(_rng()),
        },
        demand_only=False,
        timed=True,
        copies=2,
    ),
}
