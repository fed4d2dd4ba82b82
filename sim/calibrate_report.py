"""Tells what a calibration found: tables on the screen, JSON and CSV files, sources for the option files."""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from hwmodels.leave_out import LeftOut
from hwmodels.uncertainty import Direction, Estimate, Fit
from sim.calibrate import Calibrated
from sim.calibrate_names import Field
from sim.calibrate_rows import Row
from sim.results import write_text
from sim.screen import screen

SUMMARY = "calibration.json"
ROWS = "rows.csv"
PARAMETERS = "parameters.csv"
_FEW = 6


# -- what was found, as plain values ---------------------------------------------------------------


def row_records(found: Calibrated) -> list[dict[str, Any]]:
    """Return one record a row; errors are those of the value in the row's own unit, as ratios."""
    if found.fit is None:
        return []
    left: Sequence[LeftOut | None] = found.left_out.get(found.spec.leave_out) or [None] * len(
        found.rows
    )
    predicted = found.fit.predicted.tolist()
    return [_row_record(*given) for given in zip(found.rows, predicted, left, strict=True)]


def _row_record(row: Row, predicted_ns: float, left: LeftOut | None) -> dict[str, Any]:
    measured = row.shown(row.measured_ns)

    def error(time_ns: float) -> float:
        return row.shown(time_ns) / measured - 1

    return {
        "row": row.name,
        "machine": row.composed.choices.get("machine"),
        "engine": None if row.measurement else row.composed.choices.get("engine"),
        "metric": row.metric,
        "unit": row.unit,
        "measured": measured,
        "predicted": row.shown(predicted_ns),
        "error": error(predicted_ns),
        "sigma": row.sigma,
        "left_out_predicted": None if left is None else row.shown(left.predicted),
        "left_out_error": None if left is None else error(left.predicted),
        "rests_on": [] if left is None else list(left.rests_on),
    }


def write_errors(found: Calibrated, path: Path) -> None:
    """Write the errors of each row, from which predictions get their intervals (:mod:`sim.interval`)."""
    given = zip(found.rows, row_records(found), found.left_out["machine"], strict=True)
    write_text(path, _csv([_error_record(*each) for each in given]))


def _error_record(row: Row, record: Mapping[str, Any], left: LeftOut) -> dict[str, Any]:
    without = row.shown(left.predicted) / record["measured"] - 1
    return {
        "id": row.name,
        **{key: record[key] for key in ("engine", "machine")},
        "complete": str(row.facts.get("complete", True)).lower(),
        "metric": row.metric,
        "error_fit": f"{record['error']:.4f}",
        "error_left_out": f"{record['left_out_error']:.4f}",
        "error_machine_left_out": f"{without:.4f}",
    }


def parameter_records(found: Calibrated) -> list[dict[str, Any]]:
    """Return one record a parameter; a standard error that nothing limits is null."""
    return [_parameter_record(estimate) for estimate in found.estimates]


def _parameter_record(estimate: Estimate) -> dict[str, Any]:
    error = estimate.standard_error
    return {
        "parameter": estimate.parameter.name,
        "value": estimate.value,
        "standard_error": error if math.isfinite(error) else None,
        "low_68": estimate.interval_68[0],
        "high_68": estimate.interval_68[1],
        "low_95": estimate.interval_95[0],
        "high_95": estimate.interval_95[1],
        "low": estimate.parameter.low,
        "high": estimate.parameter.high,
        "prior_mean": estimate.parameter.prior_mean,
        "prior_sd": estimate.parameter.prior_sd,
        "data_share": estimate.data_share,
        "decided_by": estimate.decided_by,
        "bound": estimate.bound,
    }


def error_summary(records: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any] | None:
    """Return the median and the worst absolute error of rows; None where there are none."""
    errors = {row["row"]: abs(row[key]) for row in records if row[key] is not None}
    if not errors:
        return None
    worst = max(errors, key=lambda name: errors[name])
    return {"median": median(errors.values()), "worst": errors[worst], "worst_row": worst}


