"""How the bytes of the expert cache are divided among its pools, and what KV cache may take of them."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

from sim.kv import JointBudget
from sim.policies.base import SizingPolicy
from sim.pools import Pools
from sim.types import ConfigError
from sim.workload import Workload


def joint_budget(
    config: Mapping[str, Any],
    settings: Mapping[str, Any],
    pools: Pools,
    workload: Workload,
    kv_bytes_per_token: int,
) -> JointBudget | None:
    """Return the budget that KV and experts share, if they do, and limit admission by it.

    ``settings`` is the group ``cache`` of ``config`` with whole sizes.
    """
    total = settings["joint_bytes"]
    if total is None:
        return None
    for other in ("bytes", "kv_bytes"):
        if settings[other] is not None:
            raise ConfigError(
                f"cache.{other} = {settings[other]}: must be null with cache.joint_bytes, which both share"
            )
    for other in ("low", "sizing"):
        if config["policy"].get(other) is not None:
            raise ConfigError(
                f"policy.{other}: must be left out with cache.joint_bytes, which a growing KV cache takes "
                "from all pools alike"
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


def capacities(
    config: Mapping[str, Any],
    settings: Mapping[str, Any],
    pools: Pools,
    joint: JointBudget | None,
    sizing: SizingPolicy | None,
) -> tuple[str, tuple[int, ...]]:
    """Return what was asked for and the capacity of each pool; see :func:`joint_budget`."""
    low = config["policy"].get("low")
    if joint is not None:
        return f"cache.joint_bytes = {joint.total_bytes}", tuple(joint.pool_bytes(0))
    asked, found = _by_size(settings, pools)
    if low is not None:
        share = low["share"]
        return f"{asked}, policy.low.share = {share}", _with_low_copies(pools, found, share)
    if sizing is not None:
        return f"{asked}, policy.sizing", _sized(pools, found, sizing)
    return asked, found


def _by_size(settings: Mapping[str, Any], pools: Pools) -> tuple[str, tuple[int, ...]]:
    """Divide the cache by the sizes of full-precision copies; pools of low ones get nothing yet."""
    ratio, total = settings["ratio"], settings["bytes"]
    own = [
        0 if is_low else size for size, is_low in zip(pools.all_bytes, pools.is_low, strict=True)
    ]
    if total is not None:
        return f"cache.bytes = {total}", tuple(total * size // sum(own) for size in own)
    asked = f"cache.ratio = {ratio}"
    if pools.scope != "layer":
        return asked, tuple(int(size * ratio) for size in own)
    whole = zip(pools.num_keys, pools.largest_bytes, pools.is_low, strict=True)
    return asked, tuple(0 if is_low else int(count * ratio) * size for count, size, is_low in whole)


def _with_low_copies(pools: Pools, found: tuple[int, ...], share: float) -> tuple[int, ...]:
    """Give low-precision copies ``share`` of all bytes, at most what they come to, and others the rest.

    The rest is whole slots; what that leaves goes to the low copies too, so that no slot is lost.
    """
    total = sum(found)
    most = pools.stored_bytes - pools.all_expert_bytes
    rest = total - min(int(total * share), most)
    slots = zip(found, pools.largest_bytes, strict=True)
    high = [size * rest // total // slot * slot if total else 0 for size, slot in slots]
    left = min(total - sum(high), most)
    every = zip(high, pools.all_bytes, pools.is_low, strict=True)
    return tuple(left * own // most if is_low else size for size, own, is_low in every)


def _sized(pools: Pools, found: tuple[int, ...], sizing: SizingPolicy) -> tuple[int, ...]:
    """Let a policy share the same bytes out among the layers, in slots of the largest expert."""
    sizes = pools.largest_bytes
    num_slots = sum(found) // max(sizes)
    where = f"policy: {type(sizing).__name__}.slots"
    try:
        slots = list(sizing.slots(num_slots))
    except Exception as error:  # a user's policy may fail in any way
        raise ConfigError(f"{where}: {type(error).__name__}: {error}") from error
    if len(slots) != len(found):
        raise ConfigError(f"{where}: {len(slots)} numbers: must be {len(found)}, one a layer")
    for layer, (count, most) in enumerate(zip(slots, pools.num_keys, strict=True)):
        if not isinstance(count, Integral) or not 0 <= count <= most:
            raise ConfigError(
                f"{where}: {count} for layer {layer}: must be a whole number in [0, {most}], the experts "
                "of a layer"
            )
    if sum(slots) > num_slots:
        raise ConfigError(f"{where}: {sum(slots)} slots: must be at most {num_slots} in all")
    return tuple(int(count) * size for count, size in zip(slots, sizes, strict=True))


def check_pools(config: Mapping[str, Any], pools: Pools) -> None:
    """Refuse settings of the policy that its pools cannot have."""
    policy = config["policy"]
    if policy.get("group_layers") is not None and policy["scope"] != "group":
        raise ConfigError(
            f"policy.group_layers = {policy['group_layers']}: must be null with policy.scope = "
            f"{policy['scope']}; it is for policy.scope = group"
        )
    if policy.get("sizing") is None:
        return
    if policy["scope"] != "layer":
        raise ConfigError(
            f"policy.sizing: must be left out with policy.scope = {policy['scope']}: it gives each layer a "
            "pool of its own size"
        )
    if policy.get("low") is not None:
        raise ConfigError("policy.sizing: must be left out with policy.low, which sizes the pools")
    if len(pools.num_keys) != len(pools.layer_bytes):
        raise ConfigError(
            "policy.sizing: must be left out where engine.split = expert deals a layer out to several GPUs"
        )
