"""HybriMoE's and DALI's division of a layer, hits included; expert 0 is the first of layer 0."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from sim.policies.hybrid import HSS, GreedyAssignment
from sim.types import Phase, Service
from tests.placing import services, view_of
from tests.strategies import ConstantCosts

LOAD, BYPASS, CPU, STAY = Service.LOAD, Service.BYPASS, Service.CPU, Service.STAY


# -- HybriMoE --------------------------------------------------------------------------------------


def test_hss_in_the_units_of_the_code() -> None:
    """Hits 0 (3 tokens) and 1 (1), misses 2 (2) and 3 (1).

    GPU 0 ends at .5, CPU 3 at 1.79: GPU. GPU 1 at 1.0 against 1.79: GPU. GPU 2 after a copy that took
    .418 of its 1.0, at 1.5, against 1.79: GPU. GPU 3 at 2.0, its copy done at .836, against 1.79: CPU.
    """
    found = services(HSS(units=True), view_of(resident=[0, 1]), {0: 3, 1: 1, 2: 2, 3: 1})
    assert found == [STAY, STAY, LOAD, CPU]


def test_hss_waits_for_a_copy_only_as_long_as_the_gpu_has_nothing_to_do() -> None:
    # No hits. GPU 0 at .418 + .5 = .918 against .99 (CPU .2 + .79): GPU. GPU 1: its copy ends at .836,
    # before .918, so 1.418 against .99: CPU. GPU 2 would be 1.418 against 1.19: CPU again.
    found = services(HSS(units=True, cpu_unit=0.2), view_of(), {0: 1, 1: 1, 2: 1})
    assert found == [LOAD, CPU, CPU]
    # At .5 a token: .918 against 1.29: GPU; 1.418 against 1.29: CPU; then .5 more makes 1.79: GPU.
    found = services(HSS(units=True, cpu_unit=0.5), view_of(), {0: 1, 1: 1, 2: 1})
    assert found == [LOAD, LOAD, CPU]


def test_hss_gives_the_cpu_even_what_is_on_the_gpu() -> None:
    # Copies cost nothing here, the GPU 100 a kernel, the CPU 30 a token. Row: hit 1 (2 tokens), hit 0 (1).
    # GPU 1 at 100 against CPU 0 at 30: CPU. Then 100 against 30 + 60: CPU again.
    view = view_of(ConstantCosts(cpu=30, load=0, gpu=100), resident=[0, 1])
    assert services(HSS(), view, {0: 1, 1: 2}) == [CPU, CPU]
    view = view_of(ConstantCosts(cpu=80, load=0, gpu=100), resident=[0, 1])
    assert services(HSS(), view, {0: 1, 1: 2}) == [CPU, STAY]


def test_hss_on_costs_moves_nothing_that_the_cpu_does_sooner() -> None:
    # Hit 0: 10 against 40. Miss 1: copy ends at 100, GPU at 110, against 40 and then 80 for 2, 1.
    view = view_of(ConstantCosts(cpu=40, load=100, gpu=10), resident=[0])
    assert services(HSS(), view, {0: 1, 1: 1, 2: 1}) == [STAY, CPU, CPU]
    # With a third miss: 40, 80, then 110 against 120: loaded.
    assert services(HSS(), view, {0: 1, 1: 1, 2: 1, 3: 1}) == [STAY, LOAD, CPU, CPU]


def test_hss_runs_prompts_on_the_gpu_and_keeps_nothing_of_them() -> None:
    view = view_of(phase=Phase.PREFILL, tokens=9, resident=[0])
    assert services(HSS(units=True), view, {0: 9, 1: 9, 2: 1}) == [STAY, BYPASS, BYPASS]


def test_hss_knows_one_tokens_event_again() -> None:
    """The second of two like events is answered from memory; another number of hits is another event."""
    policy, view = HSS(), view_of(ConstantCosts(cpu=40, load=100, gpu=10), resident=[0, 5])
    for _ in range(2):
        assert services(policy, view, {1: 1, 0: 1, 2: 1, 3: 1}) == [LOAD, STAY, CPU, CPU]
        assert services(policy, view, {1: 1, 0: 1, 5: 1, 3: 1}) == [CPU, STAY, STAY, CPU]
    assert list(policy.place([], view)) == []


def test_hss_refuses_a_cpu_that_takes_no_time() -> None:
    with pytest.raises(ValueError, match=r"cpu_unit = 0.0: must be > 0"):
        HSS(units=True, cpu_unit=0.0)


# -- DALI ------------------------------------------------------------------------------------------


def test_dali_gives_the_next_largest_to_the_side_that_ends_sooner() -> None:
    # CPU 40 a token; GPU 10 for a hit, max(10, 100) for a miss. By tokens: 1 (3: 120 or 100), 2 (2: 80 or
    # 200 after 1), 0 (1, hit: 40 + 80 or 100 + 10), 3 (1: 120 or 210).
    view = view_of(ConstantCosts(cpu=40, load=100, gpu=10), resident=[0])
    assert services(GreedyAssignment(), view, {0: 1, 1: 3, 2: 2, 3: 1}) == [STAY, LOAD, CPU, CPU]


def test_dali_lets_the_cpu_have_a_hit_of_a_busy_gpu() -> None:
    # Both hits; the GPU takes 100 for either. 1: 100 against 160: GPU. 0: 200 against 80: CPU.
    view = view_of(ConstantCosts(cpu=80, load=0, gpu=100), resident=[0, 1])
    assert services(GreedyAssignment(), view, {0: 1, 1: 2}) == [CPU, STAY]


def test_dali_comes_near_the_best_division() -> None:
    """The paper's greedy reaches about 92 % of the optimum, and so must the reconstruction."""
    rng, ratios = np.random.default_rng(5), []
    costs = ConstantCosts(cpu=40, load=100, gpu=10)
    for _ in range(60):
        view = view_of(costs, tokens=16, resident=[0, 3, 5])
        counts = dict(enumerate(rng.integers(1, 9, 8).tolist()))
        on_cpu = [service == CPU for service in services(GreedyAssignment(), view, counts)]

        def ends(cpu: tuple[bool, ...] | list[bool], counts: dict[int, int] = counts) -> int:
            busy = [0, 0]
            for (key, tokens), there in zip(counts.items(), cpu, strict=True):
                busy[there] += 40 * tokens if there else 10 if key in (0, 3, 5) else 100
            return max(busy)

        best = min(map(ends, product((False, True), repeat=8)))
        ratios.append(best / ends(on_cpu))
    assert max(ratios) <= 1.0
    assert np.mean(ratios) == pytest.approx(0.92, abs=0.02)
