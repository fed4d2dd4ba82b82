"""Brings experts to where they compute: links of all GPUs, storage, and what must happen first.

A copy to the GPU may have to wait until its expert has come from storage into host memory, or until the
expert whose slot it takes has gone back there. Who waits for what is kept here; the servers themselves
are in sim/link.py and sim/storage.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sim.clock import Clock
from sim.events import Kind
from sim.gpu import GPU
from sim.hardware import Hardware, thirds
from sim.link import Carriage, Copy, Link
from sim.offloader import Offloader
from sim.sharing import Shares, Use
from sim.storage import Storage
from sim.types import LayerPlan


class CopyCosts(Protocol):
    """What links ask about time, in int nanoseconds."""

    def copy_ns(self, layer: int) -> int:
        """Move the bytes of one expert of ``layer`` over an idle link, setup not counted."""
        ...


class Reports(Protocol):
    """Who is told of copies."""

    def copy_starts(self, copy: Copy) -> int:
        """Learn that a copy to the GPU is about to begin; return how long it must wait for a slot."""
        ...

    def chunk_arrived(self, copy: Copy) -> None:
        """Learn that a chunk of a copy to the GPU has arrived."""
        ...

    def other_arrived(self, copy: Copy) -> None:
        """Learn that a read, or a copy back to the host, has ended."""
        ...

    def at_host(self, key: int) -> None:
        """Learn that an expert that the CPU waits for is in host memory."""
        ...


class _Request:
    """A copy to the GPU, or CPU work, that must wait for ``num_missing`` things to happen first."""

    __slots__ = ("awaited", "key", "kind", "num_missing")

    def __init__(self, key: int, kind: Kind, awaited: bool) -> None:
        self.key = key
        self.kind = kind
        self.awaited = awaited
        self.num_missing = 0


class Supply:
    """The servers of copies and the order in which one must wait for another.

    Parameters
    ----------
    clock, hardware, costs, shares
        The clock, the resources, times of copies, and the capacities they share (None: nothing is).
    offloader
        Is told when copies start and end in host memory.
    gpus
        Given their links.
    reports
        Who is told of copies.

    ``host_free_ns`` is when the host thread has issued, and staged, all copies so far.
    """

    def __init__(
        self,
        clock: Clock,
        hardware: Hardware,
        costs: CopyCosts,
        shares: Shares | None,
        offloader: Offloader,
        gpus: Sequence[GPU],
        reports: Reports,
    ) -> None:
        self._clock = clock
        self._hardware = hardware
        self._offloader = offloader
        self._reports = reports
        self._gpus = gpus
        self._shares = shares
        self._waiting: dict[tuple[Kind, int], list[_Request]] = {}
        self._requests: dict[int, _Request] = {}
        self.host_free_ns = 0
        self._tiers = offloader.host is not None
        self._exclusive = offloader.host is not None and offloader.host.exclusive
        self.storage: Storage | None = None
        self.back: list[Link] = []
        self._build(costs, shares)

    # -- servers ------------------------------------------------------------------------------------

    def _build(self, costs: CopyCosts, shares: Shares | None) -> None:
        hardware, residency = self._hardware, self._offloader.residency
        num_experts = residency.keys.num_experts
        if hardware.reading is not None:
            assert shares is not None
            self.storage = self._build_storage(shares, num_experts)
        banks = range(residency.keys.num_banks)
        chunk_ns = [thirds(costs.copy_ns(bank), hardware.chunks) for bank in banks]
        for gpu in self._gpus:
            if self.storage is not None and not hardware.through_host:
                gpu.link = self.storage
                continue
            carriage = self._carriage(chunk_ns, gpu.index, to_gpu=True)
            told = self._reports.copy_starts, self._reports.chunk_arrived
            gpu.link = Link(self._clock, carriage, num_experts, *told, shares)
            if self._exclusive:
                carriage = self._carriage(chunk_ns, gpu.index, to_gpu=False)
                told = self._host_starts, self._host_chunk
                self.back.append(Link(self._clock, carriage, num_experts, *told, shares))

    def _carriage(self, chunk_ns: Sequence[Sequence[int]], gpu: int, to_gpu: bool) -> Carriage:
        """Return how one direction of a GPU's link carries experts."""
        hardware, memory = self._hardware, self._hardware.memory
        if memory is None:
            return Carriage(chunk_ns, hardware.setup_ns, hardware.gap_ns)
        residency = self._offloader.residency
        link = memory.over_link(gpu, to_gpu)
        uses = [
            (*memory.from_memory(hardware.node_of(key), False, hardware.host_passes), *link)
            for key in range(len(residency.keys))
        ]
        return Carriage(
            chunk_ns,
            hardware.setup_ns,
            hardware.gap_ns,
            [thirds(size, hardware.chunks) for size in residency.layer_bytes],
            hardware.h2d_bytes_per_s if to_gpu else hardware.d2h_bytes_per_s,
            uses,
        )

    def _build_storage(self, shares: Shares, num_experts: int) -> Storage:
        hardware, residency = self._hardware, self._offloader.residency
        memory, reading = hardware.memory, hardware.reading
        assert memory is not None
        assert reading is not None
        rounds = [reading.rounds(size) for size in residency.layer_bytes]
        uses = [
            memory.from_memory(hardware.node_of(key), False, hardware.storage_passes)
            for key in range(len(residency.keys))
        ]
        carriage = Carriage(rounds, reading.setup_ns, 0, rounds, 0, uses)
        through = hardware.through_host
        starts = self._host_starts if through else self._reports.copy_starts
        chunk = self._host_chunk if through else self._reports.chunk_arrived
        return Storage(self._clock, reading, carriage, num_experts, starts, chunk, shares)

    def link_of(self, key: int) -> Link:
        """Return the link to the GPU where an expert belongs."""
        if len(self._gpus) == 1:
            return self._gpus[0].link
        return self._gpus[self._hardware.gpu_of_key[key]].link

    def chunk_bytes(self, copy: Copy) -> int:
        """Return the bytes of the chunk of a copy that has just arrived."""
        size, hardware = self._offloader.residency.layer_bytes[copy.layer], self._hardware
        by_storage = copy.kind is Kind.READ or not hardware.through_host
        if by_storage and hardware.reading is not None:
            return hardware.reading.rounds(size)[copy.num_arrived - 1]
        return thirds(size, hardware.chunks)[copy.num_arrived - 1]

    # -- what a plan asks for -----------------------------------------------------------------------

    def carry(self, plan: LayerPlan) -> None:
        """Hand a plan's copies to the links, what is waited for first, as the host thread issues them."""
        for key in plan.late:
            self._promote(key)
        if self._tiers:
            self._read(plan)
            return
        for key in plan.loads:
            self.link_of(key).demand(key, Kind.LOAD, self._issue())
        for key in plan.bypasses:
            self.link_of(key).demand(key, Kind.BYPASS, self._issue())
        for key in plan.prefetches:
            self.link_of(key).background(key, Kind.PREFETCH, self._issue())

    def count(self, plan: LayerPlan) -> None:
        """Count the bytes of copies that have been carried without the links."""
        if self._shares is not None:
            residency = self._offloader.residency
            moved = sum(map(residency.expert_bytes, [*plan.loads, *plan.bypasses]))
            self._shares.count(moved, (Use(0, self._hardware.host_passes),))

    def _issue(self) -> int:
        """Return when the host thread has issued one more copy."""
        issue_ns, now_ns = self._hardware.issue_ns, self._clock.now
        if not issue_ns:
            return now_ns
        self.host_free_ns = max(self.host_free_ns, now_ns) + issue_ns
        return self.host_free_ns

    def stage(self, layer: int) -> None:
        """Let the host thread stage a pageable copy that begins now; it can do nothing else meanwhile."""
        staging_ns = self._hardware.staging_ns[layer]
        self.host_free_ns = max(self.host_free_ns, self._clock.now) + staging_ns

    def cancel(self, keys: Sequence[int]) -> None:
        """Drop queued prefetches."""
        for key in keys:
            request = self._requests.pop(key, None)
            if request is None:
                self.link_of(key).cancel(key)
                continue
            for requests in self._waiting.values():
                if request in requests:
                    requests.remove(request)

    def demote(self, keys: Sequence[int]) -> None:
        """Begin to copy experts back to host memory."""
        for key in keys:
            gpu = self._hardware.gpu_of_key[key] if len(self._gpus) > 1 else 0
            self.back[gpu].demand(key, Kind.DEMOTE, self._clock.now)

    # -- host memory as a cache above storage -------------------------------------------------------

    def _promote(self, key: int) -> None:
        request = self._requests.get(key)
        if request is None:
            self.link_of(key).promote(key)
            return
        request.awaited = True
        if self.storage is not None:
            self.storage.promote(key)

    def _read(self, plan: LayerPlan) -> None:
        """Ask for what must come from storage, and let copies wait for it and for their slots."""
        slots = self._slots(plan)
        self.demote(plan.demotes)
        now_ns, patient = self._clock.now, set(plan.prefetches)
        kinds = (
            (Kind.LOAD, plan.loads),
            (Kind.BYPASS, plan.bypasses),
            (Kind.EXPERT, [*plan.on_cpu, *plan.deferred]),
            (Kind.PREFETCH, plan.prefetches),
        )
        assert self.storage is not None
        for key in plan.reads:
            ask = self.storage.background if key in patient else self.storage.demand
            ask(key, Kind.READ, now_ns)
        for kind, keys in kinds:
            for key in keys:
                self._request(_Request(key, kind, kind is not Kind.PREFETCH), slots.get(key))

    def _slots(self, plan: LayerPlan) -> dict[int, int]:
        """Return which copy takes the slot of which expert of its pool that must go back first.

        Free room is taken first, so that the last copies and the last victims of a pool belong together.
        """
        pool, victims, found = self._offloader.residency.pool_of_key, dict[int, list[int]](), {}
        for key in plan.evicts if plan.demotes else ():
            victims.setdefault(pool[key], []).append(key)
        for key in (*reversed(plan.prefetches), *reversed(plan.loads)):
            if victims.get(pool[key]):
                found[key] = victims[pool[key]].pop()
        leaving = set(plan.demotes)
        return {key: victim for key, victim in found.items() if victim in leaving}

    def _request(self, request: _Request, victim: int | None) -> None:
        host = self._offloader.host
        assert host is not None
        if host.residency.is_loading(request.key):
            self._wait(request, Kind.READ, request.key)
            if request.awaited and self.storage is not None:
                self.storage.promote(request.key)
        if victim is not None:
            self._wait(request, Kind.DEMOTE, victim)
        if not request.num_missing:
            self._launch(request, None)
        elif request.kind is not Kind.EXPERT:
            self._requests[request.key] = request

    def _wait(self, request: _Request, what: Kind, key: int) -> None:
        self._waiting.setdefault((what, key), []).append(request)
        request.num_missing += 1

    def _launch(self, request: _Request, held_by: Kind | None) -> None:
        if request.kind is Kind.EXPERT:
            self._reports.at_host(request.key)
            return
        self._requests.pop(request.key, None)
        link = self.link_of(request.key)
        queue = link.demand if request.awaited else link.background
        queue(request.key, request.kind, self._issue(), held_by)

    def _host_starts(self, copy: Copy) -> int:
        self._offloader.on_host_started(copy.key)
        return 0

    def _host_chunk(self, copy: Copy) -> None:
        self._reports.other_arrived(copy)
        link = self.storage if copy.kind is Kind.READ else self.back[0]
        assert link is not None
        if not link.is_whole(copy):
            return
        self._offloader.on_host_arrived(copy.key)
        # An expert that has come back is in host memory as well as one that was read.
        whats = (Kind.READ,) if copy.kind is Kind.READ else (Kind.DEMOTE, Kind.READ)
        for what in whats:
            for request in self._waiting.pop((what, copy.key), ()):
                request.num_missing -= 1
                if not request.num_missing:
                    self._launch(request, copy.kind)
