"""The driver that predicts time: a SimPy model of GPUs, links, CPU cores, host memory and storage.

The only file that imports simpy. One process walks the steps; resources call back. One layer of a step:

    attention + router | plan | resident experts | experts as they arrive over the link
                              | CPU experts, beside the GPU, after one handover

and the next layer begins when all are done; which of these may overlap is the engine's choice
(sim/hardware.py). The order of events at one time is written in sim/clock.py.

SimPy's Process, Resource and AllOf cost 6 to 15 bare timeouts each, so what is scheduled are slotted
event objects; tests/test_timeline_steps.py fails if SimPy changes that seam.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from itertools import pairwise
from typing import Any, Protocol

import simpy

from sim.clock import COMPUTE_ENDED, PLAN, Event
from sim.counter import StepCounter
from sim.events import Counter, EventLog, Kind
from sim.execution import Execution, LayerCosts
from sim.hardware import Hardware
from sim.launches import LaunchCosts, Launches
from sim.metrics import RunTables
from sim.offloader import Offloader
from sim.requests import RequestClock
from sim.schedule import WorkStep
from sim.sharing import Shares
from sim.speculation import Window
from sim.types import ConfigError, LayerPlan, LayerRouting, StepInfo
from sim.workload import Workload

_LONGEST_NS = 1 << 62  # what a 64-bit column of the tables holds, with room to add


class TrueCosts(LayerCosts, LaunchCosts, Protocol):
    """What the timeline charges; all answers in int nanoseconds."""

    def dense_ns(self, num_tokens: int, kv_tokens: int, attention_pairs: int) -> int:
        """Attention, router and shared experts of one layer."""
        ...

    def step_ns(
        self, num_tokens: int, num_outputs: int, kv_tokens: int, attention_pairs: int
    ) -> int:
        """What a step costs beside its MoE layers: embedding, dense layers, head."""
        ...


class _Clock:
    """SimPy's clock, which may be ahead of SimPy while nothing at all is scheduled there."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._ahead_ns = 0

    @property
    def now(self) -> int:
        """The time in nanoseconds; an int, for all delays are."""
        now_ns: int = self._env.now  # type: ignore[assignment]
        return now_ns if now_ns > self._ahead_ns else self._ahead_ns

    def jump(self, time_ns: int) -> None:
        """Go ahead to ``time_ns`` without an event; only while nothing is scheduled."""
        self._ahead_ns = time_ns

    def schedule(self, event: Any, priority: Any, delay_ns: int) -> None:
        """Call the event's callbacks after ``delay_ns``."""
        self._env.schedule(event, priority, self.now - self._env.now + delay_ns)


