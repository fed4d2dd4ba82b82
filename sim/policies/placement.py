"""Where a missing expert runs: in situ on the CPU, or on the GPU after a load."""

from __future__ import annotations

from collections.abc import Sequence

from sim.policies.base import PlacementPolicy
from sim.types import ExpertWork, Service, View


class InSituCPU(PlacementPolicy):
    """Run a missing expert on the CPU when that costs less than loading it (Fiddler, arXiv 2402.07033).

    Each missing expert is judged alone: CPU iff cpu_ns(tokens) < load_ns + gpu_ns(tokens), which is
    what minimising the *sum* over devices comes to (Fiddler's code; its comment says the maximum).
    What is not run on the CPU is offered to the cache. The handover a layer costs is left out, as in
    Fiddler's rule.
    """

    def place(self, work: Sequence[ExpertWork], view: View) -> Sequence[Service]:
        """Return CPU or LOAD for each missing expert."""
        costs, layer, packed = view.costs, view.layer, view.packed
        load_ns = costs.load_ns(layer)
        return [
            Service.CPU
            if costs.expert_cpu_ns(layer, tokens)
            < load_ns + costs.expert_gpu_ns(layer, tokens, packed)
            else Service.LOAD
            for _, tokens, _ in work
        ]
