"""How memory is divided: weights, KV cache, workspace, staging slots, expert cache, and host memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hwmodels.cost import CostModel
from hwmodels.machine import Machine
from hwmodels.units import GB
from sim.kv import JointBudget
from sim.policies.base import PolicySet
from sim.pools import Pools
from sim.residency import Residency
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
        """Bytes of all experts."""
        return sum(self.pools.all_bytes)

    @property
    def cache_bytes(self) -> int:
        """Capacity of the expert cache, all pools."""
        return sum(self.pool_bytes)

    @property
    def cache_ratio(self) -> float:
        """Share of all experts' bytes that the cache holds."""
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
        homes = pools.layout.home_of_layer or (0,) * len(pools.layer_bytes)
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

    def check_event(self, policies: PolicySet, top_k: int) -> None:
        """Refuse a cache that cannot hold the experts of one token in one layer."""
        for pool, cache in enumerate(policies.caches):
            slots = self.pool_bytes[pool] // self.pools.largest_bytes[pool]
            needed = self.pools.event_slots(top_k)
            if cache.needs_event_room and slots < needed:
                raise ConfigError(
                    f"{self.asked}: gives {slots} slots in pool {pool}; must hold at least "
                    f"top_k = {top_k} experts, those of one event (step, layer)"
                    + (f", {needed} on each GPU" if needed < top_k else "")
                )


def plan_memory(config: Mapping[str, Any], costs: CostModel, workload: Workload) -> Budget:
    """Divide the machine's memory as the configuration asks; raise if it does not fit.

    Limits the workload's admission where KV cache has a budget.
    """
    shape, machine, settings = costs.shape, costs.machine, _whole_sizes(config["cache"])
    pools = Pools.of(costs, workload.num_experts, config["policy"]["scope"] == "global")
    kv_bytes_per_token = shape.kv_bytes_per_token_layer * shape.num_layers
    joint = _joint(settings, pools, workload, kv_bytes_per_token)
    asked, pool_bytes = _capacities(settings, pools, joint)
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


def _joint(
    settings: Mapping[str, Any], pools: Pools, workload: Workload, kv_bytes_per_token: int
) -> JointBudget | None:
    """Return the budget that KV and experts share, if they do, and limit admission by it."""
    total = settings["joint_bytes"]
    if total is None:
        return None
    for other in ("bytes", "kv_bytes"):
        if settings[other] is not None:
            raise ConfigError(
                f"cache.{other} = {settings[other]}: must be null with cache.joint_bytes, which both share"
            )
    slots = max(pools.event_slots(workload.trace.meta.top_k), settings["prefetch_limit"])
    least = tuple(
        min(slots, count) * size
        for count, size in zip(pools.num_keys, pools.largest_bytes, strict=True)
    )
    joint = JointBudget(total, kv_bytes_per_token, pools.all_bytes, least)
    if joint.most_kv_tokens < 1:
        raise ConfigError(
            f"cache.joint_bytes = {total}: must hold {slots} experts in each pool and the KV cache of a "
            f"token, {joint.least_bytes + kv_bytes_per_token} bytes"
        )
    workload.limit_kv(joint.most_kv_tokens)
    return joint


def _capacities(
    settings: Mapping[str, Any], pools: Pools, joint: JointBudget | None
) -> tuple[str, tuple[int, ...]]:
    """Return what was asked for and the capacity of each pool."""
    ratio, total = settings["ratio"], settings["bytes"]
    if joint is not None:
        return f"cache.joint_bytes = {joint.total_bytes}", tuple(joint.pool_bytes(0))
    if total is not None:
        every = sum(pools.all_bytes)
        return f"cache.bytes = {total}", tuple(total * own // every for own in pools.all_bytes)
    asked = f"cache.ratio = {ratio}"
    if pools.is_global:
        return asked, tuple(int(own * ratio) for own in pools.all_bytes)
    whole = zip(pools.num_keys, pools.largest_bytes, strict=True)
    return asked, tuple(int(count * ratio) * size for count, size in whole)


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
    machine, every = costs.machine, sum(pools.all_bytes)
    if machine.kind != "discrete":
        if settings["host_bytes"] is not None:
            raise ConfigError(
                f"cache.host_bytes = {settings['host_bytes']}: must be null on a {machine.kind} machine "
                f"({machine.name}), whose one memory holds the cache itself"
            )
        if cache_bytes < every:
            _check_storage(machine, every, f"the cache holds {cache_bytes / GB:.4g}")
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
    _check_storage(machine, every, why)
    least = pools.least_host_bytes(settings["prefetch_limit"], costs.engine.exclusive_host)
    if asked < least:
        raise ConfigError(
            f"cache.host_bytes = {asked}: must be >= {least}, a layer's experts and those on their way"
        )
    return int(asked)


def _check_storage(machine: Machine, every: int, why: str) -> None:
    storage = machine.storage
    if storage is None:
        raise ConfigError(
            f"machine.storage: missing, must be given where not all experts are in memory: {why} of "
            f"{every / GB:.4g} GB (machine {machine.name})"
        )
    if storage.capacity_bytes < every:
        raise ConfigError(
            f"machine.storage.capacity_bytes = {storage.capacity_bytes} ({storage.name}): must hold all "
            f"experts, {every / GB:.2f} GB"
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
