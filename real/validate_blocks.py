"""Which runs a validation has: blocks of a tier and a batch size, in which all runs take turns."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from hwmodels.model_shape import ModelShape
from real.device import Device
from real.experts import ExpertFormat
from real.machine_facts import free_bytes
from real.rig import Tier
from real.validate_config import Matrix
from real.validate_parity import TINY
from real.validate_runs import Setting
from sim.composing import compose_config
from sim.own_options import with_folders
from sim.settings import check_settings
from sim.types import ConfigError

Wanted = tuple[str, float]
"""A policy and its cache ratio."""
_ROOM = 0.75
"""Share of the memory that is free now which the runs of a block may take together."""


@dataclass(frozen=True, slots=True)
class Block:
    """Runs that take turns; ``references`` are those that figures of the machine come from."""

    tier: str
    batch_size: int
    references: tuple[Wanted, ...]
    runs: tuple[Wanted, ...]

    @property
    def wanted(self) -> tuple[Wanted, ...]:
        """All runs, references first."""
        return self.references + self.runs

    @property
    def name(self) -> str:
        """What the block is called."""
        ratios = sorted({ratio for _, ratio in self.runs})
        at = "" if len(ratios) > 1 else f", ratio {ratios[0]:g}"
        return f"{self.tier}, batch {self.batch_size}{at}"


def host_policies(matrix: Matrix, names: Sequence[str]) -> frozenset[str]:
    """Return which policies place experts on the host; ConfigError, or Hydra's, for a name unknown."""
    found = set()
    for name in names:
        given = with_folders([f"policy={name}", *matrix.overrides], matrix.config_dirs)
        policy = compose_config("config", given)["policy"]
        if policy.get("low") is not None:
            raise ConfigError(
                f"policies = {name}: has low-precision copies, which a validation has none of; "
                "`greenroom replay` runs it"
            )
        if policy.get("placement") is not None:
            found.add(name)
    return frozenset(found)


def blocks_of(
    matrix: Matrix, on_host: frozenset[str], run_bytes: Mapping[Wanted, int], room_bytes: int
) -> list[Block]:
    """Return the blocks of a matrix; one whose memory does not suffice is split by ratio.

    Parameters
    ----------
    on_host
        Policies that place experts on the host, which nobody can where experts wait on storage.
    run_bytes
        What each run takes of memory, by policy and ratio, at the largest batch size.
    room_bytes
        What all runs of a block may take.
    """
    found = []
    for tier, batch_size in product(matrix.tiers, matrix.batch_sizes):
        whole = _block(matrix, tier, batch_size, matrix.ratios, on_host)
        if _bytes(whole, run_bytes) <= room_bytes:
            parts = [whole]
        else:
            parts = [_block(matrix, tier, batch_size, (one,), on_host) for one in matrix.ratios]
        for part in parts:
            if _bytes(part, run_bytes) > room_bytes:
                raise ConfigError(
                    f"{part.name}: its {len(part.wanted)} runs take {_bytes(part, run_bytes) / 1e9:.1f} GB "
                    f"together: must be at most {room_bytes / 1e9:.1f} GB; ask for fewer policies, smaller "
                    "ratios or a smaller model"
                )
            if part.runs and part.references:
                found.append(part)
    if not found:
        raise ConfigError(
            "tiers = storage: must have a policy, and a reference, that places nothing on the host"
        )
    return found


def _block(
    matrix: Matrix, tier: str, batch_size: int, ratios: Sequence[float], on_host: frozenset[str]
) -> Block:
    barred = on_host if tier == "storage" else frozenset()
    references = [
        (name, ratio)
        for name in matrix.references
        if name not in barred
        for ratio in (ratios[:1] if name in on_host else ratios)
    ]
    runs = [(name, ratio) for ratio in ratios for name in matrix.policies if name not in barred]
    return Block(tier, batch_size, tuple(references), tuple(runs))


def _bytes(block: Block, run_bytes: Mapping[Wanted, int]) -> int:
    return sum(run_bytes[wanted] for wanted in block.wanted)


