"""The driver that predicts time: a SimPy model of GPU, host-to-GPU link and CPU.

The only file that imports simpy. One process walks the steps; the link calls back. One layer of a step:

    attention + router | plan | resident experts | experts as they arrive over the link
                              | CPU experts, beside the GPU, after one handover

and the next layer begins when both are done. Events at one time are settled by this table:

    LOAD_ENDED     0   memory must be known before anybody computes or plans on it
    COMPUTE_ENDED  1   a step that ends now is over before anything new is planned
    PLAN           2   a plan sees everything that has happened by its time

SimPy's Process, Resource and AllOf cost 6 to 15 bare timeouts each, so what is scheduled are slotted
event objects; tests/test_timeline.py fails if SimPy changes that seam.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import simpy

from sim.events import EventLog, Kind, Lane
from sim.link import Event, Link
from sim.metrics import RequestClock, StepCounter
from sim.offloader import Offloader
from sim.types import ConfigError, CostModel, LayerPlan, StepInfo
from sim.workload import Workload, WorkStep

LOAD_ENDED, COMPUTE_ENDED, PLAN = range(3)
_LONGEST_NS = 1 << 62  # what a 64-bit column of the tables holds, with room to add


class TrueCosts(CostModel, Protocol):
    """What the timeline charges; all answers in int nanoseconds."""

    def dense_ns(self, num_tokens: int, kv_tokens: int, num_sequences: int) -> int:
        """Attention, router and shared experts of one layer."""
        ...

    def step_ns(self, num_tokens: int, num_sequences: int, kv_tokens: int) -> int:
        """What a step costs beside its MoE layers: embedding, dense layers, head."""
        ...

    def pack_ns(self, num_tokens: int) -> int:
        """Permute a layer's tokens by expert and back."""
        ...

    def handover_ns(self) -> int:
        """Hand a layer's activations to the CPU and back."""
        ...


@dataclass(slots=True)
class RunTables:
    """What a run leaves: rows of the step and request tables, and the event log if there was one."""

    steps: list[tuple[int, ...]]
    requests: list[tuple[int, ...]]
    events: EventLog | None


