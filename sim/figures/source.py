"""What figures are drawn from: result rows, and for a run the tables in its folder."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.labels import Row
from sim.results import (
    CONFIG,
    COUNTERS,
    EVENTS,
    REQUESTS,
    STEPS,
    SUMMARY,
    read_json,
)
from sim.settings import did_you_mean
from sim.sound_rows import sound_rows
from sim.types import ConfigError
from sim.yaml_aliases import check_aliases

RUN, SWEEP, VALIDATION, PUBLISHED, TRACE = "run", "sweep", "validation", "published", "trace"
VALIDATION_FILE, PUBLISHED_FILE = "validation.json", "published.csv"
_PUBLISHED_COLUMNS = {"published_low", "published_high", "predicted", "error", "engine", "metric"}
Rows = NDArray[np.int64]


class NotDrawableError(ConfigError):
    """A figure cannot be drawn from this source; the message says what it needs."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What of a source is to be drawn; None leaves it to the figure.

    Attributes
    ----------
    window
        First and last step.
    request, layer
        Whose experts.
    baseline
        Whom others are compared with.
    """

    window: tuple[int, int] | None = None
    request: int | None = None
    layer: int | None = None
    baseline: str | None = None


@dataclass(frozen=True)
class Source:
    """Where a figure's values come from.

    Attributes
    ----------
    kind
        ``run``, ``sweep``, ``validation``, ``published`` or ``trace``.
    rows
        Nested result rows; of a validation its runs, of published rows those of the table.
    folder
        Of a run's tables, or None where there are none.
    trace
        Name and path of a trace that is drawn itself.
    """

    kind: str
    rows: Sequence[Row] = field(default_factory=list)
    folder: Path | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    trace: tuple[str, str] | None = None

    @cached_property
    def timed(self) -> list[Row]:
        """Rows of runs that processed something; NotDrawableError where there are none."""
        if self.kind not in (RUN, SWEEP):
            raise NotDrawableError(
                f"needs the results of a run or a sweep, and this is {self.words}"
            )
        found = [row for row in self.rows if row.get("total_ns") and row.get("tokens_per_s")]
        if not found:
            raise NotDrawableError("needs a run that processed a request, and all were refused")
        return found

    @property
    def words(self) -> str:
        """What this is."""
        return "a table of published rows" if self.kind == PUBLISHED else f"a {self.kind}"

    @property
    def several(self) -> list[Row]:
        """Rows of two runs or more; NotDrawableError where this is one."""
        if len(self.timed) < 2:
            raise NotDrawableError("needs a sweep, and this is one run")
        return self.timed

    @property
    def run(self) -> Row:
        """The one run; NotDrawableError where this is a sweep."""
        if self.kind != RUN:
            raise NotDrawableError(f"needs the folder of one run, and this is {self.words}")
        return self.timed[0]

    def table(self, name: str) -> Path:
        """Return the path of a run's table."""
        run = self.run
        path = None if self.folder is None else self.folder / name
        if path is None or not path.is_file():
            how = ", which output.events=true writes" if name in (EVENTS, COUNTERS) else ""
            raise NotDrawableError(f"needs {name} in the folder of the run of {run['policy']}{how}")
        return path

    def column(self, name: str, column: str) -> NDArray[np.int64]:
        """Return a column of whole numbers of a run's table; ConfigError where it holds none."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = self.table(name)
        try:
            found = pq.read_table(path, columns=[column]).column(column)
            if not len(found) or found.null_count:
                raise ValueError(f"column {column} has no rows, or rows without a number")
            return np.asarray(found.cast(pa.int64()).to_numpy(), np.int64)
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            told = f"{path}: cannot be read, is it damaged? ({error})"
            raise ConfigError(told) from error

    @cached_property
    def steps(self) -> dict[str, NDArray[np.int64]]:
        """Columns ``step``, ``stage``, ``start_ns`` and ``end_ns`` of a run's steps, int64[num_steps]."""
        names = ("step", "stage", "start_ns", "end_ns")
        return {name: self.column(STEPS, name) for name in names}

    @cached_property
    def requests(self) -> dict[str, NDArray[np.int64]]:
        """Columns of a run's requests, int64[num_requests]."""
        names = ("request_id", "start_ns", "end_ns")
        return {name: self.column(REQUESTS, name) for name in names}

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration of a run; empty where it is not there."""
        import yaml

        path = None if self.folder is None else self.folder / CONFIG
        if path is None or not path.is_file():
            return {}
        check_aliases(path)
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
        return dict(found) if isinstance(found, dict) else {}

    def of_policies(self, names: Sequence[str]) -> Source:
        """Return the same with these policies only; ConfigError for one that is not there."""
        known = list(dict.fromkeys(str(row.get("policy")) for row in self.rows))
        for name in names:
            if name not in known:
                near = did_you_mean(name, known)
                raise ConfigError(f"--policies {name}: no such policy in these results{near}")
        kept = [row for row in self.rows if row.get("policy") in names]
        return replace(self, rows=kept)


def open_source(path: Path) -> Source:
    """Return what a folder or a file of results holds.

    Raises ConfigError where that is nothing that can be drawn.
    """
    if path.is_dir():
        for name in (VALIDATION_FILE, PUBLISHED_FILE):
            if (path / name).is_file():
                return open_source(path / name)
        kind = RUN if (path / SUMMARY).is_file() else SWEEP
        return Source(kind, sound_rows(path), path)
    if path.suffix == ".json" and path.name != SUMMARY:
        return _validation(path)
    if path.suffix == ".csv":
        return _published(path)
    rows = sound_rows(path)
    return Source(RUN if path.name == SUMMARY else SWEEP, rows, path.parent)


def _validation(path: Path) -> Source:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file or folder")
    found = read_json(path)
    runs = found.get("runs")
    if not isinstance(runs, list) or not runs:
        raise ConfigError(f"{path}: holds no runs of a validation")
    return Source(VALIDATION, runs, path.parent, found)


def _published(path: Path) -> Source:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file or folder")
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
            columns = set(reader.fieldnames or ())
    except (csv.Error, UnicodeError) as error:
        raise ConfigError(f"{path}: cannot be read as CSV: {error}") from error
    if not columns >= _PUBLISHED_COLUMNS or not rows:
        rule = "must be results.parquet, summary.json, validation.json or published.csv"
        raise ConfigError(f"{path}: {rule}, or the folder of one of them")
    return Source(PUBLISHED, rows, path.parent)
