"""The bundled model and trace are what the README says they are."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from sim.build import resolve_path
from tests.configs import composed
from traces.schema import DECODE, GATE_COLUMNS, NO_EXPERT, Trace
from traces.store import read_trace
from traces.tiny import CHECKPOINT_DIR

MIB = 2**20


@pytest.fixture(scope="module")
def bundled_file() -> Path:
    return resolve_path(composed()["trace"]["path"])


@pytest.fixture(scope="module")
def bundled(bundled_file: Path) -> Trace:
    return read_trace(bundled_file)


def test_the_trace_is_large_enough_and_small_enough(bundled: Trace, bundled_file: Path) -> None:
    assert bundled.num_requests >= 64
    assert int((bundled.phase == DECODE).sum()) >= 20_000
    assert bundled_file.stat().st_size <= 6e6


def test_the_trace_says_where_it_comes_from(bundled: Trace) -> None:
    meta = bundled.meta
    assert meta.provenance.kind == "recorded"
    assert "torch" in meta.provenance.detail
    assert meta.seed is not None
    assert meta.sampling["temperature"] > 0
    assert meta.expert_bytes == (3 * 128 * 48 * 4,) * 8, "recorded in float32"


def test_the_trace_has_text_weights_next_gates_and_stages(bundled: Trace) -> None:
    assert bundled.text is not None
    assert bundled.stage is not None
    assert bundled.expert_weights is not None
    sums = bundled.expert_weights.astype(np.float64).sum(axis=-1)
    np.testing.assert_allclose(sums, 1.0, atol=4e-3)
    assert set(np.unique(bundled.stage)) == set(range(len(bundled.meta.stage_names)))
    texts = _texts(bundled)
    assert len(set(texts)) == len(texts), "no text repeats"
    assert 0.1 < np.mean(["\nWait" in text for text in texts]) < 0.6


def test_gates_guess_worse_the_farther_they_look(bundled: Trace) -> None:
    shares = []
    for distance, column in enumerate(GATE_COLUMNS, start=1):
        early = getattr(bundled, column)
        assert (early[:, -distance:] == NO_EXPERT).all()
        right = early[:, :-distance, :, None] == bundled.expert_ids[:, distance:, None, :]
        shares.append(right.any(axis=-1).mean())
    assert shares == pytest.approx([0.763, 0.672, 0.605], abs=0.001)


def test_the_second_trace_has_logits_that_explain_its_experts() -> None:
    file = resolve_path(composed("trace=tiny_logits")["trace"]["path"])
    trace = read_trace(file)
    assert file.stat().st_size <= 3e6
    assert trace.num_requests == 10
    assert all(getattr(trace, column) is not None for column in (*GATE_COLUMNS, "text", "stage"))
    assert trace.router_logits is not None
    best = np.argsort(-trace.router_logits.astype(np.float32), axis=-1, kind="stable")[..., :4]
    same = np.sort(best, axis=-1) == np.sort(trace.expert_ids, axis=-1)
    assert same.all(axis=-1).mean() > 0.99, "ties of float16 apart"


def test_the_model_solves_held_out_problems() -> None:
    found = json.loads((CHECKPOINT_DIR / "eval.json").read_text())
    assert found["problems"] >= 200
    assert found["greedy"]["exact"] >= 0.8
    assert found["sampled"][str(found["recording_temperature"])]["exact"] >= 0.8


def test_the_checkpoint_solves_problems_now() -> None:
    """Twelve held-out problems, greedily: were the true rate 80 %, 7 or fewer right had odds of 7 %."""
    pytest.importorskip("transformers")
    from traces.tiny.data import problems
    from traces.tiny.decode import generate
    from traces.tiny.model import load_model
    from traces.tiny.scoring import exact_share

    chosen = list(islice(problems(77, held_out=True), 12))
    model, tokenizer = load_model()
    solutions = generate(model, tokenizer, [problem.prompt for problem in chosen])
    assert exact_share(chosen, solutions) >= 8 / 12


def test_the_checkpoint_is_small() -> None:
    assert sum(file.stat().st_size for file in CHECKPOINT_DIR.iterdir()) <= 12 * MIB


def test_recording_again_gives_the_same_trace(bundled: Trace, tmp_path: Path) -> None:
    """Floats differ between processors, so a near-tie may fall otherwise; the bulk must agree."""
    pytest.importorskip("transformers")
    from traces.record_cli import main

    out = tmp_path / "again.parquet"
    seed = str(bundled.meta.seed)
    options = ["--model", "tiny", "--out", str(out), "--requests", "2", "--threads", "1"]
    assert main([*options, "--seed", seed]) == 0
    again = read_trace(out)
    rows = np.isin(bundled.request_id, [0, 1])
    first = bundled.take(np.flatnonzero(rows))
    shared = min(len(first), len(again))
    assert shared >= 0.8 * len(first)
    same = (first.expert_ids[:shared] == again.expert_ids[:shared]).mean()
    assert same > 0.9


def _texts(trace: Trace) -> list[str]:
    assert trace.text is not None
    pieces: dict[int, list[str]] = {}
    for request, piece in zip(trace.request_id.tolist(), trace.text, strict=True):
        pieces.setdefault(request, []).append(piece)
    return ["".join(parts) for parts in pieces.values()]
