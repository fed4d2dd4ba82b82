"""Published speeds beside what is predicted for them, with the machine and engine files as they are.

An *error* is predicted / published speed - 1, whatever unit the row is in: above 0 the prediction is too
fast. A published range counts as its geometric mean. Nothing is fitted here: the errors that a fit makes
on rows it has not seen (``greenroom calibrate``) are read from a file beside the rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

from hwmodels.predict import predict
from sim.calibrate_rows import METRICS, PROMPT, Row, read_rows
from sim.calibrate_spec import Specification
from sim.calibrate_tables import read_table
from sim.cases import GROUPS
from sim.interval import Interval, interval_of, read_errors
from sim.mistakes import explain
from sim.settings import did_you_mean
from sim.types import ConfigError

ERRORS = "errors.csv"
FAR = 0.2
"""A complete decode row whose error is larger is listed with what its prediction lacks."""
_TEXTS = ("source", "note", "missing")
_KEYS = ("id", *GROUPS, "overrides", "metric", "value", "sigma", "complete", *_TEXTS)
COMPLETE = "complete decode rows"
_FAMILIES = ("llama_cpp", "ik_llama", "ktransformers")


@dataclass(frozen=True, slots=True)
class Unseen:
    """Errors of a row as predicted by fits without it, and without all rows of its machine, if known."""

    row: float | None = None
    machine: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row: ``low`` to ``high`` were published and ``predicted`` predicted, in the row's own ``unit``.

    ``tokens`` is what the time of one step, or of one prompt, gives: speeds are ``tokens`` / time.
    ``missing`` says what effect the prediction lacks, ``problems`` what does not fit in memory, and
    ``interval`` is the one that ``greenroom predict`` gives.
    """

    name: str
    model: str
    machine: str
    engine: str
    metric: str
    unit: str
    low: float
    high: float
    predicted: float
    published_ns: float
    predicted_ns: float
    tokens: int
    complete: bool
    bottleneck: str
    problems: tuple[str, ...]
    note: str
    missing: str
    unseen: Unseen
    interval: Interval

    @property
    def error(self) -> float:
        """Predicted / published speed - 1."""
        return self.published_ns / self.predicted_ns - 1

    @property
    def is_prompt(self) -> bool:
        """Whether the row is of a prompt, not of decoding."""
        return self.metric in PROMPT

    @property
    def is_within(self) -> bool | None:
        """Whether what was published meets the interval of the prediction; None: there is none."""
        low, high, predicted = self.speeds
        around = self.interval.of(predicted)
        return None if around is None else around[0] <= high and low <= around[1]

    @property
    def speeds(self) -> tuple[float, float, float]:
        """Tokens/s: published at least, published at most, predicted."""
        if METRICS[self.metric] == "tokens/s":
            return self.low, self.high, self.predicted
        middle = math.sqrt(self.low * self.high)
        published = self.tokens * 1e9 / self.published_ns
        return (
            published * middle / self.high,
            published * middle / self.low,
            self.tokens * 1e9 / self.predicted_ns,
        )


@dataclass(frozen=True, slots=True)
class Sizes:
    """Median and worst of the errors that rows have, and how many have one; None where none has."""

    num_rows: int
    median: float | None
    worst: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """Absolute errors of a group of rows: as predicted, with the row left out, with its machine left out."""

    name: str
    fitted: Sizes
    left_out: Sizes
    machine_left_out: Sizes


def bundled_rows() -> Path:
    """Return the table of published rows that comes with it."""
    return Path(str(resources.files("conf"))) / "published" / "rows.yaml"


def outcomes(
    rows: Path, only: Sequence[str] | None = None, config_dirs: Sequence[str] = ()
) -> list[Outcome]:
    """Predict the rows of a table, or those of some ids; ConfigError for the first mistake."""
    if not rows.is_file():
        raise ConfigError(f"{rows}: no such file")
    table = read_table(rows)
    if not table:
        raise ConfigError(f"{rows}: has no rows, must have at least one")
    names = [_checked_name(rows, number, row) for number, row in enumerate(table, start=1)]
    for name in only or ():
        if name not in names:
            raise ConfigError(f"--only {name}: no such row{did_you_mean(name, names)}")
    errors = rows.parent / ERRORS
    missed = read_errors(errors) if errors.is_file() else []
    left_out = {row.name: Unseen(_error(row.alone), _error(row.with_machine)) for row in missed}
    spec = Specification(name=rows.stem, path=rows, rows=rows, wishes=())
    wanted = names if only is None else [name for name in names if name in only]
    found = [_outcome(spec, name, left_out.get(name, Unseen()), config_dirs) for name in wanted]
    return [
        replace(o, interval=interval_of(missed, o.engine, o.machine, o.is_prompt)) for o in found
    ]


