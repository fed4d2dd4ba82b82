"""Experts on the CPU whose result may come a layer late."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from sim.policies.base import PlacementPolicy
from sim.types import ExpertWork, LayerRouting, Service, View


class ExpertDeferral(PlacementPolicy):
    """Compute misses on the CPU, the lightest ones a layer late (KTransformers, SOSP'25): lossy.

    Of each token's k experts the k - ``num_deferred`` heaviest are needed now; one that no token of the
    step needs now, and that is not on the GPU, is added at the next MoE layer (kvcache-ai/ktransformers,
    ``select_deferred_experts``). Where the trace has no weights the order of the slots stands for them:
    routers list the heaviest first. Steps of many tokens stream what is missing to the GPU instead.

    Parameters
    ----------
    num_deferred
        Experts a token that may come late; KTransformers advises 1 to 4 and finds that 5 to 7 hurt.
    gpu_from_tokens
        Tokens of a step from which misses are loaded for this use alone; 0: never. KTransformers'
        ``--kt-gpu-prefill-token-threshold`` is 1024 to 4096.
    """

    lossy: ClassVar[bool] = True

    def __init__(self, num_deferred: int = 2, gpu_from_tokens: int = 0) -> None:
        if num_deferred < 1:
            raise ValueError(f"num_deferred = {num_deferred}: must be >= 1")
        if gpu_from_tokens < 0:
            raise ValueError(f"gpu_from_tokens = {gpu_from_tokens}: must be >= 0")
        self.num_deferred = num_deferred
        self.gpu_from_tokens = gpu_from_tokens

    def place(self, work: Sequence[ExpertWork], view: View) -> Sequence[Service]:
        """Return CPU or DEFER for each missing expert, BYPASS where the step has many tokens."""
        if self.gpu_from_tokens and view.step.num_tokens >= self.gpu_from_tokens:
            return [Service.BYPASS] * len(work)
        needed = self._needed_now(view.routing, view)
        return [Service.CPU if item[0] in needed else Service.DEFER for item in work]

    def _needed_now(self, routing: LayerRouting, view: View) -> set[int]:
        """Return the keys that some token counts among its heaviest."""
        rows, weight_rows = routing.id_rows(), routing.weight_rows()
        if rows is None:
            raise ValueError(f"layer {routing.layer}: deferral needs the choices of each token")
        first = routing.layer * view.keys.num_experts
        protected, needed = max(0, len(rows[0]) - self.num_deferred), set[int]()
        for token, row in enumerate(rows):
            slots: Sequence[int] = range(len(row))
            if weight_rows is not None:  # of equals the first slots
                slots = sorted(slots, key=weight_rows[token].__getitem__, reverse=True)
            needed.update([first + row[slot] for slot in slots[:protected]])
        return needed
