"""The kernels of a layer's experts on its GPUs: what they cost, and in which order they run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sim.events import EventLog, Kind, Lane
from sim.gpu import GPU
from sim.hardware import Hardware
from sim.types import KeySpace, LayerPlan, StepInfo


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
        keys: KeySpace,
        log: EventLog | None,
    ) -> None:
        self.gpus = [GPU(index) for index in range(hardware.num_gpus)]
        self._unit_ns = [
            [costs.expert_gpu_ns(bank, 1, packed) for bank in range(keys.num_banks)]
            for packed in (False, True)
        ]
        self._hardware = hardware
        self._costs = costs
        self._keys = keys
        self._log = log
        self._ones_ns: dict[tuple[int, int, bool], int] = {}
        self._kept_ratio = hardware.rate_beside_cpu_ratio
        self.cpu_until_ns = 0
        """When the CPU will have computed its experts of the layer, at whose side kernels are slower."""
        self.num_beside = 0
        """Runs of GPUs that begin no set of expert kernels."""

    @property
    def num_sets(self) -> int:
        """Sets of expert kernels that were run so far."""
        return sum(gpu.num_runs for gpu in self.gpus) - self.num_beside

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
        self.num_beside += 1
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
        self,
        step: StepInfo,
        plan: LayerPlan,
        key: int,
        ready_ns: int,
        cost_ns: int,
        ends: bool = True,
    ) -> None:
        """Run one expert, or the share of it that costs ``cost_ns``; ``ends``: it is whole with that."""
        gpu = self.gpu_of(key)
        self.num_beside += not ends
        if self._kept_ratio < 1:
            cost_ns = self._beside_cpu_ns(gpu, ready_ns, cost_ns)
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
        rows = [routing.token_ids(key % self._keys.num_experts) for key in keys]
        return self._by_groups_ns(plan, routing.layer, rows)

    def _by_groups_ns(self, plan: LayerPlan, bank: int, rows: Sequence[NDArray[np.intp]]) -> int:
        """Return the time of experts of a bank, each with its ``rows``, micro-batch by micro-batch."""
        total_ns = 0
        for group in plan.groups or ():
            shares = [int(np.isin(group, tokens).sum()) for tokens in rows]
            counts = [count for count in shares if count]
            total_ns += self._costs.experts_gpu_ns(bank, counts, plan.packed)
        return total_ns

    def _run_on(
        self, gpu: GPU, step: StepInfo, plan: LayerPlan, keys: Sequence[int], ready_ns: int
    ) -> None:
        cost_ns = self.cost_ns(step, plan, keys)
        if not keys:  # a gate has let nobody through
            self.num_beside += 1
        if self._kept_ratio < 1:
            cost_ns = self._beside_cpu_ns(gpu, ready_ns, cost_ns)
        start_ns = gpu.run(ready_ns, cost_ns)
        if self._log is not None:
            weights = [self.one_ns(step, plan, key) for key in keys]
            self._log.experts(plan, step, gpu.index, keys, weights, start_ns, cost_ns)

    def _beside_cpu_ns(self, gpu: GPU, ready_ns: int, cost_ns: int) -> int:
        """Return how long kernels take that run at a part of their rate until the CPU has ended."""
        slow_ns = self.cpu_until_ns - max(ready_ns, gpu.free_ns)
        if slow_ns <= 0:
            return cost_ns
        whole_ns = math.ceil(cost_ns / self._kept_ratio)
        return min(whole_ns, math.ceil(cost_ns + slow_ns * (1 - self._kept_ratio)))


class MixedKernels(Kernels):
    """Kernels where experts have low-precision copies: a set of kernels serves one precision only."""

    def one_ns(self, step: StepInfo, plan: LayerPlan, key: int) -> int:
        """Return the time of one expert that is ready by itself, in its own precision."""
        if step.num_tokens == 1:
            return self._unit_ns[plan.packed][self._keys.bank(key)]
        return self._bank_ns(step, plan, (key,))

    def cost_ns(self, step: StepInfo, plan: LayerPlan, keys: Sequence[int]) -> int:
        """Return the time of experts that are ready together: those of one precision, then the others."""
        return sum(self._bank_ns(step, plan, part) for part in self._by_precision(keys))

    def _run_on(
        self, gpu: GPU, step: StepInfo, plan: LayerPlan, keys: Sequence[int], ready_ns: int
    ) -> None:
        for part in self._by_precision(keys):
            super()._run_on(gpu, step, plan, part, ready_ns)

    def _by_precision(self, keys: Sequence[int]) -> list[list[int]]:
        """Return the experts of full precision and the low-precision ones, those of which there are any."""
        is_low = self._keys.is_low
        parts = [key for key in keys if not is_low(key)], [key for key in keys if is_low(key)]
        return [part for part in parts if part]

    def _bank_ns(self, step: StepInfo, plan: LayerPlan, keys: Sequence[int]) -> int:
        """Return the time of experts of one precision, over all micro-batches of the plan."""
        routing, packed, num_experts = plan.routing, plan.packed, self._keys.num_experts
        bank, cost = self._keys.bank(keys[0]), self._costs.experts_gpu_ns
        if step.num_tokens == 1:
            return cost(bank, (1,) * len(keys), packed)
        if plan.groups is None or len(plan.groups) < 2:
            return cost(bank, [routing.num_tokens(key) for key in keys], packed)
        is_low = self._keys.is_low(keys[0])
        rows = [routing.token_ids(key % num_experts, is_low) for key in keys]
        return self._by_groups_ns(plan, bank, rows)


def kernels_of(
    hardware: Hardware, costs: KernelCosts, keys: KeySpace, log: EventLog | None
) -> Kernels:
    """Return the kernels of a machine and of the copies of experts that there are."""
    kind = Kernels if keys.num_copies == 1 else MixedKernels
    return kind(hardware, costs, keys, log)
