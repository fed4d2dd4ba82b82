"""What holds a predicted part of a decode step back, in words: which rate, of which the most there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hwmodels.cost import CostModel
from hwmodels.layer_time import (
    CPU_EXPERTS,
    DENSE,
    GPU_EXPERTS,
    HANDOVER,
    LAUNCH,
    LINK,
    STEP,
    STORAGE,
)
from hwmodels.machine import CPU
from hwmodels.predict import Case, Prediction
from hwmodels.units import GB, NS_PER_S

_TERA = 10**12
_WIDE = 64
"""Bits of a weight that no decoding holds up."""


def limit_words(prediction: Prediction, part: str) -> str:
    """Say what a part of the decode step does and how near its limit it is.

    Rates are those of one layer's work alone: bytes / time, fixed costs included, of the most that the
    machine's figures allow.
    """
    case = prediction.case
    return _WORDS[part](case, prediction)


def tokens_each(case: Case) -> int:
    """Return the tokens of one expert in a decode step, in the mean, at least 1."""
    shape = case.costs.shape
    used = case.usage.distinct_experts(shape, case.batch_size, are_apart=True)
    return max(1, round(case.batch_size * shape.top_k / used))


def cpu_bytes_per_s(case: Case) -> float:
    """Return the rate at which all CPU teams read experts of the last layer, setup included."""
    costs, layer = case.costs, _last(case.costs)
    time_ns = costs.expert_cpu_ns(layer, tokens_each(case))
    return costs.shape.expert_bytes(layer) * costs.num_cpu_teams * NS_PER_S / time_ns


def _cpu(case: Case, prediction: Prediction) -> str:
    costs, layer, tokens = case.costs, _last(case.costs), tokens_each(case)
    cpu, work = costs.machine.cpu, costs.cpu_work(layer, tokens)
    if work.alone_ns == work.least_ns and cpu.expert_table is None:
        flops = tokens * costs.shape.expert_flops_per_token * costs.num_cpu_teams
        rate = flops * NS_PER_S / work.least_ns / _TERA
        return f"the CPU computes experts at {rate:.2f} of {cpu.expert_flops / _TERA:.2f} TFLOP/s"
    most = _of(cpu_bytes_per_s(case), cpu.expert_bytes_per_s)
    text = f"the CPU reads experts at {most}{_capped(cpu)}"
    if cpu.expert_table is not None:
        return f"{text} (from a measured table)"
    if work.bytes_per_s * costs.num_cpu_teams < 0.95 * cpu.expert_bytes_per_s:
        return text + _held_back(costs, layer)
    return text


def _capped(cpu: CPU) -> str:
    """Name the figure that caps the rate of experts, where it is not ``cpu.memory_bytes_per_s``."""
    threads, most = cpu.threads_used, cpu.expert_bytes_per_s
    if most == cpu.memory_bytes_per_s:
        return ""
    if most == cpu.dram_bytes_per_s:
        return ", the most that cpu.dram_bytes_per_s lets all readers have"
    return f", the most of {threads} thread{'s' * (threads > 1)} (cpu.threads_used x cpu.thread_bytes_per_s)"


def _held_back(costs: CostModel, layer: int) -> str:
    """Say what keeps CPU kernels below the rate of host memory: decoding, or the engine's kernels."""
    cpu, bits = costs.machine.cpu, costs.shape.expert_bits_of(layer)
    threads = cpu.threads_used // costs.num_cpu_teams
    slower = costs.cpu_work(layer, 1).bytes_per_s < cpu.team_bytes_per_s(threads, _WIDE)
    if slower and bits < 16:
        named = _decoding_figure(cpu, bits, costs.shape.expert_codebook)
        return f": decoding {bits:.3g}-bit weights holds the cores, not memory (cpu.{named})"
    return ": its threads, or this engine's kernels, reach no more"


def _decoding_figure(cpu: CPU, bits: float, is_codebook: bool) -> str:
    """Return the figure that bounds decoding: of those given, the one that allows least."""
    weights = "codebook_weights_per_s" if is_codebook else "decode_weights_per_s"
    one = replace(cpu, decode_weights_per_s=None, codebook_weights_per_s=None)
    without = one.team_bytes_per_s(cpu.threads_used, bits, is_codebook)
    is_bound = cpu.team_bytes_per_s(cpu.threads_used, bits, is_codebook) < without
    return weights if is_bound or cpu.rate_by_bits is None else "rate_by_bits"