def changes_of(found: Calibrated) -> dict[Field, tuple[Any, str]]:
    """Return what is to be written: of each field its value and its source.

    None of one that neither rows nor a prior say anything of.
    """
    without = {name for table in found.tables for name in table.without}
    changes: dict[Field, tuple[Any, str]] = {}
    for field, estimate in zip(found.fields, found.estimates, strict=True):
        is_blind = estimate.decided_by == "bounds" and not any(field in f for f in found.felt)
        if not is_blind and estimate.parameter.name not in without:
            changes[field] = _written(field, estimate), _source(found, field, estimate)
    for table in found.tables:
        text = f"X: measured ({found.spec.rows.name}); {table.why}"
        changes[table.field] = table.value, text
    return changes


def _written(field: Field, estimate: Estimate) -> int | float:
    name = str(field.at[-1])
    if estimate.parameter.whole or name.endswith(("_per_s", "_flops")):
        return round(estimate.value)
    return float(f"{estimate.value:.5g}")


def _source(found: Calibrated, field: Field, estimate: Estimate) -> str:
    own = [r for r, felt in zip(found.rows, found.felt, strict=True) if field in felt]
    low, high = (_short(value) for value in estimate.interval_95)
    parts = [
        f"F: fitted by greenroom calibrate {found.spec.name} to {found.spec.rows.name}, {_named(own)}"
    ]
    parts.append(f"95 % interval {low} to {high}")
    wish = next(w for w in found.spec.wishes if found.names[w.name] == field)
    if wish.prior_mean is not None and wish.prior_sd is not None:
        parts.append(f"prior {_short(wish.prior_mean)} +- {_short(wish.prior_sd)} ({wish.why})")
    parts.append(f"decided by {_decided(estimate)}")
    return ", ".join(parts)


def _named(rows: Sequence[Row]) -> str:
    """Return the names of end-to-end rows, and how many there are of each kind of microbenchmark."""
    names = [row.name for row in rows if row.measurement is None]
    more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    kinds = Counter(row.metric for row in rows if row.measurement is not None)
    counts = [f"{count} of {kind}" for kind, count in kinds.items()]
    return f"rows: {', '.join([*names[:_FEW], *counts])}{more}"


def _decided(estimate: Estimate) -> str:
    bound = f", at its {estimate.bound} bound" if estimate.bound else ""
    who = {"both": "data and prior"}.get(estimate.decided_by, estimate.decided_by)
    return f"{who} ({estimate.data_share:.0%} data){bound}"


