"""The CPU's part of a layer: activations over, experts computed where their weights lie, results back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from hwmodels.host_cost import CPUWork
from hwmodels.units import transfer_ns
from sim.clock import LOAD_ENDED, Clock, Event
from sim.cpu import CPUPool
from sim.events import EventLog, Kind, Lane
from sim.hardware import Hardware
from sim.residency import Residency
from sim.sharing import Shares, Use
from sim.types import KeySpace, LayerPlan, StepInfo

_HOST_MEMORY = (Use(0),)


class CPUCosts(Protocol):
    """What the CPU's work takes."""

    def expert_cpu_ns(self, layer: int, num_tokens: int) -> int:
        """Compute one expert on the CPU, with nothing else on the memory."""
        ...

    def cpu_work(self, layer: int, num_tokens: int) -> CPUWork:
        """Return the same as a reader of a memory that others use."""
        ...

    def handover_ns(self, num_tokens: int) -> int:
        """Hand a layer's activations to the CPU and back, their bytes not counted."""
        ...

    def activation_bytes(self, num_tokens: int) -> int:
        """Bytes of the activations of some tokens, one way."""
        ...


class InSitu:
    """Computes a plan's CPU experts.

    Where nothing is shared they run one after another in known time (:meth:`serial_ns`). Else
    :meth:`start` begins a chain of transfers and work, :meth:`at_host` tells which experts are in host
    memory, and ``on_done`` is called at its end.
    ``busy_ns`` is how long the CPU has worked in all. Of the last layer, ``lost_ns`` is what full memory
    cost the team that ended last, and ``last_read_ns`` when the last expert came from storage.
    """

    def __init__(
        self,
        clock: Clock,
        hardware: Hardware,
        costs: CPUCosts,
        shares: Shares | None,
        residency: Residency,
        log: EventLog | None,
        on_done: Callable[[], None],
    ) -> None:
        self.last_read_ns = self.lost_ns = 0
        self._serial_busy_ns = 0
        self._clock = clock
        self._hardware = hardware
        self._costs = costs
        self._shares = shares
        self._layer_bytes = residency.layer_bytes
        self._log = log
        self._on_done = on_done
        self._pool = None if shares is None else self._build_pool(shares, residency.keys)
        self._has_room: dict[int, bool] = {}
        self._may_be_alone = log is None and hardware.times_alone and hardware.reading is None
        self._handed_over = False
        self._ready: list[int] = []
        self._num_left = 0

    def _build_pool(self, shares: Shares, keys: KeySpace) -> CPUPool:
        hardware = self._hardware
        memory, local = hardware.memory, hardware.numa_local
        assert memory is not None
        nodes = [hardware.node_of(key) for key in range(len(keys))]
        uses = [memory.from_memory(node, local) for node in nodes]
        at = nodes if local else [0] * len(nodes)
        return CPUPool(self._clock, shares, hardware.num_teams, at, uses, self._computed)

    @property
    def busy_ns(self) -> int:
        """How long the CPU has worked, all teams together."""
        return self._serial_busy_ns + (self._pool.busy_ns if self._pool is not None else 0)

    def is_alone(self, plan: LayerPlan, link_is_idle: bool) -> bool:
        """Tell whether a plan's CPU experts share memory with nobody, so that their end is known beforehand.

        They are not where events are logged, so that runs with and without a log check each other.
        """
        memory, layer = self._hardware.memory, plan.routing.layer
        if memory is None:
            return True
        if not self._may_be_alone or not link_is_idle:
            return False
        if plan.late or plan.loads or plan.bypasses or plan.prefetches:
            return False
        if layer not in self._has_room:  # one token's expert reads fastest
            most = self._costs.cpu_work(layer, 1).bytes_per_s
            self._has_room[layer] = most <= memory.dram_bytes_per_s[0]
        return self._has_room[layer]

    def serial_ns(self, step: StepInfo, plan: LayerPlan, start_ns: int) -> int:
        """Run everything one after another from ``start_ns`` on; return when it is over."""
        routing, costs, hardware = plan.routing, self._costs, self._hardware
        num_bytes = self._activation_bytes(step, plan)
        time_ns = start_ns + costs.handover_ns(step.num_tokens)
        time_ns += transfer_ns(num_bytes, hardware.d2h_bytes_per_s)
        self._log_handover(step, plan, start_ns, time_ns)
        for key in plan.on_cpu:
            begin_ns = time_ns
            time_ns += costs.expert_cpu_ns(routing.layer, routing.num_tokens(key))
            self._serial_busy_ns += time_ns - begin_ns
            if self._log is not None:
                self._log.expert(plan, step, Lane.CPU, 0, key, begin_ns, time_ns)
        end_ns = time_ns + transfer_ns(num_bytes, hardware.h2d_bytes_per_s)
        self._log_handover(step, plan, time_ns, end_ns)
        if self._shares is not None:
            weights_bytes = len(plan.on_cpu) * self._layer_bytes[routing.layer]
            self._shares.count(weights_bytes + 2 * num_bytes, _HOST_MEMORY)
        return end_ns

    # -- where memory and links are shared ----------------------------------------------------------

    def start(self, step: StepInfo, plan: LayerPlan, all_at_host: bool) -> None:
        """Begin the CPU's part of a layer now; ``all_at_host``: none has to be told of by at_host."""
        self._step, self._plan = step, plan
        self._begin_ns = self._clock.now
        self._num_left = len(plan.on_cpu)
        assert self._pool is not None
        self._lost_before_ns = list(self._pool.lost_ns)
        if all_at_host:
            self._ready = list(plan.on_cpu)
        handover_ns = self._costs.handover_ns(step.num_tokens)
        self._clock.schedule(Event(self._send), LOAD_ENDED, handover_ns)

    def at_host(self, key: int) -> None:
        """Learn that an expert of the plan is in host memory."""
        self.last_read_ns = self._clock.now
        self._ready.append(key)
        if self._handed_over:
            self._submit()

    def _send(self, _: Any) -> None:
        self._transfer(False, self._sent)

    def _sent(self, _: int = 0) -> None:
        self._log_handover(self._step, self._plan, self._begin_ns, self._clock.now)
        self._handed_over = True
        self._submit()

    def _submit(self) -> None:
        ready, self._ready = self._ready, []
        routing, pool = self._plan.routing, self._pool
        assert pool is not None
        for key in ready:
            pool.submit(key, self._costs.cpu_work(routing.layer, routing.num_tokens(key)))

    def _computed(self, key: int, team: int, begin_ns: int) -> None:
        if self._log is not None:
            now_ns = self._clock.now
            self._log.expert(self._plan, self._step, Lane.CPU, team, key, begin_ns, now_ns)
        self._num_left -= 1
        if not self._num_left:
            assert self._pool is not None
            self.lost_ns = self._pool.lost_ns[team] - self._lost_before_ns[team]
            self._begin_ns = self._clock.now
            self._transfer(True, self._returned)

    def _returned(self, _: int = 0) -> None:
        self._log_handover(self._step, self._plan, self._begin_ns, self._clock.now)
        self._handed_over = False
        self._on_done()

    def _transfer(self, to_gpu: bool, on_end: Callable[[int], None]) -> None:
        """Move the layer's activations over the link, beside the copies that are on it."""
        num_bytes = self._activation_bytes(self._step, self._plan)
        if not num_bytes:
            on_end(0)
            return
        hardware, shares = self._hardware, self._shares
        assert shares is not None
        assert hardware.memory is not None
        layer = self._plan.routing.layer
        gpu = hardware.home_of_layer[layer] if hardware.home_of_layer else 0
        uses = (*hardware.memory.from_memory(0, True), *hardware.memory.over_link(gpu, to_gpu))
        rate = hardware.h2d_bytes_per_s if to_gpu else hardware.d2h_bytes_per_s
        shares.start(num_bytes, rate, uses, on_end)

    def _activation_bytes(self, step: StepInfo, plan: LayerPlan) -> int:
        """Return the bytes of those tokens' activations that the CPU's experts serve, at most all."""
        tokens = sum(map(plan.routing.num_tokens, plan.on_cpu))
        return self._costs.activation_bytes(min(tokens, step.num_tokens))

    def _log_handover(self, step: StepInfo, plan: LayerPlan, start_ns: int, end_ns: int) -> None:
        if self._log is not None and end_ns > start_ns:
            self._log.handover(step, Kind.HANDOVER, 0, plan.routing.layer, start_ns, end_ns)
