"""From a composed configuration to an executor: what is real of a scenario, and what cannot be."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hwmodels.model_shape import ModelShape
from hwmodels.units import weight_bytes
from real.carriers import RAMCarrier, StorageCarrier, ThrottledCarrier
from real.copies import Carrier, CopyEngine
from real.device import Device
from real.executor import Executor, Parts
from real.experts import ExpertFormat
from real.insitu import InSitu
from real.kernels import Activation, Kernels
from real.slots import Arena
from real.store import RAMStore, Store
from real.store_file import FileStore
from real.tokens import Combine
from sim.build import Scenario, build
from sim.metrics import RunTables
from sim.settings import did_you_mean
from sim.types import ConfigError
from traces.schema import Trace

TIERS = ("ram", "storage", "link")
"""Where experts wait: host memory, a file, or host memory behind a link that is emulated."""
_DTYPES = {32: "float32", 16: "bfloat16", 8: "int8"}


@dataclass(frozen=True, slots=True)
class Tier:
    """Where experts wait; ``link_bytes_per_s`` and ``link_setup_ns`` are those of an emulated link."""

    kind: str
    link_bytes_per_s: int = 1_000_000_000
    link_setup_ns: int = 0

    def __post_init__(self) -> None:
        if self.kind not in TIERS:
            hint = did_you_mean(self.kind, TIERS)
            raise ConfigError(f"real.tier = {self.kind}: must be one of {', '.join(TIERS)}{hint}")

    def carrier(self, store: Store, device: Device, engine: Any) -> Carrier:
        """Return what carries experts from this tier."""
        if self.kind == "storage":
            assert isinstance(store, FileStore)
            block, depth = engine.storage_block_bytes, engine.storage_queue_depth
            return StorageCarrier(store, device, block, depth)
        assert isinstance(store, RAMStore)
        inner = RAMCarrier(store, device, engine.chunks)
        if self.kind == "ram":
            return inner
        return ThrottledCarrier(inner, self.link_bytes_per_s, self.link_setup_ns)


def format_of_model(model: Mapping[str, Any], dtype: str | None = None) -> ExpertFormat:
    """Return how an expert of a model's file lies in a slot; ``dtype`` None: by its expert_bits."""
    shape = ModelShape.from_mapping(model, f"model/{model.get('name')}")
    if dtype is None:
        dtype = _DTYPES.get(round(shape.expert_bits))
    if dtype is None:
        raise ConfigError(
            f"model.expert_bits = {shape.expert_bits}: the real backend has float32 (32), bfloat16 (16) "
            "and int8 (8); choose one by real.dtype"
        )
    has_gate = shape.expert_matrices == 3
    sizes = shape.hidden_size, shape.expert_intermediate_size
    return ExpertFormat(*sizes, dtype, has_gate)


def priced(config: Mapping[str, Any], form: ExpertFormat) -> dict[str, Any]:
    """Return a configuration whose experts have the bytes of a slot, so that budgets mean real memory.

    A small expert fills little of its pages, and one with biases has more than its matrices: where that
    comes to more than the 32 bits a weight that a model's file may have, it is priced as one of a larger
    intermediate size.
    """
    made = copy.deepcopy(dict(config))
    model, low = made["model"], made["policy"].get("low")
    column_weights = model["expert_matrices"] * form.hidden_size
    size = max(form.intermediate_size, math.ceil(form.slot_bytes / 4 / column_weights))
    model |= {
        "expert_intermediate_size": size,
        "expert_bits": _bits(form.slot_bytes, size * column_weights),
        "expert_bits_by_layer": None,
    }
    if low is not None:
        if low["bits"] != 8:
            raise ConfigError(
                f"policy.low.bits = {low['bits']}: the real backend has int8 for low-precision copies; "
                "must be 8"
            )
        low["bits"] = _bits(low_format(form).slot_bytes, size * column_weights)
    return made


def _bits(num_bytes: int, num_weights: int) -> float:
    """Return bits a weight that come to a number of bytes, rounded as the simulator rounds."""
    bits = num_bytes * 8 / num_weights
    while weight_bytes(num_weights, bits) > num_bytes:
        bits = math.nextafter(bits, 0)
    return bits


def low_format(form: ExpertFormat) -> ExpertFormat:
    """Return the format of low-precision copies of experts: int8, for the same activations."""
    activation = form.activation_dtype or form.dtype
    return ExpertFormat(
        *(form.hidden_size, form.intermediate_size, "int8", form.has_gate),
        *(form.has_bias, form.is_transposed, activation),
    )


