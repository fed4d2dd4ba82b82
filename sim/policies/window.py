"""Caches that go by the uses within a window: DALI's, and its sliding reading."""

from __future__ import annotations

from collections import deque

from sim.policies.base import Evictable
from sim.policies.classic import LRU
from sim.policies.migration import MigratingCache
from sim.types import LayerRouting, View


class DALI(MigratingCache):
    """Hold the experts that served most tokens in the last window; exchange them when a window ends.

    DALI (arXiv 2602.03495) adds up the tokens each expert serves over a window, and then replaces the
    residents with the lowest sums by the absent experts with the highest. Inside a window nothing
    enters, except while there is free room; replacements load at low priority. The length of the
    window is not in the sources at hand: 256 tokens is what tinyserve takes, RECONSTRUCTION.

    Parameters
    ----------
    window
        Tokens that make a window; it ends at the first event that has seen so many.
    exchanges
        Experts replaced at most at the end of a window; 0 does not limit them. Fewer is calmer.
    """

    def __init__(self, window: int = 256, exchanges: int = 0) -> None:
        if window < 1:
            raise ValueError(f"window = {window}: must be >= 1")
        if exchanges < 0:
            raise ValueError(f"exchanges = {exchanges}: must be >= 0")
        super().__init__()
        self.window = window
        self.exchanges = exchanges
        self._load: dict[int, int] = {}
        self._tokens = 0
        self._step = -1

    def observe(self, routing: LayerRouting, view: View) -> None:
        """Add the event's tokens to the window; end it at the first event of a step that it is full."""
        if view.step.step != self._step:
            self._step = view.step.step
            if self._tokens >= self.window:
                self._exchange()
            self._tokens += view.step.num_tokens
        load = self._load
        for key, tokens in zip(routing.experts, routing.token_counts, strict=True):
            load[key] = load.get(key, 0) + tokens

    def admits(self, key: int, view: View) -> bool:
        """Admit a miss only into free room."""
        return len(self._members) < self._slots

    def give_up(self, evictable: Evictable, view: View) -> int | None:
        """Return the member with the lowest sum so far in this window."""
        load = self._load
        return min(
            filter(evictable, self._members), key=lambda key: (load.get(key, 0), key), default=None
        )

    def _exchange(self) -> None:
        """End the window: pair the best absent experts with the worst residents, and begin anew."""
        load, members = self._load, self._members
        absent = sorted((-tokens, key) for key, tokens in load.items() if key not in members)
        worst = sorted((load.get(key, 0), -key) for key in members)
        free = max(0, self._slots - len(members))
        pairs = [
            (key, -resident)
            for (minus, key), (tokens, resident) in zip(absent[free:], worst, strict=False)
            if -minus > tokens
        ]
        if self.exchanges:
            pairs = pairs[: self.exchanges]
        self._incoming = [key for _, key in absent[:free]] + [key for key, _ in pairs]
        self._outgoing = [key for _, key in pairs]
        self._load, self._tokens = {}, 0


class HotWindow(LRU):
    """Protect the experts used often within a sliding window; LRU among the others.

    tinyserve's reading of DALI: it slides a window over uses, an expert with at least
    ``hot_share`` of them is not dropped while any other can be; of the hot, the first to enter goes.

    Parameters
    ----------
    window
        Uses that the window holds, of all experts of the pool; 256 in tinyserve.
    hot_share
        Share of the window, in (0, 1], that makes an expert hot; 0.1 in tinyserve.
    """

    def __init__(self, window: int = 256, hot_share: float = 0.1) -> None:
        super().__init__()
        if window < 1:
            raise ValueError(f"window = {window}: must be >= 1")
        if not 0.0 < hot_share <= 1.0:
            raise ValueError(f"hot_share = {hot_share}: must be in (0, 1]")
        self._least_hot = max(1, int(window * hot_share))
        self._recent: deque[int] = deque(maxlen=window)
        self._count: dict[int, int] = {}
        self._entered: dict[int, None] = {}  # in this order

    def observe(self, routing: LayerRouting, view: View) -> None:
        """Slide the window over the event's uses, one a distinct expert."""
        count, recent = self._count, self._recent
        for key in routing.experts:
            if len(recent) == recent.maxlen:
                count[recent[0]] -= 1
            recent.append(key)
            count[key] = count.get(key, 0) + 1

    def choose_victim(self, evictable: Evictable, view: View) -> int | None:
        """Return the least recently used expert that is not hot; the first to enter if all are."""
        count, least = self._count, self._least_hot
        for key in self._order:
            if count.get(key, 0) < least and evictable(key):
                return key
        return next(filter(evictable, self._entered), None)

    def on_insert(self, key: int, view: View) -> None:
        """Enter at the young end."""
        super().on_insert(key, view)
        self._entered[key] = None

    def on_evict(self, key: int) -> None:
        """Leave both orders."""
        super().on_evict(key)
        del self._entered[key]
