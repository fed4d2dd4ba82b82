"""What a run moves and computes, by resource, and how long that takes at least.

Counts the same work that the cost model prices, but in bytes, operations and launches. What is fixed or
waits (kernel floors, setups, handover, gaps between copies) is left out: it is what keeps a run below its
roofs. KV entries count once, even where an engine's attention reads them several times.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hwmodels.cost import CostModel
from hwmodels.kernel_cost import ACTIVATION_BYTES
from hwmodels.units import NS_PER_S
from sim.types import KeySpace, LayerPlan


@dataclass(slots=True)
class Tally:
    """An amount, and the least time that it takes at the rates at which its parts can go."""

    amount: float = 0.0
    least_ns: float = 0.0

    def add(self, amount: float, per_s: float) -> None:
        """Add an amount that goes at ``per_s`` a second."""
        self.take(amount, amount * NS_PER_S / per_s)

    def take(self, amount: float, least_ns: float) -> None:
        """Add an amount that takes at least so long."""
        self.amount += amount
        self.least_ns += least_ns


@dataclass(slots=True)
class Work:
    """What devices and CPU did: operations, bytes of their memory, and kernel launches.

    ``device`` is the GPU, or the CPU where there is none. Times are those of one unit; several GPUs, or
    teams of CPU threads, share them.
    """

    device_ops: Tally = field(default_factory=Tally)
    device_bytes: Tally = field(default_factory=Tally)
    launches: Tally = field(default_factory=Tally)
    cpu_ops: Tally = field(default_factory=Tally)
    cpu_bytes: Tally = field(default_factory=Tally)


class CountingCosts(CostModel):
    """The costs of a run, which count in ``work`` what they are asked to price.

    A driver asks :meth:`dense_ns` and :meth:`step_ns` once a step, and shows each plan to :meth:`on_plan`.
    """

    def __init__(self, costs: CostModel, keys: KeySpace) -> None:
        super().__init__(costs.shape, costs.machine, costs.engine)
        self.work = Work()
        self._keys = keys
        share = self.engine.matmul_ratio if self.machine.gpu else 1
        self._matmul_per_s = self.machine.device.matmul_flops * share

    def dense_ns(self, num_tokens: int, kv_tokens: int, attention_pairs: int) -> int:
        """Price one MoE layer without its experts; count it for all of them."""
        layers, shape = self.shape.num_moe_layers, self.shape
        weights = shape.dense_layer_bytes(0), 2 * num_tokens * shape.dense_params
        self._count(layers, *weights, num_tokens, kv_tokens, attention_pairs)
        self._launch(layers * self.dense_launch_ns)
        return super().dense_ns(num_tokens, kv_tokens, attention_pairs)

    def step_ns(
        self, num_tokens: int, num_outputs: int, kv_tokens: int, attention_pairs: int
    ) -> int:
        """Price and count what a step has beside its MoE layers."""
        shape, work, layers = self.shape, self.work, self.shape.num_dense_only_layers
        weights = shape.dense_only_layer_bytes, 2 * num_tokens * shape.dense_only_params
        self._count(layers, *weights, num_tokens, kv_tokens, attention_pairs)
        moved = num_tokens * shape.hidden_size * ACTIVATION_BYTES
        moved += shape.head_bytes if num_outputs else 0
        work.device_bytes.add(moved, self.machine.device.memory_bytes_per_s)
        work.device_ops.add(2 * num_outputs * shape.head_params, self._matmul_per_s)
        self._launch(self.step_launch_ns)
        return super().step_ns(num_tokens, num_outputs, kv_tokens, attention_pairs)

    def on_plan(self, plan: LayerPlan) -> None:
        """Count a layer's experts: each one's weights are read once, wherever it computes."""
        elsewhere = {*plan.on_cpu, *plan.deferred}
        for key in plan.routing.experts:
            bank, tokens = key // self._keys.num_experts, plan.routing.num_tokens(key)
            if key in elsewhere:
                self._count_on_cpu(bank, tokens, self.work.cpu_bytes, self.work.cpu_ops)
            else:
                self._count_on_device(bank, tokens)

    def _count_on_device(self, bank: int, tokens: int) -> None:
        work, gpu = self.work, self.machine.gpu
        if gpu is None:
            self._count_on_cpu(bank, tokens, work.device_bytes, work.device_ops)
            return
        rate = gpu.expert_bytes_per_s(self.shape.expert_bits_of(bank))
        work.device_bytes.add(self.shape.expert_bytes(bank), rate)
        work.device_ops.add(tokens * self.shape.expert_flops_per_token, self._matmul_per_s)

    def _count_on_cpu(self, bank: int, tokens: int, moved: Tally, ops: Tally) -> None:
        priced = self.cpu_work(bank, tokens)
        moved.add(priced.num_bytes, priced.bytes_per_s)
        if self.machine.cpu.expert_table is None:  # measured times know no operations
            ops.take(tokens * self.shape.expert_flops_per_token, priced.least_ns)

    def count_kernels(self, kernels: int, gather_bytes: int) -> None:
        """Count the kernels of routed experts, and the activations that they gather and scatter."""
        self._launch(kernels * self.launch_ns)
        self.work.device_bytes.add(gather_bytes, self.machine.device.memory_bytes_per_s)

    def _count(
        self,
        layers: int,
        num_bytes: int,
        flops: int,
        num_tokens: int,
        kv_tokens: int,
        attention_pairs: int,
    ) -> None:
        """Count the matrices and the attention of some layers that are alike."""
        shape, device, work = self.shape, self.machine.device, self.work
        entries = shape.attended_tokens(kv_tokens, num_tokens)
        pairs = shape.attended_tokens(attention_pairs, num_tokens)
        moved = num_bytes + entries * shape.kv_bytes_per_token_full_layer
        work.device_bytes.add(layers * moved, device.memory_bytes_per_s)
        work.device_ops.add(layers * flops, self._matmul_per_s)
        attention_ops = layers * pairs * shape.attention_flops_per_pair
        work.device_ops.add(attention_ops, device.matmul_flops)

    def _launch(self, time_ns: int) -> None:
        if self.launch_ns:
            self.work.launches.add(time_ns // self.launch_ns, NS_PER_S / self.launch_ns)
