"""``greenroom replay``: recorded routing on this machine, with actual weights, copies and kernels."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from real.result_folder import result_folder
from sim.command_line import Parser
from sim.mistakes import complain
from sim.own_options import add_config_dirs
from sim.point import overridden, run_point
from sim.show_config import add_show, check_show, show
from sim.types import ConfigError

PROGRAM = "greenroom replay"
SIMULATED = "simulated"
"""Folder of the same run in the simulator, within that of the run."""
_EPILOG = """examples:
  greenroom replay policy=lru cache.ratio=0.25 real.tier=storage output.perfetto=[0,20]
  greenroom replay policy=saem real.tier=link real.link_bytes_per_s=5e8 real.sim=true
  greenroom replay policy=fiddler real.tier=ram workload.batch_size=4 real.threads=2
  greenroom replay real.store=experts.bin --out results   # the file is made once, and used again

Settings are those of conf/replay.yaml: the groups trace, model, machine, engine, policy and stages, what
`greenroom sim` has (cache.*, workload.*, output.*, ...), and real.*:
  real.tier                where experts wait: ram, storage, or link (emulated)
  real.device              cpu, cuda, cuda:N or auto
  real.dtype               float32, bfloat16, float16 or int8; null: by model.expert_bits
  real.store               a file of the experts that is kept; null: a temporary one
  real.link_bytes_per_s, real.link_setup_ns   of the emulated link
  real.threads             of kernels on the CPU
  real.lockstep            decide as if copies took no time
  real.seed                of the random weights
  real.sim                 predict the same run too, and set both beside each other

The layers are of the model's sizes, with random weights; the routing is the trace's. The machine's file
says what policies believe and what real.sim predicts with: describe this machine for it. Files are those of
`greenroom sim`, measured; with real.sim also simulated/, with output.perfetto too side_by_side.json.gz."""


def main(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    try:
        options = make_parser().parse_intermixed_args(arguments)
        check_show(options)
        if options.cfg is not None:
            return show("replay", options.overrides, options)
        with result_folder(options.out) as folder:
            _run(options, folder)
    except Exception as error:
        return complain(PROGRAM, error, "replay")
    return 0


def make_parser() -> Parser:
    """Return what reads the command's arguments."""
    parser = Parser(
        prog=PROGRAM,
        description="Replay a trace's routing on this machine: the policies of the simulator, with actual "
        "copies and kernels.",
        epilog=_EPILOG,
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings")
    parser.add_argument("--out", metavar="DIR", type=Path, help="where results go (default: a new folder "
                        "below outputs/)")  # fmt: skip
    add_config_dirs(parser)
    add_show(parser)
    return parser


def _run(options: argparse.Namespace, folder: Path) -> None:
    from real.replay_config import compose_replay
    from real.replay_run import replay
    from sim.progress import step_bar
    from sim.report import print_run

    config, device = compose_replay(options.overrides, options.config_dirs)
    with step_bar("steps") as watch:
        progress = None if watch is None else _by_expert(watch)
        summary, plain = replay(config, folder, device, watch=watch, progress=progress, tell=_tell)
    summary["overrides"] = overridden(options.overrides)
    _clear_earlier(folder)
    more = _finish(folder, config, plain, summary, options.overrides)
    print_run(summary, folder, more)


def _finish(
    folder: Path,
    config: Mapping[str, Any],
    plain: dict[str, Any],
    summary: dict[str, Any],
    overrides: Sequence[str],
) -> list[Any]:
    """Write what the tables lack, simulate if that was asked for; return what to print."""
    from omegaconf import OmegaConf

    from real.replay_report import compared, comparison_table, measured_lines
    from real.side_by_side import SIDE_BY_SIDE
    from sim.perfetto import write_run_timeline
    from sim.results import finish_run

    if plain["output"]["perfetto"] is not None:
        write_run_timeline(folder, plain, summary)
    more: list[Any] = measured_lines(summary)
    if config["real"]["sim"]:
        predicted = _simulate(folder, plain, summary, overrides)
        summary["predicted"] = compared(predicted, summary)
        more.append(comparison_table(summary["predicted"], summary["described_as"]))
        if (folder / SIDE_BY_SIDE).exists():
            more.append(f"Side by side: {folder / SIDE_BY_SIDE}")
    finish_run(folder, summary, OmegaConf.to_yaml(config))
    return more


def _simulate(
    folder: Path, plain: dict[str, Any], summary: dict[str, Any], overrides: Sequence[str]
) -> dict[str, Any]:
    """Simulate the same run into a folder of its own; return its summary row."""
    from real.side_by_side import SIDE_BY_SIDE, Side, write_side_by_side
    from sim.progress import step_bar

    where = folder / SIMULATED
    predicted = run_point(plain, where, overrides, bar=lambda what: step_bar(f"{what} simulated"))
    window = plain["output"]["perfetto"]
    if window is not None:
        sides = [
            Side("real", folder, summary, plain["engine"]["chunks"]),
            Side("simulated", where, predicted, plain["engine"]["chunks"]),
        ]
        try:
            write_side_by_side(folder / SIDE_BY_SIDE, sides, tuple(window))
        except ConfigError as error:
            summary["notes"].append(f"nothing side by side: {error}")
    return predicted


def _clear_earlier(folder: Path) -> None:
    """Take away what an earlier run into the same folder left that this one may not write."""
    from real.side_by_side import SIDE_BY_SIDE
    from sim.results import SUMMARY

    (folder / SIDE_BY_SIDE).unlink(missing_ok=True)
    if (folder / SIMULATED / SUMMARY).exists():
        shutil.rmtree(folder / SIMULATED)


def _by_expert(watch: Callable[..., Callable[[], None]]) -> Callable[[int, int], None]:
    """Return what advances a bar by one expert, however many there will be."""
    advance: list[Callable[[], None]] = []

    def progress(done: int, total: int) -> None:
        if not advance:
            advance.append(watch(total, "experts written"))
        advance[0]()

    return progress


def _tell(line: str) -> None:
    print(f"{PROGRAM}: {line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
