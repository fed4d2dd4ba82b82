"""How memory is divided: weights, KV cache, workspace, staging slots, expert cache, and host memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hwmodels.cost import CostModel
from hwmodels.machine import Machine
from hwmodels.units import GB
from sim.capacity import capacities, check_pools, joint_budget
from sim.kv import JointBudget
from sim.policies.base import SizingPolicy
from sim.pools import Pools
from sim.residency import Residency
from sim.settings import prefetch_limit
from sim.types import ConfigError, KeySpace
from sim.workload import Workload

_HOST_SHARE = 0.9
"""What experts may take of host memory unless told otherwise; the rest is the system's."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes by use; those of a machine with several GPUs are sums.

    ``asked`` is the setting that sized the cache, for messages. ``host_bytes`` is None where host memory
    holds all experts. With ``joint`` KV cache takes what it needs from the pools.
    """

    asked: str
    pools: Pools
    pool_bytes: tuple[int, ...]
    staging_slots: int
    staging_bytes: int
    non_expert_bytes: int
    kv_bytes: int
    workspace_bytes: int
    host_bytes: int | None
    joint: JointBudget | None

    @property
    def all_expert_bytes(self) -> int:
        """Bytes of all experts, in full precision."""
        return self.pools.all_expert_bytes

    @property
    def cache_bytes(self) -> int:
        """Capacity of the expert cache, all pools."""
        return sum(self.pool_bytes)

    @property
    def cache_ratio(self) -> float:
        """Capacity of the cache over the bytes of all experts, in full precision."""
        return self.cache_bytes / self.all_expert_bytes

    def residency(self, keys: KeySpace) -> Residency:
        """Return the expert cache, empty."""
        pools = self.pools
        return Residency(
            keys, pools.layer_bytes, pools.pool_of_layer, self.pool_bytes, pools.pool_of_key
        )

    def host_residency(self, keys: KeySpace) -> Residency | None:
        """Return host memory above storage, empty; None if it holds everything."""
        if self.host_bytes is None:
            return None
        sizes = self.pools.layer_bytes
        return Residency(keys, sizes, [0] * len(sizes), [self.host_bytes])

    def total_bytes(self) -> int:
        """All that must fit on the GPUs."""
        fixed = self.non_expert_bytes + self.kv_bytes + self.workspace_bytes
        return fixed + self.staging_bytes + self.cache_bytes

    def gpu_bytes(self) -> list[int]:
        """Return what must fit on each GPU.

        Attention, its weights and its KV cache are where layers have their home, by layers.
        """
        pools = self.pools
        homes = pools.layout.home_of_layer or (0,)
        shared = self.workspace_bytes + self.staging_bytes
        found = []
        for gpu in range(pools.num_gpus):
            dense = (self.non_expert_bytes + self.kv_bytes) * homes.count(gpu) // len(homes)
            cache = sum(
                size
                for size, its in zip(self.pool_bytes, pools.gpu_of_pool, strict=True)
                if its == gpu
            )
            found.append(dense + shared // pools.num_gpus + cache)
        return found

    def crowded(self, top_k: int) -> str:
        """Say so if a pool cannot hold the experts of one token in one layer, in either precision; else "".

        An event's experts that find no room then run from staging slots.
        """
        pools = self.pools
        sizes = zip(self.pool_bytes, pools.largest_bytes, strict=True)
        slots_of = [capacity // size for capacity, size in sizes]
        high = [pool for pool in range(len(slots_of)) if not pools.is_low[pool]]
        least = min(
            slots_of[pool] + sum(slots_of[low] for low in pools.low_pools_of(pool)) for pool in high
        )
        needed = pools.event_slots(top_k)
        if least >= needed:
            return ""
        gpus = " on each GPU" if needed < top_k else ""
        return (
            f"{self.asked}: a pool holds {least} experts{_and_low(pools)}, fewer than the {needed} that a "
            f"token uses in a layer{gpus}: the others run from staging slots"
        )


def plan_memory(
    config: Mapping[str, Any],
    costs: CostModel,
    workload: Workload,
    sizing: SizingPolicy | None = None,
) -> Budget:
    """Divide the machine's memory as the configuration asks; raise if it does not fit.

    ``sizing`` shares the cache out among the layers. Limits the workload's admission where KV cache has a
    budget.
    """
    shape, machine, settings = costs.shape, costs.machine, _whole_sizes(config["cache"])
    policy = config["policy"]
    settings["prefetch_limit"] = prefetch_limit(config)
    pools = Pools.of(costs, workload.num_experts, policy["scope"], policy.get("group_layers"))
    check_pools(config, pools)
    kv_bytes_per_token = shape.kv_bytes_per_token_layer * shape.num_layers
    joint = joint_budget(config, settings, pools, workload, kv_bytes_per_token)
    asked, pool_bytes = capacities(config, settings, pools, joint, sizing)
    staging = _staging_slots(settings, workload)
    budget = Budget(
        asked=asked,
        pools=pools,
        pool_bytes=pool_bytes,
        staging_slots=staging,
        staging_bytes=staging * max(pools.layer_bytes) * pools.num_gpus,
        non_expert_bytes=shape.non_expert_bytes(workload.num_layers),
        kv_bytes=0 if joint else _kv_bytes(settings, workload, kv_bytes_per_token),
        workspace_bytes=machine.device.workspace_bytes * pools.num_gpus,
        host_bytes=_host_bytes(settings, costs, pools, sum(pool_bytes)),
        joint=joint,
    )
    _check_fits(budget, machine)
    return budget


def _whole_sizes(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with sizes as ints: 4e9 is written as a float."""
    sizes = ("bytes", "joint_bytes", "kv_bytes", "host_bytes")
    whole = {name: int(settings[name]) for name in sizes if settings[name] is not None}
    return {**settings, **whole}


