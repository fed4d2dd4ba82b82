"""Interpolation in measured points: exact at each point, and said plainly how it goes on beyond the last.

A grid is rows (x, y, value) that ascend by x, then y; the ys of one x need not be those of another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import groupby

Value = float | Fraction
Point = tuple[float, Value]
Curve = Callable[[Sequence[Point], float], Value]


def linear(points: Sequence[Point], x: float) -> Fraction:
    """Return the value at ``x`` on straight lines between points that ascend by x; flat outside."""
    (low_x, low), (high_x, high) = _around(points, x)
    if low_x == high_x:
        return Fraction(low)
    share = Fraction(x - low_x) / Fraction(high_x - low_x)
    return Fraction(low) + (Fraction(high) - Fraction(low)) * share


def proportional(points: Sequence[Point], x: float) -> Fraction:
    """As :func:`linear`, but beyond the last point the value grows in proportion to ``x``."""
    last_x, last = points[-1]
    return Fraction(last) * Fraction(x) / Fraction(last_x) if x > last_x else linear(points, x)


def log_log(points: Sequence[Point], x: float) -> Value:
    """Return the value at ``x`` on straight lines in logarithms of x and value; flat outside."""
    (low_x, low), (high_x, high) = _around(points, x)
    if low_x == high_x or x in (low_x, high_x):
        return high if x == high_x else low
    share = math.log(x / low_x) / math.log(high_x / low_x)
    return math.exp(math.log(low) + math.log(high / low) * share)


def on_grid(rows: Sequence[Sequence[float]], x: float, y: float, curve: Curve) -> Value:
    """Return the value at (x, y): ``curve`` along y in each x, then ``curve`` along x."""
    by_x = groupby(rows, key=lambda row: row[0])
    return curve([(at, curve([(r[1], r[2]) for r in group], y)) for at, group in by_x], x)


def _around(points: Sequence[Point], x: float) -> tuple[Point, Point]:
    """Return the points before and after ``x``; twice the same at or beyond an end."""
    after = next((i for i, point in enumerate(points) if point[0] >= x), len(points) - 1)
    if after == 0 or points[after][0] < x:
        return points[after], points[after]
    return points[after - 1], points[after]
