"""Measured pieces of work, one a row (:mod:`hwmodels.bench_kinds`): reads them from plain values.

Where a curve is not the model's, tables replace constants: :func:`expert_table`, :func:`storage_curve`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from statistics import median
from typing import Any

from hwmodels.bench_kinds import ALONE, BESIDE, KINDS, Kind
from hwmodels.engine import Engine
from hwmodels.errors import figure_error, missing_error, unknown_error
from hwmodels.fields import Rows
from hwmodels.machine import Machine
from hwmodels.units import NS_PER_S

_UNITS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
_RATES = {"bytes_per_s": 1.0, "gb_per_s": 1e9, "flops": 1.0, "tflops": 1e12}


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measured row: how long the work took in the mean, and the relative error of that mean."""

    kind: str
    value_ns: float
    error: float
    arguments: Mapping[str, Any]

    @classmethod
    def from_mapping(cls, row: Mapping[str, Any], where: str) -> Measurement:
        """Read a row as a table gives it, texts as in CSV or plain values; empty cells count as not given.

        The value is ``value_ns``, or ``value`` with a ``unit``: ns, us, ms, s, bytes_per_s, gb_per_s, flops,
        tflops. ``spread`` is the relative standard deviation of ``repeats`` measurements. Raises
        HardwareError for the first mistake; ``where`` names the row.
        """
        given = {key: value for key, value in row.items() if value is not None and value != ""}
        kind = given.pop("kind", None)
        if kind is None:
            raise missing_error(where, "kind")
        if kind not in KINDS:
            near = get_close_matches(str(kind), KINDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(KINDS)}"
            raise figure_error(where, "kind", kind, f"unknown kind; {hint}")
        declared = KINDS[kind].arguments
        known = (*declared, *_VALUES)
        for key, value in given.items():
            if key not in known:
                raise unknown_error(where, str(key), value, known)
        arguments = {}
        for name, default in declared.items():
            if name not in given and default is None:
                raise missing_error(where, f"{name} of kind {kind}")
            arguments[name] = _argument(name, given.get(name, default), where)
        repeats = _number(given.get("repeats", 1), where, "repeats")
        spread = _number(given.get("spread", 0), where, "spread", least=0)
        value_ns = _value_ns(KINDS[kind], given, arguments, where)
        return cls(kind, value_ns, spread / math.sqrt(repeats), arguments)

    def depends_on(self, part: str) -> bool:
        """Tell whether the time depends on figures of a part of the machine: gpu, link, cpu or storage."""
        return KINDS[self.kind].part == part

    def predict_ns(self, machine: Machine, engine: Engine) -> float:
        """Return how long the work takes on a machine; HardwareError where it lacks the part for it.

        The formulas are asked, even where the machine has tables of measured experts.
        """
        cpu, gpu = machine.cpu, machine.gpu
        if cpu.expert_table is not None:
            machine = replace(machine, cpu=replace(cpu, expert_table=None))
        if gpu is not None and gpu.expert_table is not None:
            machine = replace(machine, gpu=replace(gpu, expert_table=None))
        return KINDS[self.kind].predict(self.arguments, machine, engine)


_VALUES = ("value", "unit", "value_ns", "repeats", "spread")
COLUMNS = tuple(
    dict.fromkeys(("kind", *_VALUES, *(name for kind in KINDS.values() for name in kind.arguments)))
)
"""All columns that a table of such rows may have."""
_FLAGS = ("pinned", "queued")
_CHOICES = {"direction": ("h2d", "d2h"), "mode": ("graph", "stream"), "beside": BESIDE}


def _argument(name: str, value: Any, where: str) -> Any:
    if name in _FLAGS:
        text = str(value).lower()
        if text not in ("true", "false", "1", "0"):
            raise figure_error(where, name, value, "must be true or false")
        return text in ("true", "1")
    if name in _CHOICES:
        if value not in _CHOICES[name]:
            raise figure_error(where, name, value, f"must be {' or '.join(_CHOICES[name])}")
        return value
    number = _number(value, where, name)
    if not name.endswith("bits") and number != int(number):
        raise figure_error(where, name, value, "must be a whole number")
    return number if name.endswith("bits") else int(number)


def _number(value: Any, where: str, name: str, least: float | None = None) -> float:
    """Return a number > 0, or >= ``least``."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise figure_error(where, name, value, "must be a number") from None
    if isinstance(value, bool) or not math.isfinite(number):
        raise figure_error(where, name, value, "must be a finite number")
    if number < 0 or (least is None and number == 0):
        raise figure_error(where, name, value, "must be > 0" if least is None else "must be >= 0")
    return number


def _value_ns(
    kind: Kind, given: Mapping[str, Any], arguments: Mapping[str, Any], where: str
) -> float:
    if "value_ns" in given:
        if "value" in given:
            raise figure_error(where, "value", given["value"], "must not be given beside value_ns")
        return _number(given["value_ns"], where, "value_ns")
    for name in ("value", "unit"):
        if name not in given:
            raise missing_error(where, "value_ns, or value and unit" if name == "value" else name)
    value, unit = _number(given["value"], where, "value"), str(given["unit"]).lower()
    if unit in _UNITS:
        return value * _UNITS[unit]
    if unit not in _RATES or kind.work is None:
        known = ", ".join((*_UNITS, *(_RATES if kind.work else ())))
        raise figure_error(where, "unit", given["unit"], f"must be one of {known}")
    return kind.work(arguments) * NS_PER_S / (value * _RATES[unit])


# -- tables ----------------------------------------------------------------------------------------


def expert_table(rows: Sequence[Measurement], threads_used: int) -> Rows:
    """Return ``cpu.expert_table`` of measured experts: medians of those by all threads in use."""
    return _expert_table(
        [
            row
            for row in rows
            if row.kind == "expert_cpu" and row.arguments["threads"] == threads_used
        ]
    )


def gpu_expert_table(rows: Sequence[Measurement]) -> Rows:
    """Return ``gpu.expert_table`` of measured experts: medians."""
    return _expert_table([row for row in rows if row.kind == "expert_gpu"])


def _expert_table(rows: Sequence[Measurement]) -> Rows:
    """Return rows (bytes, tokens, ns) of experts that nothing ran beside."""
    found: dict[tuple[int, ...], list[float]] = {}
    for row in rows:
        a = row.arguments
        if a["beside"] == ALONE:
            key = a["num_bytes"], a["num_tokens"]
            found.setdefault(key, []).append(row.value_ns / a.get("num_experts", 1))
    return tuple((*key, round(median(times))) for key, times in sorted(found.items()))


def storage_curve(rows: Sequence[Measurement]) -> Rows:
    """Return ``storage.curve`` of measured reads: medians."""
    found: dict[tuple[int, ...], list[float]] = {}
    for row in rows:
        if row.kind == "storage":
            key = row.arguments["block_bytes"], row.arguments["queue_depth"]
            found.setdefault(key, []).append(key[0] * NS_PER_S / row.value_ns)
    return tuple((*key, round(median(rates))) for key, rates in sorted(found.items()))
