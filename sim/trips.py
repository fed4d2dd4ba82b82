"""The CPU's experts where memory and links are shared: activations over, compute, results back, as events.

The experts of one plan are one trip: their activations go to the CPU together, and their results come
back in up to two parts, first those that the layer itself waits for and then those that it defers to the
next. Teams take what is at hand in that order, and a layer's experts after those of the layer before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hwmodels.host_cost import CPUWork
from sim.clock import LOAD_ENDED, Clock, Event
from sim.cpu import CPUPool
from sim.events import EventLog, Kind, Lane
from sim.hardware import Hardware
from sim.sharing import Shares
from sim.types import KeySpace, LayerPlan, StepInfo


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


class Due:
    """What one layer waits for of the CPU: its own experts, and those that the layer before has deferred.

    end_ns        when the last of what has come back was there
    num_left      parts that have not come back yet
    last_read_ns  when the last of the experts came from storage
    lost_ns       what full memory cost the team that ended last, since it last had nothing to do
    """

    __slots__ = ("_chains", "end_ns", "last_read_ns", "lost_ns", "num_left")

    def __init__(self) -> None:
        self.end_ns = self.last_read_ns = self.lost_ns = self.num_left = 0
        self._chains: dict[int, tuple[int, int]] = {}  # by team: time lost, and its last end

    def computed(self, team: int, begin_ns: int, end_ns: int, lost_ns: int) -> None:
        """Learn that a team has computed one of the experts."""
        before_ns, last_ns = self._chains.get(team, (0, -1))
        lost_ns += before_ns if last_ns == begin_ns else 0
        self._chains[team] = lost_ns, end_ns
        self.lost_ns = lost_ns


class Part:
    """Experts of a plan whose results come back together; ``lost_ns`` is as in Due."""

    __slots__ = ("due", "is_deferred", "keys", "lost_ns", "num_left", "trip")

    def __init__(self, trip: Trip, keys: Sequence[int], is_deferred: bool, due: Due) -> None:
        self.trip = trip
        self.keys = keys
        self.is_deferred = is_deferred
        self.due = due
        self.num_left = len(keys)
        self.lost_ns = 0


class Trip:
    """One plan's way to the CPU and back; ``number`` counts them, and the parts are those that have keys."""

    __slots__ = ("begin_ns", "number", "parts", "plan", "ready", "step")

    def __init__(self, step: StepInfo, plan: LayerPlan, number: int) -> None:
        self.step = step
        self.plan = plan
        self.number = number
        self.begin_ns = 0
        self.parts: list[Part] = []
        self.ready: list[int] | None = []  # experts in host memory; None once they go straight on

    @property
    def is_awaited(self) -> bool:
        """Tell whether the plan's own layer waits for any of it."""
        return not self.parts[0].is_deferred


