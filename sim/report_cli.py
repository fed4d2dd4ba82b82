"""``greenroom report``: all of a run, a sweep or a validation in one HTML file."""

from __future__ import annotations

import argparse
import os
from datetime import UTC, datetime
from pathlib import Path

from sim.command_line import Parser
from sim.mistakes import complain
from sim.types import ConfigError

_EPILOG = """examples:
  greenroom report multirun/2026-01-31/12-00-00.000000   writes report.html into that folder
  greenroom report outputs/RUN --out run.html --open
  greenroom report sweep/results.parquet --baseline lfu --question "Is it worth more than LFU?"

The file holds its figures and needs no network. The same results give the same bytes; a date is in it only
with --date, or where SOURCE_DATE_EPOCH is set."""
_REPORT = "report.html"


def main(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    try:
        _run(make_parser().parse_args(arguments))
    except Exception as error:
        return complain("greenroom report", error)
    return 0


def make_parser() -> Parser:
    """Return what reads the command's arguments."""
    parser = Parser(
        prog="greenroom report",
        description="Put a run, a sweep or a validation into one HTML file that tells all of it.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "folder", metavar="DIR", help="a folder of results, or a results.parquet or summary.json"
    )
    parser.add_argument("--out", metavar="FILE", help=f"the file to write (default: DIR/{_REPORT})")
    parser.add_argument("--question", metavar="TEXT", help="what the results are to answer")
    parser.add_argument("--title", metavar="TEXT", help="title of the page")
    parser.add_argument("--baseline", metavar="NAME", help="the policy to compare others with")
    parser.add_argument("--date", action="store_true", help="print today's date")
    parser.add_argument("--open", action="store_true", help="show it in the web browser")
    return parser


def _run(options: argparse.Namespace) -> None:
    from sim.html.page import Asked
    from sim.html.report import report_of
    from sim.results import write_text

    path = Path(options.folder)
    date = _date(options.date)
    asked = Asked(options.title, options.question, options.baseline, date)
    text = report_of(path, asked)
    out = Path(options.out) if options.out else (path if path.is_dir() else path.parent) / _REPORT
    if out.is_dir():
        raise ConfigError(f"--out {out}: must be a file, and is a folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, text)
    print(f"Report: {out}")
    if options.open:
        import webbrowser

        webbrowser.open(out.absolute().as_uri())


def _date(wanted: bool) -> str | None:
    """Return the date to print: that of SOURCE_DATE_EPOCH, or if wanted today's.

    Raises ConfigError where SOURCE_DATE_EPOCH is no number of seconds.
    """
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given is None:
        return f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC" if wanted else None
    try:
        return f"{datetime.fromtimestamp(int(given), UTC):%Y-%m-%d %H:%M} UTC"
    except (ValueError, OverflowError, OSError) as error:
        raise ConfigError(f"SOURCE_DATE_EPOCH = {given}: must be seconds since 1970") from error
