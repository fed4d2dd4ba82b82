"""Reads tables of measured rows: microbenchmarks (a column ``kind``) or end to end (a column ``model``).

Each row becomes one time, a configuration that is composed once, and how the time is predicted from it.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hwmodels.cost import CostModel
from hwmodels.engine import Engine
from hwmodels.machine import Machine
from hwmodels.microbench import Measurement
from hwmodels.predict import Case, predict
from sim.calibrate_spec import ALONE, Specification
from sim.calibrate_tables import read_table
from sim.cases import GROUPS, Composed, case_of, compose_case
from sim.mistakes import explain
from sim.own_options import SEARCHPATH
from sim.settings import did_you_mean, is_number
from sim.types import ConfigError

METRICS = {
    "decode_tokens_per_s": "tokens/s",
    "prefill_tokens_per_s": "tokens/s",
    "ttft_s": "s",
    "tpot_s": "s",
}
"""What an end-to-end row may have measured, and its unit."""
PROMPT = ("prefill_tokens_per_s", "ttft_s")
"""Those that are of a prompt."""
_MOST = 1e24
"""No time or speed comes near it, and what is made of two of them stays finite."""
_DEFAULTS = {"metric": "decode_tokens_per_s", "complete": True}
_NOT_ASKED = ("id", "machine", "engine", "source", "note")
"""Columns of a microbenchmark that are not its own."""


@dataclass(frozen=True, slots=True)
class Row:
    """A measured row.

    ``sigma`` is its relative error, ``facts`` what it can be selected and grouped by, ``measurement`` the
    microbenchmark it is (None: end-to-end); ``shown`` turns a time in ns into the row's own unit and back.
    """

    name: str
    metric: str
    unit: str
    measured_ns: float
    sigma: float
    facts: Mapping[str, Any]
    composed: Composed
    measurement: Measurement | None
    overrides: tuple[str, ...]
    case: Case | None
    shown: Callable[[float], float]

    def time_ns(self, machine: Machine, engine: Engine, config: Mapping[str, Any] | None) -> float:
        """Return the predicted time; ``config`` stands for all where more changed than these two."""
        if self.measurement is not None:
            return self.measurement.predict_ns(machine, engine)
        assert self.case is not None
        case = self.case if config is None else _short(case_of(config), self.metric)
        if config is None:
            costs = self.case.costs
            if machine.link and costs.machine.link:  # a placement may say what is pinned
                link = replace(machine.link, pinned=costs.machine.link.pinned)
                machine = replace(machine, link=link)
            case = replace(case, costs=CostModel(costs.shape, machine, engine))
        prediction = predict(case)
        return prediction.ttft_ns if self.metric in PROMPT else prediction.tpot_ns


def read_rows(spec: Specification, config_dirs: Sequence[str] = ()) -> list[Row]:
    """Return the selected rows of a specification's table, composed; ConfigError for the first mistake."""
    table = read_table(spec.rows)
    if not table:
        raise ConfigError(f"{spec.rows}: has no rows, must have at least one")
    named = [(_name(spec.rows, i, row), row) for i, row in enumerate(table, start=1)]
    names = [name for name, _ in named]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ConfigError(f"{spec.rows}: id = {name}: must be that of one row only")
    kept = _selected(spec, named)
    composed: dict[tuple[str, ...], Composed] = {}
    return [_row(spec, name, row, composed, tuple(config_dirs)) for name, row in kept]


def _name(path: Path, number: int, row: Any) -> str:
    if not isinstance(row, Mapping):
        raise ConfigError(f"{path}: row {number} = {row}: must be a mapping")
    given = row.get("id")
    return str(given) if given not in (None, "") else f"row {number}"


# -- selection -------------------------------------------------------------------------------------


def _selected(
    spec: Specification, named: Sequence[tuple[str, dict[str, Any]]]
) -> list[tuple[str, dict[str, Any]]]:
    columns = {"id", *_DEFAULTS, *(key for _, row in named for key in row)}
    wanted = [*spec.select, *spec.exclude, *([spec.leave_out] if spec.leave_out != ALONE else [])]
    for column in wanted:
        if column not in columns:
            where = "select" if column in spec.select else "exclude"
            where = where if column != spec.leave_out else "leave_out"
            raise ConfigError(
                f"{spec.path}: {where}: {column}: no such column{did_you_mean(column, columns)}"
            )
    kept = [
        (name, row)
        for name, row in named
        if all(_matches(name, row, key, value) for key, value in spec.select.items())
        and not any(_matches(name, row, key, value) for key, value in spec.exclude.items())
    ]
    if not kept:
        raise ConfigError(f"{spec.path}: select: leaves none of {len(named)} rows")
    return kept


def _matches(name: str, row: Mapping[str, Any], column: str, wanted: Any) -> bool:
    found = name if column == "id" else row.get(column)
    values = wanted if isinstance(wanted, list) else [wanted]
    if found in (None, ""):
        found = _DEFAULTS.get(column)
    return str(found).lower() in {str(value).lower() for value in values}


# -- rows ------------------------------------------------------------------------------------------


