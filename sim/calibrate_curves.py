"""Measured rows that stand in an option file as a table, where a formula is not their law."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hwmodels.curves import on_grid, proportional
from hwmodels.microbench import Measurement, expert_table, gpu_expert_table, storage_curve
from hwmodels.uncertainty import Fit
from sim.calibrate_names import Field, Options, owner_of
from sim.calibrate_rows import Row
from sim.calibrate_spec import Specification

TABULATED = ("storage", "expert_gpu")
"""The kinds of rows that are a curve themselves: there is nothing to fit."""
_CPU = ("machine", "machine/cpu")


@dataclass(frozen=True, slots=True)
class Table:
    """Measured rows that stand in a file in place of a formula; ``why`` says for what reason.

    ``without`` are the parameters of the formula, which are then not written.
    """

    field: Field
    value: tuple[tuple[float, ...], ...]
    why: str
    without: tuple[str, ...] = ()


def _by_machine(rows: Sequence[Row], kind: str) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.metric == kind:
            found.setdefault(row.composed.choices["machine"], []).append(row)
    return found


def _measurements(rows: Sequence[Row]) -> list[Measurement]:
    return [row.measurement for row in rows if row.measurement is not None]


def measured_tables(rows: Sequence[Row], options: Options) -> list[Table]:
    """Return what rows are by themselves: storage curves, and experts of the device, by machine."""
    return storage_curves(rows, options) + _device_tables(rows, options)


def _device_tables(rows: Sequence[Row], options: Options) -> list[Table]:
    tables = []
    for own in _by_machine(rows, "expert_gpu").values():
        field = owner_of(("machine", "gpu", "expert_table"), own, options)
        value = gpu_expert_table(_measurements(own))
        miss = between_points(value)
        law = "" if miss is None else f"; straight lines miss a point left out by up to {miss:.0%}"
        tables.append(Table(field, value, f"{len(own)} measured experts{law}"))
    return tables


def between_points(table: Sequence[Sequence[float]]) -> float | None:
    """Return how far a table misses one of its points that is left out, along its tokens.

    None where no size has three of them.
    """
    misses = []
    for size in {row[0] for row in table}:
        own = [row for row in table if row[0] == size]
        for i, (_, tokens, time_ns) in enumerate(own[1:-1], start=1):
            without = own[:i] + own[i + 1 :]
            misses.append(abs(float(on_grid(without, size, tokens, proportional)) / time_ns - 1))
    return max(misses, default=None)


def storage_curves(rows: Sequence[Row], options: Options) -> list[Table]:
    """Return the storage curves of the rows by machine."""
    tables = []
    for own in _by_machine(rows, "storage").values():
        field = owner_of(("machine", "storage", "curve"), own, options)
        value = storage_curve(_measurements(own))
        bend = _bend(value)
        law = "" if bend is None else f"; setup + bytes / rate misses them by up to {bend:.0%}"
        tables.append(Table(field, value, f"{len(own)} measured reads{law}"))
    return tables


def _bend(curve: Sequence[Sequence[float]]) -> float | None:
    """Return how far a straight line through a depth's first and last block misses the time of others.

    None where no depth has more than two sizes of blocks.
    """
    misses = []
    for depth in {row[1] for row in curve}:
        own = [(row[0], row[0] / row[2]) for row in curve if row[1] == depth]
        (first, first_s), (last, last_s) = own[0], own[-1]
        for size, time_s in own[1:-1]:
            line = first_s + (last_s - first_s) * (size - first) / (last - first)
            misses.append(abs(line / time_s - 1))
    return max(misses, default=None)


def expert_tables(
    spec: Specification,
    rows: Sequence[Row],
    fit: Fit,
    fields: Sequence[Field],
    felt: Sequence[Sequence[Field]],
    options: Options,
    notes: list[str],
) -> list[Table]:
    """Return tables of CPU experts for machines whose rows the formula misses."""
    tables = []
    residual = dict(zip([row.name for row in rows], fit.residuals.tolist(), strict=True))
    for machine, own in _by_machine(rows, "expert_cpu").items():
        worst = max(abs(residual[row.name]) for row in own)
        if worst <= spec.tolerance:
            continue
        cpu = own[0].composed.config["machine"]["cpu"]
        value = expert_table(_measurements(own), cpu["threads_used"])
        missed = f"{machine}: setup + bytes / rate misses CPU experts by up to {worst:.0%}"
        if not value:
            rule = f"no row has threads = threads_used = {cpu['threads_used']}, so that there is no table"
            notes.append(f"{missed}; {rule}.")
            continue
        field = owner_of(("machine", "cpu", "expert_table"), own, options)
        others = [f for row, f in zip(rows, felt, strict=True) if row.metric != "expert_cpu"]
        cpu_options = {(group, row.composed.choices[group]) for row in own for group in _CPU}
        without = tuple(
            f.name
            for f in fields
            if (f.group, f.option) in cpu_options and not any(f in depends for depends in others)
        )
        tables.append(Table(field, value, missed, without))
    return tables
