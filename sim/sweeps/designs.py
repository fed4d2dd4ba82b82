"""Points drawn from intervals and choices: at random, or as a Latin hypercube.

Each dimension draws from a generator of its own, seeded with its key, so that a further dimension leaves
the others as they are. Where all dimensions are discrete no point comes twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd, lcm, log, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.sweeps.grammar import PointSettings, Setting
from sim.sweeps.space import Axis, Interval, split, varying
from sim.types import ConfigError

Column = npt.NDArray[Any]
"""A dimension's place in each point, [points]: float64 values of an interval, else int64 levels."""

_ROUNDS = 20  # of draws, after which the points that are left are picked instead
_MANY = 1 << 22


class Design:
    """A sweep of so many points, spread over all dimensions.

    Parameters
    ----------
    axes
        What the command line says.
    kind
        random, or lhs: of ``points`` equal slices of an interval each has one point, and each value of a
        choice has as many points as any other, give or take one.
    points, seed
        How many, and of the draws.
    """

    def __init__(self, axes: Sequence[Axis], kind: str, points: int, seed: int) -> None:
        self.fixed, self._axes = split(axes)
        self.num_points = points
        self._kind = kind
        self._seed = seed
        self._dimensions = [Dimension(axis) for axis in varying(self._axes, kind)]
        sizes = [one.size for one in self._dimensions]
        total = prod(size or 1 for size in sizes)
        self._is_discrete = None not in sizes
        if self._is_discrete and points > total:
            raise ConfigError(f"sweep.points = {points}: there are only {total} different points")

    def batches(self) -> Iterator[list[PointSettings]]:
        """Yield all points in one list."""
        fixed = {axis.key: axis.settings * self.num_points for axis in self._axes if axis.is_fixed}
        drawn = {
            one.key: one.settings_at(column)
            for one, column in zip(self._dimensions, self._columns(), strict=True)
        }
        columns = fixed | drawn
        yield list(zip(*(columns[axis.key] for axis in self._axes), strict=True))

    def tell(self, values: Sequence[float | None]) -> None:
        """Learn nothing."""

    def _columns(self) -> list[Column]:
        """Return a column a dimension."""
        points, found = self.num_points, self._dimensions
        rngs = [generator(self._seed, one.key) for one in found]
        pairs = zip(found, rngs, strict=True)
        if self._is_discrete:
            sizes = [one.size or 0 for one in found]
            if self._kind == "random":
                return distinct_draws(found, points, rngs)
            if max(sizes) < points:  # no dimension alone tells the points apart
                return distinct_levels(sizes, points, rngs, generator(self._seed, "points"))
        if self._kind == "random":
            return [one.draw(points, rng) for one, rng in pairs]
        return [one.spread(points, rng, self._is_discrete) for one, rng in pairs]


def generator(seed: int, name: str) -> np.random.Generator:
    """Return the generator of a named purpose."""
    return np.random.default_rng([seed, *name.encode()])


