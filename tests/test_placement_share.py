"""Rules that load a share of the misses: FreeToken's and llama.cpp's."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from sim.policies.share import CPUShare, FetchShare
from sim.types import Phase, Service, View
from tests.placing import event, services, view_of
from tests.strategies import ConstantCosts

LOAD, BYPASS, CPU = Service.LOAD, Service.BYPASS, Service.CPU


def ones(*keys: int) -> Mapping[int, int]:
    return dict.fromkeys(keys, 1)


def loaded(policy: FetchShare | CPUShare, view: View, number: int) -> int:
    """Return how many of so many misses are loaded."""
    return services(policy, view, ones(*range(number))).count(LOAD)


# -- FreeToken -------------------------------------------------------------------------------------


def test_the_share_is_the_ratio_of_the_rates() -> None:
    view = view_of(ConstantCosts(cpu=30, load=100))  # q* = .3: loaded a, others b: max(.7 a, .3 b)
    # 1: max(0, .3) beats .7; 2: .6 equals max(.7, .3)? .6 < .7; 3: .9 > max(.7, .6); 4: max(.7, .9) = .9
    # against max(1.4, .6); 5: 1.2 against 1.4 for two; 8: two give max(1.4, 1.8), three max(2.1, 1.5).
    assert [loaded(FetchShare(), view, n) for n in (1, 2, 3, 4, 5, 8)] == [0, 0, 1, 1, 1, 2]


def test_rates_that_do_not_hinder_each_other_share_by_their_sum() -> None:
    view = view_of(ConstantCosts(cpu=25, load=75))  # q* = 1/3 contended, 1/4 if not
    assert loaded(FetchShare(contended=True), view, 6) == 2
    assert loaded(FetchShare(contended=False), view, 8) == 2


@pytest.mark.parametrize(("cpu", "expected"), [(51, 4), (50, 4), (49, 2)])
def test_a_cpu_that_is_not_twice_as_fast_as_the_link_does_nothing(cpu: int, expected: int) -> None:
    assert loaded(FetchShare(), view_of(ConstantCosts(cpu=cpu, load=100)), 4) == expected


def test_those_used_last_are_loaded() -> None:
    policy, view = FetchShare(fetch_cap=1), view_of()
    for keys in (ones(0, 1), ones(2), ones(1)):  # 0 at event 0, 2 at 1, 1 at 2
        services(policy, view, keys)
    assert services(policy, view, ones(0, 2, 1)) == [CPU, CPU, LOAD]
    assert services(policy, view, ones(0, 2)) == [LOAD, CPU]  # both at event 3: the first
    policy.observe(event(view, ones(2)), view)  # a hit counts as a use
    assert services(policy, view, ones(0, 2)) == [CPU, LOAD]


def test_the_event_under_way_is_no_past_use() -> None:
    policy, view = FetchShare(fetch_cap=1), view_of()
    services(policy, view, ones(3))
    assert services(policy, view, ones(0, 1, 3)) == [CPU, CPU, LOAD]


def test_a_cap_replaces_the_share() -> None:
    view = view_of(ConstantCosts(cpu=1, load=100))
    assert loaded(FetchShare(), view, 8) == 0
    assert loaded(FetchShare(fetch_cap=1), view, 8) == 1
    assert loaded(FetchShare(fetch_cap=9), view, 8) == 8


def test_prompts_are_streamed() -> None:
    view = view_of(phase=Phase.PREFILL, tokens=9)
    assert services(FetchShare(), view, ones(0, 1)) == [BYPASS, BYPASS]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threshold": -1.0}, "threshold = -1.0: must be >= 0"),
        ({"threshold": 0.5}, "threshold = 0.5: must be >= 1 with contended"),
        ({"fetch_cap": -1}, "fetch_cap = -1: must be >= 0"),
    ],
)
def test_fetch_share_refuses_bad_parameters(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FetchShare(**arguments)  # type: ignore[arg-type]


# -- llama.cpp -------------------------------------------------------------------------------------


def fill(view: View, number: int) -> None:
    """Take room for so many more experts of layer 7."""
    taken = [key for key in view.keys.layer_keys(7) if view.is_resident(key)]
    for key in view.keys.layer_keys(7)[len(taken) : len(taken) + number]:
        view._residency.reserve(key)
        view._residency.complete_at_once([key])


def test_all_misses_are_loaded_until_the_cache_is_full() -> None:
    policy, view = CPUShare(share=1.0), view_of(slots=4)
    assert services(policy, view, ones(0, 1)) == [LOAD, LOAD]  # 4 free
    fill(view, 2)
    assert services(policy, view, ones(2, 3)) == [LOAD, LOAD]  # 2 free
    fill(view, 2)
    assert services(policy, view, ones(4)) == [LOAD]  # none free, for the first time
    assert services(policy, view, ones(5)) == [CPU]
    assert services(policy, view, ones(6, 7)) == [CPU, CPU]


def test_the_share_is_met_over_events() -> None:
    policy, view = CPUShare(share=0.4), view_of(slots=0)
    services(policy, view, ones(0))  # finds out that nothing is free
    found = [services(policy, view, ones(0, 1)).count(CPU) for _ in range(10)]
    assert found == [0, 1, 1, 1, 1, 0, 1, 1, 1, 1]  # of .8, 1.6, 2.4, 3.2, 4.0, 4.8, ... experts
    assert services(policy, view, ones(0, 1, 2)) == [LOAD, LOAD, CPU]  # 9.2


@pytest.mark.parametrize(("share", "service"), [(0.0, LOAD), (1.0, CPU)])
def test_none_or_all(share: float, service: Service) -> None:
    policy, view = CPUShare(share), view_of(slots=0)
    services(policy, view, ones(0))
    for _ in range(20):
        assert services(policy, view, ones(0, 1, 2)) == [service] * 3


def test_steps_of_many_tokens_leave_the_cache_alone() -> None:
    assert services(CPUShare(), view_of(tokens=32), ones(0)) == [LOAD]
    assert services(CPUShare(), view_of(tokens=33), ones(0)) == [BYPASS]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((1.5, 32), r"share = 1.5: must be in \[0, 1\]"), ((0.5, 0), "max_tokens = 0: must be >= 1")],
)
def test_cpu_share_refuses_bad_parameters(arguments: tuple[float, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CPUShare(*arguments)
