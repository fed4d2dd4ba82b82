"""The event table: what every resource did and when; one schema for simulated and real runs.

One row a stretch of work of one lane. A lane (a resource and which of several it is) never does two things
at once, so its rows do not overlap. The low-precision copy of an expert has the number expert + num_experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING

from sim.tables import Table
from sim.types import LayerPlan, StepInfo, View

if TYPE_CHECKING:
    from sim.residency import Residency

EVENT_COLUMNS = (
    "start_ns",
    "end_ns",
    "lane",
    "unit",
    "kind",
    "step",
    "layer",
    "expert",
    "num_tokens",
    "num_bytes",
)
COUNTER_COLUMNS = ("time_ns", "counter", "unit", "value")


class Lane(IntEnum):
    """The resource that works; ``unit`` is a GPU, a CPU team, or 0."""

    GPU = 0
    H2D = 1  # host to one GPU
    CPU = 2
    D2H = 3  # one GPU to the host
    STORAGE = 4
    HANDOVER = 5  # activations between GPU and CPU, or between GPUs
    DEFERRAL = 6  # those of deferred CPU experts, which nobody waits for yet; ``unit`` is layer % 2
    CACHE = 7  # what is on the GPUs; its rows take no time


class Kind(IntEnum):
    """What it does; ``expert`` is -1 where no single expert is meant."""

    DENSE = 0  # attention, router, shared experts of one layer
    STEP = 1  # embedding, dense-only layers and head of one step
    PACK = 2  # permutation of tokens by expert
    EXPERT = 3  # one expert's kernels, or its share of those that run as a group
    LOAD = 4  # demand copy into the cache
    BYPASS = 5  # demand copy into a staging slot
    PREFETCH = 6  # copy nobody waits for
    READ = 7  # from storage into host memory
    DEMOTE = 8  # back from the GPU into host memory
    HANDOVER = 9  # activations to the CPU or back
    HOP = 10  # activations to another GPU
    ENTER = 11  # from now on the expert is in the cache; those there at the start enter at 0
    LEAVE = 12  # and from now on it is not


LANE_OF_COPY = {
    Kind.LOAD: Lane.H2D,
    Kind.BYPASS: Lane.H2D,
    Kind.PREFETCH: Lane.H2D,
    Kind.READ: Lane.STORAGE,
    Kind.DEMOTE: Lane.D2H,
}
"""The lane of each kind of copy, where storage and GPU are apart."""


class Counter(IntEnum):
    """What is sampled; ``unit`` is the GPU."""

    CACHE_BYTES = 0  # experts that are resident or on their way
    QUEUE = 1  # copies that wait for the link
    KV_BYTES = 2


class EventLog:
    """Rows of the event table, copies as they arrive and kernels as they are planned; see EVENT_COLUMNS.

    None: tables that keep their rows. ``num_layers`` tells low-precision copies, where there are any.
    """

    def __init__(
        self,
        num_experts: int,
        table: Table | None = None,
        counters: Table | None = None,
        num_layers: int | None = None,
    ) -> None:
        self.table = Table(EVENT_COLUMNS) if table is None else table
        self.counters = Table(COUNTER_COLUMNS) if counters is None else counters
        self._num_experts = num_experts
        self._num_layers = num_layers

    @property
    def rows(self) -> list[tuple[int, ...]]:
        """The rows so far, where the table keeps them."""
        return self.table.rows

    def follow(self, residency: Residency, view: View, now_ns: Callable[[], int]) -> None:
        """Record which experts are in the cache, and from now on all that come and go."""
        for key in residency.resident():
            self.moved(-1, key, True, 0)
        residency.watch = lambda key, is_in: self.moved(view.step.step, key, is_in, now_ns())

    def layer(
        self, info: StepInfo, kind: Kind, unit: int, layer: int, start_ns: int, end_ns: int
    ) -> None:
        """Record kernels of a GPU that belong to no single expert; ``layer`` is -1 for a whole step."""
        row = (start_ns, end_ns, Lane.GPU, unit, kind, info.step, layer, -1, info.num_tokens, 0)
        self.table.append(row)

    def experts(
        self,
        plan: LayerPlan,
        info: StepInfo,
        unit: int,
        keys: Sequence[int],
        weights: Sequence[int],
        start_ns: int,
        cost_ns: int,
    ) -> None:
        """Record experts that a GPU computes together; each has a share of ``cost_ns`` by its weight."""
        done, total, begin_ns = 0, sum(weights), start_ns
        for key, weight in zip(keys, weights, strict=True):
            done += weight
            end_ns = start_ns + (cost_ns * done // total if total else 0)
            self.expert(plan, info, Lane.GPU, unit, key, begin_ns, end_ns)
            begin_ns = end_ns

    def expert(
        self,
        plan: LayerPlan,
        info: StepInfo,
        lane: Lane,
        unit: int,
        key: int,
        start_ns: int,
        end_ns: int,
    ) -> None:
        """Record one expert's kernels."""
        layer, expert = self._place(key)
        tokens, kind = plan.routing.num_tokens(key), Kind.EXPERT
        row = (start_ns, end_ns, lane, unit, kind, info.step, layer, expert, tokens, 0)
        self.table.append(row)

    def copy(
        self,
        info: StepInfo,
        lane: Lane,
        unit: int,
        kind: Kind,
        key: int,
        start_ns: int,
        end_ns: int,
        num_bytes: int,
    ) -> None:
        """Record one copy, or a chunk of it; ``info`` is the step under way when it arrived."""
        layer, expert = self._place(key)
        row = (start_ns, end_ns, lane, unit, kind, info.step, layer, expert, 0, num_bytes)
        self.table.append(row)

    def moved(self, step: int, key: int, is_in: bool, now_ns: int) -> None:
        """Record that an expert has come into the cache, or gone; ``step`` is -1 before the first."""
        layer, expert = self._place(key)
        kind = Kind.ENTER if is_in else Kind.LEAVE
        self.table.append((now_ns, now_ns, Lane.CACHE, 0, kind, step, layer, expert, 0, 0))

    def handover(
        self,
        info: StepInfo,
        kind: Kind,
        unit: int,
        layer: int,
        start_ns: int,
        end_ns: int,
        lane: Lane = Lane.HANDOVER,
    ) -> None:
        """Record that activations change place."""
        row = (start_ns, end_ns, lane, unit, kind, info.step, layer, -1)
        self.table.append((*row, info.num_tokens, 0))

    def count(self, time_ns: int, counter: Counter, unit: int, value: int) -> None:
        """Record a sample of a counter."""
        self.counters.append((time_ns, counter, unit, value))

    def _place(self, key: int) -> tuple[int, int]:
        """Return the layer and the number of an expert, or of its low-precision copy."""
        bank, expert = divmod(key, self._num_experts)
        if self._num_layers is None or bank < self._num_layers:
            return bank, expert
        return bank - self._num_layers, expert + self._num_experts
