"""Where the time of a real run went: kernels, waiting by cause, decisions; rows of the event table."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from real.copies import Copy
from real.device import Device
from real.insitu import Computed
from real.observed import Mean, Observed
from sim.counter import StepCounter
from sim.events import Counter, Kind, Lane
from sim.metrics import RunTables
from sim.offloader import Offloader
from sim.types import LayerPlan, StepInfo


class _Span(NamedTuple):
    """Kernels between two stamps: those of experts of a plan, or (no plan) others of a layer or a step."""

    begin: Any
    end: Any
    plan: LayerPlan | None
    keys: tuple[int, ...]
    kind: Kind = Kind.EXPERT
    layer: int = -1
    beside_cpu: bool = False


class Accounts:
    """The clock of a run, and what it was spent on. Times are ns since the first step began.

    ``plan_ns`` is the time that decisions took, ``step_ns`` that of all steps, ``kernels_ns`` that of
    kernels, ``waited_ns`` that of waiting for copies and for the host; the rest is what Python takes.
    ``num_layers`` counts events (step, layer).
    """

    def __init__(self, device: Device, lane: Lane, tables: RunTables, offloader: Offloader) -> None:
        self.plan_ns = self.step_ns = self.kernels_ns = self.waited_ns = 0
        self.num_layers = 0
        self.observed = Observed()
        self._device = device
        self._copy_lane = lane
        self._tables = tables
        self._offloader = offloader
        self._origin_ns = -1
        self._info = StepInfo(-1, offloader.view.step.phase, 0)
        self._start_ns = self._last_end_ns = self._step_layers = 0
        self._step_waited_ns = self._step_cpu_ns = self._step_kernels_ns = self._step_plan_ns = 0
        self._spans: list[_Span] = []
        self._lane_ns: dict[tuple[Lane, int], int] = {}  # until when a lane's unit has worked
        busy = tables.busy_ns
        busy |= {"gpu": 0, "cpu": 0, lane.name.lower(): 0}
        tables.units = dict.fromkeys(busy, 1)

    def now_ns(self) -> int:
        """Return the time since the run began."""
        return time.perf_counter_ns() - self._origin_ns

    # -- steps and layers -----------------------------------------------------------------------

    def begin_step(self, info: StepInfo) -> None:
        """Learn that a step begins."""
        if self._origin_ns < 0:
            self._origin_ns = time.perf_counter_ns()
            if self._tables.events is not None:
                offloader = self._offloader
                self._tables.events.follow(offloader.residency, offloader.view, self.now_ns)
        self._info = info
        self._start_ns = self.now_ns()
        self._step_layers = 0
        self._step_waited_ns = self._step_cpu_ns = self._step_kernels_ns = self._step_plan_ns = 0

    def begin_layer(self) -> None:
        """Learn that a layer's routing is known, and all kernels before it have ended."""
        self._resolve()

    def planned(self, plan: LayerPlan, decided_ns: int, issued_ns: int) -> None:
        """Learn that a layer is decided and its copies are asked for, and how long each took."""
        now_ns = time.perf_counter_ns()
        self._step_plan_ns += decided_ns + issued_ns
        self._step_layers += 1
        self.num_layers += 1
        self.observed.decide.add(decided_ns)
        num_copies = len(plan.loads) + len(plan.bypasses) + len(plan.prefetches)
        if num_copies:
            self.observed.issue.add(issued_ns, num_copies)
        log = self._tables.events
        if log is not None:
            residency = self._offloader.residency
            used = sum(map(residency.used_bytes, range(len(residency.capacity_bytes))))
            log.count(now_ns - self._origin_ns, Counter.CACHE_BYTES, 0, used)

    def waited(self, since_ns: int) -> None:
        """Learn that nothing could be computed until a copy came, which it has now."""
        now_ns = time.perf_counter_ns()
        self._step_waited_ns += now_ns - since_ns
        if self._last_end_ns > since_ns:  # else it had come before
            self.observed.wake.add(now_ns - self._last_end_ns)

    def computed(
        self, plan: LayerPlan, keys: Sequence[int], begin: Any, beside_cpu: bool = False
    ) -> None:
        """Learn that kernels of some experts have been asked for since the stamp ``begin``.

        ``beside_cpu``: the host computes experts as well.
        """
        end = self._device.stamp()
        self._spans.append(_Span(begin, end, plan, tuple(keys), beside_cpu=beside_cpu))

    def beside(self, kind: Kind, layer: int, begin: Any) -> None:
        """Learn of other kernels since the stamp ``begin``: those of a layer, or of a whole step (-1)."""
        self._spans.append(_Span(begin, self._device.stamp(), None, (), kind, layer))

    def end_step(self, counter: StepCounter) -> tuple[int, int]:
        """Close a step: every moment of it is kernels, waiting by cause, or the host's."""
        self._device.synchronize()
        self._resolve()
        end_ns = self.now_ns()
        total_ns = end_ns - self._start_ns
        kernels_ns = min(self._step_kernels_ns, total_ns)
        left_ns = total_ns - kernels_ns
        copies_ns = min(self._step_waited_ns, left_ns)
        cpu_ns = min(self._step_cpu_ns, left_ns - copies_ns)
        host_ns = left_ns - copies_ns - cpu_ns
        is_storage = self._copy_lane is Lane.STORAGE
        link_ns, storage_ns = (0, copies_ns) if is_storage else (copies_ns, 0)
        counter.add_time(kernels_ns, link_ns, storage_ns, 0, host_ns, cpu_ns)
        self.step_ns += total_ns
        self.kernels_ns += kernels_ns
        self.waited_ns += copies_ns + cpu_ns
        self.plan_ns += self._step_plan_ns
        self._tables.busy_ns["gpu"] += kernels_ns
        self.observed.python.add(host_ns - self._step_plan_ns, self._step_layers)
        return self._start_ns, end_ns

    def _resolve(self) -> None:
        """Give times to the kernels so far, all of which have ended."""
        spans, self._spans = self._spans, []
        log, device, origin_ns = self._tables.events, self._device, self._origin_ns
        for span in spans:
            begin_ns = device.time_ns(span.begin) - origin_ns
            time_ns = device.time_ns(span.end) - origin_ns - begin_ns
            self._step_kernels_ns += time_ns
            self._observe(span, time_ns)
            if log is None:
                continue
            if span.plan is None:
                end_ns = begin_ns + time_ns
                log.layer(self._info, span.kind, 0, span.layer, begin_ns, end_ns)
            else:
                ones = [1] * len(span.keys)
                log.experts(span.plan, self._info, 0, span.keys, ones, begin_ns, time_ns)

    def _observe(self, span: _Span, time_ns: int) -> None:
        observed = self.observed
        if span.plan is None:
            if span.kind is Kind.STEP:
                observed.head.add(time_ns)
            else:
                observed.dense.setdefault(self._info.num_tokens, Mean()).add(time_ns)
        elif len(span.keys) == 1:
            (key,) = span.keys
            size = self._offloader.residency.expert_bytes(key)
            observed.kernel(size, span.plan.routing.num_tokens(key), time_ns, span.beside_cpu)

    # -- the host, and copies -------------------------------------------------------------------

    def waited_for_cpu(self, plan: LayerPlan, found: Sequence[Computed], waited_ns: int) -> None:
        """Learn what the host has computed, and how long the layer waited for it until now."""
        self._step_cpu_ns += waited_ns
        back_ns = time.perf_counter_ns() - found[-1].end_ns
        there_ns = found[0].begin_ns - found[0].handed_ns
        self.observed.handover.add(there_ns + (back_ns if back_ns < waited_ns else 0))
        log = self._tables.events
        for one in found:
            size = self._offloader.residency.expert_bytes(one.key)
            tokens = plan.routing.num_tokens(one.key)
            self.observed.cpu_kernel(size, tokens, one.end_ns - one.begin_ns)
            self._tables.busy_ns["cpu"] += one.end_ns - one.begin_ns
            if log is not None:
                begin_ns, end_ns = self._in_lane(Lane.CPU, one.team, one.begin_ns, one.end_ns)
                log.expert(plan, self._info, Lane.CPU, one.team, one.key, begin_ns, end_ns)

    def copied(self, copy: Copy) -> None:
        """Learn that a copy has come."""
        lane = self._copy_lane
        begin_ns, end_ns = self._in_lane(lane, 0, copy.begin_ns, copy.end_ns)
        self._tables.busy_ns[lane.name.lower()] += end_ns - begin_ns
        observed = self.observed
        observed.copied_bytes += copy.num_bytes
        observed.copy_busy_ns += end_ns - begin_ns
        if copy.queued_ns >= self._last_end_ns:  # the tier was idle
            observed.setup.add(copy.begin_ns - copy.queued_ns)
            observed.first_copy.add(end_ns - begin_ns, copy.num_bytes)
        else:
            observed.next_copy.add(end_ns - begin_ns, copy.num_bytes)
        self._last_end_ns = max(self._last_end_ns, copy.end_ns)
        log = self._tables.events
        if log is not None:
            log.copy(self._info, lane, 0, copy.kind, copy.key, begin_ns, end_ns, copy.num_bytes)

    def _in_lane(self, lane: Lane, unit: int, begin_ns: int, end_ns: int) -> tuple[int, int]:
        """Return a stretch of work that begins when the lane's last one has ended: a lane does one thing."""
        free_ns = self._lane_ns.get((lane, unit), 0)
        begin_ns = max(begin_ns - self._origin_ns, free_ns)
        end_ns = max(end_ns - self._origin_ns, begin_ns)
        self._lane_ns[lane, unit] = end_ns
        return begin_ns, end_ns
