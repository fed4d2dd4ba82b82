"""A storage device: reads of whole experts, in order, at a rate that depends on how much is outstanding.

An expert is read in blocks, ``queue_depth`` of them at one time. The device serves blocks in the order
in which they were asked for, so reads do not overtake each other, but the blocks of the reads behind
fill the device's queue: the rate is that of the curve at min(queue depth, blocks outstanding). Between
rounds of ``queue_depth`` blocks a read that somebody waits for goes ahead of one that nobody waits for.
Under some engines (sim/speculation.py) the latter go only while a window is open, and only if they come
whole before it closes; blocks that are outstanding then are read all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hwmodels.units import NS_PER_S
from sim.clock import LOAD_ENDED, Clock, Event
from sim.events import Kind
from sim.link import Carriage, Copy, Link
from sim.sharing import Shares


class Curve(Protocol):
    """Rates of a device."""

    def bytes_per_s(self, block_bytes: int, queue_depth: int) -> int:
        """Rate at a block size with so many blocks outstanding."""
        ...


@dataclass(frozen=True, slots=True)
class Reading:
    """How an engine reads: block size, blocks asked for at one time, the device's rates and setup.

    ``in_windows``: reads that nobody waits for go only while a window is open.
    """

    curve: Curve
    block_bytes: int
    queue_depth: int
    setup_ns: int = 0
    in_windows: bool = False

    def rounds(self, num_bytes: int) -> tuple[int, ...]:
        """Return the bytes of each round of ``queue_depth`` blocks that an expert takes."""
        round_bytes = self.block_bytes * self.queue_depth
        whole, rest = divmod(num_bytes, round_bytes)
        return (round_bytes,) * whole + ((rest,) if rest or not whole else ())


class Storage(Link):
    """A link whose rate grows with what is outstanding.

    ``thrown_bytes`` are those of reads that were not done when their window closed.
    """

    def __init__(
        self,
        clock: Clock,
        reading: Reading,
        carriage: Carriage,
        num_experts: int,
        on_start: Callable[[Copy], int],
        on_chunk: Callable[[Copy], None],
        shares: Shares,
    ) -> None:
        self._tell_start = on_start
        told = self._begins if reading.in_windows else on_start
        super().__init__(clock, carriage, num_experts, told, on_chunk, shares)
        self._reading = reading
        self._blocks = [
            sum(-(-size // reading.block_bytes) for size in sizes) for sizes in carriage.chunk_bytes
        ]
        self._rates: dict[int, int] = {}
        self._is_waking = False
        self.thrown_bytes = 0
        self._held: list[Copy] = []  # while no window is open
        self._is_open = not reading.in_windows
        self._on_settled: Callable[[], None] | None = None
        self._flow: tuple[Copy | None, int, int] = (None, 0, 0)  # whose, since when, its rate
        self._overrun_bytes = 0

    # -- windows ------------------------------------------------------------------------------------

    def background(self, key: int, kind: Kind, queued_ns: int, held_by: Kind | None = None) -> None:
        """Queue a read that nobody waits for yet, or keep it until a window opens."""
        if self._is_open:
            super().background(key, kind, queued_ns, held_by)
        else:
            self._held.append(Copy(key, key // self._num_experts, kind, queued_ns, False, held_by))

    def open(self) -> None:
        """Open a window: reads that nobody waits for may begin."""
        self._is_open = True
        for copy in self._held:
            copy.queued_ns = self._clock.now
        self._background.extend(self._held)
        self._held.clear()
        if self._background and self._current is None:
            self._wake_up()

    def close(self, on_settled: Callable[[], None]) -> list[int]:
        """Close the window; return whose reads are given up.

        ``on_settled`` is called when the blocks that are outstanding have come, if there are any.
        """
        self._is_open = False
        dropped = [*self._background]
        self._background.clear()
        self.thrown_bytes += sum(
            sum(self._carriage.chunk_bytes[copy.layer][: copy.num_arrived]) for copy in dropped
        )
        if self._current is not None and not self._current.awaited:
            self._overrun_bytes = self._outstanding_bytes(self._current, dropped)
            sizes = self._carriage.chunk_bytes[self._current.layer]
            self.thrown_bytes += sum(sizes[: self._current.num_arrived + 1]) + self._overrun_bytes
            dropped.append(self._current)
            self._on_settled = on_settled
        return [copy.key for copy in dropped]

    def _outstanding_bytes(self, current: Copy, behind: Sequence[Copy]) -> int:
        """Return the bytes of the blocks that the device has been asked for beyond the read under way."""
        reading, chunk_bytes = self._reading, self._carriage.chunk_bytes
        copy, since_ns, rate = self._flow
        left_bytes = chunk_bytes[current.layer][current.num_arrived]
        if copy is current:  # else it is still in its setup
            left_bytes -= (self._clock.now - since_ns) * rate // NS_PER_S
        blocks = reading.queue_depth - max(1, -(-left_bytes // reading.block_bytes))
        behind_bytes = sum(sum(chunk_bytes[copy.layer][copy.num_arrived :]) for copy in behind)
        return max(0, min(blocks * reading.block_bytes, behind_bytes))

    @property
    def is_settling(self) -> bool:
        """Tell whether a read is under way whose window has closed."""
        return self._on_settled is not None

    def cancel(self, key: int) -> bool:
        """Drop a background copy that has not begun; False if there is none."""
        for copy in self._held:
            if copy.key == key:
                self._held.remove(copy)
                return True
        return super().cancel(key)

    def _begins(self, copy: Copy) -> int:
        """Report the begin of a read; one that may be thrown away is reported when it has come."""
        return self._tell_start(copy) if copy.awaited else 0

    def _ended(self, copy: Any) -> None:
        if self._on_settled is not None:  # its window has closed
            self._settle(copy)
            return
        if self._reading.in_windows and not copy.awaited:
            copy.num_arrived += 1
            if self.is_whole(copy):
                self._tell_start(copy)
            copy.num_arrived -= 1
        super()._ended(copy)

    def _settle(self, copy: Copy) -> None:
        """Read what else is outstanding; then the device is free."""
        now_ns, on_settled = self._clock.now, self._on_settled
        assert on_settled is not None
        self.busy_ns += now_ns - copy.begin_ns
        if self._overrun_bytes:
            num_bytes, self._overrun_bytes, copy.begin_ns = self._overrun_bytes, 0, now_ns
            uses = self._carriage.uses[copy.key]
            assert self._shares is not None
            self._shares.start(num_bytes, self._rate(), uses, lambda _: self._settle(copy))
            return
        self._on_settled = None
        self._start_next(self._gap_ns)
        on_settled()

    # -- the device ---------------------------------------------------------------------------------

    def _wake_up(self) -> None:
        """Begin when all reads that are asked for at this time are in the queue: they count for the rate."""
        if not self._is_waking:
            self._is_waking = True
            self._clock.schedule(Event(self._woken), LOAD_ENDED, 0)

    def _woken(self, _: Any) -> None:
        self._is_waking = False
        if self._current is None:
            self._start_next(0)

    def _carry(self, copy: Copy) -> None:
        if not copy.awaited:
            self._flow = copy, self._clock.now, self._rate()
        super()._carry(copy)

    def _rate(self) -> int:
        """Return the device's rate with what is outstanding now."""
        reading = self._reading
        copies: Sequence[Copy | None] = (self._current, *self._demand, *self._background)
        outstanding = 0
        for copy in copies:
            if outstanding >= reading.queue_depth:
                break
            if copy is not None:
                outstanding += self._blocks[copy.layer]
        depth = max(1, min(reading.queue_depth, outstanding))
        if depth not in self._rates:
            self._rates[depth] = reading.curve.bytes_per_s(reading.block_bytes, depth)
        return self._rates[depth]
