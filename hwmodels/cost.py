"""How long each piece of work takes on a machine: the truth for a timeline, an estimate for policies.

Roofline with fixed costs: time = fixed + max(bytes / achieved rate, operations / achieved rate).
The form follows measured curves (H200, 4096 x 4096 weights: 12.6 us flat from 1 to 64 tokens, then
growing with tokens from about 250 on; aiconfigurator GEMM tables). What overlaps with what is not
decided here.
"""

from __future__ import annotations

from hwmodels.machine import Machine
from hwmodels.model_shape import ModelShape
from hwmodels.units import compute_ns, transfer_ns

EXPERT_LAUNCHES_UNPACKED = 5
"""Kernels of one expert on its own: gather, gate-up, activation, down, scatter (model assumption)."""
EXPERT_LAUNCHES_PACKED = 3
"""The same when its tokens lie together already: gate-up, activation, down."""
PACK_LAUNCHES = 2
"""Permute and unpermute of a layer's tokens."""
DENSE_LAUNCHES = 10
"""Norm, QKV, rotary, KV write, attention, output, norm, router, top-k, combine (model assumption).

An engine with fused kernels launches 27 to 28 a layer for Qwen3-30B-A3B, those of its experts included
(1341 a token: kekzl/imp PR 1377); one kernel set an expert, as here, comes to 10 + 8 x 5 = 50 a layer, 34
packed, so that GPU time at batch 1 is that of an engine without fusion.
"""
SHARED_LAUNCHES = 4
"""Gate-up, activation, down and addition of shared experts."""
DENSE_ONLY_LAUNCHES = 10
"""Norm, QKV, rotary, KV write, attention, output, norm, gate-up, activation, down."""
HEAD_LAUNCHES = 4
"""Embedding, last norm, LM head, sampling."""
ACTIVATION_BYTES = 2
"""One activation value (16 bit)."""


