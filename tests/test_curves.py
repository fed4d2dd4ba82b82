"""Interpolation: exact at the points, plain between them, and as promised beyond the last."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwmodels.curves import linear, log_log, on_grid, proportional
from hwmodels.machine import Storage

POINTS = [(1.0, 10.0), (3.0, 20.0), (4.0, 5.0)]
CURVE = ((2**16, 1, 500), (2**16, 4, 1000), (2**18, 1, 1000), (2**18, 16, 4000), (2**24, 1, 6000))


def test_straight_lines_are_flat_outside() -> None:
    found = [linear(POINTS, x) for x in (0, 1, 2, 3, 3.5, 4, 9)]
    assert found == [10, 10, 15, 20, 12.5, 5, 5]


def test_proportional_beyond_the_last_point() -> None:
    assert [proportional(POINTS, x) for x in (0, 2, 4, 6)] == [10, 15, 5, Fraction(15, 2)]


def test_straight_lines_in_logarithms() -> None:
    found = [log_log([(1.0, 10.0), (100.0, 1000.0)], x) for x in (0.5, 1, 10, 100, 200)]
    assert found == pytest.approx([10, 10, 100, 1000, 1000])


@pytest.mark.parametrize(
    ("x", "y", "value"), [(0, 0, 1), (0, 1, 2), (0, 2, 3), (4, 9, 5), (2, 2, 4), (2, 0, 3)]
)
def test_a_grid_need_not_be_full(x: float, y: float, value: float) -> None:
    rows = [(0, 0, 1), (0, 2, 3), (4, 1, 5)]
    assert on_grid(rows, x, y, linear) == value


@pytest.mark.parametrize("row", CURVE)
def test_storage_gives_its_measured_rates(row: tuple[int, int, int]) -> None:
    block, depth, rate = row
    assert Storage("disk", 1, 0, CURVE).bytes_per_s(block, depth) == rate


def test_storage_between_and_beyond_its_rows() -> None:
    disk = Storage("disk", 1, 0, CURVE)
    assert disk.bytes_per_s(2**17, 1) == 707  # sqrt(500 * 1000)
    assert disk.bytes_per_s(2**18, 4) == 2000  # half-way in logarithms
    assert disk.bytes_per_s(2**30, 64) == 6000
    assert disk.bytes_per_s(512, 1) == 500
    assert disk.bytes_per_s(2**16, 999) == 1000


@given(st.integers(1, 2**30), st.integers(1, 512))
def test_storage_stays_within_its_rows(block: int, depth: int) -> None:
    rates = [rate for _, _, rate in CURVE]
    found = Storage("disk", 1, 0, CURVE).bytes_per_s(block, depth)
    assert isinstance(found, int)
    assert min(rates) <= found <= max(rates)
    assert found <= Storage("disk", 1, 0, CURVE).bytes_per_s(block, depth + 1)
