"""What a stage detector does on a workload by itself: no memory, no clock.

A detector sees steps and routings only, never what is in memory; so its boundaries are those of the
run, provided that the steps do not depend on the clock and no policy rewrites the routing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sim.policies.base import StageDetector
from sim.residency import Residency
from sim.types import KeySpace, LayerRouting, Phase, StepInfo, View
from sim.workload import Workload


class Seen(NamedTuple):
    """One step of a replay: whether it begins a stage, and the time that the detector took for it."""

    step: StepInfo
    routings: Sequence[LayerRouting]
    is_boundary: bool
    spent_ns: int


class _NoCosts:
    """Answers 0: a detector has nothing to ask."""

    def load_ns(self, layer: int) -> int:
        """Return 0."""
        return 0

    def expert_gpu_ns(self, layer: int, num_tokens: int, packed: bool) -> int:
        """Return 0."""
        return 0

    def expert_cpu_ns(self, layer: int, num_tokens: int) -> int:
        """Return 0."""
        return 0


def replay_stages(detector: StageDetector, works: Sequence[Workload]) -> Iterator[Seen]:
    """Play workloads, one after the other, to a detector the way the Offloader does; yield every step."""
    layers = works[0].num_layers
    keys = KeySpace(layers, works[0].num_experts)
    idle = StepInfo(step=-1, phase=Phase.PREFILL, num_tokens=0)
    view = View(keys, _NoCosts(), idle, Residency(keys, [1] * layers, range(layers), [1] * layers))
    clock = time.thread_time_ns  # of the processor: others may use the machine too
    for work in works:
        for step in work.steps():
            routings = work.routings(step)
            view.step, start_ns = step.info, clock()
            found = detector.is_boundary(step.info)
            view.stage += found
            detector.begin_step(view)
            for routing in routings:
                view.layer, view.routing = routing.layer, routing
                view.event += 1
                detector.observe(routing, view)
            yield Seen(step.info, routings, found, clock() - start_ns)


def stage_uses(detector: StageDetector, works: Sequence[Workload]) -> list[dict[int, int]]:
    """Return for each stage, the one before the first boundary first, how many tokens use each expert."""
    stages: list[dict[int, int]] = [{}]
    for seen in replay_stages(detector, works):
        if seen.is_boundary:
            stages.append({})
        uses = stages[-1]
        for routing in seen.routings:
            for key, tokens in zip(routing.experts, routing.token_counts, strict=True):
                uses[key] = uses.get(key, 0) + tokens
    return stages
