"""Which points a sweep has: what was asked for on the command line, as points one after another.

A grid is what Hydra's own sweeper makes of the same words. The other searches read the same grammar:
:mod:`sim.sweeps.list_file`, :mod:`sim.sweeps.designs` (random, Latin hypercube) and
:mod:`sim.sweeps.optuna_search`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, takewhile
from math import floor, log10, prod
from typing import TYPE_CHECKING, Protocol, cast

from sim.sweeps.grammar import Grammar, OptionsOf, PointSettings, Setting
from sim.types import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import IntervalSweep, Override

__all__ = ["Asked", "Axis", "Grid", "Interval", "PointSettings", "Search", "Setting", "search_of"]

_DIGITS = 6
_MOST_POINTS = 1_000_000
"""Of a grid: each is a folder, and more come of a step that is too small, not of a question."""


class Search(Protocol):
    """The points of a sweep, batch by batch.

    Attributes
    ----------
    num_points
        Of all batches, known beforehand.
    fixed
        Overrides that all points share, in order: those that come before whatever differs. What is
        given later is in every point's settings, so that an order that matters is kept.
    """

    num_points: int
    fixed: tuple[str, ...]

    def batches(self) -> Iterator[list[PointSettings]]:
        """Yield the points: all at once, but for a search that learns, which needs :meth:`tell` between."""

    def tell(self, values: Sequence[float | None]) -> None:
        """Take the objective of each point of the batch just yielded, None of a failed one."""


class Asked(Protocol):
    """The settings of a sweep that say which points it has."""

    @property
    def search(self) -> str:
        """How: grid, list, random, lhs or optuna."""

    @property
    def list(self) -> str | None:
        """File of points."""

    @property
    def points(self) -> int | None:
        """How many, where that can be chosen."""

    @property
    def seed(self) -> int:
        """Of what is drawn."""

    @property
    def batch(self) -> int | None:
        """Points that run before the next ones are chosen."""

    @property
    def objective(self) -> str:
        """Column of the results."""

    @property
    def direction(self) -> str:
        """Which way: maximize or minimize."""


@dataclass(frozen=True, slots=True)
class Interval:
    """All numbers from ``low`` to ``high``; whole ones only if ``whole``, then with both ends.

    ``name`` is the key without signs and package.
    """

    low: float
    high: float
    log: bool = False
    whole: bool = False
    name: str = ""

    def setting(self, key: str, value: float) -> Setting:
        """Return the setting of a number; Hydra reads what is written as the same number."""
        return Setting(f"{key}={value!r}", self.name, value)

    def rounded(self, value: float, low: float, high: float) -> float:
        """Return a number with as few digits as tell it apart, still in [``low``, ``high``).

        Six digits do, and more where the interval is narrow for its numbers, or ``low`` and ``high`` are
        close.
        """
        largest = max(abs(self.low), abs(self.high))
        narrow = max(0, floor(log10(largest) - log10(self.high - self.low)))
        for digits in range(_DIGITS + narrow, 17):
            short = float(f"{value:.{digits}g}")
            if low <= short < high:
                return short
        return value


@dataclass(frozen=True, slots=True)
class Axis:
    """One key of a sweep, signs and package included, and what it may be.

    ``settings`` are its values in order; of an ``interval`` there are none. ``is_ordered`` ones are of a
    range(). An axis of one value is fixed.
    """

    key: str
    settings: tuple[Setting, ...]
    interval: Interval | None = None
    is_ordered: bool = False

    @property
    def is_fixed(self) -> bool:
        """Tell whether there is nothing to choose."""
        return self.interval is None and len(self.settings) == 1


class Grid:
    """All combinations of the values, in the order of Hydra's own sweeper: the last key turns fastest."""

    def __init__(self, axes: Sequence[Axis]) -> None:
        for axis in axes:
            if axis.interval is not None:
                rule = "a grid has no intervals; list the values, or add sweep.search=random, lhs or optuna"
                raise ConfigError(f"{axis.key} = interval(...): {rule}")
        self.fixed, self._axes = split(axes)
        self.num_points = prod(len(axis.settings) for axis in self._axes)
        if self.num_points > _MOST_POINTS:
            rule = f"must be {_MOST_POINTS:,} at most; list fewer values, or draw with sweep.search=lhs"
            raise ConfigError(f"sweep: the grid has {self.num_points:,} points: {rule}")

    def batches(self) -> Iterator[list[PointSettings]]:
        """Yield all points in one list."""
        yield list(product(*(axis.settings for axis in self._axes)))

    def tell(self, values: Sequence[float | None]) -> None:
        """Learn nothing."""


