"""Is there stage structure beyond token locality: the sums, the inference, and what the test says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sim.stage_answer import answer
from sim.stage_cuts import (
    annotated_texts,
)
from sim.stage_draws import draw_cuts
from sim.stage_findings import Findings
from sim.stage_hold import compose_stages, load_work
from sim.stage_inference import contrast
from sim.stage_pair_test import PairTest
from sim.stage_structure import TestSettings, examine
from sim.types import ConfigError
from tests.public_data import routing_file
from tests.staged import FEW, local_only, planted, random_stages, texts_of, trace_of, uses_of
from traces.importers.experts_npz import read_experts_npz
from traces.schema import NO_EXPERT, Trace, TraceMeta

# -- inference -------------------------------------------------------------------------------------------


def test_p_counts_the_measured_cuts_among_the_draws() -> None:
    null = np.array([0.1, 0.2, 0.3, 0.4])
    assert contrast(0.5, np.empty(0), null).p_value == pytest.approx(1 / 5)
    assert contrast(0.3, np.empty(0), null).p_value == pytest.approx(3 / 5), "an equal one counts"
    assert np.isnan(contrast(float("nan"), np.ones(3), null).p_value)
    sure = contrast(0.5, np.linspace(0.45, 0.55, 101), null)
    assert (sure.low, sure.high) == (pytest.approx(0.4525), pytest.approx(0.5475))


def test_tokens_like_their_neighbours_are_no_stages() -> None:
    """Without stages p is spread evenly: few of many traces have a small one."""
    found = [p_of(local_only(seed)) for seed in range(40)]
    assert np.mean(np.array(found) <= 0.1) <= 0.25
    assert 0.3 < np.mean(found) < 0.7


def p_of(trace: Trace) -> float:
    texts = texts_of(trace)
    test = PairTest(texts, draw_cuts(texts, FEW.draws, 0), FEW.edges, 0)
    test.add([uses_of(trace.expert_ids[text.rows, 0, 0]) for text in texts], 1)
    return test.tell().overall.p_value


def examined(trace: Trace) -> Findings:
    return examine(trace, texts_of(trace), "annotated", FEW)


def test_planted_stages_are_found_and_told() -> None:
    found = examined(planted(0, requests=30))
    assert found.pairs.overall.p_value == 0.01
    assert {against.p_value for against in found.pairs.against.values()} == {0.01}
    assert found.kinds is not None
    assert found.kinds.overall.p_value == 0.01
    assert found.captures[0].gain["kind"][1] > 0, "the kind of the stage is worth something"
    lines = answer(found)
    told = "at equal distance two tokens of one stage share "
    assert lines[0].startswith(f"Yes, as the synthetic trace was made: {told}")
    recorded = replace(found, source="recorded trace of a model")
    assert answer(recorded)[0].startswith(f"Yes: {told}")
    assert any(line.startswith("Stages of one kind use the same experts") for line in lines)
    plain = examined(local_only(0))
    assert answer(plain)[0].startswith("No: ")
    assert any("do not clearly use the same experts" in line for line in answer(plain))


def test_stages_that_differ_in_their_words_only_have_nothing_beyond_them() -> None:
    """A token's expert follows from its id, and stages differ in their ids."""
    rng = np.random.default_rng(3)
    labels = random_stages(rng, 40, 60)
    words = 4 * labels + rng.integers(0, 4, len(labels))
    expert = rng.integers(0, 8, 16)
    found = examined(trace_of(expert[words][:, None, None], labels, 60, token_id=words))
    assert found.pairs.overall.is_clear
    assert found.beyond is not None
    assert abs(found.beyond.overall.value) < 0.1 * found.pairs.overall.value
    assert any("are left, " in line or "Nothing is clear" in line for line in answer(found))
    context = examined(trace_of((labels * 2)[:, None, None], labels, 60, token_id=words % 4))
    assert context.beyond is not None
    assert context.beyond.overall.value > 0.9 * context.pairs.overall.value


def test_slots_without_an_expert_share_nothing() -> None:
    trace = planted(2)
    ids = np.concatenate([trace.expert_ids, np.full_like(trace.expert_ids, NO_EXPERT)], axis=2)
    half = examined(trace_of(ids, trace.stage, 60))
    whole = examined(trace)
    assert half.pairs.overall.value == pytest.approx(whole.pairs.overall.value / 2)
    assert half.unrelated == pytest.approx(whole.unrelated / 2)


