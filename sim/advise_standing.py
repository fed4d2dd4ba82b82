"""What a point of a search rests on: published rows of its engine, an assumed hit rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from sim.advise import AS_GIVEN, Point
from sim.frontier import best_of
from sim.interval import FEWEST_ROWS, Missed
from sim.predict_answer import used_alike


def rows_by_engine(errors: Iterable[Missed], machine: str | None = None) -> Counter[str]:
    """Return how many complete published decode rows each engine has, on one machine or all."""
    return Counter(
        row.engine
        for row in errors
        if row.is_complete and not row.is_prefill and machine in (None, row.machine)
    )


def rows_words(number: int, here: int) -> str:
    """Say how many published rows an engine has, and how many of them are of the machine asked for."""
    if not number:
        return "no complete published row of this engine"
    rows = "one complete published row" if number == 1 else f"{number} complete published rows"
    return f"{rows} of this engine, {here or 'none'} on this machine"


def rests_on_hits(point: Point) -> bool:
    """Tell whether the speed depends on a hit rate that the use of experts gives and nobody measured."""
    place, shape = point.case.placement, point.case.costs.shape
    has_cache = place.held == "recent" and 0 < place.gpu_ratio < 1 and place.hit_rate is None
    is_linked = point.case.costs.machine.link is not None
    on_cpu = place.num_cpu_layers(shape) if is_linked else 0
    return has_cache and on_cpu < shape.num_moe_layers


def alike_speed(point: Point) -> float | None:
    """Return tokens/s if all experts were used alike; None where no cache makes it matter."""
    return used_alike(point.case) if rests_on_hits(point) else None


def best_with_rows(points: Sequence[Point], rows: Mapping[str, int]) -> Point | None:
    """Return the best that fits of ways held against published rows.

    Such are those of engines with enough rows, and those of engines with any that need no assumed hit
    rate.
    """
    return best_of([point for point in points if _is_held(point, rows.get(point.engine, 0))])


def best_held(points: Sequence[Point], rows: Mapping[str, int]) -> tuple[Point | None, str]:
    """Return the best that fits of ways held against published rows, and what it is the best of.

    Where none fits, it is the fastest of all that need no assumed hit rate.
    """
    held = best_with_rows(points, rows)
    if held is not None:
        return held, "Best of those held against published rows"
    sure = best_of([point for point in points if not rests_on_hits(point)])
    return (
        sure,
        "None that fits is held against published rows; best of those without an assumed hit rate",
    )


def _is_held(point: Point, number: int) -> bool:
    return number >= FEWEST_ROWS or (number > 0 and not rests_on_hits(point))


def more_bits(points: Sequence[Point], given_bits: float) -> list[str]:
    """Return a note for each scheme that would store experts with more bits than the model comes with."""
    bits = {point.quant: point.bits for point in points if point.quant != AS_GIVEN}
    return [
        f"{quant}: would store experts with {made:.3g} bits a weight, more than the {given_bits:.3g} "
        "that the model comes with: that adds bytes and no precision. "
        "Whether an engine's converter does so, or leaves such experts as they are, is not modelled: for the "
        "latter leave --quant out."
        for quant, made in bits.items()
        if made > given_bits + 1e-9
    ]
