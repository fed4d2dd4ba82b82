"""Two pieces of work at the same time: by how much each is slower than alone."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Protocol

from real.measure import Facts, Probe

_ALONE = 3


class Background(Protocol):
    """Work that goes on by itself once it was started (experts that are carried, or computed in situ)."""

    facts: Facts

    def start(self, count: int) -> None:
        """Begin so many, one after another."""
        ...

    def is_running(self) -> bool:
        """Tell whether some are left."""
        ...

    def finish(self) -> float:
        """Wait for all, and return the ns of one."""
        ...


class Beside:
    """A piece of work again and again while something else goes on, both alone right before and after.

    Ratios are of times that lie within some milliseconds of each other, since a machine that others use
    is slower in one second than in the next.

    Parameters
    ----------
    work
        Is repeated by the calling thread.
    other
        Goes on meanwhile.
    names
        What the two are called: two of ``kernels``, ``copies``, ``reads`` and ``cpu_experts``.
    count
        How many of the other; at least two, and as many as take several times as long as the work.
    """

    def __init__(self, work: Probe, other: Background, names: tuple[str, str], count: int) -> None:
        first, second = names
        self.facts: Sequence[Facts] = (
            {**work.facts, "beside": second},
            {**other.facts, "beside": first},
        )
        self.ratio_names = (f"{first}_beside_{second}", f"{second}_beside_{first}")
        self._work = work
        self._other = other
        self._count = count

    def run(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return the times of both at once in ns, and each over its time alone."""
        before_ns = self._alone_ns()
        self._other.start(self._count)
        other_alone_ns = self._other.finish()
        work_ns, other_ns = self._both_ns()
        work_alone_ns = (before_ns + self._alone_ns()) / 2
        return (work_ns, other_ns), (work_ns / work_alone_ns, other_ns / other_alone_ns)

    def _alone_ns(self) -> float:
        return fmean([self._work.run() for _ in range(_ALONE)])

    def _both_ns(self) -> tuple[float, float]:
        times_ns = []
        self._other.start(self._count)
        while self._other.is_running():
            times_ns.append(self._work.run())
        other_ns = self._other.finish()
        whole = (
            times_ns[:-1] or times_ns or [self._work.run()]
        )  # the last may have been alone at its end
        return fmean(whole), other_ns
