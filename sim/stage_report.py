"""``greenroom stages``: how well each stage detector finds the stages that a trace is annotated with."""

from __future__ import annotations

import argparse
import pydoc
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sim.calibration import Calibration, calibration_of
from sim.coherence import Likeness, likeness, stages, windows
from sim.mistakes import complain
from sim.settings import check_settings, did_you_mean
from sim.stage_replay import replay_stages
from sim.stage_score import TOLERANCE, StageScore
from sim.types import ConfigError, Phase
from sim.workload import Workload

_GROUP = "stages"
_NEEDS = {"sim.policies.detectors.CueStageDetector": ("text",)}
"""What a detector needs of a trace beside what its class says; without it, it runs and finds nothing."""
_EPILOG = """examples:
  greenroom stages                                   every detector on the bundled trace
  greenroom stages trace=tiny_logits --only drift,entropy
  greenroom stages workload.batch_size=4 drift.quantile=0.9 fixed.steps=48
  greenroom stages trace.path=my.parquet --tolerance 64

A detector's parameter is DETECTOR.PARAMETER=VALUE; all else is set as in `greenroom sim`."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one detector did; ``missing`` says what it lacks, and then there is nothing else.

    ``stage_steps`` is the mean length of the stages it found, in decode steps; ``spent_us`` the time it
    took a step, as measured.
    """

    name: str
    score: StageScore
    stage_steps: float = 0.0
    spent_us: float = 0.0
    missing: str | None = None


def main(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="greenroom stages",
        description="Hold stage detectors against a trace's annotated stages.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", help="settings")
    parser.add_argument(
        "--tolerance",
        type=int,
        default=TOLERANCE,
        metavar="STEPS",
        help=f"decode steps by which a boundary may be found late (default: {TOLERANCE})",
    )
    parser.add_argument("--only", metavar="NAMES", help="detectors, by commas (default: all)")
    options = parser.parse_intermixed_args(arguments)
    try:
        _run(options.overrides, options.tolerance, options.only)
    except Exception as error:
        return complain("greenroom stages", error)
    return 0


def _run(overrides: Sequence[str], tolerance: int, only: str | None) -> None:
    if tolerance < 0:
        raise ConfigError(f"--tolerance {tolerance}: must be >= 0")
    config, detectors = compose_stages(overrides, only)
    work, calibration = load_work(config)
    rows = [
        hold(name, settings, config, (work, calibration), tolerance)
        for name, settings in detectors.items()
    ]
    print_report(rows, work, tolerance)


def compose_stages(
    overrides: Sequence[str], only: str | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configuration of a run, and the settings of each detector by name."""
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    def plain(config: Any) -> dict[str, Any]:
        found: Any = OmegaConf.to_container(config, resolve=True)
        return dict(found)

    GlobalHydra.instance().clear()
    with initialize_config_module("conf", version_base="1.3"):
        known = GlobalHydra.instance().config_loader().get_group_options(_GROUP)
        names = known if only is None else only.split(",")
        for name in names:
            if name not in known:
                raise ConfigError(f"--only {name}: no such detector{did_you_mean(name, known)}")
        own = {name: [o for o in overrides if _detector_of(o) == name] for name in known}
        rest = [o for o in overrides if _detector_of(o) not in known]
        config = plain(compose("config", overrides=rest))
        detectors = {}
        for name in names:
            settings = plain(compose(f"{_GROUP}/{name}"))[_GROUP]
            for override in own[name]:
                _check_parameter(override, settings)
            changes = [_renamed(override) for override in own[name]]
            detectors[name] = plain(compose(f"{_GROUP}/{name}", overrides=changes))[_GROUP]
    return config, detectors


def _detector_of(override: str) -> str:
    """Return the first part of an override's key: ``drift`` of ``+drift.short=16``."""
    return override.lstrip("+~").partition("=")[0].partition(".")[0]


def _check_parameter(override: str, settings: Mapping[str, Any]) -> None:
    """Refuse to change what is not there; a leading + adds it, and then the constructor may refuse."""
    key = override.partition("=")[0]
    parameter = key.partition(".")[2]
    if not key.startswith("+") and parameter.partition(".")[0] not in settings:
        hint = did_you_mean(parameter, settings)
        raise ConfigError(f"{key}: no such parameter{hint} (to add one write +{key}=...)")


def _renamed(override: str) -> str:
    """Return the override of a detector's parameter as the configuration file of it knows it."""
    key = override.lstrip("+~")
    return override[: len(override) - len(key)] + f"{_GROUP}." + key.partition(".")[2]


def load_work(config: Mapping[str, Any]) -> tuple[Workload, Calibration]:
    """Return the work of a run and the requests that detectors may learn from."""
    from sim.build import load_trace

    check_settings(config)
    trace = load_trace(config["trace"]["path"])
    calibration = calibration_of(config, trace, load_trace)
    spared = [calibration.span] if calibration.trace is trace else []
    work = Workload.from_settings(config["workload"], trace, spared)
    if work.is_open:
        raise ConfigError(
            f"workload.arrivals = {config['workload']['arrivals']}: must be closed, so that the steps do not "
            "depend on a clock"
        )
    return work, calibration


def hold(
    name: str,
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    work: tuple[Workload, Calibration],
    tolerance: int,
) -> Row:
    """Run one detector over the work; what it needs and the trace lacks is a row of its own."""
    from sim.parts import build_detector

    workload, calibration = work
    score, decode_steps, steps, spent_ns = StageScore(tolerance), 0, 0, 0
    target = settings["_target_"]
    for column in (*_NEEDS.get(target, ()), *getattr(pydoc.locate(target), "needs", ())):
        if column not in workload.trace.columns:
            how = "greenroom record --help tells how one is made that has"
            return Row(name, score, missing=f"needs {column}, which the trace lacks; {how}")
    group = {"name": name, _GROUP: dict(settings)}
    detector = build_detector({**config, "policy": group}, workload, calibration)
    for seen in replay_stages(detector, [workload]):
        score.add(seen.step, seen.is_boundary)
        steps += 1
        decode_steps += seen.step.phase != Phase.PREFILL
        spent_ns += seen.spent_ns
    return Row(name, score, decode_steps / (score.num_found + 1), spent_ns / max(1, steps) / 1e3)


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
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160, markup=False)
    table = Table()
    table.add_column("detector", no_wrap=True)
    for title in ("found", "true", "precision", "recall", "mean delay", "stage length", "us/step"):
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
    for line in _words(rows, work, tolerance):
        console.print(line, highlight=False, soft_wrap=True)


def _cells(row: Row) -> list[str]:
    if row.missing is not None:
        return ["-"] * 7
    score = row.score
    shares = ["-" if s is None else f"{100 * s:.1f}%" for s in (score.precision, score.recall)]
    delay = "-" if score.mean_delay is None else f"{score.mean_delay:.1f}"
    true = str(score.num_true) if score.num_true else "-"
    counts = [str(score.num_found), true]
    return [*counts, *shares, delay, f"{row.stage_steps:.1f}", f"{row.spent_us:.1f}"]


def _words(rows: Sequence[Row], work: Workload, tolerance: int) -> list[str]:
    lines = [
        f"A boundary found is right from the annotated one on to {tolerance} decode steps later; delay and "
        "length are in decode steps; the time is measured on this machine.",
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
        f"{even.cosine:.3f}, {100 * even.overlap:.1f}%.",
    ]
