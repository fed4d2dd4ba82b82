"""Runs with low-precision copies as a configuration asks for them, on machines of every kind."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hwmodels.cost import CostModel
from hwmodels.units import transfer_ns
from sim.build import build
from sim.simulate import simulate
from sim.timeline import Timeline
from sim.types import ConfigError, LayerPlan
from tests.configs import composed

LOW = (
    "+policy.low={bits: 4, share: 0.25}",
    "+policy.routing._target_=tests.doubles.LowWhereAbsent",
)


def configured(trace: Path, *overrides: str) -> dict[str, Any]:
    return composed("model=tiny", f"trace.path={trace}", *LOW, *overrides)


def test_truth_and_estimate_both_know_the_low_copies(small_trace_file: Path) -> None:
    """36864 and 9216 bytes; the estimate's link is half as fast as it is."""
    made = build(configured(small_trace_file, "+estimate.link.h2d_bytes_per_s=12.5e9"))
    believed = made.offloader.view.costs
    assert isinstance(believed, CostModel)
    assert believed is not made.costs
    rate = made.costs.machine.link.load_bytes_per_s  # type: ignore[union-attr]
    assert [made.costs.copy_ns(bank) for bank in (0, 4)] == [
        transfer_ns(size, rate) for size in (36864, 9216)
    ]
    assert [believed.copy_ns(bank) for bank in (0, 4)] == [
        transfer_ns(size, 12_500_000_000) for size in (36864, 9216)
    ]


def test_a_run_with_low_copies_is_told_to_be_lossy_and_has_no_bound(small_trace_file: Path) -> None:
    row, _ = simulate(configured(small_trace_file, "cache.ratio=0.5"))
    assert row["lossy"]
    assert row["cache_ratio"] == 0.5
    assert (row["belady_hit_rate"], row["belady_gap"]) == (None, None)
    assert any("for this policy changes which experts are used" in note for note in row["notes"])


def test_low_copies_bring_fewer_bytes_for_the_same_accesses(small_trace_file: Path) -> None:
    """What is missing costs a fourth of the bytes: every demand copy is a low one."""
    row, _ = simulate(configured(small_trace_file, "cache.ratio=0.5"))
    assert row["loads"] > 0
    assert row["h2d_bytes"] == (row["loads"] + row["bypasses"]) * 9216


@pytest.mark.parametrize(
    "overrides",
    [
        ("machine=rtx4090_x4",),
        ("machine=rtx4090_x4", "engine.split=layer"),
        ("machine=xeon4510_x2",),
        ("machine=phone_sd8gen3", "cache.ratio=0.4"),
        ("machine=rtx4090", "machine.cpu.memory_bytes=2900000", "engine.exclusive_host=true"),
        ("engine=fused",),
        ("engine=chunked",),
        ("engine=serial", "policy=saem", "policy.low.share=0.4"),
    ],
)
def test_every_kind_of_machine_runs_low_copies(
    overrides: tuple[str, ...], small_trace_file: Path
) -> None:
    """Each (token, chosen expert) once in either precision, and each pool within its bytes."""
    half_low = "policy.routing._target_=tests.doubles.EverySecondLow"
    sizes = ("cache.ratio=0.5", "workload.batch_size=2")
    config = configured(small_trace_file, half_low, *sizes, *overrides)
    made, used = build(config), Counter[int]()
    residency = made.offloader.residency

    def check(plan: LayerPlan) -> None:
        parts = [plan.resident, plan.late, plan.loads, plan.bypasses, plan.on_cpu]
        served = Counter(key for part in parts for key in part)
        assert served == Counter(plan.routing.experts)
        assert sum(plan.routing.token_counts) == sum(plan.recorded.token_counts)
        used.update(map(residency.keys.is_low, served.elements()))
        for pool, capacity in enumerate(residency.capacity_bytes):
            assert 0 <= residency.used_bytes(pool) <= capacity

    parts = (made.workload, made.offloader, made.costs, made.hardware)
    Timeline(*parts, on_plan=check).run()
    assert min(used[True], used[False]) > 0


def test_a_policy_that_needs_low_copies_is_refused_without_them() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^policy/hobbit: routing: .*HobbitPrecision needs .*policy\.low must be given",
    ):
        build(composed("policy=hobbit", "policy.low=null"))