def _kv_bytes(settings: Mapping[str, Any], workload: Workload, kv_bytes_per_token: int) -> int:
    """Return what is set aside for KV; a size that was asked for limits admission."""
    if settings["kv_bytes"] is not None:
        if settings["kv_bytes"] < kv_bytes_per_token:
            raise ConfigError(
                f"cache.kv_bytes = {settings['kv_bytes']}: must hold at least one token, "
                f"{kv_bytes_per_token} bytes"
            )
        workload.limit_kv(settings["kv_bytes"] // kv_bytes_per_token)
        return int(settings["kv_bytes"])
    return workload.peak_kv_tokens() * kv_bytes_per_token


def _host_bytes(
    settings: Mapping[str, Any], costs: CostModel, pools: Pools, cache_bytes: int
) -> int | None:
    """Return what experts may take of host memory; None if it holds all of them, or is the cache itself."""
    machine, every = costs.machine, pools.stored_bytes
    if machine.kind != "discrete":
        if settings["host_bytes"] is not None:
            raise ConfigError(
                f"cache.host_bytes = {settings['host_bytes']}: must be null on a {machine.kind} machine "
                f"({machine.name}), whose one memory holds the cache itself"
            )
        if cache_bytes < every:
            _check_storage(machine, pools, f"the cache holds {cache_bytes / GB:.4g}")
        return None
    asked, share = settings["host_bytes"], int(_HOST_SHARE * machine.cpu.memory_bytes)
    if asked is None:
        if every <= machine.cpu.memory_bytes:
            return None
        asked = share
        why = f"machine.cpu.memory_bytes holds {machine.cpu.memory_bytes / GB:.4g}"
    elif asked > machine.cpu.memory_bytes:
        raise ConfigError(
            f"cache.host_bytes = {asked}: must be <= machine.cpu.memory_bytes = "
            f"{machine.cpu.memory_bytes} ({machine.cpu.name})"
        )
    else:
        why = f"cache.host_bytes holds {asked / GB:.4g}"
    if asked >= every:
        return None
    _check_storage(machine, pools, why)
    least = pools.least_host_bytes(settings["prefetch_limit"], costs.engine.exclusive_host)
    if asked < least:
        raise ConfigError(
            f"cache.host_bytes = {asked}: must be >= {least}, a layer's experts{_both(pools)} and those on "
            "their way"
        )
    return int(asked)


def _and_low(pools: Pools) -> str:
    return " and that of its low-precision copies" if pools.num_copies > 1 else ""


def _both(pools: Pools) -> str:
    """Return what to say of experts that host memory and storage hold twice."""
    return " in both precisions (policy.low)" if pools.num_copies > 1 else ""


def _check_storage(machine: Machine, pools: Pools, why: str) -> None:
    storage, every, both = machine.storage, pools.stored_bytes, _both(pools)
    if storage is None:
        raise ConfigError(
            f"machine.storage: missing, must be given where not all experts are in memory: {why} of "
            f"{every / GB:.4g} GB{both} (machine {machine.name})"
        )
    if storage.capacity_bytes < every:
        raise ConfigError(
            f"machine.storage.capacity_bytes = {storage.capacity_bytes} ({storage.name}): must hold all "
            f"experts{both}, {every / GB:.2f} GB"
        )


def _staging_slots(settings: Mapping[str, Any], workload: Workload) -> int:
    slots = settings["staging_slots"]
    if slots is not None:
        return int(slots)
    return min(workload.num_experts, workload.trace.meta.top_k * workload.batch_size + 2)


def _check_fits(budget: Budget, machine: Machine) -> None:
    """Refuse what does not fit on one of the GPUs, or in the one memory there is."""
    device, needed = machine.device, budget.gpu_bytes()
    if max(needed) <= device.memory_bytes:
        return
    parts = {
        "non-expert weights": budget.non_expert_bytes,
        "KV cache": budget.kv_bytes,
        "workspace": budget.workspace_bytes,
        "staging": budget.staging_bytes,
        "experts and KV cache" if budget.joint else "expert cache": budget.cache_bytes,
    }
    listed = " + ".join(f"{name} {size / GB:.4g}" for name, size in parts.items())
    several = f" on one of {len(needed)} GPUs, in all" if len(needed) > 1 else ""
    where = "machine.gpu" if machine.gpu is not None else "machine.cpu"
    raise ConfigError(
        f"{where}.memory_bytes = {device.memory_bytes} ({device.name}): must hold "
        f"{max(needed) / GB:.4g} GB{several} ({listed} GB); lower {budget.asked.partition(' = ')[0]}"
        f"{'' if budget.joint else ', cache.kv_bytes'} or workload.batch_size"
    )