class Trips:
    """Carries out trips; ``on_back`` is told each part whose results have come back."""

    def __init__(
        self,
        clock: Clock,
        hardware: Hardware,
        costs: CPUCosts,
        shares: Shares,
        keys: KeySpace,
        log: EventLog | None,
        on_back: Callable[[Part], None],
    ) -> None:
        self._clock = clock
        self._hardware = hardware
        self._costs = costs
        self._shares = shares
        self._num_experts = keys.num_experts
        self._log = log
        self._on_back = on_back
        self._pool = self._build_pool(shares, keys)
        self._parts: dict[int, Part] = {}  # by expert that is not computed yet

    def _build_pool(self, shares: Shares, keys: KeySpace) -> CPUPool:
        hardware = self._hardware
        memory, local = hardware.memory, hardware.numa_local
        assert memory is not None
        nodes = [hardware.node_of(key) for key in range(len(keys))]
        uses = [memory.from_memory(node, local) for node in nodes]
        at = nodes if local else [0] * len(nodes)
        return CPUPool(self._clock, shares, hardware.num_teams, at, uses)

    @property
    def busy_ns(self) -> int:
        """How long the CPU has worked, all teams together."""
        return self._pool.busy_ns

    # -- there and back -----------------------------------------------------------------------------

    def enter(self, trip: Trip, at_host: Sequence[int]) -> None:
        """Learn of a trip that is to begin; of its experts ``at_host`` are in host memory already."""
        for part in trip.parts:
            self._parts.update(dict.fromkeys(part.keys, part))
        trip.ready = list(at_host)

    def start(self, trip: Trip) -> None:
        """Begin a trip now."""
        trip.begin_ns = self._clock.now
        handover_ns = self._costs.handover_ns(trip.step.num_tokens)
        self._clock.schedule(Event(lambda _: self._send(trip)), LOAD_ENDED, handover_ns)

    def at_host(self, key: int) -> bool:
        """Learn that an expert is in host memory; False if no trip needs it yet."""
        part = self._parts.get(key)
        if part is None:
            return False
        part.due.last_read_ns = self._clock.now
        if part.trip.ready is None:
            self._submit(key)
        else:
            part.trip.ready.append(key)
        return True

    def _send(self, trip: Trip) -> None:
        keys = [key for part in trip.parts for key in part.keys]
        self._transfer(trip, keys, trip.plan.routing.layer, False, lambda _: self._sent(trip))

    def _sent(self, trip: Trip) -> None:
        ready, trip.ready = trip.ready, None
        log_handover(
            self._log, trip.step, trip.plan, not trip.is_awaited, trip.begin_ns, self._clock.now
        )
        for key in ready or ():
            self._submit(key)

    def _submit(self, key: int) -> None:
        part, bank = self._parts[key], key // self._num_experts
        work = self._costs.cpu_work(bank, part.trip.plan.routing.num_tokens(key))
        self._pool.submit(key, work, 2 * part.trip.number + part.is_deferred, self._computed)

    def _computed(self, key: int, team: int, begin_ns: int, lost_ns: int) -> None:
        part, now_ns = self._parts.pop(key), self._clock.now
        trip = part.trip
        if self._log is not None:
            self._log.expert(trip.plan, trip.step, Lane.CPU, team, key, begin_ns, now_ns)
        part.due.computed(team, begin_ns, now_ns, lost_ns)
        part.num_left -= 1
        if not part.num_left:
            part.lost_ns = part.due.lost_ns
            # What is deferred is added one layer later, and goes to the GPU where that is.
            layer = trip.plan.routing.layer + part.is_deferred
            self._transfer(trip, part.keys, layer, True, lambda _: self._returned(part, now_ns))

    def _returned(self, part: Part, begin_ns: int) -> None:
        trip, now_ns = part.trip, self._clock.now
        log_handover(self._log, trip.step, trip.plan, part.is_deferred, begin_ns, now_ns)
        due = part.due
        due.num_left -= 1
        due.end_ns, due.lost_ns = now_ns, part.lost_ns
        self._on_back(part)

    def _transfer(
        self,
        trip: Trip,
        keys: Sequence[int],
        layer: int,
        to_gpu: bool,
        on_end: Callable[[Any], None],
    ) -> None:
        """Move activations between the host and a layer's GPU, beside the copies that are on the link."""
        num_bytes = bytes_of_tokens(self._costs, trip.step, trip.plan, keys)
        if not num_bytes:
            on_end(0)
            return
        hardware = self._hardware
        assert hardware.memory is not None
        gpu = hardware.home_of_layer[layer] if hardware.home_of_layer else 0
        uses = (*hardware.memory.from_memory(0, True), *hardware.memory.over_link(gpu, to_gpu))
        rate = hardware.h2d_bytes_per_s if to_gpu else hardware.d2h_bytes_per_s
        self._shares.start(num_bytes, rate, uses, on_end)


def bytes_of_tokens(costs: CPUCosts, step: StepInfo, plan: LayerPlan, keys: Sequence[int]) -> int:
    """Return the bytes of those tokens' activations that some of a plan's experts serve, at most all."""
    tokens = sum(map(plan.routing.num_tokens, keys))
    return costs.activation_bytes(min(tokens, step.num_tokens))


def log_handover(
    log: EventLog | None,
    step: StepInfo,
    plan: LayerPlan,
    is_deferred: bool,
    start_ns: int,
    end_ns: int,
) -> None:
    """Record that activations change place: those that no layer waits for yet have lanes of their own.

    Two, for those of a layer are back before the layer after the next has its own.
    """
    if log is None or end_ns <= start_ns:
        return
    layer = plan.routing.layer
    lane, unit = (Lane.DEFERRAL, layer % 2) if is_deferred else (Lane.HANDOVER, 0)
    log.handover(step, Kind.HANDOVER, unit, layer, start_ns, end_ns, lane)
