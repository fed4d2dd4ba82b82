"""``greenroom validate``: measures policies on this machine, predicts them, and says how far off that is."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from real.result_folder import result_folder
from sim.command_line import Parser
from sim.mistakes import complain
from sim.own_options import add_config_dirs
from sim.show_config import add_show, check_show, show
from sim.types import ConfigError

if TYPE_CHECKING:
    from real.validate_config import Matrix
    from real.validate_result import Validation, Watch

PROGRAM = "greenroom validate"
_MISSED = 1
_SHORT_MINUTES = 12
_EPILOG = """examples:
  greenroom validate                                  all of the matrix, about 20 minutes
  greenroom validate --quick                          a first impression, about 3 minutes
  greenroom validate --minutes 10 --tiers ram,link --policies lru,fiddler --ratios 0.25
  greenroom validate --measure --minutes 10           first `greenroom measure`, then this
  greenroom validate --config-dir my_conf --policies lru,mine overrides=[trace.path=my.parquet]

KEY=VALUE sets any setting of conf/validate.yaml. Exit code: 0 if the verdict is met, 1 if it is missed, 2
for a mistake. Nothing else should run on the machine meanwhile. Ctrl-C leaves nothing behind."""


def main(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    try:
        options = make_parser().parse_intermixed_args(arguments)
        check_show(options)
        if options.cfg is not None:
            return show("validate", options.overrides, options)
        with result_folder(options.out, make=True) as out:
            return _run(options, out)
    except Exception as error:
        return complain(PROGRAM, error, "validate")


def make_parser() -> Parser:
    """Return what reads the command's arguments."""
    parser = Parser(
        prog=PROGRAM,
        description="Run the same policies on this machine and in the simulator, in the same minutes, and "
        "give a verdict on the simulator.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE", help="settings of conf/validate.yaml")
    add("--device", help="auto, cpu, cuda or cuda:N (default: auto)")
    add("--minutes", type=float, metavar="N", help="for all of it (default: 20)")
    add("--quick", action="store_true", help="a smaller matrix in about 3 minutes")
    add("--threads", type=int, metavar="N", help="of kernels on the CPU")
    add("--tiers", metavar="A,B", help="of ram, storage, link (default: all)")
    add("--policies", metavar="A,B", help="options of the group policy")
    add("--ratios", metavar="A,B", help="of the cache (default: 0.25,0.5)")
    add("--batch-sizes", metavar="A,B", help="default: 1,8")
    add("--dtype", help="auto, float32, bfloat16 or float16 (default: auto)")
    add("--scratch", metavar="DIR", help="folder for the file of experts, on storage")
    add("--out", type=Path, metavar="DIR", help="where results go (default: outputs/DATE/TIME)")
    add("--measure", action="store_true", help="run `greenroom measure` first, into DIR/measure")
    add_config_dirs(parser)
    add_show(parser)
    return parser


# -- what is asked for -------------------------------------------------------------------------------


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that options name."""
    found: dict[str, Any] = {
        name: getattr(options, name)
        for name in ("device", "minutes", "threads", "dtype", "scratch")
        if getattr(options, name) is not None
    }
    kinds: dict[str, Callable[[str], Any]] = {
        **dict.fromkeys(("tiers", "policies"), str),
        "ratios": float,
        "batch_sizes": int,
    }
    for name, kind in kinds.items():
        text = getattr(options, name)
        if text is not None:
            found[name] = _list(f"--{name.replace('_', '-')}", text, kind)
    return found


def _list(flag: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        return [kind(word.strip()) for word in text.split(",") if word.strip()]
    except ValueError:
        what = "numbers" if kind is float else "whole numbers"
        raise ConfigError(f"{flag} {text}: must be {what}, by commas") from None


def _run(options: argparse.Namespace, out: Path) -> int:
    from real.validate_config import compose_matrix

    begun_s = time.monotonic()
    matrix = compose_matrix(
        *(options.overrides, _given(options)), quick=options.quick, config_dirs=options.config_dirs
    )
    if options.measure:
        code = _measure(options, matrix, out)
        if code:
            return code
        matrix = replace(matrix, minutes=max(0.1, matrix.minutes - _minutes_since(begun_s)))
    from real.validate import validate

    with _watch() as watch:
        found = validate(matrix, watch)
    return write(found, out)


def _minutes_since(begun_s: float) -> float:
    return (time.monotonic() - begun_s) / 60


def _measure(options: argparse.Namespace, matrix: Matrix, out: Path) -> int:
    from real.measure_cli import main as measure

    given = ["--out", str(out / "measure"), "--device", matrix.device]
    if matrix.threads is not None:
        given += ["--threads", str(matrix.threads)]
    if matrix.scratch is not None:
        given += ["--scratch", matrix.scratch]
    is_short = options.quick or matrix.minutes < _SHORT_MINUTES
    return measure([*given, "--quick"] if is_short else given)


# -- results -----------------------------------------------------------------------------------------


def write(found: Validation, out: Path) -> int:
    """Write report, tables and figure, print the verdict and return the exit code."""
    from real.validate_report import FIGURE, is_met, report
    from real.validate_score import verdict
    from real.validate_tables import run_rows, whole
    from sim.figures.source import VALIDATION, VALIDATION_FILE, Source
    from sim.figures.validation import draw_validation
    from sim.plot_style import save, styled
    from sim.results import write_csv, write_text

    out.mkdir(parents=True, exist_ok=True)
    record, rows = whole(found), run_rows(found)
    with styled():
        save(draw_validation(Source(VALIDATION, rows, about=record)), out / FIGURE)
    write_csv(out / "results.csv", rows)
    write_text(out / VALIDATION_FILE, json.dumps(record, indent=1) + "\n")
    write_text(out / "report.md", report(found))
    for bar in verdict(found.rows, found.parity):
        print(f"{'met   ' if bar.is_met else 'missed'}  {bar.name}: {bar.words} (bar: {bar.rule})")
    for limit in found.limits:
        state = "met   " if limit.is_met else "missed"
        print(f"{state}  {limit.name}: {limit.ratio:.2f} (bar: {limit.bar:.2f})")
    print(f"Verdict: {'met' if is_met(found) else 'missed'}. Report: {out / 'report.md'}")
    return 0 if is_met(found) else _MISSED


# -- progress ----------------------------------------------------------------------------------------


class _Told:
    """A watch on stderr: lines, and on a terminal a bar of the part that is under way."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._task: Any = None
        self._begun_s = time.monotonic()

    def say(self, text: str) -> None:
        """Tell it in a line."""
        if self._bar is None:
            print(f"{PROGRAM}: {text}", file=sys.stderr)
        else:
            self._bar.console.print(f"{PROGRAM}: {text}", markup=False, highlight=False)

    def stage(self, title: str) -> None:
        """End the bar of the part before, and begin one."""
        if self._bar is None:
            self.say(f"{_minutes_since(self._begun_s):5.1f} min  {title}")
            return
        if self._task is not None:
            self._bar.update(self._task, completed=1.0)
            self._bar.stop_task(self._task)
        self._task = self._bar.add_task(title, total=1.0)

    def progress(self, share: float) -> None:
        """Move the bar."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=share)


@contextmanager
def _watch() -> Iterator[Watch]:
    if not sys.stderr.isatty():
        yield _Told(None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns: Sequence[Any] = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr)) as bar:
        yield _Told(bar)
