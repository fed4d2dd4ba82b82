"""``greenroom published``: what others measured beside what is predicted for it, as table and figure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sim.command_line import Parser
from sim.interval import SHARE
from sim.mistakes import complain
from sim.own_options import add_config_dirs, check_folders
from sim.published import (
    COMPLETE,
    FAR,
    Outcome,
    Sizes,
    bundled_rows,
    far_off,
    outcomes,
    summaries,
)
from sim.results import write_csv as write_rows
from sim.screen import screen
from traces.out_file import check_out_folder

FIGURE = "predicted_vs_published"
TABLE = "published.csv"
_OUT = "outputs/published"
_VERY_WIDE = 10_000
_CELL_MARGIN = 3
_LEAST_NOTE = 12
_LEGEND = (
    "tokens/s, decoding unless said; * inputs not fully known. Error: predicted / published speed - 1; "
    "left out: of fits without the row."
)
_EPILOG = """examples:
  greenroom published                                 all rows that come with it
  greenroom published --only 1,5,15                   some of them
  greenroom published --rows mine.yaml --config-dir my_conf --out results

A row has an id, model, machine, engine and value, and may have placement, usage, overrides, metric
(decode_tokens_per_s, prefill_tokens_per_s, ttft_s, tpot_s), complete, source, note and missing; see
conf/published/rows.yaml. Errors of fits without a row are read from errors.csv beside the rows, as
`greenroom calibrate` writes it."""


def main(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    try:
        options = make_parser().parse_args(arguments)
        rows = bundled_rows() if options.rows is None else Path(options.rows)
        only = None if options.only is None else options.only.split(",")
        _run(rows, only, Path(options.out), options.config_dirs)
    except Exception as error:
        return complain("greenroom published", error)
    return 0


def make_parser() -> Parser:
    """Return what reads the command's arguments."""
    parser = Parser(
        prog="greenroom published",
        description="Predict rows that others published, with the files as they are.",
        epilog=_EPILOG,
    )
    parser.add_argument("--rows", metavar="FILE", help="table of rows: YAML, CSV or Parquet")
    parser.add_argument("--only", metavar="IDS", help="rows, by commas (default: all)")
    parser.add_argument("--out", metavar="DIR", default=_OUT, help=f"default: {_OUT}")
    add_config_dirs(parser)
    return parser


def _run(rows: Path, only: Sequence[str] | None, out: Path, config_dirs: Sequence[str]) -> None:
    from sim.figures.published import plot_published

    check_folders(config_dirs)
    check_out_folder(out)
    found = outcomes(rows, only, config_dirs)
    out.mkdir(parents=True, exist_ok=True)
    write_csv(out / TABLE, found)
    figure = plot_published(found, out / FIGURE)
    print_outcomes(found)
    print(f"Figure: {figure}")
    print(f"Table: {out / TABLE}")


def print_outcomes(found: Sequence[Outcome]) -> None:
    """Print the rows, the errors by engine, and which rows are far off and why."""
    console = screen()
    console.print(_fitting_table(console, found))
    console.print(_LEGEND, highlight=False)
    console.print(_summary_table(found))
    for line in _notes(found):
        console.print(line, highlight=False, soft_wrap=True)


def _fitting_table(console: Console, found: Sequence[Outcome]) -> Table:
    """Return the table of rows; notes have the width that is left, or are left out."""
    table = _rows_table(found, 0)
    taken = table.__rich_measure__(console, console.options.update(max_width=_VERY_WIDE)).maximum
    room = console.width - taken - _CELL_MARGIN
    return _rows_table(found, room) if room >= _LEAST_NOTE else table