def _short(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e6 else f"{value:.3e}"


# -- files -----------------------------------------------------------------------------------------


def write_report(found: Calibrated, folder: Path) -> None:
    """Write the summary and the two tables, each whole or not at all; the summary last."""
    folder.mkdir(parents=True, exist_ok=True)
    fit, rows, parameters = found.fit, row_records(found), parameter_records(found)
    if rows:
        write_text(folder / ROWS, _csv(rows))
        write_text(folder / PARAMETERS, _csv(parameters))
    summary = {
        "calibration": found.spec.name,
        "table": found.spec.rows.name,
        "sigma": found.spec.sigma,
        "loss": found.spec.loss,
        "leave_out": found.spec.leave_out if found.left_out else None,
        "errors": {
            "fit": error_summary(rows, "error"),
            "left_out": error_summary(rows, "left_out_error"),
        },
        "inflation": fit and fit.inflation,
        "degrees_of_freedom": fit and fit.degrees,
        "rows": rows,
        "parameters": parameters,
        "unused": found.unused,
        "not_told_apart": [
            {"moves": dict(d.moves), "weights": list(d.weights), "signal": d.signal}
            for d in (fit.directions if fit else ())
        ],
        "correlated": [list(pair) for pair in fit.pairs()] if fit else [],
        "tables": [
            {"field": t.field.name, "rows": [list(row) for row in t.value], "why": t.why}
            for t in found.tables
        ],
        "notes": found.notes,
    }
    write_text(folder / SUMMARY, json.dumps(summary, indent=1) + "\n")


def _csv(records: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    for record in records:
        cells = {k: " ".join(v) if isinstance(v, list) else v for k, v in record.items()}
        writer.writerow(cells)
    return text.getvalue()


# -- the screen ------------------------------------------------------------------------------------


def print_report(found: Calibrated) -> None:
    """Print the rows, the parameters, what cannot be told apart, and the errors."""
    console = screen()
    records = row_records(found)
    if records:
        console.print(_row_table(records))
        console.print(_parameter_table(found.estimates))
    for line in report_lines(found, records):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _row_table(records: Sequence[Mapping[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(title="Rows")
    for title in ("row", "machine", "engine"):
        table.add_column(title, overflow="fold")
    for title in ("measured", "predicted", "unit", "error", "left out"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("of these the other rows tell little", overflow="fold")
    for r in records:
        left = r["left_out_error"]
        table.add_row(
            *(r["row"].removeprefix("row "), r["machine"] or "-", r["engine"] or "-"),
            *(f"{r['measured']:.4g}", f"{r['predicted']:.4g}", r["unit"], f"{r['error']:+.1%}"),
            *("-" if left is None else f"{left:+.1%}", ", ".join(r["rests_on"])),
        )
    return table


def _parameter_table(estimates: Sequence[Estimate]) -> Any:
    from rich.table import Table

    table = Table(title="Parameters")
    table.add_column("parameter", overflow="fold")
    for title in ("value", "68 % interval", "95 % interval", "prior", "decided by"):
        table.add_column(title, justify="right")
    for e in estimates:
        p = e.parameter
        prior = (
            "-" if p.prior_mean is None else f"{_short(p.prior_mean)} +- {_short(p.prior_sd or 0)}"
        )
        intervals = [" to ".join(map(_short, i)) for i in (e.interval_68, e.interval_95)]
        table.add_row(p.name, _short(e.value), *intervals, prior, _decided(e))
    return table


def report_lines(found: Calibrated, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what there is to say beside the tables, one line each."""
    lines = []
    for what, key in (("Error", "error"), ("Error of rows left out", "left_out_error")):
        errors = error_summary(records, key)
        if errors is not None:
            worst = f"worst {errors['worst']:.1%} (row {errors['worst_row'].removeprefix('row ')})"
            lines.append(f"{what}: median {errors['median']:.1%}, {worst}.")
    lines += [] if found.fit is None else _judged(found.fit)
    for why in dict.fromkeys(found.unused.values()):
        names = [name for name, own in found.unused.items() if own == why]
        lines.append(f"Left as they are, {why}: {', '.join(names)}.")
    for table in found.tables:
        instead = f", in place of {', '.join(table.without)}" if table.without else ""
        lines.append(
            f"{table.field.name}: a table of {len(table.value)} rows{instead}: {table.why}."
        )
    return [*lines, *found.notes]


def _judged(fit: Fit) -> list[str]:
    lines = []
    if fit.inflation > 1:
        rule = "intervals are wider by that"
        lines.append(f"Rows miss by {fit.inflation:.1f} times what their sigma allows: {rule}.")
    lone = [d.moves[0][0] for d in fit.directions if len(d.moves) == 1]
    if lone:
        lines.append(f"Of these the rows tell less than prior or bounds: {', '.join(lone)}.")
    lines += [_told(direction) for direction in fit.directions if len(direction.moves) > 1]
    lines += [f"{a} and {b} err together: correlation {c:+.2f}." for a, b, c in fit.pairs()]
    return lines


def _told(direction: Direction) -> str:
    moves = ", ".join(f"{name} {_short(value)}" for name, value in direction.moves)
    return f"The rows cannot tell these apart: {moves} would together fit about as well."
