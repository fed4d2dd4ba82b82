"""Which work used what a copy brought: pairs of event rows, found by expert and time."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from sim.events import EVENT_COLUMNS, Kind, Lane

Rows = NDArray[np.int64]

_ARRIVALS = (Kind.LOAD, Kind.BYPASS, Kind.PREFETCH)
_START, _END, _LANE, _KIND, _LAYER, _EXPERT = (
    EVENT_COLUMNS.index(name)
    for name in ("start_ns", "end_ns", "lane", "kind", "layer", "expert")
)  # fmt: skip


def find_flows(rows: Rows, chunks: int = 1) -> Iterator[tuple[int, int]]:
    """Yield (source, target) places in ``rows``, which are in order of their start.

    From a copy to the GPU, of which an expert takes ``chunks``, to the first kernels that could use it;
    from a read of storage to the first copy to the GPU, or work of the CPU or GPU, that could. What is
    read or copied again before any use has no target.
    """
    reads, copies, kernels, users = (_by_expert(rows, chosen) for chosen in _roles(rows))
    for expert, targets in kernels.items():
        yield from _pairs(rows, copies.get(expert, []), targets, chunks)
    for expert, targets in users.items():
        yield from _pairs(rows, reads.get(expert, []), targets, 1)


def _roles(rows: Rows) -> tuple[NDArray[np.bool_], ...]:
    """Return which rows are reads, copies to the GPU, kernels of experts, and users of what was read."""
    kind, lane = rows[:, _KIND], rows[:, _LANE]
    copies = np.isin(kind, _ARRIVALS)  # over a link, or from storage where there is none
    experts = kind == Kind.EXPERT
    return kind == Kind.READ, copies, experts & (lane == Lane.GPU), copies | experts


def _by_expert(rows: Rows, chosen: NDArray[np.bool_]) -> dict[tuple[int, int], list[int]]:
    """Return the places of the chosen rows by (layer, expert)."""
    places: dict[tuple[int, int], list[int]] = defaultdict(list)
    for place in np.flatnonzero(chosen).tolist():
        places[int(rows[place, _LAYER]), int(rows[place, _EXPERT])].append(place)
    return places


def _pairs(
    rows: Rows, sources: list[int], targets: list[int], limit: int
) -> Iterator[tuple[int, int]]:
    """Yield each target with the last ``limit`` sources that ended since the target before it began."""
    sources = sorted(sources, key=lambda place: int(rows[place, _END]))
    ends_ns = [int(rows[place, _END]) for place in sources]
    used = 0
    for target in targets:
        arrived = bisect_right(ends_ns, int(rows[target, _START]))
        for source in sources[max(used, arrived - limit) : arrived]:
            yield source, target
        used = max(used, arrived)
