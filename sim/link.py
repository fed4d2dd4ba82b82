"""A server of copies, one at a time, with two queues: a direction of a host link, or a storage device.

Each copy is carried in one or more chunks; between chunks a copy that somebody waits for goes ahead
of one that nobody waits for yet. A copy's setup runs from the moment it is issued, so that it is hidden
while earlier copies are on the link; copies that follow each other at once are a small gap apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sim.clock import LOAD_ENDED, Clock, Event
from sim.events import Kind
from sim.sharing import Shares, Use


class Copy(Event):
    """One expert's copy; the event that ends its chunk under way.

    queued_ns    when it was issued
    held_by      what it had to wait for until then: READ, DEMOTE (out of its slot), or None
    awaited      somebody waits for it, so that it goes ahead of those nobody waits for
    begin_ns     when the chunk under way began; -1 before the first
    num_arrived  chunks that have come
    num_run      chunks whose share of the kernels has run before all had come
    slowed_ns    time lost to full host memory
    """

    __slots__ = (
        "awaited",
        "begin_ns",
        "held_by",
        "key",
        "kind",
        "layer",
        "num_arrived",
        "num_run",
        "queued_ns",
        "slowed_ns",
    )

    def __init__(
        self,
        key: int,
        layer: int,
        kind: Kind,
        queued_ns: int,
        awaited: bool,
        held_by: Kind | None,
    ) -> None:
        self._ok = True
        self._value = None
        self.key = key
        self.layer = layer
        self.kind = kind
        self.queued_ns = queued_ns
        self.awaited = awaited
        self.held_by = held_by
        self.begin_ns = -1
        self.num_arrived = self.num_run = 0
        self.slowed_ns = 0


@dataclass(frozen=True, slots=True)
class Carriage:
    """How a link carries copies.

    chunk_ns     time of each chunk of an expert alone on the link, by layer, [num_layers][num_chunks]
    setup_ns     from issue to the first byte of a copy that finds the link idle
    gap_ns       between copies, or chunks, that follow each other at once
    chunk_bytes, bytes_per_s, uses    where capacities are shared: bytes of each chunk, the link's own
                 rate, and what a copy of each key uses, [num_keys]
    """

    chunk_ns: Sequence[Sequence[int]]
    setup_ns: int = 0
    gap_ns: int = 0
    chunk_bytes: Sequence[Sequence[int]] = ()
    bytes_per_s: int = 0
    uses: Sequence[Sequence[Use]] = ()


class Link:
    """Carries copies; within a queue the first come is the first served.

    Parameters
    ----------
    clock
        Tells the time and calls back.
    carriage
        Times, and rates where capacities are shared.
    num_experts
        Experts a layer, to find a key's layer.
    on_start
        Told a copy that is about to begin; returns how long it must wait for a slot. The link waits with
        it, as one stream of copies does.
    on_chunk
        Told a copy each time a chunk of it has arrived.
    shares
        The capacities that copies share with others; None where each copy is alone.
    """

    def __init__(
        self,
        clock: Clock,
        carriage: Carriage,
        num_experts: int,
        on_start: Callable[[Copy], int],
        on_chunk: Callable[[Copy], None],
        shares: Shares | None = None,
    ) -> None:
        self.busy_ns = 0
        self._clock = clock
        self._carriage = carriage
        self._chunk_ns = carriage.chunk_ns
        gaps_ns = carriage.gap_ns * (len(carriage.chunk_ns[0]) - 1)
        self._whole_ns = [sum(chunks) + gaps_ns for chunks in carriage.chunk_ns]
        self._setup_ns = carriage.setup_ns
        self._gap_ns = carriage.gap_ns
        self._num_experts = num_experts
        self._on_start = on_start
        self._on_chunk = on_chunk
        self._shares = shares
        self._demand: deque[Copy] = deque()
        self._background: deque[Copy] = deque()
        self._current: Copy | None = None

    @property
    def queue_length(self) -> int:
        """Copies that wait, one that was stopped between chunks included."""
        return len(self._demand) + len(self._background)

    def is_whole(self, copy: Copy) -> bool:
        """Tell whether all of a copy has arrived."""
        return copy.num_arrived == len(self._chunk_ns[copy.layer])

    def demand(self, key: int, kind: Kind, queued_ns: int, held_by: Kind | None = None) -> None:
        """Queue a copy that a layer waits for, issued at ``queued_ns``; see Copy for ``held_by``."""
        layer = key // self._num_experts
        self._demand.append(Copy(key, layer, kind, queued_ns, True, held_by))
        if self._current is None:
            self._wake_up()

    def background(self, key: int, kind: Kind, queued_ns: int, held_by: Kind | None = None) -> None:
        """Queue a copy that nobody waits for yet."""
        layer = key // self._num_experts
        self._background.append(Copy(key, layer, kind, queued_ns, False, held_by))
        if self._current is None:
            self._wake_up()

    def find(self, key: int) -> Copy | None:
        """Return the background copy of an expert that is queued, stopped or on its way."""
        if self._current is not None and self._current.key == key:
            return self._current
        return next((copy for copy in self._background if copy.key == key), None)

    def promote(self, key: int) -> None:
        """Learn that somebody now waits for a background copy, wherever it is."""
        copy = self.find(key)
        if copy is None:
            return
        copy.awaited = True
        if copy is not self._current:
            self._background.remove(copy)
            self._demand.append(copy)

    def cancel(self, key: int) -> bool:
        """Drop a background copy that has not begun; False if there is none."""
        for copy in self._background:
            if copy.key == key and copy.begin_ns < 0:
                self._background.remove(copy)
                return True
        return False

    # -- all at once --------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Tell whether nothing is queued or on its way."""
        return self._current is None

    def pace(self, layer: int) -> tuple[int, int, int]:
        """Return setup, gap and the time of the bytes of a whole copy, for :class:`sim.at_once.AtOnce`."""
        return self._setup_ns, self._gap_ns, self._whole_ns[layer]

    def carry_all_at_once(
        self, layer: int, count: int, queued_ns: int, issue_ns: int, free_ns: int
    ) -> list[int]:
        """Return when each of ``count`` copies arrives that nothing can come before or between.

        They are issued one after another and their slots are at hand; takes no event. ``free_ns`` is
        now. Only for an idle link that shares nothing.
        """
        setup_ns, gap_ns, whole_ns = self._setup_ns, self._gap_ns, self._whole_ns[layer]
        ends_ns = []
        end_ns, gap = free_ns, 0
        for _ in range(count):
            queued_ns += issue_ns
            flow_ns, after_ns = queued_ns + setup_ns, end_ns + gap
            self.busy_ns -= end_ns if end_ns > queued_ns else queued_ns
            end_ns = (flow_ns if flow_ns > after_ns else after_ns) + whole_ns
            self.busy_ns += end_ns
            ends_ns.append(end_ns)
            gap = gap_ns
        return ends_ns

    # -- one chunk after another -------------------------------------------------------------------

    def _wake_up(self) -> None:
        self._start_next(0)

    def _start_next(self, gap_ns: int) -> None:
        queue = self._demand or self._background
        if not queue:
            self._current = None
            return
        self._current = copy = queue.popleft()
        now_ns = self._clock.now
        slot_ns = self._on_start(copy) if copy.begin_ns < 0 else 0
        copy.begin_ns, flow_ns = self._begin(copy.queued_ns, now_ns, gap_ns, slot_ns)
        wait_ns = flow_ns - now_ns
        copy.callbacks = [self._ended]
        if self._shares is None:
            wait_ns += self._chunk_ns[copy.layer][copy.num_arrived]
            self._clock.schedule(copy, LOAD_ENDED, wait_ns)
        elif wait_ns:
            self._clock.schedule(Event(lambda _: self._carry(copy)), LOAD_ENDED, wait_ns)
        else:
            self._carry(copy)

    def _begin(self, queued_ns: int, free_ns: int, gap_ns: int, slot_ns: int) -> tuple[int, int]:
        """Return when a copy begins on a link that is free at ``free_ns``, and when its bytes flow.

        Before that it waits for its setup, for the gap after the copy before it, or for its slot,
        which is free ``slot_ns`` later and without which it cannot be issued.
        """
        flow_ns = queued_ns + self._setup_ns
        if flow_ns < free_ns + gap_ns:
            flow_ns = free_ns + gap_ns
        if slot_ns:
            return free_ns + slot_ns, max(flow_ns, free_ns + slot_ns + self._setup_ns)
        return (free_ns if queued_ns < free_ns else queued_ns), flow_ns

    def _carry(self, copy: Copy) -> None:
        """Move a chunk through the capacities it shares."""
        assert self._shares is not None
        num_bytes = self._carriage.chunk_bytes[copy.layer][copy.num_arrived]

        def arrived(lost_ns: int) -> None:
            copy.slowed_ns += lost_ns
            self._ended(copy)

        self._shares.start(num_bytes, self._rate(), self._carriage.uses[copy.key], arrived)

    def _rate(self) -> int:
        """Return the link's own rate in bytes a second."""
        return self._carriage.bytes_per_s

    def _ended(self, copy: Any) -> None:
        self.busy_ns += self._clock.now - copy.begin_ns
        copy.num_arrived += 1
        self._on_chunk(copy)
        if copy.num_arrived < len(self._chunk_ns[copy.layer]):
            queue = self._demand if copy.awaited else self._background
            queue.appendleft(copy)
        self._start_next(self._gap_ns)
