"""A model and a machine of round numbers, for costs that are worked out by hand."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hwmodels.cost import CostModel
from hwmodels.engine import Engine
from hwmodels.machine import CPU, GPU, Link, Machine, Storage
from hwmodels.model_shape import ModelShape
from hwmodels.units import GB
from tests.configs import composed

CONF = Path(__file__).parents[1] / "conf"
BYTE_A_NS = GB  # a rate at which one byte, or one operation, takes one nanosecond


def read(group: str, name: str) -> dict[str, Any]:
    """Return a file of ``conf/`` as plain values, with what it composes of others."""
    if group in ("machine", "engine"):
        return composed(f"{group}={name}")[group]
    return deepcopy(_read(group, name))


@cache
def _read(group: str, name: str) -> dict[str, Any]:
    plain = OmegaConf.to_container(OmegaConf.load(CONF / group / f"{name}.yaml"))
    assert isinstance(plain, dict)
    return plain  # type: ignore[return-value]


def shape(**changes: Any) -> ModelShape:
    """Two MoE layers of 4 experts; an expert has 3 * 10 * 20 = 600 weights of 8 bits."""
    base = ModelShape(
        name="round",
        source="made up",
        num_layers=2,
        num_moe_layers=2,
        num_experts=4,
        top_k=2,
        hidden_size=10,
        expert_intermediate_size=20,
        num_attention_heads=2,
        num_kv_heads=1,
        head_dim=5,
        vocab_size=100,
        tie_embeddings=False,
        expert_bits=8.0,
        dense_bits=8.0,
        kv_bits=8.0,
    )
    return replace(base, **changes)


def machine(**changes: Any) -> Machine:
    """Everything moves a byte a nanosecond and computes ten operations a nanosecond.

    ``changes`` are written as ``gpu_launch_ns=...``, or ``gpu=None`` for a whole part.
    """
    gpu = GPU(
        name="gpu",
        memory_bytes=10**6,
        memory_bytes_per_s=BYTE_A_NS,
        matmul_flops=10 * GB,
        kernel_floor_ns=50,
        launch_ns=7,
        graph_launch_ns=3,
        attention_floor_ns=20,
        step_overhead_ns=1000,
        workspace_bytes=0,
    )
    link = Link(
        name="link",
        h2d_bytes_per_s=BYTE_A_NS,
        d2h_bytes_per_s=BYTE_A_NS,
        pageable_bytes_per_s=BYTE_A_NS // 4,
        pageable_host_bytes_per_s=BYTE_A_NS // 2,
        copy_setup_ns=30,
        copy_gap_ns=4,
        copy_issue_ns=2,
        duplex_ratio=1.5,
        pinned=True,
    )
    cpu = CPU(
        name="cpu",
        cores=4,
        threads_used=4,
        memory_bytes=10**6,
        memory_bytes_per_s=BYTE_A_NS,
        thread_bytes_per_s=BYTE_A_NS,
        dram_bytes_per_s=2 * BYTE_A_NS,
        matmul_flops=10 * GB,
        expert_setup_ns=100,
        handover_ns=40,
        dispatch_ns=60,
    )
    storage = Storage("disk", 10**9, 5, ((2**20, 32, BYTE_A_NS // 10),))
    parts: dict[str, Any] = {"gpu": gpu, "link": link, "cpu": cpu, "storage": storage}
    for name, value in changes.items():
        part, _, field = name.partition("_")
        parts[part] = replace(parts[part], **{field: value}) if field else value
    return Machine(name="round", sources={}, **parts)


def engine(**changes: Any) -> Engine:
    """The default engine with handovers as the machine has them, or one that differs in some fields."""
    return Engine.from_mapping({**read("engine", "overlapped"), "handover_ratio": 1, **changes})


def costs(
    made: ModelShape | None = None, chosen: Engine | None = None, **changes: Any
) -> CostModel:
    """Costs of the round model (or another) on the round machine; ``changes`` as in :func:`machine`."""
    return CostModel(made or shape(), machine(**changes), chosen or engine())
