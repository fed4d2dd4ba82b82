"""A validation as data: a row a run for CSV, and all of it for JSON."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import numpy as np

from real.observed import Mean, Observed
from real.validate_predict import Compared
from real.validate_result import Played, Validation
from real.validate_score import Errors, depends_on_arrivals, errors_by, ranking, verdict


def run_rows(found: Validation) -> list[dict[str, Any]]:
    """Return a row a run, references last; times are of a decode step."""
    rows = [_row(run, False) for run in found.rows]
    return [*rows, *(_row(run, True) for run in found.references)]


def _row(run: Compared, is_reference: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        **{name: getattr(run, name) for name in ("tier", "batch_size", "ratio", "policy")},
        "is_reference": is_reference,
        "num_steps": run.num_steps,
        "measured_ns": round(run.measured_ns),
        "predicted_ns": round(run.predicted_ns),
        "error": round(run.error, 6),
        "noise": round(run.noise, 6),
        "depends_on_arrivals": depends_on_arrivals(run),
        "counts_equal": run.counts_equal,
    }
    for name, (predicted, measured) in run.counts.items():
        row |= {f"{name}.measured": measured, f"{name}.predicted": predicted}
    for name, (predicted_ns, measured_ns) in run.resources.items():
        row |= {f"{name}.measured": round(measured_ns), f"{name}.predicted": round(predicted_ns)}
    return row


def whole(found: Validation) -> dict[str, Any]:
    """Return all that a validation found, as plain values."""
    bars = verdict(found.rows, found.parity)
    by_block = errors_by(found.rows, lambda row: f"{row.tier}, batch {row.batch_size}")
    return {
        "is_met": all(bar.is_met for bar in bars),
        "verdict": [asdict(bar) for bar in bars],
        "machine": found.facts,
        "asked": {**asdict(found.matrix), **found.asked},
        "seconds": round(found.seconds, 1),
        "notes": found.notes,
        "errors": [_errors(one) for one in by_block],
        "ranking": {**asdict(ranking(found.rows)), "tau": ranking(found.rows).tau},
        "blocks": [_block(one) for one in found.played],
        "limits": [_plain(asdict(one)) for one in found.limits],
        "parity": [asdict(one) for one in found.parity],
        "runs": run_rows(found),
    }


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return numpy's numbers as Python's."""
    return {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in values.items()
    }


def _errors(one: Errors) -> dict[str, Any]:
    values = {name: getattr(one, name) for name in ("name", "num_runs", "median", "worst")}
    return {**values, "worst_policy": one.worst_run.policy}


def _block(one: Played) -> dict[str, Any]:
    return {
        "name": one.block.name,
        "num_runs": len(one.block.wanted),
        "num_rounds": one.num_rounds,
        "seconds": round(one.seconds, 1),
        "observed": observed_figures(one.observed),
    }


def observed_figures(seen: Observed) -> dict[str, Any]:
    """Return what references showed, in the mean: rates in bytes/s, times in ns."""
    figures: dict[str, Any] = {"copy_bytes_per_s": seen.copy_bytes_per_s}
    for name in (field.name for field in fields(seen)):
        value = getattr(seen, name)
        if isinstance(value, Mean):
            figures[f"{name}_ns"] = round(value.value())
        elif isinstance(value, dict):
            figures[name] = [
                {"of": key, "ns": round(mean.value()), "count": mean.count}
                for key, mean in sorted(value.items())
            ]
    return figures
