"""What would help a predicted case most: the same prediction with one resource, or one habit, changed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from hwmodels.cost import CostModel
from hwmodels.devices import CPU
from hwmodels.machine import Machine
from hwmodels.placement import Placement
from hwmodels.predict import Case, Prediction, predict

Rows = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Gain:
    """One change and what it would bring: new tokens/s of decoding, and over the present ones - 1."""

    name: str
    tokens_per_s: float
    change: float
    is_hardware: bool


def gains(prediction: Prediction) -> list[Gain]:
    """Return all changes that there are something to change for, the greatest gain first."""
    case, found = prediction.case, []
    for name, changed, is_hardware in _changes(case):
        speed = predict(replace(changed, prompt_tokens=1)).tokens_per_s
        found.append(Gain(name, speed, speed / prediction.tokens_per_s - 1, is_hardware))
    return sorted(found, key=lambda gain: -gain.change)


def _changes(case: Case) -> Iterator[tuple[str, Case, bool]]:
    costs = case.costs
    for name, change in _RESOURCES.items():
        machine = change(costs.machine)
        if machine is not None:
            yield name, _on(case, machine), True
    more = filled(case, 2)
    if more is not None and predict(more).gpu_bytes > _most_now(case):
        yield f"twice the GPU memory, filled ({placed_as(more.placement, more)})", more, True
    for name, field, wanted in _HABITS:
        changed: dict[str, Any] = {field: wanted}
        if costs.machine.gpu is not None and getattr(costs.engine, field) is not wanted:
            engine = replace(costs.engine, **changed)
            yield name, replace(case, costs=CostModel(costs.shape, costs.machine, engine)), False


def _on(case: Case, machine: Machine) -> Case:
    costs = case.costs
    return replace(case, costs=CostModel(costs.shape, machine, costs.engine))


# -- the resources, twice as much of each --------------------------------------------------------------


def _times(factor: float, part: str, *names: str) -> Callable[[Machine], Machine | None]:
    def change(machine: Machine) -> Machine | None:
        figures = getattr(machine, part)
        if figures is None:
            return None
        values = {name: getattr(figures, name) for name in names}
        new = {name: round(v * factor) for name, v in values.items() if v is not None}
        return _with(machine, part, **new)

    return change


def _with(machine: Machine, part: str, **changes: Any) -> Machine:
    return replace(machine, **{part: replace(getattr(machine, part), **changes)})


def _host_memory(machine: Machine) -> Machine | None:
    """Double what memory gives its readers; decoding weights, the cores' own work, stays as slow.

    Where decoding bounds, the time of a byte is that of the cores and that of memory, taken as half.
    """
    cpu = machine.cpu
    if cpu.expert_table is not None:
        return None  # a table does not tell what memory is of its times
    memory = cpu.memory_bytes_per_s
    changes: dict[str, Any] = {
        "memory_bytes_per_s": 2 * memory,
        "dram_bytes_per_s": 2 * cpu.dram_bytes_per_s,
    }
    if cpu.rate_by_bits is not None:
        changes["rate_by_bits"] = tuple(
            (bits, rate / (1 - min(rate, memory) / (2 * memory))) for bits, rate in cpu.rate_by_bits
        )
    return _with(machine, "cpu", **changes)


def _cores(machine: Machine) -> Machine | None:
    """Double what the cores do by themselves; host memory stays as it is and may bind then."""
    cpu: CPU = machine.cpu
    changes: dict[str, Any] = {
        "thread_bytes_per_s": 2 * cpu.thread_bytes_per_s,
        "matmul_flops": 2 * cpu.matmul_flops,
        "expert_setup_ns": cpu.expert_setup_ns // 2,
        "dispatch_ns": cpu.dispatch_ns // 2,
    }
    if cpu.rate_by_bits is not None:
        changes["rate_by_bits"] = _doubled(cpu.rate_by_bits)
    for name in ("decode_weights_per_s", "codebook_weights_per_s"):
        if getattr(cpu, name) is not None:
            changes[name] = 2 * getattr(cpu, name)
    if cpu.expert_table is not None:
        changes["expert_table"] = tuple((*row[:-1], row[-1] / 2) for row in cpu.expert_table)
    return _with(machine, "cpu", **changes)


def _gpu_compute(machine: Machine) -> Machine | None:
    if machine.gpu is None:
        return None
    changes: dict[str, Any] = {"matmul_flops": 2 * machine.gpu.matmul_flops}
    if machine.gpu.vector_flops is not None:
        changes["vector_flops"] = 2 * machine.gpu.vector_flops
    if machine.gpu.rate_by_bits is not None:
        changes["rate_by_bits"] = _doubled(machine.gpu.rate_by_bits)
    return _with(machine, "gpu", **changes)


def _launches(machine: Machine) -> Machine | None:
    """Halve the distance of kernels, whoever sets it: the GPU, or the host that issues them."""
    gpu, cpu = machine.gpu, machine.cpu
    if gpu is None:
        return None
    halved = _with(
        machine, "gpu", launch_ns=gpu.launch_ns // 2, graph_launch_ns=gpu.graph_launch_ns // 2
    )
    return _with(halved, "cpu", launch_issue_ns=cpu.launch_issue_ns // 2)


def _storage(machine: Machine) -> Machine | None:
    if machine.storage is None:
        return None
    return _with(machine, "storage", curve=_doubled(machine.storage.curve))


def _doubled(rows: Rows) -> Rows:
    return tuple((*row[:-1], 2 * row[-1]) for row in rows)


_RESOURCES: dict[str, Callable[[Machine], Machine | None]] = {
    "host link x2": _times(
        2,
        "link",
        "h2d_bytes_per_s",
        "d2h_bytes_per_s",
        "pageable_bytes_per_s",
        "switch_bytes_per_s",
    ),
    "host memory bandwidth x2": _host_memory,
    "CPU cores x2": _cores,
    "GPU memory bandwidth x2": _times(2, "gpu", "memory_bytes_per_s"),
    "GPU compute x2": _gpu_compute,
    "storage x2": _storage,
    "launches in half the time": _launches,
    "handover in half the time": _times(0.5, "cpu", "handover_ns"),
}
_HABITS = (
    ("an engine that launches from CUDA graphs", "graph", True),
    ("an engine whose copies run beside kernels", "copies_overlap", True),
    ("an engine whose CPU experts run beside the GPU's", "cpu_overlaps", True),
)


# -- memory ------------------------------------------------------------------------------------------


def filled(case: Case, times_memory: float = 1) -> Case | None:
    """Return the case with as many experts on the GPU as fit there; None where that says nothing.

    Layers for a placement that divides layers, experts of each layer for one that divides those.
    ``times_memory``: of the GPU memory that there is. None without a GPU of its own memory, or if not even
    the placement's least fits.
    """
    machine = case.costs.machine
    if machine.gpu is None or machine.link is None:
        return None
    have = int(machine.gpu.memory_bytes * machine.gpu.count * times_memory)
    placements = _fullest_first(case)
    longest = max(case.context_tokens, case.prompt_tokens)  # what KV cache is for
    brief = replace(case, prompt_tokens=1, context_tokens=longest)

    def fits(placement: Placement) -> bool:
        return predict(replace(brief, placement=placement)).gpu_bytes <= have

    first = bisect_left(placements, True, key=fits)
    return replace(case, placement=placements[first]) if first < len(placements) else None


def _most_now(case: Case) -> int:
    """Return the GPU memory that the case takes, or would if it filled what there is."""
    full = filled(case)
    return max(predict(one).gpu_bytes for one in (case, full) if one is not None)


def _fullest_first(case: Case) -> list[Placement]:
    place, shape = case.placement, case.costs.shape
    if place.num_cpu_layers(shape) or place.gpu_ratio == 1:
        counts = range(shape.num_moe_layers + 1)
        return [replace(place, cpu_layers=layers) for layers in counts]
    experts = shape.num_experts
    return [replace(place, gpu_ratio=held / experts) for held in range(experts, -1, -1)]


def placed_as(placement: Placement, case: Case) -> str:
    """Return the settings in which a placement differs within its kind, as overrides."""
    shape = case.costs.shape
    if placement.gpu_ratio == 1:
        return f"placement.cpu_layers={placement.num_cpu_layers(shape)}"
    return f"placement.gpu_ratio={placement.gpu_ratio:.4g}"
