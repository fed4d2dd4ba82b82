"""``greenroom stages``: what is counted as found, what is printed, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim.coherence import likeness, stages, windows
from sim.policies.detectors import AnnotatedStageDetector, FixedStageDetector
from sim.simulate import simulate
from sim.stage_hold import compose_stages
from sim.stage_replay import replay_stages, stage_uses
from sim.stage_report import main
from sim.stage_score import StageScore
from sim.types import ConfigError, Phase, StepInfo
from sim.workload import Workload
from tests.configs import composed, options
from traces.schema import Provenance, Trace, TraceMeta
from traces.store import write_trace

LABELS = [0, 0, 1, 1, 1, 1, 2, 2, 2, 1, 1]
"""A prompt of two tokens, then three stages that begin at decode steps 1, 5 and 8."""


def annotated(labels: list[int] | None = LABELS, requests: int = 1, **columns: Any) -> Trace:
    """A trace of two layers of four experts; a stage uses the expert of its label's number."""
    given = LABELS if labels is None else labels
    rows = len(given) * requests
    position = np.tile(np.arange(len(given), dtype=np.int32), requests)
    ids = np.tile(np.array(given, np.uint16), requests)[:, None, None].repeat(2, axis=1)
    meta = TraceMeta(
        model="toy",
        num_layers=2,
        num_experts=4,
        top_k=1,
        layer_indices=(0, 1),
        provenance=Provenance("synthetic", "tests"),
        stage_names=("prompt", "plan", "work"),
    )
    return Trace(
        meta,
        request_id=np.repeat(np.arange(requests, dtype=np.int32), len(given)),
        position=position,
        phase=(position >= 2).astype(np.uint8),
        step=position,
        expert_ids=ids,
        stage=None if labels is None else np.tile(np.array(labels, np.int16), requests),
        **columns,
    ).take(slice(0, rows))


def score(found: list[int], true: list[int], tolerance: int) -> StageScore:
    """Score boundaries at these decode steps of one request, whose label changes at those."""
    held, label = StageScore(tolerance), 0
    held.add(StepInfo(0, Phase.PREFILL, 1, request_ids=(0,), stages=(0,)), False)
    for step in range(20):
        label += step in true
        info = StepInfo(step + 1, Phase.DECODE, 1, request_ids=(0,), stages=(label,))
        held.add(info, step in found)
    return held


@pytest.mark.parametrize(
    ("found", "true", "right", "delay"),
    [
        ([5, 9], [5, 9], 2, 0.0),
        ([6, 12], [5, 9], 2, 2.0),
        ([4, 9], [5, 9], 1, 0.0),  # before it: luck, no finding
        ([13], [9], 0, None),  # later than the tolerance
        ([6, 7], [5], 1, 1.0),  # one boundary is found once
        ([8], [5, 7], 1, 1.0),  # the latest one
        ([7, 8], [5, 7], 2, 1.5),
    ],
)
def test_what_counts_as_found(
    found: list[int], true: list[int], right: int, delay: float | None
) -> None:
    held = score(found, true, tolerance=3)
    assert (held.num_found, held.num_true, held.num_right) == (len(found), len(true), right)
    assert held.precision == right / len(found)
    assert held.recall == right / len(true)
    assert held.mean_delay == delay


def test_without_annotation_or_boundaries_nothing_is_known() -> None:
    held = StageScore()
    held.add(StepInfo(0, Phase.DECODE, 1, request_ids=(0,)), True)
    assert (held.num_found, held.precision, held.recall, held.mean_delay) == (1, None, None, None)
    assert score([], [5], 3).precision is None
    assert score([], [5], 3).recall == 0.0
    with pytest.raises(ValueError, match="tolerance = -1"):
        StageScore(-1)


def test_a_step_that_begins_stages_of_several_requests_is_one_boundary() -> None:
    work = Workload(annotated(requests=2), batch_size=2)
    held = StageScore()
    for seen in replay_stages(AnnotatedStageDetector(), [work]):
        held.add(seen.step, seen.is_boundary)
    # The second prompt is a step after the first: the requests decode side by side from then on.
    assert (held.num_true, held.num_found, held.num_right) == (3, 3, 3)


def test_uses_by_stage_are_those_of_its_steps() -> None:
    uses = stage_uses(AnnotatedStageDetector(), [Workload(annotated())])
    assert uses == [{0: 2, 4: 2}, {1: 4, 5: 4}, {2: 3, 6: 3}, {1: 2, 5: 2}]
    again = stage_uses(FixedStageDetector(5), [Workload(annotated())] * 2)
    # boundaries at decode steps 5, 10 and 15 of 18, counted through both workloads; each has a prompt
    # of 2 tokens, the second in the stage that decode step 5 begins
    assert [sum(stage.values()) for stage in again] == [2 * 6, 2 * 7, 2 * 5, 2 * 4]


