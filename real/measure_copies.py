"""Copies as pieces of work to be timed: through the copy engine, as the executor has them done."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from real.carriers import RAMCarrier
from real.copies import Carrier, Copy, CopyEngine
from real.device import Device
from real.measure import Facts
from real.weight_pool import WeightPool
from sim.events import Kind

NextCopy = Callable[[], Copy]
"""Makes a copy that has not been asked for yet, each of another expert than those before it."""


class CarriedProbe:
    """Experts that come by a carrier, one that is waited for, or many that are queued at once.

    Parameters
    ----------
    facts
        What a row says of it.
    carrier
        What carries them; the probe has its own threads for it.
    next_copy
        Makes the copies.
    queued
        0: from the moment one is asked for until whoever waits for it goes on. Else so many are queued at
        once, and what counts is the time from one's end to the next one's.
    """

    def __init__(
        self, facts: Facts, carrier: Carrier, next_copy: NextCopy, queued: int = 0
    ) -> None:
        self.facts = facts
        self._engine = CopyEngine(carrier)
        self._next_copy = next_copy
        self._queued = queued
        self._under_way: list[Copy] = []

    def run(self) -> float:
        """Have it carried, and return the ns of one."""
        if self._queued:
            self.start(self._queued)
            return self.finish()
        copy = self._next_copy()
        begin_ns = time.perf_counter_ns()
        self._engine.submit(copy)
        self._engine.wait()
        took_ns = time.perf_counter_ns() - begin_ns
        self._engine.take_started()
        return took_ns

    def start(self, count: int) -> None:
        """Queue so many, at least two."""
        self._under_way = [self._next_copy() for _ in range(count)]
        with self._engine.held():
            for copy in self._under_way:
                self._engine.submit(copy)

    def is_running(self) -> bool:
        """Tell whether some are still under way."""
        return self._engine.num_under_way > 0

    def finish(self) -> float:
        """Wait for those that were queued; return the ns from one's end to the next one's."""
        while self._engine.num_under_way:
            self._engine.wait()
        self._engine.take_arrived()
        self._engine.take_started()
        ends = sorted(copy.end_ns for copy in self._under_way)
        return max(1, ends[-1] - ends[0]) / (len(ends) - 1)

    def close(self) -> None:
        """End the threads; harmless twice."""
        self._engine.close()


def copy_probe(
    device: Device,
    host: WeightPool,
    target: WeightPool,
    num_bytes: int,
    *,
    pinned: bool = True,
    queued: int = 0,
) -> CarriedProbe:
    """Return a probe of copies of ``num_bytes`` (a multiple of 4096) from ``host`` to ``target``.

    Each is from and to another place. ``pinned`` says whether ``host`` is pinned memory.
    """
    facts = {
        "kind": "copy",
        "num_bytes": num_bytes,
        "direction": "h2d",
        "pinned": pinned,
        "queued": queued > 0,
    }

    def next_copy() -> Copy:
        key = host.place(num_bytes, num_bytes) // num_bytes
        return Copy(key, Kind.LOAD, target.window(num_bytes), device.fence())

    return CarriedProbe(facts, RAMCarrier(host.store(num_bytes), device), next_copy, queued)


class IssueProbe:
    """What the thread that asks for copies spends on each.

    They are asked for while none may begin, as a plan does it.
    """

    def __init__(
        self, device: Device, host: WeightPool, target: WeightPool, num_bytes: int, count: int = 8
    ) -> None:
        self.facts: Facts = {"kind": "copy_issue", "count": count}
        self._copies = copy_probe(device, host, target, num_bytes, queued=count)
        self._count = count

    def run(self) -> float:
        """Ask for copies, and return what that took of ns."""
        begin_ns = time.perf_counter_ns()
        self._copies.start(self._count)
        took_ns = time.perf_counter_ns() - begin_ns
        self._copies.finish()
        return took_ns

    def close(self) -> None:
        """End the thread of copies."""
        self._copies.close()


class ReturnProbe:
    """One copy from a CUDA device back to the host, on a stream of its own."""

    def __init__(self, host: WeightPool, target: WeightPool, num_bytes: int) -> None:
        self.facts: Facts = {"kind": "copy", "num_bytes": num_bytes, "direction": "d2h"}
        self._host = host
        self._target = target
        self._num_bytes = num_bytes
        self._stream = torch.cuda.Stream(target.buffer.device)

    def run(self) -> float:
        """Copy, and return the ns."""
        begin_ns = time.perf_counter_ns()
        self.start()
        self._stream.synchronize()
        return time.perf_counter_ns() - begin_ns

    def start(self) -> None:
        """Begin a copy and do not wait for it."""
        source, target = self._target.window(self._num_bytes), self._host.window(self._num_bytes)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)


class DuplexProbe:
    """Both directions of a CUDA device's link at once, over one alone."""

    ratio_names = ("duplex_ratio",)

    def __init__(
        self, device: Device, host: WeightPool, target: WeightPool, num_bytes: int, count: int = 4
    ) -> None:
        self.facts: tuple[Facts, ...] = ()
        self._there = copy_probe(device, host, target, num_bytes, queued=count)
        self._back = ReturnProbe(host, target, num_bytes)
        self._count = count

    def run(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Copy one way, then both ways; return how much both move together, as a multiple of one alone."""
        alone_ns = self._time_ns(0)
        both_ns = self._time_ns(self._count)
        return (), (min(2.0, max(1.0, 2 * alone_ns / both_ns)),)

    def _time_ns(self, num_back: int) -> int:
        begin_ns = time.perf_counter_ns()
        self._there.start(self._count)
        for _ in range(num_back):
            self._back.start()
        self._there.finish()
        torch.cuda.synchronize()
        return time.perf_counter_ns() - begin_ns

    def close(self) -> None:
        """End the thread of copies."""
        self._there.close()
