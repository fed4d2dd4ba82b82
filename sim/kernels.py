"""The kernels of a layer's experts on its GPUs: what they cost, and in which order they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from sim.events import EventLog, Kind, Lane
from sim.gpu import GPU
from sim.hardware import Hardware
from sim.types import LayerPlan, StepInfo


class KernelCosts(Protocol):
    """What kernels take, in int nanoseconds."""

    def expert_gpu_ns(self, layer: int, num_tokens: int, packed: bool) -> int:
        """Compute one expert, alone, whose weights are in GPU memory."""
        ...

    def experts_gpu_ns(self, layer: int, token_counts: Sequence[int], packed: bool) -> int:
        """Compute experts that are ready together."""
        ...

    def pack_ns(self, num_tokens: int) -> int:
        """Permute a layer's tokens by expert and back."""
        ...


class Kernels:
    """Runs experts on GPUs, one set of kernels after another on each."""

    def __init__(
        self,
        hardware: Hardware,
        costs: KernelCosts,
        num_layers: int,
        num_experts: int,
        log: EventLog | None,
    ) -> None:
        self.gpus = [GPU(index) for index in range(hardware.num_gpus)]
        self._unit_ns = [
            [costs.expert_gpu_ns(layer, 1, packed) for layer in range(num_layers)]
            for packed in (False, True)
        ]
        self._hardware = hardware
        self._costs = costs
        self._num_experts = num_experts
        self._log = log
        self._ones_ns: dict[tuple[int, int, bool], int] = {}

    # -- several GPUs -------------------------------------------------------------------------------

    def gpu_of(self, key: int) -> GPU:
        """Return the GPU where an expert computes."""
        return self.gpus[self._hardware.gpu_of_key[key] if len(self.gpus) > 1 else 0]

    def home(self, layer: int) -> GPU:
        """Return the GPU of a layer's attention."""
        return self.gpus[self._hardware.home_of_layer[layer] if len(self.gpus) > 1 else 0]

    def begin(self, layer: int, now_ns: int, begin_ns: int) -> None:
        """Begin a layer: GPUs other than its home get the activations one hop later."""
        home = self.home(layer)
        for gpu in self.gpus:
            gpu.begin(now_ns, begin_ns)
            if gpu is not home:
                gpu.free_ns += self._hardware.hop_ns

    def results_ns(self, gpu: GPU, layer: int) -> int:
        """Return when a GPU's results are at the layer's home."""
        if gpu is self.home(layer):
            return gpu.free_ns
        return gpu.free_ns + self._hardware.hop_ns if gpu.busy_ns else 0

    def last(self, layer: int) -> GPU:
        """Return the GPU whose results come last."""
        return max(self.gpus, key=lambda gpu: self.results_ns(gpu, layer))

    # -- work ---------------------------------------------------------------------------------------

    def pack(self, step: StepInfo, layer: int, ready_ns: int) -> None:
        """Permute the tokens of a layer."""
        gpu, cost_ns = self.home(layer), self._costs.pack_ns(step.num_tokens)
        start_ns = gpu.run(ready_ns, cost_ns)
        if self._log is not None and cost_ns:
            self._log.layer(step, Kind.PACK, gpu.index, layer, start_ns, gpu.free_ns)

    def run(self, step: StepInfo, plan: LayerPlan, keys: Sequence[int], ready_ns: int) -> None:
        """Run experts that are ready together, each on its GPU."""
        if len(self.gpus) == 1:
            self._run_on(self.gpus[0], step, plan, keys, ready_ns)
            return
        for gpu in self.gpus:
            part = [key for key in keys if self.gpu_of(key) is gpu]
            if part:
                self._run_on(gpu, step, plan, part, ready_ns)

    def run_share(
        self, step: StepInfo, plan: LayerPlan, key: int, ready_ns: int, cost_ns: int
    ) -> None:
        """Run one expert, or the share of it that costs ``cost_ns``."""
        gpu = self.gpu_of(key)
        start_ns = gpu.run(ready_ns, cost_ns)
        if self._log is not None:
            self._log.expert(plan, step, Lane.GPU, gpu.index, key, start_ns, gpu.free_ns)

    def one_ns(self, step: StepInfo, plan: LayerPlan, key: int) -> int:
        """Return the time of one expert that is ready by itself."""
        routing = plan.routing
        if step.num_tokens == 1:
            return self._unit_ns[plan.packed][routing.layer]
        if plan.groups is None or len(plan.groups) < 2:
            return self._costs.expert_gpu_ns(routing.layer, routing.num_tokens(key), plan.packed)
        return self.cost_ns(step, plan, (key,))

    def cost_ns(self, step: StepInfo, plan: LayerPlan, keys: Sequence[int]) -> int:
        """Return the time of experts that are ready together, over all micro-batches of the plan."""
        routing, packed, cost = plan.routing, plan.packed, self._costs.experts_gpu_ns
        if step.num_tokens == 1:
            place = (routing.layer, len(keys), packed)
            found = self._ones_ns.get(place)
            if found is None:
                found = self._ones_ns[place] = cost(routing.layer, (1,) * len(keys), packed)
            return found
        if plan.groups is None or len(plan.groups) < 2:
            return cost(routing.layer, [routing.num_tokens(key) for key in keys], packed)
        rows = [routing.token_ids(key % self._num_experts) for key in keys]
        total_ns = 0
        for group in plan.groups:
            shares = [int(np.isin(group, tokens).sum()) for tokens in rows]
            total_ns += cost(routing.layer, [count for count in shares if count], packed)
        return total_ns

    def _run_on(
        self, gpu: GPU, step: StepInfo, plan: LayerPlan, keys: Sequence[int], ready_ns: int
    ) -> None:
        cost_ns = self.cost_ns(step, plan, keys)
        start_ns = gpu.run(ready_ns, cost_ns)
        if self._log is not None:
            weights = [self.one_ns(step, plan, key) for key in keys]
            self._log.experts(plan, step, gpu.index, keys, weights, start_ns, cost_ns)