def _error(ratio: float | None) -> float | None:
    return None if ratio is None else ratio - 1


def _checked_name(rows: Path, number: int, row: Any) -> str:
    """Return a row's id; what the row says is known, and it can be told apart."""
    if not isinstance(row, Mapping):
        raise ConfigError(f"{rows}: row {number} = {row}: must be a mapping")
    if row.get("id") in (None, ""):
        raise ConfigError(f"{rows}: row {number}: id: missing, must be given")
    where = f"{rows.name}: {row['id']}"
    for key in row:
        if key not in _KEYS:
            raise ConfigError(f"{where}: {key}: unknown key{did_you_mean(str(key), _KEYS)}")
    for key in ("model", "machine", "engine", "value"):
        if row.get(key) in (None, ""):
            raise ConfigError(f"{where}: {key}: missing, must be given")
    return str(row["id"])


def _outcome(spec: Specification, name: str, unseen: Unseen, config_dirs: Sequence[str]) -> Outcome:
    """Predict one row; a mistake names it."""
    try:
        found = read_rows(replace(spec, select={"id": name}), config_dirs)
        (row,) = [row for row in found if row.name == name]
        return _predicted(row, unseen)
    except ConfigError:
        raise
    except Exception as error:
        told = explain(error)
        if told is None:
            raise
        raise ConfigError(f"{spec.rows.name}: {name}: {told}") from error


def _predicted(row: Row, unseen: Unseen) -> Outcome:
    case = row.case
    assert case is not None
    prediction = predict(case)
    is_prompt = row.metric in PROMPT
    spent = prediction.prefill if is_prompt else prediction.decode
    low, high = _ends(row.facts["value"])
    complete = str(row.facts.get("complete", True)).lower() not in ("false", "0")
    note, missing = (str(row.facts.get(key) or "") for key in ("note", "missing"))
    return Outcome(
        name=row.name,
        model=str(row.facts["model"]),
        machine=str(row.facts["machine"]),
        engine=str(row.facts["engine"]),
        metric=row.metric,
        unit=row.unit,
        low=low,
        high=high,
        predicted=row.shown(spent.total_ns),
        published_ns=row.measured_ns,
        predicted_ns=spent.total_ns,
        tokens=case.prompt_tokens if is_prompt else case.batch_size,
        complete=complete,
        bottleneck=max(spent.ns, key=lambda part: spent.ns[part]),
        problems=prediction.problems,
        note=note,
        missing=missing,
        unseen=unseen,
        interval=_NO_INTERVAL,
    )


def _ends(value: Any) -> tuple[float, float]:
    """Return the ends of a published value, which the reader of rows has checked."""
    found = json.loads(value) if isinstance(value, str) else value
    return (found[0], found[-1]) if isinstance(found, list) else (found, found)


_NO_INTERVAL = Interval(None, None, "")


# -- what came of it --------------------------------------------------------------------------------


def summaries(found: Sequence[Outcome]) -> list[Summary]:
    """Return the errors of decode rows by family of engines, of the complete ones, of prompts, of all.

    Rows whose inputs are not fully known (``*``) are apart from the others of their family.
    """
    groups: dict[str, list[Outcome]] = {}
    for outcome in found:
        if not outcome.is_prompt:
            name = f"{family(outcome.engine)}{'' if outcome.complete else ' *'}"
            groups.setdefault(name, []).append(outcome)
    groups[COMPLETE] = [o for o in found if o.complete and not o.is_prompt]
    groups["prompts"] = [o for o in found if o.is_prompt]
    groups["all rows"] = list(found)
    return [_summary(name, rows) for name, rows in groups.items() if rows]


def family(engine: str) -> str:
    """Return the engine of which another one is a variant: ``llama_cpp`` of ``llama_cpp_2025``."""
    return next((name for name in _FAMILIES if engine.startswith(f"{name}_")), engine)


def _summary(name: str, rows: Sequence[Outcome]) -> Summary:
    return Summary(
        name,
        _sizes(outcome.error for outcome in rows),
        _sizes(outcome.unseen.row for outcome in rows),
        _sizes(outcome.unseen.machine for outcome in rows),
    )


def _sizes(errors: Iterable[float | None]) -> Sizes:
    sizes = [abs(error) for error in errors if error is not None]
    return Sizes(len(sizes), median(sizes), max(sizes)) if sizes else Sizes(0, None, None)


def far_off(found: Iterable[Outcome]) -> list[Outcome]:
    """Return the complete decode rows that miss by more than ``FAR``."""
    return [o for o in found if o.complete and not o.is_prompt and abs(o.error) > FAR]
