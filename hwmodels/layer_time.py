"""How long one MoE layer takes without a clock: closed form over the same costs that a simulation has.

Numbers of experts are means and need not be whole. What overlaps with what follows the engine: copies beside
kernels, the CPU beside the GPU. The parts returned are those of the critical path, so that they add up.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from hwmodels.cost import CostModel
from hwmodels.fullest import fullest
from hwmodels.placement import Placement
from hwmodels.units import NS_PER_S
from hwmodels.usage import Usage

DENSE, LAUNCH, GPU_EXPERTS = "attention, dense layers", "kernel launches", "GPU: experts"
LINK, STORAGE, CPU_EXPERTS = "host link", "storage", "CPU: experts"
HANDOVER, STEP = "handover to the CPU", "step: head, engine"
PARTS = (DENSE, LAUNCH, GPU_EXPERTS, LINK, STORAGE, CPU_EXPERTS, HANDOVER, STEP)
GPU_BYTES, LINK_BYTES = "GPU memory", "host link"
HOST_BYTES, STORAGE_BYTES = "host memory, by the CPU", "storage"


@dataclass(slots=True)
class Spent:
    """Time by part (ns) and bytes by where they flow."""

    ns: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    num_bytes: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def total_ns(self) -> float:
        """The whole time."""
        return sum(self.ns.values())

    def add(self, other: Spent, times: float = 1) -> None:
        """Add what ``other`` has, so many times."""
        for mine, theirs in ((self.ns, other.ns), (self.num_bytes, other.num_bytes)):
            for name, value in theirs.items():
                mine[name] += value * times


@dataclass(frozen=True, slots=True)
class Batch:
    """New tokens of one step and what they attend to, as :meth:`CostModel.dense_ns` takes them."""

    num_tokens: int
    kv_tokens: int
    attention_pairs: int
    are_apart: bool = False
    """The new tokens are of different sequences, not consecutive ones of a prompt."""


@dataclass(frozen=True, slots=True)
class _Split:
    """Mean numbers of a layer's experts by who computes them; ``load`` are copied first."""

    hit: float
    load: float
    cpu: float


