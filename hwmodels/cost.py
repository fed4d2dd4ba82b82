"""How long each piece of work takes on a machine: truth for a timeline, estimate for policies.

What overlaps with what, and what shares a memory or a link, is not decided here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

from hwmodels.curves import on_grid, proportional
from hwmodels.engine import Engine
from hwmodels.errors import HardwareError
from hwmodels.host_cost import CPUWork, HostCosts, layer_setup_ns
from hwmodels.kernel_cost import ACTIVATION_BYTES, KernelCosts
from hwmodels.machine import Machine, Storage
from hwmodels.model_shape import ModelShape
from hwmodels.units import transfer_ns


class CostModel:
    """Costs of a model's work on a machine, in int nanoseconds, rounded up.

    Asked millions of times by a simulation, so answers about experts are kept. Where the shape has
    low-precision copies, a ``layer`` from num_moe_layers on means those of layer - num_moe_layers.

    Parameters
    ----------
    shape
        The model, already priced as the trace that runs.
    machine
        The machine.
    engine
        How the work is launched, grouped and read.
    """

    def __init__(self, shape: ModelShape, machine: Machine, engine: Engine) -> None:
        self.shape = shape
        self.machine = machine
        self.engine = engine
        self._kernels = KernelCosts(shape, machine, engine)
        self._host = HostCosts(shape, machine, engine)
        self.is_grouped = engine.kernels == "grouped" and machine.gpu is not None
        self._gpu_ns: dict[tuple[int, int, bool], int] = {}
        self._group_ns: dict[tuple[int, int, int, bool, int], int] = {}
        self._block_tokens = engine.group_block_tokens if self.is_grouped else 1
        self._cpu_work: dict[tuple[int, int], CPUWork] = {}
        self._cpu_ns: dict[tuple[int, int], int] = {}

    # -- loads -------------------------------------------------------------------------------------

    def load_ns(self, layer: int) -> int:
        """Bring one expert of ``layer`` to where it computes, with nothing else under way.

        A copy over the idle link: setup + bytes / rate. On a machine without a link a read from idle
        storage, at the rate of the engine's block and depth; HardwareError where there is none. The
        affine form and a setup of about 10 us fit a measured size curve (kekzl/imp PR 1409).
        """
        self._check_layer(layer)
        return self._load_ns[layer]

    def copy_ns(self, layer: int) -> int:
        """Return the part of :meth:`load_ns` that is bytes: one expert over the link (or from storage)."""
        self._check_layer(layer)
        return self._copy_ns[layer]

    @cached_property
    def _load_ns(self) -> list[int]:
        link = self.machine.link
        setup_ns = self._storage.setup_ns if link is None else link.copy_setup_ns
        return [setup_ns + copy_ns for copy_ns in self._copy_ns]

    @cached_property
    def _copy_ns(self) -> list[int]:
        link, layers = self.machine.link, range(self.shape.num_banks)
        if link is None:
            return [self.read_ns(layer) for layer in layers]
        sizes = [self.shape.expert_bytes(layer) for layer in layers]
        return [transfer_ns(size, link.load_bytes_per_s) for size in sizes]

    def read_ns(self, layer: int) -> int:
        """Read one expert of ``layer`` from busy storage, at the engine's block and depth."""
        engine = self.engine
        rate = self._storage.bytes_per_s(engine.storage_block_bytes, engine.storage_queue_depth)
        return transfer_ns(self.shape.expert_bytes(layer), rate)

    @property
    def _storage(self) -> Storage:
        if self.machine.storage is None:
            raise HardwareError(
                f"machine/{self.machine.name}: storage: missing, must be given where experts are read "
                "from it"
            )
        return self.machine.storage

    # -- experts on the device ---------------------------------------------------------------------

    def expert_gpu_ns(self, layer: int, num_tokens: int, packed: bool) -> int:
        """Compute one expert, on its own, whose weights are in the device's memory.

        launches * launch + max(kernel floor, weight bytes / rate, operations / matmul rate), and the
        bytes that tokens which are not packed cost; 0 for no tokens. ``packed``: the layer's tokens were
        permuted by expert (:meth:`pack_ns`). As measured where the machine has a table
        (``gpu.expert_table``). Without a GPU it is :meth:`expert_cpu_ns`.
        """
        cost = self._gpu_ns.get((layer, num_tokens, packed))
        if cost is None:
            gpu = self.machine.gpu
            if gpu is None:
                cost = self.expert_cpu_ns(layer, num_tokens)
            elif gpu.expert_table is not None and num_tokens:
                self._check_layer(layer)
                table, num_bytes = gpu.expert_table, self.shape.expert_bytes(layer)
                cost = math.ceil(on_grid(table, num_bytes, num_tokens, proportional))
            else:
                rows = self.padded_tokens((num_tokens,))
                cost = self._kernel_set_ns(layer, 1, num_tokens, packed, rows)
            self._gpu_ns[layer, num_tokens, packed] = cost
        return cost

    def experts_gpu_ns(self, layer: int, token_counts: Sequence[int], packed: bool) -> int:
        """Compute experts that start together; ``token_counts`` has the tokens of each.

        Per-expert kernels: one after another. Grouped: one set of kernels for all.
        """
        if not self.is_grouped:
            return sum([self.expert_gpu_ns(layer, count, packed) for count in token_counts])
        used = sum([1 for count in token_counts if count])
        key = (layer, used, sum(token_counts), packed, self.padded_tokens(token_counts))
        cost = self._group_ns.get(key)
        if cost is None:
            cost = self._group_ns[key] = self._kernel_set_ns(*key)
        return cost

    def _kernel_set_ns(
        self, layer: int, num_experts: int, num_tokens: int, packed: bool, num_rows: int
    ) -> int:
        self._check_layer(layer)
        _check(num_tokens=num_tokens)
        return self._kernels.experts_ns(layer, num_experts, num_tokens, packed, num_rows)

    def padded_tokens(self, token_counts: Sequence[int]) -> int:
        """Return how many tokens the kernels compute for experts that have ``token_counts``.

        Grouped kernels pad those of each expert to whole blocks.
        """
        size = self._block_tokens
        return sum(token_counts) if size == 1 else sum([-(-n // size) for n in token_counts]) * size

    def expert_launches(self, packed: bool) -> int:
        """Return how many kernels one set of them is; 0 without a GPU."""
        return self._kernels.expert_launches(packed) if self.machine.gpu else 0

    @property
    def launch_ns(self) -> int:
        """Distance of two kernels as the engine launches them."""
        return self._kernels.launch_ns

    @property
    def dense_launch_ns(self) -> int:
        """What of :meth:`dense_ns` is launching kernels."""
        return self._kernels.dense_launches * self._kernels.launch_ns

    @property
    def step_launch_ns(self) -> int:
        """What of :meth:`step_ns` is launching kernels."""
        return self._kernels.step_launches * self._kernels.launch_ns

    @property
    def pack_launches(self) -> int:
        """Kernels that permute a layer's tokens; 0 without a GPU."""
        return self.engine.pack_launches if self.machine.gpu else 0

    def gather_bytes(self, num_tokens: int, packed: bool) -> int:
        """Return the activation bytes that expert kernels move to gather and scatter; 0 without a GPU."""
        return self._kernels.gather_bytes(num_tokens, packed) if self.machine.gpu else 0

    def pack_bytes(self, num_tokens: int) -> int:
        """Return the activation bytes that permuting a layer's tokens moves."""
        return self._kernels.pack_bytes(num_tokens)

    def pack_ns(self, num_tokens: int) -> int:
        """Permute a layer's tokens by expert and back."""
        _check(num_tokens=num_tokens)
        return self._kernels.pack_ns(num_tokens)

    # -- experts on the CPU ------------------------------------------------------------------------

    @property
    def num_cpu_teams(self) -> int:
        """Experts that the CPU computes at the same time: the engine's wish, at most one a thread."""
        return self._host.num_teams

    def expert_cpu_ns(self, layer: int, num_tokens: int) -> int:
        """Compute one expert by one team of CPU threads, with nothing else on the memory.

        max(setup + weight bytes / rate of the threads, operations / their matmul rate), or as measured
        where the machine has a table; 0 for no tokens. Flat in tokens until operations bind: one pass
        over the weights serves them all. The affine form fits measured expert kernels over
        quantisations (KTransformers, Xeon 6454S: 145 us + bytes / 229 GB/s for six experts).
        :meth:`handover_ns` comes once a layer on top.
        """
        cost = self._cpu_ns.get((layer, num_tokens))
        if cost is None:
            cost = self.cpu_work(layer, num_tokens).alone_ns
            self._cpu_ns[layer, num_tokens] = cost
        return cost

    def cpu_work(self, layer: int, num_tokens: int) -> CPUWork:
        """Return :meth:`expert_cpu_ns` as a reader of a memory that others read too."""
        work = self._cpu_work.get((layer, num_tokens))
        if work is None:
            self._check_layer(layer)
            _check(num_tokens=num_tokens)
            work = self._host.expert_work(layer, num_tokens)
            self._cpu_work[layer, num_tokens] = work
        return work

    def handover_ns(self, num_tokens: int) -> int:
        """Hand a layer's activations to the CPU and back: fixed, for their bytes are few.

        With the setup of the layer's experts, where the engine sets them up together.
        """
        _check(num_tokens=num_tokens)
        return self._handover_ns

    @cached_property
    def _handover_ns(self) -> int:
        own_ns = round(self.machine.cpu.handover_ns * self.engine.handover_ratio)
        return own_ns + layer_setup_ns(self.machine, self.engine)

    def activation_bytes(self, num_tokens: int) -> int:
        """Return the bytes of the hidden states of ``num_tokens`` tokens, one way."""
        _check(num_tokens=num_tokens)
        return num_tokens * self.shape.hidden_size * ACTIVATION_BYTES

    # -- all the rest ------------------------------------------------------------------------------

    def dense_ns(self, num_tokens: int, kv_tokens: int, attention_pairs: int) -> int:
        """Run attention, router and shared experts of one MoE layer.

        Matrices: launches * launch + max(kernel floor, weight bytes / rate, operations / rate), a model
        assumption; attention: floor + max(KV bytes / rate, operations / rate) on top; a CPU that
        computes everything adds its dispatch. ``kv_tokens`` are the KV entries read, summed over
        sequences, the new tokens' own included; ``attention_pairs`` the pairs of new token and KV entry,
        q * k - q * (q - 1) / 2 for q new tokens and k entries, summed over sequences.
        """
        _check(num_tokens=num_tokens, kv_tokens=kv_tokens, attention_pairs=attention_pairs)
        return self._kernels.dense_ns(num_tokens, kv_tokens, attention_pairs)

    def step_ns(
        self, num_tokens: int, num_outputs: int, kv_tokens: int, attention_pairs: int
    ) -> int:
        """Run what a step costs beside its MoE layers: embedding, dense-only layers, LM head.

        The machine's fixed cost of a step, plus each part as in :meth:`dense_ns`; the head computes
        ``num_outputs`` tokens, and is not read for none (a chunk of a prompt that is not its last).
        """
        _check(num_tokens=num_tokens, num_outputs=num_outputs)
        _check(kv_tokens=kv_tokens, attention_pairs=attention_pairs)
        return self._kernels.step_ns(num_tokens, num_outputs, kv_tokens, attention_pairs)

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.shape.num_banks:
            raise ValueError(f"layer = {layer}: must be in [0, {self.shape.num_banks})")


def _check(**counts: int) -> None:
    """Raise ValueError for a negative count."""
    for name, value in counts.items():
        if value < 0:
            raise ValueError(f"{name} = {value}: must be >= 0")
