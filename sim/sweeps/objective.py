"""The column of the results that a search optimises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sim.results import flatten
from sim.settings import did_you_mean, is_number
from sim.sweeps.chunk import Point
from sim.sweeps.store import Store
from sim.types import ConfigError


def values_of(store: Store, points: Sequence[Point], objective: str) -> list[float | None]:
    """Return the objective of each point; None of one that failed, or that has none.

    Raises ConfigError for a name that is no column of any of them, or not one of numbers.
    """
    rows = {row["point"]: flatten(row) for row in store.rows([point.number for point in points])}
    if rows and not any(objective in row for row in rows.values()):
        numbers = [key for row in rows.values() for key, value in row.items() if is_number(value)]
        near = did_you_mean(objective, dict.fromkeys(numbers))
        raise ConfigError(f"sweep.objective = {objective}: no such column of the results{near}")
    return [_value(rows.get(point.number, {}).get(objective), objective) for point in points]


def _value(value: Any, objective: str) -> float | None:
    if value is not None and not is_number(value):
        raise ConfigError(
            f"sweep.objective = {objective}: must be a column of numbers, not {value!r}"
        )
    return None if value is None else float(value)
