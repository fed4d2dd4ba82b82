"""Rules that load a share of a layer's missing experts and compute the rest on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

from sim.policies.base import PlacementPolicy
from sim.types import ExpertWork, LayerRouting, Phase, Service, View


class FetchShare(PlacementPolicy):
    """Load the share of the misses that link and CPU finish at the same time (FreeToken, arXiv 2608.16157).

    Of m missing experts those used most recently are loaded and offered to the cache, a share q* of them;
    the CPU computes the others meanwhile. The number is the neighbour of q* m with the lower
    max(loaded (1 - q*), others q*), the lower of equals. Prompts stream what is missing through two
    layer buffers and keep nothing (FlashML-org/FreeToken streams the whole layer; here only what is used
    and missing moves).

    Parameters
    ----------
    contended
        True: q* = link rate / CPU rate, FreeToken's formula for rates measured one at a time, which holds
        where the CPU takes all that host memory gives and copies take their part of it: the CPU keeps
        the rest. False: q* = link rate / (link rate + CPU rate), its formula for rates measured
        together, and the right one where the two do not hinder each other.
    threshold
        Where the CPU's rate is not above so many times the link's, everything is loaded; 2 is FreeToken's
        advice.
    fetch_cap
        The most experts loaded an event, instead of a share; 0: by the share. FreeToken falls back to 1
        where it has no measured rates.
    """

    def __init__(self, contended: bool = True, threshold: float = 2.0, fetch_cap: int = 0) -> None:
        if not threshold >= 0.0:
            raise ValueError(f"threshold = {threshold}: must be >= 0")
        if contended and threshold < 1.0:
            raise ValueError(
                f"threshold = {threshold}: must be >= 1 with contended, or q* exceeds 1"
            )
        if fetch_cap < 0:
            raise ValueError(f"fetch_cap = {fetch_cap}: must be >= 0")
        self._contended = contended
        self._threshold = threshold
        self._fetch_cap = fetch_cap
        self._share: dict[int, float] = {}
        self._last_use: dict[int, int] = {}
        self._event: tuple[Sequence[int], int] = ((), -1)

    def observe(self, routing: LayerRouting, view: View) -> None:
        """Note when the experts of the event before were used; this event's must not count yet."""
        keys, event = self._event
        self._last_use.update(dict.fromkeys(keys, event))
        self._event = routing.experts, view.event

    def place(self, work: Sequence[ExpertWork], view: View) -> Sequence[Service]:
        """Return LOAD or CPU for each missing expert of a decoding event, BYPASS in a prompt."""
        if view.step.phase == Phase.PREFILL:
            return [Service.BYPASS] * len(work)
        fetched = self._fetch_cap or self._number(len(work), view)
        if fetched >= len(work):
            return [Service.LOAD] * len(work)
        last = self._last_use
        row = sorted(range(len(work)), key=lambda place: (-last.get(work[place][0], -1), place))
        services = [Service.CPU] * len(work)
        for place in row[:fetched]:
            services[place] = Service.LOAD
        return services

    def _number(self, missing: int, view: View) -> int:
        """Return how many of ``missing`` experts to load."""
        layer = view.layer
        share = self._share.get(layer)
        if share is None:
            share = self._share[layer] = self._work_out(layer, view)
        low = int(share * missing)
        if low >= missing:
            return missing
        slower = [max(n * (1.0 - share), (missing - n) * share) for n in (low, low + 1)]
        return low if slower[0] <= slower[1] else low + 1

    def _work_out(self, layer: int, view: View) -> float:
        """Return q* of a layer; rates are as one over the time that an expert takes."""
        load_ns, cpu_ns = view.costs.load_ns(layer), view.costs.expert_cpu_ns(layer, 1)
        if load_ns <= self._threshold * cpu_ns:
            return 1.0
        return cpu_ns / load_ns if self._contended else cpu_ns / (load_ns + cpu_ns)


class CPUShare(PlacementPolicy):
    """Load all misses while the cache fills, then compute a fixed share of them on the CPU (llama.cpp).

    That is ``--moe-cache-cpu-share`` beside the expert cache of llama.cpp. Events of many tokens leave the
    cache alone: their misses are streamed for this use. RECONSTRUCTION: which of an event's misses go to
    the CPU is not known, here the last in its order; the share is met over events, by carrying what is
    left of an expert. A layer's pool counts as full from the event on that finds as many free bytes
    as the layer's event before, though that one loaded something.

    Parameters
    ----------
    share
        Share of the misses that the CPU computes, in [0, 1]; llama.cpp's tuner tries 0, 0.5 and 0.95.
    max_tokens
        The most tokens of a step that use the cache; 32 in llama.cpp.
    """

    def __init__(self, share: float = 0.5, max_tokens: int = 32) -> None:
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"share = {share}: must be in [0, 1]")
        if max_tokens < 1:
            raise ValueError(f"max_tokens = {max_tokens}: must be >= 1")
        self.share = share
        self.max_tokens = max_tokens
        self._owed = 0.0
        self._free_bytes: dict[int, int] = {}
        self._full: set[int] = set()

    def place(self, work: Sequence[ExpertWork], view: View) -> Sequence[Service]:
        """Return LOAD or CPU for each missing expert, BYPASS where the step has many tokens."""
        if view.step.num_tokens > self.max_tokens:
            return [Service.BYPASS] * len(work)
        if not work or not self._is_full(view):
            return [Service.LOAD] * len(work)
        self._owed += self.share * len(work)
        on_cpu = int(self._owed + 1e-9)
        self._owed -= on_cpu
        return [Service.LOAD] * (len(work) - on_cpu) + [Service.CPU] * on_cpu

    def _is_full(self, view: View) -> bool:
        layer = view.layer
        if layer in self._full:
            return True
        free_bytes = view.free_bytes
        if self._free_bytes.get(layer) == free_bytes:
            self._full.add(layer)
            return True
        self._free_bytes[layer] = free_bytes
        return False
