"""Random and Latin hypercube designs: where points lie, that none comes twice, what a seed fixes."""

from __future__ import annotations

from collections import Counter
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.sweeps.designs import distinct_levels, strata_edges
from sim.sweeps.space import Interval
from sim.types import ConfigError
from tests.searching import points, search, texts, values

KINDS = ("random", "lhs")
RATIO, SPEED = "cache.ratio=interval(0.05,0.5)", "link=tag(log,interval(1e9,1e11))"


def column(key: str, arguments: list[str], **asked: object) -> list[float]:
    return [values(point)[key] for point in points(arguments, **asked)]


@given(
    st.floats(-1e6, 1e6),
    st.floats(1e-3, 1e6),
    st.booleans(),
    st.integers(1, 300),
    st.integers(0, 9),
)
@settings(max_examples=80, deadline=None)
def test_a_latin_hypercube_has_one_point_in_each_slice_of_an_interval(
    low: float, width: float, log: bool, number: int, seed: int
) -> None:
    low = abs(low) + 1e-3 if log else low
    word = f"interval({low!r},{low + width!r})"
    word = f"tag(log,{word})" if log else word
    numbers = column("x", [f"x={word}", "y=1,2"], search="lhs", points=number, seed=seed)
    edges = strata_edges(Interval(low, low + width, log), number)
    slices = np.searchsorted(edges, numbers, side="right") - 1
    assert sorted(slices.tolist()) == list(range(number))


def test_slices_of_a_logarithmic_interval_are_equal_as_ratios() -> None:
    edges = strata_edges(Interval(1.0, 1e4, log=True), 8)
    assert np.allclose(np.diff(np.log10(edges)), 0.5)
    assert np.allclose(np.diff(strata_edges(Interval(1.0, 5.0), 8)), 0.5)


@given(st.integers(1, 12), st.integers(1, 60), st.integers(0, 9), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_latin_hypercube_has_each_value_of_a_choice_equally_often(
    size: int, number: int, seed: int, beside_an_interval: bool
) -> None:
    other = "x=interval(0,1)" if beside_an_interval else "x=range(1000)"
    arguments = [f"n=range({size + 1})", f"m=int(interval(1,{size + 1}))", other]
    batch = points(arguments, search="lhs", points=number, seed=seed)
    for key in ("n", "m"):
        often = Counter(values(point)[key] for point in batch)
        counts = [*often.values(), *([0] * (size + 1 - len(often)))]
        assert max(counts) - min(counts) <= 1


@given(
    st.lists(st.integers(2, 6), min_size=1, max_size=4),
    st.integers(0, 9),
    st.floats(0, 1),
    st.data(),
)
@settings(max_examples=80, deadline=None)
def test_levels_are_balanced_and_no_point_comes_twice(
    sizes: list[int], seed: int, share: float, data: st.DataObject
) -> None:
    number = max(1, round(share * prod(sizes)))
    rngs = [np.random.default_rng([seed, i]) for i in range(len(sizes) + 1)]
    columns = distinct_levels(sizes, number, rngs[:-1], rngs[-1])
    assert len(set(zip(*(c.tolist() for c in columns), strict=True))) == number
    for size, levels in zip(sizes, columns, strict=True):
        often = np.bincount(levels, minlength=size)
        assert len(often) == size
        assert often.max() - often.min() <= 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [1, 7, 24, 47, 48])
def test_discrete_points_are_all_different_up_to_the_last_one(kind: str, number: int) -> None:
    arguments = ["policy=lru,lfu,saem", "n=range(4)", "m=int(interval(1,4))"]
    batch = points(arguments, search=kind, points=number)
    assert len({tuple(texts(point)) for point in batch}) == number


@pytest.mark.parametrize("kind", KINDS)
def test_more_points_than_there_are_is_a_mistake(kind: str) -> None:
    with pytest.raises(
        ConfigError, match=r"sweep\.points = 13: there are only 12 different points"
    ):
        search(["policy=lru,lfu,saem,lru", "n=range(4)"], search=kind, points=13)


