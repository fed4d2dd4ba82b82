"""Rules that divide a layer's experts between CPU and GPU, those on the GPU included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from sim.policies.base import PlacementPolicy
from sim.types import ExpertWork, Phase, Service, View


class HSS(PlacementPolicy):
    """HybriMoE's hybrid scheduling strategy, a greedy with two ends (arXiv 2504.05897, DAC'25).

    Experts stand in a row: those on the GPU by falling token count, then the missing ones likewise. The
    GPU takes from the front, the CPU from the back, the next one always the side that would be done
    with it sooner (the GPU at equal times). A missing expert that the GPU takes is loaded and offered to
    the cache; its copy follows the copies before it and runs beside the GPU's work, so the GPU waits
    max(0, copies so far + its own - GPU time so far). As in the code (PKU-SEC-Lab/HybriMoE), prompts run
    wholly on the GPU, what is missing being streamed through a buffer and not kept.

    Parameters
    ----------
    units
        False: times from ``view.costs``. True: the constants in the code, in its own unit: 0.5 for an
        expert on the GPU, ``cpu_unit`` a token on the CPU and 0.79 more for its first expert, 0.418 a copy.
    cpu_unit
        1 for DeepSeek-V2-Lite, 0.2 for Mixtral, 0.8 for Qwen2 (the code's comments).
    """

    places_hits: ClassVar[bool] = True

    def __init__(self, units: bool = False, cpu_unit: float = 1.0) -> None:
        if not cpu_unit > 0.0:
            raise ValueError(f"cpu_unit = {cpu_unit}: must be > 0")
        self._cpu_unit = cpu_unit if units else None
        self._cpu_start = 0.79 if units else 0.0
        self._alike: dict[tuple[int, int, int], int] = {}
        self._known: dict[tuple[int, int], tuple[float, float, float]] = {}

    def place(self, work: Sequence[ExpertWork], view: View) -> Sequence[Service]:
        """Return STAY, LOAD or CPU for each expert of a decoding event; STAY or BYPASS in a prompt."""
        if view.step.phase == Phase.PREFILL or not work:
            return [Service.STAY if hit else Service.BYPASS for _, _, hit in work]
        tokens = view.step.num_tokens
        rank = [-num_tokens if hit else tokens - num_tokens for _, num_tokens, hit in work]
        row = sorted(range(len(work)), key=rank.__getitem__)
        number = self._one_token(work, row, view) if tokens == 1 else self._front(work, row, view)
        services = [Service.CPU] * len(work)
        for place in row[:number]:
            services[place] = Service.STAY if work[place][2] else Service.LOAD
        return services

    def _one_token(self, work: Sequence[ExpertWork], row: Sequence[int], view: View) -> int:
        """Return the same as _front where each expert serves one token, so that only their numbers count."""
        hits = sum([item[2] for item in work])
        alike = work[0][0] // view.keys.num_experts, hits, len(work)
        number = self._alike.get(alike)
        if number is None:
            number = self._alike[alike] = self._front(work, row, view)
        return number

    def _front(self, work: Sequence[ExpertWork], row: Sequence[int], view: View) -> int:
        """Return how many experts of the row the GPU takes from the front; the CPU takes the others."""
        times = self._times(work, view)
        gpu = cpu = copied = 0.0
        front, back = 0, len(row) - 1
        while front <= back:
            first, last = row[front], row[back]
            _, gpu_time, copy = times[first]
            gpu_end = gpu + gpu_time
            if not work[first][2] and copied + copy > gpu:
                gpu_end += copied + copy - gpu
            cpu_end = cpu + times[last][0] if cpu else self._cpu_start + times[last][0]
            if gpu_end <= cpu_end:
                if not work[first][2]:
                    copied += copy
                gpu = gpu_end
                front += 1
            else:
                cpu = cpu_end
                back -= 1
        return front

    def _times(self, work: Sequence[ExpertWork], view: View) -> list[tuple[float, float, float]]:
        """Return (on the CPU, on the GPU, its copy) for each expert."""
        known, num_experts = self._known, view.keys.num_experts
        found = []
        for key, tokens, _ in work:
            kind = key // num_experts, tokens
            if kind not in known:
                known[kind] = self._work_out(*kind, view)
            found.append(known[kind])
        return found

    def _work_out(self, bank: int, tokens: int, view: View) -> tuple[float, float, float]:
        if self._cpu_unit is not None:
            return self._cpu_unit * tokens, 0.5, 0.41791011235117914
        costs = view.costs
        gpu_ns = costs.expert_gpu_ns(bank, tokens, view.packed)
        return float(costs.expert_cpu_ns(bank, tokens)), float(gpu_ns), float(costs.load_ns(bank))


class GreedyAssignment(PlacementPolicy):
    """DALI's greedy answer to its 0-1 assignment of a layer's experts (arXiv 2602.03495).

    The problem is public: each expert of an event runs on the CPU or the GPU, the busier side shall end
    soonest, with measured times for a copy, for the GPU and for the CPU. The greedy is a RECONSTRUCTION:
    experts by falling time on the CPU, each to the side that ends sooner with it (the GPU at equal
    times); a missing one takes the GPU the longer of its copy and its computation, since copies run
    beside the computation of others.
    """

    places_hits: ClassVar[bool] = True

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, bool], tuple[int, int]] = {}

    def place(self, work: Sequence[ExpertWork], view: View) -> Sequence[Service]:
        """Return STAY, LOAD or CPU for each expert of the event."""
        times = [self._times(item, view) for item in work]
        row = sorted(range(len(work)), key=lambda place: -times[place][0])
        services = [Service.CPU] * len(work)
        cpu = gpu = 0
        for place in row:
            cpu_ns, gpu_ns = times[place]
            if gpu + gpu_ns <= cpu + cpu_ns:
                gpu += gpu_ns
                services[place] = Service.STAY if work[place][2] else Service.LOAD
            else:
                cpu += cpu_ns
        return services

    def _times(self, item: ExpertWork, view: View) -> tuple[int, int]:
        """Return (on the CPU, on the GPU) for one expert."""
        key, tokens, hit = item
        bank = key // view.keys.num_experts
        found = self._known.get((bank, tokens, hit))
        if found is None:
            costs = view.costs
            gpu_ns = costs.expert_gpu_ns(bank, tokens, view.packed)
            on_gpu_ns = gpu_ns if hit else max(gpu_ns, costs.load_ns(bank))
            found = self._known[bank, tokens, hit] = costs.expert_cpu_ns(bank, tokens), on_gpu_ns
        return found