class CostModel:
    """Costs of a model's work on a machine, in int nanoseconds, rounded up.

    Asked millions of times by a simulation, so answers about experts are kept. ``load_ns_by_layer``
    has :meth:`load_ns` as a list, for loops that need no call.

    Parameters
    ----------
    shape
        The model, already priced as the trace that runs.
    machine
        The machine.
    """

    def __init__(self, shape: ModelShape, machine: Machine) -> None:
        self.shape = shape
        self.machine = machine
        self._num_layers = shape.num_moe_layers
        self._expert_bytes = [shape.expert_bytes(layer) for layer in range(self._num_layers)]
        self.load_ns_by_layer = [self.transfer_ns(size) for size in self._expert_bytes]
        self._gpu_ns: dict[tuple[int, int, bool], int] = {}
        self._cpu_ns: dict[tuple[int, int], int] = {}

    # -- the link ----------------------------------------------------------------------------------

    def load_ns(self, layer: int) -> int:
        """Copy one expert of ``layer`` from host to GPU memory over an idle link."""
        if layer < 0 or layer >= self._num_layers:
            raise self._layer_error(layer)
        return self.load_ns_by_layer[layer]

    def transfer_ns(self, num_bytes: int) -> int:
        """Copy ``num_bytes`` from host to GPU: setup + bytes / rate.

        The affine form and a setup of about 10 us fit a measured size curve (kekzl/imp PR 1409).
        """
        _check(num_bytes=num_bytes)
        link = self.machine.link
        return link.copy_setup_ns + transfer_ns(num_bytes, link.load_bytes_per_s)

    # -- experts -----------------------------------------------------------------------------------

    def expert_gpu_ns(self, layer: int, num_tokens: int, packed: bool) -> int:
        """Compute one expert whose weights are in GPU memory.

        launches * launch + max(kernel floor, weight bytes / memory rate, operations / matmul rate);
        0 for no tokens. ``packed``: the layer's tokens were permuted by expert (:meth:`pack_ns`), so
        the expert's own gather and scatter fall away. Activation traffic is left out.
        """
        cost = self._gpu_ns.get((layer, num_tokens, packed))
        if cost is None:
            cost = self._new_expert_gpu_ns(layer, num_tokens, packed)
            self._gpu_ns[layer, num_tokens, packed] = cost
        return cost

    def expert_cpu_ns(self, layer: int, num_tokens: int) -> int:
        """Compute one expert on the CPU where its weights lie.

        max(setup + weight bytes / rate of the threads in use, operations / their matmul rate); 0 for
        no tokens. Flat in tokens until operations bind: one pass over the weights serves them all.
        The affine form fits measured expert kernels over quantisations (KTransformers, Xeon 6454S:
        145 us + bytes / 229 GB/s for six experts). :meth:`handover_ns` comes once a layer on top.
        """
        cost = self._cpu_ns.get((layer, num_tokens))
        if cost is None:
            cost = self._new_expert_cpu_ns(layer, num_tokens)
            self._cpu_ns[layer, num_tokens] = cost
        return cost

    def handover_ns(self) -> int:
        """Hand a layer's activations to the CPU and back."""
        return self.machine.cpu.handover_ns

    def pack_ns(self, num_tokens: int) -> int:
        """Permute a layer's tokens by expert and back: 2 launches + activation bytes / memory rate.

        Each token is read once and written top_k times, and the reverse afterwards (model assumption).
        """
        _check(num_tokens=num_tokens)
        if not num_tokens:
            return 0
        gpu, shape = self.machine.gpu, self.shape
        moved = 2 * num_tokens * (1 + shape.top_k) * shape.hidden_size * ACTIVATION_BYTES
        return PACK_LAUNCHES * gpu.launch_ns + transfer_ns(moved, gpu.memory_bytes_per_s)

    # -- all the rest ------------------------------------------------------------------------------

    def dense_ns(self, num_tokens: int, kv_tokens: int, num_sequences: int | None = None) -> int:
        """Run attention, router and shared experts of one MoE layer.

        launches * launch + max(kernel floor, (weight + KV bytes) / memory rate, operations / matmul
        rate), a model assumption. ``kv_tokens`` are the KV entries read, summed over sequences, the
        new tokens' own included. ``num_sequences`` (default: one a token, as in decode) tells how
        many pairs of new token and KV entry attention computes.
        """
        _check(num_tokens=num_tokens, kv_tokens=kv_tokens, num_sequences=num_sequences or 0)
        if not num_tokens:
            return 0
        shape = self.shape
        launches = DENSE_LAUNCHES + (SHARED_LAUNCHES if shape.num_shared_experts else 0)
        read = shape.dense_layer_bytes(0) + kv_tokens * shape.kv_bytes_per_token_layer
        pairs = _attention_pairs(num_tokens, kv_tokens, num_sequences or num_tokens)
        flops = 2 * num_tokens * shape.dense_params + pairs * shape.attention_flops_per_pair
        return self._kernels_ns(launches, read, flops)

    def step_ns(self, num_tokens: int, num_sequences: int, kv_tokens: int = 0) -> int:
        """Run what a step costs beside its MoE layers: embedding, dense-only layers, LM head.

        The machine's fixed cost of a step, plus each part as in :meth:`dense_ns`; the head sees one
        token a sequence. ``kv_tokens`` prices the KV that dense-only layers read.
        """
        _check(num_tokens=num_tokens, num_sequences=num_sequences, kv_tokens=kv_tokens)
        if not num_tokens:
            return 0
        shape = self.shape
        looked_up = num_tokens * shape.hidden_size * ACTIVATION_BYTES
        head_flops = 2 * num_sequences * shape.head_params
        head_ns = self._kernels_ns(HEAD_LAUNCHES, shape.head_bytes + looked_up, head_flops)
        layers_ns = shape.num_dense_only_layers * self._dense_only_ns(
            num_tokens, num_sequences, kv_tokens
        )
        return self.machine.gpu.step_overhead_ns + head_ns + layers_ns

    # -- the formulas ------------------------------------------------------------------------------

    def _kernels_ns(self, launches: int, num_bytes: int, num_flops: int) -> int:
        """Return launches * launch + max(kernel floor, bytes / rate, operations / rate)."""
        gpu = self.machine.gpu
        work_ns = max(
            gpu.kernel_floor_ns,
            transfer_ns(num_bytes, gpu.memory_bytes_per_s),
            compute_ns(num_flops, gpu.matmul_flops),
        )
        return launches * gpu.launch_ns + work_ns

    def _dense_only_ns(self, num_tokens: int, num_sequences: int, kv_tokens: int) -> int:
        shape = self.shape
        read = shape.dense_only_layer_bytes + kv_tokens * shape.kv_bytes_per_token_layer
        pairs = _attention_pairs(num_tokens, kv_tokens, num_sequences or num_tokens)
        flops = 2 * num_tokens * shape.dense_only_params + pairs * shape.attention_flops_per_pair
        return self._kernels_ns(DENSE_ONLY_LAUNCHES, read, flops)

    def _new_expert_gpu_ns(self, layer: int, num_tokens: int, packed: bool) -> int:
        num_bytes, num_flops = self._expert_work(layer, num_tokens)
        if not num_tokens:
            return 0
        launches = EXPERT_LAUNCHES_PACKED if packed else EXPERT_LAUNCHES_UNPACKED
        return self._kernels_ns(launches, num_bytes, num_flops)

    def _new_expert_cpu_ns(self, layer: int, num_tokens: int) -> int:
        num_bytes, num_flops = self._expert_work(layer, num_tokens)
        if not num_tokens:
            return 0
        cpu = self.machine.cpu
        stream_ns = cpu.expert_setup_ns + transfer_ns(num_bytes, cpu.expert_bytes_per_s)
        return max(stream_ns, compute_ns(num_flops, cpu.expert_flops))

    def _expert_work(self, layer: int, num_tokens: int) -> tuple[int, int]:
        """Return the bytes and operations of one expert; raise ValueError for impossible arguments."""
        _check(num_tokens=num_tokens)
        if not 0 <= layer < self._num_layers:
            raise self._layer_error(layer)
        return self._expert_bytes[layer], num_tokens * self.shape.expert_flops_per_token

    def _layer_error(self, layer: int) -> ValueError:
        return ValueError(f"layer = {layer}: must be in [0, {self._num_layers})")


def _attention_pairs(num_tokens: int, kv_tokens: int, num_sequences: int) -> int:
    """Return the (new token, KV entry) pairs of causal attention, sequences taken as equally long.

    With q new tokens and k entries (the new ones included) a sequence: q * k - q * (q - 1) / 2.
    """
    entries = max(kv_tokens, num_tokens)
    return num_tokens * (2 * entries - num_tokens + num_sequences) // (2 * num_sequences)


def _check(**counts: int) -> None:
    """Raise ValueError for a negative count."""
    for name, value in counts.items():
        if value < 0:
            raise ValueError(f"{name} = {value}: must be >= 0")
