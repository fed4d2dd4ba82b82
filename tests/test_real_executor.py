"""The executor: every policy decides for real what it decides without a clock, and computes the same.

What each layer computes and who has a slot after it is checked in all these runs (tests/real_runs.py).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from real.device import open_device
from real.rig import build_executor, real_scenario
from sim.types import ConfigError, LayerPlan, LayerRouting
from tests.configs import options
from tests.real_cases import (
    EXPERTS,
    LAYERS,
    MIXED,
    ONE,
    TIERS,
    TOP_K,
    config_of,
    reference,
    store_of,
    tiny_trace,
)
from tests.real_events import check_events
from tests.real_runs import Expected, check_same, expected, play, ram_run

WORK = {"one": ONE, "mixed": MIXED}
every_policy = pytest.mark.parametrize("policy", options("policy"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stores")


@cache
def case(policy: str, work: str, tier: str) -> tuple[dict[str, Any], Expected]:
    """Return a configuration and what it must come to; skips what is refused for a good reason."""
    config = config_of(policy, *WORK[work], tier=tier)
    if tier == "storage" and "placement" in config["policy"]:
        with pytest.raises(ConfigError, match="so that a missing expert can only be loaded") as no:
            expected(config)
        pytest.skip(str(no.value))
    return config, expected(config)


@every_policy
@pytest.mark.parametrize(("tier", "work"), [("ram", "mixed"), ("storage", "one"), ("link", "one")])
def test_in_lockstep_every_policy_decides_as_without_a_clock(
    policy: str, tier: str, work: str, folder: Path
) -> None:
    config, wanted = case(policy, work, tier)
    check_same(play(config, tier, folder, lockstep=True), wanted)


@every_policy
def test_in_time_every_policy_computes_the_same_and_counts_so_if_nothing_comes_ahead(
    policy: str,
) -> None:
    config, wanted = case(policy, "mixed", "ram")
    run = play(config, events=True)
    check_events(run)
    assert run.num_layers_checked == len(wanted.plans)
    if not wanted.has_prefetches:
        check_same(run, wanted)


# -- what the laws above might not meet ------------------------------------------------------------------


@pytest.mark.parametrize("lockstep", [True, False])
def test_plans_are_made_at_time_zero_in_lockstep_only(lockstep: bool) -> None:
    config, times = config_of("lru", *ONE), list[int]()
    run = ram_run(config, lockstep=lockstep)
    plan_layer = run.scenario.offloader.plan_layer

    def planned(routing: LayerRouting, now_ns: int) -> LayerPlan:
        times.append(now_ns)
        return plan_layer(routing, now_ns)

    run.scenario.offloader.plan_layer = planned  # type: ignore[method-assign]
    run.play()
    assert times == sorted(times)
    assert (max(times) == 0) is lockstep


def test_runs_of_the_laws_above_have_all_that_plans_can_hold() -> None:
    """Else they would hold of nothing."""
    found = [
        plan
        for policy in ("lfu", "prefetch_perfect", "ktransformers_deferral", "saem", "hobbit")
        for plan in case(policy, "mixed", "ram")[1].plans
    ]
    names = ("resident", "evicts", "loads", "bypasses", "on_cpu", "deferred", "prefetches")
    assert all(any(plan[name] for plan in found) for name in (*names, "admissions", "packed"))
    low = range(LAYERS * EXPERTS, 2 * LAYERS * EXPERTS)
    assert any(key in low for plan in found for key in plan["experts"])
    assert {max(plan["num_tokens"]) > 1 for plan in found} == {True, False}


@pytest.mark.parametrize("policy", ["lru", "max_rank"])
def test_weights_of_the_model_count_unless_the_policy_has_its_own(policy: str) -> None:
    run = ram_run(config_of(policy, *ONE), watch=False)
    compute, plans, exact = run.executor.run_layer, list[LayerPlan](), reference(False)
    plan_layer, seen = run.scenario.offloader.plan_layer, set[bool]()

    def planned(routing: LayerRouting, now_ns: int) -> LayerPlan:
        plans.append(plan_layer(routing, now_ns))
        return plans[-1]

    def with_weights(routing: LayerRouting, hidden: Tensor) -> Tensor:
        given = torch.rand(len(hidden), TOP_K)
        found, plan = compute(routing, hidden, given), plans[-1]
        is_own = plan.routing is not routing and plan.routing.topk_weights is not None
        by_slot = None if is_own else given.numpy()
        wanted = exact.output(plan.routing, hidden, plan.routing.experts, LAYERS, by_slot)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=1e-9)
        seen.add(is_own)
        return found

    run.scenario.offloader.plan_layer = planned  # type: ignore[method-assign]
    run.executor.run_layer = with_weights  # type: ignore[method-assign, assignment]
    run.play()
    assert seen == ({False} if policy == "lru" else {True, False})


def test_what_a_warm_up_has_left_is_there() -> None:
    config = config_of("lru", "workload.requests=[5,7]", "workload.warm_up=[3,5]")
    wanted = expected(config)
    assert wanted.plans[0]["resident"], "it begins warm"
    check_same(play(config, lockstep=True), wanted)
    check_same(play(config), wanted)


def test_an_executor_refuses_placement_over_a_file(folder: Path) -> None:
    config = config_of("saem", *ONE)
    scenario, device = real_scenario(config, tiny_trace()), open_device("cpu")
    with (
        store_of(config, "storage", folder) as store,
        pytest.raises(ConfigError, match=r"policy\.placement: .* only in host memory"),
    ):
        build_executor(scenario, store, device, TIERS["storage"])
    assert device.held_bytes == 0
