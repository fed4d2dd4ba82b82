"""Fitting the score model: single moments, held-out measures on recorded routing, other shapes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import traces.tiny
from tests.public_data import routing_file
from tests.synth_models import model
from traces.importers.experts_npz import read_experts_npz
from traces.locality_reuse import overlap_by_lag
from traces.schema import DECODE, PREFILL, Provenance, Trace, TraceError, TraceMeta
from traces.store import read_trace
from traces.synth_draw import draw_like
from traces.synth_fit import fit, fit_layers, next_layer_rate, stage_shares
from traces.synth_match import LEAST_GAP, match, measures
from traces.synth_model import SynthModel
from traces.synth_moments import (
    OverlapSolver,
    chosen_shares,
    correlation_of,
    solve_offsets,
    solve_sharpness,
)
from traces.synth_scale import rescaled
from traces.synth_scores import SPAN_TOKENS, choose, directions
from traces.synth_source import Source, make_source, ordered

_TINY = Path(traces.tiny.__file__).parent
_LAYERS = [1, 4, 6]


@cache
def bundled(num_requests: int = 24) -> Source:
    trace = read_trace(_TINY / "trace.parquet", ["stage", "expert_weights"])
    return make_source(trace.take(np.asarray(trace.request_id) < num_requests))


def routed(scores: np.ndarray, top_k: int, like: Trace) -> Trace:
    """The trace of a router with these scores [num_tokens, num_layers, num_experts]."""
    layers, experts = scores.shape[1:]
    meta = TraceMeta(
        model="tiny",
        num_layers=layers,
        num_experts=experts,
        top_k=top_k,
        layer_indices=tuple(range(layers)),
        provenance=Provenance("recorded", "tests"),
        stage_names=like.meta.stage_names,
    )
    ids = choose(scores.astype(np.float32), top_k)
    return ordered(
        Trace(meta, like.request_id, like.position, like.phase, like.step, ids, stage=like.stage)
    )


# -- single moments --------------------------------------------------------------------------------


def test_offsets_give_the_popularity_that_was_asked_for() -> None:
    rng = np.random.default_rng(0)
    wanted = rng.dirichlet(np.full(24, 1.5), 2) * 4
    wanted = np.minimum(wanted, 0.9)
    wanted *= 4 / wanted.sum(axis=1, keepdims=True)
    direction = directions((1, 24), 6, seed=1)[0]
    offsets = solve_offsets(wanted, direction, 4, seed=2)
    fresh = np.random.default_rng(9).standard_normal((20_000, 6), dtype=np.float32) @ direction
    for stage in range(2):
        found = np.bincount(choose(fresh + offsets[stage], 4).ravel(), minlength=24) / 20_000
        np.testing.assert_allclose(found, wanted[stage], atol=0.03)


def test_overlap_rises_with_correlation_and_is_solved_for() -> None:
    direction = directions((1, 24), 6, seed=1)[0]
    solver = OverlapSolver(np.zeros((1, 24), dtype=np.float32), direction, 4, seed=3)
    stages = np.zeros(solver.num_pairs, dtype=np.int16)
    curve = solver.curve(stages, stages, np.ones((24, 1)))[:, 0]
    assert (np.diff(curve) > 0).all()
    assert curve[1] == pytest.approx(4 / 24, abs=0.03)  # uncorrelated: chance
    value, slope = correlation_of(curve, float(curve[1] + curve[2]) / 2)
    assert value == pytest.approx(0.125)  # halfway between the tried 0 and 0.25
    assert slope == pytest.approx((curve[2] - curve[1]) / 0.25)
    assert correlation_of(curve, 1.0)[0] == pytest.approx(0.95)
    assert correlation_of(curve, 0.0)[0] == pytest.approx(-0.3)


def test_sharpness_gives_the_best_slot_its_share() -> None:
    scores = -np.sort(-np.random.default_rng(0).standard_normal((500, 4)), axis=1)
    found = solve_sharpness(0.5, scores.astype(np.float32))
    powers = np.exp(scores * found)
    assert (powers[:, 0] / powers.sum(axis=1)).mean() == pytest.approx(0.5, abs=1e-3)
    assert solve_sharpness(0.25, scores.astype(np.float32)) == pytest.approx(0, abs=1e-6)


# -- sources ---------------------------------------------------------------------------------------


def test_a_source_is_put_in_order_and_halved() -> None:
    source = bundled()
    requests = source.trace.request_id
    assert (np.diff(requests) >= 0).all()
    assert source.told
    assert source.half(0).trace.num_requests == source.half(1).trace.num_requests == 12
    lengths = source.lengths_tokens()
    assert lengths.sum() == len(source.trace)
    assert lengths[3, 0] == (source.trace.phase[requests == 3] == PREFILL).sum()
    assert len(source.sequences(DECODE)) == 24


def test_an_unknown_stage_continues_the_one_before() -> None:
    trace = bundled().trace
    holes = np.array(trace.stage)
    holes[100:120] = -1
    found = make_source(replace(trace, stage=holes))
    assert (found.stages[100:120] == trace.stage[99]).all()  # type: ignore[index]


def test_a_trace_without_stages_gets_clusters_of_windows() -> None:
    source = make_source(replace(bundled().trace, stage=None))
    assert not source.told
    assert source.stage_names[0] == "cluster_0"
    shares = stage_shares(source)
    assert shares.shape == (len(source.stage_names), 8, 32)
    np.testing.assert_allclose(shares.sum(axis=2), 4, rtol=1e-6)
    spread = np.abs(shares - shares.mean(axis=0)).mean()
    assert spread > 0.02  # clusters differ


def test_too_little_to_fit_is_told() -> None:
    trace = bundled().trace
    alone = trace.take(trace.request_id == 0)
    single = replace(alone, request_id=np.arange(len(alone), dtype=np.int32))
    for too_little in (alone, trace.take(slice(0, 100)), single):
        with pytest.raises(TraceError, match="a fit needs 2 requests and 128 rows"):
            make_source(too_little)


def test_very_short_requests_can_be_fitted() -> None:
    trace = bundled().trace
    pieces = replace(trace, request_id=(trace.request_id * 40 + trace.position // 20))
    few = make_source(pieces.take(slice(0, 4000))).layers([4])
    found = fit_layers(few, seed=0, rank=6)
    assert (found.stays == 0).all()  # no two tokens are 64 apart: what stays cannot be told
    assert (found.correlations[..., 40:] == found.correlations[..., 40:41]).all()
    drawn = draw_like(found, few.sequences() * 4, seed=1)
    rates = [overlap_by_lag([t], t.meta, (1, 2, 3)).pooled for t in (drawn, few.trace)]
    np.testing.assert_allclose(*rates, rtol=0.1)


# -- fits ------------------------------------------------------------------------------------------


@cache
def fitted() -> SynthModel:
    return fit_layers(bundled().half(0).layers(_LAYERS), seed=0, rank=6)


def test_a_fit_comes_within_a_tenth_of_held_out_requests() -> None:
    held = bundled().half(1).layers(_LAYERS)
    found = measures(draw_like(fitted(), held.sequences(), seed=7))
    wanted = measures(held.trace)
    np.testing.assert_allclose(found.reuse, wanted.reuse, rtol=0.1)
    np.testing.assert_allclose(found.coherence, wanted.coherence, rtol=0.1)
    np.testing.assert_allclose(found.lru, wanted.lru, rtol=0.1)
    large = wanted.gap >= LEAST_GAP
    assert large.sum() > 15
    np.testing.assert_allclose(found.gap[large], wanted.gap[large], rtol=0.1)


def test_popularity_by_stage_is_that_of_the_source() -> None:
    source = bundled().half(0).layers(_LAYERS)
    drawn = draw_like(fitted(), source.sequences() * 3, seed=7)
    there = replace(source, trace=replace(drawn, stage=np.tile(source.stages, 3)))
    wanted, found = stage_shares(source), stage_shares(there)
    assert np.abs(found - wanted).mean() < 0.25 * np.abs(wanted - wanted.mean(axis=0)).mean()


def test_without_stages_and_persistence_the_same_measures_would_miss() -> None:
    """The check of a fit can fail: independent draws of the right popularity do."""
    held = bundled().half(1).layers(_LAYERS)
    flat = replace(
        fitted(),
        correlations=np.zeros_like(fitted().correlations) + np.eye(1, SPAN_TOKENS),
        stays=np.zeros_like(fitted().stays),
    )
    found, wanted = measures(draw_like(flat, held.sequences(), seed=7)), measures(held.trace)
    assert found.reuse[0] < 0.9 * wanted.reuse[0]


def test_layers_are_coupled_as_much_as_in_the_source() -> None:
    source = bundled().half(0).layers(_LAYERS)
    whole = fit(source, seed=0, rank=6)
    drawn = draw_like(whole, source.sequences(), seed=7)
    assert next_layer_rate(drawn) == pytest.approx(next_layer_rate(source.trace), rel=0.1)
    apart = draw_like(replace(whole, coupling=0.0), source.sequences(), seed=7)
    assert next_layer_rate(apart) < 0.6 * next_layer_rate(source.trace)


def test_a_match_compares_both_halves_crosswise() -> None:
    source = bundled(12).layers([4])
    found = match(source, rank=6)
    assert found.ranks == (6, 6)
    assert [row.at for row in found.of("reuse")][:2] == ["lag 1", "lag 2"]
    assert len(found.of("lru")) == 32 - 4 + 1
    row = found.of("reuse")[0]
    assert row.source == pytest.approx(np.mean(row.halves))
    assert row.floor_ratio == pytest.approx(abs(row.halves[0] - row.halves[1]) / row.source)
    assert min(row.source for row in found.of("gap")) >= found.least_gap
    assert found.to_dict()["rows"][0]["error_ratio"] == row.error_ratio
    assert found.to_dict()["rows"][0]["single_error_ratio"] == row.single_error_ratio
    assert row.synthetic == pytest.approx(np.mean(row.drawn))


def test_a_match_has_the_area_of_the_gap_and_each_layer_by_itself() -> None:
    source = bundled(12).layers([4, 6])
    found = match(source, rank=6)
    assert found.gap_mean is not None
    halves = [measures(source.half(number).trace) for number in (1, 0)]
    assert found.gap_mean.halves == pytest.approx([half.gap.mean() for half in halves])
    assert [row.at for row in found.layers] == 2 * ["layer 4", "layer 6"]
    for layer, row in enumerate(found.layers[:2]):
        alone = source.layers([layer])
        own = [measures(alone.half(number).trace) for number in (1, 0)]
        assert row.halves == pytest.approx([half.reuse[0] for half in own])
        lru = [half.lru[8 - 4] for half in own]  # a quarter of 32 experts
        assert found.layers[2 + layer].halves == pytest.approx(lru)
    worst = found.worst_layer("lru")
    assert worst is not None
    assert abs(worst.error_ratio) == max(abs(row.error_ratio) for row in found.layers[2:])
    assert len(found.to_dict()["layers"]) == 4


# -- other shapes ----------------------------------------------------------------------------------


def test_the_same_shape_is_the_model_itself() -> None:
    same = model()
    assert rescaled(same, 3, 16, 2) is same


@pytest.mark.parametrize("shape", [(7, 48, 6), (2, 8, 1), (1, 16, 4)])
def test_dynamics_and_quantiles_of_popularity_stay(shape: tuple[int, int, int]) -> None:
    one, other = model(), rescaled(model(), *shape)
    assert (other.num_layers, other.num_experts, other.top_k) == shape
    for end in {0, shape[0] - 1}:
        like = round(end * (one.num_layers - 1) / max(1, shape[0] - 1))
        assert (other.correlations[end] == one.correlations[like]).all()
        old, new = relative_popularity(one, like), relative_popularity(other, end)
        quantiles = np.linspace(0.1, 0.9, 5)
        np.testing.assert_allclose(
            np.quantile(new, quantiles), np.quantile(old, quantiles), atol=0.35
        )


def relative_popularity(of: SynthModel, layer: int) -> np.ndarray:
    direction = directions((of.num_layers, of.num_experts), of.rank, of.seed)[layer]
    shares = chosen_shares(of.offsets[:, layer], direction, of.top_k, of.seed)
    return shares.mean(axis=0) * of.num_experts / of.top_k


@pytest.mark.parametrize("shape", [(0, 16, 2), (3, 1, 1), (3, 16, 16), (3, 70000, 2)])
def test_impossible_shapes_are_told(shape: tuple[int, int, int]) -> None:
    with pytest.raises(TraceError, match="must"):
        rescaled(model(), *shape)


@pytest.mark.parametrize("top_k", [2, 4, 8])
def test_a_fit_to_half_of_the_experts_foretells_the_whole_router(top_k: int) -> None:
    """Fit to the choices among a random half of the experts; predict the choices among all 32, top-4.

    With 2 of 16 the share of the experts that a token uses stays, with 4 and 8 of 16 it falls to a half
    and a quarter. Whoever carried the reuse over as a figure would be off by 70 % and more with 4 of 16.
    """
    recorded = read_trace(_TINY / "logits.parquet", ["stage", "router_logits"])
    logits = np.asarray(recorded.router_logits)[:, _LAYERS].astype(np.float32)
    rng = np.random.default_rng(5)
    few = np.stack([logits[:, layer, rng.permutation(32)[:16]] for layer in range(3)], axis=1)
    source = make_source(routed(few, top_k, recorded))
    scaled = rescaled(fit_layers(source, seed=0, rank=6), 3, 32, 4)
    whole = routed(logits, 4, recorded)
    lags = (1, 2, 4, 8, 16)
    drawn = draw_like(scaled, source.sequences() * 2, seed=3)
    found, wanted = (overlap_by_lag([t], t.meta, lags).pooled for t in (drawn, whole))
    # A single half: over four of them and the lags the errors are 5 % rms, the worst 13 %.
    np.testing.assert_allclose(found, wanted, rtol=0.15)
    if top_k > 2:
        carried = overlap_by_lag([source.trace], source.trace.meta, lags).pooled
        assert (carried > 1.5 * wanted).all()


@pytest.mark.public_data
@pytest.mark.parametrize("text", ["code", "math"])
def test_a_large_models_routing_is_met_on_held_out_contexts(text: str) -> None:
    trace = read_experts_npz(routing_file(f"qwen3-30b-a3b_{text}.npz"))
    source = make_source(trace).layers([6])
    found = match(source, rank=6)
    for measure in ("reuse", "coherence", "lru"):
        errors = [abs(row.error_ratio) for row in found.of(measure)]
        assert max(errors) < 0.1, measure
