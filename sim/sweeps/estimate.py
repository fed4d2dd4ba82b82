"""How long a sweep would take: some of its points are run, and thrown away."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sim.sweeps.chunk import Chunk, Point
from sim.sweeps.pool import PoolEngine
from sim.sweeps.store import Store

_SAMPLE = 12
_BUDGET_S = 30.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """The time of a sweep, from a sample of its points.

    Attributes
    ----------
    seconds
        Of all points, on so many workers as the sweep has.
    error_s
        The standard error of that, from how the sampled points differ; None of a single one,
        and where some were not done.
    num_sampled
        Points that were run.
    num_cut
        Those of them that were not done in time: ``seconds`` is then too low.
    failed
        Number, overrides and error of those that failed; ``seconds`` is of the others, if there are any.
    """

    seconds: float
    error_s: float | None
    num_sampled: int
    num_cut: int
    failed: tuple[dict[str, Any], ...] = ()


def estimate(
    points: Sequence[Point],
    bases: Mapping[int, Mapping[str, Any]],
    workers: int,
    budget_s: float = _BUDGET_S,
) -> Estimate:
    """Return how long the points would take on so many workers.

    Some of them, evenly spread, are run on this machine, for ``budget_s`` seconds at most, one worker to
    each core at most; what they leave is thrown away. A cluster's start-up and waiting are not in it.
    """
    chosen = np.linspace(0, len(points) - 1, min(_SAMPLE, len(points))).round().astype(int)
    sample = [points[i] for i in dict.fromkeys(chosen.tolist())]
    folder = Path(tempfile.mkdtemp(prefix="greenroom-estimate-"))
    try:
        spent, cut = _timed(sample, bases, min(workers, len(sample)), folder, budget_s)
        failed = tuple(Store(folder).errors([point.number for point in sample]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    # A point that fails does so at once, and says nothing of how long the others take.
    without = {told["point"] for told in failed}
    well = [seconds for number, seconds in spent.items() if number not in without]
    times = np.array(well + cut or list(spent.values()))
    total = float(times.mean()) * len(points) / workers
    error = None
    if len(times) > 1 and not cut:
        error = float(times.std(ddof=1)) / len(times) ** 0.5 * len(points) / workers
    return Estimate(total, error, len(spent) + len(cut), len(cut), failed)


def _timed(
    sample: Sequence[Point],
    bases: Mapping[int, Mapping[str, Any]],
    workers: int,
    folder: Path,
    budget_s: float,
) -> tuple[dict[int, float], list[float]]:
    """Return the seconds of each point that was done in time, by number, and so far of each that was not."""
    engine = PoolEngine(workers)
    try:
        _warm_up(sample[0], bases, engine, folder / "warm_up", budget_s)
        waiting = [Chunk(str(folder), {p.base: bases[p.base]}, (p,)) for p in sample]
        begun: dict[int, float] = {}
        spent: dict[int, float] = {}
        end = time.monotonic() + budget_s
        while (waiting or begun) and time.monotonic() < end:
            while waiting and len(begun) < workers:
                chunk = waiting.pop(0)
                begun[chunk.points[0].number] = time.monotonic()
                engine.submit([chunk])
            for ended in engine.wait(max(0.0, min(0.1, end - time.monotonic()))):
                if ended.chunk.folder != str(folder):  # one of the warm-up that comes late
                    continue
                number = ended.chunk.points[0].number
                spent[number] = time.monotonic() - begun.pop(number)
        return spent, [time.monotonic() - start for start in begun.values()]
    finally:
        engine.close()


def _warm_up(
    point: Point,
    bases: Mapping[int, Mapping[str, Any]],
    engine: PoolEngine,
    folder: Path,
    budget_s: float,
) -> None:
    """Let every worker start and read its trace, which a long sweep pays once only."""
    copies = [
        Chunk(str(folder / str(n)), {point.base: bases[point.base]}, (point,))
        for n in range(engine.workers)
    ]
    engine.submit(copies)
    end = time.monotonic() + budget_s
    left = len(copies)
    while left and time.monotonic() < end:
        left -= len(engine.wait(0.1))
