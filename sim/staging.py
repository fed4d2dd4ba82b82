"""Staging slots: experts that run from memory outside the cache take turns in them."""

from __future__ import annotations

from collections.abc import Callable

from sim.types import LayerPlan


class Staging:
    """The staging slots of all GPUs during one layer.

    The first ``plan.num_held`` bypasses keep their slot until the layer ends; the others take turns in
    what is left, at least one slot: each copy waits for the end of the compute whose slot it takes.

    Parameters
    ----------
    num_gpus, gpu_of
        How many GPUs there are, and where an expert computes.
    num_slots
        Slots of each.
    flush
        Makes experts compute that are there but held back: their slots are needed.
    """

    def __init__(
        self,
        num_gpus: int,
        gpu_of: Callable[[int], int],
        num_slots: int,
        flush: Callable[[int], None],
    ) -> None:
        self._gpu_of = gpu_of
        self._num_slots = num_slots
        self._flush = flush
        self._plan: LayerPlan | None = None
        self._begun = [0] * num_gpus
        self._ends_ns: list[list[int]] = [[] for _ in range(num_gpus)]
        self._one_gpu = num_gpus == 1

    def begin(self, plan: LayerPlan) -> None:
        """Begin a layer: all slots are free."""
        self._plan = plan
        for gpu, ends_ns in enumerate(self._ends_ns):
            self._begun[gpu] = 0
            ends_ns.clear()

    def wait_ns(self, key: int, now_ns: int) -> int:
        """Return how long the copy of a bypass that could begin now must wait for its slot."""
        plan = self._plan
        assert plan is not None
        if plan.num_held and key in plan.bypasses[: plan.num_held]:
            return 0
        gpu = 0 if self._one_gpu else self._gpu_of(key)
        freed_by = self._begun[gpu] - self._num_turn_slots(plan, gpu)
        self._begun[gpu] += 1
        if freed_by < 0:
            return 0
        ends_ns = self._ends_ns[gpu]
        if freed_by >= len(ends_ns):
            self._flush(now_ns)
        return max(0, ends_ns[freed_by] - now_ns)

    def ended(self, key: int, end_ns: int) -> None:
        """Learn when the compute of a bypass ends: its slot is free then, if it takes turns."""
        plan = self._plan
        assert plan is not None
        if not plan.num_held or key not in plan.bypasses[: plan.num_held]:
            self._ends_ns[0 if self._one_gpu else self._gpu_of(key)].append(end_ns)

    def _num_turn_slots(self, plan: LayerPlan, gpu: int) -> int:
        if self._one_gpu:
            return plan.bypass_slots
        held = sum(self._gpu_of(key) == gpu for key in plan.bypasses[: plan.num_held])
        return max(1, self._num_slots - held)
