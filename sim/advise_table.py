"""The points of a search as plain rows, and its summary as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sim.advise import Point, Wish
from sim.advise_reserve import TOLERANCE
from sim.advise_standing import alike_speed, best_held, rests_on_hits
from sim.frontier import (
    best_by,
    best_of,
    fastest_of,
    frontier,
    level_of,
    loses_by,
    too_large,
    ways_by_level,
)
from sim.interval import Interval
from sim.limits import limit_words


@dataclass(frozen=True, slots=True)
class Ground:
    """What an advice rests on beside its points, by engine: published rows, those here, intervals."""

    rows: Mapping[str, int]
    rows_here: Mapping[str, int]
    intervals: Mapping[str, Interval]
    notes: Sequence[str] = field(default=())


def row_of(point: Point, rows: Mapping[str, int]) -> dict[str, Any]:
    """Return one point as plain values: times in ms, memory in bytes; ``rows``: published, by engine."""
    found = point.found
    return {
        "engine": point.engine,
        "published_rows": rows.get(point.engine, 0),
        "quant": point.quant,
        "expert_bits": point.bits,
        "level": level_of(point),
        "settings": point.settings,
        "tokens_per_s": point.speed,
        "rests_on_hits": rests_on_hits(point),
        "used_alike_tokens_per_s": alike_speed(point),
        "tpot_ms": found.tpot_ns / 1e6,
        "prefill_tokens_per_s": found.prefill_tokens_per_s,
        "ttft_ms": found.ttft_ns / 1e6,
        "gpu_bytes": found.gpu_bytes,
        "host_bytes": found.host_bytes,
        "fits": point.fits,
        "fits_barely": point.fit == "barely",
        **{f"{one.memory}_bytes_left": one.bytes for one in point.left},
        "problems": "; ".join(found.problems),
        "bottleneck": found.bottleneck,
    }


def table_of(points: Sequence[Point], rows: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return all points as rows, the fastest that fit first; ``frontier`` marks those nothing beats."""
    on_it = {id(point) for point in frontier(points)}
    ordered = sorted(points, key=lambda point: (not point.fits, -point.speed))
    return [{**row_of(point, rows), "frontier": id(point) in on_it} for point in ordered]


def summary_of(
    points: Sequence[Point],
    wish: Wish,
    ground: Ground,
    runs: Sequence[Mapping[str, Any]] | None,
    compared: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return what a search came to: the best, the best of each way and scheme, the frontier, why."""
    rows = ground.rows
    held, held_as = best_held(points, rows)
    fastest, roomy = fastest_of(points), fastest_of([p for p in points if p.has_room])
    return {
        "points": len(points),
        "fitting": sum(point.fits for point in points),
        "quality_floor_bits": wish.quality_floor,
        "reserve": {**asdict(wish.reserve), "tolerance": TOLERANCE},
        "best": _best(best_of(points), ground, "Best"),
        "fastest_that_fits": None if fastest is None else row_of(fastest, rows),
        "fastest_with_reserve": None if roomy is None else row_of(roomy, rows),
        "best_held": _best(held, ground, held_as),
        "best_by_quant": [row_of(point, rows) for point in best_by(points, "quant")],
        "best_by_way": _ways(points, rows),
        "frontier": [row_of(point, rows) for point in frontier(points)],
        "does_not_fit": [row_of(point, rows) for point in too_large(points)],
        "compared": None if compared is None else list(compared),
        "simulated": None if runs is None else list(runs),
        "notes": list(ground.notes),
    }


def _best(point: Point | None, ground: Ground, what: str) -> dict[str, Any] | None:
    """Return a best point with its interval and what limits it; None for none."""
    if point is None:
        return None
    interval = ground.intervals[point.engine]
    around = interval.of(point.speed)
    return row_of(point, ground.rows) | {
        "what": what,
        "tokens_per_s_interval": None if around is None else list(around),
        "interval_from": interval.words,
        "limit": limit_words(point.found, point.found.bottleneck),
        "published_rows_here": ground.rows_here.get(point.engine, 0),
    }


def _ways(points: Sequence[Point], rows: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the best of each way at each level of precision, and what it loses to the level's best by."""
    return [
        {
            **row_of(point, rows),
            "loses_ms": {part: ns / 1e6 for part, ns in loses_by(point, ways[0])},
        }
        for ways in ways_by_level(points).values()
        for point in ways
    ]
