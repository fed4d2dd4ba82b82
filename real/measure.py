"""Takes turns: pieces of work are timed one after another in rounds, never one curve after another.

A machine that others use is twice as slow in one second as in the next. What is compared later must have
had the same seconds, so that every round does each piece a few times, in another order each time, and what
counts is the median over rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, pstdev
from typing import Any, Protocol, cast

import numpy as np

Facts = Mapping[str, Any]
"""What a piece of work is: its ``kind`` and that kind's arguments, as in hwmodels/bench_kinds.py."""
Progress = Callable[[float, int], None]
"""Told the seconds that went by and the rounds that are done."""

_VISIT_NS = 3_000_000
"""In a round a piece is repeated until so much time went by."""
_VISITS = 5
"""At most so often."""
_TAIL = 0.05


class Probe(Protocol):
    """A piece of work that can be timed."""

    facts: Facts

    def run(self) -> float:
        """Do it once and return what it took in ns."""
        ...


class Contention(Protocol):
    """Two pieces of work, each alone and then both at the same time (real/measure_beside.py)."""

    @property
    def facts(self) -> Sequence[Facts]:
        """What the two are, each beside the other."""
        ...

    @property
    def ratio_names(self) -> Sequence[str]:
        """What the slowdowns are called."""
        ...

    def run(self) -> tuple[Sequence[float], Sequence[float]]:
        """Return the time of each beside the other in ns, and by how much each is slower than alone."""
        ...


@dataclass(slots=True)
class Samples:
    """What repetitions of one piece of work took."""

    facts: Facts
    times_ns: list[float] = field(default_factory=list)

    @property
    def median_ns(self) -> float:
        """The median, which neither a slow second nor an interruption moves much."""
        return median(self.times_ns)

    @property
    def mean_ratio(self) -> float:
        """The mean over the median: above 1 where some repetitions were much slower."""
        return fmean(self.times_ns) / self.median_ns

    @property
    def spread(self) -> float:
        """The relative standard deviation, the fastest and slowest twentieth left out."""
        ordered = sorted(self.times_ns)
        cut = int(len(ordered) * _TAIL)
        kept = ordered[cut : len(ordered) - cut]
        return pstdev(kept) / fmean(kept)

    @property
    def quartiles_ns(self) -> tuple[float, float]:
        """The first and third quartile."""
        low, high = np.percentile(self.times_ns, (25, 75))
        return float(low), float(high)


@dataclass(slots=True)
class Measured:
    """What was measured.

    ``ratios`` has by name how much slower a piece of work is beside another one; ``was_cut`` tells that
    somebody stopped it early, ``num_rounds`` how often all pieces had their turn.
    """

    samples: list[Samples]
    ratios: dict[str, list[float]]
    num_rounds: int = 0
    was_cut: bool = False
    seconds: float = 0.0


def take_turns(
    probes: Sequence[Probe | Contention],
    seconds: float,
    *,
    seed: int = 0,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Measured:
    """Let pieces of work take turns until ``seconds`` went by; Ctrl-C ends it early.

    The first round warms up and does not count, unless time ends in the one after it. Pieces that never
    had a turn that counts have no samples, and are left out.
    """
    turns = [_Turn(probe) for probe in probes]
    generator = np.random.default_rng(seed)
    found = Measured([], {})
    start = clock()
    try:
        while clock() - start < seconds:
            for index in generator.permutation(len(turns)):
                turns[index].visit(counts=found.num_rounds > 0)
                found.seconds = clock() - start
                if progress is not None:
                    progress(found.seconds, found.num_rounds)
                if found.seconds >= seconds:
                    break
            else:
                found.num_rounds += 1
    except KeyboardInterrupt:
        found.was_cut = True
    for turn in turns:
        found.samples += [samples for samples in turn.samples if samples.times_ns]
        for name, ratios in turn.ratios.items():
            if ratios:
                found.ratios[name] = ratios
    return found


class _Turn:
    """A probe and what it gave so far."""

    def __init__(self, probe: Probe | Contention) -> None:
        self._probe = cast(Any, probe)
        facts = self._probe.facts
        self._is_single = isinstance(facts, Mapping)
        self.samples = [Samples(one) for one in ([facts] if self._is_single else facts)]
        names = () if self._is_single else self._probe.ratio_names
        self.ratios: dict[str, list[float]] = {name: [] for name in names}

    def visit(self, counts: bool) -> None:
        """Do the piece a few times; in a round that warms up nothing is kept."""
        if not self._is_single:
            times, ratios = self._probe.run()
            if counts:
                self._keep(times, ratios)
            return
        times_ns: list[float] = []
        while len(times_ns) < _VISITS and sum(times_ns) < _VISIT_NS:
            times_ns.append(self._probe.run())
            if not counts:
                return
        self.samples[0].times_ns += times_ns

    def _keep(self, times: Sequence[float], ratios: Sequence[float]) -> None:
        for samples, time_ns in zip(self.samples, times, strict=True):
            samples.times_ns.append(time_ns)
        for own, ratio in zip(self.ratios.values(), ratios, strict=True):
            own.append(ratio)
