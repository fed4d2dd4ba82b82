"""``greenroom stages``: how well each stage detector finds the stages that a trace is annotated with."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sim.coherence import Likeness, likeness, stages, windows
from sim.command_line import Parser
from sim.mistakes import complain
from sim.screen import screen
from sim.stage_chance import DRAWS
from sim.stage_cuts import StagedText, annotated_texts, found_texts
from sim.stage_hold import Row, compose_stages, detect, hold, load_work, missing_column
from sim.stage_score import TOLERANCE, StageScore
from sim.stage_structure import TestSettings, examine
from sim.types import ConfigError
from sim.workload import Workload
from traces.out_file import check_out_folder
from traces.schema import Trace

_ANNOTATED = "annotated"
_LEAST_DRAWS = 19
"""Of fewer no p-value is <= .05, so that the answer could only be no."""
_MOST_DRAWS = 1_000_000
_EPILOG = """examples:
  greenroom stages                                   every detector on the bundled trace
  greenroom stages trace=tiny_logits --only drift,entropy
  greenroom stages workload.batch_size=4 drift.quantile=0.9 fixed.steps=48
  greenroom stages trace.path=my.parquet --tolerance 64
  greenroom stages --test --out stages               are there stages beyond token locality?
  greenroom stages --test --by cues                  the same of the stages that a detector finds

A detector's parameter is DETECTOR.PARAMETER=VALUE; all else is set as in `greenroom sim`."""