class Timeline:
    """Runs a workload through the Offloader against true costs.

    Parameters
    ----------
    workload, offloader
        What to run, and who decides.
    costs
        The truth (the Offloader holds its own estimate, by default the same object).
    record_events
        Whether to keep the event table.
    on_step, on_plan
        Called after each step (for progress) and with each plan (for tests).
    """

    def __init__(
        self,
        workload: Workload,
        offloader: Offloader,
        costs: TrueCosts,
        record_events: bool = False,
        on_step: Callable[[], None] | None = None,
        on_plan: Callable[[LayerPlan], None] | None = None,
    ) -> None:
        residency = offloader.residency
        layers = range(residency.keys.num_layers)
        self._workload = workload
        self._offloader = offloader
        self._costs = costs
        self._on_step = on_step
        self._on_plan = on_plan
        self._num_experts = residency.keys.num_experts
        self._layer_bytes = residency.layer_bytes
        self._log = EventLog(self._num_experts) if record_events else None
        self._counter = StepCounter(residency)
        self._requests = RequestClock(min(workload.batch_size, len(workload.requests)))
        self._copy_ns = [costs.load_ns(layer) for layer in layers]
        self._unit_ns = [
            [costs.expert_gpu_ns(i, 1, packed) for i in layers] for packed in (False, True)
        ]
        self._env = simpy.Environment()
        self._link = Link(
            self._schedule_load, self._copy_ns, self._num_experts, self._copy_starts, self._copied
        )
        # The step and the layer under way.
        self._step: StepInfo = offloader.view.step
        self._plan: LayerPlan | None = None
        self._planned_ns = self._gpu_busy_ns = self._gpu_free_ns = self._cpu_free_ns = 0
        self._num_awaited = 0
        self._bypass_ends_ns: list[int] = []
        self._num_bypasses = 0
        self._copy_began_ns = 0
        self._wake = (Event(), PLAN, 0)

    def run(self) -> RunTables:
        """Run all steps and return the tables."""
        process = self._env.process(self._walk())
        self._env.run(until=process)
        return RunTables(self._counter.rows, self._requests.rows, self._log)

    # -- the one process ------------------------------------------------------------------------

    def _walk(self) -> Generator[Any, None, None]:
        env, offloader, counter = self._env, self._offloader, self._counter
        for step in self._workload.steps():
            info = self._step = step.info
            tokens, sequences, kv_tokens = info.num_tokens, info.num_sequences, info.kv_tokens
            start_ns = self._gpu_free_ns = self._cpu_free_ns = int(env.now)
            offloader.begin_step(info)
            dense_ns = self._costs.dense_ns(tokens, kv_tokens, sequences)
            for routing in self._workload.routings(step):
                yield self._after_layer(dense_ns, PLAN)
                now_ns = int(env.now)
                self._close_layer(dense_ns)
                if self._log is not None:
                    self._log.dense(info, routing.layer, now_ns - dense_ns, now_ns)
                plan = offloader.plan_layer(routing, now_ns)
                counter.add(plan)
                if self._on_plan is not None:
                    self._on_plan(plan)
                self._begin_layer(plan, now_ns)
            last_ns = self._costs.step_ns(tokens, sequences, kv_tokens)
            yield self._after_layer(last_ns, COMPUTE_ENDED)
            self._close_layer(last_ns)
            self._end_step(step, start_ns, last_ns)

    def _end_step(self, step: WorkStep, start_ns: int, last_ns: int) -> None:
        now_ns = int(self._env.now)
        if now_ns > _LONGEST_NS:
            raise ConfigError(
                f"machine: step {step.info.step} ends after {now_ns} ns: must be <= {_LONGEST_NS} "
                "(146 years); a rate is too low or a fixed cost too high"
            )
        if self._log is not None:
            self._log.step(step.info, now_ns - last_ns, now_ns)
        self._counter.end_step(step.info, self._offloader.view.stage, start_ns, now_ns)
        self._requests.end_step(step.info, step.finished, start_ns, now_ns)
        if self._on_step is not None:
            self._on_step()

    def _after_layer(self, extra_ns: int, priority: int) -> Event:
        """Return the event that comes ``extra_ns`` of GPU work after the layer under way ends.

        While copies are awaited its time is not known; the last of them schedules it.
        """
        event = Event()
        self._wake = (event, priority, extra_ns)
        if not self._num_awaited:
            self._schedule_wake()
        return event

    def _schedule_wake(self) -> None:
        event, priority, extra_ns = self._wake
        gpu_ns, cpu_ns = self._gpu_free_ns, self._cpu_free_ns
        delay_ns = (gpu_ns if gpu_ns > cpu_ns else cpu_ns) + extra_ns - self._env.now
        self._env.schedule(event, priority, delay_ns)  # type: ignore[arg-type]

    def _schedule_load(self, event: Event, delay_ns: int) -> None:
        self._env.schedule(event, LOAD_ENDED, delay_ns)  # type: ignore[arg-type]

    # -- one layer ------------------------------------------------------------------------------

    def _begin_layer(self, plan: LayerPlan, now_ns: int) -> None:
        """Start a plan's copies, kernels and CPU work."""
        tokens = self._step.num_tokens
        busy_ns = self._costs.pack_ns(tokens) if plan.packed else 0
        if self._log is not None:
            costs_ns = [self._expert_ns(plan, key) for key in plan.resident]
            self._log.resident(self._step, plan, now_ns, busy_ns, costs_ns)
        if tokens == 1:
            busy_ns += len(plan.resident) * self._unit_ns[plan.packed][plan.routing.layer]
        else:
            busy_ns += sum([self._expert_ns(plan, key) for key in plan.resident])
        self._plan = plan
        self._planned_ns = now_ns
        self._gpu_busy_ns = busy_ns
        self._gpu_free_ns = now_ns + busy_ns
        self._cpu_free_ns = self._run_on_cpu(plan, now_ns) if plan.on_cpu else now_ns
        if plan.late or plan.loads or plan.bypasses or plan.prefetches:
            self._queue_copies(plan)

    def _queue_copies(self, plan: LayerPlan) -> None:
        """Hand the plan's copies to the link, what is waited for first."""
        link = self._link
        self._bypass_ends_ns.clear()
        self._num_bypasses = 0
        self._num_awaited = len(plan.late) + len(plan.loads) + len(plan.bypasses)
        for key in plan.late:
            link.promote(key)
        for key in plan.loads:
            link.demand(key, Kind.LOAD)
        for key in plan.bypasses:
            link.demand(key, Kind.BYPASS)
        for key in plan.prefetches:
            link.prefetch(key)

    def _run_on_cpu(self, plan: LayerPlan, now_ns: int) -> int:
        """Run a plan's CPU experts one after another; return when the last is done."""
        routing, costs = plan.routing, self._costs
        time_ns = now_ns + costs.handover_ns()
        for key in plan.on_cpu:
            begin_ns = time_ns
            time_ns += costs.expert_cpu_ns(routing.layer, routing.num_tokens(key))
            if self._log is not None:
                self._log.expert(self._step, plan, key, Lane.CPU, begin_ns, time_ns)
        return time_ns

    def _expert_ns(self, plan: LayerPlan, key: int) -> int:
        """Time of one expert's kernels on the GPU, over all micro-batches of the plan."""
        routing = plan.routing
        if self._step.num_tokens == 1:
            return self._unit_ns[plan.packed][routing.layer]
        cost = self._costs.expert_gpu_ns
        if plan.groups is None or len(plan.groups) < 2:
            return cost(routing.layer, routing.num_tokens(key), plan.packed)
        rows = routing.token_ids(key % self._num_experts)
        shares = [int(np.isin(group, rows).sum()) for group in plan.groups]
        return sum(cost(routing.layer, tokens, plan.packed) for tokens in shares if tokens)

    def _close_layer(self, extra_ns: int) -> None:
        """Account for the time since the last plan, of which the last ``extra_ns`` was GPU work.

        GPU work, waiting for the link and waiting for the CPU make up the whole of it.
        """
        plan = self._plan
        if plan is None:
            self._counter.add_time(extra_ns, 0, 0)
            return
        gpu_free_ns, busy_ns = self._gpu_free_ns, self._gpu_busy_ns
        link_stall_ns = gpu_free_ns - self._planned_ns - busy_ns
        cpu_late_ns = self._cpu_free_ns - gpu_free_ns
        cpu_stall_ns = cpu_late_ns if cpu_late_ns > 0 else 0
        self._counter.add_time(busy_ns + extra_ns, link_stall_ns, cpu_stall_ns)
        admissions = self._offloader.end_layer(plan)
        if admissions:
            self._counter.add_admissions(admissions)
        self._plan = None

    # -- the link's reports ---------------------------------------------------------------------

    def _copy_starts(self, key: int, kind: Kind) -> int:
        """Learn that a copy begins; return how long it must wait for a staging slot."""
        wait_ns = 0
        if kind is not Kind.BYPASS:
            self._offloader.on_load_started(key)
        else:
            assert self._plan is not None
            freed_by = self._num_bypasses - self._plan.bypass_slots
            self._num_bypasses += 1
            if freed_by >= self._plan.num_held:
                wait_ns = max(0, self._bypass_ends_ns[freed_by] - int(self._env.now))
        self._copy_began_ns = int(self._env.now) + wait_ns
        return wait_ns

    def _copied(self, key: int, kind: Kind) -> None:
        """Learn that a copy has arrived; compute it if the layer waits for it."""
        plan = self._plan
        if self._log is not None:
            began_ns, size = self._copy_began_ns, self._layer_bytes[key // self._num_experts]
            self._log.copy(self._step, key, kind, began_ns, int(self._env.now), size)
        if kind is not Kind.BYPASS:
            self._offloader.on_loaded(key)
            if kind is Kind.PREFETCH:
                self._counter.add_prefetches((key,))
                if plan is None or key not in plan.late:
                    return
        assert plan is not None
        now_ns = int(self._env.now)
        cost_ns = self._expert_ns(plan, key)
        begin_ns = now_ns if now_ns > self._gpu_free_ns else self._gpu_free_ns
        self._gpu_free_ns = begin_ns + cost_ns
        self._gpu_busy_ns += cost_ns
        if kind is Kind.BYPASS:
            self._bypass_ends_ns.append(self._gpu_free_ns)
        if self._log is not None:
            self._log.expert(self._step, plan, key, Lane.GPU, begin_ns, self._gpu_free_ns)
        self._num_awaited -= 1
        if not self._num_awaited:
            self._schedule_wake()
