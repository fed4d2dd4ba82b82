"""``greenroom stats``: how local a trace's routing is, and whether that suits expert offloading."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sim.command_line import Parser
from sim.mistakes import complain
from sim.types import ConfigError

if TYPE_CHECKING:
    from traces.locality import Locality
    from traces.schema import Trace, TraceMeta

_EPILOG = """examples:
  greenroom stats                               the bundled trace
  greenroom stats my.parquet --out stats        the page, its figure and all numbers by layer
  greenroom stats trace=tiny_logits
  greenroom stats my.parquet --phase prefill --curve-tokens 5000

The trace is a path, an option of the group `trace` or trace.path=PATH, as in `greenroom sim`. It is read in
one pass, in memory that does not grow with its length. What a policy makes of the locality is another
question: greenroom sim -m policy=lru,static,stage_cache,belady trace.path=my.parquet"""
_PART_TOKENS = 2048
_PHASES = ("all", "prefill", "decode")


def main(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    try:
        options = make_parser().parse_args(arguments)
        _run(options)
    except Exception as error:
        return complain("greenroom stats", error)
    return 0


def make_parser() -> Parser:
    """Return what reads the command's arguments."""
    parser = Parser(
        prog="greenroom stats",
        description="Measure a trace's locality and say whether it suits expert offloading.",
        epilog=_EPILOG,
    )
    parser.add_argument("trace", nargs="?", default="tiny", help="the trace (default: bundled)")
    parser.add_argument("--out", metavar="DIR", help="folder for stats.txt, .json, .png and .pdf")
    parser.add_argument(
        "--phase", choices=_PHASES, help="tokens to measure (default: decode, where there are any)"
    )
    parser.add_argument(
        "--curve-tokens",
        type=int,
        metavar="N",
        help="first tokens to replay through caches (default: by the model's size)",
    )
    return parser


def _run(options: argparse.Namespace) -> None:
    from sim.stats_report import page
    from traces.out_file import check_out_folder

    if options.curve_tokens is not None and options.curve_tokens < 1:
        raise ConfigError(f"--curve-tokens {options.curve_tokens}: must be >= 1")
    if options.out is not None:
        check_out_folder(Path(options.out))
    name, path = trace_of(options.trace)
    found = measure(path, options.phase, options.curve_tokens)
    text = page(found, name)
    if options.out is not None:
        write(found, name, text, Path(options.out))
    sys.stdout.write(text)
    if options.out is not None:
        print(f"Results: {options.out}")


def trace_of(words: str) -> tuple[str, str]:
    """Return name and path of a trace: a path, an option's name, ``trace=NAME`` or ``trace.path=PATH``."""
    from sim.bundled import bundled_names, bundled_trace
    from sim.settings import did_you_mean

    key, equals, value = words.partition("=")
    if not equals or key not in ("trace", "trace.path"):
        if equals and "#" not in key and not Path(words).exists():  # FILE#layers=... is a part
            raise ConfigError(f"{key}: unknown setting (known: trace, trace.path)")
        key, value = "", words
    path = None if key == "trace.path" else bundled_trace(value)
    if path is None and key == "trace":
        from sim.composing import compose_config

        path = str(compose_config("config", [words])["trace"]["path"])
    if path is None and not key and value.isidentifier() and not Path(value).exists():
        near = did_you_mean(value, bundled_names())
        raise ConfigError(f"{value}: no such file, nor a bundled trace{near}")
    return (value, path) if path is not None else (Path(value).stem, value)


def measure(path: str, phase: str | None = None, curve_tokens: int | None = None) -> Locality:
    """Return a trace's locality; ``phase`` None: decode, or all where nothing is decoded."""
    from sim.progress import step_bar
    from traces.locality import LocalityCounter
    from traces.schema import DECODE, PHASE_NAMES

    source = open_source(path)
    wanted = DECODE if source.has_decode else None
    if phase is not None:
        wanted = None if phase == "all" else PHASE_NAMES.index(phase)
    counter = LocalityCounter(source.meta, source.num_tokens, wanted, curve_tokens)
    with step_bar(f"parts of {_PART_TOKENS} tokens") as watch:
        parts = -(-source.num_tokens // _PART_TOKENS)
        advance = (lambda: None) if watch is None else watch(parts)
        for part in _parts(source.chunks):
            counter.add(part)
            advance()
    found = counter.result()
    if not found.counted_tokens:
        raise ConfigError(f"--phase {phase}: the trace {path} has no such tokens")
    return found


def _parts(chunks: Iterator[Trace]) -> Iterator[Trace]:
    """Cut chunks smaller, so that the progress bar moves."""
    for chunk in chunks:
        for first in range(0, len(chunk), _PART_TOKENS):
            yield chunk.take(slice(first, first + _PART_TOKENS))


class Source(NamedTuple):
    """A trace to be read once: its header, rows, whether any is decoded, and the chunks."""

    meta: TraceMeta
    num_tokens: int
    has_decode: bool
    chunks: Iterator[Trace]


def open_source(path: str) -> Source:
    """Open a trace: one in Parquet is read by row group, any other format as a whole."""
    from sim.build import load_trace, resolve_path
    from traces.part import split_part
    from traces.schema import DECODE, TraceError
    from traces.store import group_sizes, is_trace_file, read_meta

    file = os.path.realpath(resolve_path(path))
    if split_part(path)[1] is not None or not is_trace_file(file):
        trace = load_trace(path)
        return Source(trace.meta, len(trace), bool((trace.phase == DECODE).any()), iter([trace]))
    try:
        meta, sizes = read_meta(file), group_sizes(file)
        return Source(meta, sum(sizes), _any_decode(file), _chunks(file, path))
    except TraceError as error:  # speak of the file as the user does
        raise TraceError(str(error).replace(file, path)) from error


def _chunks(file: str, name: str) -> Iterator[Trace]:
    """Yield the rows of a trace file, with the columns that are measured."""
    from traces.schema import GATE_COLUMNS, TraceError
    from traces.store import iter_trace, stored_columns

    try:
        there = stored_columns(file)
        yield from iter_trace(file, [c for c in ("stage", *GATE_COLUMNS) if c in there])
    except TraceError as error:
        raise TraceError(str(error).replace(file, name)) from error


def _any_decode(file: str) -> bool:
    """Tell whether a trace file has a decoded token; reads one column up to the first."""
    import pyarrow.parquet as pq

    from traces.store import one_line_errors

    with one_line_errors(file), pq.ParquetFile(file) as parquet:
        batches = parquet.iter_batches(columns=["phase"])
        return any("decode" in batch.column(0).to_pylist() for batch in batches)


def write(found: Locality, name: str, text: str, folder: Path) -> None:
    """Write the page, the figure and all numbers to ``folder``, each there whole or not at all."""
    from sim.results import whole_file
    from sim.stats_plot import plot_locality

    folder.mkdir(parents=True, exist_ok=True)
    record = {"trace": name, "verdict": _verdict(found), **found.to_dict()}
    texts = {"stats.txt": text, "stats.json": json.dumps(record, allow_nan=False) + "\n"}
    for file, content in texts.items():
        with whole_file(folder / file) as partial:
            partial.write_text(content, encoding="utf-8")
    plot_locality(found, name, folder / "stats")


def _verdict(found: Locality) -> Sequence[dict[str, str]]:
    from dataclasses import asdict

    from traces.locality_verdict import judge

    return [asdict(judged) for judged in judge(found)]
