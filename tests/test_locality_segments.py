"""SRP and SCH, the working set, batches, stages and foresight: against plain counts and made-up texts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.public_data import routing_file
from tests.strategies import LAW, local_ids, trace_of_ids
from traces.importers.experts_npz import read_experts_npz
from traces.locality_ahead import NextLayer
from traces.locality_batches import RecordedBatches, RequestBatches
from traces.locality_caches import belady_curve
from traces.locality_lookahead import LookaheadCurve
from traces.locality_segments import Segments
from traces.locality_stages import StageWindows, stage_edges
from traces.locality_working_set import WorkingSet
from traces.schema import DECODE, NO_EXPERT, Trace, TraceError

EXPERTS, LAYERS, TOP_K = 9, 2, 3


@st.composite
def traces(draw: st.DrawFn, shortest: int = 1) -> Trace:
    """Return up to 3 requests, one after another or interleaved."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = st.tuples(st.integers(1, 6), st.integers(shortest, 24))
    lengths = draw(st.lists(sizes, min_size=1, max_size=3))
    ids = local_ids(rng, sum(map(sum, lengths)), LAYERS, EXPERTS, TOP_K, 0.6)
    trace = trace_of_ids(ids, lengths, EXPERTS)
    return trace.take(np.argsort(trace.step, kind="stable")) if draw(st.booleans()) else trace


def chunks_of(trace: Trace, rows: int) -> list[Trace]:
    return [trace.take(slice(at, at + rows)) for at in range(0, len(trace), rows)]


def requests_of(trace: Trace) -> list[np.ndarray]:
    """Return the ids of each request, in the order of first rows."""
    numbers = dict.fromkeys(trace.request_id.tolist())
    return [trace.expert_ids[trace.request_id == number] for number in numbers]


def windows_of(ids: np.ndarray, length: int, stride: int) -> list[np.ndarray]:
    return [ids[at : at + length] for at in range(0, len(ids) - length + 1, stride)]


def counts_of(window: np.ndarray, layer: int) -> np.ndarray:
    return np.bincount(window[:, layer].ravel(), minlength=EXPERTS)


@LAW
@given(
    trace=traces(shortest=8),
    rows=st.integers(1, 40),
    shape=st.sampled_from([(4, 1), (4, 2), (6, 3), (1, 1)]),
)
def test_srp_and_sch_are_those_of_every_threshold_and_size(
    trace: Trace, rows: int, shape: tuple[int, int]
) -> None:
    length, stride = shape
    counter = Segments(trace.meta, length, stride=stride)
    for chunk in chunks_of(trace, rows):
        counter.add(chunk)
    found = counter.result()
    segments = [w for ids in requests_of(trace) for w in windows_of(ids, length, stride)]
    assert found.num_segments == len(segments)
    for layer in range(LAYERS):
        counts = np.array([counts_of(segment, layer) for segment in segments])
        best = 0.0
        for least in range(length + 1):
            group = counts >= least
            right, named = counts[group].sum(), length * group.sum()
            best = max(best, 2 * right / (named + counts.sum()))
        assert found.srp[layer] == pytest.approx(best)
        for size in range(1, EXPERTS + 1):
            hits = np.sort(counts, axis=1)[:, ::-1][:, :size].sum()
            assert found.sch[layer, size - 1] == pytest.approx(hits / counts.sum())


def test_srp_is_one_where_a_segment_repeats_its_experts_and_small_where_it_never_does() -> None:
    same = np.tile(np.array([[[0, 1]], [[2, 3]]], dtype=np.uint16).repeat(8, axis=0), (2, 1, 1))
    trace = trace_of_ids(same, [(8, 24)], 8)
    counter = Segments(trace.meta, 8, stride=8)
    counter.add(trace)
    found = counter.result()
    assert found.srp[0] == 1
    assert found.group_ratio[0] == 1
    assert found.sch[0, 1] == 1
    never = np.arange(16, dtype=np.uint16).reshape(8, 1, 2)
    trace = trace_of_ids(never, [(8, 0)], 16)
    counter = Segments(trace.meta, 8)
    counter.add(trace)
    found = counter.result()
    # All 16 experts are named to 8 tokens, each used once: precision 1/8, recall 1.
    assert found.srp[0] == pytest.approx(2 / 9)
    assert found.group_ratio[0] == 8


