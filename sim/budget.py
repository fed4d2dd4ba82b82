"""How GPU memory is divided: non-expert weights, KV cache, workspace, staging slots, expert cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hwmodels.machine import Machine
from hwmodels.model_shape import ModelShape
from hwmodels.units import GB
from sim.policies.base import PolicySet
from sim.types import ConfigError
from sim.workload import Workload


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes of GPU memory by use.

    ``asked`` is the setting that sized the cache, for messages; ``pool_of_layer`` tells which pool
    serves a layer.
    """

    asked: str
    layer_bytes: tuple[int, ...]
    pool_of_layer: tuple[int, ...]
    pool_bytes: tuple[int, ...]
    staging_slots: int
    staging_bytes: int
    non_expert_bytes: int
    kv_bytes: int
    workspace_bytes: int
    all_expert_bytes: int

    @property
    def cache_bytes(self) -> int:
        """Capacity of the expert cache, all pools."""
        return sum(self.pool_bytes)

    @property
    def cache_ratio(self) -> float:
        """Share of all experts' bytes that the cache holds."""
        return self.cache_bytes / self.all_expert_bytes

    def total_bytes(self) -> int:
        """All that must fit on the GPU."""
        fixed = self.non_expert_bytes + self.kv_bytes + self.workspace_bytes
        return fixed + self.staging_bytes + self.cache_bytes

    def check_event(self, policies: PolicySet, top_k: int) -> None:
        """Refuse a cache that cannot hold the experts of one token in one layer."""
        for pool, cache in enumerate(policies.caches):
            sizes = [
                s for s, p in zip(self.layer_bytes, self.pool_of_layer, strict=True) if p == pool
            ]
            slots = self.pool_bytes[pool] // max(sizes)
            if cache.needs_event_room and slots < top_k:
                raise ConfigError(
                    f"{self.asked}: gives {slots} slots in pool {pool}; must hold at least "
                    f"top_k = {top_k} experts, those of one event (step, layer)"
                )


def plan_memory(
    config: Mapping[str, Any], shape: ModelShape, machine: Machine, workload: Workload
) -> Budget:
    """Divide the machine's GPU memory as the configuration asks; raise if it does not fit."""
    layers = range(workload.num_layers)
    layer_bytes = tuple(shape.expert_bytes(layer) for layer in layers)
    asked, pool_of_layer, pool_bytes = _pools(config, layer_bytes, workload.num_experts)
    staging = _staging_slots(config, workload)
    budget = Budget(
        asked=asked,
        layer_bytes=layer_bytes,
        pool_of_layer=pool_of_layer,
        pool_bytes=pool_bytes,
        staging_slots=staging,
        staging_bytes=staging * max(layer_bytes),
        non_expert_bytes=shape.non_expert_bytes(workload.num_layers),
        kv_bytes=workload.peak_kv_tokens() * shape.kv_bytes_per_token_layer * shape.num_layers,
        workspace_bytes=machine.gpu.workspace_bytes,
        all_expert_bytes=sum(layer_bytes) * workload.num_experts,
    )
    if budget.total_bytes() > machine.gpu.memory_bytes:
        raise ConfigError(_too_much(budget, machine))
    if budget.all_expert_bytes > machine.cpu.memory_bytes:
        raise ConfigError(
            f"machine.cpu.memory_bytes = {machine.cpu.memory_bytes} ({machine.cpu.name}): must hold all "
            f"experts, {budget.all_expert_bytes / GB:.2f} GB; lower model.expert_bits"
        )
    return budget


def _pools(
    config: Mapping[str, Any], layer_bytes: tuple[int, ...], num_experts: int
) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Return what was asked for, the pool of each layer and the capacity of each pool."""
    ratio, total = config["cache"]["ratio"], config["cache"]["bytes"]
    asked = f"cache.ratio = {ratio}" if total is None else f"cache.bytes = {total}"
    if config["policy"]["scope"] == "global":
        every = sum(layer_bytes) * num_experts
        capacity = int(every * ratio) if total is None else total
        return asked, (0,) * len(layer_bytes), (capacity,)
    if total is None:
        shares = [int(num_experts * ratio) * size for size in layer_bytes]
    else:
        shares = [total * size // sum(layer_bytes) for size in layer_bytes]
    return asked, tuple(range(len(layer_bytes))), tuple(shares)


def _staging_slots(config: Mapping[str, Any], workload: Workload) -> int:
    slots = config["cache"]["staging_slots"]
    if slots is not None:
        return int(slots)
    return min(workload.num_experts, workload.trace.meta.top_k * workload.batch_size + 2)


def _too_much(budget: Budget, machine: Machine) -> str:
    parts = {
        "non-expert weights": budget.non_expert_bytes,
        "KV cache": budget.kv_bytes,
        "workspace": budget.workspace_bytes,
        "staging": budget.staging_bytes,
        "expert cache": budget.cache_bytes,
    }
    listed = " + ".join(f"{name} {size / GB:.2f}" for name, size in parts.items())
    return (
        f"machine.gpu.memory_bytes = {machine.gpu.memory_bytes} ({machine.gpu.name}): must hold "
        f"{budget.total_bytes() / GB:.2f} GB ({listed} GB); lower cache.ratio or workload.batch_size"
    )
