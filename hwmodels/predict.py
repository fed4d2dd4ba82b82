"""What a model does on a machine under an engine and a placement: no trace, no clock, under a millisecond.

A decode step and the chunks of a prompt are sums over layers (:mod:`hwmodels.layer_time`), at the costs
that a simulation has too. Where order and chance matter (queues, bursts of misses, many requests) simulate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hwmodels.cost import CostModel
from hwmodels.errors import HardwareError
from hwmodels.layer_time import GPU_BYTES, LAUNCH, STEP, Batch, LayerTimes, Spent
from hwmodels.placement import Placement
from hwmodels.units import GB
from hwmodels.usage import Usage


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked: ``context_tokens`` are the entries that a decoded token attends to."""

    costs: CostModel
    placement: Placement
    usage: Usage
    prompt_tokens: int = 512
    context_tokens: int = 512
    batch_size: int = 1
    prefill_chunk: int | None = None
    """Prompt tokens of one step; None: all."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Times in ns; bytes a decoded token, or in memory.

    ``decode`` and ``prefill`` hold the critical path by part and the bytes moved, of one step and of one
    prompt. ``problems`` says what does not fit where.
    """

    case: Case
    decode: Spent
    prefill: Spent
    gpu_bytes: int
    host_bytes: int
    problems: tuple[str, ...]

    @property
    def tpot_ns(self) -> float:
        """Time of one decode step, which gives each sequence one token."""
        return self.decode.total_ns

    @property
    def ttft_ns(self) -> float:
        """Time to the first token of one prompt on an idle machine."""
        return self.prefill.total_ns

    @property
    def tokens_per_s(self) -> float:
        """Decoded tokens a second, all sequences together."""
        return self.case.batch_size * 1e9 / self.tpot_ns

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens a second."""
        return self.case.prompt_tokens * 1e9 / self.ttft_ns

    @property
    def bottleneck(self) -> str:
        """The part with the largest share of a decode step."""
        return max(self.decode.ns, key=lambda part: self.decode.ns[part])


def predict(case: Case) -> Prediction:
    """Predict one case; raises HardwareError for one that has no meaning."""
    _check(case)
    gpu_bytes, host_bytes = _memory(case)
    return Prediction(
        case=case,
        decode=_decode(case),
        prefill=_prefill(case),
        gpu_bytes=gpu_bytes,
        host_bytes=host_bytes,
        problems=tuple(_problems(case, gpu_bytes, host_bytes)),
    )


_MOST_CHUNKS = 1024
"""Chunks of a prompt that are computed one by one."""


def _check(case: Case) -> None:
    counts = {
        "prompt_tokens": case.prompt_tokens,
        "context_tokens": case.context_tokens,
        "batch_size": case.batch_size,
        "prefill_chunk": 1 if case.prefill_chunk is None else case.prefill_chunk,
    }
    for name, value in counts.items():
        if value < 1:
            raise HardwareError(f"{name} = {value}: must be >= 1")


def _decode(case: Case) -> Spent:
    entries = case.batch_size * case.context_tokens
    batch = Batch(case.batch_size, entries, entries, are_apart=True)
    return _step(case, batch, case.batch_size)


def _prefill(case: Case) -> Spent:
    """Return all chunks of a prompt; of very many, neighbours count as the one in their middle."""
    spent = Spent()
    size = min(case.prefill_chunk or case.prompt_tokens, case.prompt_tokens)
    whole = (case.prompt_tokens - 1) // size  # chunks before the last, which alone has an output
    alike = -(-whole // _MOST_CHUNKS) or 1
    for first in range(0, whole, alike):
        count = min(alike, whole - first)
        last = (2 * first + count + 1) * size // 2
        spent.add(_step(case, _chunk(size, last), 0), count)
    spent.add(_step(case, _chunk(case.prompt_tokens - whole * size, case.prompt_tokens), 1))
    return spent


def _chunk(new: int, last: int) -> Batch:
    """Return ``new`` consecutive tokens, of which the last attends to ``last`` entries."""
    return Batch(new, last, new * last - new * (new - 1) // 2)


def _step(case: Case, batch: Batch, num_outputs: int) -> Spent:
    """Return one step: what it costs beside MoE layers, and each MoE layer."""
    costs, shape = case.costs, case.costs.shape
    spent = Spent()
    step_ns = costs.step_ns(batch.num_tokens, num_outputs, batch.kv_tokens, batch.attention_pairs)
    launch_ns = min(step_ns, costs.step_launch_ns)
    spent.ns[STEP], spent.ns[LAUNCH] = step_ns - launch_ns, launch_ns
    spent.num_bytes[GPU_BYTES] = shape.num_dense_only_layers * shape.dense_only_layer_bytes
    spent.num_bytes[GPU_BYTES] += shape.head_bytes if num_outputs else 0
    times = LayerTimes(costs, case.placement, case.usage)
    for layer, is_cpu_layer, count in _kinds(case):
        spent.add(times.layer(layer, is_cpu_layer, batch), count)
    return spent


def _kinds(case: Case) -> Iterator[tuple[int, bool, int]]:
    """Yield (a layer, whether its experts are the CPU's, how many layers are like it).

    In one memory none are: the GPU computes all experts where they lie.
    """
    shape = case.costs.shape
    on_cpu = case.placement.num_cpu_layers(shape) if case.costs.machine.link else 0
    alike: dict[tuple[float, bool], list[int]] = {}
    for layer in range(shape.num_moe_layers):
        alike.setdefault((shape.expert_bits_of(layer), layer < on_cpu), []).append(layer)
    for (_, is_cpu_layer), layers in alike.items():
        yield layers[0], is_cpu_layer, len(layers)


# -- memory ----------------------------------------------------------------------------------------


def _memory(case: Case) -> tuple[int, int]:
    """Return the bytes of GPU memory, all GPUs together, and of host memory that the case takes."""
    shape, machine, place = case.costs.shape, case.costs.machine, case.placement
    layers = range(shape.num_moe_layers)
    experts = sum(shape.num_experts * shape.expert_bytes(layer) for layer in layers)
    rest = shape.non_expert_bytes(shape.num_moe_layers)
    rest += case.batch_size * shape.kv_bytes(max(case.context_tokens, case.prompt_tokens))
    rest += machine.device.workspace_bytes * machine.device.count
    if machine.link is None:
        held = round(place.gpu_ratio * experts) if machine.storage else experts
        return (0 if machine.gpu is None else rest + held), rest + held
    on_gpu = place.gpu_expert_bytes(shape)
    in_host = experts - on_gpu
    if case.costs.engine.exclusive_host or place.held == "fixed":
        return rest + on_gpu, round(in_host * place.host_ratio)
    return rest + on_gpu, round((experts if place.gpu_ratio < 1 else in_host) * place.host_ratio)


def _problems(case: Case, gpu_bytes: int, host_bytes: int) -> Iterator[str]:
    machine = case.costs.machine
    room = {"host memory": (host_bytes, machine.cpu.memory_bytes)}
    if machine.gpu is not None:
        have = machine.gpu.memory_bytes * (machine.gpu.count if machine.link else 1)
        room["GPU memory"] = (gpu_bytes, have)
    for name, (needed, have) in room.items():
        if needed > have:
            yield (f"{name}: {needed / GB:.1f} GB are needed, {machine.name} has {have / GB:.1f}")
