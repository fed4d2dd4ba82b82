"""``greenroom import``: makes a trace, or expert counts, of what another tool recorded."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sim.command_line import Parser
from sim.mistakes import complain
from sim.told_options import add_told_options, refuse_unused, told_from
from traces.counts import ExpertCounts, write_counts
from traces.importers.formats import FORMATS, Format, format_named
from traces.importers.looks_like import looks_like
from traces.out_file import check_out
from traces.store import is_trace_file, write_trace
from traces.trace import Trace, TraceError

_PROGRAM = "greenroom import"
_EXAMPLES = """examples:
  greenroom import                                   the formats, one a line
  greenroom import finemoe my_states --model qwen1_5_moe_a2_7b --out mine.parquet
  greenroom import routed-experts answers.jsonl --config config.json --out mine.parquet

The trace goes to --out; greenroom stats mine.parquet and greenroom sim trace.path=mine.parquet read it."""


def main(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    try:
        options = make_parser().parse_args(arguments)
        if options.format is None:
            _list()
            return 0
        _import(options)
    except Exception as error:
        return complain(_PROGRAM, error)
    return 0


def make_parser() -> Parser:
    """Return what reads the command's arguments."""
    parser = Parser(
        prog=_PROGRAM,
        description="Make a trace (or, where a source lost the order, expert counts) of a foreign recording.",
        epilog=_EXAMPLES
        + "\n\nformats:\n"
        + "\n".join(f"  {known.name:16} {known.what}" for known in FORMATS)
        + "\n\nWhat was repaired, and what is suspicious, is said and kept in the trace's notes.",
    )
    parser.add_argument(
        "format", nargs="?", metavar="FORMAT", help="see below; without one: list them"
    )
    parser.add_argument(
        "path", nargs="?", type=Path, metavar="PATH", help="a file, or a folder of them"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE.parquet", help="default: PATH's name here"
    )
    add_told_options(parser)
    return parser


def _list() -> None:
    for known in FORMATS:
        print(f"{known.name:16} {known.what}")


def _import(options: argparse.Namespace) -> None:
    if options.path is None and Path(options.format).exists():
        raise TraceError(f"{options.format}: FORMAT goes before it{_hint(Path(options.format))}")
    form = format_named(options.format)
    if options.path is None:
        raise TraceError(f"{options.format}: PATH is missing: must be the file or folder to import")
    if not options.path.exists():
        raise TraceError(f"{options.path}: no such file")
    out = options.out or Path(f"{options.path.name.partition('.')[0] or 'imported'}.parquet")
    if out.exists() and (options.out is None or out.samefile(options.path)):
        rule = "must be a new file" if options.out is None else "must not be the file to import"
        raise TraceError(f"{out}: is there already: {rule}; --out names it")
    check_out(out)
    refuse_unused(options, form.takes, form.name)
    found = _read(form, options)
    if isinstance(found, ExpertCounts):
        write_counts(out, found)
    else:
        write_trace(out, found)
    _tell(found, out)


def _read(form: Format, options: argparse.Namespace) -> Trace | ExpertCounts:
    told = told_from(options)
    try:
        return form.reader()(options.path, told)
    except TraceError as error:
        if "give --" in str(error):  # the right format, of which something is not told
            raise
        raise TraceError(f"{error}{_hint(options.path, form.name)}") from None


def _hint(path: Path, named: str | None = None) -> str:
    """Say which format a file looks like, if it is another one than ``named``."""
    if is_trace_file(path):
        return "; it is a trace of Greenroom already"
    found = looks_like(path)
    return f"; it looks like {found}" if found not in (None, named) else ""


def _tell(found: Trace | ExpertCounts, out: Path) -> None:
    """Print what was made, and on stderr every repair and doubt."""
    if isinstance(found, ExpertCounts):
        shape = f"{found.num_samples} samples of {found.num_layers} layers x {found.num_experts} experts"
        print(f"{out}: expert counts, {shape} ({found.unit}); no trace: the source lost the order")
        notes = found.notes
    else:
        meta = found.meta
        shape = f"{meta.num_layers} layers, top-{meta.top_k} of {meta.num_experts} experts"
        print(f"{out}: {len(found)} rows of {found.num_requests} requests, {meta.model}, {shape}")
        notes = meta.notes
    for note in notes:
        print(f"  {note}", file=sys.stderr)