def replay_lookahead(events: Sequence[set[int]], size: int, segment: int) -> int:
    held: set[int] = set()
    last: dict[int, int] = {}
    hits = 0
    for now, event in enumerate(events):
        hits += len(held & event)
        coming = events[now : now + segment]
        others = sorted(held - event, key=lambda e: (-sum(e in x for x in coming), -last[e], -e))
        held = event | set(others[: max(0, size - len(event))])
        last.update(dict.fromkeys(event, now))
    return hits


@LAW
@given(trace=traces(), rows=st.integers(1, 40), segment=st.integers(1, 6))
def test_a_cache_that_knows_its_segment_is_replayed_as_by_hand(
    trace: Trace, rows: int, segment: int
) -> None:
    curve = LookaheadCurve(trace.meta, (3, 5, 7), segment, events="token")
    for chunk in chunks_of(trace, rows):
        curve.add(chunk)
    found = curve.result()
    best = belady_curve([trace], trace.meta, events="token")
    for layer in range(LAYERS):
        events = [set(row[layer].tolist()) for row in trace.expert_ids]
        for column, size in enumerate((3, 5, 7)):
            # Ties of one event fall to the higher number, as by hand.
            assert found.hits[layer, column] == replay_lookahead(events, size, segment)
            assert found.hits[layer, column] <= best.hits[layer, size - 1]


@LAW
@given(trace=traces(), rows=st.integers(1, 40))
def test_the_working_set_is_that_of_runs_end_to_end(trace: Trace, rows: int) -> None:
    counter = WorkingSet(trace.meta, doublings=3)
    for chunk in chunks_of(trace, rows):
        counter.add(chunk)
    found = counter.result()
    for column, size in enumerate(found.tokens.tolist()):
        runs = [w for ids in requests_of(trace) for w in windows_of(ids, size, size)]
        assert found.groups[column] == len(runs)
        for layer in range(LAYERS):
            mean = np.mean([np.count_nonzero(counts_of(run, layer)) for run in runs])
            assert found.experts[layer, column] == pytest.approx(mean)


@LAW
@given(trace=traces(), rows=st.integers(1, 40))
def test_recorded_batches_are_the_decoded_tokens_of_a_step(trace: Trace, rows: int) -> None:
    counter = RecordedBatches(trace.meta, most=3)
    for chunk in chunks_of(trace, rows):
        counter.add(chunk)
    found = counter.result()
    decoded = trace.take(trace.phase == DECODE)
    by_size: dict[int, list[list[int]]] = {}
    for step in np.unique(decoded.step):
        batch = decoded.expert_ids[decoded.step == step]
        distinct = [np.count_nonzero(counts_of(batch, layer)) for layer in range(LAYERS)]
        by_size.setdefault(len(batch), []).append([int(count) for count in distinct])
    assert found.tokens.tolist() == sorted(by_size)
    for column, size in enumerate(found.tokens.tolist()):
        assert found.experts[:, column] == pytest.approx(np.mean(by_size[size], axis=0))


def test_tokens_of_different_requests_are_counted_by_how_many_there_are() -> None:
    """Each request uses two experts of its own throughout: a batch of B uses 2 B."""
    ids = np.arange(10, dtype=np.uint16).reshape(5, 1, 2).repeat(40, axis=0)
    trace = trace_of_ids(ids, [(1, 39)] * 5, 10)
    counter = RequestBatches(trace.meta, DECODE)
    for chunk in chunks_of(trace, 7):
        counter.add(chunk)
    found = counter.result()
    assert found.tokens.tolist() == [1, 2, 4]
    assert found.experts[0].tolist() == [2, 4, 8]


def test_a_batch_takes_its_tokens_from_different_places() -> None:
    """All requests move through the same experts: tokens of one place would share theirs."""
    ids = np.arange(64, dtype=np.uint16).reshape(64, 1, 1)
    trace = trace_of_ids(np.tile(ids, (2, 1, 1)), [(0, 64)] * 2, 64)
    counter = RequestBatches(trace.meta)
    counter.add(trace)
    assert counter.result().experts[0].tolist() == [1, 2]


def staged_trace(noise: float, seed: int = 3) -> Trace:
    """Return 4 requests of 8 stages of 32 tokens; a stage has 4 experts of its own, else any of 32."""
    rng = np.random.default_rng(seed)
    kinds = np.stack([rng.permutation(8) for _ in range(4)]).ravel().repeat(32)
    own = kinds[:, None] * 4 + np.argsort(rng.random((len(kinds), 4)), axis=1)[:, :2]
    other = np.argsort(rng.random((len(kinds), 32)), axis=1)[:, :2]
    ids = np.where(rng.random((len(kinds), 1)) < noise, other, own).astype(np.uint16)[:, None]
    trace = trace_of_ids(ids, [(0, 256)] * 4, 32)
    trace.stage = kinds.astype(np.int16)
    return trace


