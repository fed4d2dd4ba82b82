"""Where the time of a layer went: what the GPU waited for, by cause."""

from __future__ import annotations

from typing import NamedTuple

from sim.gpu import GPU
from sim.trips import Due

Causes = tuple[int, int, int, int, int]
"""Nanoseconds of waiting for the link, storage, sharing of memory, the host thread, the CPU's experts."""


class Ends(NamedTuple):
    """When a layer's GPU, the CPU experts that it waits for and awaited prefetches ended, and it itself."""

    gpu_ns: int
    cpu_ns: int
    copies_ns: int
    layer_ns: int


def causes_of_waiting(gpu: GPU, began_ns: int, ends: Ends, due: Due) -> Causes:
    """Return the waiting of a layer that was planned at ``began_ns``.

    ``gpu`` is the one whose results came last. Its own waiting is the link's but for what has been put
    down to others. After it the CPU's experts may still run, the layer's own and those that the layer
    before deferred: that is storage's fault until the last of them was read, full memory's for what it
    cost them, and the CPU's for the rest. Then come copies that nobody needs yet but an engine without
    overlap waits for, and last the host thread.
    """
    link_ns = ends.gpu_ns - began_ns - gpu.busy_ns - gpu.host_ns - gpu.storage_ns - gpu.shared_ns
    if ends.layer_ns == ends.gpu_ns:
        return link_ns, gpu.storage_ns, gpu.shared_ns, gpu.host_ns, 0
    late_ns = max(0, ends.cpu_ns - ends.gpu_ns)
    storage_ns = min(late_ns, max(0, due.last_read_ns - ends.gpu_ns))
    shared_ns = min(late_ns - storage_ns, due.lost_ns)
    work_ns = max(ends.gpu_ns, ends.cpu_ns)
    copied_ns = max(work_ns, ends.copies_ns)
    return (
        link_ns + copied_ns - work_ns,
        gpu.storage_ns + storage_ns,
        gpu.shared_ns + shared_ns,
        gpu.host_ns + ends.layer_ns - copied_ns,
        late_ns - storage_ns - shared_ns,
    )
