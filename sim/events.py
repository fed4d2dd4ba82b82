"""The event table: what every resource did and when; one schema for simulated and real runs.

One row a stretch of work of one lane. Lanes never do two things at once, so rows of a lane do not overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from sim.types import LayerPlan, StepInfo

EVENT_COLUMNS = (
    "start_ns",
    "end_ns",
    "lane",
    "kind",
    "step",
    "layer",
    "expert",
    "num_tokens",
    "num_bytes",
)


class Lane(IntEnum):
    """The resource that works."""

    GPU = 0
    H2D = 1
    CPU = 2


class Kind(IntEnum):
    """What it does; ``expert`` is -1 where no single expert is meant."""

    DENSE = 0  # attention, router, shared experts of one layer
    STEP = 1  # embedding, dense-only layers and head of one step
    PACK = 2  # permutation of tokens by expert
    EXPERT = 3  # one expert's kernels
    LOAD = 4  # demand copy into the cache
    BYPASS = 5  # demand copy into a staging slot
    PREFETCH = 6  # copy nobody waits for


class EventLog:
    """Rows of the event table, copies as they arrive and kernels as they are planned; see EVENT_COLUMNS."""

    def __init__(self, num_experts: int) -> None:
        self.rows: list[tuple[int, ...]] = []
        self._num_experts = num_experts

    def dense(self, info: StepInfo, layer: int, start_ns: int, end_ns: int) -> None:
        """Record a layer's attention, router and shared experts."""
        row = (start_ns, end_ns, Lane.GPU, Kind.DENSE, info.step, layer, -1, info.num_tokens, 0)
        self.rows.append(row)

    def step(self, info: StepInfo, start_ns: int, end_ns: int) -> None:
        """Record what a step costs beside its MoE layers."""
        row = (start_ns, end_ns, Lane.GPU, Kind.STEP, info.step, -1, -1, info.num_tokens, 0)
        self.rows.append(row)

    def resident(
        self, info: StepInfo, plan: LayerPlan, start_ns: int, pack_ns: int, costs_ns: Sequence[int]
    ) -> None:
        """Record the permutation by expert, if any, and then the resident experts one by one."""
        time_ns = start_ns + pack_ns
        if pack_ns:
            layer, tokens = plan.routing.layer, info.num_tokens
            row = (start_ns, time_ns, Lane.GPU, Kind.PACK, info.step, layer, -1, tokens, 0)
            self.rows.append(row)
        for key, cost_ns in zip(plan.resident, costs_ns, strict=True):
            self.expert(info, plan, key, Lane.GPU, time_ns, time_ns + cost_ns)
            time_ns += cost_ns

    def expert(
        self, info: StepInfo, plan: LayerPlan, key: int, lane: Lane, start_ns: int, end_ns: int
    ) -> None:
        """Record one expert's kernels."""
        layer, expert = divmod(key, self._num_experts)
        tokens = plan.routing.num_tokens(key)
        row = (start_ns, end_ns, lane, Kind.EXPERT, info.step, layer, expert, tokens, 0)
        self.rows.append(row)

    def copy(
        self, info: StepInfo, key: int, kind: Kind, start_ns: int, end_ns: int, num_bytes: int
    ) -> None:
        """Record one copy to the GPU; ``info`` is the step under way when it arrived."""
        layer, expert = divmod(key, self._num_experts)
        row = (start_ns, end_ns, Lane.H2D, kind, info.step, layer, expert, 0, num_bytes)
        self.rows.append(row)
