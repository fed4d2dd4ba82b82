"""What a driver with a clock must know of a machine beside its costs, in plain figures.

How many there are of each resource, what is shared, and which work may overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hwmodels.cost import CostModel
from hwmodels.errors import HardwareError
from hwmodels.machine import Machine
from hwmodels.units import transfer_ns
from sim.pools import Layout
from sim.sharing import Use
from sim.storage import Reading

_AMPLE = 1 << 60
"""Bytes a second that bind nobody."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Capacities that copies, CPU experts and storage share, in bytes a second.

    dram_bytes_per_s     one server of host memory for each NUMA node
    numa_bytes_per_s     between the nodes; every GPU and the storage are at node 0
    switch_bytes_per_s   uplink that all GPUs share, both directions together; None if each has its own
    duplex_bytes_per_s   both directions of one GPU's link together
    proportional         shares of a full capacity go by what each would take alone; else they are equal
    """

    dram_bytes_per_s: Sequence[int]
    duplex_bytes_per_s: int = _AMPLE
    numa_bytes_per_s: int = _AMPLE
    switch_bytes_per_s: int | None = None
    proportional: bool = True

    def capacities(self, num_gpus: int, h2d_bytes_per_s: int, d2h_bytes_per_s: int) -> list[int]:
        """Return all capacities: host memory by node, interconnect, switch, then three a GPU."""
        switch = self.switch_bytes_per_s or _AMPLE
        each = [h2d_bytes_per_s, d2h_bytes_per_s, self.duplex_bytes_per_s]
        return [*self.dram_bytes_per_s, self.numa_bytes_per_s, switch, *each * num_gpus]

    def is_ample(self, h2d_bytes_per_s: int, d2h_bytes_per_s: int) -> bool:
        """Tell whether transfers that meet nobody have the full rate of their link."""
        most = max(h2d_bytes_per_s, d2h_bytes_per_s)
        limits = (
            *self.dram_bytes_per_s,
            self.duplex_bytes_per_s,
            self.switch_bytes_per_s or _AMPLE,
        )
        return self.num_nodes == 1 and most <= min(limits)

    @property
    def num_nodes(self) -> int:
        """Number of NUMA nodes."""
        return len(self.dram_bytes_per_s)

    def from_memory(self, node: int, local: bool, passes: int = 1) -> tuple[Use, ...]:
        """Return what reading (or writing) a node's memory uses; not ``local``: from node 0."""
        dram, interconnect = Use(node, passes), self.num_nodes
        return (dram,) if local or node == 0 else (dram, Use(interconnect))

    def over_link(self, gpu: int, to_gpu: bool) -> tuple[Use, ...]:
        """Return what a transfer between host and GPU uses of links."""
        first = self.num_nodes + 2 + 3 * gpu
        switch = () if self.switch_bytes_per_s is None else (Use(self.num_nodes + 1),)
        return (*switch, Use(first if to_gpu else first + 1), Use(first + 2))


@dataclass(frozen=True, slots=True)
class Hardware:
    """Resources and overlap.

    copies_overlap    copies run beside kernels; else kernels wait for all copies of the layer
    cpu_overlaps      CPU experts run beside the GPU; else after its part of the layer
    in_order          experts compute in the routing's order; else as soon as they are there
    chunks            copies an expert is split into
    chunk_compute     a chunk's share of the kernels may run when the chunk is there; only over a link
    gpu_of_key        GPU of each expert, [num_keys]; empty: one GPU
    home_of_layer     GPU of each layer's attention, [num_layers]; empty: one GPU
    hop_ns            activations from one GPU to another
    h2d_bytes_per_s, d2h_bytes_per_s    rate of a GPU's link, each way alone
    setup_ns, gap_ns  see Link
    issue_ns          host time to issue a copy
    staging_ns        host time to stage a pageable copy, by layer (or bank); empty: pinned
    memory            what is shared; None: every transfer has its full rate
    host_passes       passes over host memory of a copy to the GPU (pageable ones cross it thrice)
    num_teams         CPU teams a NUMA node, each with an expert of its own
    numa_local        every node's teams compute the experts that lie there; else all run on node 0
    reading           how storage is read; None: there is none, or it is not needed
    storage_passes    passes over host memory of a read
    through_host      storage is read into host memory, and from there to the GPU; else straight to
                      where experts are computed (unified memory, or no GPU)
    predict_ns, router_ns see sim/speculation.py
    rate_beside_cpu_ratio   share of their rate that kernels keep while the CPU computes experts
    plan_ns           what the driving thread takes to decide a layer, before anything of it begins
    release_bytes_per_s   rate at which dropped experts' memory is given back; 0: it is kept
    kv_bytes_per_token    for the timeline's counters
    """

    copies_overlap: bool = True
    cpu_overlaps: bool = True
    in_order: bool = False
    chunks: int = 1
    chunk_compute: bool = False
    gpu_of_key: Sequence[int] = ()
    home_of_layer: Sequence[int] = ()
    hop_ns: int = 0
    h2d_bytes_per_s: int = _AMPLE
    d2h_bytes_per_s: int = _AMPLE
    setup_ns: int = 0
    gap_ns: int = 0
    issue_ns: int = 0
    staging_ns: Sequence[int] = ()
    memory: Memory | None = None
    host_passes: int = 1
    num_teams: int = 1
    numa_local: bool = True
    reading: Reading | None = None
    storage_passes: int = 1
    through_host: bool = True
    predict_ns: int = 0
    router_ns: int = 0
    rate_beside_cpu_ratio: float = 1.0
    plan_ns: int = 0
    release_bytes_per_s: int = 0
    kv_bytes_per_token: int = 0

    @property
    def num_gpus(self) -> int:
        """Number of GPUs."""
        return max(self.gpu_of_key, default=0) + 1

    @property
    def speculates(self) -> bool:
        """Tell whether reads that nobody waits for have windows of their own."""
        return self.reading is not None and self.reading.in_windows

    @property
    def times_alone(self) -> bool:
        """Tell whether work that meets nobody takes the time that it has where nothing is shared."""
        if self.memory is None:
            return True
        copies = self.h2d_bytes_per_s * self.host_passes, self.d2h_bytes_per_s
        is_simple = self.chunks == 1 and self.num_teams == 1 and self.num_gpus == 1
        return is_simple and self.memory.is_ample(*copies)

    @property
    def computes_chunks(self) -> bool:
        """Tell whether kernels run by chunk: reads of storage come in rounds, which are no chunks."""
        return self.chunk_compute and self.through_host

    def node_of(self, expert: int) -> int:
        """Return the NUMA node where an expert lies: they take turns within a layer."""
        return expert % self.memory.num_nodes if self.memory is not None else 0