@pytest.mark.parametrize("kind", KINDS)
def test_most_of_a_skewed_space_of_whole_numbers_is_found(kind: str) -> None:
    numbers = column("n", ["n=tag(log,int(interval(1,2000)))"], search=kind, points=1999)
    assert len(set(numbers)) == 1999
    assert set(numbers) <= set(range(1, 2001))


@pytest.mark.parametrize("kind", KINDS)
def test_logarithmic_whole_numbers_have_as_many_points_in_each_decade(kind: str) -> None:
    arguments = ["n=tag(log,int(interval(1,1000000)))", "x=interval(0,1)"]
    numbers = np.array(column("n", arguments, search=kind, points=600))
    assert numbers.min() >= 1
    assert numbers.max() <= 1_000_000
    decades = np.bincount(np.log10(numbers).astype(int).clip(0, 5), minlength=6)
    assert np.all(abs(decades - 100) < 45)


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_same_points_and_another_seed_others(kind: str) -> None:
    arguments = [RATIO, "policy=lru,lfu", "n=range(9)"]
    first = points(arguments, search=kind, points=9, seed=4)
    assert points(arguments, search=kind, points=9, seed=4) == first
    assert points(arguments, search=kind, points=9, seed=5) != first


@pytest.mark.parametrize("kind", KINDS)
def test_a_further_dimension_leaves_the_others_as_they_are(kind: str) -> None:
    few, more = [RATIO, "policy=lru,lfu,saem"], [SPEED, RATIO, "n=1,2", "policy=lru,lfu,saem"]
    for key in ("cache.ratio", "policy"):
        asked = {"search": kind, "points": 20}
        assert column(key, few, **asked) == column(key, more, **asked)


@pytest.mark.parametrize("kind", KINDS)
def test_dimensions_are_independent_of_each_other(kind: str) -> None:
    arguments = ["a=interval(0,1)", "b=interval(0,1)", "c=int(interval(1,1000))"]
    batch = points(arguments, search=kind, points=400)
    table = np.array([list(values(point).values()) for point in batch], dtype=float)
    assert np.all(abs(np.corrcoef(table.T) - np.eye(3)) < 0.2)


def test_random_numbers_fill_their_interval_evenly() -> None:
    numbers = np.array(column("link", [SPEED], search="random", points=900))
    assert np.all(abs(np.histogram(np.log10(numbers), bins=3, range=(9, 11))[0] - 300) < 75)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_short_within_their_interval_and_read_back_by_hydra(kind: str) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    for point in points([RATIO, f"+{SPEED}"], search=kind, points=50):
        ratio, _ = point
        assert 0.05 <= ratio.value < 0.5
        assert float(f"{ratio.value:.6g}") == ratio.value
        for setting in point:
            override = parser.parse_override(setting.text)
            assert (override.key_or_group, override.value()) == (setting.key, setting.value)


def test_a_narrow_interval_gets_the_digits_it_needs() -> None:
    numbers = column("x", ["x=interval(1,1.00001)"], search="random", points=200)
    assert len(set(numbers)) == 200
    assert all(1 <= number < 1.00001 for number in numbers)


@pytest.mark.parametrize("kind", KINDS)
def test_settings_keep_the_order_of_the_command_line(kind: str) -> None:
    arguments = ["seed=1", RATIO, "workload.batch_size=2", "policy=lru,lfu", "machine=rtx4090"]
    found = search(arguments, {"model": "x"}, search=kind, points=3)
    (batch,) = found.batches()
    assert found.fixed == ("model=x", "seed=1")
    keys = ["cache.ratio", "workload.batch_size", "policy", "machine"]
    assert [[setting.key for setting in point] for point in batch] == [keys] * 3
    assert found.num_points == 3
