"""What was measured, as rows that ``greenroom calibrate`` reads, and what the machine is beside them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from hwmodels.microbench import COLUMNS
from real.measure import Measured, Samples
from sim.results import write_text

ROW_COLUMNS = (*COLUMNS, "machine", "note")
_DIGITS = 5


def row_of(samples: Samples, machine: str) -> dict[str, Any]:
    """Return one row: what was done, the median of its times, their spread, and how many there are."""
    low_ns, high_ns = samples.quartiles_ns
    middle_ns = samples.median_ns
    note = (
        f"quartiles {low_ns / middle_ns:.2f} to {high_ns / middle_ns:.2f}, "
        f"mean {samples.mean_ratio:.2f} of the median"
    )
    return {
        **{key: _plain(value) for key, value in samples.facts.items()},
        "value_ns": float(f"{middle_ns:.{_DIGITS}g}"),
        "repeats": len(samples.times_ns),
        "spread": round(samples.spread, 4),
        "machine": machine,
        "note": note,
    }


def rows_of(measured: Measured, machine: str) -> list[dict[str, Any]]:
    """Return the rows of all that was measured."""
    return [row_of(samples, machine) for samples in measured.samples]


def ratios_of(measured: Measured) -> dict[str, dict[str, Any]]:
    """Return by how much work is slower beside other work: medians and quartiles of ratios, and repeats."""
    found = {}
    for name, ratios in measured.ratios.items():
        ordered = sorted(ratios)
        quarter = len(ordered) // 4
        found[name] = {
            "median": round(median(ordered), 4),
            "quartiles": [round(ordered[quarter], 4), round(ordered[-1 - quarter], 4)],
            "repeats": len(ordered),
        }
    return found


def summary_of(
    measured: Measured, facts: Mapping[str, Any], setting: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what goes beside the rows: the machine, how it was measured, and the contention."""
    return {
        "date": f"{datetime.now():%Y-%m-%d}",
        "machine": dict(facts),
        "setting": dict(setting),
        "seconds": round(measured.seconds, 1),
        "rounds": measured.num_rounds,
        "stopped_early": measured.was_cut,
        "slowdown": ratios_of(measured),
    }


def write_rows(
    path: Path, rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]
) -> list[Path]:
    """Write the rows (.csv) and the summary (.json) beside them, each whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    used = [name for name in ROW_COLUMNS if any(name in row for row in rows)]
    needed = [*used, *(name for name in ("beside",) if name not in used)]
    writer = csv.DictWriter(text, needed, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    beside = path.with_suffix(".json")
    write_text(beside, json.dumps(summary, indent=1) + "\n")
    write_text(path, text.getvalue())
    return [path, beside]


def _plain(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value
