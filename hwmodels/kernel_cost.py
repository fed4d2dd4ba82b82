"""How long the kernels of the device take: the GPU's, or those of a CPU that computes everything.

Roofline with fixed costs: time = launches * launch + max(kernel floor, bytes / achieved rate, operations /
achieved rate). The form follows measured curves (H200, 4096 x 4096 weights: 12.6 us flat from 1 to 64
tokens, then growing with tokens from about 250 on; ai-dynamo/aiconfigurator GEMM tables).
"""

from __future__ import annotations

import math

from hwmodels.engine import Engine
from hwmodels.machine import Machine
from hwmodels.model_shape import ModelShape
from hwmodels.units import compute_ns, transfer_ns

ACTIVATION_BYTES = 2
"""One activation value (16 bit)."""


class KernelCosts:
    """Costs of kernels, in int nanoseconds, rounded up; no tokens cost nothing."""

    def __init__(self, shape: ModelShape, machine: Machine, engine: Engine) -> None:
        self._shape = shape
        self._engine = engine
        self._gpu = machine.device
        self._launch_ns = _launch_ns(machine, engine)
        self._matmul_flops = self._gpu.matmul_flops
        if machine.gpu:
            self._matmul_flops = max(1, int(self._matmul_flops * engine.matmul_ratio))
        self._shards = self._gpu.count if engine.tensor_parallel else 1
        hop_ns = machine.link.hop_ns if machine.link else 0
        # two sums a layer, each up a tree of GPUs and down again (NCCL's for small messages)
        self._sums_ns = 2 * 2 * math.ceil(math.log2(self._shards)) * hop_ns
        self._dispatch_ns = 0 if machine.gpu else machine.cpu.dispatch_ns
        self._token_bytes = shape.hidden_size * ACTIVATION_BYTES
        self._kv_bytes = shape.kv_bytes_per_token_full_layer
        self._decode_flops = _decode_attention_flops(shape, machine, engine)
        self._pair_flops = shape.attention_flops_per_pair
        self._matrices_ns: dict[int, int] = {}

    def expert_launches(self, packed: bool) -> int:
        """Return how many kernels one set of them is."""
        return self._engine.expert_launches_packed if packed else self._engine.expert_launches

    def gather_bytes(self, num_tokens: int, packed: bool) -> int:
        """Return the activation bytes that a set of kernels moves to gather and scatter its tokens.

        Each is read and written before and after, by kernels of their own or through an index (model
        assumption); none where tokens are packed.
        """
        return 0 if packed else 4 * num_tokens * self._token_bytes

    def pack_bytes(self, num_tokens: int) -> int:
        """Return the activation bytes that it takes to permute a layer's tokens by expert and back.

        Each token is read once and written top_k times, and the reverse afterwards (model assumption).
        """
        return 2 * num_tokens * (1 + self._shape.top_k) * self._token_bytes

    @property
    def dense_launches(self) -> int:
        """Kernels of one MoE layer without its routed experts, rounded where layers differ in kind."""
        engine, shape = self._engine, self._shape
        launches = engine.dense_launches + self._attention_launches
        return launches + (engine.shared_launches if shape.num_shared_experts else 0)

    @property
    def step_launches(self) -> int:
        """Kernels of a step beside its MoE layers."""
        engine, layers = self._engine, self._shape.num_dense_only_layers
        a_layer = engine.dense_only_launches + self._attention_launches
        return engine.head_launches + layers * a_layer

    @property
    def launch_ns(self) -> int:
        """Distance of two kernels as the engine launches them."""
        return self._launch_ns

    def experts_ns(
        self,
        layer: int,
        num_experts: int,
        num_tokens: int,
        packed: bool,
        num_rows: int | None = None,
    ) -> int:
        """Compute one set of kernels over ``num_experts`` experts that have ``num_tokens`` in all.

        A set of per-expert kernels has one expert. ``num_rows`` are the tokens with those of the padding
        that grouped kernels compute as well. What gathers and scatters moves its bytes at the memory
        rate, on top.
        """
        if not num_tokens:
            return 0
        shape = self._shape
        rate = self._gpu.expert_bytes_per_s(shape.expert_bits_of(layer))
        weights_ns = transfer_ns(num_experts * shape.expert_bytes(layer), rate)
        flops = (num_tokens if num_rows is None else num_rows) * shape.expert_flops_per_token
        time_ns = self._kernels_ns(self.expert_launches(packed), weights_ns, flops)
        return time_ns + self._memory_ns(self.gather_bytes(num_tokens, packed))

    def pack_ns(self, num_tokens: int) -> int:
        """Permute a layer's tokens by expert and back: launches + activation bytes / memory rate."""
        if not num_tokens:
            return 0
        moved_ns = self._memory_ns(self.pack_bytes(num_tokens))
        return self._engine.pack_launches * self._launch_ns + moved_ns

    def dense_ns(self, num_tokens: int, kv_tokens: int, attention_pairs: int) -> int:
        """Run one MoE layer without its routed experts: attention, router, shared experts."""
        if not num_tokens:
            return 0
        matrices_ns = self._matrices_ns.get(num_tokens)
        if matrices_ns is None:  # asked in each layer of each step
            matrices_ns = self._matrices_ns[num_tokens] = self._new_matrices_ns(num_tokens)
        return (
            matrices_ns
            + self._attention_ns(num_tokens, kv_tokens, attention_pairs)
            + self._dispatch_ns
        )

    def step_ns(
        self, num_tokens: int, num_outputs: int, kv_tokens: int, attention_pairs: int
    ) -> int:
        """Run what a step costs beside its MoE layers: embedding, dense-only layers, LM head."""
        if not num_tokens:
            return 0
        shape, engine = self._shape, self._engine
        head_bytes = shape.head_bytes // self._shards if num_outputs else 0
        head_bytes += num_tokens * self._token_bytes
        head_flops = 2 * num_outputs * shape.head_params // self._shards
        head_ns = self._kernels_ns(engine.head_launches, self._memory_ns(head_bytes), head_flops)
        layer_ns = self._dense_only_ns(num_tokens, kv_tokens, attention_pairs)
        return self._gpu.step_overhead_ns + head_ns + shape.num_dense_only_layers * layer_ns

    # -- the formulas ------------------------------------------------------------------------------

    def _new_matrices_ns(self, num_tokens: int) -> int:
        shape, shards = self._shape, self._shards
        weights_ns = self._memory_ns(shape.dense_layer_bytes(0) // shards)
        flops = 2 * num_tokens * shape.dense_params // shards
        return self._kernels_ns(self.dense_launches, weights_ns, flops) + self._sums_ns

    @property
    def _attention_launches(self) -> int:
        """Kernels of attention of other kinds, beyond those with grouped heads."""
        shape, engine = self._shape, self._engine
        if shape.kv_lora_rank:
            return engine.latent_launches
        return round(engine.linear_launches * shape.num_linear_layers / shape.num_layers)

    def _dense_only_ns(self, num_tokens: int, kv_tokens: int, attention_pairs: int) -> int:
        shape, shards = self._shape, self._shards
        weights_ns = self._memory_ns(shape.dense_only_layer_bytes // shards)
        launches = self._engine.dense_only_launches + self._attention_launches
        flops = 2 * num_tokens * shape.dense_only_params // shards
        layer_ns = self._kernels_ns(launches, weights_ns, flops) + self._sums_ns
        return (
            layer_ns
            + self._attention_ns(num_tokens, kv_tokens, attention_pairs)
            + self._dispatch_ns
        )

    def _attention_ns(self, num_tokens: int, kv_tokens: int, attention_pairs: int) -> int:
        """Return floor + max(KV bytes / memory rate, operations / matmul rate) of one layer.

        Window layers read at most their window, linear ones no entries; the layer is their mean.

        The floor comes on top of the bytes: decode attention of 32 heads over 4 KV heads takes 33.5 us at
        8192 entries and 72 at 32768 on an A100, with a floor of 12.5 and 11 and 44 us of bytes
        (ai-dynamo/aiconfigurator tables).
        """
        shape = self._shape
        entries = shape.attended_tokens(kv_tokens, num_tokens)
        pairs = shape.attended_tokens(attention_pairs, num_tokens)
        is_decode = attention_pairs == kv_tokens  # each sequence has one new token
        flops = self._decode_flops if is_decode else self._gpu.matmul_flops
        return self._gpu.attention_floor_ns + max(
            self._memory_ns(entries * self._kv_bytes // self._shards),
            compute_ns(pairs * self._pair_flops // self._shards, flops),
        )

    def _kernels_ns(self, launches: int, bytes_ns: int, num_flops: int) -> int:
        """Return launches * launch + max(kernel floor, bytes / rate, operations / rate)."""
        gpu = self._gpu
        work_ns = max(gpu.kernel_floor_ns, bytes_ns, compute_ns(num_flops, self._matmul_flops))
        return launches * self._launch_ns + work_ns

    def _memory_ns(self, num_bytes: int) -> int:
        return transfer_ns(num_bytes, self._gpu.memory_bytes_per_s)


def _launch_ns(machine: Machine, engine: Engine) -> int:
    """Return the distance of two kernels: from a graph, or from a stream, of which GPU or host is the limit.

    If a launch waits for the kernel before it, that kernel's floor comes on top.
    """
    if machine.gpu is None:
        return 0
    issue_ns = math.ceil(machine.cpu.launch_issue_ns * engine.launch_issue_ratio)
    stream_ns = max(machine.gpu.launch_ns, issue_ns)
    waits_ns = machine.gpu.kernel_floor_ns if engine.launch_waits else 0
    return waits_ns + (machine.gpu.graph_launch_ns if engine.graph else stream_ns)


def _decode_attention_flops(shape: ModelShape, machine: Machine, engine: Engine) -> int:
    """Return the rate of attention where each sequence has one new token.

    Kernels for vectors compute each query head by itself: 8192 entries of 32 heads in 48 layers add 2.66 ms
    a token on an RTX 4080, of 64 heads in 94 layers 14.7 on an A6000 (ikawrakow/ik_llama.cpp), two to six
    times what their bytes take, and in both about 0.05 of the vector rate.
    """
    gpu, ratio = machine.device, engine.attention_vector_ratio
    if ratio is None or shape.kv_lora_rank or machine.gpu is None:
        return gpu.matmul_flops
    return max(1, int((gpu.vector_flops or gpu.matmul_flops) * ratio))
