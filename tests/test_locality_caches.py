"""Hit rates by size: one pass must give what a replay at each size gives, however the trace is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.policies.classic import LRU
from sim.policies.oracle import Belady, NextUse
from tests.cache_replay import NUM_EXPERTS, contents, num_hits, run_of, skewed
from tests.public_data import routing_file
from tests.strategies import LAW, all_events
from traces.importers.experts_npz import read_experts_npz
from traces.locality_caches import BeladyCurve, belady_curve, lru_curve
from traces.locality_events import EventCutter
from traces.schema import DECODE, NO_EXPERT, PREFILL, Provenance, Trace, TraceError, TraceMeta

LAYERS, EXPERTS, TOP_K = 2, 7, 3
META = TraceMeta(
    model="random",
    num_layers=LAYERS,
    num_experts=EXPERTS,
    top_k=TOP_K,
    layer_indices=(0, 1),
    provenance=Provenance("synthetic", "test"),
)
Event = list[list[int]]
"""Distinct experts in order, by layer."""


@st.composite
def traces(draw: st.DrawFn, most_rows: int = 3) -> Trace:
    """Return up to 30 events of 1 to ``most_rows`` rows with up to ``TOP_K`` experts a layer."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = rng.integers(1, most_rows + 1, draw(st.integers(1, 30)))
    step = np.repeat(np.arange(len(rows)), rows).astype(np.int32)
    skew = rng.dirichlet(np.full(EXPERTS, 0.7)) + 0.01
    ids = np.full((len(step), LAYERS, TOP_K), NO_EXPERT, dtype=np.uint16)
    for row in range(len(step)):
        for layer in range(LAYERS):
            size = TOP_K if most_rows == 1 else rng.integers(1, TOP_K + 1)
            ids[row, layer, :size] = rng.choice(EXPERTS, size, replace=False, p=skew / skew.sum())
    phase = rng.integers(0, 2, len(rows))[step].astype(np.uint8)
    requests = np.zeros(len(step), dtype=np.int32)
    return Trace(META, requests, np.arange(len(step), dtype=np.int32), phase, step, ids)


def events_of(trace: Trace) -> list[Event]:
    """Return the events the plain way."""
    found = []
    for step in np.unique(trace.step):
        rows = trace.expert_ids[trace.step == step]
        found.append(
            [
                list(dict.fromkeys(int(e) for e in rows[:, layer].ravel() if e != NO_EXPERT))
                for layer in range(LAYERS)
            ]
        )
    return found


Evict = Callable[[list[int], int, int], int]
"""Resident experts that may go in order of last use, the time, the layer: which one goes."""


def replay(events: Sequence[Event], layer: int, size: int, evict: Evict) -> list[int]:
    """Return the hits of each event of a cache of ``size``, which holds any one event."""
    held: list[int] = []  # the most recent last
    hits = []
    for now, event in enumerate(events):
        own = event[layer]
        hits.append(sum(expert in held for expert in own))
        others = [expert for expert in held if expert not in own]
        while len(others) + len(own) > size:
            others.remove(evict(others, now, layer))
        held = others + own[::-1]
    return hits


def oldest(others: list[int], now: int, layer: int) -> int:
    return others[0]


def farthest_of(events: Sequence[Event]) -> Evict:
    def evict(others: list[int], now: int, layer: int) -> int:
        def next_use(expert: int) -> int:
            later = (t for t in range(now + 1, len(events)) if expert in events[t][layer])
            return next(later, len(events))

        return max(others, key=next_use)

    return evict


@LAW
@given(
    trace=traces(), cuts=st.lists(st.integers(0, 90), max_size=4), phase=st.sampled_from([None, 1])
)
def test_one_pass_gives_the_hits_of_a_replay_at_each_size(
    trace: Trace, cuts: list[int], phase: int | None
) -> None:
    edges = [0, *sorted(min(cut, len(trace)) for cut in cuts), len(trace)]
    chunks = [trace.take(slice(a, b)) for a, b in pairwise(edges)]
    events = events_of(trace)
    wanted = [phase is None or phase in trace.phase[trace.step == s] for s in np.unique(trace.step)]
    largest = max(len(own) for event in events for own in event)
    for curve, evict in (
        (lru_curve(chunks, META, phase), oldest),
        (belady_curve(chunks, META, phase), farthest_of(events)),
    ):
        for layer in range(LAYERS):
            uses = sum(len(e[layer]) for e, w in zip(events, wanted, strict=True) if w)
            assert curve.uses[layer] == uses
            for size in range(largest, EXPERTS + 1):
                hits = replay(events, layer, size, evict)
                assert curve.hits[layer, size - 1] == sum(np.array(hits)[wanted]), (evict, size)
            assert curve.first_uses[layer] == uses - curve.hits[layer, -1]


