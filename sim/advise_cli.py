"""``greenroom advise``: which engine, placement, quantisation and cache size runs a model fastest here."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from sim.advise import QUALITY_FLOOR, WAYS, Point, Wish, check_quants, engines_for, search, to_ask
from sim.advise_reserve import GPU_RESERVE_BYTES, HOST_RESERVE_BYTES, Reserve
from sim.cases import case_of
from sim.command_line import Parser
from sim.interval import interval_of, read_errors
from sim.mistakes import complain
from sim.predict_answer import Asked, is_changed
from sim.predict_cli import add_common, ask
from sim.types import ConfigError
from traces.out_file import check_out_folder

if TYPE_CHECKING:
    from sim.advise_table import Ground

_MOST_BYTES = 10**18
_SEARCHED = ("placement", "placement.cpu_layers", "placement.gpu_ratio", "engine")
_EPILOG = """examples:
  greenroom advise model=qwen3_30b_a3b machine=rtx4090
  greenroom advise model=gpt_oss_120b machine=rtx5090_9950x3d --context 32768 --engines llama_cpp
  greenroom advise machine=rtx3090 --quant Q8_0,Q4_K_M,IQ3_XXS --quality-floor 3
  greenroom advise machine=rtx4090 --simulate
  greenroom advise machine=rtx3090 --compare machine/gpu=rtx4090,machine=rtx5090_9950x3d

Settings are those of `greenroom predict`, but for engine and placement, which are searched. Quality is bits a
weight of the experts: it orders schemes and promises nothing."""


def main(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    try:
        options = make_parser().parse_intermixed_args(arguments)
        return _run(options)
    except Exception as error:
        return complain("greenroom advise", error, "predict")


def make_parser() -> Parser:
    """Return what reads the command's arguments."""
    parser = Parser(
        prog="greenroom advise",
        description="Search engines, placements, quantisations and cache sizes for the fastest that fits.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE", help="settings")
    add(
        "--quant",
        metavar="NAMES",
        help="schemes to try, by commas (default: those usual for an engine)",
    )
    add("--context", type=int, metavar="TOKENS", help="the same as work.context_tokens=TOKENS")
    add(
        "--quality-floor",
        type=float,
        default=QUALITY_FLOOR,
        metavar="BITS",
        help=f"fewest bits a weight of the experts (default: {QUALITY_FLOOR:g})",
    )
    add(
        "--reserve",
        type=float,
        default=GPU_RESERVE_BYTES,
        metavar="BYTES",
        help="memory of each GPU to leave free, if that costs little speed (default: 1 GiB)",
    )
    add(
        "--reserve-host",
        type=float,
        default=HOST_RESERVE_BYTES,
        metavar="BYTES",
        help=f"the same of host memory (default: {HOST_RESERVE_BYTES:.0e})",
    )
    add(
        "--engines",
        metavar="NAMES",
        help=f"by commas (default of a machine with a link: {','.join(WAYS)})",
    )
    add(
        "--simulate",
        action="store_true",
        help="also run the best few with cache policies on a trace",
    )
    add(
        "--sim-trace",
        metavar="PATH",
        default="tiny",
        help="what --simulate replays: a file, or an option of the group trace (default: tiny, bundled)",
    )
    add(
        "--compare",
        metavar="CHANGES",
        help="changed machines to try the same on, by commas; several changes of one, quoted, by spaces",
    )
    add_common(parser)
    add(
        "--out",
        metavar="DIR",
        type=Path,
        help="folder of the results (default: outputs/DATE/TIME-advise)",
    )
    return parser


def _run(options: argparse.Namespace) -> int:
    from sim.advise_compare import changes_of
    from sim.advise_report import print_advice
    from sim.advise_table import summary_of, table_of

    started_s = time.monotonic()
    if options.out is not None:
        check_out_folder(options.out)
    wish = wish_of(options)
    changes = None if options.compare is None else changes_of(options.compare)
    replayed = None
    if options.simulate:  # read first: a trace that is none is told of before the long search
        from sim.advise_confirm import confirm, load_replayed

        replayed = load_replayed(options.sim_trace)
    asked = ask_all(options, wish)
    points = search(asked, wish)
    spent_s = time.monotonic() - started_s
    ground = ground_of(next(iter(asked.values())), points)
    compared = None if changes is None else _compared(options, wish, points, changes, ground)
    runs = None if replayed is None else confirm(asked, points, replayed)
    folder = _folder(options.out)
    summary = summary_of(points, wish, ground, runs, compared)
    figure = _write(folder, table_of(points, ground.rows), summary, points)
    print_advice(points, wish, ground, runs, compared, spent_s)
    if figure is not None:
        print(f"Figure: {figure}")
    print(f"Results: {folder}")
    return 0


