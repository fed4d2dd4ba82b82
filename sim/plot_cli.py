"""``greenroom plot``: draws the figures of a run, a sweep, a validation or a trace."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sim.command_line import Parser
from sim.mistakes import complain
from sim.results import ERROR, num_waiting
from sim.settings import did_you_mean
from sim.types import ConfigError

if TYPE_CHECKING:
    from sim.figures.source import Source, Wanted

PROGRAM = "greenroom plot"
_FORMATS = ("pdf", "png", "svg")
_USUAL_FORMATS = "png,pdf"
_FOLDER = "figures"
_EPILOG = """examples:
  greenroom plot --list                                      all figures, and what each needs
  greenroom plot multirun/DATE/TIME                          all that the sweep's results allow
  greenroom plot multirun/DATE/TIME league hit_rate_by_cache --format svg --out paper
  greenroom plot results.parquet throughput_by_cache --policies lru,saem,belady
  greenroom plot outputs/DATE/TIME gantt --window 610 611    two steps of a run with output.events=true
  greenroom plot outputs/DATE/TIME residency --layer 3 --request 24
  greenroom plot docs/validation/xeon_2_cores                predicted against measured
  greenroom plot --trace tiny heatmap --layer 4              experts by token, and where stages begin

DIR is the folder of a run, a sweep or a validation, or of what `greenroom published` has written; or one of
the files results.parquet, summary.json, validation.json and published.csv. Figures are written to
DIR/figures at the size of one column of a paper or of two. Without names all are drawn that can be, and
stderr says what is left out and why."""


def main(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    try:
        options = make_parser().parse_intermixed_args(arguments)
        return _list() if options.list else _run(options)
    except Exception as error:
        return complain(PROGRAM, error)


def make_parser() -> Parser:
    """Return what reads the command's arguments."""
    parser = Parser(
        prog=PROGRAM,
        description="Draw the figures of a run, a sweep or a validation, for print and for the screen.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("words", nargs="*", metavar="DIR [FIGURE ...]", help="results, and which figures (all)")
    add("--list", action="store_true", help="list the figures, and what each needs")
    add("--out", type=Path, metavar="DIR", help="where figures go (default: DIR/figures)")
    add(
        "--format",
        default=_USUAL_FORMATS,
        metavar="A,B",
        help="of png, pdf, svg (default: png,pdf)",
    )
    add("--window", nargs=2, type=int, metavar=("FIRST", "LAST"), help="steps of a run to show")
    add("--request", type=int, metavar="N", help="the request to show")
    add("--layer", type=int, metavar="L", help="the MoE layer to show, from 0")
    add("--baseline", metavar="NAME", help="the policy that others are compared with")
    add("--policies", metavar="A,B", help="the policies to show (default: all)")
    add("--trace", metavar="FILE", help="draw a trace: a file, or one that comes with it")
    return parser


def _list() -> int:
    from sim.figures.table import FIGURES

    width = max(map(len, FIGURES))
    for name, entry in FIGURES.items():
        print(f"{name:{width}}  {entry.shows}")
        print(f"{'':{width}}  needs {entry.needs}")
    return 0


def _run(options: argparse.Namespace) -> int:
    from sim.figures.table import check_names
    from traces.out_file import check_out_folder

    formats = _formats(options.format)
    source, names, out = _asked(options)
    check_names(names)
    if options.out is not None:
        out = options.out
        check_out_folder(out)
    if options.policies is not None:
        source = source.of_policies(_names("--policies", options.policies))
    wanted = _wanted(options)
    drawn = _draw(source, names, wanted, out, formats)
    for path in drawn:
        print(f"Figure: {path}")
    print(f"Figures: {out}")
    return 0


def _asked(options: argparse.Namespace) -> tuple[Source, list[str], Path]:
    """Return what is to be drawn from, the names of figures, and where these go by default."""
    from sim.figures.source import TRACE, Source, open_source

    words = list(options.words)
    if options.trace is not None:
        from sim.stats_cli import trace_of

        trace = trace_of(options.trace)
        return Source(TRACE, trace=trace), words or ["heatmap"], Path(_FOLDER)
    if not words:
        raise ConfigError(
            "DIR: missing, must be the folder of a run, a sweep or a validation, or a results.parquet "
            "(--trace FILE draws a trace; --list tells the figures)"
        )
    path = Path(words[0])
    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder{_hint(words[0])}")
    folder = path if path.is_dir() else path.parent
    source = open_source(path)
    _tell_if_unfinished(source, path)
    return source, words[1:], folder / _FOLDER


def _tell_if_unfinished(source: Source, folder: Path) -> None:
    """Say on stderr that figures will be of a part of a sweep."""
    waiting = num_waiting(folder, len(source.rows), sum(1 for _ in folder.glob(f"*/{ERROR}")))
    if waiting:
        told = f"{waiting} points have not been run yet; `greenroom sweep --resume` goes on"
        print(f"{PROGRAM}: the sweep is not finished: {told}", file=sys.stderr)


def _hint(word: str) -> str:
    """Say what was forgotten, where the first word names a figure."""
    from sim.figures.table import FIGURES

    return "; the folder of results comes before the figures" if word in FIGURES else ""


def _wanted(options: argparse.Namespace) -> Wanted:
    from sim.figures.source import Wanted

    window = None if options.window is None else (options.window[0], options.window[1])
    return Wanted(window, options.request, options.layer, options.baseline)


def _formats(text: str) -> list[str]:
    found = _names("--format", text)
    for name in found:
        if name not in _FORMATS:
            near = did_you_mean(name, _FORMATS)
            raise ConfigError(f"--format {name}: must be of {', '.join(_FORMATS)}{near}")
    return found


def _names(flag: str, text: str) -> list[str]:
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise ConfigError(f"{flag} {text}: must name at least one")
    return list(dict.fromkeys(found))


def _draw(
    source: Source, names: Sequence[str], wanted: Wanted, out: Path, formats: Sequence[str]
) -> list[Path]:
    """Draw figures, one at a time; those that were asked for by name must be drawable."""
    from sim.figures.source import NotDrawableError
    from sim.figures.table import FIGURES, draw
    from sim.plot_style import save

    drawn: list[Path] = []
    left_out: dict[str, list[str]] = {}
    for name in dict.fromkeys(names) or FIGURES:
        try:
            figure = draw(name, source, wanted)
        except NotDrawableError as error:
            if names:
                raise ConfigError(f"{name}: {error}") from error
            left_out.setdefault(str(error), []).append(name)
            continue
        out.mkdir(parents=True, exist_ok=True)
        drawn.append(save(figure, out / name, formats))
    for why, kept in left_out.items():
        print(f"left out: {', '.join(kept)}: {why}", file=sys.stderr)
    if not drawn:
        raise ConfigError(f"no figure can be drawn from {source.words}")
    return drawn
