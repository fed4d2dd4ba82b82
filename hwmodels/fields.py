"""Reads a dataclass of figures from a mapping as YAML or an override gives it, and says what is wrong.

What a field must be follows from its declaration: ``int``, ``float``, ``bool`` or ``str``. Numbers
are finite, at most 1e18, and > 0, or >= 0 where the caller says so. Counts, bytes and nanoseconds are
whole; a rate (``*_per_s``, ``*_flops``) is rounded to whole units a second.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

from hwmodels.errors import figure_error, missing_error, unknown_error

_LARGEST = 10**18


def read_fields(
    cls: type,
    mapping: object,
    where: str,
    prefix: str = "",
    *,
    may_be_zero: Collection[str] = (),
    skip: Collection[str] = (),
) -> dict[str, Any]:
    """Return the checked keyword arguments of a dataclass; raise HardwareError for the first mistake.

    ``prefix`` (as ``gpu.``) goes before each name in messages; fields in ``skip`` are not read.
    """
    if not isinstance(mapping, Mapping):
        raise figure_error(where, prefix.rstrip(".") or "(all)", mapping, "must be a mapping")
    known = {f.name: f for f in fields(cls) if f.name not in skip}
    for key, value in mapping.items():
        if key not in known:
            raise unknown_error(where, f"{prefix}{key}", value, (prefix + k for k in known))
    values = {}
    for name, declared in known.items():
        if name in mapping:
            least = 0 if name in may_be_zero else None
            values[name] = _read(declared, mapping[name], where, prefix + name, least)
        elif declared.default is MISSING:
            raise missing_error(where, prefix + name)
    return values


def is_numeric(declared: Field[Any]) -> bool:
    """Tell whether a dataclass field holds a number."""
    return declared.type in ("int", "float")


def _read(declared: Field[Any], value: object, where: str, name: str, least: int | None) -> Any:
    if declared.type == "str":
        if not isinstance(value, str) or not value.strip():
            raise figure_error(where, name, value, "must be a text that is not empty")
        return value
    if declared.type == "bool":
        if not isinstance(value, bool):
            raise figure_error(where, name, value, "must be true or false")
        return value
    return _number(declared, value, where, name, least)


def _number(declared: Field[Any], value: object, where: str, name: str, least: int | None) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise figure_error(where, name, value, f"must be a number, not {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise figure_error(where, name, value, "must be finite")
    if value > _LARGEST:
        raise figure_error(where, name, value, f"must be <= {_LARGEST:g}")
    if value < 0 or (least is None and value == 0):
        raise figure_error(where, name, value, "must be >= 0" if least == 0 else "must be > 0")
    if declared.type == "float":
        return float(value)
    if name.endswith(("_per_s", "_flops")):
        value = max(1, round(value))
    if value != int(value):
        raise figure_error(where, name, value, "must be a whole number")
    return int(value)