def run_bytes_of(matrix: Matrix, shape: ModelShape, form: ExpertFormat) -> dict[Wanted, int]:
    """Return about what each run takes of the device's memory: its slots, and its dense weights."""
    num_all = shape.num_moe_layers * shape.num_experts
    staging = min(shape.num_experts, shape.top_k * max(matrix.batch_sizes) + 2)
    inner = (2 * shape.num_attention_heads + 2 * shape.num_kv_heads) * shape.head_dim
    tokens = matrix.prompt_tokens + matrix.steps
    cache = 2 * max(matrix.batch_sizes) * tokens * shape.num_kv_heads * shape.head_dim
    weights = shape.hidden_size * (shape.num_moe_layers * inner + shape.vocab_size)
    dense = (weights + shape.num_moe_layers * cache) * form.compute_dtype.itemsize
    names = (*matrix.policies, *matrix.references)
    return {
        (name, ratio): int((ratio * num_all + staging) * form.slot_bytes + dense)
        for name, ratio in product(names, matrix.ratios)
    }


def room_bytes_of(device: Device, store_bytes: int) -> int:
    """Return what the runs of a block may take, beside a store in host memory."""
    if device.kind == "cuda":
        free, _ = torch.cuda.mem_get_info(device.torch_device)
        return int(_ROOM * free)
    return max(0, int(_ROOM * free_bytes()) - store_bytes)


# -- what a block's runs share -----------------------------------------------------------------------


def setting_of(
    matrix: Matrix,
    block: Block,
    form: ExpertFormat,
    device: Device,
    threads: int,
    steps: int | None = None,
) -> Setting:
    """Return what the runs of a block share; ``steps`` are decoded tokens of each request."""
    first, last = matrix.first_request, matrix.first_request + block.batch_size
    output_tokens = matrix.steps if steps is None else steps
    overrides = [
        *(f"engine=greenroom_{device.kind}", "output.belady=false"),
        f"workload.requests=[{first},{last}]",
        f"workload.length=[{matrix.prompt_tokens},{output_tokens}]",
        *matrix.overrides,
    ]
    return Setting(
        Tier(block.tier, matrix.link_bytes_per_s, matrix.link_setup_ns),
        block.batch_size,
        tuple(with_folders(overrides, matrix.config_dirs)),
        form,
        device,
        threads,
        turn_steps=_turn_steps(matrix, block.batch_size, output_tokens),
        seed=matrix.seed,
    )


def _turn_steps(matrix: Matrix, batch_size: int, steps: int) -> int:
    """Return the steps of a turn: few enough for the least number of rounds."""
    return max(1, min(matrix.turn_tokens // batch_size, (steps - 1) // matrix.least_rounds))


def tiny_setting(setting: Setting, form: ExpertFormat) -> Setting:
    """Return a setting for tiny experts of a format, for decisions alone."""
    return replace(setting, overrides=(*setting.overrides, *TINY), form=form)


def dtype_of(matrix: Matrix, device: Device) -> str:
    """Return the experts' dtype; for ``auto`` bfloat16 where the device computes in it."""
    if matrix.dtype != "auto":
        return matrix.dtype
    return "bfloat16" if device.kind == "cuda" or _cpu_has_bfloat16() else "float32"


def _cpu_has_bfloat16() -> bool:
    """Tell whether the CPU multiplies in bfloat16; on x86 the kernels exist without, and are slow."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    native = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return platform.machine() not in ("x86_64", "AMD64") or bool(native())


def config_of_runs(matrix: Matrix, device: Device, extra: Sequence[str] = ()) -> dict[str, Any]:
    """Return what all runs have in common, as a configuration: trace, model, engine.

    Raises ConfigError for a setting that no run can have, before anything is measured.
    """
    given = [f"engine=greenroom_{device.kind}", *matrix.overrides, *extra]
    config = compose_config("config", with_folders(given, matrix.config_dirs))
    check_settings(config)
    return config
