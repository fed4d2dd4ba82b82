"""The points of a search as plain rows, and its summary as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sim.advise import Point, Wish
from sim.frontier import best_by, best_of, frontier, loses_by, too_large
from sim.interval import Interval
from sim.limits import limit_words


def row_of(point: Point) -> dict[str, Any]:
    """Return one point as plain values: times in ms, memory in bytes."""
    found = point.found
    return {
        "engine": point.engine,
        "quant": point.quant,
        "expert_bits": point.bits,
        "settings": point.settings,
        "tokens_per_s": point.speed,
        "tpot_ms": found.tpot_ns / 1e6,
        "prefill_tokens_per_s": found.prefill_tokens_per_s,
        "ttft_ms": found.ttft_ns / 1e6,
        "gpu_bytes": found.gpu_bytes,
        "host_bytes": found.host_bytes,
        "fits": point.fits,
        "problems": "; ".join(found.problems),
        "bottleneck": found.bottleneck,
    }


def table_of(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return all points as rows, the fastest that fit first; ``frontier`` marks those nothing beats."""
    on_it = {id(point) for point in frontier(points)}
    ordered = sorted(points, key=lambda point: (not point.fits, -point.speed))
    return [{**row_of(point), "frontier": id(point) in on_it} for point in ordered]


def summary_of(
    points: Sequence[Point],
    wish: Wish,
    interval: Mapping[str, Interval],
    runs: Sequence[Mapping[str, Any]] | None,
) -> dict[str, Any]:
    """Return what a search came to: the best, the best of each way and scheme, the frontier, why."""
    best = best_of(points)
    summary: dict[str, Any] = {
        "points": len(points),
        "fitting": sum(point.fits for point in points),
        "quality_floor_bits": wish.quality_floor,
        "best": None,
        "best_by_quant": [row_of(point) for point in best_by(points, "quant")],
        "best_by_way": [row_of(point) for point in best_by(points, "engine", "kind")],
        "frontier": [row_of(point) for point in frontier(points)],
        "does_not_fit": [row_of(point) for point in too_large(points)],
        "simulated": None if runs is None else list(runs),
    }
    if best is not None:
        around = interval[best.engine].of(best.speed)
        summary["best"] = row_of(best) | {
            "tokens_per_s_interval": None if around is None else list(around),
            "interval_from": interval[best.engine].words,
            "limit": limit_words(best.found, best.found.bottleneck),
        }
        for row, point in zip(
            summary["best_by_way"], best_by(points, "engine", "kind"), strict=True
        ):
            row["loses_ms"] = {part: ns / 1e6 for part, ns in loses_by(point, best)}
    return summary
