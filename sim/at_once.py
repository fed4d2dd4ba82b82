"""A layer's copies without an event each, where nothing can come between them: the same times, faster."""

from __future__ import annotations

from sim.hardware import Hardware
from sim.insitu import InSitu
from sim.kernels import Kernels
from sim.offloader import Offloader
from sim.types import LayerPlan, StepInfo


class AtOnce:
    """Carries out the copies of a plan, and the kernels that wait for them, in one go.

    What tests/test_laws_engine.py holds against the same runs with events.
    """

    def __init__(
        self, hardware: Hardware, kernels: Kernels, cpu: InSitu, offloader: Offloader
    ) -> None:
        self._issue_ns = hardware.issue_ns
        self._cpu = cpu
        self._kernels = kernels
        self._gpu = kernels.gpus[0]
        self._offloader = offloader
        self._is_shared = hardware.memory is not None

    @staticmethod
    def suits(hardware: Hardware, num_copies: int) -> bool:
        """Tell whether copies follow each other, a layer's all alike, and each computes when it is there."""
        ready = hardware.copies_overlap and not hardware.in_order and not hardware.computes_chunks
        plain = hardware.num_gpus == 1 and not hardware.staging_ns and not hardware.reading
        steady = hardware.times_alone and hardware.rate_beside_cpu_ratio == 1
        return ready and plain and steady and num_copies == 1

    def may_carry(self, plan: LayerPlan) -> bool:
        """Tell whether all of a plan's copies are waited for, and the link and memory are theirs alone."""
        if plan.late or plan.prefetches:
            return False
        if self._is_shared and (plan.on_cpu or plan.deferred or self._cpu.num_under_way):
            return False
        return self._gpu.link.is_idle

    def carry(self, step: StepInfo, plan: LayerPlan, now_ns: int) -> int:
        """Carry out a plan's copies and what waits for them; return when the last has been issued."""
        gpu, kernels, layer, issue_ns = self._gpu, self._kernels, plan.routing.layer, self._issue_ns
        issued_ns = arrived_ns = now_ns
        if plan.loads:
            count = len(plan.loads)
            ends_ns = gpu.link.carry_all_at_once(layer, count, now_ns, issue_ns, now_ns)
            for key, arrived_ns in zip(plan.loads, ends_ns, strict=True):
                issued_ns += issue_ns
                if issued_ns > gpu.blamed_ns:
                    gpu.blame(arrived_ns, issued_ns, None, 0, False)
                gpu.run(arrived_ns, kernels.one_ns(step, plan, key))
            self._offloader.on_loaded_at_once(plan.loads)
        if plan.bypasses:
            issued_ns = self._take_turns(step, plan, issued_ns, arrived_ns, now_ns)
        return issued_ns

    def _take_turns(
        self, step: StepInfo, plan: LayerPlan, issued_ns: int, arrived_ns: int, now_ns: int
    ) -> int:
        """Carry out the bypasses, each in a slot that it keeps or takes over; return as :meth:`carry`.

        The rules of sim/staging.py and of Link in one loop, for a large batch has many.
        """
        gpu, issue_ns, one_ns = self._gpu, self._issue_ns, self._kernels.one_ns
        setup_ns, gap_ns, whole_ns = gpu.link.pace(plan.routing.layer)
        first_turn, slots_ns, link_busy_ns = plan.num_held + plan.bypass_slots, list[int](), 0
        for place, key in enumerate(plan.bypasses):
            issued_ns += issue_ns
            begin_ns = arrived_ns if arrived_ns > issued_ns else issued_ns
            flow_ns = issued_ns + setup_ns
            if flow_ns < arrived_ns + gap_ns and arrived_ns > now_ns:
                flow_ns = arrived_ns + gap_ns
            elif flow_ns < arrived_ns:
                flow_ns = arrived_ns
            if place >= first_turn:
                slot_ns = slots_ns[place - first_turn]
                if slot_ns > arrived_ns:
                    begin_ns, flow_ns = slot_ns, max(flow_ns, slot_ns + setup_ns)
            arrived_ns = flow_ns + whole_ns
            link_busy_ns += arrived_ns - begin_ns
            if issued_ns > gpu.blamed_ns:
                gpu.blame(arrived_ns, issued_ns, None, 0, False)
            gpu.run(arrived_ns, one_ns(step, plan, key))
            if place >= plan.num_held:
                slots_ns.append(gpu.free_ns)
        gpu.link.busy_ns += link_busy_ns
        return issued_ns
