"""How far off a prediction may be: from the errors of published rows that were left out when fitting.

``conf/published/errors.csv`` has one row a published figure: id, engine, machine, complete, metric and three
errors, predicted / published - 1: of the fit to all rows, of the fit without the row (``error_left_out``),
and of the fit without all rows of its machine (``error_machine_left_out``).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from sim.types import ConfigError

FEWEST_ROWS = 5
"""Below so many rows of the case's engine those of all engines count; below that there is no interval."""
SHARE = 0.8
"""Share of the rows' ratios that an interval spans: from the 10 % to the 90 % quantile."""
_LEAST_BIAS = 0.0005
"""A median error below this is none: it would be shown as 0.0 %."""
_TIMES = ("tpot_s", "tpot_ms", "ttft_s", "ttft_ms")
_PREFILL = ("prefill_tokens_per_s", "ttft_s", "ttft_ms")
_ERRORS = ("error_left_out", "error_machine_left_out")
_COLUMNS = ("id", "engine", "machine", "complete", "metric", *_ERRORS)


@dataclass(frozen=True, slots=True)
class Missed:
    """One published row: predicted speed / published speed, left out alone and with its whole machine.

    A ratio of times is turned round. None where the calibration has no such error.
    """

    engine: str
    machine: str
    is_complete: bool
    is_prefill: bool
    alone: float | None
    with_machine: float | None
    name: str = ""
    """The row's id."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Real speed over the predicted one, low and high, and how that was got; None: unknown."""

    low: float | None
    high: float | None
    words: str

    def of(self, speed: float) -> tuple[float, float] | None:
        """Return the interval of a predicted speed."""
        if self.low is None or self.high is None:
            return None
        return speed * self.low, speed * self.high

    def of_time(self, time: float) -> tuple[float, float] | None:
        """Return the interval of a predicted time."""
        if self.low is None or self.high is None:
            return None
        return time / self.high, time / self.low


def read_errors(path: Path | None = None) -> list[Missed]:
    """Return the rows of the bundled table, or of another; none where the bundled one is not there.

    Raises ConfigError for a table that cannot be used.
    """
    if path is None:
        bundled = resources.files("conf") / "published" / "errors.csv"
        if not bundled.is_file():
            return []
        lines = bundled.read_text(encoding="utf-8").splitlines()
    else:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeError as error:
            raise ConfigError(f"{path}: cannot be read as CSV: {error}") from error
    where = "conf/published/errors.csv" if path is None else str(path)
    reader = csv.DictReader(lines)
    try:
        for column in _COLUMNS:
            if column not in (reader.fieldnames or ()):
                raise ConfigError(f"{where}: column {column}: missing, must be given")
        return [_missed(row, f"{where}: line {line}") for line, row in enumerate(reader, start=2)]
    except csv.Error as error:
        raise ConfigError(f"{where}: cannot be read as CSV: {error}") from error


def _missed(row: Mapping[str, str], where: str) -> Missed:
    if None in (*(row[column] for column in _COLUMNS),):
        raise ConfigError(f"{where}: must have a cell for each column; is the file cut off?")
    is_time = row["metric"] in _TIMES
    alone, with_machine = (_ratio(row[column], is_time, f"{where}: {column}") for column in _ERRORS)
    return Missed(
        engine=row["engine"],
        machine=row["machine"],
        is_complete=row["complete"].strip().lower() in ("true", "1", "yes"),
        is_prefill=row["metric"] in _PREFILL,
        alone=alone,
        with_machine=with_machine,
        name=row["id"],
    )


def _ratio(text: str | None, is_time: bool, where: str) -> float | None:
    if text is None or not text.strip():
        return None
    try:
        ratio = 1 + float(text)
    except ValueError:
        ratio = math.nan
    if not 0 < ratio < math.inf:
        raise ConfigError(f"{where} = {text}: must be a number > -1, predicted / published - 1")
    return 1 / ratio if is_time else ratio


def interval_of(
    rows: Sequence[Missed],
    engine: str,
    machine: str,
    is_prefill: bool,
    is_changed: bool = False,
    is_own_fit: bool = False,
) -> Interval:
    """Return the interval of a case's decode (or prefill) speed.

    ``machine`` is the name that was chosen; ``is_changed``: some of its parts or figures were, which makes
    it another one. ``is_own_fit``: a calibration of the user's own fitted figures of it, which changes the
    words only, for its errors are not among ``rows``. A machine with fitted rows takes the errors of rows
    left out one at a time, another one those of rows left out with all others of their machine.
    """
    rows = [row for row in rows if row.is_complete and row.is_prefill == is_prefill]
    what = "prefill" if is_prefill else "decode"
    is_known = not is_changed and any(row.machine == machine for row in rows)
    own, whose = _ratios([row for row in rows if row.engine == engine], is_known), engine
    if len(own) < FEWEST_ROWS:
        own, whose = _ratios(rows, is_known), "all engines"
    if len(own) < FEWEST_ROWS:
        return Interval(
            None,
            None,
            f"{what}: no interval, for only {len(own)} published rows have an error that was left out "
            f"(at least {FEWEST_ROWS} are needed)",
        )
    low, high = np.quantile(own, [(1 - SHARE) / 2, (1 + SHARE) / 2])
    # Of rows that all came out too slow, or too fast, it still holds the prediction.
    return Interval(
        min(1.0, float(1 / high)),
        max(1.0, float(1 / low)),
        f"{what}: {SHARE:.0%} of {len(own)} published {what} rows of {whose}, "
        f"{_left_out(is_known, is_own_fit)}, came out at {low:.2f} to {high:.2f} times "
        f"their published speed; {_bias(own)}",
    )


def _left_out(is_known: bool, is_own_fit: bool) -> str:
    """Say which fits made the errors."""
    if is_known:
        return "each left out when the others were fitted (this machine has fitted rows)"
    if is_own_fit:
        return (
            "each left out with all rows of its machine (this machine has figures fitted by a calibration "
            "of your own, whose errors --errors FILE gives)"
        )
    return "each left out with all rows of its machine (this machine has no fitted rows)"


def _bias(ratios: Sequence[float]) -> str:
    """Say on which side predictions fell: why a prediction may lie at an end of its interval."""
    off = float(np.median(ratios)) - 1
    if abs(off) < _LEAST_BIAS:
        return "predictions of such rows were right in the median"
    return f"predictions of such rows were too {'low' if off < 0 else 'high'} in the median by {abs(off):.1%}"


def _ratios(rows: Iterable[Missed], is_known: bool) -> list[float]:
    ratios = (row.alone if is_known else row.with_machine for row in rows)
    return [ratio for ratio in ratios if ratio is not None]
