"""Sets of experts that are put on the GPU beforehand, and what runs on the CPU beside them.

The set of the most popular experts is :class:`sim.policies.classic.Static`: one pool for all layers is
KTransformers' *frequency* (the hottest of all layers together) and Fiddler's placement.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from sim.policies.base import PlacementPolicy
from sim.policies.classic import Static
from sim.types import ConfigError, ExpertWork, Service, View

_TENSORS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


class MissOnCPU(PlacementPolicy):
    """Run every missing expert on the CPU, as llama.cpp and KTransformers do beside a static set.

    Parameters
    ----------
    gpu_from_tokens
        Tokens of a step from which misses are loaded instead; 0: never. llama.cpp copies the used experts
        of batches of 32 and more (ggml-org/llama.cpp #15346), Krasis of 300 (brontoguana/krasis),
        KTransformers' ``--kt-gpu-prefill-token-threshold`` is 1024 to 4096.
    keep
        True: what is loaded is offered to the cache. False: it is loaded for this use alone.
    """

    def __init__(self, gpu_from_tokens: int = 0, keep: bool = False) -> None:
        if gpu_from_tokens < 0:
            raise ValueError(f"gpu_from_tokens = {gpu_from_tokens}: must be >= 0")
        self.gpu_from_tokens = gpu_from_tokens
        self._on_gpu = Service.LOAD if keep else Service.BYPASS

    def place(self, work: Sequence[ExpertWork], view: View) -> Sequence[Service]:
        """Return CPU for each missing expert, LOAD or BYPASS where the step has many tokens."""
        many = 0 < self.gpu_from_tokens <= view.step.num_tokens
        return [self._on_gpu if many else Service.CPU] * len(work)


# -- KTransformers' strategies (kvcache-ai/ktransformers, --kt-expert-placement-strategy) -----------------


class Uniform(Static):
    """Hold as many experts of each layer, those with the lowest indices: no popularity is asked.

    With one pool for all layers the first layers hold one more where the slots do not divide evenly.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        layer, expert = np.indices((num_layers, num_experts))
        super().__init__(-(expert * num_layers + layer).astype(np.float64))


class FrontLoading(Static):
    """Fill the first layers whole, then the next ones, as far as one pool for all layers goes."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        keys = np.arange(num_layers * num_experts, dtype=np.float64)
        super().__init__(-keys.reshape(num_layers, num_experts))


class RandomSet(Static):
    """Hold experts that chance picks, whatever they are used for; KTransformers seeds it with 42."""

    def __init__(self, num_layers: int, num_experts: int, rng: np.random.Generator) -> None:
        order = rng.permutation(num_layers * num_experts).astype(np.float64)
        super().__init__(order.reshape(num_layers, num_experts))


# -- llama.cpp's options ---------------------------------------------------------------------------------


class _WholeLayers(Static):
    """Hold all experts of some layers, and none of the others."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        keys = np.arange(num_layers * num_experts, dtype=np.float64)
        super().__init__(keys.reshape(num_layers, num_experts))
        self._num_experts = num_experts
        self._held: Sequence[int] = ()
        self._sizes: dict[
            int, int
        ] = {}  # experts of each layer in this pool, the first layer first

    def start(self, keys: Sequence[int], num_slots: int, view: View) -> None:
        """Learn the pool; ConfigError if what shall be on the GPU does not fit."""
        super().start(keys, num_slots, view)
        for key in keys:
            layer = key // self._num_experts
            self._sizes[layer] = self._sizes.get(layer, 0) + 1
        self._held = self.choose(num_slots)
        needed = sum(self._sizes.get(layer, 0) for layer in self._held)
        if needed > num_slots:
            raise ConfigError(
                f"policy: {self}: leaves {needed} experts for {num_slots} slots of GPU memory; "
                "must leave no more"
            )

    def choose(self, num_slots: int) -> Sequence[int]:
        """Return the layers on the GPU."""
        raise NotImplementedError

    def preload(self, view: View) -> Sequence[int]:
        """Return the experts of the layers held, the last layers first."""
        return [key for key in super().preload(view) if key // self._num_experts in self._held]


class LayersOnCPU(_WholeLayers):
    """llama.cpp's ``--n-cpu-moe N``: experts of the first N layers on the CPU, all others on the GPU.

    The switch was added in ggml-org/llama.cpp #15077; with all layers it is ``--cpu-moe``. Layers are MoE
    layers here; llama.cpp counts the dense ones before them as well. Made for one pool for all layers and
    a placement that runs misses on the CPU.

    Parameters
    ----------
    cpu_layers
        N; -1: the fewest that let the others fit.
    """

    def __init__(self, num_layers: int, num_experts: int, cpu_layers: int = -1) -> None:
        if not -1 <= cpu_layers <= num_layers:
            raise ValueError(f"cpu_layers = {cpu_layers}: must be in [-1, {num_layers}]")
        super().__init__(num_layers, num_experts)
        self._num_layers = num_layers
        self.cpu_layers = cpu_layers

    def __str__(self) -> str:
        return f"cpu_layers = {self.cpu_layers}"

    def choose(self, num_slots: int) -> Sequence[int]:
        """Return the layers after the first N."""
        if self.cpu_layers >= 0:
            return range(self.cpu_layers, self._num_layers)
        first = self._num_layers
        while first > 0 and self._sizes.get(first - 1, 0) <= num_slots:
            first -= 1
            num_slots -= self._sizes.get(first, 0)
        return range(first, self._num_layers)


class TensorOverride(_WholeLayers):
    """llama.cpp's ``-ot REGEX=CPU``: experts of the layers that a regular expression finds on the CPU.

    Searched in the names of the tensors that hold a layer's experts, ``blk.LAYER.ffn_gate_exps.weight``
    and the same with ``up`` and ``down`` (ggml-org/llama.cpp #11397). An expert is one unit here, so that
    the expression must find all three of a layer, or none. Made for one pool for all layers and a
    placement that runs misses on the CPU.

    Parameters
    ----------
    regex
        What stands before ``=CPU``, in Python's syntax.
    first_layer
        LAYER of the first MoE layer: the number of dense layers before it.
    """

    def __init__(self, num_layers: int, num_experts: int, regex: str, first_layer: int = 0) -> None:
        if first_layer < 0:
            raise ValueError(f"first_layer = {first_layer}: must be >= 0")
        super().__init__(num_layers, num_experts)
        self.regex = regex
        self._layers = [
            layer for layer in range(num_layers) if not _is_found(regex, layer + first_layer)
        ]

    def __str__(self) -> str:
        return f"regex = {self.regex}"

    def choose(self, num_slots: int) -> Sequence[int]:
        """Return the layers that the expression does not find."""
        return self._layers


def _is_found(regex: str, block: int) -> bool:
    """Tell whether an expression finds the tensors of a block's experts; ValueError if only some."""
    try:
        pattern = re.compile(regex)
    except re.error as error:
        raise ValueError(f"regex = {regex}: not a regular expression ({error})") from None
    names = [f"blk.{block}.{tensor}.weight" for tensor in _TENSORS]
    found = [name for name in names if pattern.search(name)]
    if found and len(found) < len(names):
        other = next(name for name in names if name not in found)
        raise ValueError(
            f"regex = {regex}: finds {found[0]} but not {other}: must find all tensors of a layer's experts "
            "or none, for an expert is computed in one place"
        )
    return bool(found)
