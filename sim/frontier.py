"""What a search came to: the best point, the frontier of speed, memory and quality, and why others lose."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from sim.advise import AS_GIVEN, Point
from sim.advise_reserve import TOLERANCE


def best_of(points: Sequence[Point]) -> Point | None:
    """Return the best point that fits: the fastest, unless it fits barely and one almost as fast has room."""
    fastest = fastest_of(points)
    if fastest is None or fastest.has_room:
        return fastest
    least = (1 - TOLERANCE) * fastest.speed
    return fastest_of([p for p in points if p.speed >= least and p.has_room]) or fastest


def fastest_of(points: Sequence[Point]) -> Point | None:
    """Return the fastest point that fits; among equals the one of more bits, then of less memory."""
    return max((point for point in points if point.fits), key=_merit, default=None)


def _merit(point: Point) -> tuple[float, float, int]:
    return point.speed, point.bits, -point.memory_bytes


def frontier(points: Sequence[Point]) -> list[Point]:
    """Return the points that fit of which no other is as fast, as small and as precise, and better in one.

    In order of bits, then speed, the greatest first.
    """
    kept: list[Point] = []
    fitting = [point for point in points if point.fits]
    for point in sorted(fitting, key=lambda p: (-p.bits, -p.speed, p.memory_bytes)):
        if not any(k.speed >= point.speed and k.memory_bytes <= point.memory_bytes for k in kept):
            kept.append(point)
    return kept


def best_by(points: Sequence[Point], *fields: str) -> list[Point]:
    """Return the best point that fits for each value of the fields, the fastest first."""
    groups: dict[tuple[object, ...], list[Point]] = {}
    for point in points:
        groups.setdefault(tuple(getattr(point, field) for field in fields), []).append(point)
    found = [best for group in groups.values() if (best := best_of(group)) is not None]
    return sorted(found, key=_merit, reverse=True)


def level_of(point: Point) -> int:
    """Return the bits that a scheme's name says (Q3_K_M: 3, AWQ_INT4: 4), by which people compare schemes.

    The bits that it takes are more, and more for one maker's scheme than for another's. Of the model as
    given, its bits rounded.
    """
    digits = None if point.quant == AS_GIVEN else re.search(r"\d+", point.quant)
    return round(point.bits) if digits is None else int(digits[0])


def ways_by_level(points: Sequence[Point]) -> dict[int, list[Point]]:
    """Return, by level of precision, the best of each engine and placement, the fastest first.

    An engine stands at each level with one scheme that fits: the nearest in bits to the most that every
    engine of the level can have. Levels come from the highest down.
    """
    schemes: dict[int, dict[str, dict[str, float]]] = {}
    fitting = [point for point in points if point.fits]
    for point in fitting:
        engines = schemes.setdefault(level_of(point), {})
        engines.setdefault(point.engine, {})[point.quant] = point.bits
    found: dict[int, list[Point]] = {}
    for level, engines in sorted(schemes.items(), reverse=True):
        bits = min(max(its.values()) for its in engines.values())
        chosen = {e: _nearest(its, bits) for e, its in engines.items()}
        same = [p for p in fitting if level_of(p) == level and p.quant == chosen[p.engine]]
        found[level] = best_by(same, "engine", "kind")
    return found


def _nearest(schemes: Mapping[str, float], bits: float) -> str:
    """Return the scheme nearest to so many bits; of two as near, the more precise."""
    return min(schemes, key=lambda name: (abs(schemes[name] - bits), -schemes[name]))


def too_large(points: Sequence[Point]) -> list[Point]:
    """Return, for each engine, the fastest point that does not fit and is faster than the best that does.

    Of ways without any that fits, the one that needs least.
    """
    best = best_of(points)
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(point.engine, []).append(point)
    found = []
    for group in groups.values():
        lacking = [point for point in group if not point.fits]
        if best is not None:
            faster = [point for point in lacking if point.speed > best.speed]
            if faster:
                found.append(max(faster, key=lambda p: (p.bits, p.speed)))
        elif lacking:
            found.append(min(lacking, key=lambda p: p.memory_bytes))
    return found


def loses_by(point: Point, best: Point) -> list[tuple[str, float]]:
    """Return the parts of a token's time that a point has more of than the best, in ns, the most first."""
    mine, its = point.found.decode.ns, best.found.decode.ns
    tokens, others = point.case.batch_size, best.case.batch_size
    more = {
        part: mine.get(part, 0.0) / tokens - its.get(part, 0.0) / others for part in {*mine, *its}
    }
    return sorted(((part, ns) for part, ns in more.items() if ns > 0), key=lambda item: -item[1])