def test_windows_within_a_stage_are_alike_and_across_a_boundary_not() -> None:
    trace = staged_trace(0.2)
    counter = StageWindows(trace.meta, 16, phase=DECODE)
    for chunk in chunks_of(trace, 50):
        counter.add(chunk)
    found = counter.result()
    assert found.within is not None
    assert found.across is not None
    assert found.within.num_pairs == 4 * 8
    assert found.across.num_pairs == 4 * 7
    assert found.adjacent.num_pairs == 4 * 15
    assert found.apart.num_pairs == 4 * 8
    within, across = found.within.cosine[0], found.across.cosine[0]
    assert within > 0.8
    assert across < 0.4
    assert across < found.adjacent.cosine[0] < within
    assert across - 0.1 < found.apart.cosine[0] < within - 0.3  # mostly of two stages
    # What is the same wherever it is cut: half a request of noise has no stages in it.
    whole = StageWindows(trace.meta, 16, phase=DECODE)
    whole.add(trace)
    again = whole.result()
    assert again.shuffled.cosine[0] == found.shuffled.cosine[0]


def test_without_structure_all_windows_are_equally_alike() -> None:
    trace = staged_trace(1.0)
    counter = StageWindows(trace.meta, 16)
    counter.add(trace)
    found = counter.result()
    assert found.within is not None
    assert found.across is not None
    cosines = [p.cosine[0] for p in (found.within, found.across, found.shuffled, found.apart)]
    assert max(cosines) - min(cosines) < 0.06


def test_stages_begin_where_the_label_changes() -> None:
    labels = np.array([-1, 0, 0, -1, 0, 1, 1, 0], dtype=np.int16)
    assert stage_edges(labels).tolist() == [[1, 5], [5, 7], [7, 8]]
    assert stage_edges(np.full(3, -1, dtype=np.int16)).tolist() == []
    with pytest.raises(TraceError, match=r"window length is 0"):
        StageWindows(staged_trace(0).meta, 0)


def chained_trace(num_tokens: int, sureness: float) -> Trace:
    """Return a trace in which layer 1 uses the expert after layer 0's, or any other one."""
    rng = np.random.default_rng(8)
    first = rng.integers(0, 16, num_tokens)
    sure = rng.random(num_tokens) < sureness
    second = np.where(sure, (first + 1) % 16, rng.integers(0, 16, num_tokens))
    ids = np.stack([first, second], axis=1).astype(np.uint16)[:, :, None]
    trace = trace_of_ids(ids, [(0, num_tokens)], 16)
    early = ids.copy()
    early[:, 0], early[:, 1] = ids[:, 1], NO_EXPERT
    trace.next_gate_ids = early
    return trace


def test_pairs_name_what_always_follows_and_popularity_does_not() -> None:
    trace = chained_trace(2000, 1.0)
    counter = NextLayer(trace.meta, 1000)
    for chunk in chunks_of(trace, 300):
        counter.add(chunk)
    found = counter.result()
    assert found.learn_tokens == 1000
    assert found.test_tokens == 1000
    assert np.isnan(found.pairs[0])
    assert found.pairs[1] == 1
    assert found.pairs_new[1] == 1
    assert found.popularity[1] < 0.15
    assert found.gates[0, 1] == 1
    assert np.isnan(found.gates[1]).all()


def test_what_is_named_is_as_sure_as_the_chain() -> None:
    trace = chained_trace(8000, 0.5)
    counter = NextLayer(trace.meta, 4000)
    counter.add(trace)
    found = counter.result()
    assert found.pairs[1] == pytest.approx(0.5 + 0.5 / 16, abs=0.03)
    few = NextLayer(trace.meta, 4000, most_tokens=500)
    few.add(trace)
    assert (few.result().learn_tokens, few.result().test_tokens) == (500, 500)


def test_batches_of_public_routing_are_about_what_was_published() -> None:
    """Published on math: segments of one text; here as many requests of 512 tokens as there are."""
    trace = read_experts_npz(routing_file("qwen3-30b-a3b_math.npz"))
    counter = RequestBatches(trace.meta, DECODE)
    counter.add(trace)
    means = counter.result().experts.mean(axis=0)
    assert means == pytest.approx([8.0, 14.3, 24.4, 38.7, 56.0], rel=0.035)
