"""Caches that weigh recency, frequency and place in the model: LFRU, Least-Stale, layer-aware LRU."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sim.policies.base import CachePolicy, Evictable
from sim.policies.ranking import RankedCache
from sim.types import LayerRouting, View

_CLOCKS = ("events", "uses")


class LFRU(RankedCache):
    """Drop the expert with the lowest frequency / age, age being 1 for one used just now.

    score = uses / (clock - last use + 1), evict the lowest (tinyserve; vLLM RFC 38256). What the clock
    counts and what happens to the count of an expert that leaves differs between sources, so both are
    here; the defaults are those that give the published replay (hit rates of LFRU by cache size).

    Parameters
    ----------
    bypass
        Whether a newcomer competes when the event is over, and may be kept out.
    remember
        Whether uses are counted for all experts of the pool, resident or not. False: from when an
        expert enters the cache, as in tinyserve's code.
    clock
        "events": one tick a layer-step of the pool. "uses": one tick an expert used (tinyserve's code).
    """

    def __init__(self, bypass: bool = True, remember: bool = True, clock: str = "events") -> None:
        super().__init__()
        if clock not in _CLOCKS:
            raise ValueError(f"clock = {clock}: must be one of {', '.join(_CLOCKS)}")
        self.admits_after = bypass
        self.remember = remember
        self._tick_each_use = clock == "uses"
        self._clock = 0
        self._uses: dict[int, int] = {}
        self._last: dict[int, int] = {}

    def observe(self, routing: LayerRouting, view: View) -> None:
        """Count the event's uses, once a token."""
        uses, last, now = self._uses, self._last, self._clock
        if not self._tick_each_use:
            now += 1
        for key, tokens in zip(routing.experts, routing.token_counts, strict=True):
            if self._tick_each_use:
                now += 1
            uses[key] = uses.get(key, 0) + tokens
            last[key] = now
        self._clock = now

    def ranks(self, keys: Iterable[int], view: View) -> list[tuple[Any, ...]]:
        """Return (score, last use, key) of each key."""
        uses, last, young = self._uses, self._last, self._clock + 1
        return [(uses[key] / (young - last[key]), last[key], key) for key in keys]

    def on_insert(self, key: int, view: View) -> None:
        """Join the members; what has come unused counts as used never, and now."""
        self._uses.setdefault(key, 0)
        self._last.setdefault(key, self._clock)
        super().on_insert(key, view)

    def on_evict(self, key: int) -> None:
        """Leave the members; forget the count unless it is to be remembered."""
        super().on_evict(key)
        if not self.remember:
            del self._uses[key], self._last[key]


class LeastStale(CachePolicy):
    """Drop experts that this forward pass has not used first, then the others; each first in, first out.

    SpecMD (arXiv 2602.03921) calls those used in the pass fresh and the others stale; the two queues
    are those of tinyserve's implementation. When loads are on demand only and each layer is one event
    a pass, the order is that of the last use, which is LRU: arXiv 2608.07911 says so, and so does a
    test. With prefetching it differs: a use of what is fresh already does not move it.
    """

    def __init__(self) -> None:
        self._fresh: OrderedDict[int, None] = OrderedDict()
        self._stale: OrderedDict[int, None] = OrderedDict()
        self._step = -1

    def observe(self, routing: LayerRouting, view: View) -> None:
        """Make everything stale when a new pass begins."""
        if view.step.step != self._step:
            self._step = view.step.step
            self._stale.update(self._fresh)
            self._fresh.clear()

    def choose_victim(self, evictable: Evictable, view: View) -> int | None:
        """Return the longest stale evictable key; if there is none, the longest fresh one."""
        for queue in (self._stale, self._fresh):
            for key in queue:
                if evictable(key):
                    return key
        return None

    def on_hit(self, keys: Sequence[int], view: View) -> None:
        """Make the stale among the used keys fresh."""
        stale, fresh = self._stale, self._fresh
        for key in keys:
            if key in stale:
                del stale[key]
                fresh[key] = None

    def on_insert(self, key: int, view: View) -> None:
        """Enter fresh."""
        self._fresh[key] = None

    def on_evict(self, key: int) -> None:
        """Leave the queue it is in."""
        (self._stale if key in self._stale else self._fresh).pop(key)


class LLRU(CachePolicy):
    """Drop the expert unused for most passes; among equals, the one whose layer comes up latest.

    Plain LRU, when layers share a pool, drops what the coming layers used in the last pass: just what
    is needed next. Here an expert's age is counted in turns of its own layer that it has let pass, and
    equals fall by the distance to their layer's next turn (arXiv 2509.02408, a layer-based extension
    of LRU). Only the paper's abstract was at hand: this form of the rule is a RECONSTRUCTION. With a
    pool a layer it is LRU.
    """

    def __init__(self) -> None:
        # By step of the last use, the first first; then by layer; keys in the order of their use.
        self._used: dict[int, dict[int, dict[int, None]]] = {}
        self._step: dict[int, int] = {}  # of each member
        self._num_experts = 1
        self._num_layers = 1

    def start(self, keys: Sequence[int], num_slots: int, view: View) -> None:
        """Learn the model's shape."""
        self._num_experts, self._num_layers = view.num_experts, view.num_layers

    def choose_victim(self, evictable: Evictable, view: View) -> int | None:
        """Return the evictable member that has let most turns pass, the farthest from its next."""
        for keys in self._by_turns_passed(view.layer):
            for key in keys:
                if evictable(key):
                    return key
        return None

    def on_hit(self, keys: Sequence[int], view: View) -> None:
        """Note the uses, in order."""
        step, known = view.step.step, self._step
        for key in keys:
            if known[key] != step:
                self.on_evict(key)
                self._note(key, step)

    def on_insert(self, key: int, view: View) -> None:
        """Enter as used now."""
        self._note(key, view.step.step)

    def on_evict(self, key: int) -> None:
        """Leave the members."""
        step, layer = self._step.pop(key), key // self._num_experts % self._num_layers
        layers = self._used[step]
        del layers[layer][key]
        if not layers[layer]:
            del layers[layer]
            if not layers:
                del self._used[step]

    def _note(self, key: int, step: int) -> None:
        self._step[key] = step
        layer = key // self._num_experts % self._num_layers
        self._used.setdefault(step, {}).setdefault(layer, {})[key] = None

    def _by_turns_passed(self, layer: int) -> Iterator[Iterable[int]]:
        """Yield members by falling turns passed, then by falling distance to their layer's next turn.

        Layers up to the present one have had their turn in this step, and wait longest for the next;
        so what they used in a step comes level with what the layers ahead used in the step before.
        """
        behind: dict[int, dict[int, None]] = {}
        before = -2
        for step, layers in self._used.items():
            if step > before + 1:
                yield from _falling(behind)
                behind = {}
            yield from _falling({at: keys for at, keys in layers.items() if at <= layer})
            yield from _falling(behind)
            behind = {at: keys for at, keys in layers.items() if at > layer}
            before = step
        yield from _falling(behind)


def _falling(layers: dict[int, dict[int, None]]) -> Iterator[Iterable[int]]:
    return (layers[layer] for layer in sorted(layers, reverse=True))
