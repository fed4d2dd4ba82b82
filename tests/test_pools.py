"""Pools of GPU memory: by layer, by group, sized by a policy, with low copies; and insertion caps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim.budget import Budget
from sim.build import Scenario, build
from sim.offloader import Offloader
from sim.policies.base import CachePolicy, PolicySet
from sim.policies.classic import LFU, LRU
from sim.pools import Pools
from sim.residency import Residency
from sim.types import ConfigError, KeySpace, LayerPlan, LayerRouting, Phase, StepInfo
from tests.configs import composed
from tests.doubles import Given, Preloaded
from tests.round_hardware import costs, shape
from tests.strategies import ConstantCosts

EXPERT = 3 * 128 * 48 * 2  # the tiny model's expert, bf16
MIXED = (8.0, 4.0, 8.0, 4.0, 4.0)
"""Bits by layer: experts of 600 or 300 bytes."""


def pools(scope: str, group_layers: int | None = None, gpus: int = 1, **changes: Any) -> Pools:
    """Return the pools of 5 layers x 4 experts."""
    made = shape(num_layers=5, num_moe_layers=5, **changes)
    return Pools.of(costs(made, gpu_count=gpus), 4, scope, group_layers)


def scenario(trace: Path, *overrides: str) -> Scenario:
    """Build a run of 4 layers x 16 experts, top 2."""
    return build(composed("model=tiny", f"trace.path={trace}", *overrides))


def budget(trace: Path, *overrides: str) -> Budget:
    return scenario(trace, *overrides).budget


# -- who shares a pool -----------------------------------------------------------------------------


def test_a_group_is_so_many_consecutive_layers_and_the_last_has_the_rest() -> None:
    found = pools("group", 2)
    assert list(found.pool_of_layer) == [0, 0, 1, 1, 2]
    assert (found.num_keys, found.all_bytes) == ((8, 8, 4), (4800, 4800, 2400))
    assert pools("group", 1).pool_of_key == pools("layer").pool_of_key
    assert pools("group", 5).pool_of_key == pools("global").pool_of_key == (0,) * 20


def test_without_a_number_layers_of_equal_bytes_share_a_pool() -> None:
    found = pools("group", expert_bits_by_layer=MIXED)
    assert list(found.pool_of_layer) == [0, 1, 0, 1, 1]
    assert (found.num_keys, found.largest_bytes) == ((8, 12), (600, 300))
    assert pools("group").num_keys == (20,)


def test_low_copies_have_pools_of_their_own_after_all_others() -> None:
    layers = pools("layer", low_bits=2.0)
    assert list(layers.pool_of_layer) == list(range(10))
    assert layers.largest_bytes == (600,) * 5 + (150,) * 5
    assert layers.is_low == (False,) * 5 + (True,) * 5
    assert (layers.all_expert_bytes, layers.stored_bytes) == (20 * 600, 20 * 750)
    assert layers.low_pools_of(3) == {8}
    groups = pools("group", 2, low_bits=2.0)
    assert list(groups.pool_of_layer) == [0, 0, 1, 1, 2, 3, 3, 4, 4, 5]
    by_size = pools("group", low_bits=2.0, expert_bits_by_layer=MIXED)
    assert list(by_size.pool_of_layer) == [0, 1, 0, 1, 1] + [2] * 5
    assert by_size.low_pools_of(0) == by_size.low_pools_of(1) == {2}
    assert pools("global", low_bits=2.0).all_bytes == (20 * 600, 20 * 150)


def test_gpus_divide_every_pool_and_both_copies_of_an_expert_are_on_one() -> None:
    found = pools("group", 4, gpus=2, low_bits=2.0)
    assert found.num_keys == (8, 8, 2, 2) * 2
    assert found.gpu_of_pool == (0, 1) * 4
    assert found.layout.gpu_of_key[:20] == found.layout.gpu_of_key[20:] == (0, 1) * 10


def test_host_memory_above_storage_must_hold_both_copies_of_a_layer() -> None:
    assert pools("layer").least_host_bytes(3, False) == (4 + 3) * 600
    assert pools("layer", low_bits=2.0).least_host_bytes(3, False) == (8 + 3) * 600
    assert pools("layer", low_bits=2.0).least_host_bytes(3, True) == 22 * 600


# -- how bytes are divided -------------------------------------------------------------------------


def test_a_group_has_its_share_of_all_bytes(small_trace_file: Path) -> None:
    group = ("policy.scope=group", "+policy.group_layers=3", "cache.ratio=0.3")
    found = budget(small_trace_file, *group)
    assert found.pool_bytes == (int(0.3 * 48 * EXPERT), int(0.3 * 16 * EXPERT))
    found = budget(small_trace_file, *group, f"cache.bytes={8 * EXPERT}")
    assert found.pool_bytes == (6 * EXPERT, 2 * EXPERT)


LOW = (
    "+policy.low={bits: 4, share: 0.25}",
    "+policy.routing._target_=tests.doubles.LowWhereAbsent",
)


def test_low_copies_get_their_share_of_the_same_bytes(small_trace_file: Path) -> None:
    """Half of 16 experts are 8 slots; a fourth of these bytes holds 8 low copies, and 6 slots are left."""
    found = budget(small_trace_file, *LOW, "cache.ratio=0.5")
    assert found.pools.layer_bytes == (EXPERT,) * 4 + (EXPERT // 4,) * 4
    assert found.pool_bytes == (6 * EXPERT,) * 4 + (2 * EXPERT,) * 4
    assert found.cache_ratio == 0.5
    found = budget(small_trace_file, *LOW, "policy.scope=global", f"cache.bytes={40 * EXPERT}")
    assert found.pool_bytes == (30 * EXPERT, 10 * EXPERT)


def test_what_whole_slots_leave_goes_to_the_low_copies(small_trace_file: Path) -> None:
    """2 slots a layer: 1.5 are left for full precision, of which one is whole."""
    found = budget(small_trace_file, *LOW, "cache.ratio=0.125")
    assert found.pool_bytes == (EXPERT,) * 4 + (EXPERT,) * 4


def test_low_copies_get_no_more_than_all_of_them(small_trace_file: Path) -> None:
    """0.75 of 14 slots would hold 42 low copies of a layer's 16; they have 4 slots' bytes, the others 10."""
    found = budget(small_trace_file, *LOW, "policy.low.share=0.75", "cache.ratio=0.875")
    assert found.pool_bytes == (10 * EXPERT,) * 4 + (4 * EXPERT,) * 4


def test_staging_slots_have_the_size_of_the_larger_copy(small_trace_file: Path) -> None:
    found = budget(small_trace_file, *LOW, "cache.ratio=0.5")
    assert found.staging_bytes == found.staging_slots * EXPERT


def test_a_policy_sizes_the_layers_out_of_the_same_bytes(small_trace_file: Path) -> None:
    """0.3 of 16 is 4 slots a layer, 16 in all."""
    sizing = "+policy.sizing={_target_: tests.doubles.Given, sizes: [2, 3, 5, 6]}"
    made = scenario(small_trace_file, "cache.ratio=0.3", sizing)
    assert made.budget.pool_bytes == tuple(n * EXPERT for n in (2, 3, 5, 6))
    residency = made.offloader.residency
    assert residency.capacity_bytes == list(made.budget.pool_bytes)
    chosen = made.offloader.policies.sizing
    assert isinstance(chosen, Given)
    assert chosen.asked == [16]
    with_bytes = scenario(small_trace_file, f"cache.bytes={18 * EXPERT + 5}", sizing)
    assert with_bytes.budget.pool_bytes == made.budget.pool_bytes
    assert with_bytes.offloader.policies.sizing.asked == [18]  # type: ignore[union-attr]


def test_layers_of_several_sizes_are_counted_by_the_largest(small_trace_file: Path) -> None:
    """16 bits for two layers and 8 for the others; 4 slots a layer are 24 EXPERT / 2 bytes in all."""
    bits = "+model.expert_bits_by_layer=[16, 8, 16, 8, 16, 8, 16, 8]"
    sizing = "+policy.sizing={_target_: tests.doubles.Given, sizes: [2, 2, 4, 4]}"
    made = scenario(small_trace_file, "cache.ratio=0.25", bits, sizing)
    assert made.budget.pool_bytes == tuple(n * EXPERT // 2 for n in (4, 2, 8, 4))
    assert made.offloader.policies.sizing.asked == [12]  # type: ignore[union-attr]


def _sizes(text: str) -> str:
    return f"+policy.sizing={{_target_: tests.doubles.Given, sizes: {text}}}"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("+policy.group_layers=2",), "policy.group_layers = 2: must be null with policy.scope = layer"),
        (("policy.scope=group", "+policy.group_layers=0"), "policy.group_layers = 0: must be a whole"),
        ((_sizes("[4, 4, 4]"),), "Given.slots: 3 numbers: must be 4, one a layer"),
        ((_sizes("[4, 4, 4, 5]"),), "Given.slots: 17 slots: must be at most 16 in all"),
        ((_sizes("[4, 4, 4, 2.5]"),), r"sizing.sizes = \[4, 4, 4, 2.5\]: must be a list of ints"),
        ((_sizes("[-1, 4, 4, 4]"),), "Given.slots: -1 for layer 0: must be a whole number"),
        ((_sizes("[4, 4, 4, 4]"), "policy.scope=global"), "policy.sizing: must be left out with policy.sc"),
        ((_sizes("[4, 4, 4, 4]"), *LOW), "policy.sizing: must be left out with policy.low"),
        (
            (_sizes("[4, 4, 4, 4]"), "machine=rtx4090_x4"),
            "policy.sizing: must be left out where engine.split = expert deals a layer out",
        ),
        ((_sizes("[4, 4, 4, 4]"), "cache.joint_bytes=1e9"), "policy.sizing: must be left out with cache.j"),
        ((*LOW, "cache.joint_bytes=1e9"), "policy.low: must be left out with cache.joint_bytes"),
        (LOW[:1], "policy.low: must be left out without policy.routing"),
        ((*LOW, "policy.low.bits=16"), "policy.low.bits = 16: must be < 16.*, the bits a weight"),
        ((*LOW, "policy.low.bits=0"), r"policy.low.bits = 0: must be a number in \(0, 32\]"),
        ((*LOW, "policy.low.share=1.5"), r"policy.low.share = 1.5: must be a number in \[0, 1\]"),
        (("+policy.low={bits: 4}", LOW[1]), "policy.low.share: missing, must be given"),
        ((*LOW, "+policy.low.shares=1"), "policy.low.shares: unknown key; did you mean 'share'"),
        (
            (*LOW, "machine.cpu.memory_bytes=2500000", "machine.storage=null"),  # one copy is 2359296
            r"not all experts are in memory: .* of 0.002949 GB in both precisions \(policy.low\)",
        ),
        ((*LOW, "machine.cpu.memory_bytes=1000"), r"a layer's experts in both precisions \(policy.low\)"),
    ],
)  # fmt: skip
def test_what_pools_cannot_have_is_refused(
    overrides: tuple[str, ...], words: str, small_trace_file: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        budget(small_trace_file, *overrides)


# -- insertion caps --------------------------------------------------------------------------------


def planned(cache: CachePolicy, cap: int | None, slots: int, *experts: int) -> LayerPlan:
    """Return the plan of the first event, which uses ``experts`` of 8."""
    residency = Residency(KeySpace(1, 8), [1], [0], [slots])
    policies = PolicySet([cache], insert_cap=cap)
    made = Offloader(residency, policies, ConstantCosts(), staging_slots=4)
    made.begin_step(StepInfo(0, Phase.DECODE, 1))
    return made.plan_layer(LayerRouting(0, experts, [1] * len(experts)), 0)


@pytest.mark.parametrize(
    ("cap", "loads", "bypasses"),
    [(None, [5, 2, 7], []), (3, [5, 2, 7], []), (2, [5, 2], [7]), (0, [], [5, 2, 7])],
)
def test_the_first_misses_of_an_event_enter_up_to_the_cap(
    cap: int | None, loads: list[int], bypasses: list[int]
) -> None:
    plan = planned(Preloaded([1]), cap, 8, 5, 1, 2, 7)
    assert (list(plan.resident), list(plan.loads), list(plan.bypasses)) == ([1], loads, bypasses)


def test_a_cap_bounds_the_victims_too() -> None:
    plan = planned(Preloaded([0, 3, 4]), 1, 3, 5, 2)
    assert (list(plan.loads), list(plan.evicts), list(plan.bypasses)) == ([5], [0], [2])


def test_of_those_that_run_staged_only_the_capped_may_stay() -> None:
    """One slot is free: 5 is loaded into it; 2 may stay after the event, 7 may not."""
    plan = planned(LFU(), 2, 1, 5, 2, 7)
    assert (list(plan.loads), list(plan.bypasses), plan.num_held) == ([5], [2, 7], 1)


def test_a_configuration_caps_insertions(small_trace_file: Path) -> None:
    made = scenario(small_trace_file, "+policy.insert_cap=1")
    assert made.offloader.policies.insert_cap == 1
    plans = [
        made.offloader.plan_layer(routing, 0)
        for step in list(made.workload.steps())[:1]
        for routing in made.workload.routings(step)
    ]
    assert [len(plan.loads) for plan in plans] == [1] * 4
    assert all(len(plan.bypasses) == len(plan.routing.experts) - 1 for plan in plans)
    assert np.all([isinstance(cache, LRU) for cache in made.offloader.policies.caches])