def _rows_table(found: Sequence[Outcome], note_width: int) -> Table:
    table = Table()
    for name in ("row", "model", "machine", "engine"):
        table.add_column(name, no_wrap=True)
    for name in ("published", "predicted", "error", "left out"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bottleneck", no_wrap=True)
    if note_width:
        table.add_column("note", no_wrap=True, overflow="ellipsis", max_width=note_width)
    for outcome in found:
        table.add_row(
            f"{outcome.name}{'' if outcome.complete else ' *'}",
            *(outcome.model, outcome.machine, outcome.engine),
            _published(outcome),
            f"{outcome.predicted:.4g}",
            signed(outcome.error),
            signed(outcome.unseen.row),
            outcome.bottleneck,
            *([outcome.note] if note_width else []),
        )
    return table


def _summary_table(found: Sequence[Outcome]) -> Table:
    table = Table(
        title="Absolute errors: decode rows by family of engines, then all together",
        title_justify="left",
    )
    table.add_column("", no_wrap=True)
    for name in ("rows", "median", "worst", "row left out: median", "worst"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("machine left out: median", "worst"):
        table.add_column(name, justify="right", no_wrap=True)
    for summary in summaries(found):
        if summary.name == COMPLETE:
            table.add_section()
        num_rows = summary.fitted.num_rows
        cells = [
            cell
            for sizes in (summary.fitted, summary.left_out, summary.machine_left_out)
            for cell in _cells(sizes, num_rows)
        ]
        table.add_row(summary.name, str(num_rows), *cells)
    return table


def _cells(sizes: Sizes, num_rows: int) -> tuple[str, str]:
    """Return median and worst; where not all rows have such an error, of how many."""
    if sizes.median is None or sizes.worst is None:
        return "-", "-"
    some = "" if sizes.num_rows == num_rows else f" (of {sizes.num_rows})"
    return f"{100 * sizes.median:.1f}%{some}", f"{100 * sizes.worst:.1f}%"


def _notes(found: Sequence[Outcome]) -> Iterable[str]:
    far = far_off(found)
    if far:
        yield f"Complete decode rows that miss by more than {FAR:.0%}, and what the prediction lacks:"
        for outcome in far:
            missing = outcome.missing or "not known"
            yield f"  {outcome.name}: {signed(outcome.error)}: {missing}"
    inside = [outcome.is_within for outcome in found if outcome.is_within is not None]
    if inside:
        yield (
            f"Interval of `greenroom predict`: {sum(inside)} of {len(inside)} rows were published within "
            f"it; it is made for {SHARE:.0%}."
        )
    for outcome in found:
        for problem in outcome.problems:
            yield f"Does not fit: {outcome.name}: {problem}"


def signed(error: float | None) -> str:
    """Return an error as a percentage with its sign, or a dash."""
    return "-" if error is None else f"{100 * error:+.1f}%"


def _published(outcome: Outcome) -> str:
    low, high = f"{outcome.low:.4g}", f"{outcome.high:.4g}"
    value = low if low == high else f"{low}-{high}"
    return f"{value}{_MARKS.get(outcome.metric, '')}"


_MARKS = {"prefill_tokens_per_s": " prompt", "ttft_s": " s prompt", "tpot_s": " s"}


def write_csv(path: Path, found: Sequence[Outcome]) -> None:
    """Write a row an outcome: values in the row's own unit, errors of speed, interval over the prediction."""
    rows = [
        {
            "id": outcome.name,
            **{key: getattr(outcome, key) for key in ("model", "machine", "engine", "metric")},
            "published_low": outcome.low,
            "published_high": outcome.high,
            "predicted": outcome.predicted,
            "unit": outcome.unit,
            "tokens": outcome.tokens,
            "error": outcome.error,
            "error_left_out": outcome.unseen.row,
            "error_machine_left_out": outcome.unseen.machine,
            "interval_low": outcome.interval.low,
            "interval_high": outcome.interval.high,
            **{key: getattr(outcome, key) for key in ("complete", "bottleneck")},
            "problems": "; ".join(outcome.problems),
            **{key: getattr(outcome, key) for key in ("missing", "note")},
        }
        for outcome in found
    ]
    write_rows(path, rows)
