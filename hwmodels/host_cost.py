"""How long an expert takes on the CPU: as measured, or max(setup + bytes / rate, operations / rate)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from hwmodels.curves import on_grid, proportional
from hwmodels.engine import Engine
from hwmodels.machine import CPU, Machine
from hwmodels.model_shape import ModelShape
from hwmodels.units import NS_PER_S, compute_ns, transfer_ns


class CPUWork(NamedTuple):
    """One expert on the CPU as a reader of shared memory.

    ``setup_ns`` pass first, then ``num_bytes`` are read at up to ``bytes_per_s``; all of it together
    takes at least ``least_ns`` (its operations).
    """

    setup_ns: int
    num_bytes: int
    bytes_per_s: int
    least_ns: int

    @property
    def alone_ns(self) -> int:
        """The time with nothing else on the memory."""
        read_ns = transfer_ns(self.num_bytes, self.bytes_per_s)
        return max(self.setup_ns + read_ns, self.least_ns)


class HostCosts:
    """Costs of experts on one team of CPU threads; teams divide the threads in use evenly."""

    def __init__(self, shape: ModelShape, machine: Machine, engine: Engine) -> None:
        self._shape = shape
        self._cpu = _as_used(machine.cpu, engine)
        self.num_teams = min(engine.cpu_experts_at_once, machine.cpu.threads_used)
        self._threads = machine.cpu.threads_used // self.num_teams

    def expert_work(self, layer: int, num_tokens: int) -> CPUWork:
        """Return the work of one expert for ``num_tokens`` tokens; nothing for none."""
        num_bytes = self._shape.expert_bytes(layer)
        if not num_tokens:
            return CPUWork(0, 0, 1, 0)
        if self._cpu.expert_table is not None:
            return self._measured(num_bytes, num_tokens)
        bits = self._shape.expert_bits_of(layer)
        is_codebook = self._shape.expert_codebook and layer < self._shape.num_moe_layers
        rate = self._cpu.team_bytes_per_s(self._threads, bits, is_codebook)
        num_flops = num_tokens * self._shape.expert_flops_per_token
        least_ns = compute_ns(num_flops, self._cpu.team_flops(self._threads))
        return CPUWork(self._cpu.expert_setup_ns, num_bytes, rate, least_ns)

    def _measured(self, num_bytes: int, num_tokens: int) -> CPUWork:
        """Return the work of a measured expert; a team with a part of the threads takes longer for it.

        Between the table's points on straight lines, beyond its last in proportion to bytes and tokens;
        below its first it is flat.
        """
        table = self._cpu.expert_table or ()
        all_ns = on_grid(table, num_bytes, num_tokens, proportional)
        time_ns = math.ceil(all_ns * self._cpu.threads_used / self._threads)
        return CPUWork(0, num_bytes, -(-num_bytes * NS_PER_S // time_ns), time_ns)


def layer_setup_ns(machine: Machine, engine: Engine) -> int:
    """Return what a layer's experts on the CPU are set up in together; 0 where each is by itself."""
    if engine.cpu_setups == "expert":
        return 0
    return round(machine.cpu.expert_setup_ns * engine.cpu_setup_ratio)


def _as_used(cpu: CPU, engine: Engine) -> CPU:
    """Return the CPU with what the engine's kernels reach of its rates, and the setup of one expert."""
    ratio = engine.cpu_decode_ratio
    rows = cpu.rate_by_bits
    if rows is not None and ratio != 1:
        rows = tuple((bits, rate * ratio) for bits, rate in rows)
    is_alone = engine.cpu_setups == "expert"
    return replace(
        cpu,
        rate_by_bits=rows,
        decode_weights_per_s=_share(cpu.decode_weights_per_s, ratio),
        codebook_weights_per_s=_share(cpu.codebook_weights_per_s, ratio),
        expert_setup_ns=round(cpu.expert_setup_ns * engine.cpu_setup_ratio) if is_alone else 0,
        matmul_flops=max(1, int(cpu.matmul_flops * engine.cpu_matmul_ratio)),
    )


def _share(rate: int | None, ratio: float) -> int | None:
    return None if rate is None else max(1, int(rate * ratio))
