"""Values of JSON that must be whole numbers, experts or weights; ``where`` is what errors call them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from traces.trace import TraceError

MOST = 2**31 - 1
"""What a whole number may be, to be held in 32 bits."""
MOST_WEIGHT = 65504.0
"""What 16 bits hold of a weight or a logit."""


def is_whole(value: object, least: int = 0) -> bool:
    """Tell whether a value is a whole number of 32 bits, ``least`` or more."""
    return type(value) is int and least <= value <= MOST


def whole(value: object, where: str) -> int:
    """Return a whole number >= 0; raises TraceError for anything else."""
    if not isinstance(value, int) or not is_whole(value):
        raise TraceError(f"{where} is {_shown(value)}: must be a whole number >= 0, of 32 bits")
    return value


def experts(value: object, where: str) -> list[int]:
    """Return a list of experts, not empty; raises TraceError for anything else."""
    if not isinstance(value, list) or not value or not all(is_whole(one) for one in value):
        raise TraceError(
            f"{where} is {_shown(value)}: must be a list of experts, whole numbers >= 0"
        )
    return value


def weights(value: object, where: str, count: int) -> list[float]:
    """Return ``count`` numbers that 16 bits hold, none of them NaN; raises TraceError for anything else."""
    good = isinstance(value, list) and len(value) == count and all(map(_is_weight, value))
    if not good or not isinstance(value, list):
        raise TraceError(f"{where} is {_shown(value)}: must be {count} numbers, one an expert")
    return value


def _is_weight(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and -MOST_WEIGHT <= value <= MOST_WEIGHT


def keys_of(value: object) -> Mapping[Any, Any]:
    """Return a dict as it is, and nothing for any other value."""
    return value if isinstance(value, Mapping) else {}


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
