"""Where the time of a layer went: what the GPU waited for, by cause."""

from __future__ import annotations

from sim.gpu import GPU

Causes = tuple[int, int, int, int, int]
"""Nanoseconds of waiting for the link, storage, sharing of memory, the host thread, the CPU's experts."""


def causes_of_waiting(
    gpu: GPU,
    began_ns: int,
    free_ns: int,
    cpu_free_ns: int,
    end_ns: int,
    last_read_ns: int,
    lost_ns: int,
) -> Causes:
    """Return the waiting of a layer that was planned at ``began_ns`` and ended at ``end_ns``.

    ``gpu`` is the one whose results came last, at ``free_ns``. Its own waiting is the link's but for
    what has been put down to others. After it the CPU's experts may still run, until ``cpu_free_ns``:
    that is storage's fault up to ``last_read_ns``, when the last of them was read, others' fault for the
    ``lost_ns`` that sharing of memory has cost, and the CPU's for the rest. Last comes the host thread.
    """
    link_ns = free_ns - began_ns - gpu.busy_ns - gpu.host_ns - gpu.storage_ns - gpu.shared_ns
    if end_ns == free_ns:
        return link_ns, gpu.storage_ns, gpu.shared_ns, gpu.host_ns, 0
    late_ns = max(0, cpu_free_ns - free_ns)
    storage_ns = min(late_ns, max(0, last_read_ns - free_ns))
    shared_ns = min(late_ns - storage_ns, lost_ns)
    host_ns = end_ns - max(free_ns, cpu_free_ns)
    return (
        link_ns,
        gpu.storage_ns + storage_ns,
        gpu.shared_ns + shared_ns,
        gpu.host_ns + host_ns,
        late_ns - storage_ns - shared_ns,
    )
