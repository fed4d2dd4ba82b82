"""Searches of a sweep, as tests ask for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from sim.sweeps.space import PointSettings, Search, search_of

OF_ONE_GRID: dict[str, Any] = {
    "search": "grid",
    "list": None,
    "points": None,
    "seed": 0,
    "batch": 8,
    "objective": "tokens_per_s",
    "direction": "maximize",
}


def search(
    arguments: Sequence[str], params: Mapping[str, str] | None = None, **settings: Any
) -> Search:
    """Return the search of a command line; without settings a grid."""
    return search_of(arguments, params or {}, SimpleNamespace(**OF_ONE_GRID | settings))


def points(
    arguments: Sequence[str], params: Mapping[str, str] | None = None, **settings: Any
) -> list[PointSettings]:
    """Return the points of a search that makes all at once."""
    (batch,) = search(arguments, params, **settings).batches()
    return batch


def texts(point: PointSettings) -> list[str]:
    return [setting.text for setting in point]


def values(point: PointSettings) -> dict[str, Any]:
    return {setting.key: setting.value for setting in point}
