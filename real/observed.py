"""What a run showed of its machine: times of kernels, copies and decisions, as figures for a simulation.

Filled by the accounts of a run (real/accounts.py), step by step. Means, not medians: a token's time is a
sum, and the mean of a sum is the sum of means, rare delays included.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Mean:
    """A mean that grows."""

    count: int = 0
    total: int = 0

    def add(self, value: int, count: int = 1) -> None:
        """Count one value, or the sum of several."""
        self.count += count
        self.total += value

    def __iadd__(self, other: Mean) -> Mean:
        self.add(other.total, other.count)
        return self

    def value(self, default: float = 0.0) -> float:
        """Return the mean; ``default`` of nothing."""
        return self.total / self.count if self.count else default


_MEANS = (
    *("head", "decide", "issue", "python", "setup", "wake", "handover"),
    *("first_copy", "next_copy"),
)


@dataclass(slots=True)
class Observed:
    """Figures of one run or, added up, of several. Times are ns.

    kernels, cpu_kernels    one expert on the device, or on the host, by (bytes, tokens)
    kernels_beside    one expert on the device while the host computes experts
    dense, head       what a layer computes beside routed experts, by tokens; what a step does beside layers
    decide            a plan_layer of the policy
    issue             handing one copy to the engine
    python            what is left of a layer's time: neither kernels, waiting nor the above
    setup, wake       from asking an idle tier for a copy to its begin; from its end until the host knew
    handover          the same of experts on the host, there and back
    first_copy, next_copy    time of copies that found the tier idle, and of those behind another, by byte
    copied_bytes, copy_busy_ns    bytes that came, and the time in which any copy was under way
    """

    kernels: dict[tuple[int, int], Mean] = field(default_factory=dict)
    kernels_beside: dict[tuple[int, int], Mean] = field(default_factory=dict)
    cpu_kernels: dict[tuple[int, int], Mean] = field(default_factory=dict)
    dense: dict[int, Mean] = field(default_factory=dict)
    head: Mean = field(default_factory=Mean)
    decide: Mean = field(default_factory=Mean)
    issue: Mean = field(default_factory=Mean)
    python: Mean = field(default_factory=Mean)
    setup: Mean = field(default_factory=Mean)
    wake: Mean = field(default_factory=Mean)
    handover: Mean = field(default_factory=Mean)
    first_copy: Mean = field(default_factory=Mean)
    next_copy: Mean = field(default_factory=Mean)
    copied_bytes: int = 0
    copy_busy_ns: int = 0

    def kernel(
        self, num_bytes: int, num_tokens: int, time_ns: int, beside_cpu: bool = False
    ) -> None:
        """Learn what one expert took on the device."""
        table = self.kernels_beside if beside_cpu else self.kernels
        table.setdefault((num_bytes, num_tokens), Mean()).add(time_ns)

    def cpu_kernel(self, num_bytes: int, num_tokens: int, time_ns: int) -> None:
        """Learn what one expert took on the host."""
        self.cpu_kernels.setdefault((num_bytes, num_tokens), Mean()).add(time_ns)

    def __iadd__(self, other: Observed) -> Observed:
        for name in ("kernels", "kernels_beside", "cpu_kernels", "dense"):
            own = getattr(self, name)
            for key, mean in getattr(other, name).items():
                own.setdefault(key, Mean()).add(mean.total, mean.count)
        for name in _MEANS:
            mean = getattr(other, name)
            getattr(self, name).add(mean.total, mean.count)
        self.copied_bytes += other.copied_bytes
        self.copy_busy_ns += other.copy_busy_ns
        return self

    @property
    def copy_bytes_per_s(self) -> int:
        """Rate of copies behind others, or of all where few were; 0 where there was none."""
        if self.next_copy.count > self.first_copy.count // 10:
            return int(1e9 / self.next_copy.value())
        return int(self.copied_bytes * 1e9 / self.copy_busy_ns) if self.copy_busy_ns else 0

    def copy_setup_ns(self, num_bytes: int) -> int:
        """Return what a copy of so many bytes takes more where it finds the tier idle.

        That is from its asking to its begin, what its bytes take more than those of one behind another,
        and the time until the host has noticed its end.
        """
        behind_ns = num_bytes * 1e9 / self.copy_bytes_per_s if self.copy_bytes_per_s else 0.0
        slower_ns = num_bytes * self.first_copy.value(behind_ns / num_bytes) - behind_ns
        return max(0, round(self.setup.value() + slower_ns + self.wake.value()))

    @property
    def kept_beside_cpu(self) -> float:
        """Share of their rate that kernels keep while the host computes experts; 1 where it never did."""
        alone = beside = 0.0
        for key, mean in self.kernels_beside.items():
            if key in self.kernels:
                alone += self.kernels[key].value() * mean.count
                beside += mean.total
        return min(1.0, alone / beside) if beside else 1.0


def sum_of(parts: Iterable[Observed]) -> Observed:
    """Return several runs' figures together."""
    whole = Observed()
    for part in parts:
        whole += part
    return whole
