"""``greenroom export``: writes a trace in the format of another tool."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from sim.bundled import bundled_trace
from sim.command_line import Parser
from sim.mistakes import complain
from traces.exporters.formats import EXPORTS, Export, export_named
from traces.importers.by_name import read_any
from traces.out_file import check_out, is_special
from traces.part import Part, split_part
from traces.store import is_trace_file, iter_trace
from traces.trace import Trace, TraceError

_PROGRAM = "greenroom export"
_EXAMPLES = """examples:
  greenroom export                                   the formats, one a line
  greenroom export moe-policylang tiny               the bundled trace, into a file here
  greenroom export experts-npz mine.parquet --out mine.npz

The first line of the answer names the file that was written."""


def main(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    try:
        options = make_parser().parse_args(arguments)
        if options.format is None:
            for known in EXPORTS:
                print(f"{known.name:22} {known.what}")
            return 0
        _export(options)
    except Exception as error:
        return complain(_PROGRAM, error)
    return 0


def make_parser() -> Parser:
    """Return what reads the command's arguments."""
    parser = Parser(
        prog=_PROGRAM,
        description="Write a trace in the format of another tool.",
        epilog=_EXAMPLES
        + "\n\nformats:\n"
        + "\n".join(f"  {known.name:22} {known.what}" for known in EXPORTS)
        + "\n\nWhat the format has no place for is said.",
    )
    parser.add_argument(
        "format", nargs="?", metavar="FORMAT", help="see below; without one: list them"
    )
    parser.add_argument("path", nargs="?", metavar="TRACE", help="a trace file, or a bundled one")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: TRACE's name here")
    return parser


def _export(options: argparse.Namespace) -> None:
    form = export_named(options.format)
    if options.path is None:
        raise TraceError(f"{options.format}: TRACE is missing: must be the trace to export")
    words, part = split_part(options.path)
    path = _file_of(words)
    out = options.out or _default_out(path, form)
    if out.exists() and (options.out is None or out.samefile(path)):
        rule = "must be a new file" if options.out is None else "must not be the trace to export"
        raise TraceError(f"{out}: is there already: {rule}; --out names it")
    check_out(out, None if is_special(out) else form.suffix)
    counter = _Counted(_chunks(path, part, options.path))
    lost = form.writer()(counter, out)
    print(f"{out}: {counter.num_rows} tokens of {options.path}, {form.what}")
    for what in lost:
        print(f"  not kept: {what}", file=sys.stderr)


def _file_of(words: str) -> Path:
    """Return the file that is meant: a path, or where there is none the bundled trace of that name."""
    from sim.build import resolve_path

    bundled = None if Path(words).exists() else bundled_trace(words)
    return Path(words) if bundled is None else resolve_path(bundled)


def _default_out(path: Path, form: Export) -> Path:
    """Return the trace's name here with the format's own ending, never the name of a trace file of ours."""
    stem = path.name.partition(".")[0] or "exported"
    return Path(f"{stem}.{form.name}{form.suffix}")


def _chunks(path: Path, part: Part | None, name: str) -> Iterator[Trace]:
    """Yield a trace by row group, so that one larger than memory passes through; a part of one whole."""
    if part is not None:
        yield part.of(read_any(path), name)
    elif is_trace_file(path):
        yield from iter_trace(path)
    else:
        yield read_any(path)


class _Counted:
    """Counts the rows of chunks that pass through."""

    def __init__(self, chunks: Iterable[Trace]) -> None:
        self._chunks, self.num_rows = chunks, 0

    def __iter__(self) -> Iterator[Trace]:
        for chunk in self._chunks:
            self.num_rows += len(chunk)
            yield chunk
