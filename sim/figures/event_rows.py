"""A run's event table as figures read it: rows of a window, and when an expert was in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sim.events import COUNTER_COLUMNS, EVENT_COLUMNS, Kind, Lane
from sim.figures.source import NotDrawableError, Source
from sim.result_tables import StoredTable
from sim.results import COUNTERS, EVENTS
from sim.types import ConfigError

Rows = NDArray[np.int64]
START, END, LANE, UNIT, KIND, STEP, LAYER, EXPERT, TOKENS, BYTES = range(len(EVENT_COLUMNS))
_MOVES = (Kind.ENTER, Kind.LEAVE)


def events_path(source: Source) -> Path:
    """Return the path of a run's event table; NotDrawableError where it has none."""
    return source.table(EVENTS)


def check_window(window: tuple[int, int], num_steps: int) -> tuple[int, int]:
    """Return a window of steps, the last one cut to those there are; ConfigError for none."""
    first, last = window
    if first < 0 or last < first:
        raise ConfigError(
            f"--window {first} {last}: must be two steps, the first >= 0 and <= the last"
        )
    if first >= num_steps:
        raise ConfigError(
            f"--window {first} {last}: must begin at a step of the run, which has {num_steps}"
        )
    return first, min(last, num_steps - 1)


def span_ns(source: Source, window: tuple[int, int]) -> tuple[int, int]:
    """Return when a window of steps begins and ends."""
    steps = source.steps
    inside = (steps["step"] >= window[0]) & (steps["step"] <= window[1])
    return int(steps["start_ns"][inside].min()), int(steps["end_ns"][inside].max())


def unit_of(span: int) -> tuple[float, str]:
    """Return how many ns the axis' unit has, and its name."""
    return next((s, n) for s, n in ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns")) if span >= s)


def rows_in(source: Source, span: tuple[int, int], most: int) -> Rows:
    """Return the rows of work that reach into a span of time, by start.

    Raises NotDrawableError for more than ``most``.
    """
    kept, number = [np.empty((0, len(EVENT_COLUMNS)), np.int64)], 0
    for block in blocks(source, EVENTS):
        inside = (block[:, START] < span[1]) & (block[:, END] > span[0])
        inside &= block[:, LANE] != Lane.CACHE
        number += int(inside.sum())
        if number > most:
            raise NotDrawableError(
                f"has more than {most} pieces of work in these steps: --window FIRST LAST names fewer"
            )
        kept.append(block[inside])
    rows = np.concatenate(kept)
    return rows[np.argsort(rows[:, START], kind="stable")]


def uses_of_layer(source: Source, layer: int) -> Rows:
    """Return the rows of a layer's experts computing, wherever, int64[n, columns]."""
    return _chosen(source, layer, (Kind.EXPERT,))


def moves_of_layer(source: Source, layer: int) -> Rows:
    """Return the rows that say which of a layer's experts came into the cache and which left it.

    Raises NotDrawableError for the tables of an older version, which do not say so.
    """
    found = _chosen(source, layer, _MOVES)
    if not len(found) and source.run.get("inserts") and not _has_moves(source):
        raise NotDrawableError(
            "needs rows of experts that enter and leave the cache, which this events.parquet lacks: "
            "run it again"
        )
    return found


def _has_moves(source: Source) -> bool:
    return any(np.isin(block[:, KIND], _MOVES).any() for block in blocks(source, EVENTS))


def blocks(source: Source, name: str) -> Iterator[Rows]:
    """Yield the rows of a run's events or counters; ConfigError for a table with other columns."""
    columns = {EVENTS: EVENT_COLUMNS, COUNTERS: COUNTER_COLUMNS}[name]
    path = source.table(name)
    table = StoredTable(path)
    if table.columns() != columns:
        raise ConfigError(f"{path}: has not the columns {', '.join(columns)}: is it damaged?")
    yield from table


def _chosen(source: Source, layer: int, kinds: tuple[Kind, ...]) -> Rows:
    kept = [np.empty((0, len(EVENT_COLUMNS)), np.int64)]
    layers = 0
    for block in blocks(source, EVENTS):
        layers = max(layers, int(block[:, LAYER].max(initial=-1)) + 1)
        kept.append(block[(block[:, LAYER] == layer) & np.isin(block[:, KIND], kinds)])
    if not 0 <= layer < layers:
        raise ConfigError(f"--layer {layer}: must be a layer of the run, 0 to {layers - 1}")
    return np.concatenate(kept)


def spells(moves: Rows, end_ns: int) -> dict[int, list[tuple[int, int]]]:
    """Return when each expert was in the cache: spans [from, to) in ns, by expert, in order.

    Parameters
    ----------
    moves
        Rows of experts that enter and leave, in the order in which they happened.
    end_ns
        When the run ends, for those that are there at the end.
    """
    since: dict[int, int] = {}
    found: dict[int, list[tuple[int, int]]] = {}
    for row in moves:
        expert, now_ns = int(row[EXPERT]), int(row[START])
        if row[KIND] == Kind.ENTER:
            since[expert] = now_ns
            found.setdefault(expert, [])
        elif expert in since:
            found[expert].append((since.pop(expert), now_ns))
        else:
            raise ConfigError(
                f"{EVENTS}: is damaged: expert {expert} leaves the cache at {now_ns} ns, and had not come"
            )
    for expert, begin_ns in since.items():
        found[expert].append((begin_ns, max(end_ns, begin_ns)))
    return found