def _link(case: Case, prediction: Prediction) -> str:
    costs, layer = case.costs, _last(case.costs)
    link = costs.machine.link
    assert link is not None, "only a link has this part"
    gaps_ns = costs.engine.chunks * link.copy_gap_ns
    rate = costs.shape.expert_bytes(layer) * NS_PER_S / (costs.copy_ns(layer) + gaps_ns)
    pinned = "" if link.pinned else ", from memory that is not pinned"
    most = max(link.h2d_bytes_per_s, link.load_bytes_per_s)
    return f"experts come over the host link at {_of(rate, most)}{pinned}"


def _storage(case: Case, prediction: Prediction) -> str:
    costs = case.costs
    storage, engine = costs.machine.storage, costs.engine
    assert storage is not None, "only storage has this part"
    rate = storage.bytes_per_s(engine.storage_block_bytes, engine.storage_queue_depth)
    best = max(row[-1] for row in storage.curve)
    return (
        f"experts are read from storage at {_of(rate, best)} (blocks of "
        f"{engine.storage_block_bytes // 1024} KiB, {engine.storage_queue_depth} at one time)"
    )


def _gpu_experts(case: Case, prediction: Prediction) -> str:
    costs, layer = case.costs, _last(case.costs)
    used = case.usage.distinct_experts(costs.shape, case.batch_size, are_apart=True)
    count, packed = max(1, round(used)), False
    time_ns = costs.experts_gpu_ns(layer, [tokens_each(case)] * count, packed)
    sets = 1 if costs.is_grouped else count
    work_ns = max(1, time_ns - sets * costs.expert_launches(packed) * costs.launch_ns)
    rate = count * costs.shape.expert_bytes(layer) * NS_PER_S / work_ns
    most = costs.machine.device.memory_bytes_per_s
    return f"the GPU reads experts at {_of(rate, most)}" + _computing(rate, most)


def _dense(case: Case, prediction: Prediction) -> str:
    costs, shape = case.costs, case.costs.shape
    entries = case.batch_size * case.context_tokens
    layer_ns = costs.dense_ns(case.batch_size, entries, entries) - costs.dense_launch_ns
    attended = shape.attended_tokens(entries, case.batch_size)
    kv_bytes = attended * shape.kv_bytes_per_token_full_layer
    rate = (shape.dense_layer_bytes(0) + kv_bytes) * NS_PER_S / max(1, layer_ns)
    who = "CPU" if costs.machine.gpu is None else "GPU"
    most = costs.machine.device.memory_bytes_per_s
    fixed_us = costs.machine.device.attention_floor_ns / 1e3
    floor = (
        f", of each layer's {layer_ns / 1e3:.1f} us {fixed_us:.1f} are fixed" if fixed_us else ""
    )
    return f"the {who} reads attention, dense weights and KV at {_of(rate, most)}{floor}"


def _launches(case: Case, prediction: Prediction) -> str:
    count = prediction.decode.ns[LAUNCH] / max(1, case.costs.launch_ns)
    how = "from a CUDA graph" if case.costs.engine.graph else "one by one from the host"
    return f"about {count:,.0f} kernels a step, {case.costs.launch_ns / 1e3:.2f} us each, {how}"


def _handover(case: Case, prediction: Prediction) -> str:
    each_us = case.costs.handover_ns(case.batch_size) / 1e3
    return f"each layer that uses the CPU waits {each_us:.0f} us to hand over to it and back"


def _step(case: Case, prediction: Prediction) -> str:
    own_us = case.costs.machine.device.step_overhead_ns / 1e3
    return f"the head, layers without experts, and {own_us:.0f} us of the engine's own a step"


def _computing(rate: float, most: float) -> str:
    return "" if rate > 0.5 * most else ", for their kernels are too small or compute-bound"


def _of(rate: float, most: float) -> str:
    return f"{rate / GB:.3g} of {most / GB:.3g} GB/s"


def _last(costs: CostModel) -> int:
    return costs.shape.num_moe_layers - 1


_WORDS: dict[str, Callable[[Case, Prediction], str]] = {
    CPU_EXPERTS: _cpu,
    LINK: _link,
    STORAGE: _storage,
    GPU_EXPERTS: _gpu_experts,
    DENSE: _dense,
    LAUNCH: _launches,
    HANDOVER: _handover,
    STEP: _step,
}
