"""How far the files of a measured machine are from the rows that they were made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from hwmodels.bench_kinds import ALONE
from hwmodels.engine import Engine
from hwmodels.machine import Machine
from sim.calibrate import Calibrated
from sim.calibrate_draft import Measured


def misses_of(
    files: Mapping[Path, str], own: str, found: Calibrated, rows: Sequence[Measured]
) -> dict[str, tuple[float, float]]:
    """Return by kind how far formulas with the files' figures miss rows that nothing ran beside.

    ``own`` is the machine's name. Kinds that its files have as tables are left out.
    """
    import yaml

    whole = yaml.safe_load(files[Path("machine") / f"{own}.yaml"])
    choices = {k: v for entry in whole["defaults"] if entry != "_self_" for k, v in entry.items()}
    parts = {
        part: option and yaml.safe_load(files[Path("machine") / part / f"{option}.yaml"])
        for part, option in choices.items()
    }
    machine = Machine.from_mapping({"name": own, **parts})
    engine = Engine.from_mapping(found.rows[0].composed.config["engine"])
    tables: dict[str, Any] = {"expert_gpu": True, "storage": True}
    tables["expert_cpu"] = machine.cpu.expert_table
    errors: dict[str, list[float]] = {}
    for row in (measured.row for measured in rows):
        if not tables.get(row.kind) and row.arguments.get("beside", ALONE) == ALONE:
            miss = abs(row.predict_ns(machine, engine) / row.value_ns - 1)
            errors.setdefault(row.kind, []).append(miss)
    return {kind: (median(each), max(each)) for kind, each in errors.items()}