class LayerTimes:
    """Times of a model's MoE layers under a placement."""

    def __init__(self, costs: CostModel, placement: Placement, usage: Usage) -> None:
        self._costs, self._placement, self._usage = costs, placement, usage
        gpu, engine = costs.machine.gpu, costs.engine
        count = 1 if gpu is None else gpu.count
        self._shards = count if engine.tensor_parallel else 1
        self._gpus = 1 if engine.tensor_parallel or engine.split == "layer" else count
        link = costs.machine.link
        self._hops_ns = 2 * link.hop_ns if link is not None and self._gpus > 1 else 0

    def layer(self, layer: int, is_cpu_layer: bool, batch: Batch) -> Spent:
        """Return what MoE layer ``layer`` takes; ``is_cpu_layer``: all its experts are the CPU's."""
        used = self._usage.distinct_experts(self._costs.shape, batch.num_tokens, batch.are_apart)
        tokens_each = max(1, round(batch.num_tokens * self._costs.shape.top_k / used))
        spent = self._dense(layer, batch)
        splits = self._splits(layer, is_cpu_layer, batch.num_tokens, used, tokens_each)
        for split, chance in splits:
            spent.add(self._experts(layer, split, tokens_each), chance)
        return spent

    # -- who computes what ---------------------------------------------------------------------------

    def _splits(
        self, layer: int, is_cpu_layer: bool, num_tokens: int, used: float, tokens_each: int
    ) -> Iterator[tuple[_Split, float]]:
        """Yield who may compute how many experts, with the chance of each; the chances sum to 1.

        What overlaps takes the longer of two times, whose mean is more than the longer of the means: a layer
        that mostly finds all its experts still waits when it lacks one. So each number of missing experts
        counts by its chance, misses taken as independent of each other; of many experts, the mean.
        """
        place, machine = self._placement, self._costs.machine
        if machine.gpu is None and machine.storage is None:
            yield _Split(used, 0.0, 0.0), 1.0
            return
        is_upload = self._is_upload(num_tokens)
        rate = 0.0 if is_cpu_layer else self._hit_rate(num_tokens, used)
        for missing, chance in _chances(used, 1 - rate):
            hit = used - missing
            if is_upload or (not is_cpu_layer and (machine.link is None or place.misses == "load")):
                yield _Split(hit, missing, 0.0), chance
            elif is_cpu_layer or place.misses == "cpu" or not missing:
                yield _Split(hit, 0.0, missing), chance
            else:
                yield self._balanced(layer, hit, missing, tokens_each), chance

    def _is_upload(self, num_tokens: int) -> bool:
        """Tell whether a step of so many tokens copies the CPU's experts to the GPU."""
        least, shape = self._placement.upload_tokens, self._costs.shape
        if least is None:
            return False
        by_expert = self._costs.engine.upload_by_expert
        return num_tokens >= least * (shape.num_experts / shape.top_k if by_expert else 1)

    def _hit_rate(self, num_tokens: int, used: float) -> float:
        """Return the share of the experts used that are there; a batch that uses all hits the share held.

        Between a token, whose experts a cache favours, and all experts it is linear in the experts used.
        """
        place, shape = self._placement, self._costs.shape
        one = place.hit_rate
        if one is None:
            is_cache = place.held == "recent"
            one = self._usage.hit_rate(place.gpu_ratio) if is_cache else place.gpu_ratio
        if num_tokens <= 1 or shape.num_experts == shape.top_k:
            return one
        spread = (shape.num_experts - used) / (shape.num_experts - shape.top_k)
        return place.gpu_ratio + (one - place.gpu_ratio) * spread

    def _balanced(self, layer: int, hit: float, missing: float, tokens_each: int) -> _Split:
        """Return how missing experts are divided so that the layer ends soonest: whole ones are loaded.

        Tried are the whole numbers around that with which link and CPU would end together, and none.
        """
        costs = self._costs
        cpu_ns = costs.expert_cpu_ns(layer, tokens_each) / costs.num_cpu_teams
        even = (costs.handover_ns(1) + missing * cpu_ns) / (self._load_each_ns(layer) + cpu_ns)
        loads = {0.0, *(min(missing, max(0.0, math.floor(even) + step)) for step in (-1, 0, 1, 2))}
        splits = [_Split(hit, load, missing - load) for load in sorted(loads)]
        return min(splits, key=lambda split: self._experts(layer, split, tokens_each).total_ns)

    # -- how long it takes ---------------------------------------------------------------------------

    def _dense(self, layer: int, batch: Batch) -> Spent:
        costs = self._costs
        dense_ns = costs.dense_ns(batch.num_tokens, batch.kv_tokens, batch.attention_pairs)
        launch_ns = costs.dense_launch_ns
        spent = Spent()
        spent.ns[DENSE], spent.ns[LAUNCH] = dense_ns - launch_ns, launch_ns
        shape = costs.shape
        kv_tokens = shape.attended_tokens(batch.kv_tokens, batch.num_tokens)
        kv_bytes = kv_tokens * shape.kv_bytes_per_token_full_layer
        spent.num_bytes[GPU_BYTES] += shape.dense_layer_bytes(layer) + kv_bytes
        return spent

    def _experts(self, layer: int, split: _Split, tokens_each: int) -> Spent:
        """Return the critical path of a layer's experts."""
        costs, engine = self._costs, self._costs.engine
        ready_ns, ready_launch_ns = self._gpu(layer, split.hit, tokens_each)
        late_ns, late_launch_ns = self._gpu(layer, split.load, tokens_each)
        load_ns, disk_ns = self._loads(layer, split.load)
        cpu_ns, own_ns = self._cpu(layer, split, tokens_each)
        if cpu_ns and load_ns and engine.cpu_overlaps:
            load_ns, cpu_ns = self._contended(layer, load_ns, cpu_ns)
        kernels_ns = ready_ns + late_ns
        gpu_ns = load_ns + kernels_ns
        if engine.copies_overlap:
            last_ns = late_ns / max(1.0, split.load)
            gpu_ns = max(kernels_ns, load_ns + last_ns)
        host_ns = cpu_ns + own_ns
        total_ns = max(gpu_ns, host_ns) if engine.cpu_overlaps else gpu_ns + host_ns
        host_seen_ns = total_ns - gpu_ns  # what of the CPU's part nothing hides
        own_seen_ns = min(own_ns, host_seen_ns)
        launch_ns = ready_launch_ns + late_launch_ns
        spent = Spent()
        spent.ns[LAUNCH] = launch_ns
        spent.ns[GPU_EXPERTS] = kernels_ns - launch_ns
        seen_ns = gpu_ns - kernels_ns
        disk_seen_ns = min(seen_ns, disk_ns)
        spent.ns[STORAGE], spent.ns[LINK] = disk_seen_ns, seen_ns - disk_seen_ns
        spent.ns[HANDOVER], spent.ns[CPU_EXPERTS] = own_seen_ns, host_seen_ns - own_seen_ns
        spent.ns[LINK] += self._hops_ns
        self._count_bytes(spent, layer, split)
        if costs.machine.gpu is None:  # one memory: the CPU is what computes
            spent.ns[CPU_EXPERTS] += spent.ns.pop(GPU_EXPERTS)
        return spent

    def _gpu(self, layer: int, num_experts: float, tokens_each: int) -> tuple[float, float]:
        """Return the kernels of so many experts, linear between whole numbers, and their launches in it."""
        if not num_experts:
            return 0.0, 0.0
        costs = self._costs
        each = fullest(num_experts / self._shards, self._gpus)
        low = math.floor(each)
        ends = [costs.experts_gpu_ns(layer, [tokens_each] * n, False) for n in (low, low + 1)]
        time_ns = ends[0] + (each - low) * (ends[1] - ends[0])
        sets = min(1.0, each) if costs.is_grouped else each
        launch_ns = sets * costs.expert_launches(False) * costs.launch_ns
        return time_ns, min(launch_ns, time_ns)

    def _load_each_ns(self, layer: int) -> float:
        """Return the time of one more load in a queue: its bytes, and a gap after each of its copies."""
        link = self._costs.machine.link
        gaps_ns = self._costs.engine.chunks * link.copy_gap_ns if link else 0
        return self._costs.copy_ns(layer) + gaps_ns

    def _loads(self, layer: int, num_experts: float) -> tuple[float, float]:
        """Return the time of so many loads in a queue, and what of it is reads from storage.

        Each GPU has a link of its own, to which a switch may be common.
        The first pays the setup. Experts that are not in host memory come from storage first; the reads
        run beside the copies, so that the slower of the two counts.
        """
        if not num_experts:
            return 0.0, 0.0
        costs = self._costs
        setup_ns = (costs.load_ns(layer) - costs.copy_ns(layer)) * min(1.0, num_experts)
        link, each_ns = costs.machine.link, self._load_each_ns(layer)
        copies_ns = setup_ns + fullest(num_experts, self._gpus) * each_ns
        if link is None:
            return copies_ns, copies_ns
        if link.switch_bytes_per_s is not None:
            num_bytes = num_experts * costs.shape.expert_bytes(layer)
            copies_ns = max(copies_ns, setup_ns + num_bytes * NS_PER_S / link.switch_bytes_per_s)
        absent = num_experts * (1 - self._placement.host_ratio)
        if not absent:
            return copies_ns, 0.0
        reads_ns = absent * costs.read_ns(layer)
        return max(copies_ns, reads_ns), max(0.0, reads_ns - copies_ns)

    def _cpu(self, layer: int, split: _Split, tokens_each: int) -> tuple[float, float]:
        """Return the time of the CPU's experts and that of the handover, each in the mean."""
        costs, place = self._costs, self._placement
        never = place.gpu_ratio == 1 or costs.machine.link is None
        if not split.cpu and (place.handover == "used" or never):
            return 0.0, 0.0
        each_ns = costs.expert_cpu_ns(layer, tokens_each) / costs.num_cpu_teams
        is_used = 1.0 if place.handover == "always" else min(1.0, split.cpu)
        return split.cpu * each_ns, is_used * costs.handover_ns(tokens_each)

    def _contended(self, layer: int, load_ns: float, cpu_ns: float) -> tuple[float, float]:
        """Return both times where copies and CPU share host memory: in proportion, while both run."""
        costs, cpu = self._costs, self._costs.machine.cpu
        num_bytes = costs.shape.expert_bytes(layer)
        each_ns = costs.expert_cpu_ns(layer, 1)
        rates = num_bytes * NS_PER_S * (costs.num_cpu_teams / each_ns + 1 / costs.load_ns(layer))
        slower = max(1.0, rates / cpu.dram_bytes_per_s)
        more_ns = min(load_ns, cpu_ns) * (slower - 1)
        return load_ns + more_ns, cpu_ns + more_ns

    def _count_bytes(self, spent: Spent, layer: int, split: _Split) -> None:
        size, machine = self._costs.shape.expert_bytes(layer), self._costs.machine
        spent.num_bytes[GPU_BYTES] += (split.hit + split.load) * size
        spent.num_bytes[HOST_BYTES] += split.cpu * size
        absent = (
            split.load if machine.link is None else split.load * (1 - self._placement.host_ratio)
        )
        spent.num_bytes[STORAGE_BYTES] += absent * size
        if machine.link is not None:
            spent.num_bytes[LINK_BYTES] += split.load * size


_MOST_COUNTED = 64
"""Experts used above which the number of missing ones is taken as its mean: it varies little then."""
_LEAST_CHANCE = 1e-4


def _chances(used: float, rate: float) -> list[tuple[float, float]]:
    """Return (missing experts, chance) where each of ``used`` is missing at a rate; the mean is kept.

    Binomial in the nearest whole number of experts, each then counted as used / that number.
    """
    count = round(used)
    if not 0 < rate < 1 or count > _MOST_COUNTED:
        return [(used * rate, 1.0)]
    found = [
        (
            number * used / count,
            math.comb(count, number) * rate**number * (1 - rate) ** (count - number),
        )
        for number in range(count + 1)
    ]
    found = [(missing, chance) for missing, chance in found if chance > _LEAST_CHANCE]
    total = sum(chance for _, chance in found)
    return [(missing, chance / total) for missing, chance in found]
