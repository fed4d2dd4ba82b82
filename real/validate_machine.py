"""The machine that a run showed, as figures of a machine file: to predict other runs of the same minutes."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping
from typing import Any

import torch

from real.device import Device
from real.observed import Mean, Observed
from real.rig import Tier

_NO_LIMIT = 1_000_000_000_000_000
"""A rate that binds nobody: where times are tables, formulas must not add to them."""
_SOURCE = "X: greenroom validate, mean over the reference runs of this machine, interleaved with the others"


def first_guess() -> Observed:
    """Return figures to begin with, before anything has been seen: 5 GB/s for everything."""
    guess = Observed(copied_bytes=5_000_000_000, copy_busy_ns=1_000_000_000)
    for size in (1 << 20, 1 << 24):
        guess.kernel(size, 1, size // 5)
        guess.cpu_kernel(size, 1, size // 5)
    guess.dense = {1: Mean(1, 200_000)}
    guess.head = Mean(1, 200_000)
    return guess


def machine_of(
    observed: Observed, device: Device, tier: Tier, num_tokens: int, threads: int
) -> dict[str, Any]:
    """Return a machine file's mapping from what was seen.

    ``num_tokens``: those of a decode step, whose dense work the figures are of; that of other steps is the
    same here, so prompts are not predicted. What Python takes of a layer counts with its dense work, for it
    comes between two layers as that does. Experts are tables by bytes and tokens.
    """
    cpu_table = _table(observed.cpu_kernels) or _table(observed.kernels)
    rate = max(1, observed.copy_bytes_per_s)
    setup_ns = observed.copy_setup_ns(max(size for size, _ in observed.kernels))
    memory_bytes = _memory_bytes()
    parts: dict[str, Any] = {
        "gpu": {
            "name": f"{device.name}, {threads} thread(s)" if device.kind == "cpu" else device.name,
            "memory_bytes": memory_bytes if device.kind == "cpu" else _device_bytes(device),
            "memory_bytes_per_s": _NO_LIMIT,
            "matmul_flops": _NO_LIMIT,
            "kernel_floor_ns": 0,
            "launch_ns": 0,
            "graph_launch_ns": 0,
            "attention_floor_ns": _dense_ns(observed, num_tokens) + python_ns(observed),
            "step_overhead_ns": round(observed.head.value()),
            "workspace_bytes": 0,
            "expert_table": _table(observed.kernels),
            "rate_beside_cpu_ratio": observed.kept_beside_cpu,
        },
        "cpu": {
            "name": platform.processor() or platform.machine(),
            "cores": os.cpu_count() or 1,
            "threads_used": threads,
            "memory_bytes": memory_bytes,
            "memory_bytes_per_s": _NO_LIMIT,
            "thread_bytes_per_s": _NO_LIMIT,
            "dram_bytes_per_s": _NO_LIMIT,
            "matmul_flops": _NO_LIMIT,
            "expert_setup_ns": 0,
            "handover_ns": max(0, round(observed.handover.value())),
            "expert_table": cpu_table,
        },
        "link": {
            "name": f"copies to the device ({tier.kind})",
            "h2d_bytes_per_s": rate,
            "d2h_bytes_per_s": _NO_LIMIT,
            "pageable_bytes_per_s": rate,
            "pageable_host_bytes_per_s": _NO_LIMIT,
            "copy_setup_ns": setup_ns,
            "copy_gap_ns": 0,
            "copy_issue_ns": max(0, round(observed.issue.value())),
            "duplex_ratio": 2.0,
            "pinned": True,
        },
        "storage": {
            "name": "the file of experts",
            "capacity_bytes": 10**15,
            "setup_ns": setup_ns,
            "curve": [[1 << 20, 1, rate]],
        },
    }
    parts["storage" if tier.kind != "storage" else "link"] = None
    for part in parts.values():
        if part is not None:
            figures = [name for name in part if name not in ("name", "pinned")]
            part["sources"] = dict.fromkeys(figures, _SOURCE)
    return {"name": f"validated_{tier.kind}", **parts}


def beliefs(machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return a machine's figures as a configuration's ``estimate``: what policies went by."""
    return {
        part: {k: v for k, v in machine[part].items() if k not in ("name", "sources")}
        for part in ("gpu", "link", "cpu")
        if machine.get(part)
    }


def python_ns(observed: Observed) -> int:
    """Return what Python takes of a layer, beside deciding and handing over copies."""
    return max(0, round(observed.python.value()))


def _dense_ns(observed: Observed, num_tokens: int) -> int:
    own = observed.dense.get(num_tokens)
    if own is None:
        own = next(iter(observed.dense.values()), Mean())
    return round(own.value())


def _table(kernels: Mapping[tuple[int, int], Mean]) -> list[list[int]]:
    """Return rows (bytes, tokens, ns); a count of tokens that was rare is left to its neighbours."""
    rows = []
    for size in sorted({size for size, _ in kernels}):
        own = {tokens: mean for (num, tokens), mean in kernels.items() if num == size}
        most = max(mean.count for mean in own.values())
        kept = [t for t in sorted(own) if own[t].count >= min(20, most)]
        rows += [[size, tokens, math.ceil(own[tokens].value())] for tokens in kept]
    return rows


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _device_bytes(device: Device) -> int:
    return int(torch.cuda.get_device_properties(device.torch_device).total_memory)
