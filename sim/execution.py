"""Carries out one layer's plan at a time: kernels, copies and CPU work, and where the time went."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from sim.accounts import Ends, causes_of_waiting
from sim.at_once import AtOnce
from sim.clock import Clock
from sim.counter import StepCounter
from sim.events import LANE_OF_COPY, Counter, EventLog, Kind, Lane
from sim.gpu import GPU, Gate
from sim.hardware import Hardware
from sim.insitu import InSitu
from sim.kernels import KernelCosts, kernels_of
from sim.link import Copy
from sim.offloader import Offloader
from sim.sharing import Shares
from sim.speculation import Release
from sim.staging import Staging
from sim.supply import CopyCosts, Supply
from sim.trips import CPUCosts
from sim.types import LayerPlan, StepInfo


class LayerCosts(CopyCosts, CPUCosts, KernelCosts, Protocol):
    """What a layer's work takes, in int nanoseconds."""


class Execution:
    """The layer under way.

    ``num_awaited`` counts what must still end before the end of the layer is known; when it comes to 0
    ``on_known`` is called.
    """

    def __init__(
        self,
        clock: Clock,
        hardware: Hardware,
        costs: LayerCosts,
        shares: Shares | None,
        offloader: Offloader,
        counter: StepCounter,
        log: EventLog | None,
        on_known: Callable[[], None],
    ) -> None:
        keys = offloader.residency.keys
        self.num_awaited = self._num_demanded = 0
        self.kernels = kernels_of(hardware, costs, keys, log)
        self.cpu = InSitu(clock, hardware, costs, shares, offloader, log, self._one_less)
        self.at_host = self.cpu.at_host
        self.supply = Supply(clock, hardware, costs, shares, offloader, self.kernels.gpus, self)
        self._clock = clock
        self._hardware = hardware
        self._offloader = offloader
        self._counter = counter
        self._log = log
        self._on_known = on_known
        self._gpus = self.kernels.gpus
        self._one_gpu = len(self._gpus) == 1
        self._staging = Staging(
            len(self._gpus),
            lambda key: self.kernels.gpu_of(key).index,
            offloader.staging_slots,
            self._flush,
        )
        self._gate: Gate | None = None
        if hardware.in_order or not hardware.copies_overlap:
            self._gate = Gate(at_end=not hardware.copies_overlap)
        self._whole_copies = hardware.chunks == 1 and hardware.through_host
        self._release: Release | None = None
        if hardware.release_bytes_per_s:
            self._release = Release(hardware, offloader, self.supply.storage)
        self._release_ns = 0  # of a layer whose kernels wait for all its copies
        self._at_once: AtOnce | None = None
        if AtOnce.suits(hardware, keys.num_copies) and log is None:
            self._at_once = AtOnce(hardware, self.kernels, self.cpu, offloader)
        self._slows_kernels = hardware.rate_beside_cpu_ratio < 1 and hardware.cpu_overlaps
        self._may_jump = log is None and self._one_gpu and hardware.reading is None
        self._blames = shares is not None or self._gate is not None
        self._step = offloader.view.step
        self._plan: LayerPlan | None = None
        self._began_ns = self._end_ns = self._copied_ns = 0

    # -- a layer's begin and end --------------------------------------------------------------------

    def begin_step(self, now_ns: int) -> None:
        """Learn that a step begins."""
        self._began_ns = now_ns

    def begin(self, step: StepInfo, plan: LayerPlan, now_ns: int) -> None:
        """Start a plan's copies, kernels and CPU work."""
        self._step, self._plan = step, plan
        self._began_ns = begin_ns = now_ns
        issue_ns, gpus = self._hardware.issue_ns, self._gpus
        if self._slows_kernels:
            self.kernels.cpu_until_ns = self.cpu.until_ns(step, plan, now_ns)
        if issue_ns and plan.resident and (plan.loads or plan.bypasses):
            # One thread issues the copies that are waited for first, and then the kernels.
            begin_ns += issue_ns * (len(plan.loads) + len(plan.bypasses))
        if self._release is not None:
            begin_ns += self._releases(self._release.ns(plan.evicts), plan)
        if self._one_gpu:
            gpus[0].begin(now_ns, begin_ns)
        else:
            self.kernels.begin(plan.routing.layer, now_ns, begin_ns)
        if plan.packed:
            self.kernels.pack(step, plan.routing.layer, begin_ns)
        ready = plan.resident if self._gate is None else self._gate.begin(plan)
        if ready and self._at_once is not None:  # one GPU, no log
            gpus[0].run(begin_ns, self.kernels.cost_ns(step, plan, ready))
        elif ready:
            self._run(plan, ready, begin_ns)
        if plan.on_cpu or plan.deferred or self.cpu.owes:
            self.num_awaited += self.cpu.begin(step, plan, now_ns, gpus[0].link.is_idle)
        if plan.late or plan.loads or plan.bypasses or plan.prefetches:
            self._queue_copies(plan, now_ns)
        elif self._offloader.host is not None and (plan.on_cpu or plan.deferred):
            self.supply.carry(plan)  # storage may have what the CPU needs
        if self.cpu.is_held and not self._num_demanded:
            self._begin_cpu_late()

    def _releases(self, release_ns: int, plan: LayerPlan) -> int:
        """Return how long a plan's kernels wait for dropped experts' memory to be given back.

        The host thread does that when it has asked for the copies; if it waits for these first, afterwards.
        """
        later = not self._hardware.copies_overlap and (plan.late or plan.loads or plan.bypasses)
        self._release_ns = release_ns if later else 0
        return release_ns - self._release_ns

    @property
    def is_quiet(self) -> bool:
        """Tell whether the layer's end is known and nothing at all is under way beside it."""
        is_known = self._may_jump and not self.num_awaited and not self.cpu.num_under_way
        return is_known and self._gpus[0].link.is_idle

    def settle(self) -> int:
        """Return when the layer ends, which is now known; the host thread must be free as well."""
        end_ns = self._gpus[0].free_ns
        if not self._one_gpu and self._plan is not None:
            end_ns = self._results_ns()
        if self.cpu.end_ns > end_ns:
            end_ns = self.cpu.end_ns
        if self._copied_ns > end_ns:
            end_ns = self._copied_ns
        if self.supply.host_free_ns > end_ns:
            end_ns = self.supply.host_free_ns
        self._end_ns = end_ns
        return end_ns

    def close(self, home: int, extra_ns: int, hop_ns: int) -> None:
        """Account for the time since the last plan, of which the last was work of GPU ``home`` and a hop.

        GPU work and waiting, by cause, make up the whole of it; a hop between GPUs is the link's.
        """
        plan = self._plan
        self._gpus[home].total_busy_ns += extra_ns
        if plan is None:  # before the step's first layer only the host thread can be in the way
            host_ns = max(0, self._end_ns - self._began_ns)
            self._counter.add_time(extra_ns, hop_ns, 0, 0, host_ns)
            return
        gpu = self._gpus[0]
        gpu.total_busy_ns += gpu.busy_ns
        free_ns = gpu.free_ns
        if not self._one_gpu:
            for other in self._gpus[1:]:
                other.total_busy_ns += other.busy_ns
            gpu, free_ns = self.kernels.last(plan.routing.layer), self._results_ns()
        if self._end_ns == free_ns and not gpu.blamed:
            link_ns = free_ns - self._began_ns - gpu.busy_ns
            self._counter.add_time(gpu.busy_ns + extra_ns, link_ns + hop_ns)
        else:
            ends = Ends(free_ns, self.cpu.end_ns, self._copied_ns, self._end_ns)
            link_ns, *causes = causes_of_waiting(gpu, self._began_ns, ends, self.cpu.due)
            self._counter.add_time(gpu.busy_ns + extra_ns, link_ns + hop_ns, *causes)
        admissions = self._offloader.end_layer(plan)
        if admissions:
            self._counter.add_admissions(admissions)
            if plan.demotes:
                self._counter.add_demotions(plan.demotes)
                self.supply.demote(plan.demotes)
        self._plan = None

    def _results_ns(self) -> int:
        assert self._plan is not None
        layer = self._plan.routing.layer
        return self.kernels.results_ns(self.kernels.last(layer), layer)

    def _begin_cpu_late(self) -> None:
        """Begin the CPU's part when the GPU has done its own, which is now known."""
        is_idle = self._gpus[0].link.is_idle
        self.num_awaited += self.cpu.begin_late(self._results_ns(), is_idle)

    def _one_less(self) -> None:
        """Learn that one of the things that are awaited has ended."""
        self.num_awaited -= 1
        if self.cpu.is_held and not self._num_demanded:
            self._begin_cpu_late()
        if not self.num_awaited:
            self._on_known()

    # -- copies -------------------------------------------------------------------------------------

    def _queue_copies(self, plan: LayerPlan, now_ns: int) -> None:
        if self._at_once is not None and self._at_once.may_carry(plan):
            issued_ns = self._at_once.carry(self._step, plan, now_ns)
            self.supply.count(plan)
            self.supply.host_free_ns = max(self.supply.host_free_ns, issued_ns)
            return
        if plan.bypasses:
            self._staging.begin(plan)
        self._num_demanded = len(plan.late) + len(plan.loads) + len(plan.bypasses)
        self.num_awaited += self._num_demanded
        if not self._hardware.copies_overlap:  # an engine that waits for all it copies
            self.num_awaited += len(plan.prefetches)
        if self._hardware.computes_chunks:
            for key in plan.late:
                copy = self.supply.link_of(key).find(key)
                if copy is not None:
                    for _ in range(copy.num_arrived):
                        self._run_chunk(copy)
        self.supply.carry(plan)

    def copy_starts(self, copy: Copy) -> int:
        """Learn that a copy to the GPU is about to begin; return how long it must wait for a slot."""
        if self._hardware.staging_ns:
            self.supply.stage(copy.layer)
        if copy.kind is not Kind.BYPASS:
            self._offloader.on_load_started(copy.key)
            return 0
        return self._staging.wait_ns(copy.key, self._clock.now)

    def chunk_arrived(self, copy: Copy) -> None:
        """Learn that a chunk has arrived; compute what can be."""
        now_ns, plan, key = self._clock.now, self._plan, copy.key
        self.other_arrived(copy)
        if not self._whole_copies and not self.supply.link_of(key).is_whole(copy):
            if self._hardware.computes_chunks:
                self._run_chunk(copy)
            return
        if copy.kind is not Kind.BYPASS:
            self._offloader.on_loaded(key)
            if copy.kind is Kind.PREFETCH:
                self._counter.add_prefetches((key,))
                if plan is None or key not in plan.late:
                    if not self._hardware.copies_overlap:
                        self._copied_ns = now_ns
                        self._one_less()
                    return
        assert plan is not None
        gpu = self.kernels.gpu_of(key)
        if self._blames or copy.queued_ns > gpu.blamed_ns:
            self._blame(gpu, copy)
        if self._gate is not None:
            keys = self._gate.arrived(key)
            ready_ns = gpu.hold(now_ns, self._release_ns) if keys and self._release_ns else now_ns
            self._run(plan, keys, ready_ns)
        else:
            self._run_one(plan, gpu, copy)
        self._num_demanded -= 1
        self._one_less()

    def _blame(self, gpu: GPU, copy: Copy) -> None:
        """Say why the GPU has waited for what has just arrived."""
        causes = copy.queued_ns, copy.held_by, copy.slowed_ns, not self._hardware.through_host
        gpu.blame(self._clock.now, *causes)

    def other_arrived(self, copy: Copy) -> None:
        """Record a copy, or a chunk of one; there is nothing else to learn of reads and of copies back."""
        log, now_ns = self._log, self._clock.now
        if log is None:
            return
        lane = LANE_OF_COPY[copy.kind] if self._hardware.through_host else Lane.STORAGE
        unit = self.kernels.gpu_of(copy.key).index if lane is not Lane.STORAGE else 0
        num_bytes = self.supply.chunk_bytes(copy)
        log.copy(self._step, lane, unit, copy.kind, copy.key, copy.begin_ns, now_ns, num_bytes)
        log.count(now_ns, Counter.QUEUE, unit, self.supply.link_of(copy.key).queue_length)

    def _run(self, plan: LayerPlan, keys: Sequence[int], ready_ns: int) -> None:
        """Run experts that are ready together."""
        self.kernels.run(self._step, plan, keys, ready_ns)
        if plan.bypasses and self._gate is not None:
            for key in keys:
                if key in plan.bypasses:
                    self._staging.ended(key, self.kernels.gpu_of(key).free_ns)

    def _flush(self, now_ns: int) -> None:
        """Run all that is there, in order or not; one after another, so that each frees its slot in turn."""
        gate, plan = self._gate, self._plan
        assert gate is not None
        assert plan is not None
        keys = gate.flush()
        for part in [keys] if gate.at_end else [[key] for key in keys]:
            self._run(plan, part, now_ns)

    def _run_one(self, plan: LayerPlan, gpu: GPU, copy: Copy) -> None:
        """Run one expert that has just arrived, less what its earlier chunks have run already."""
        step, key, kernels = self._step, copy.key, self.kernels
        cost_ns = kernels.one_ns(step, plan, key)
        if self._hardware.computes_chunks:
            cost_ns -= copy.num_run * (cost_ns // self._hardware.chunks)
        kernels.run_share(step, plan, key, self._clock.now, cost_ns)
        if copy.kind is Kind.BYPASS:
            self._staging.ended(key, gpu.free_ns)

    def _run_chunk(self, copy: Copy) -> None:
        """Run the share of an awaited expert's kernels whose weights have come."""
        plan, key = self._plan, copy.key
        if plan is None or (copy.kind is Kind.PREFETCH and key not in plan.late):
            return
        self._blame(self.kernels.gpu_of(key), copy)
        copy.num_run += 1
        cost_ns = self.kernels.one_ns(self._step, plan, key) // self._hardware.chunks
        self.kernels.run_share(self._step, plan, key, self._clock.now, cost_ns, ends=False)
