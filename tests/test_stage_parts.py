"""The parts of the test of stages: cuts, pairs at equal distance, windows on two sides, kinds, sets."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.policies.detectors import FixedStageDetector
from sim.stage_capture import capture
from sim.stage_cuts import (
    StagedText,
    found_texts,
    shifted_cuts,
    shuffled_cuts,
    window_cuts,
    window_texts,
)
from sim.stage_draws import draw_cuts, mean_length
from sim.stage_kinds import Stages, contrast_kinds, stages_of, unrelated_overlap
from sim.stage_pair_test import PairTest
from sim.stage_pairs import Prefixes, count_within, overlaps
from sim.stage_replay import replay_stages
from sim.stage_splits import split_cosines, split_means, split_sums
from sim.workload import Workload
from tests.staged import planted, texts_of, trace_of, uses_of

# -- cuts --------------------------------------------------------------------------------------------


def test_texts_are_cut_where_the_label_changes_and_unknown_ones_change_nothing() -> None:
    trace = trace_of(np.zeros((12, 1, 1)), [-1, 2, -1, 2, 3, 3, 1, 1, 1, -1, 2, 2], 6)
    one, other = texts_of(trace)
    assert (one.cut.tolist(), one.kinds.tolist()) == ([0, 4, 6], [2, 3])
    assert (other.cut.tolist(), other.kinds.tolist()) == ([0, 4, 6], [1, 2])
    assert mean_length([one, other]) == 3
    halves = window_texts([one], 4)[0]
    assert (halves.cut.tolist(), halves.kinds.tolist()) == ([0, 4, 6], [0, 1])


def test_a_detector_cuts_every_request_that_decodes_at_its_boundaries() -> None:
    work = Workload(trace_of(np.zeros((12, 1, 1)), None, 6), batch_size=2)
    texts = found_texts(work, replay_stages(FixedStageDetector(2), [work]))
    assert [text.cut.tolist() for text in texts] == [[0, 1, 3, 5, 6]] * 2
    assert [text.rows.tolist() for text in texts] == [[*range(6)], [*range(6, 12)]]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 12), st.integers(0, 99))
def test_random_cuts_keep_the_lengths_or_the_window(
    lengths: list[int], window: int, seed: int
) -> None:
    rng, tokens = np.random.default_rng(seed), sum(lengths)
    cut = np.concatenate([[0], np.cumsum(lengths)])
    text = StagedText(np.arange(tokens), cut, np.zeros(len(lengths), np.int64))
    for row in shuffled_cuts(text, 5, rng):
        assert sorted(np.diff(row).tolist()) == sorted(lengths)
    for row in shifted_cuts(text, 5, rng):
        sizes, wrapped = np.diff(row), lengths * 2
        assert sizes.sum() == tokens
        turns = [wrapped[first + 1 : first + len(lengths)] for first in range(len(lengths))]
        assert sizes[1:-1].tolist() in turns, (
            "in their order; the one that is left lies on both ends"
        )
    for row in window_cuts(text, window, 5, rng):
        assert (row[0], row[-1]) == (0, tokens)
        sizes = np.diff(row)
        inner = sizes[1:][row[2:] < tokens]
        assert 1 <= sizes[0] <= window
        assert (inner == window).all()
        assert ((sizes >= 0) & (sizes <= window)).all()


# -- pairs at equal distance ---------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 2), min_size=2, max_size=24), st.data())
def test_sums_within_stages_are_those_of_all_their_pairs(ids: list[int], data: Any) -> None:
    tokens = len(ids)
    inner = data.draw(st.lists(st.integers(0, tokens), max_size=5).map(sorted))
    cut = np.array([0, *inner, tokens])
    edges = np.array([0, 1, 3, 7])
    found = Prefixes(overlaps(uses_of(ids), 7)).within(cut[None], edges)[0]
    counts = count_within(cut[None], 7)[0]
    stage = np.searchsorted(cut[1:], np.arange(tokens), side="right")
    pairs = [(a, b) for a, b in combinations(range(tokens), 2) if stage[a] == stage[b]]
    for band, (low, high) in enumerate([(1, 1), (2, 3), (4, 7)]):
        inside = [(a, b) for a, b in pairs if low <= b - a <= high]
        assert found[band] == sum(ids[a] == ids[b] for a, b in inside)
        assert counts[low - 1 : high].sum() == len(inside)


def test_overlaps_of_a_long_text_do_not_depend_on_its_blocks() -> None:
    rng = np.random.default_rng(0)
    rows = rng.random((600, 5), np.float32)
    found = overlaps(rows, 9)
    for apart in (1, 4, 9):
        plain = (rows[:-apart] * rows[apart:]).sum(axis=1)
        assert found[:-apart, apart - 1] == pytest.approx(plain, rel=1e-5)
        assert not found[-apart:, apart - 1].any()


def test_the_statistic_is_the_weighted_mean_of_the_differences_at_each_distance() -> None:
    trace = planted(1, requests=3, tokens=40)
    texts = texts_of(trace)
    test = PairTest(texts, draw_cuts(texts, 9, 0), (0, 4, 16), 0)
    test.add([uses_of(trace.expert_ids[text.rows, 0, 0]) for text in texts], 1)
    found = test.tell()
    value = weight = 0.0
    for apart in range(1, 17):
        sides: dict[bool, list[float]] = {True: [], False: []}
        for text in texts:
            stage = np.searchsorted(text.cut[1:], np.arange(40), side="right")
            ids = trace.expert_ids[text.rows, 0, 0]
            for a in range(40 - apart):
                sides[bool(stage[a] == stage[a + apart])].append(float(ids[a] == ids[a + apart]))
        inside, outside = len(sides[True]), len(sides[False])
        assert (found.num_within[apart - 1], found.num_across[apart - 1]) == (inside, outside)
        own = inside * outside / (inside + outside)
        value += own * (np.mean(sides[True]) - np.mean(sides[False]))
        weight += own
    assert found.overall.value == pytest.approx(value / weight)
    within, across = found.sides()
    assert within - across == pytest.approx(found.overall.value)


# -- windows on two sides ------------------------------------------------------------------------------


def test_cosines_at_boundaries_and_in_the_middle_of_stages() -> None:
    uses = uses_of([0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 4, 4])
    cosines = split_cosines(uses, 2)
    assert np.isnan(cosines[[0, 1, 11, 12]]).all()
    assert cosines[[2, 4, 5]] == pytest.approx([1.0, 0.0, 0.5])
    sums = split_sums(cosines, np.array([[0, 4, 10, 12], [0, 11, 12, 12]]), 2)
    # middles at 2 and 7 (the last stage is too short); boundaries at 4 and 10
    assert sums[0] == pytest.approx([2.0, 2, 0.0, 2])
    assert split_means(sums)[0] == pytest.approx([1.0, 0.0, 1.0])
    assert sums[1, [1, 3]].tolist() == [1, 0], "no boundary of two stages that are long enough"
    assert np.isnan(split_means(sums)[1, 2])
    assert np.isnan(split_cosines(uses, 7)).all()


# -- kinds of stages -------------------------------------------------------------------------------------


def some_stages(seed: int = 0) -> Stages:
    trace = planted(seed, requests=5, tokens=40)
    return stages_of(trace, texts_of(trace))


def test_kinds_are_compared_over_all_pairs_of_different_requests() -> None:
    stages = some_stages()
    shares = stages.uses[:, 0] / stages.tokens[:, None]
    sides: dict[bool, list[float]] = {True: [], False: []}
    unrelated = []
    for a, b in combinations(range(len(stages.kind)), 2):
        if stages.text[a] != stages.text[b]:
            value = float(shares[a] @ shares[b])
            sides[bool(stages.kind[a] == stages.kind[b])].append(value)
            unrelated += [value] * int(stages.tokens[a] * stages.tokens[b])
    found = contrast_kinds(stages, 1, 19, np.random.default_rng(0))
    assert found.same == pytest.approx(np.mean(sides[True]))
    assert found.different == pytest.approx(np.mean(sides[False]))
    assert found.overall.value == pytest.approx(found.same - found.different)
    assert found.overall.low < found.overall.value < found.overall.high
    assert unrelated_overlap(stages, 1) == pytest.approx(np.mean(unrelated))


def test_no_rule_holds_more_than_the_stage_itself_and_kinds_help_where_there_are_some() -> None:
    for slots in (1, 2, 4):
        found = capture(some_stages(), slots, np.random.default_rng(0))
        assert max(found.held, key=lambda rule: found.held[rule]) == "itself"
        assert found.held["kind"] > found.held["all"] > found.held["other"]
        assert found.gain["kind"][0] == pytest.approx(found.held["kind"] - found.held["all"])


def test_what_each_rule_holds_of_a_toy() -> None:
    """Request 0: kinds 0 and 1; request 1: kind 0 only. Experts 0, 1, 2, one a token."""
    uses = np.array([[5, 1, 0], [0, 0, 6], [4, 0, 2]], np.float64)[:, None]
    stages = Stages(uses, np.array([6, 6, 6]), kind=np.array([0, 1, 0]), text=np.array([0, 0, 1]))
    held = capture(stages, 1, np.random.default_rng(0)).held
    # all: expert 0, 0 (from request 1) and 2 (6 against 5): 5 + 0 + 2
    assert held["all"] == pytest.approx(7 / 18)
    # kind: 0, 0 (no other request has kind 1, so all) and 0: 5 + 0 + 4
    assert held["kind"] == pytest.approx(9 / 18)
    # before: 0 (all), 0, and 2 (all): 5 + 0 + 2
    assert held["before"] == pytest.approx(7 / 18)
    assert held["itself"] == pytest.approx(15 / 18)