def split(axes: Sequence[Axis]) -> tuple[tuple[str, ...], tuple[Axis, ...]]:
    """Return the texts of the axes before the first that is not fixed, and the other axes."""
    fixed = tuple(takewhile(lambda axis: axis.is_fixed, axes))
    return tuple(axis.settings[0].text for axis in fixed), tuple(axes[len(fixed) :])


def varying(axes: Sequence[Axis], search: str) -> list[Axis]:
    """Return the axes that are not fixed; ConfigError if there are none."""
    found = [axis for axis in axes if not axis.is_fixed]
    if not found:
        rule = "needs a key that varies: KEY=interval(LOW,HIGH), KEY=range(...) or KEY=A,B"
        raise ConfigError(f"sweep.search = {search}: {rule}")
    return found


def search_of(
    arguments: Sequence[str],
    params: Mapping[str, str],
    settings: Asked,
    options_of: OptionsOf | None = None,
) -> Search:
    """Return the search that a sweep's command line asks for.

    Parameters
    ----------
    arguments
        Overrides of the command line, without those of the sweep itself.
    params
        ``hydra.sweeper.params`` of an experiment file, which come first: the command line's win.
    settings
        How the points are found.
    options_of
        Options of a group, for ``glob()``; None: of the Hydra that is initialised.

    Raises
    ------
    ConfigError
        For what makes no points; HydraException for what is no override.
    """
    _check(settings)
    grammar = Grammar(settings.seed, options_of)
    axes = axes_of([*(f"{key}={value}" for key, value in params.items()), *arguments], grammar)
    if settings.search == "list":
        from sim.sweeps.list_file import PointList

        return PointList(axes, str(settings.list), grammar)
    if settings.search in ("random", "lhs"):
        from sim.sweeps.designs import Design

        return Design(axes, settings.search, int(settings.points or 0), settings.seed)
    if settings.search == "optuna":
        from sim.sweeps.optuna_search import OptunaSearch

        return OptunaSearch(axes, settings)
    return Grid(axes)


def axes_of(texts: Sequence[str], grammar: Grammar) -> list[Axis]:
    """Return an axis a key: where a key is given twice the last one counts, at the place of the first."""
    axes: dict[str, Axis] = {}
    with grammar.seeded():
        for override in grammar.parse(texts):
            axis = _axis(override, grammar)
            axes[axis.key] = axis
    return list(axes.values())


def _axis(override: Override, grammar: Grammar) -> Axis:
    key = override.get_key_element()
    if override.is_interval_sweep():
        return Axis(key, (), _interval(override))
    settings = tuple(grammar.values(override))
    if not settings:
        raise ConfigError(f"{override.input_line}: stands for no value at all")
    return Axis(key, settings, is_ordered=override.is_range_sweep())


def _interval(override: Override) -> Interval:
    """Check an interval of Hydra's grammar."""
    key, sweep = override.get_key_element(), cast("IntervalSweep", override.value())
    low, high, tags = cast(float, sweep.start), cast(float, sweep.end), set(map(str, sweep.tags))
    name = f"{key} = interval({low:g},{high:g})"
    if not float("-inf") < low < high < float("inf"):
        raise ConfigError(f"{name}: must run from a number to a larger one")
    if tags - {"log"}:
        raise ConfigError(f"{key} = tag({','.join(sorted(tags))},...): the one tag is log")
    if "log" in tags and low <= 0:
        raise ConfigError(f"{name}: must be of positive numbers with tag(log,...)")
    whole = isinstance(low, int) and isinstance(high, int)
    return Interval(low, high, "log" in tags, whole, override.key_or_group)


def _check(settings: Asked) -> None:
    """Check what belongs together: which search takes a file, which a number of points."""
    search = settings.search
    drawn = search in ("random", "lhs", "optuna")
    if search == "list" and not settings.list:
        raise ConfigError("sweep.list = null: must name a file of points with sweep.search=list")
    if search != "list" and settings.list:
        raise ConfigError(
            f"sweep.list = {settings.list}: only with sweep.search=list, not {search}"
        )
    if drawn and settings.points is None:
        raise ConfigError(f"sweep.points = null: must be a number with sweep.search={search}")
    if not drawn and settings.points is not None:
        rule = f"only with sweep.search=random, lhs or optuna, not {search}"
        raise ConfigError(f"sweep.points = {settings.points}: {rule}")