def thirds(total: int, chunks: int) -> tuple[int, ...]:
    """Return a whole number cut into ``chunks`` parts, the last of which has the remainder."""
    part = total // chunks
    return (part,) * (chunks - 1) + (total - part * (chunks - 1),)


def hardware_of(costs: CostModel, layout: Layout, is_shared: bool, reads_storage: bool) -> Hardware:
    """Return the resources of a machine under an engine, both as ``costs`` has them.

    ``is_shared``: several kinds of work may meet in host memory or on a link. ``reads_storage``: not all
    experts are in host memory (or, on a machine of one memory, in the cache).
    """
    machine, engine, shape = costs.machine, costs.engine, costs.shape
    link, cpu, storage = machine.link, machine.cpu, machine.storage
    if engine.releases_memory and cpu.release_bytes_per_s is None:
        raise HardwareError(
            f"machine/{machine.name}: cpu.release_bytes_per_s: missing, must be given with "
            f"engine/{engine.name}.releases_memory"
        )
    reading = None
    if reads_storage:
        assert storage is not None
        block, depth = engine.storage_block_bytes, engine.storage_queue_depth
        in_windows = engine.speculation == "before"
        reading = Reading(storage, block, depth, storage.setup_ns, in_windows)
    buffered = storage is not None and engine.storage_access == "page_cache"
    kinds = Hardware(
        copies_overlap=engine.copies_overlap,
        cpu_overlaps=engine.cpu_overlaps,
        in_order=engine.order == "routing",
        chunks=engine.chunks,
        chunk_compute=engine.chunk_compute,
        gpu_of_key=layout.gpu_of_key,
        home_of_layer=layout.home_of_layer,
        memory=_memory(machine) if is_shared or reads_storage else None,
        numa_local=engine.numa_local,
        num_teams=max(1, costs.num_cpu_teams // cpu.numa_nodes),
        reading=reading,
        storage_passes=storage.page_cache_copies if storage is not None and buffered else 1,
        through_host=machine.kind == "discrete",
        predict_ns=cpu.predict_ns,
        router_ns=cpu.router_ns,
        rate_beside_cpu_ratio=machine.device.rate_beside_cpu_ratio,
        release_bytes_per_s=(cpu.release_bytes_per_s or 0) if engine.releases_memory else 0,
        kv_bytes_per_token=shape.kv_bytes_per_token_layer * shape.num_layers,
    )
    if link is None:
        return kinds
    staged = (
        ()
        if link.pinned
        else tuple(
            transfer_ns(shape.expert_bytes(layer), link.pageable_host_bytes_per_s)
            for layer in range(shape.num_banks)
        )
    )
    return replace(
        kinds,
        hop_ns=link.hop_ns,
        h2d_bytes_per_s=link.load_bytes_per_s,
        d2h_bytes_per_s=link.d2h_bytes_per_s,
        setup_ns=link.copy_setup_ns,
        gap_ns=link.copy_gap_ns,
        issue_ns=link.copy_issue_ns,
        staging_ns=staged,
        host_passes=1 if link.pinned else _PAGEABLE_PASSES,
    )


_PAGEABLE_PASSES = 3
"""Passes of a pageable copy over host memory: read and write by the staging copy, then the device's read."""


def _memory(machine: Machine) -> Memory:
    """Return what a machine's transfers and CPU experts share."""
    cpu, link = machine.cpu, machine.link
    nodes = cpu.numa_nodes
    memory = Memory(
        dram_bytes_per_s=(cpu.dram_bytes_per_s // nodes,) * nodes,
        numa_bytes_per_s=cpu.numa_bytes_per_s or _AMPLE,
        proportional=cpu.dram_sharing == "proportional",
    )
    if link is None:
        return memory
    both = int(link.duplex_ratio * max(link.load_bytes_per_s, link.d2h_bytes_per_s))
    return replace(memory, duplex_bytes_per_s=both, switch_bytes_per_s=link.switch_bytes_per_s)
