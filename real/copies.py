"""The copy engine: experts on their way to the device, by threads that hold nothing the compute thread needs.

Two queues: copies that somebody waits for go ahead of those that nobody waits for yet, at the edge of every
piece. A copy that has not begun can be dropped; one that has begun comes. What has begun and what has come
is told when it is asked for, so that whoever plans sees one state of things; nothing begins meanwhile
(:meth:`CopyEngine.held`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Condition, RLock, Thread
from typing import Any, Protocol

from torch import Tensor

from sim.events import Kind


class Copy:
    """One expert's copy.

    key, kind      which expert, and LOAD, BYPASS or PREFETCH
    target         uint8[num_bytes], the slot it is for
    awaited        somebody waits for it
    fence          what the device must have done before it may begin (see Device.fence)
    queued_ns, begin_ns, end_ns    on the clock of ``perf_counter_ns``; -1 before
    error          why it has not come; None if it has
    """

    __slots__ = (
        *("awaited", "begin_ns", "end_ns", "error", "fence", "key", "kind", "num_bytes"),
        *("pieces", "queued_ns", "target", "_left", "_next"),
    )

    def __init__(self, key: int, kind: Kind, target: Tensor, fence: Any = None) -> None:
        self.key = key
        self.kind = kind
        self.target = target
        self.num_bytes = target.numel()
        self.fence = fence
        self.awaited = kind is not Kind.PREFETCH
        self.queued_ns = self.begin_ns = self.end_ns = -1
        self.error: BaseException | None = None
        self.pieces: Sequence[tuple[int, int]] = ()
        self._next = self._left = 0


class Carrier(Protocol):
    """What carries pieces of copies from a slow tier (real/carriers.py)."""

    num_workers: int
    """Pieces that are carried at one time, each by a thread."""
    num_ahead: int
    """Pieces that may be asked for behind those, so that setting them up costs the link nothing: 0 or 1."""

    def pieces(self, copy: Copy) -> Sequence[tuple[int, int]]:
        """Return (offset, size) of the pieces that a copy is carried in."""
        ...

    def carry(self, copy: Copy, offset: int, size: int) -> None:
        """Carry one piece; returns when its bytes are in the target."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