def _compared(options: argparse.Namespace, wish: Wish, points: Sequence[Point],
              changes: Sequence[Sequence[str]], ground: Ground) -> list[dict[str, object]]:  # fmt: skip
    """Search with the same wish on each changed machine."""
    from sim.advise_compare import changed, compare

    def search_with(change: Sequence[str]) -> list[Point]:
        other = argparse.Namespace(**vars(options))
        other.overrides = changed(options.overrides, change)
        return search(ask_all(other, wish), wish)

    return compare(points, changes, search_with, ground.rows)


def wish_of(options: argparse.Namespace) -> Wish:
    """Return what is to be searched for, by the command's options; raises ConfigError."""
    quants = _names(options.quant, "--quant")
    if quants is not None:
        check_quants(quants)
    floor = options.quality_floor
    if not 0 <= floor <= 32:
        raise ConfigError(f"--quality-floor {floor:g}: must be in [0, 32] bits a weight")
    given = {"--reserve": options.reserve, "--reserve-host": options.reserve_host}
    for flag, value in given.items():
        if not 0 <= value <= _MOST_BYTES:
            raise ConfigError(f"{flag} {value:g}: must be in [0, {_MOST_BYTES:g}] bytes")
    reserve = Reserve(*map(int, given.values()))
    return Wish(_names(options.engines, "--engines"), quants, floor, reserve)


def _names(text: str | None, flag: str) -> tuple[str, ...] | None:
    if text is None:
        return None
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ConfigError(f"{flag} {text}: must be names by commas")
    return tuple(dict.fromkeys(names))


def ask_all(options: argparse.Namespace, wish: Wish) -> dict[str, Asked]:
    """Compose what the search needs: every engine and every kind of placement, under its own key."""
    for override in options.overrides:
        key = override.lstrip("+~").partition("=")[0]
        if key in _SEARCHED:
            flag = "--engines" if key == "engine" else "`greenroom predict`, which takes one"
            raise ConfigError(f"{override}: is what is searched; for a choice see {flag}")
    overrides = list(options.overrides)
    if options.context is not None:
        overrides.append(f"work.context_tokens={options.context}")
    first = ask([*overrides, "placement=gpu_only"], options)
    engines = list(engines_for(case_of(first.composed.config), wish))
    asked: dict[str, Asked] = {}
    for pair in to_ask(engines):
        one = ask([*overrides, *pair], options)
        asked |= {key: one for key in pair if key not in asked}
    return asked


def ground_of(asked: Asked, points: Sequence[Point]) -> Ground:
    """Return what the points rest on: published rows, the interval of each engine's decoding, notes."""
    from sim.advise_standing import more_bits, rows_by_engine
    from sim.advise_table import Ground

    errors = read_errors()
    machine = asked.composed.choices["machine"]
    engines = dict.fromkeys(point.engine for point in points)
    changed = is_changed(asked)
    intervals = {e: interval_of(errors, e, machine, False, changed) for e in engines}
    here = rows_by_engine([] if changed else errors, machine)
    given_bits = case_of(asked.composed.config).costs.shape.expert_bits
    return Ground(rows_by_engine(errors), here, intervals, more_bits(points, given_bits))


def _folder(wished: Path | None) -> Path:
    if wished is None:
        now = datetime.now()
        wished = Path("outputs") / f"{now:%Y-%m-%d}" / f"{now:%H-%M-%S.%f}-advise"
    wished.mkdir(parents=True, exist_ok=True)
    return wished.absolute()


def _write(folder: Path, rows: list[dict[str, object]], summary: dict[str, object],
           points: Sequence[Point]) -> Path | None:  # fmt: skip
    """Write the table, the summary and the figure; return the figure's path."""
    from sim.advise_plot import plot_frontier
    from sim.results import write_csv, write_text

    write_csv(folder / "points.csv", rows)
    write_text(folder / "advice.json", json.dumps(summary, indent=1) + "\n")
    return plot_frontier(points, folder)