def test_stretches_and_how_alike_they_are() -> None:
    ids = annotated().expert_ids[2:]
    cut = stages(ids, np.array([1, -1, 1, 1, 2, 2, 2, 1, 1], np.int16))
    assert [len(stage) for stage in cut] == [4, 3, 2]
    assert likeness([cut], 4, top=1) == (0.0, 0.0, 2), "neighbours share nothing"
    assert likeness([[cut[0], cut[2]]], 4, top=1) == (pytest.approx(1.0), 1.0, 1)
    assert [len(window) for window in windows(ids, 4)] == [4, 4]
    # {1: 4} against {2: 3, 1: 1}: cosine 1 / sqrt(10), the most used differs
    assert likeness([windows(ids, 4)], 4, 1) == (pytest.approx(10**-0.5), 0.0, 1)
    assert likeness([[cut[0]]], 4, 1).num_pairs == 0


def test_a_run_tells_how_well_its_detector_did(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.parquet", annotated(requests=2))
    run = (f"trace.path={tmp_path / 't.parquet'}", "cache.ratio=0.5", "output.belady=false")
    split = ("calibration.requests=[0,1]", "workload.requests=[1,2]", "policy=stage_cache")

    def result(detector: str, *more: str) -> tuple[Any, ...]:
        row, _ = simulate(composed(*run, *split, f"stages@policy.stages={detector}", *more))
        return row["stages"], row["stage_precision"], row["stage_recall"]

    assert result("annotated") == (3, 1.0, 1.0)
    assert result("fixed", "policy.stages.steps=5") == (1, 1.0, pytest.approx(1 / 3))
    row, _ = simulate(composed(*run, *split[:2], "policy=lru"))
    assert (row["stages"], row["stage_precision"], row["stage_recall"]) == (0, None, None)


# -- the command -------------------------------------------------------------------------------------


def report(capsys: Any, *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    streams = capsys.readouterr()
    return code, streams.out, streams.err


def cells(out: str) -> dict[str, list[str]]:
    """Return the table by detector, without what is drawn and the time."""
    rows = [[c.strip() for c in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]
    return {row[0]: [*row[1:6], *row[8:-1]] for row in rows if len(row) == 13}


def test_every_detector_is_held_against_the_annotation(tmp_path: Path, capsys: Any) -> None:
    write_trace(tmp_path / "t.parquet", annotated(requests=3))
    code, out, err = report(
        capsys,
        *(f"trace.path={tmp_path / 't.parquet'}", "--tolerance", "1", "workload.requests=[1,2]"),
        *("drift.short=2", "drift.long=2", "drift.cooldown=1", "drift.streak=1", "fixed.steps=3"),
    )
    assert (code, err) == (0, "")
    table = cells(out)
    assert sorted(table) == options("stages")
    whole = "100.0%"
    assert table["annotated"] == ["3", "3", whole, whole, whole, "0.0", "0", "0", "2.2"]
    assert table["fixed"] == ["3", "3", "66.7%", "66.7%", "66.7%", "1.0", "1", "1", "2.2"]
    assert table["cues"] == table["entropy"] == ["-"] * 9
    kinds = [line for line in out.splitlines() if line.startswith("│ fixed") and "%" in line][1]
    assert kinds.split("│")[2:-1] == [" 50%      ", " 100%     "], "of two plans and one work"
    assert "cues: needs text, which the trace lacks;" in out
    assert "entropy: needs router_logits, which the trace lacks;" in out
    assert "(3.0 tokens on average, 2 pairs): cosine 0.000" in out


def test_a_trace_without_annotation_says_so(tmp_path: Path, capsys: Any) -> None:
    write_trace(tmp_path / "t.parquet", annotated(labels=None, requests=2))
    place = f"trace.path={tmp_path / 't.parquet'}"
    code, out, _ = report(capsys, "--only", "fixed,annotated", place, "fixed.steps=4")
    assert code == 0
    assert cells(out)["fixed"] == ["2", "-", "-", "-", "-", "-", "-", "-", "3.0"]
    assert "annotated: needs stage, which the trace lacks" in out
    assert "The trace has no annotated stages (column stage)" in out


def test_parameters_of_detectors_are_set_by_their_names() -> None:
    _, found = compose_stages(["fixed.steps=7", "+annotated.max_steps=9", "trace=tiny"])
    assert found["fixed"]["steps"] == 7
    assert found["annotated"]["max_steps"] == 9
    assert set(found) == set(options("stages"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "drft"], "--only drft: no such detector; did you mean 'drift'?"),
        (["--test", "--by", "drft"], "--by drft: no such detector; did you mean 'drift'?"),
        (["--test", "--by", "cues,drift"], "--by cues,drift: must be one detector"),
        (["--test", "--by", "entropy"], "--by entropy: needs router_logits, which the trace lacks"),
        (["--test", "--by", ""], "--by: must not be empty"),
        (["--test", "--draws", "18"], "--draws 18: must be >= 19"),
        (["--test", "--draws", "1000000000"], "--draws 1000000000: must be <= 1000000"),
        (["--test", "--only", "cues"], "--only cues: only without --test"),
        (["--draws", "99"], "--draws 99: only with --test"),
        (["--seed", "-1"], "--seed -1: must be >= 0"),
        (["--out", __file__], "must be a folder"),
        (["--tolerance", "-1"], "--tolerance -1: must be >= 0"),
        (["workload.arrivals=poisson", "workload.rate_per_s=1"], "must be closed"),
        (["trace=tinny"], "trace = tinny: no such option; did you mean 'tiny'?"),
        (["workload.batchsize=4"], "workload.batchsize: unknown key; did you mean"),
        (["--only", "fixed", "fixed.steps=0"], "steps = 0: must be >= 1"),
        (
            ["--only", "fixed", "fixed.step=3"],
            "fixed.step: no such parameter; did you mean 'steps'?",
        ),
        (["--only", "fixed", "+fixed.step=3"], "has no such parameter; did you mean 'steps'?"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], message: str, capsys: Any) -> None:
    code, out, err = report(capsys, *words)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("greenroom stages: error: ")
    assert message in line


def test_a_policy_without_stages_takes_no_detector() -> None:
    config = composed("policy=stage_oracle")
    del config["policy"]["stages"]
    with pytest.raises(ConfigError, match="policy/stage_oracle: needs stages"):
        simulate(config)


def test_the_stages_are_tested_and_what_is_told_is_written(tmp_path: Path, capsys: Any) -> None:
    write_trace(tmp_path / "t.parquet", annotated(requests=6))
    place, out = f"trace.path={tmp_path / 't.parquet'}", tmp_path / "found"
    words = ("--test", place, "calibration.requests=[0,1]", "--draws", "49")
    code, text, err = report(capsys, *words, "--out", str(out))
    assert (code, err) == (0, "")
    assert text.endswith(f"\nResults: {out}\n")
    assert text.startswith(
        "synthetic trace of toy: 15 stages (annotated) in what 5 requests decode"
    )
    assert "pairs within" in text
    assert "window itself" in text
    assert "Yes, as the synthetic trace was made: at equal distance two tokens of one stage" in text
    assert "share 100.0 % of their experts" in text
    found = json.loads((out / "stages.json").read_text())["test"]
    assert found["pairs"]["against"]["shifted"]["p_value"] == 1 / 50
    assert found["beyond"] is None, "it has no token ids"
    assert found["captures"][0]["held"]["kind"] == 1.0
    assert sorted(file.name for file in out.iterdir()) == [
        "stages.json",
        "stages.pdf",
        "stages.png",
    ]
    code, text, _ = report(capsys, *words, "--by", "fixed", "fixed.steps=4")
    assert code == 0
    assert "(fixed) in what 5 requests decode" in text
    write_trace(tmp_path / "plain.parquet", annotated(labels=None, requests=6))
    code, text, err = report(capsys, "--test", f"trace.path={tmp_path / 'plain.parquet'}")
    assert (code, text) == (2, "")
    assert "the trace has no annotated stages (column stage)" in err


def test_what_detectors_did_is_written(tmp_path: Path, capsys: Any) -> None:
    write_trace(tmp_path / "t.parquet", annotated(requests=3))
    words = (f"trace.path={tmp_path / 't.parquet'}", "--only", "annotated,entropy")
    code, _, _ = report(capsys, *words, "workload.requests=[1,2]", "--out", str(tmp_path))
    assert code == 0
    one, other = json.loads((tmp_path / "stages.json").read_text())["detectors"]
    assert (one["detector"], one["num_right"], one["f1"]) == ("annotated", 3, 1.0)
    assert one["delays_steps"] == [0, 0, 0]
    assert one["found_of_kind"] == {"plan": [2, 2], "work": [1, 1]}
    assert other == {"detector": "entropy", "missing": other["missing"]}
