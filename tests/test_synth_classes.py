"""Classes of experts by popularity: who is in one, how its experts return, what its states have in common."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.synth_models import model
from traces.locality_reuse import overlap_by_lag
from traces.schema import Trace
from traces.synth_classes import NUM_CLASSES, agreement, class_overlap, popularity_classes
from traces.synth_draw import draw_like
from traces.synth_fit import fit_layers
from traces.synth_moments import Mix, solve_offsets
from traces.synth_scores import SPAN_TOKENS, States, choose, directions, filters
from traces.synth_source import make_source

_LAGS = (1, 2, 4, 8, 16)


def bursty(**changes: object) -> Trace:
    """Routing in which half of the experts are rare and come back for long, the others are fickle."""
    rare = np.broadcast_to(np.arange(16) >= 8, (2, 16))
    fall = np.array([0.3, 0.97])[:, None] ** np.arange(SPAN_TOKENS)
    of = model(
        num_layers=2,
        classes=rare.astype(np.int64),
        offsets=np.where(rare, -1.0, 0.0).astype(np.float32)[None].repeat(2, axis=0),
        correlations=np.broadcast_to(fall, (2, *fall.shape)),
        stays=np.zeros((2, 2)),
        **changes,
    )
    return draw_like(of, [np.zeros(500, dtype=np.int16)] * 12, seed=1)


def test_classes_are_in_the_order_of_popularity_and_end_at_shares_of_the_uses() -> None:
    trace = bursty()
    classes = popularity_classes(trace)
    for layer in range(2):
        uses = np.bincount(trace.expert_ids[:, layer].ravel(), minlength=16)
        of = [uses[classes[layer] == number] for number in range(NUM_CLASSES)]
        for hotter, colder in pairwise(of):
            assert hotter.min() >= colder.max(initial=0)
        assert of[0].sum() >= 0.45 * uses.sum() > of[0].sum() - of[0].min()


def test_a_class_of_few_uses_is_joined_to_the_more_popular_one() -> None:
    classes = popularity_classes(bursty().take(slice(0, 400)))  # 800 uses, of which 20 % are 160
    assert set(classes.ravel().tolist()) == {0, 1}
    classes = popularity_classes(bursty().take(slice(0, 100)))
    assert set(classes.ravel().tolist()) == {0}
    classes = popularity_classes(bursty().take(slice(0, 2000)))
    assert NUM_CLASSES - 1 not in classes


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_the_overlap_of_a_single_class_is_the_overlap(seed: int) -> None:
    trace = draw_like(model(seed=seed), [np.zeros(60, dtype=np.int16)] * 3, seed)
    one = class_overlap(trace, np.zeros((3, 16), dtype=np.int64), _LAGS)
    wanted = overlap_by_lag([trace], trace.meta, _LAGS)
    np.testing.assert_allclose(one.rates[:, 0], wanted.rates)
    assert np.isnan(one.rates[:, 1:]).all()
    assert one.pairs.tolist() == wanted.pairs.tolist()


def test_rare_experts_that_come_back_are_told_from_popular_ones_that_do_not() -> None:
    trace = bursty()
    rare = np.broadcast_to(np.arange(16) >= 8, (2, 16)).astype(np.int64)
    rates = class_overlap(trace, rare, _LAGS).rates
    assert (rates[:, 1, :4] > 1.2 * rates[:, 0, :4]).all()  # up to lag 8, rare as they are


def test_states_agree_as_foretold() -> None:
    fall = np.array([0.5, 0.98])[:, None] ** np.arange(SPAN_TOKENS)
    correlations, stays = fall[None], np.array([[0.1, 0.4]])
    wanted = agreement(correlations, stays)[0]
    assert np.diag(wanted) == pytest.approx([1, 1], abs=0.01)
    blocks = filters(correlations * (1 - stays)[..., None])
    states = States(blocks, stays, 3000, 1.0, np.random.default_rng(3))
    path = np.concatenate([states.next()[0] for _ in range(6)][4:], axis=1)
    assert (path[0] * path[1]).mean() == pytest.approx(wanted[0, 1], abs=0.03)
    assert wanted[0, 1] < 0.9


def test_offsets_give_the_popularity_where_classes_see_different_states() -> None:
    classes = np.repeat([0, 1], 12)
    mix = Mix(classes, np.array([[1.0, 0.5], [0.5, 1.0]]))
    wanted = np.where(classes == 0, 0.3, 0.1)[None] * 4 / 4.8
    direction = directions((1, 24), 6, seed=1)[0]

    rng = np.random.default_rng(9)
    common, *own = rng.standard_normal((3, 20_000, 6), dtype=np.float32)
    seen = [np.sqrt(0.5) * (common + part) for part in own]
    scores = np.where(classes == 0, seen[0] @ direction, seen[1] @ direction)

    def error(offsets: np.ndarray) -> float:
        ids = choose(np.asarray(scores + offsets[0], dtype=np.float32), 4)
        found = np.bincount(ids.ravel(), minlength=24) / len(scores)
        return float(np.abs(found - wanted[0])[classes == 1].mean())

    assert error(solve_offsets(wanted, direction, 4, 2, mix)) < 0.01
    assert error(solve_offsets(wanted, direction, 4, 2)) > 0.01  # as if all saw the same


def test_a_fit_keeps_apart_how_popular_and_rare_experts_return() -> None:
    source = make_source(bursty())
    found = fit_layers(source, seed=0, rank=5)
    drawn = draw_like(found, source.sequences() * 2, seed=5)
    wanted, got = (
        class_overlap(trace, found.classes, _LAGS).rates for trace in (source.trace, drawn)
    )
    used = np.isfinite(wanted)
    np.testing.assert_allclose(got[used], wanted[used], rtol=0.2)
    for layer in range(2):
        rarest = found.classes[layer].max()
        assert found.correlations[layer, rarest, 8] > found.correlations[layer, 0, 8] + 0.2