class Dimension:
    """What a key may be: the numbers of an interval, or levels 0, 1, ... of values or of whole numbers.

    Attributes
    ----------
    key
        With signs and package.
    interval
        None of listed values.
    size
        How many levels there are; None of a continuous interval.
    """

    def __init__(self, axis: Axis) -> None:
        self.key = axis.key
        self.interval = axis.interval
        self._settings = list({setting.text: setting for setting in axis.settings}.values())
        self.size: int | None = len(self._settings)
        if axis.interval is not None:
            low, high, whole = axis.interval.low, axis.interval.high, axis.interval.whole
            self.size = int(high) - int(low) + 1 if whole else None

    def settings_at(self, column: Column) -> list[Setting]:
        """Return the setting of each place in a column."""
        if self.interval is None:
            return [self._settings[level] for level in column.tolist()]
        start = int(self.interval.low) if self.interval.whole else 0
        return [self.interval.setting(self.key, start + place) for place in column.tolist()]

    def draw(self, points: int, rng: np.random.Generator) -> Column:
        """Draw places at random, one independent of another."""
        if self.interval is None or (self.interval.whole and not self.interval.log):
            assert self.size is not None
            return rng.integers(self.size, size=points)
        places = rng.random(points)
        if self.interval.whole:
            return _whole(self.interval, places)
        low, high = self.interval.low, self.interval.high
        values = [self.interval.rounded(value, low, high) for value in _at(self.interval, places)]
        return np.array(values)

    def spread(self, points: int, rng: np.random.Generator, is_discrete: bool) -> Column:
        """Draw places that are spread evenly, in random order.

        Where all dimensions ``is_discrete`` those of one with enough of them differ from each other.
        """
        if self.size is None:
            column = self._strata(points, rng)
        elif self.interval is not None and self.interval.log:
            places = (np.arange(points) + rng.random(points)) / points
            column = _whole(self.interval, places)
            if is_discrete and points <= self.size:
                column = _pushed_apart(column, self.size)
        elif self.size < points:
            column = _balanced(self.size, points, rng)
        else:
            edges = np.array([-(-i * self.size // points) for i in range(points + 1)])
            column = rng.integers(edges[:-1], edges[1:])
        return rng.permutation(column)

    def _strata(self, points: int, rng: np.random.Generator) -> Column:
        """Return one number of each of as many slices of the interval as there are points."""
        assert self.interval is not None
        edges = strata_edges(self.interval, points)
        values = _at(self.interval, (np.arange(points) + rng.random(points)) / points)
        slices = zip(values, edges[:-1], edges[1:], strict=True)
        return np.array([self.interval.rounded(value, low, high) for value, low, high in slices])


def strata_edges(interval: Interval, points: int) -> list[float]:
    """Return where an interval's slices begin, and its end; of a logarithmic one they are equal as ratios."""
    inner = _at(interval, np.arange(1, points) / points)
    return [interval.low, *inner, interval.high]


def _at(interval: Interval, places: Column) -> list[float]:
    """Return the numbers at places from 0 to 1 of an interval."""
    low, high = interval.low, interval.high
    if not interval.log:
        return (low * (1 - places) + high * places).tolist()
    exponents = log(low) + places * (log(high) - log(low))
    return np.exp(exponents).clip(low, high).tolist()


def _whole(interval: Interval, places: Column) -> Column:
    """Return the levels of whole numbers at places from 0 to 1 of a logarithmic interval."""
    low, high = int(interval.low), int(interval.high)
    wide = Interval(low - 0.5, high + 0.5, log=True)
    return np.rint(_at(wide, places)).astype(np.int64).clip(low, high) - low


def _balanced(size: int, points: int, rng: np.random.Generator) -> Column:
    """Return levels, each as often as any other, give or take one."""
    whole = np.repeat(np.arange(size), points // size)
    return np.concatenate([whole, rng.choice(size, points % size, replace=False)])


def _pushed_apart(levels: Column, size: int) -> Column:
    """Return ascending levels, moved as little upwards, then downwards, as makes each differ."""
    steps = np.arange(len(levels))
    apart: Column = np.maximum.accumulate(levels - steps) + steps
    return np.minimum(apart, size - len(levels) + steps)


def distinct_draws(
    dimensions: Sequence[Dimension], points: int, rngs: Sequence[np.random.Generator]
) -> list[Column]:
    """Draw points of levels until there are so many different ones.

    Where most of all points are wanted, drawing would go on for long: the rest is then picked among those
    that are missing.
    """
    seen: dict[tuple[int, ...], None] = {}
    sizes = [one.size or 0 for one in dimensions]
    total = prod(sizes)
    for _ in range(_ROUNDS if total <= _MANY else 1 << 30):
        pairs = zip(dimensions, rngs, strict=True)
        columns = [one.draw(points, rng).tolist() for one, rng in pairs]
        seen.update(dict.fromkeys(zip(*columns, strict=True)))
        if len(seen) >= points:
            break
    else:
        flat = np.ravel_multi_index(tuple(np.array(list(seen)).T), sizes)
        missing = rngs[0].permutation(np.setdiff1d(np.arange(total), flat))
        for point in zip(*np.unravel_index(missing, sizes), strict=True):
            seen.setdefault(tuple(int(level) for level in point))
    return [np.array(column) for column in zip(*list(seen)[:points], strict=True)]


def distinct_levels(
    sizes: Sequence[int],
    points: int,
    rngs: Sequence[np.random.Generator],
    rng: np.random.Generator,
) -> list[Column]:
    """Return balanced columns of levels that never make the same point twice.

    Counting up all dimensions at once passes through lcm(sizes) different points and has each level
    equally often on the way. Then the count goes on with some dimensions ahead of the others: of how far,
    there is just enough choice to come to each of all points once. Levels are in random order.
    """
    period = lcm(*sizes)
    ahead, before = [1], sizes[0]
    for size in sizes[1:]:
        ahead.append(gcd(before, size))
        before = lcm(before, size)
    rounds = -(-points // period)
    which = np.unravel_index(_some(prod(ahead), rounds, rng), ahead)
    turn, count = np.divmod(np.arange(points), period)
    order = rng.permutation(points)
    columns = []
    for size, shift, own in zip(sizes, which, rngs, strict=True):
        columns.append(own.permutation(size)[(count + shift[turn]) % size][order])
    return columns


def _some(size: int, number: int, rng: np.random.Generator) -> Column:
    """Return so many different numbers below ``size``, in random order."""
    return rng.choice(size, number, replace=False)
