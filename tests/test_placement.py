"""Rules for one missing expert at a time, and the division of a layer's, against all divisions there are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from sim.policies.placement import (
    BypassMisses,
    FewTokensOnCPU,
    FiddlerMax,
    InSituCPU,
    Prices,
    least_maximum,
)
from sim.types import Phase, Service
from tests.placing import services, view_of
from tests.strategies import ConstantCosts

LOAD, BYPASS, CPU = Service.LOAD, Service.BYPASS, Service.CPU


@pytest.mark.parametrize(("keep", "on_gpu"), [(True, LOAD), (False, BYPASS)])
def test_in_situ_judges_each_expert_alone(keep: bool, on_gpu: Service) -> None:
    view = view_of(ConstantCosts(cpu=40, load=100, gpu=20))  # 40 a token against 120
    found = services(InSituCPU(keep=keep), view, {0: 1, 1: 9, 2: 2, 3: 3})
    assert found == [CPU, on_gpu, CPU, on_gpu]


def test_in_situ_with_constants_asks_no_costs() -> None:
    view = view_of(ConstantCosts(cpu=10**9))
    assert services(InSituCPU(cpu_token_ns=10, load_ns=25), view, {0: 2, 1: 3}) == [CPU, LOAD]


def test_prices_hold_for_each_layer_and_token_count() -> None:
    prices, view = Prices(), view_of(ConstantCosts(cpu=40, load=100, gpu=20, gpu_token=3))
    assert prices.of(0, 1, view) == (40, 123)
    assert prices.of(0, 2, view) == (80, 126)
    assert prices.of(9, 2, view) == (80, 126)


@pytest.mark.parametrize(
    ("constants", "message"),
    [((-1, 5), "cpu_token_ns = -1"), ((5, -2), "load_ns = -2"), ((0, 5), "load_ns = 5")],
)
def test_prices_refuse_half_a_price(constants: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Prices(*constants)


def test_few_tokens_go_to_the_cpu_whatever_it_costs() -> None:
    view = view_of(ConstantCosts(cpu=10**9))
    assert services(FewTokensOnCPU(2), view, {0: 1, 1: 2, 2: 3}) == [CPU, CPU, BYPASS]
    assert services(FewTokensOnCPU(0), view, {0: 1}) == [BYPASS]
    with pytest.raises(ValueError, match="max_tokens = -1: must be >= 0"):
        FewTokensOnCPU(-1)


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
def test_bypass_keeps_nothing(phase: Phase) -> None:
    assert services(BypassMisses(), view_of(phase=phase), {0: 1, 1: 2}) == [BYPASS, BYPASS]


# -- the smallest maximum --------------------------------------------------------------------------


def maximum(prices: Sequence[tuple[int, int]], on_cpu: Sequence[bool]) -> int:
    """Return when the busier side ends."""
    pairs = list(zip(prices, on_cpu, strict=True))
    return max(sum(p[0] for p, cpu in pairs if cpu), sum(p[1] for p, cpu in pairs if not cpu))


def least(prices: Sequence[tuple[int, int]]) -> int:
    """Return the smallest maximum of all 2^n divisions."""
    return min(maximum(prices, cpu) for cpu in product((False, True), repeat=len(prices)))


@pytest.mark.parametrize("size", range(9))
def test_no_division_of_up_to_8_experts_ends_sooner(size: int) -> None:
    rng = np.random.default_rng(size)
    for _ in range(60):
        prices = [(int(c), int(g)) for c, g in rng.integers(1, 40, (size, 2))]
        assert maximum(prices, least_maximum(prices)) == least(prices)


def test_the_first_of_the_row_alone_would_not_do() -> None:
    # By falling CPU work the GPU could take none (13 on the CPU), the first (8 and 9), two (4 and 10 or 14)
    # or all (16): 9 at best. With the second and third there it ends at 1 + 6, the CPU at 5.
    prices = [(5, 9), (4, 1), (4, 6)]
    assert least_maximum(prices) == [True, False, False]
    assert maximum(prices, least_maximum(prices)) == 7


@pytest.mark.parametrize("size", [20, 64])
def test_experts_of_one_price_on_the_gpu_are_divided_exactly_at_any_number(size: int) -> None:
    rng = np.random.default_rng(size)
    prices = [(int(cpu), 30) for cpu in rng.integers(1, 60, size)]
    # With one GPU price only the number there counts, and then the CPU should do the cheapest.
    cheap = sorted(cpu for cpu, _ in prices)
    best = min(max(sum(cheap[: size - n]), 30 * n) for n in range(size + 1))
    assert maximum(prices, least_maximum(prices)) == best


def test_a_long_row_of_unequal_experts_is_no_worse_than_the_row_and_close_to_half() -> None:
    rng = np.random.default_rng(3)
    prices = [(int(c), int(g)) for c, g in rng.integers(20, 40, (40, 2))]
    found = maximum(prices, least_maximum(prices))
    # No division beats all work at the cheaper side, shared evenly by the two sides.
    assert found >= sum(map(min, prices)) / 2
    assert found <= 1.2 * sum(map(min, prices)) / 2 + 40


def test_fiddler_max_shares_what_the_sum_gives_to_one_side() -> None:
    view = view_of(ConstantCosts(cpu=40, load=100, gpu=20))  # 40 against 120 each
    work = dict.fromkeys(range(8), 1)
    assert services(InSituCPU(), view, work) == [CPU] * 8  # the CPU ends at 320
    # Two on the GPU end at 240, six on the CPU at 240.
    found = services(FiddlerMax(), view, work)
    assert (found.count(CPU), found.count(BYPASS)) == (6, 2)
    assert services(FiddlerMax(), view, {}.fromkeys([0], 1)) == [CPU]