@LAW
@given(trace=traces(most_rows=1))
def test_optimal_is_never_below_lru_and_larger_never_below_smaller(trace: Trace) -> None:
    lru, best = lru_curve([trace], META), belady_curve([trace], META)
    assert lru.least_size == best.least_size == TOP_K
    assert (best.hits >= lru.hits).all()
    assert (np.diff(lru.hits) >= 0).all()
    assert (np.diff(best.hits) >= 0).all()
    assert (lru.hits[:, -1] == best.hits[:, -1]).all()  # only first uses miss
    # At a size of one event nothing else is ever kept: both keep what two events have in common.
    assert (lru.hits[:, TOP_K - 1] == best.hits[:, TOP_K - 1]).all()


def long_trace(num_tokens: int) -> Trace:
    rng = np.random.default_rng(5)
    ids = np.argsort(rng.gumbel(size=(num_tokens, LAYERS, EXPERTS)), axis=2)[:, :, :TOP_K]
    at = np.arange(num_tokens, dtype=np.int32)
    decode = np.full(num_tokens, DECODE, dtype=np.uint8)
    return Trace(META, np.zeros_like(at), at, decode, at, ids.astype(np.uint16))


def test_a_short_look_ahead_costs_little_and_is_exact_where_it_reaches_the_end() -> None:
    trace = long_trace(600)
    chunks = [trace.take(slice(at, at + 50)) for at in range(0, 600, 50)]
    exact = belady_curve([trace], META)
    found = []
    for uses in (1, 300, 3000):  # the next chunk; 50 events, 20 reuse distances; 500 events
        curve = BeladyCurve(META, lookahead_uses=uses)
        for chunk in chunks:
            curve.add(chunk)
        found.append(curve.result())
    next_chunk, near, far = found
    assert next_chunk.hits.sum() > 0.98 * exact.hits.sum()
    assert (far.hits == exact.hits).all()
    assert (near.hits <= exact.hits).all()
    assert near.hits.sum() > 0.999 * exact.hits.sum()
    assert (near.uses == exact.uses).all()


def test_an_event_is_a_run_of_rows_of_one_step_or_each_row() -> None:
    trace = long_trace(6)
    trace.step = np.array([0, 0, 1, 2, 2, 2], dtype=np.int32)
    trace.phase = np.array([PREFILL, PREFILL, DECODE, PREFILL, DECODE, DECODE], dtype=np.uint8)
    cutter = EventCutter(META, DECODE)
    blocks = [*cutter.cut(trace.take(slice(0, 4))), *cutter.cut(trace.take(slice(4, 6)))]
    blocks += cutter.rest()
    assert [len(block) for block in blocks] == [1, 1, 1]
    assert [bool(block.counted[0]) for block in blocks] == [False, True, True]
    first = set(trace.expert_ids[:2, 1].ravel().tolist())
    assert set(blocks[0].ids[0, 1].tolist()) - {NO_EXPERT} == first
    by_token = EventCutter(META, DECODE, "token")
    assert [len(block) for block in by_token.cut(trace)] == [6]
    with pytest.raises(TraceError, match=r"events is 'row': must be one of step, token"):
        EventCutter(META, events="row")


@pytest.mark.parametrize(("top_k", "slots"), [(1, 3), (3, 3), (3, 5), (3, 8)])
def test_the_simulators_policies_hit_as_often(top_k: int, slots: int) -> None:
    ids = skewed(top_k, 150, 2, NUM_EXPERTS, top_k)
    workload = run_of(ids, NUM_EXPERTS)
    trace = workload.trace
    best = belady_curve([trace], trace.meta).hits[:, slots - 1].sum()
    future = NextUse(all_events(workload))
    assert best == num_hits(workload, contents(workload, lambda: Belady(future), slots))
    if top_k == 1:  # else the order within an event decides
        lru = lru_curve([trace], trace.meta).hits[:, slots - 1].sum()
        assert lru == num_hits(workload, contents(workload, LRU, slots))


@pytest.mark.parametrize(
    ("text", "lru"),
    [("code", (0.476, 0.648, 0.824, 0.955)), ("math", (0.386, 0.546, 0.749, 0.924))],
)
def test_lru_on_public_routing_is_what_was_published(text: str, lru: tuple[float, ...]) -> None:
    """First 2000 tokens, every fourth layer; the order within an event was not published."""
    trace = read_experts_npz(routing_file(f"qwen3-30b-a3b_{text}.npz")).take(slice(0, 2000))
    curve = lru_curve([trace], trace.meta)
    assert curve.rates[::4, [7, 15, 31, 63]].mean(axis=0) == pytest.approx(lru, abs=0.005)