def machine_for(mapping: Mapping[str, Any], tier: Tier) -> dict[str, Any]:
    """Return a machine as a tier makes it: with storage there is no link, and one memory."""
    machine = dict(mapping)
    if tier.kind != "storage":
        return machine
    machine["link"] = None
    if machine.get("gpu") is not None:
        machine["gpu"] = {**machine["gpu"], "memory_bytes": machine["cpu"]["memory_bytes"]}
    return machine


def real_scenario(config: Mapping[str, Any], trace: Trace | None = None) -> Scenario:
    """Build a scenario that can be run for real; ConfigError for what cannot."""
    scenario = build(config, trace=trace)
    engine = scenario.costs.engine
    wrong = {
        "cache.host_bytes": scenario.offloader.host is not None,
        "cache.joint_bytes": scenario.budget.joint is not None,
        "machine.gpu.count": scenario.budget.pools.num_gpus > 1,
        "engine.chunk_compute": engine.chunk_compute,
        "engine.exclusive_host": engine.exclusive_host,
        "engine.speculation": engine.speculation != "beside",
        "engine.releases_memory": engine.releases_memory,
    }
    for name, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigError(f"{name}: the real backend cannot do this; {_RULES[name]}")
    return scenario


_RULES = {
    "cache.host_bytes": "must leave all experts in host memory, or be on storage alone (real.tier)",
    "cache.joint_bytes": "must be null: KV cache has memory of its own",
    "machine.gpu.count": "must be 1",
    "engine.chunk_compute": "must be false",
    "engine.exclusive_host": "must be false",
    "engine.speculation": "must be beside",
    "engine.releases_memory": "must be false",
}


def build_executor(
    scenario: Scenario,
    store: Store,
    device: Device,
    tier: Tier,
    tables: RunTables | None = None,
    *,
    activation: Activation | None = None,
    combine: Combine = "by_slot",
    lockstep: bool = False,
) -> Executor:
    """Return an executor of a scenario over a store; it owns its arena and threads, not the store."""
    engine, formats = scenario.costs.engine, list(dict.fromkeys(store.formats))
    _check_sizes(scenario, store)
    num_experts = store.num_experts
    index = [formats.index(form) for form in store.formats]
    of_key = [index[key // num_experts] for key in range(len(store.keys))]
    computes_in_place = scenario.offloader.policies.placement is not None
    if computes_in_place and not isinstance(store, RAMStore):
        raise ConfigError(
            "policy.placement: experts are computed in place only in host memory; must be left out with "
            "real.tier = storage"
        )
    carrier = tier.carrier(store, device, engine)
    arena = Arena(device, formats, _num_slots(scenario, of_key, len(formats)), of_key)
    kernels = {form: Kernels(form, activation) for form in formats}
    insitu = None
    if computes_in_place:
        assert isinstance(store, RAMStore)
        teams = engine.cpu_experts_at_once
        threads = max(1, min(os.cpu_count() or 1, scenario.machine.cpu.threads_used) // teams)
        insitu = InSitu(store, kernels, device, teams, threads)
    copies = CopyEngine(carrier)
    parts = Parts(store, device, arena, copies, kernels, insitu)
    return Executor(scenario.offloader, parts, engine, tables, combine=combine, lockstep=lockstep)


def _num_slots(scenario: Scenario, format_of_key: list[int], num_formats: int) -> list[int]:
    """Return slots by format: what the pools hold, and the staging slots."""
    residency = scenario.offloader.residency
    counts = [0] * num_formats
    format_of_pool = dict(zip(residency.pool_of_key, format_of_key, strict=True))
    for pool, kind in format_of_pool.items():
        counts[kind] += residency.capacity_bytes[pool] // residency.largest_bytes(pool)
    return [count + scenario.budget.staging_slots for count in counts]


def _check_sizes(scenario: Scenario, store: Store) -> None:
    """Refuse a store whose experts are not those that the scenario prices."""
    shape = scenario.shape
    asked = shape.num_moe_layers, shape.num_experts, shape.low_bits is not None
    found = store.num_layers, store.num_experts, store.num_copies == 2
    if asked != found:
        raise ConfigError(
            f"the store has {found[0]} layers of {found[1]} experts{' with low copies' * found[2]}; must "
            f"be {asked[0]} layers of {asked[1]}{' with low copies' * asked[2]}"
        )
    for bank, form in enumerate(store.formats):
        if shape.expert_bytes(bank) != form.slot_bytes:
            raise ConfigError(
                f"the store's experts take {form.slot_bytes} bytes: must be {shape.expert_bytes(bank)}, "
                "as the model's file prices them"
            )
