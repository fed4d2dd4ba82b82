"""The kinds of work that are measured by themselves, and what the cost model says each takes.

Every prediction is the cost model's own (:mod:`hwmodels.cost` and what it is made of), asked for a model that
consists of just that work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from hwmodels.cost import CostModel
from hwmodels.engine import Engine
from hwmodels.errors import HardwareError, figure_error
from hwmodels.kernel_cost import KernelCosts
from hwmodels.machine import Machine
from hwmodels.model_shape import ModelShape
from hwmodels.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of row: its arguments with their defaults (None: must be given), and how it is predicted.

    ``part`` is that of the machine whose figures it depends on, and no other; ``work`` says how many bytes
    or operations a rate counts.
    """

    part: str
    arguments: Mapping[str, Any]
    predict: Callable[[Mapping[str, Any], Machine, Engine], float]
    work: Callable[[Mapping[str, Any]], float] | None = None


def _copy(a: Mapping[str, Any], machine: Machine, engine: Engine) -> float:
    """Predict a copy over the idle link, or one of many that are queued back to back."""
    link = _part(machine, "link")
    rate = link.h2d_bytes_per_s if a["direction"] == "h2d" else link.d2h_bytes_per_s
    machine = replace(machine, link=replace(link, h2d_bytes_per_s=rate, pinned=a["pinned"]))
    costs = _costs(_expert(a["num_bytes"], 8), machine, engine)
    return link.copy_gap_ns + costs.copy_ns(0) if a["queued"] else costs.load_ns(0)


def _copy_issue(a: Mapping[str, Any], machine: Machine, engine: Engine) -> float:
    return float(a["count"] * _part(machine, "link").copy_issue_ns)


def _expert_cpu(a: Mapping[str, Any], machine: Machine, engine: Engine) -> float:
    """Predict experts one after another, each by all of so many threads."""
    cpu, threads = machine.cpu, a["threads"]
    rates = cpu.rate_by_bits  # those of the threads in use
    if rates is not None:
        share = threads / cpu.threads_used
        rates = tuple((bits, max(1, int(rate * share))) for bits, rate in rates)
    machine = replace(machine, cpu=replace(cpu, threads_used=threads, rate_by_bits=rates))
    costs = _costs(_expert(a["num_bytes"], a["bits"]), machine, engine)
    return float(a["num_experts"] * costs.expert_cpu_ns(0, a["num_tokens"]))


def _expert_gpu(a: Mapping[str, Any], machine: Machine, engine: Engine) -> float:
    """Predict one expert on the device; its activations count as launches, for their bytes are few."""
    _part(machine, "gpu")
    engine = replace(_plain(engine), expert_launches_packed=engine.expert_launches)
    costs = CostModel(_expert(a["num_bytes"], a["bits"]), machine, engine)
    return float(costs.expert_gpu_ns(0, a["num_tokens"], packed=True))


def _handover(a: Mapping[str, Any], machine: Machine, engine: Engine) -> float:
    return float(_costs(_expert(1, 8), machine, engine).handover_ns(a["num_tokens"]))


def _gemv(a: Mapping[str, Any], machine: Machine, engine: Engine) -> float:
    """Predict one matrix-vector kernel over weights of so many bytes."""
    return _matmul(_expert(a["num_bytes"], a["bits"]), 1, machine, engine)


def _gemm(a: Mapping[str, Any], machine: Machine, engine: Engine) -> float:
    num_bytes = math.ceil(a["n"] * a["k"] * a["bits"] / 8)
    return _matmul(_expert(num_bytes, a["bits"]), a["m"], machine, engine)


def _matmul(shape: ModelShape, num_tokens: int, machine: Machine, engine: Engine) -> float:
    _part(machine, "gpu")
    return float(_costs(shape, machine, engine).expert_gpu_ns(0, num_tokens, packed=True))


def _launch(a: Mapping[str, Any], machine: Machine, engine: Engine) -> float:
    """Predict a row of kernels that do nothing: their distance."""
    _part(machine, "gpu")
    engine = replace(_plain(engine), graph=a["mode"] == "graph")
    return float(a["count"] * KernelCosts(_expert(1, 8), machine, engine).launch_ns)


def _launch_issue(a: Mapping[str, Any], machine: Machine, engine: Engine) -> float:
    return float(a["count"] * machine.cpu.launch_issue_ns)


def _attention(a: Mapping[str, Any], machine: Machine, engine: Engine) -> float:
    """Predict decode attention of one layer, each sequence with one new token."""
    gpu, batch = _part(machine, "gpu"), a["batch_size"]
    heads = {"num_attention_heads": a["num_heads"], "num_kv_heads": a["num_kv_heads"]}
    if a["num_heads"] % a["num_kv_heads"]:
        rule = f"must divide num_heads = {a['num_heads']}"
        raise figure_error("attention", "num_kv_heads", a["num_kv_heads"], rule)
    shape = replace(_expert(1, 8), head_dim=a["head_dim"], kv_bits=a["kv_bits"], **heads)
    costs, entries = _costs(shape, machine, engine), batch * a["kv_tokens"]
    rest_ns = costs.dense_ns(batch, 0, 0) - gpu.attention_floor_ns  # the projections around it
    return float(costs.dense_ns(batch, entries, entries) - rest_ns)


