"""What a point of a search rests on: published rows of its engine, an assumed hit rate, full memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from hwmodels.predict import Prediction
from hwmodels.units import GB
from sim.advise import AS_GIVEN, Point
from sim.frontier import best_of
from sim.interval import FEWEST_ROWS, Missed
from sim.predict_answer import memory, used_alike

SPARE_SHARE = 0.03
"""Of GPU memory, less than this share left is barely enough."""
SPARE_GPU_BYTES = 500_000_000
SPARE_HOST_BYTES = 4_000_000_000
"""What an operating system, a desktop and other programs take at least; a rule of thumb, not measured."""
BARELY = (
    "Fits barely: less than 3% or 0.5 GB of GPU memory, or less than 4 GB of host memory, is left for the "
    "operating system, the desktop and other programs."
)


def rows_by_engine(errors: Iterable[Missed]) -> Counter[str]:
    """Return how many complete published decode rows each engine has; 0 for one that has none."""
    return Counter(row.engine for row in errors if row.is_complete and not row.is_prefill)


def rows_words(number: int) -> str:
    """Return how many published rows an engine has, in words."""
    told = {0: "no complete published row", 1: "one complete published row"}
    return f"{told.get(number, f'{number} complete published rows')} of this engine"


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
    """Return the fastest that fits of ways held against published rows.

    Such are those of engines with enough rows, and those of engines with any that need no assumed hit
    rate.
    """
    return best_of([point for point in points if _is_held(point, rows.get(point.engine, 0))])


def best_held(points: Sequence[Point], rows: Mapping[str, int]) -> tuple[Point | None, str]:
    """Return the fastest that fits of ways held against published rows, and what it is the best of.

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


def spare_words(found: Prediction) -> list[str]:
    """Return, for each memory that is nearly full, what is left of it; empty where all have room.

    Of a single memory what counts is what is left for the host. One that does not suffice is not told.
    """
    told = []
    for name, room in memory(found).items():
        left = room["have"] - room["needed"]
        least = SPARE_HOST_BYTES
        if name == "gpu":
            least = max(SPARE_GPU_BYTES, SPARE_SHARE * room["have"])
        if 0 <= left < least:
            label = "GPU" if name == "gpu" else name
            told.append(f"{left / GB:.1f} of {room['have'] / GB:.1f} GB of {label} memory")
    return told


def fit_word(point: Point) -> str:
    """Return ``no``, ``barely`` or ``yes``."""
    if not point.fits:
        return "no"
    return "barely" if spare_words(point.found) else "yes"


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
