"""Reuse, popularity and the likeness of windows: against plain counts, however the trace is cut."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.public_data import routing_file
from tests.strategies import LAW, local_ids, trace_of_ids
from traces.importers.by_name import read_any
from traces.importers.experts_npz import read_experts_npz
from traces.locality_reuse import overlap_by_lag, popularity
from traces.locality_sets import bit_sets, sizes
from traces.locality_windows import window_coherence
from traces.locality_working_set import WorkingSet
from traces.schema import DECODE, NO_EXPERT, Trace, TraceError

EXPERTS, LAYERS, TOP_K = 21, 2, 3


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Return interleaved requests, some slots empty."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lengths = draw(
        st.lists(st.tuples(st.integers(1, 8), st.integers(0, 12)), min_size=1, max_size=4)
    )
    ids = local_ids(rng, sum(map(sum, lengths)), LAYERS, EXPERTS, TOP_K, 0.6)
    ids[rng.random(ids.shape) < 0.1] = NO_EXPERT
    trace = trace_of_ids(ids, lengths, EXPERTS)
    return trace.take(np.argsort(trace.step, kind="stable")) if draw(st.booleans()) else trace


def cut(trace: Trace, at: list[int]) -> list[Trace]:
    edges = [0, *sorted(min(place, len(trace)) for place in at), len(trace)]
    return [trace.take(slice(a, b)) for a, b in pairwise(edges)]


def sets_of(trace: Trace, phase: int | None) -> dict[int, dict[int, list[set[int]]]]:
    """Return by request and position the experts of each layer."""
    found: dict[int, dict[int, list[set[int]]]] = {}
    for row in range(len(trace)):
        if phase is None or trace.phase[row] == phase:
            experts = [{int(e) for e in own if e != NO_EXPERT} for own in trace.expert_ids[row]]
            found.setdefault(int(trace.request_id[row]), {})[int(trace.position[row])] = experts
    return found


@LAW
@given(
    trace=traces(),
    at=st.lists(st.integers(0, 60), max_size=4),
    phase=st.sampled_from([None, DECODE]),
)
def test_overlap_by_lag_is_a_plain_count(trace: Trace, at: list[int], phase: int | None) -> None:
    found = overlap_by_lag(cut(trace, at), trace.meta, (1, 2, 5), phase)
    sets = sets_of(trace, phase)
    for column, lag in enumerate((1, 2, 5)):
        pairs = [(o[p], o[p - lag]) for o in sets.values() for p in o if p - lag in o]
        assert found.pairs[column] == len(pairs)
        for layer in range(LAYERS):
            common = sum(len(now[layer] & then[layer]) for now, then in pairs)
            assert found.common[layer, column] == common
            assert found.uses[layer, column] == sum(len(now[layer]) for now, _ in pairs)
    assert np.nan_to_num(found.rates).max() <= 1


def test_no_pairs_give_no_rate_and_lags_must_be_positive() -> None:
    trace = trace_of_ids(np.zeros((2, 1, 1), dtype=np.uint16), [(1, 1)], 4)
    found = overlap_by_lag([trace], trace.meta, (1, 2))
    assert found.pooled[0] == 1
    assert np.isnan(found.pooled[1])
    with pytest.raises(TraceError, match=r"lags is \(0,\)"):
        overlap_by_lag([trace], trace.meta, (0,))


def test_a_missing_position_makes_no_pair() -> None:
    trace = trace_of_ids(np.zeros((3, 1, 1), dtype=np.uint16), [(1, 2)], 4)
    trace.position = np.array([0, 2, 3], dtype=np.int32)
    assert overlap_by_lag([trace], trace.meta, (1, 2)).pairs.tolist() == [1, 1]


@LAW
@given(trace=traces(), at=st.lists(st.integers(0, 60), max_size=4))
def test_popularity_is_a_plain_count(trace: Trace, at: list[int]) -> None:
    found = popularity(cut(trace, at), trace.meta)
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            assert found.counts[layer, expert] == (trace.expert_ids[:, layer] == expert).sum()
    assert found.best_set[:, -1] == pytest.approx(1)


def test_skew_of_even_and_of_one_sided_use() -> None:
    even = np.arange(8, dtype=np.uint16).reshape(8, 1, 1)
    found = popularity([trace_of_ids(even, [(8, 0)], 8)], trace_of_ids(even, [(8, 0)], 8).meta)
    assert found.gini[0] == pytest.approx(0)
    assert found.effective_experts[0] == pytest.approx(8)
    assert found.best_set[0] == pytest.approx(np.arange(1, 9) / 8)
    one = trace_of_ids(np.full((5, 1, 1), 3, dtype=np.uint16), [(5, 0)], 8)
    found = popularity([one], one.meta)
    assert found.gini[0] == pytest.approx(7 / 8)  # the most it can be
    assert found.effective_experts[0] == pytest.approx(1)
    assert found.best_set[0, 0] == 1


@LAW
@given(
    trace=traces(),
    at=st.lists(st.integers(0, 60), max_size=4),
    length=st.integers(1, 6),
    phase=st.sampled_from([None, DECODE]),
)
def test_likeness_of_windows_is_a_plain_mean(
    trace: Trace, at: list[int], length: int, phase: int | None
) -> None:
    found = window_coherence(cut(trace, at), trace.meta, length, top=2, phase=phase)
    cosines: list[list[float]] = []
    overlaps: list[list[float]] = []
    for request in np.unique(trace.request_id):
        own = trace.expert_ids[
            (trace.request_id == request) & ((phase is None) | (trace.phase == phase))
        ]
        windows = [own[i : i + length] for i in range(0, len(own) - length + 1, length)]
        counts = [
            [np.bincount(w[:, layer][w[:, layer] < EXPERTS], minlength=EXPERTS) for layer in (0, 1)]
            for w in windows
        ]
        for one, other in pairwise(counts):
            cosines.append([_cosine(a, b) for a, b in zip(one, other, strict=True)])
            overlaps.append([_common(a, b) for a, b in zip(one, other, strict=True)])
    assert found.num_pairs == len(cosines)
    if cosines:
        assert found.cosine == pytest.approx(np.mean(cosines, axis=0))
        assert found.overlap == pytest.approx(np.mean(overlaps, axis=0))
    else:
        assert np.isnan(found.cosine).all()


def _cosine(one: np.ndarray, other: np.ndarray) -> float:
    norm = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / norm if norm else 0.0


def _common(one: np.ndarray, other: np.ndarray) -> float:
    best = [
        {int(e) for e in sorted(range(EXPERTS), key=lambda e: (-c[e], e))[:2]} for c in (one, other)
    ]
    return len(best[0] & best[1]) / 2


@LAW
@given(seed=st.integers(0, 2**32 - 1), experts=st.sampled_from([1, 15, 16, 17, 384]))
def test_sets_as_bits_have_their_sizes_and_intersections(seed: int, experts: int) -> None:
    rng = np.random.default_rng(seed)
    top_k = min(5, experts)
    ids = np.stack([[rng.permutation(experts)[:top_k]] for _ in range(6)]).astype(np.uint16)
    ids[rng.random(ids.shape) < 0.2] = NO_EXPERT
    bits = bit_sets(ids, experts)
    plain = [set(row.ravel().tolist()) - {NO_EXPERT} for row in ids]
    assert sizes(bits)[:, 0].tolist() == [len(own) for own in plain]
    common = sizes(bits[1:] & bits[:-1])[:, 0].tolist()
    assert common == [len(a & b) for a, b in pairwise(plain)]


@pytest.mark.parametrize(("text", "near", "far"), [("code", 0.474, 0.33), ("math", 0.396, 0.24)])
def test_reuse_on_public_routing_is_what_was_published(text: str, near: float, far: float) -> None:
    trace = read_experts_npz(routing_file(f"qwen3-30b-a3b_{text}.npz"))
    found = overlap_by_lag([trace], trace.meta, (1, 32))
    assert found.pooled[0] == pytest.approx(near, abs=0.001)
    assert found.pooled[1] == pytest.approx(far, abs=0.005)


def test_a_recorded_phone_run_has_the_reuse_its_makers_published() -> None:
    """BigMoeOnEdge, Qwen3-30B at k = 6: carry-over, its lag 8, the hottest six, and two layers' breadth."""
    trace = read_any(routing_file("qwen3-30b-a3b_q4km_k6.route.csv"))
    reuse = overlap_by_lag([trace], trace.meta, (1, 8), DECODE)
    assert reuse.pooled == pytest.approx([0.380, 0.267], abs=0.0006)
    popular = popularity([trace], trace.meta, DECODE).best_set
    assert popular[:, 5].mean() == pytest.approx(0.376, abs=0.001)
    assert popular[[0, 5], 7] == pytest.approx([0.215, 0.432], abs=0.0006)
    runs = WorkingSet(trace.meta, DECODE)
    runs.add(trace)
    assert runs.result().experts[0, -1] == 107  # of 128 in 128 tokens