class CopyEngine:
    """Carries copies by the threads of a carrier; close it, or use it as a context manager."""

    def __init__(self, carrier: Carrier) -> None:
        self.carrier = carrier
        self.busy_ns = 0
        self._lock = RLock()
        self._wanted = Condition(self._lock)
        self._come = Condition(self._lock)
        self._demand: deque[Copy] = deque()
        self._background: deque[Copy] = deque()
        self._under_way: dict[int, Copy] = {}  # all that have not come
        self._started: list[Copy] = []
        self._arrived: list[Copy] = []
        self._is_closing = False
        self._num_working = 0
        self._working_since_ns = 0
        self._behind: Copy | None = None  # has begun, but waits for the link
        self._threads = [
            Thread(target=self._work, name=f"copies-{number}", daemon=True)
            for number in range(carrier.num_workers + carrier.num_ahead)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> CopyEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop what has not begun, wait for the pieces under way, end the threads; harmless twice.

        Copies whose pieces have not all gone never come; who waits for them is told so.
        """
        with self._lock:
            self._is_closing = True
            for copy in (*self._demand, *self._background):
                del self._under_way[copy.key]
            self._demand.clear()
            self._background.clear()
            self._wanted.notify_all()
            self._come.notify_all()
        for thread in self._threads:
            thread.join()
        if self._threads:
            self.carrier.close()
        self._threads = []

    # -- what a plan asks for -------------------------------------------------------------------------

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let nothing begin meanwhile, so that what is queued stays so."""
        with self._lock:
            yield

    def submit(self, copy: Copy) -> None:
        """Queue a copy, with those that somebody waits for or with the others."""
        with self._lock:
            if self._is_closing:
                raise RuntimeError("the copy engine is closed")
            copy.queued_ns = time.perf_counter_ns()
            copy.pieces = self.carrier.pieces(copy)
            copy._left = len(copy.pieces)
            self._under_way[copy.key] = copy
            (self._demand if copy.awaited else self._background).append(copy)
            self._wanted.notify(len(copy.pieces))

    def promote(self, key: int) -> None:
        """Learn that somebody now waits for a copy, wherever it is."""
        with self._lock:
            copy = self._under_way[key]
            if not copy.awaited:
                copy.awaited = True
                if copy in self._background:  # else all its pieces are on their way
                    self._background.remove(copy)
                    self._demand.append(copy)
                    self._wanted.notify()

    def cancel(self, key: int) -> bool:
        """Drop a copy that has not begun; False if there is none."""
        with self._lock:
            copy = self._under_way.get(key)
            if copy is None or copy.begin_ns >= 0:
                return False
            (self._demand if copy.awaited else self._background).remove(copy)
            del self._under_way[key]
            return True

    # -- what has happened ----------------------------------------------------------------------------

    def take_started(self) -> list[Copy]:
        """Return what has begun since it was last asked, in order."""
        with self._lock:
            started, self._started = self._started, []
            return started

    def take_arrived(self) -> list[Copy]:
        """Return what has come since it was last asked, in order; raises what a copy failed with."""
        with self._lock:
            arrived, self._arrived = self._arrived, []
        for copy in arrived:
            if copy.error is not None:
                raise copy.error
        return arrived

    def wait_for_any(self) -> None:
        """Wait until something has come that was not taken yet; only while copies are under way."""
        with self._lock:
            while not self._arrived:
                if not self._under_way:
                    raise RuntimeError("nothing is under way that could come")
                self._come.wait()

    def wait(self) -> list[Copy]:
        """Wait until something has come; return as :meth:`take_arrived`."""
        self.wait_for_any()
        return self.take_arrived()

    @property
    def has_news(self) -> bool:
        """Tell whether something has come that was not taken yet."""
        return bool(self._arrived)

    @property
    def num_under_way(self) -> int:
        """Copies that have not come yet."""
        return len(self._under_way)

    @property
    def queue_length(self) -> int:
        """Copies that wait, or of which pieces wait."""
        return len(self._demand) + len(self._background)

    # -- the threads ----------------------------------------------------------------------------------

    def _work(self) -> None:
        carry = self.carrier.carry
        while (piece := self._next_piece()) is not None:
            copy, offset, size = piece
            try:
                carry(copy, offset, size)
            except BaseException as error:  # whatever it is, the compute thread raises it
                copy.error = error
            self._ended(copy)

    def _next_piece(self) -> tuple[Copy, int, int] | None:
        with self._lock:
            while not (queue := self._ready()):
                if self._is_closing:
                    return None
                self._wanted.wait()
            copy = queue[0]
            offset, size = copy.pieces[copy._next]
            copy._next += 1
            if copy._next == len(copy.pieces):
                queue.popleft()
            now_ns = time.perf_counter_ns()
            if not self._num_working:
                self._working_since_ns = now_ns
            self._num_working += 1
            if copy.begin_ns < 0:
                copy.begin_ns = now_ns
                self._started.append(copy)
                if self._num_working > self.carrier.num_workers:
                    self._behind = copy
            return copy, offset, size

    def _ready(self) -> deque[Copy]:
        """Return the queue whose first piece may go now; empty if none may.

        Only pieces that somebody waits for go behind others: a piece that nobody waits for would be in the
        way of those that come meanwhile.
        """
        if self._demand or self._num_working >= self.carrier.num_workers:
            return self._demand
        return self._background

    def _ended(self, copy: Copy) -> None:
        with self._lock:
            now_ns = time.perf_counter_ns()
            self._num_working -= 1
            if not self._num_working:
                self.busy_ns += now_ns - self._working_since_ns
            if self._behind is not None and self._behind is not copy:
                self._behind.begin_ns = now_ns  # the link is its own from now on
            self._behind = None
            copy._left -= 1
            if not copy._left:
                copy.end_ns = now_ns
                self._under_way.pop(copy.key, None)
                self._arrived.append(copy)
                self._come.notify()
