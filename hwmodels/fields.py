"""Reads a dataclass of figures from a mapping as YAML or an override gives it, and says what is wrong.

What a field must be follows from its declaration: ``int``, ``float``, ``bool``, ``str``, ``Numbers`` or
``Rows``, each with ``| None`` where null stands for "none". Numbers are finite, at most 1e18, and > 0, or
>= 0 where the caller says so. Counts, bytes and nanoseconds are whole; a rate (``*_per_s``, ``*_flops``) is
rounded to whole units a second. A text with ``choices`` in its metadata is one of them; rows have the
``columns`` of their metadata and ascend by all but the last, which is what the others lead to. What
fields demand of each other is the dataclass's own ``rules``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, Protocol

from hwmodels.errors import figure_error, missing_error, unknown_error

Numbers = tuple[float, ...]
Rows = tuple[tuple[float, ...], ...]
Rule = tuple[str, bool, str]
"""A field, whether its rule is kept, and the rule in words."""
_LARGEST = 10**18


class Ruled(Protocol):
    """A dataclass whose fields demand something of each other."""

    def rules(self) -> list[Rule]:
        """Return the rules, kept or not."""
        ...


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


def check_rules(part: Ruled, where: str, prefix: str = "") -> None:
    """Raise HardwareError for the first rule between fields that is broken."""
    for field, is_kept, rule in part.rules():
        if not is_kept:
            raise figure_error(where, prefix + field, getattr(part, field), rule)


def is_figure(declared: Field[Any]) -> bool:
    """Tell whether a dataclass field holds a number, or rows of them."""
    return _kind(declared) in ("int", "float", "Numbers", "Rows")


def _kind(declared: Field[Any]) -> str:
    return str(declared.type).removesuffix(" | None")


def _read(declared: Field[Any], value: object, where: str, name: str, least: int | None) -> Any:
    if value is None and str(declared.type).endswith(" | None"):
        return None
    kind = _kind(declared)
    if kind == "str":
        return _text(value, where, name, declared.metadata.get("choices"))
    if kind == "bool":
        if not isinstance(value, bool):
            raise figure_error(where, name, value, "must be true or false")
        return value
    if kind == "Numbers":
        return _numbers(value, where, name)
    if kind == "Rows":
        return _rows(value, where, name, declared.metadata["columns"])
    return _number(kind, value, where, name, least)


def _text(value: object, where: str, name: str, choices: Sequence[str] | None) -> str:
    if not isinstance(value, str) or not value.strip():
        raise figure_error(where, name, value, "must be a text that is not empty")
    if choices and value not in choices:
        near = get_close_matches(value, choices, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        rule = f"must be {' or '.join(repr(choice) for choice in choices)}{hint}"
        raise figure_error(where, name, value, rule)
    return value


def _numbers(value: object, where: str, name: str) -> Numbers:
    if not isinstance(value, list | tuple) or not value:
        raise figure_error(where, name, value, "must be a list of numbers that is not empty")
    return tuple(_number("float", v, where, f"{name}[{i}]", None) for i, v in enumerate(value))


def _rows(value: object, where: str, name: str, columns: Sequence[str]) -> Rows:
    if not isinstance(value, list | tuple) or not value:
        rule = f"must be a list of rows [{', '.join(columns)}] that is not empty"
        raise figure_error(where, name, value, rule)
    rows = tuple(_row(row, where, f"{name}[{i}]", columns) for i, row in enumerate(value))
    for i, (before, row) in enumerate(pairwise(rows), start=1):
        if before[:-1] >= row[:-1]:
            rule = f"must come after {list(before)}: rows ascend by {', '.join(columns[:-1])}"
            raise figure_error(where, f"{name}[{i}]", list(row), rule)
    return rows


def _row(row: object, where: str, name: str, columns: Sequence[str]) -> tuple[float, ...]:
    if not isinstance(row, list | tuple) or len(row) != len(columns):
        raise figure_error(where, name, row, f"must be [{', '.join(columns)}]")
    return tuple(
        _number("float" if column == "bits" else "int", value, where, f"{name}.{column}", None)
        for column, value in zip(columns, row, strict=True)
    )


def _number(kind: str, value: object, where: str, name: str, least: int | None) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise figure_error(where, name, value, f"must be a number, not {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise figure_error(where, name, value, "must be finite")
    if value > _LARGEST:
        raise figure_error(where, name, value, f"must be <= {_LARGEST:g}")
    if value < 0 or (least is None and value == 0):
        raise figure_error(where, name, value, "must be >= 0" if least == 0 else "must be > 0")
    if kind == "float":
        return float(value)
    if name.endswith(("_per_s", "_flops")):
        value = max(1, round(value))
    if value != int(value):
        raise figure_error(where, name, value, "must be a whole number")
    return int(value)