def _row(
    spec: Specification,
    name: str,
    given: Mapping[str, Any],
    composed: dict[tuple[str, ...], Composed],
    config_dirs: tuple[str, ...],
) -> Row:
    where = f"{spec.rows.name}: {name}"
    row = {key: value for key, value in given.items() if value is not None and value != ""}
    if ("kind" in row) == ("model" in row):
        rule = "must have a kind (a microbenchmark) or a model (end to end), not both"
        raise ConfigError(f"{where}: {rule}")
    overrides = tuple(_overrides(spec, where, row))
    if overrides not in composed:
        composed[overrides] = _compose(where, overrides, config_dirs)
    make = _microbenchmark if "kind" in row else _end_to_end
    return make(spec, where, name, row, overrides, composed[overrides])


def _compose(where: str, overrides: Sequence[str], config_dirs: tuple[str, ...]) -> Composed:
    """Compose a row; a user's mistake in it is told with the row's name."""
    try:
        return compose_case(overrides, config_dirs)
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        raise ConfigError(f"{where}: {message}") from error


def _overrides(spec: Specification, where: str, row: Mapping[str, Any]) -> list[str]:
    groups = ("machine", "engine") if "kind" in row else GROUPS
    found = []
    for group in groups:
        option = row.get(group, getattr(spec, group, None))
        if option is not None:
            found.append(f"{group}={option}")
        elif group == "machine":
            rule = "must be given, by the row or the calibration (--machine NAME)"
            raise ConfigError(f"{where}: machine: missing, {rule}")
    more = row.get("overrides", [])
    try:
        more = shlex.split(more) if isinstance(more, str) else more
    except ValueError as error:
        raise ConfigError(f"{where}: overrides = {more}: cannot be parted: {error}") from None
    if not isinstance(more, list) or not all(isinstance(text, str) for text in more):
        raise ConfigError(f"{where}: overrides = {more}: must be a list of KEY=VALUE")
    for text in more:
        if text.lstrip("+~").startswith(SEARCHPATH):
            raise ConfigError(f"{where}: {text}: must be given for all rows, as --config-dir DIR")
    for text in (*found, *more):
        if "${" in text:  # rows are data: nobody's environment is read for them
            raise ConfigError(f"{where}: {text}: must be plain, without ${{...}}")
    return [*found, *more]


def _microbenchmark(
    spec: Specification,
    where: str,
    name: str,
    row: Mapping[str, Any],
    overrides: tuple[str, ...],
    composed: Composed,
) -> Row:
    own = {key: value for key, value in row.items() if key not in _NOT_ASKED}
    measured = Measurement.from_mapping(own, where)
    label = ", ".join(f"{key} {row[key]}" for key in measured.arguments if key in row)
    return Row(
        name=name if "id" in row else f"{name}: {measured.kind} {label}".rstrip(),
        metric=measured.kind,
        unit="us",
        measured_ns=measured.value_ns,
        sigma=math.hypot(spec.sigma, measured.error),
        facts={**row, "machine": composed.choices["machine"]},
        composed=composed,
        measurement=measured,
        overrides=overrides,
        case=None,
        shown=lambda time_ns: time_ns / 1e3,
    )


def _end_to_end(
    spec: Specification,
    where: str,
    name: str,
    row: Mapping[str, Any],
    overrides: tuple[str, ...],
    composed: Composed,
) -> Row:
    metric = row.get("metric", _DEFAULTS["metric"])
    if metric not in METRICS:
        raise ConfigError(
            f"{where}: metric = {metric}: no such metric{did_you_mean(str(metric), METRICS)}"
        )
    value, error = _value(where, row)
    case = case_of(composed.config)
    tokens = {"decode_tokens_per_s": case.batch_size, "prefill_tokens_per_s": case.prompt_tokens}
    count = tokens.get(metric, 0)  # 0: the row tells a time

    def turned(value: float) -> float:
        return count * 1e9 / value if count else value / 1e9

    return Row(
        name=name,
        metric=metric,
        unit=METRICS[metric],
        measured_ns=turned(value) if count else value * 1e9,
        sigma=math.hypot(_sigma(where, row, spec.sigma), error),
        facts={**_DEFAULTS, **row, **{group: composed.choices.get(group) for group in GROUPS}},
        composed=composed,
        measurement=None,
        overrides=overrides,
        case=_short(case, metric),
        shown=turned,
    )


def _short(case: Case, metric: str) -> Case:
    """Return a case that is asked for one metric only: a prompt that nobody asks of takes time."""
    return case if metric in PROMPT else replace(case, prompt_tokens=1, prefill_chunk=None)


def _value(where: str, row: Mapping[str, Any]) -> tuple[float, float]:
    """Return a value, and its relative error where it is a range: the geometric mean and half of it."""
    value: Any = row.get("value")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ConfigError(f"{where}: value = {value}: must be a number") from None
    ends = value if isinstance(value, list) else [value]
    for end in ends:
        if not is_number(end) or not 1 / _MOST <= end <= _MOST:
            rule = f"must be a number from {1 / _MOST:g} to {_MOST:g}, or [low, high]"
            raise ConfigError(f"{where}: value = {value}: {rule}")
    if len(ends) not in (1, 2) or ends[-1] < ends[0]:
        raise ConfigError(f"{where}: value = {value}: must be a number, or [low, high]")
    return math.sqrt(ends[0] * ends[-1]), math.log(ends[-1] / ends[0]) / 2


def _sigma(where: str, row: Mapping[str, Any], usual: float) -> float:
    given = row.get("sigma", usual)
    try:
        sigma = float(given)
    except (TypeError, ValueError, OverflowError):
        sigma = math.nan
    if not (math.isfinite(sigma) and sigma > 0):
        raise ConfigError(f"{where}: sigma = {given}: must be a finite number > 0")
    return sigma