def test_the_same_seed_gives_the_same_findings_and_a_layer_does_not_change_another() -> None:
    trace = planted(4, requests=4)
    assert examined(trace).to_dict() == examined(trace).to_dict()
    twice = trace_of(np.concatenate([trace.expert_ids] * 2, axis=1), trace.stage, 60)
    one, both = examined(trace).pairs, examined(twice).pairs
    assert both.by_layer[0] == both.by_layer[1] == one.by_layer[0]
    assert both.overall.value == pytest.approx(one.overall.value)


def test_one_request_has_no_interval_and_teaches_nothing() -> None:
    trace = planted(5, requests=1)
    trace.token_id = trace.expert_ids[:, 0, 0].astype(np.int32)
    found = examined(trace)
    assert np.isnan(found.pairs.overall.low)
    assert (found.beyond, found.kinds, found.captures) == (None, None, ())
    assert len(answer(found)) == 2


def test_stages_of_one_token_have_no_pairs_and_nothing_else_is_said_of_them() -> None:
    labels = np.arange(240) % 3
    trace = trace_of((np.arange(240) % 7)[:, None, None], labels, 60)
    trace.token_id = trace.expert_ids[:, 0, 0].astype(np.int32)
    lines = answer(examined(trace))
    assert lines[0].startswith("Unknown: no two pairs")
    assert not any("nan" in line or "tokens apart" in line for line in lines)


def test_a_difference_near_the_boundaries_only_is_told_as_such() -> None:
    """Each stage begins with tokens of its own, and goes on like all others."""
    rng = np.random.default_rng(7)
    labels = np.tile(np.repeat(np.arange(3), 20), 40)
    fresh = np.arange(len(labels)) % 20 < 4
    ids = np.where(fresh, 5 + labels, rng.integers(0, 5, len(labels)))
    found = examined(trace_of(ids[:, None, None], labels, 60))
    assert found.pairs.by_band[2].value < 0
    assert answer(found)[1].startswith(
        "The difference is clear at all distances up to 8 tokens, and not at the next ones; a stage has 20"
    )


def test_texts_of_one_stage_are_refused() -> None:
    trace = trace_of(np.zeros((12, 1, 1)), [1] * 12, 6)
    with pytest.raises(ConfigError, match="no request has two stages"):
        examined(trace)
    with pytest.raises(ConfigError, match="no annotated stages"):
        texts_of(trace_of(np.zeros((12, 1, 1)), None, 6))


# -- real traces -----------------------------------------------------------------------------------------


def test_the_bundled_trace_has_stages_that_reach_half_of_their_length() -> None:
    """docs/stages.md has the figures of all requests; these are of sixteen."""
    config, _ = compose_stages(["workload.requests=[24,40]"])
    work, _ = load_work(config)
    found = examine(work.trace, annotated_texts(work), "annotated", TestSettings(draws=99))
    lines = answer(found)
    assert lines[0].startswith("Yes")
    assert "at all distances up to 32 tokens" in lines[1]
    assert 0.005 < found.pairs.overall.value < 0.02
    assert found.kinds is not None
    assert found.kinds.overall.low > 0.02
    eighth = found.captures[1]
    assert eighth.gain["kind"][1] > 0.04
    assert eighth.gain["before"][2] < 0, "the stage just finished is the wrong teacher"


@pytest.mark.public_data
def test_a_change_of_text_is_found_on_a_real_model_and_windows_of_one_text_are_not() -> None:
    """Code and mathematics by turns, 96 tokens each, against windows of the same texts unmixed."""
    parts = [read_experts_npz(routing_file(f"qwen3-30b-a3b_{n}.npz")) for n in ("code", "math")]
    chosen = [part.expert_ids[:4032, ::12].reshape(42, 96, -1, 8) for part in parts]
    mixed = np.stack(chosen, axis=1).reshape(-1, *chosen[0].shape[2:])
    plain = np.concatenate(chosen).reshape(mixed.shape)
    labels = np.arange(len(mixed)) // 96 % 6

    def tested(ids: np.ndarray) -> Findings:
        trace = trace_of(ids, labels, 576)
        wide = TraceMeta(**{**_fields(trace.meta), "num_experts": 128})
        trace = Trace(wide, **{name: getattr(trace, name) for name in trace.columns})
        return examine(trace, texts_of(trace), "annotated", TestSettings(draws=99))

    change, same = tested(mixed), tested(plain)
    assert change.pairs.against["windows"].p_value == change.pairs.overall.p_value == 0.01
    assert change.pairs.sides() == pytest.approx((0.216, 0.044), abs=0.001)
    assert same.pairs.sides() == pytest.approx((0.216, 0.213), abs=0.001)
    assert same.pairs.overall.p_value > 0.05


def _fields(meta: TraceMeta) -> dict[str, Any]:
    return {name: getattr(meta, name) for name in meta.__dataclass_fields__}