def main(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    try:
        options = make_parser().parse_intermixed_args(arguments)
        _check(options)
        (_test if options.test else _compare)(options)
    except Exception as error:
        return complain("greenroom stages", error)
    return 0


def make_parser() -> Parser:
    """Return what reads the command's arguments."""
    parser = Parser(
        prog="greenroom stages",
        description="Hold stage detectors against a trace's annotated stages; or test those stages.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("overrides", nargs="*", help="settings")
    late = "decode steps by which a boundary may be found late"
    add("--tolerance", type=int, metavar="STEPS", help=f"{late} (default: {TOLERANCE})")
    add("--only", metavar="NAMES", help="detectors, by commas (default: all)")
    add(
        "--test",
        action="store_true",
        help="test whether experts follow the stages, not the detectors",
    )
    add("--by", metavar="NAME", help=f"with --test: whose stages (default: {_ANNOTATED})")
    add(
        "--draws",
        type=int,
        metavar="N",
        help="with --test: random cuts, 19 or more (default: 1000)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of what is drawn (default: 0)")
    add("--out", type=Path, metavar="FOLDER", help="write stages.json, with --test a figure too")
    return parser


def _check(options: argparse.Namespace) -> None:
    """Refuse what means nothing."""
    for flag, value, least in (
        ("--tolerance", options.tolerance, 0),
        ("--draws", options.draws, _LEAST_DRAWS),
        ("--seed", options.seed, 0),
    ):
        if value is not None and value < least:
            raise ConfigError(f"{flag} {value}: must be >= {least}")
    pointless = ("tolerance", "only") if options.test else ("by", "draws")
    for flag in pointless:
        if getattr(options, flag) is not None:
            word = "without" if options.test else "with"
            raise ConfigError(f"--{flag} {getattr(options, flag)}: only {word} --test")
    if options.draws is not None and options.draws > _MOST_DRAWS:
        raise ConfigError(f"--draws {options.draws}: must be <= {_MOST_DRAWS}")
    if options.out is not None:
        check_out_folder(options.out)


def _compare(options: argparse.Namespace) -> None:
    """Hold the detectors against the annotation."""
    tolerance = TOLERANCE if options.tolerance is None else options.tolerance
    config, detectors = compose_stages(options.overrides, options.only)
    work = load_work(config)
    rows = []
    for number, (name, settings) in enumerate(detectors.items()):
        rng = np.random.default_rng([options.seed, number])
        rows.append(hold(name, settings, config, work, StageScore(tolerance), rng))
    if options.out is not None:
        _write(options.out, {"detectors": [as_record(row) for row in rows]})
    print_report(rows, work[0], tolerance)
    if options.out is not None:
        print(f"Results: {options.out}")


def _test(options: argparse.Namespace) -> None:
    """Test stages; print, and write where that is asked for."""
    from sim.progress import step_bar
    from sim.stage_structure_report import print_findings

    by = _ANNOTATED if options.by is None else options.by
    trace, texts = _cut(options.overrides, by)
    settings = TestSettings(options.draws or TestSettings().draws, options.seed)
    with step_bar("layers") as watch:
        on_layer = None if watch is None else watch(trace.meta.num_layers)
        found = examine(trace, texts, by, settings, on_layer)
    if options.out is not None:
        from sim.stage_plot import draw_findings

        _write(options.out, {"test": found.to_dict()})
        draw_findings(found, options.out / "stages")
    print_findings(found)
    if options.out is not None:
        print(f"Results: {options.out}")


def _cut(overrides: Sequence[str], by: str) -> tuple[Trace, list[StagedText]]:
    """Return the trace and its texts in the stages that ``by`` finds."""
    if "," in by:
        raise ConfigError(f"--by {by}: must be one detector")
    config, detectors = compose_stages(overrides, by, "--by")
    work = load_work(config)
    if by == _ANNOTATED:
        return work[0].trace, annotated_texts(work[0])
    lacking = missing_column(detectors[by], work[0])
    if lacking is not None:
        raise ConfigError(f"--by {by}: needs {lacking}, which the trace lacks")
    return work[0].trace, found_texts(work[0], detect(by, detectors[by], config, work))


def _write(folder: Path, record: dict[str, Any]) -> None:
    from sim.results import write_text

    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "stages.json", json.dumps(record, indent=1) + "\n")


def as_record(row: Row) -> dict[str, Any]:
    """Return what a detector did as JSON knows it."""
    if row.missing is not None:
        return {"detector": row.name, "missing": row.missing}
    score = row.score
    return {
        "detector": row.name,
        "tolerance_steps": score.tolerance,
        **{key: getattr(score, key) for key in _COUNTS},
        "chance": None if row.chance is None else row.chance._asdict(),
        "delays_steps": sorted(score.delays),
        "stage_steps": row.stage_steps,
        "found_of_kind": {kind: [n, right] for kind, (n, right) in row.recall_of.items()},
        "spent_us": row.spent_us,
    }


_COUNTS = ("num_found", "num_true", "num_right", "precision", "recall", "f1")


def annotated_likeness(work: Workload) -> tuple[float, Likeness, Likeness] | None:
    """Return the mean length of annotated stages, how alike adjacent ones are, and windows of that length.

    Over what each request decodes; the most used experts compared are an eighth of a layer's. None
    where the trace has no annotation.
    """
    trace = work.trace
    if trace.stage is None:
        return None
    rows = [request.decode_rows for request in work.requests]
    cut = [stages(trace.expert_ids[at], trace.stage[at]) for at in rows]
    length = float(np.mean([len(stage) for text in cut for stage in text]))
    experts = work.num_experts
    top = max(1, experts // 8)
    even = [windows(trace.expert_ids[at], max(1, round(length))) for at in rows]
    return length, likeness(cut, experts, top), likeness(even, experts, top)


def print_report(rows: Sequence[Row], work: Workload, tolerance: int) -> None:
    """Print the table, what is missing, and how alike stages are."""
    from rich.table import Table

    console = screen(160)
    table = Table()
    table.add_column("detector", no_wrap=True)
    for title in _TITLES:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.name, *_cells(row))
    meta, served = work.trace.meta, len(work.requests)
    console.print(
        f"{meta.provenance.kind} trace of {meta.model}: {served} request{'s' * (served != 1)}, "
        f"{work.batch_size} at a time",
        highlight=False,
    )
    console.print(table)
    if any(row.recall_of for row in rows):
        console.print(
            "Share of the stages of each kind whose beginning was found:", highlight=False
        )
        console.print(_by_kind(rows))
    for line in _words(rows, work, tolerance):
        console.print(line, highlight=False, soft_wrap=True)


_TITLES = (
    *("found", "true", "precision", "recall", "F1", "chance F1", "p"),
    *("delay mean", "p50", "p90", "stage length", "us/step"),
)


def _cells(row: Row) -> list[str]:
    if row.missing is not None:
        return ["-"] * len(_TITLES)
    score, chance = row.score, row.chance
    shares = (score.precision, score.recall, score.f1, None if chance is None else chance.f1)
    luck = "-" if chance is None else f"{chance.p_value:.3f}"
    delays = ["-"] * 3
    if score.mean_delay is not None:
        middle = np.quantile(score.delays, [0.5, 0.9], method="inverted_cdf")
        delays = [f"{score.mean_delay:.1f}", *(f"{delay:.0f}" for delay in middle)]
    counts = [str(score.num_found), str(score.num_true) if score.num_true else "-"]
    shown = ["-" if share is None else f"{100 * share:.1f}%" for share in shares]
    return [*counts, *shown, luck, *delays, f"{row.stage_steps:.1f}", f"{row.spent_us:.1f}"]


def _by_kind(rows: Sequence[Row]) -> Any:
    """Return a table of the share of stages of each kind that each detector found."""
    from rich.table import Table

    told = [row for row in rows if row.recall_of]
    kinds = told[0].recall_of
    table = Table("detector", *(f"{kind} ({count})" for kind, (count, _) in kinds.items()))
    for row in told:
        shares = (f"{100 * right / count:.0f}%" for count, right in row.recall_of.values())
        table.add_row(row.name, *shares)
    return table


def _words(rows: Sequence[Row], work: Workload, tolerance: int) -> list[str]:
    lines = [
        f"A boundary found is right from the annotated one on to {tolerance} decode steps later; delay and "
        "length are in decode steps; the time is measured on this machine. Chance: as many boundaries at "
        f"random steps; p: share of {DRAWS} shifts of a detector's own boundaries around the run whose F1 is "
        "as high.",
        *(f"{row.name}: {row.missing}." for row in rows if row.missing is not None),
    ]
    found = annotated_likeness(work)
    if found is None:
        return [
            *lines,
            "The trace has no annotated stages (column stage), so that precision and recall are unknown.",
        ]
    length, by_stage, even = found
    return [
        *lines,
        f"Adjacent annotated stages ({length:.1f} tokens on average, {by_stage.num_pairs} pairs): cosine "
        f"{by_stage.cosine:.3f}, most used experts in common {100 * by_stage.overlap:.1f}%.",
        f"Adjacent windows of {max(1, round(length))} tokens ({even.num_pairs} pairs): cosine "
        f"{even.cosine:.3f}, {100 * even.overlap:.1f}%. Is that the stages, or that near tokens are alike? "
        "--test tells.",
    ]
