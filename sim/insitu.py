"""The CPU's part of each layer: when its experts begin, in known time or as events, and who waits for them.

An expert that is deferred begins in its own layer, after the experts that this layer waits for, but its
output is added one layer later: that layer's end waits for it. Activations go to the CPU once a layer,
for all its experts (one fixed handover, and their bytes over the link); results come back as soon as they
are there, by bytes alone. An engine whose CPU does not overlap with its GPU waits for what it defers in
the same layer, so that deferral brings it nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hwmodels.units import transfer_ns
from sim.clock import LOAD_ENDED, Clock, Event
from sim.events import EventLog, Lane
from sim.hardware import Hardware
from sim.offloader import Offloader
from sim.sharing import Shares, Use
from sim.trips import CPUCosts, Due, Part, Trip, Trips, bytes_of_tokens, log_handover
from sim.types import LayerPlan, StepInfo

_HOST_MEMORY = (Use(0),)


class InSitu:
    """Computes plans' CPU experts.

    Where nothing is shared they run one after another in known time; else as events (sim/trips.py), and
    ``on_done`` is called when a part that the layer under way waits for has come back.

    ``due`` is what that layer waits for, and ``end_ns`` when it came back as far as is known. ``is_held``
    tells whether its experts wait until the GPU has done its part, ``owes`` whether the layer
    before it has deferred anything, ``num_under_way`` how many parts events are still to come of.
    """

    def __init__(
        self,
        clock: Clock,
        hardware: Hardware,
        costs: CPUCosts,
        shares: Shares | None,
        offloader: Offloader,
        log: EventLog | None,
        on_done: Callable[[], None],
    ) -> None:
        self.due, self._next_due = Due(), Due()
        self.owes = self.is_held = False
        self.end_ns = self.num_under_way = 0
        self._clock = clock
        self._hardware = hardware
        self._costs = costs
        self._shares = shares
        residency = offloader.residency
        self._all_at_host = offloader.host is None
        self._num_experts = residency.keys.num_experts
        self._size_of_key = residency.size_of_key
        self._log = log
        self._on_done = on_done
        self._trips: Trips | None = None
        if shares is not None:
            keys = residency.keys
            self._trips = Trips(clock, hardware, costs, shares, keys, log, self._back)
        self._has_room: dict[int, bool] = {}
        self._may_be_alone = log is None and hardware.times_alone and hardware.reading is None
        self._early: list[int] = []  # in host memory before there is a trip
        self._num_trips = 0
        self._serial_busy_ns = self._serial_free_ns = 0
        self._step: StepInfo
        self._plan: LayerPlan

    @property
    def busy_ns(self) -> int:
        """How long the CPU has worked, all teams together."""
        return self._serial_busy_ns + (self._trips.busy_ns if self._trips is not None else 0)

    def begin(self, step: StepInfo, plan: LayerPlan, now_ns: int, link_is_idle: bool) -> int:
        """Begin a layer, which waits for what the one before it deferred too.

        Need not be called for a layer of no CPU experts after one that owes nothing. Returns how many
        times ``on_done`` will be called.
        """
        self.due, self._next_due = self._next_due, Due()
        self.owes = False
        self.end_ns, num_awaited = self.due.end_ns, self.due.num_left
        self._step, self._plan = step, plan
        if plan.on_cpu or plan.deferred:
            if self._hardware.cpu_overlaps:
                return num_awaited + self._run(now_ns, link_is_idle)
            self.is_held = True
        return num_awaited

    def begin_late(self, start_ns: int, link_is_idle: bool) -> int:
        """Begin what is held, when the GPU has done its part; return as :meth:`begin`."""
        self.is_held = False
        return self._run(start_ns, link_is_idle)

    def until_ns(self, step: StepInfo, plan: LayerPlan, now_ns: int) -> int:
        """Return when the CPU would have computed a plan's experts, with nothing else on the memory.

        What the layer before has deferred comes first; ``now_ns`` where the plan has none.
        """
        keys = [*plan.on_cpu, *plan.deferred]
        if not keys:
            return max(now_ns, self._serial_free_ns)
        work_ns = sum(
            self._costs.expert_cpu_ns(key // self._num_experts, plan.routing.num_tokens(key))
            for key in keys
        )
        begin_ns = max(now_ns + self._costs.handover_ns(step.num_tokens), self._serial_free_ns)
        return begin_ns + work_ns // self._hardware.num_teams

    def _run(self, start_ns: int, link_is_idle: bool) -> int:
        step, plan = self._step, self._plan
        awaited, deferred = plan.on_cpu, plan.deferred
        if deferred and not self._hardware.cpu_overlaps:
            awaited, deferred = [*awaited, *deferred], ()
        self.owes = bool(deferred)
        if self._is_alone(plan, link_is_idle):
            self._run_serially(step, plan, awaited, deferred, start_ns)
            self.end_ns = self.due.end_ns
            return 0
        trip, trips = self._trip(step, plan, awaited, deferred), self._trips
        assert trips is not None
        trips.enter(trip, [*awaited, *deferred] if self._all_at_host else self._early)
        self._early = []
        if start_ns > self._clock.now:
            begin = Event(lambda _: trips.start(trip))
            self._clock.schedule(begin, LOAD_ENDED, start_ns - self._clock.now)
        else:
            trips.start(trip)
        return 1 if awaited else 0

    def at_host(self, key: int) -> None:
        """Learn that an expert that the CPU computes is in host memory."""
        assert self._trips is not None
        if not self._trips.at_host(key):
            self.due.last_read_ns = self._clock.now
            self._early.append(key)

    # -- in known time ------------------------------------------------------------------------------

    def _is_alone(self, plan: LayerPlan, link_is_idle: bool) -> bool:
        """Tell whether a plan's CPU experts share memory with nobody, so that their end is known beforehand.

        They are not where events are logged, so that runs with and without a log check each other.
        """
        memory = self._hardware.memory
        if memory is None:
            return True
        if not self._may_be_alone or not link_is_idle or self.num_under_way or plan.deferred:
            return False
        if plan.late or plan.loads or plan.bypasses or plan.prefetches:
            return False
        return all(self._reads_freely(key // self._num_experts) for key in plan.on_cpu)

    def _reads_freely(self, bank: int) -> bool:
        """Tell whether memory is fast enough for an expert; one token's expert reads fastest."""
        if bank not in self._has_room:
            memory = self._hardware.memory
            assert memory is not None
            most = self._costs.cpu_work(bank, 1).bytes_per_s
            self._has_room[bank] = most <= memory.dram_bytes_per_s[0]
        return self._has_room[bank]

    def _run_serially(
        self,
        step: StepInfo,
        plan: LayerPlan,
        awaited: Sequence[int],
        deferred: Sequence[int],
        start_ns: int,
    ) -> None:
        """Run everything one after another, behind what the layer before deferred."""
        costs, hardware, keys = self._costs, self._hardware, [*awaited, *deferred]
        num_bytes = bytes_of_tokens(costs, step, plan, keys)
        time_ns = start_ns + costs.handover_ns(step.num_tokens)
        time_ns += transfer_ns(num_bytes, hardware.d2h_bytes_per_s)
        log_handover(self._log, step, plan, not awaited, start_ns, time_ns)
        time_ns = max(time_ns, self._serial_free_ns)
        for part, due in ((awaited, self.due), (deferred, self._next_due)):
            if not part:
                continue
            time_ns = self._compute(step, plan, part, time_ns)
            back_bytes = bytes_of_tokens(costs, step, plan, part)
            end_ns = time_ns + transfer_ns(back_bytes, hardware.h2d_bytes_per_s)
            log_handover(self._log, step, plan, part is deferred, time_ns, end_ns)
            due.end_ns = max(due.end_ns, end_ns)
            num_bytes += back_bytes
        self._serial_free_ns = time_ns
        if self._shares is not None:
            weights_bytes = sum(self._size_of_key[key] for key in keys)
            self._shares.count(weights_bytes + num_bytes, _HOST_MEMORY)

    def _compute(self, step: StepInfo, plan: LayerPlan, keys: Sequence[int], time_ns: int) -> int:
        """Compute experts one after another; return when the last is done."""
        costs, routing = self._costs, plan.routing
        for key in keys:
            begin_ns = time_ns
            time_ns += costs.expert_cpu_ns(key // self._num_experts, routing.num_tokens(key))
            self._serial_busy_ns += time_ns - begin_ns
            if self._log is not None:
                self._log.expert(plan, step, Lane.CPU, 0, key, begin_ns, time_ns)
        return time_ns

    # -- as events ----------------------------------------------------------------------------------

    def _trip(
        self, step: StepInfo, plan: LayerPlan, awaited: Sequence[int], deferred: Sequence[int]
    ) -> Trip:
        self._num_trips += 1
        trip = Trip(step, plan, self._num_trips)
        for keys, due in ((awaited, self.due), (deferred, self._next_due)):
            if keys:
                trip.parts.append(Part(trip, keys, due is self._next_due, due))
                due.num_left += 1
                self.num_under_way += 1
        return trip

    def _back(self, part: Part) -> None:
        """Learn that a part has come back."""
        self.num_under_way -= 1
        if part.due is self.due:  # else the layer under way does not wait for it
            self.end_ns = self.due.end_ns
            self._on_done()