def _storage(a: Mapping[str, Any], machine: Machine, engine: Engine) -> float:
    rate = _part(machine, "storage").bytes_per_s(a["block_bytes"], a["queue_depth"])
    return float(a["block_bytes"] * NS_PER_S / rate)


def _storage_read(a: Mapping[str, Any], machine: Machine, engine: Engine) -> float:
    """Predict the read of a whole expert, block by block."""
    _part(machine, "storage")
    blocks = {"storage_block_bytes": a["block_bytes"], "storage_queue_depth": a["queue_depth"]}
    costs = CostModel(
        _expert(a["num_bytes"], 8), replace(machine, link=None), replace(engine, **blocks)
    )
    return float(costs.load_ns(0))


def _bytes(name: str) -> Callable[[Mapping[str, Any]], float]:
    return lambda arguments: float(arguments[name])


ALONE = "nothing"
BESIDE = (ALONE, "kernels", "copies", "reads", "cpu_experts")
"""What else goes on while a row is measured. The cost model knows no such slowdown, so that it predicts
each row as if it were alone; what shares what is the timeline's business."""
_BESIDE = {"beside": ALONE}
_READ = {"block_bytes": None, "queue_depth": None}
KINDS: dict[str, Kind] = {
    "copy": Kind(
        "link",
        {"num_bytes": None, "direction": "h2d", "pinned": True, "queued": False, **_BESIDE},
        _copy,
        _bytes("num_bytes"),
    ),
    "copy_issue": Kind("link", {"count": 1}, _copy_issue),
    "expert_cpu": Kind(
        "cpu",
        {
            "num_bytes": None,
            "bits": None,
            "num_tokens": 1,
            "threads": None,
            "num_experts": 1,
            **_BESIDE,
        },
        _expert_cpu,
        lambda a: float(a["num_bytes"] * a["num_experts"]),
    ),
    "expert_gpu": Kind(
        "gpu",
        {"num_bytes": None, "bits": None, "num_tokens": 1, **_BESIDE},
        _expert_gpu,
        _bytes("num_bytes"),
    ),
    "handover": Kind("cpu", {"num_tokens": 1}, _handover),
    "gemv": Kind("gpu", {"num_bytes": None, "bits": 16}, _gemv, _bytes("num_bytes")),
    "gemm": Kind(
        "gpu",
        {"m": None, "n": None, "k": None, "bits": 16},
        _gemm,
        lambda a: 2.0 * a["m"] * a["n"] * a["k"],
    ),
    "launch": Kind("gpu", {"mode": None, "count": 1}, _launch),
    "launch_issue": Kind("cpu", {"count": 1}, _launch_issue),
    "attention": Kind(
        "gpu",
        {
            "kv_tokens": None,
            "num_heads": None,
            "num_kv_heads": None,
            "head_dim": None,
            "kv_bits": 16,
            "batch_size": 1,
        },
        _attention,
    ),
    "storage": Kind("storage", _READ, _storage, _bytes("block_bytes")),
    "storage_read": Kind(
        "storage", {"num_bytes": None, **_READ, **_BESIDE}, _storage_read, _bytes("num_bytes")
    ),
}
"""The kinds of rows: what each is measured with."""


def _costs(shape: ModelShape, machine: Machine, engine: Engine) -> CostModel:
    return CostModel(shape, machine, _plain(engine))


def _part(machine: Machine, name: str) -> Any:
    part = getattr(machine, name)
    if part is None:
        rule = "missing, must be given where rows measure it"
        raise HardwareError(f"machine/{machine.name}: {name}: {rule}")
    return part


@cache
def _plain(engine: Engine) -> Engine:
    """Return an engine that launches one kernel for a matrix, and does nothing that a row is not about."""
    ratios = {
        f.name: None if str(f.type).endswith("| None") else 1.0
        for f in fields(Engine)
        if f.name.endswith("_ratio")
    }
    changes: dict[str, Any] = {
        **ratios,
        "kernels": "per_expert",
        "graph": False,
        "expert_launches_packed": 1,
        "cpu_experts_at_once": 1,
        "group_block_tokens": 1,
        "tensor_parallel": False,
        "launch_issue_ratio": 0.0,
        "launch_waits": False,
        "cpu_setups": "expert",
    }
    return replace(engine, **changes)


def _expert(num_bytes: int, bits: float) -> ModelShape:
    """Return a model of one layer with one expert of so many bytes."""
    return ModelShape(
        name="row",
        source="a measured row",
        num_layers=1,
        num_moe_layers=1,
        num_experts=1,
        top_k=1,
        hidden_size=max(1, int(num_bytes * 8 / bits)),
        expert_intermediate_size=1,
        expert_matrices=1,
        vocab_size=1,
        num_attention_heads=1,
        num_kv_heads=1,
        head_dim=1,
        tie_embeddings=True,
        expert_bits=bits,
        dense_bits=16.0,
        kv_bits=16.0,
    )
