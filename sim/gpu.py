"""One GPU within the layer under way, and which of a layer's experts may compute when."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.events import Kind
from sim.types import LayerPlan

if TYPE_CHECKING:
    from sim.link import Link


class GPU:
    """A GPU's kernels run one after another, so that a busy-until time tells all.

    ``free_ns`` is when its work of this layer ends; ``busy_ns`` how much of that is work; the rest is
    waiting, of which ``host_ns`` for the host thread to issue copies, ``storage_ns`` for storage and
    ``shared_ns`` for others that slowed a copy; what remains is the link's.
    ``blamed_ns`` is up to when waiting has been put down to one of these causes; ``num_runs`` counts
    sets of kernels, of all layers.
    """

    __slots__ = (
        "blamed_ns",
        "busy_ns",
        "free_ns",
        "host_ns",
        "index",
        "link",
        "num_runs",
        "shared_ns",
        "storage_ns",
        "total_busy_ns",
    )

    def __init__(self, index: int) -> None:
        self.index = index
        self.link: Link
        self.total_busy_ns = self.num_runs = 0
        self.begin(0, 0)

    def begin(self, now_ns: int, begin_ns: int) -> None:
        """Begin a layer at ``now_ns``, with kernels from ``begin_ns`` on."""
        self.free_ns = self.blamed_ns = begin_ns
        self.host_ns = begin_ns - now_ns
        self.busy_ns = self.storage_ns = self.shared_ns = 0

    @property
    def blamed(self) -> bool:
        """Tell whether any waiting has been put down to another cause than the link."""
        return bool(self.host_ns or self.storage_ns or self.shared_ns)

    def run(self, ready_ns: int, cost_ns: int) -> int:
        """Run kernels that are ready at ``ready_ns``; return when they begin."""
        begin_ns = ready_ns if ready_ns > self.free_ns else self.free_ns
        self.free_ns = begin_ns + cost_ns
        self.busy_ns += cost_ns
        self.num_runs += 1
        return begin_ns

    def hold(self, now_ns: int, host_ns: int) -> int:
        """Let kernels wait for the host thread for so long; return when they may begin."""
        self.host_ns += host_ns
        self.blamed_ns = now_ns + host_ns
        return self.blamed_ns

    def blame(
        self, now_ns: int, queued_ns: int, held_by: Kind | None, slowed_ns: int, direct: bool
    ) -> None:
        """Say why the GPU has waited for a copy that has come now, issued at ``queued_ns``.

        Before it was issued it was on storage (``held_by`` READ), or its slot was not free (DEMOTE: the
        link's), or the host thread had others to issue (None). ``slowed_ns`` of its time it lost to full
        host memory; the rest is the link's own, or with ``direct`` (no link between storage and where
        experts compute) storage's.
        """
        since_ns = max(self.free_ns, self.blamed_ns)
        if now_ns <= since_ns:
            return
        late_ns = max(0, min(queued_ns, now_ns) - since_ns)
        if held_by is None:
            self.host_ns += late_ns
        elif held_by is Kind.READ:
            self.storage_ns += late_ns
        shared_ns = min(slowed_ns, now_ns - since_ns - late_ns)
        self.shared_ns += shared_ns
        if direct:
            self.storage_ns += now_ns - since_ns - late_ns - shared_ns
        self.blamed_ns = now_ns


class Gate:
    """Lets experts compute in the order of the routing, each when it and all before it are there.

    With ``at_end`` none computes before all are there (an engine that does not overlap copies).
    """

    def __init__(self, at_end: bool) -> None:
        self.at_end = at_end
        self._order: list[int] = []
        self._ready: set[int] = set()

    def begin(self, plan: LayerPlan) -> list[int]:
        """Begin a layer; return the experts that may compute at once."""
        off_gpu = {*plan.on_cpu, *plan.deferred}
        self._order = [key for key in plan.routing.experts if key not in off_gpu]
        self._ready = set(plan.resident)
        return self._released()

    def arrived(self, key: int) -> list[int]:
        """Learn that an awaited expert is there; return those that may compute now."""
        self._ready.add(key)
        return self._released()

    def flush(self) -> list[int]:
        """Let all that are there compute: their slots are needed for those that are not."""
        out = [key for key in self._order if key in self._ready]
        self._order = [key for key in self._order if key not in self._ready]
        return out

    def _released(self) -> list[int]:
        order, ready = self._order, self._ready
        count = 0
        while count < len(order) and order[count] in ready:
            count += 1
        if self.at_end and count < len(order):
            return []
        self._order = order[count:]
        return order[:count]