class Timeline:
    """Runs a workload through the Offloader against true costs.

    Parameters
    ----------
    workload, offloader
        What to run, and who decides.
    costs, hardware
        The truth (the Offloader holds its own estimate, by default the same object), and the resources.
    tables
        What the run fills; by default tables in memory, and no events.
    on_step, on_plan
        Called after each step (for progress) and with each plan (for tests).
    """

    def __init__(
        self,
        workload: Workload,
        offloader: Offloader,
        costs: TrueCosts,
        hardware: Hardware | None = None,
        tables: RunTables | None = None,
        on_step: Callable[[], None] | None = None,
        on_plan: Callable[[LayerPlan], None] | None = None,
    ) -> None:
        self._workload = workload
        self._schedule = workload.schedule()
        self._offloader = offloader
        self._costs = costs
        self._hardware = hardware = hardware or Hardware()
        self._tables = tables = tables or RunTables()
        self._counter = StepCounter(offloader.residency, tables.steps, tables.ledger)
        self._requests = RequestClock(tables.requests)
        self._log = tables.events
        self._on_step = on_step
        self._on_plan = on_plan
        self._env = simpy.Environment()
        self._clock = _Clock(self._env)
        self._shares = self._build_shares()
        self._layer = Execution(
            self._clock,
            hardware,
            costs,
            self._shares,
            offloader,
            self._counter,
            self._log,
            self._schedule_wake,
        )
        self._window: Window | None = None
        storage = self._layer.supply.storage
        if storage is not None and hardware.speculates and offloader.policies.prefetch is not None:
            parts = (self._clock, hardware, storage, offloader, self._counter)
            self._window = Window(*parts)
        repack = offloader.policies.repack
        packed, splits = offloader.view.packed, repack is not None
        keys, kernels = offloader.residency.keys, self._layer.kernels
        self._launches = Launches(costs, kernels, packed, keys, splits)
        self._wake = (Event(), PLAN, 0)
        pools, gpu_of = offloader.residency.pool_of_key, self._layer.kernels.gpu_of
        of_pool = {pool: gpu_of(key).index for key, pool in enumerate(pools)}
        self._gpu_of_pool = [of_pool[pool] for pool in sorted(of_pool)]
        homes = hardware.home_of_layer or (0,) * offloader.residency.keys.num_layers
        hop_ns, self._homes = hardware.hop_ns, homes
        # Attention of a layer follows that of the layer before; the head is on the first one's GPU.
        self._hops_ns = [hop_ns * (a != b) for a, b in pairwise([homes[0], *homes, homes[0]])]

    def _build_shares(self) -> Shares | None:
        hardware = self._hardware
        if hardware.memory is None:
            return None
        rates = hardware.h2d_bytes_per_s, hardware.d2h_bytes_per_s
        capacities = hardware.memory.capacities(hardware.num_gpus, *rates)
        # The interconnect of NUMA nodes comes right after them, and is memory as well.
        memories = hardware.memory.num_nodes + 1
        return Shares(self._clock, capacities, memories, hardware.memory.proportional)

    def run(self) -> RunTables:
        """Run all steps and return the tables."""
        if self._log is not None:
            offloader, clock = self._offloader, self._clock
            self._log.follow(offloader.residency, offloader.view, lambda: clock.now)
        self._env.run(until=self._env.process(self._walk()))
        for refused in self._schedule.refused:
            self._requests.refuse(refused)
        self._add_up()
        return self._tables

    def _add_up(self) -> None:
        """Fill in what the step table does not tell."""
        tables, supply, cpu = self._tables, self._layer.supply, self._layer.cpu
        gpus, hardware = self._layer.kernels.gpus, self._hardware
        tables.busy_ns = {"gpu": sum(gpu.total_busy_ns for gpu in gpus), "cpu": cpu.busy_ns}
        if hardware.through_host:
            tables.busy_ns["h2d"] = sum(gpu.link.busy_ns for gpu in gpus)
            tables.busy_ns["d2h"] = sum(link.busy_ns for link in supply.back)
        if supply.storage is not None:
            tables.busy_ns["storage"] = supply.storage.busy_ns
        num_nodes = 1 if hardware.memory is None else hardware.memory.num_nodes
        num_teams = hardware.num_teams * num_nodes
        tables.units = {"gpu": len(gpus), "h2d": len(gpus), "d2h": len(gpus), "cpu": num_teams}
        if self._shares is not None and hardware.through_host:
            tables.dram_bytes = sum(self._shares.moved_bytes[:num_nodes])

    # -- the one process ------------------------------------------------------------------------

    def _walk(self) -> Generator[Any, None, None]:
        clock, schedule = self._clock, self._schedule
        while (found := schedule.next(clock.now)) is not None:
            if isinstance(found, int):
                self._tables.idle_ns += found - clock.now
                yield from self._until(found)
                continue
            start_ns = clock.now
            self._begin_step(found.info)
            yield from self._walk_layers(found)
            schedule.ended(found, clock.now)
            self._end_step(found, start_ns)

    def _until(self, time_ns: int) -> Generator[Any, None, None]:
        event = Event()
        self._clock.schedule(event, PLAN, time_ns - self._clock.now)
        yield event

    def _walk_layers(self, step: WorkStep) -> Generator[Any, None, None]:
        clock, layer, info = self._clock, self._layer, step.info
        attention = info.num_tokens, info.kv_tokens, info.attention_pairs
        dense_ns = self._costs.dense_ns(*attention)
        hops_ns, window, waited_ns = self._hops_ns, self._window, 0
        plan_ns = self._hardware.plan_ns
        if window is not None:
            dense_ns += window.predict_ns
        for routing in self._workload.routings(step):
            hop_ns = hops_ns[routing.layer]
            if layer.is_quiet:
                clock.jump(max(layer.settle(), clock.now) + dense_ns + plan_ns)
            else:
                yield self._after_layer(dense_ns + hop_ns + plan_ns, PLAN)
            self._close(info, routing.layer, dense_ns, hop_ns)
            if plan_ns:
                self._counter.add_time(0, host_ns=plan_ns)
            if window is not None:
                waited_ns = yield from window.run()
            self._plan_layer(info, routing, dense_ns, waited_ns)
        last_ns = self._costs.step_ns(info.num_tokens, info.num_outputs, *attention[1:])
        yield self._after_layer(last_ns + hops_ns[-1], COMPUTE_ENDED)
        self._close(info, -1, last_ns, hops_ns[-1])
        if self._log is not None:
            self._log.layer(info, Kind.STEP, 0, -1, clock.now - last_ns, clock.now)

    def _close(self, info: StepInfo, layer: int, extra_ns: int, hop_ns: int) -> None:
        """Account for the layer under way, and the GPU work and the hop before it that came after it."""
        home = self._homes[layer] if layer >= 0 else 0
        self._layer.close(home, extra_ns, hop_ns)
        if self._log is not None and hop_ns:
            end_ns = self._clock.now - extra_ns
            self._log.handover(info, Kind.HOP, home, layer, end_ns - hop_ns, end_ns)

    def _plan_layer(
        self, info: StepInfo, routing: LayerRouting, dense_ns: int, waited_ns: int
    ) -> None:
        """Plan the layer whose attention and router have ended, and begin to carry it out.

        They ended ``waited_ns`` and the time to decide ago: a speculative read was on its way until now.
        """
        layer, now_ns = self._layer, self._clock.now
        plan = self._offloader.plan_layer(routing, now_ns)
        self._counter.add(plan)
        if self._launches.watches:
            self._launches.add(info, plan)
        if self._on_plan is not None:
            self._on_plan(plan)
        if plan.cancels:
            layer.supply.cancel(plan.cancels)
        layer.begin(info, plan, now_ns)
        if self._log is not None:
            home = layer.kernels.home(routing.layer).index
            end_ns = now_ns - waited_ns - self._hardware.plan_ns
            router_ns = 0 if self._window is None else self._window.router_ns
            begin_ns = end_ns - router_ns - dense_ns
            self._log.layer(info, Kind.DENSE, home, routing.layer, begin_ns, end_ns)
            self._sample(self._log, now_ns)

    def _sample(self, log: EventLog, now_ns: int) -> None:
        """Record how full each GPU's cache is, and how many copies wait for its link."""
        residency, gpus = self._offloader.residency, self._layer.kernels.gpus
        used = [0] * len(gpus)
        for pool, index in enumerate(self._gpu_of_pool):
            used[index] += residency.used_bytes(pool)
        for gpu, num_bytes in zip(gpus, used, strict=True):
            log.count(now_ns, Counter.CACHE_BYTES, gpu.index, num_bytes)
            log.count(now_ns, Counter.QUEUE, gpu.index, gpu.link.queue_length)

    def _begin_step(self, info: StepInfo) -> None:
        now_ns = self._clock.now
        self._layer.begin_step(now_ns)
        shrink = self._offloader.begin_step(info)
        if self._log is not None:
            held_bytes = info.held_kv_tokens * self._hardware.kv_bytes_per_token
            self._log.count(now_ns, Counter.KV_BYTES, 0, held_bytes)
        if shrink is not None:
            self._counter.add_given_up(shrink.evicts, shrink.cancels)
            self._counter.add_demotions(shrink.demotes)
            self._layer.supply.cancel(shrink.cancels)
            self._layer.supply.demote(shrink.demotes)

    def _end_step(self, step: WorkStep, start_ns: int) -> None:
        now_ns = self._clock.now
        if now_ns > _LONGEST_NS:
            raise ConfigError(
                f"machine: step {step.info.step} ends after {now_ns} ns: must be <= {_LONGEST_NS} "
                "(146 years); a rate is too low or a fixed cost too high"
            )
        launched = self._launches.end_step(step.info, self._counter)
        stage = self._offloader.view.stage
        self._counter.end_step(step.info, stage, start_ns, now_ns, launched)
        self._requests.end_step(step, start_ns, now_ns)
        if self._on_step is not None:
            self._on_step()

    def _after_layer(self, extra_ns: int, priority: int) -> Event:
        """Return the event that comes ``extra_ns`` of GPU work after the layer under way ends.

        While something is awaited its time is not known; the last of it schedules the event.
        """
        event = Event()
        self._wake = (event, priority, extra_ns)
        if not self._layer.num_awaited:
            self._schedule_wake()
        return event

    def _schedule_wake(self) -> None:
        event, priority, extra_ns = self._wake
        end_ns, now_ns = self._layer.settle(), self._clock.now
        delay_ns = (end_ns - now_ns if end_ns > now_ns else 0) + extra_ns
        self._clock.schedule(event, priority, delay_ns)
