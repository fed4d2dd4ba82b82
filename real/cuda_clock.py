"""When the compute stream came to an event, on the clock of the host.

CUDA tells only how far apart two events are: in milliseconds, as a float32 of 24 bits, by a clock of its own
that runs some millionths faster or slower than the host's. So times are told from an anchor, an event whose
time on the host's clock is known, and the anchor is renewed before either error exceeds a microsecond or so.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import NamedTuple

import torch

DUE_NS = 1_000_000_000
"""Age at which an anchor is renewed when the stream is idle anyway."""
OVERDUE_NS = 4_000_000_000
"""Age at which it is renewed though that makes the host wait: a float32 of so many ms is exact to 0.25 us."""
TRIES = 5
"""Events recorded for an anchor; the one that the host knows best is taken."""


class Anchor(NamedTuple):
    """An event, its time on the host's clock, and how far that may be off."""

    event: torch.cuda.Event
    host_ns: int
    error_ns: int


class Stamp(NamedTuple):
    """An event, and the anchor that its time is told from: the one that was valid when it was asked for."""

    event: torch.cuda.Event
    anchor: Anchor


class CUDAClock:
    """Stamps of one stream.

    Times never fall within one anchor. From one to the next they do not either: the stream is idle while an
    anchor is taken, for longer than the clocks drift apart in the meantime.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._anchor = _anchored(stream)

    @property
    def error_ns(self) -> int:
        """How far times may be off."""
        return self._anchor.error_ns

    def stamp(self, stream: torch.cuda.Stream) -> Stamp:
        """Return a mark after all that the stream was asked for."""
        self._renew(stream, OVERDUE_NS)
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return Stamp(event, self._anchor)

    def time_ns(self, stamp: Stamp) -> int:
        """Wait until the stream has come to a stamp; return when that was."""
        stamp.event.synchronize()
        since_ms = stamp.anchor.event.elapsed_time(stamp.event)
        return stamp.anchor.host_ns + round(since_ms * 1e6)

    def idle(self, stream: torch.cuda.Stream) -> None:
        """Learn that the stream has nothing to do now."""
        self._renew(stream, DUE_NS)

    def _renew(self, stream: torch.cuda.Stream, age_ns: int) -> None:
        if perf_counter_ns() - self._anchor.host_ns > age_ns:
            self._anchor = _anchored(stream)


def _anchored(stream: torch.cuda.Stream) -> Anchor:
    stream.synchronize()
    return min((_try(stream) for _ in range(TRIES)), key=lambda anchor: anchor.error_ns)


def _try(stream: torch.cuda.Stream) -> Anchor:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)  # the first time makes the event, which takes longer
    event.synchronize()
    before_ns = perf_counter_ns()
    event.record(stream)
    event.synchronize()
    after_ns = perf_counter_ns()
    return Anchor(event, (before_ns + after_ns) // 2, (after_ns - before_ns) // 2)
