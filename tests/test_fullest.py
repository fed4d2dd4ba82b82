"""The mean of the fullest GPU's experts, against counting all ways by hand and against chance."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from hwmodels.fullest import fullest


@pytest.mark.parametrize(("num_experts", "num_gpus"), [(0, 2), (1, 4), (3, 2), (4, 3), (6, 2)])
def test_it_is_the_mean_over_all_ways(num_experts: int, num_gpus: int) -> None:
    ways = product(range(num_gpus), repeat=num_experts)
    most = [max((way.count(gpu) for gpu in way), default=0) for way in ways]
    assert fullest(num_experts, num_gpus) == pytest.approx(sum(most) / len(most))


def test_one_gpu_has_all_and_between_whole_numbers_it_is_linear() -> None:
    assert fullest(7.3, 1) == 7.3
    assert fullest(2.5, 2) == pytest.approx((1.5 + 2.25) / 2)


@pytest.mark.parametrize(("num_experts", "num_gpus"), [(40, 4), (100, 4), (300, 8), (65, 2)])
def test_many_experts_are_as_in_ten_thousand_draws(num_experts: int, num_gpus: int) -> None:
    rng = np.random.default_rng(7)
    draws = rng.multinomial(num_experts, [1 / num_gpus] * num_gpus, size=10_000)
    assert fullest(num_experts, num_gpus) == pytest.approx(draws.max(axis=1).mean(), rel=0.01)
