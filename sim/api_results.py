"""What the Python API gives back: runs, sweeps and comparisons as tables of pandas, figures of matplotlib.

They only read what runs have left on disk, and compute no figure of their own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.api_figures import draw_figure
from sim.api_mistakes import plain_mistakes
from sim.settings import did_you_mean
from sim.types import ConfigError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
Temporary = tempfile.TemporaryDirectory[str] | None

_CHOICES = ("policy", "trace", "model", "machine", "engine", "batch_size", "cache_ratio")
_FOUND = (
    *("tokens_per_s", "tpot_ns_p50", "ttft_ns_p50", "hit_rate", "h2d_bytes", "read_bytes"),
    "bottleneck",
)
"""What short tables show of a run, where it is not 0 or unknown."""


@dataclass(frozen=True, repr=False)
class Run:
    """One run.

    Attributes
    ----------
    folder
        Where its files are; a temporary one lasts as long as this object.
    summary
        Its row of results: choices, metrics (docs/metrics.md), provenance. The same as in ``summary.json``.
    config
        The resolved configuration.
    """

    folder: Path
    summary: dict[str, Any]
    config: dict[str, Any]
    _temporary: Temporary = field(default=None, compare=False)

    @property
    def steps(self) -> pd.DataFrame:
        """A row a step of the engine: times in ns, hits and misses, bytes."""
        return self.read("steps")

    @property
    def requests(self) -> pd.DataFrame:
        """A row a request."""
        return self.read("requests")

    @property
    def ledger(self) -> pd.DataFrame:
        """What a lossy policy gave up, a row a step."""
        return self.read("ledger")

    @property
    def events(self) -> pd.DataFrame:
        """A row a copy, kernel or wait: of ``simulate(..., events=True)``."""
        return self.read("events")

    @property
    def counters(self) -> pd.DataFrame:
        """What changes in time, as bytes in memory: of ``simulate(..., events=True)``."""
        return self.read("counters")

    @plain_mistakes()
    def read(self, name: str) -> pd.DataFrame:
        """Return one of the run's tables, with the columns of its Parquet file.

        Raises ConfigError where the run has written no such table.
        """
        import pyarrow.parquet as pq

        path = self.folder / f"{name}.parquet"
        if not path.is_file():
            there = sorted(file.stem for file in self.folder.glob("*.parquet"))
            hint = {"events": ": simulate(..., events=True) does", "counters": ": events=True does"}
            near = did_you_mean(name, there)
            text = f"{name}: this run has written no such table{hint.get(name, near)}"
            raise ConfigError(f"{text} (there: {', '.join(there)})")
        return pq.read_table(path).to_pandas()

    @plain_mistakes()
    def plot(self, name: str, **options: Any) -> Figure:
        """Draw one of the figures that ``greenroom plot`` draws of a run.

        ``options``: ``window`` (first and last step), ``request``, ``layer``.
        """
        return draw_figure(name, self.folder, options)

    def __repr__(self) -> str:
        cells = _short(self.summary).items()
        return f"Run({', '.join(f'{key}={_rounded(value)}' for key, value in cells)})"

    def _repr_html_(self) -> str:
        return _html_of_run(self.summary)


@dataclass(frozen=True, repr=False)
class Sweep:
    """Many runs.

    Attributes
    ----------
    folder
        Where its files are; a temporary one lasts as long as this object.
    rows
        The summaries of all runs that have one, in the order of the points.
    failed
        What came of the others: their overrides and the error.
    """

    folder: Path
    rows: list[dict[str, Any]]
    failed: list[dict[str, Any]]
    _temporary: Temporary = field(default=None, compare=False)

    @property
    def table(self) -> pd.DataFrame:
        """A row a run, nested fields as dotted columns, as in ``results.parquet``."""
        import pandas as pd

        from sim.results import flatten

        return pd.DataFrame([flatten(row) for row in self.rows])

    @plain_mistakes()
    def league(self, baseline: str | None = None) -> pd.DataFrame:
        """Return how each policy stands against one of them, the fastest of its class first.

        Columns as in ``league.csv``: speeds over the baseline's (geometric mean over the settings that both
        ran in, worst, best), mean hit rate, bytes moved over the baseline's. Without a ``baseline`` it is
        that of the runs' ``output.baseline``, else ``ablation_base``, ``lru`` or ``on_demand``.

        Raises ConfigError where no run is of the baseline.
        """
        import pandas as pd

        from sim.league import league

        names = list(dict.fromkeys(row["policy"] for row in self.rows))
        wished = baseline if baseline is not None else self.rows[0].get("baseline")
        if wished is not None and wished not in names:
            raise ConfigError(f"baseline = {wished}: no run is of it{did_you_mean(wished, names)}")
        found, standings = league(self.rows, wished, least_policies=1, least_settings=1)
        if not found:
            raise ConfigError(f"baseline: must be one of {', '.join(names)}")
        rows = [{"baseline": found, **asdict(one)} for one in standings]
        return pd.DataFrame(rows).set_index("policy")

    @plain_mistakes()
    def by_setting(self, column: str = "tokens_per_s") -> pd.DataFrame:
        """Return one column of the results: a row a setting, a column a policy, as they were run."""
        import pandas as pd

        from sim.labels import value
        from sim.league import names_of, setting_fields

        table = self.table
        if column not in table:
            near = did_you_mean(column, table.columns)
            raise ConfigError(f"{column}: no such column of results{near}")
        fields = setting_fields(self.rows)
        names = [*fields, "cache_ratio"]
        cells: dict[tuple[Any, ...], dict[str, Any]] = {}
        for row, policy, found in zip(self.rows, names_of(self.rows), table[column], strict=True):
            setting = (*(row.get(name, value(row, name)) for name in fields), row["cache_ratio"])
            cells.setdefault(setting, {})[policy] = found
        index: Any = pd.MultiIndex.from_tuples(list(cells), names=names)
        if not fields:
            index = index.get_level_values(0)
        frame = pd.DataFrame(list(cells.values()), index=index)
        frame.columns.name = column
        return frame

    @plain_mistakes()
    def plot(self, name: str, **options: Any) -> Figure:
        """Draw one of the figures that ``greenroom plot`` draws of a sweep; ``options``: ``baseline``."""
        return draw_figure(name, self.folder, options)

    def __repr__(self) -> str:
        failed = f", {len(self.failed)} failed" if self.failed else ""
        return f"Sweep({len(self.rows)} runs{failed}, folder={str(self.folder)!r})"

    def _repr_html_(self) -> str:
        notes = [f"failed: {' '.join(one['overrides'])}: {one['error']}" for one in self.failed]
        return _html_of_sweep(self.rows, notes)


@dataclass(frozen=True, repr=False)
class Comparison:
    """Policies against one of them.

    Attributes
    ----------
    sweep
        The runs.
    baseline
        The policy that the others are compared with.
    league
        See :meth:`Sweep.league`.
    """

    sweep: Sweep
    baseline: str
    league: pd.DataFrame

    @property
    def table(self) -> pd.DataFrame:
        """A row a run."""
        return self.sweep.table

    @plain_mistakes()
    def by_setting(self, column: str = "tokens_per_s") -> pd.DataFrame:
        """Return one column of the results: a row a setting, a column a policy."""
        return self.sweep.by_setting(column)

    @plain_mistakes()
    def plot(self, name: str = "league", **options: Any) -> Figure:
        """Draw one of the figures that ``greenroom plot`` draws of a sweep; ``options``: ``baseline``."""
        return self.sweep.plot(name, **options)

    def __repr__(self) -> str:
        known = self.league.dropna(axis=1, how="all")
        return f"Comparison(baseline={self.baseline!r})\n{known.to_string()}"

    def _repr_html_(self) -> str:
        known = self.league.dropna(axis=1, how="all")
        html: Any = known.style.format(precision=3, na_rep="-").to_html()
        return str(html)


def _short(row: Row, choices: Sequence[str] = _CHOICES) -> dict[str, Any]:
    """Return the columns that a short table shows."""
    names = (*choices, *_FOUND)
    return {name: row[name] for name in names if row.get(name) not in (None, 0)}


def _html_of_run(row: Row) -> str:
    """Return a table of two columns, for a row would be wider than the page."""
    cells = _short(row).items()
    body = "".join(f"<tr><th>{escape(name)}</th>{_cell(value)}</tr>" for name, value in cells)
    return f"<table><tbody>{body}</tbody></table>{_paragraphs(row['notes'])}"


def _html_of_sweep(rows: Sequence[Row], notes: Sequence[str]) -> str:
    """Return a table of a row a run, with the choices in which they differ."""
    from sim.labels import value
    from sim.league import setting_fields

    fields = setting_fields(rows)
    shown = [
        {"policy": row["policy"], **{name: row.get(name, value(row, name)) for name in fields}}
        | _short(row, ["cache_ratio"])
        for row in rows
    ]
    columns = list(dict.fromkeys(name for row in shown for name in row))
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    lines = ["".join(_cell(row.get(name)) for name in columns) for row in shown]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"{table}{_paragraphs(notes)}"


def _rounded(value: Any) -> str:
    """Return a number with four figures, or as a whole one; a text as it is."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"


def _paragraphs(notes: Sequence[str]) -> str:
    return "".join(f"<p>{escape(note)}</p>" for note in notes)


def _cell(value: Any) -> str:
    if value is None:
        text = "-"
    elif isinstance(value, float):
        text = f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    else:
        text = f"{value:,}" if isinstance(value, int) else escape(str(value))
    return f'<td style="text-align:right">{text}</td>'
