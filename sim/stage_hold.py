"""Plays a workload to stage detectors, to hold what they find against the annotated stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sim.calibration import Calibration, calibration_of
from sim.policies.base import StageDetector
from sim.settings import check_settings, did_you_mean
from sim.stage_chance import Chance, chance_of
from sim.stage_replay import Seen, replay_stages
from sim.stage_score import StageScore
from sim.targets import locate_class
from sim.types import ConfigError, Phase
from sim.workload import Workload

GROUP = "stages"
_NEEDS = {"sim.policies.detectors.CueStageDetector": ("text",)}
"""What a detector needs of a trace beside what its class says; without it, it runs and finds nothing."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one detector did; ``missing`` says what it lacks, and then there is nothing else.

    ``stage_steps`` is the mean length of the stages it found, in decode steps; ``spent_us`` the time it
    took a step, as measured. ``recall_of`` holds by the kind of stage that begins how many there are and
    how many of these it found; empty for several requests at a time, whose boundaries fall together.
    """

    name: str
    score: StageScore
    chance: Chance | None = None
    stage_steps: float = 0.0
    spent_us: float = 0.0
    recall_of: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    missing: str | None = None


def compose_stages(
    overrides: Sequence[str], only: str | None = None, flag: str = "--only"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configuration of a run, and the settings of each detector by name.

    ``only`` are their names, by commas; None: all. ``flag`` is what an error about them speaks of.
    """
    from hydra import compose
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    from sim.composing import composing

    def plain(config: Any) -> dict[str, Any]:
        found: Any = OmegaConf.to_container(config, resolve=True)
        return dict(found)

    with composing():
        known = GlobalHydra.instance().config_loader().get_group_options(GROUP)
        names = known if only is None else only.split(",")
        for name in names:
            if name not in known:
                raise ConfigError(f"{flag} {name}: no such detector{did_you_mean(name, known)}")
        own = {name: [o for o in overrides if _detector_of(o) == name] for name in known}
        rest = [o for o in overrides if _detector_of(o) not in known]
        config = plain(compose("config", overrides=rest))
        detectors = {}
        for name in names:
            settings = plain(compose(f"{GROUP}/{name}"))[GROUP]
            for override in own[name]:
                _check_parameter(override, settings)
            changes = [_renamed(override) for override in own[name]]
            detectors[name] = plain(compose(f"{GROUP}/{name}", overrides=changes))[GROUP]
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
    return override[: len(override) - len(key)] + f"{GROUP}." + key.partition(".")[2]


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
    score: StageScore,
    rng: np.random.Generator,
) -> Row:
    """Run one detector over the work; what it needs and the trace lacks is a row of its own.

    Parameters
    ----------
    score
        An empty one, which is filled.
    rng
        For what chance would score.
    """
    workload, _ = work
    lacking = missing_column(settings, workload)
    if lacking is not None:
        how = "greenroom record --help tells how one is made that has"
        return Row(name, score, missing=f"needs {lacking}, which the trace lacks; {how}")
    decode_steps = steps = spent_ns = 0
    kinds: list[str] = []  # of the stages that begin at score.true_steps
    for seen in detect(name, settings, config, work):
        score.add(seen.step, seen.is_boundary)
        if len(kinds) < score.num_true:
            kinds.append(_kind(seen, workload))
        steps += 1
        decode_steps += seen.step.phase != Phase.PREFILL
        spent_ns += seen.spent_ns
    length, spent_us = decode_steps / (score.num_found + 1), spent_ns / max(1, steps) / 1e3
    by_kind = _recall_of(score, kinds) if workload.batch_size == 1 else {}
    return Row(name, score, chance_of(score, rng), length, spent_us, by_kind)


def detect(
    name: str,
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    work: tuple[Workload, Calibration],
) -> Iterator[Seen]:
    """Return an iterator over the steps of the work, each with what the detector says."""
    from sim.parts import build_detector

    group = {"name": name, GROUP: dict(settings)}
    detector = build_detector({**config, "policy": group}, *work)
    return replay_stages(detector, [work[0]])


def missing_column(settings: Mapping[str, Any], work: Workload) -> str | None:
    """Return the first column that a detector needs and the trace lacks; None where it has all."""
    target = settings["_target_"]
    kind = locate_class(target, GROUP, StageDetector)
    needed = (*_NEEDS.get(target, ()), *getattr(kind, "needs", ()))
    return next((column for column in needed if column not in work.trace.columns), None)


def _kind(seen: Seen, work: Workload) -> str:
    """Name the stage of a step's first token."""
    assert seen.step.stages is not None
    label, names = seen.step.stages[0], work.trace.meta.stage_names
    return names[label] if 0 <= label < len(names) else str(label)


def _recall_of(score: StageScore, kinds: Sequence[str]) -> dict[str, tuple[int, int]]:
    kind_at = dict(zip(score.true_steps, kinds, strict=True))
    there, right = Counter(kinds), Counter(kind_at[step] for step in score.taken)
    return {kind: (count, right[kind]) for kind, count in there.items()}
