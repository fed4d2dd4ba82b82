"""Dropped, substituted and low-precision experts: rewrites of one token, computed by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sim.policies.base import RoutingPolicy
from sim.policies.buddy import BuddyMoE, BuddyTable, entropy
from sim.policies.drop import MIXTRAL_HESSIAN, ColdDrop, SensitivityDrop, SkipUnimportant
from sim.policies.precision import HobbitPrecision
from sim.policies.substitute import CachedBuddies, SMoE
from tests.tokens import NO, Past, rewritten, routing_of, view_of

WEIGHTS = [0.5, 0.3, 0.15, 0.05]


class TestColdDrop:
    @pytest.mark.parametrize(
        ("fraction", "resident", "slots"),
        [
            (1.0, [], [0, 1, NO, NO]),  # a uniform share is .25
            (0.5, [], [0, 1, 2, NO]),  # half of it .125
            (1.0, [2], [0, 1, 2, NO]),
            (1.0, [2, 3], [0, 1, 2, 3]),
        ],
    )
    def test_light_absent_picks_go(
        self, fraction: float, resident: list[int], slots: list[int]
    ) -> None:
        routing = routing_of([[0, 1, 2, 3]], [WEIGHTS])
        assert rewritten(ColdDrop(fraction), routing, view_of(8, resident))[0] == [slots]

    def test_the_others_take_up_the_weight_unless_told_not_to(self) -> None:
        routing, view = routing_of([[0, 1, 2, 3]], [WEIGHTS]), view_of(8)
        assert rewritten(ColdDrop(1.0), routing, view)[1] == [
            pytest.approx([0.625, 0.375, 0.0, 0.0])
        ]
        assert rewritten(ColdDrop(1.0, renormalise=False), routing, view)[1] == [
            pytest.approx([0.5, 0.3, 0.0, 0.0])
        ]

    def test_what_is_on_its_way_is_not_cold(self) -> None:
        routing = routing_of([[0, 1, 2, 3]], [WEIGHTS])
        ids, _ = rewritten(ColdDrop(1.0), routing, view_of(8, loading=[3]))
        assert ids == [[0, 1, NO, 3]]

    def test_equal_picks_are_none_of_them_light(self) -> None:
        routing = routing_of([[0, 1]], [[0.5, 0.5]])
        assert rewritten(ColdDrop(1.0), routing, view_of(8))[0] == [[0, 1]]

    def test_a_trace_without_weights_is_refused(self) -> None:
        with pytest.raises(ValueError, match="expert_weights"):
            ColdDrop().rewrite(routing_of([[0, 1]]), view_of(8))


class TestSensitivityDrop:
    @pytest.mark.parametrize(("hessian", "slots"), [(0.02, [0, NO]), (0.05, [0, 1])])
    def test_the_second_pick_goes_where_the_layer_bears_it(
        self, hessian: float, slots: list[int]
    ) -> None:
        # sqrt(.005 / .02) = .5 > .4 and sqrt(.005 / .05) = .316 < .4; residency has no say.
        routing = routing_of([[0, 1]], [[0.6, 0.4]])
        ids, weights = rewritten(SensitivityDrop(1, hessian=[hessian]), routing, view_of(8, [0, 1]))
        assert ids == [slots]
        assert weights == [pytest.approx([1.0, 0.0] if NO in slots else [0.6, 0.4])]

    def test_of_more_than_two_as_many_of_the_lightest_go_as_there_is_room_for(self) -> None:
        routing = routing_of([[0, 1, 2, 3]], [[0.4, 0.3, 0.2, 0.1]])
        ids, _ = rewritten(SensitivityDrop(1, hessian=[0.02]), routing, view_of(8))
        assert ids == [[0, 1, NO, NO]], ".1 + .2 < .5, and .3 more is not"

    def test_mixtral_stretches_over_other_depths(self) -> None:
        def bounds(layers: int) -> list[float]:
            return SensitivityDrop(layers)._bounds

        assert bounds(32) == pytest.approx([(0.005 / h) ** 0.5 for h in MIXTRAL_HESSIAN])
        middle = (MIXTRAL_HESSIAN[0] + MIXTRAL_HESSIAN[1]) / 2
        assert bounds(63)[1] == pytest.approx((0.005 / middle) ** 0.5)
        assert bounds(1) == pytest.approx([(0.005 / 46.69) ** 0.5])


def test_hobbit_skips_what_comes_after_nine_tenths_of_the_weight() -> None:
    routing = routing_of([[0, 1, 2, 3]], [[0.5, 0.3, 0.15, 0.05]])  # before them: 0, .5, .8, .95
    assert rewritten(SkipUnimportant(0.9), routing, view_of(8))[0] == [[0, 1, 2, NO]]
    assert rewritten(SkipUnimportant(0.6), routing, view_of(8, [2]))[0] == [[0, 1, 2, NO]]
    _, weights = rewritten(SkipUnimportant(0.9), routing, view_of(8))
    assert weights == [pytest.approx([0.5, 0.3, 0.15, 0.0])]


class TestHobbitPrecision:
    IDS, WEIGHTS = ((3, 2, 1, 0),), ((0.55, 0.25, 0.15, 0.05),)  # before them: 0, .55, .8, .95

    @pytest.mark.parametrize(
        ("resident", "experts"),
        [
            ([], [3, 2, 8 + 1]),
            ([8 + 0], [3, 2, 8 + 1, 8 + 0]),  # a low copy that is there is not skipped
            ([0, 1], [3, 2, 1, 0]),
            ([8 + 2], [3, 2, 8 + 1]),  # .55 <= .6: high, though a low copy is there
            ([8 + 1, 1], [3, 2, 1]),
        ],
    )
    def test_weight_before_a_pick_decides(self, resident: list[int], experts: list[int]) -> None:
        routing, view = routing_of(self.IDS, self.WEIGHTS), view_of(8, resident, num_copies=2)
        assert HobbitPrecision().rewrite(routing, view).experts == experts

    def test_what_one_token_needs_high_is_high_for_all(self) -> None:
        ids = [[0, 1, 2], [2, 3, 1]]
        routing = routing_of(ids, [[0.7, 0.2, 0.1], [0.7, 0.2, 0.1]])  # before: 0, .7, .9
        made = HobbitPrecision().rewrite(routing, view_of(8, [], 2, (0, 1), num_copies=2))
        assert made.low_slots is not None
        assert made.low_slots.tolist() == [[False, True, False], [False, True, True]]
        assert sorted(made.experts) == [0, 2, 8 + 1, 8 + 3]

    def test_it_needs_copies(self) -> None:
        with pytest.raises(ValueError, match=r"policy\.low"):
            HobbitPrecision().rewrite(routing_of(self.IDS, self.WEIGHTS), view_of(8))


PAIRS = [[0, 1], [0, 1], [1, 0], [0, 2], [3, 2]]  # with 0: 1 three times, 2 once


class TestBuddies:
    @pytest.mark.parametrize(
        ("share", "most", "buddies"),
        [(0.75, 16, [(1, 0.75)]), (0.9, 16, [(1, 0.75), (2, 0.25)]), (0.9, 1, [(1, 0.75)])],
    )
    def test_a_list_is_the_shortest_prefix_with_the_share(
        self, share: float, most: int, buddies: list[tuple[int, float]]
    ) -> None:
        assert BuddyTable(Past(PAIRS, 4), share, most).of(0, 0) == buddies

    def test_empty_slots_are_nobodys_buddy(self) -> None:
        assert BuddyTable(Past([[0, NO], [0, 1]], 4), 0.9, 3).of(0, 0) == [(1, 1.0)]

    def test_entropy_is_a_share_of_the_greatest(self) -> None:
        assert entropy([1.0, 1.0, 1.0]) == pytest.approx(1.0)
        assert entropy([0.75, 0.25]) == pytest.approx(0.8112781)
        assert entropy([2.0, 0.0]) == 0.0

    def test_buddymoe_takes_the_likeliest_resident_buddy_and_keeps_the_weight(self) -> None:
        routing = routing_of([[0, 3]], [[0.6, 0.4]])
        ids, weights = rewritten(BuddyMoE(Past(PAIRS, 4)), routing, view_of(4, [3, 2]))
        assert ids == [[2, 3]]
        assert weights == [pytest.approx([0.6, 0.4])]
        ids, _ = rewritten(BuddyMoE(Past(PAIRS, 4)), routing, view_of(4, [3, 2, 1]))
        assert ids == [[1, 3]]
        ids, _ = rewritten(BuddyMoE(Past(PAIRS, 4), share=0.7), routing, view_of(4, [3, 2]))
        assert ids == [[0, 3]], "2 is not on the list"

    def test_buddymoe_leaves_tokens_with_too_many_absent_picks(self) -> None:
        routing = routing_of([[0, 3]], [[0.6, 0.4]])
        policy = BuddyMoE(Past(PAIRS, 4), cpu_share=0.5)
        assert rewritten(policy, routing, view_of(4, [3, 2]))[0] == [[0, 3]]

    @pytest.mark.parametrize(("weights", "slots"), [([0.6, 0.4], [2, 3]), ([0.9, 0.1], [0, 3])])
    def test_buddymoe_leaves_tokens_that_are_sure(
        self, weights: list[float], slots: list[int]
    ) -> None:
        # The calibration's entropies are all .811: of the run's tokens one is at .971, one at .469.
        policy = BuddyMoE(Past(PAIRS, 4, [[0.75, 0.25]] * 5))
        assert rewritten(policy, routing_of([[0, 3]], [weights]), view_of(4, [3, 2]))[0] == [slots]

    def test_buddymoe_replaces_the_lightest_first_and_not_too_many(self) -> None:
        past = Past([[0, 1, 2, 3], [0, 1, 4, 5], [6, 7, 0, 1]], 8)
        policy = BuddyMoE(past, share=1.0, cpu_share=1.0, replacements=1)
        routing = routing_of([[0, 1, 2, 3]], [[0.4, 0.3, 0.2, 0.1]])
        ids, _ = rewritten(policy, routing, view_of(8, [3, 4]))
        assert ids == [[0, 4, 2, 3]], "2 is lighter but never met 4"

    def test_scores_may_outweigh_counts(self) -> None:
        scores = [0.0, -3.0, 3.0, 0.0]  # z = -1.41 and 1.41
        routing = routing_of([[0, 3]], [[0.6, 0.4]], [scores])
        policy = BuddyMoE(Past(PAIRS, 4), eta=0.6)
        ids, _ = rewritten(policy, routing, view_of(4, [3, 2, 1]))
        assert ids == [[2, 3]], ".25 * 1.85 > .75 * .15"
        with pytest.raises(ValueError, match="router_logits"):
            policy.rewrite(routing_of([[0, 3]]), view_of(4))

    def test_tinyserve_has_no_gates(self) -> None:
        routing = routing_of([[0, 3]], [[0.9, 0.1]])
        assert rewritten(CachedBuddies(Past(PAIRS, 4)), routing, view_of(4, [2]))[0] == [[2, 3]]
        assert rewritten(CachedBuddies(Past(PAIRS, 4), 1), routing, view_of(4, [2]))[0] == [[0, 2]]


class TestSMoE:
    def test_light_absent_picks_are_replaced_by_the_resident_with_the_best_score(self) -> None:
        routing = routing_of([[0, 1]], [[0.7, 0.3]], [[3.0, 2.0, 0.5, 1.0]])
        past = Past([[1, 2]], 4)
        assert rewritten(SMoE(past), routing, view_of(4, [2, 3]))[0] == [[0, 3]]
        assert rewritten(SMoE(past), routing, view_of(4, [1, 2, 3]))[0] == [[0, 1]]
        assert rewritten(SMoE(past, 0.5), routing, view_of(4, [2, 3]))[0] == [[0, 1]]

    def test_without_scores_calibration_tells_who_is_alike(self) -> None:
        routing, past = routing_of([[0, 1]], [[0.7, 0.3]]), Past([[1, 2], [1, 2], [1, 3]], 4)
        assert rewritten(SMoE(past), routing, view_of(4, [2, 3]))[0] == [[0, 2]]


PAST = Past([[0, 1]], 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ColdDrop(1.5), r"fraction = 1.5: must be in \(0, 1\]"),
        (lambda: SensitivityDrop(2, hessian=[1.0]), "must be 2 numbers > 0"),
        (lambda: SensitivityDrop(2, threshold=0.0), "threshold = 0.0: must be > 0"),
        (lambda: SkipUnimportant(1.1), "skip_above = 1.1"),
        (lambda: HobbitPrecision(0.9, 0.6), "high_below = 0.9, low_below = 0.6"),
        (lambda: BuddyMoE(PAST, share=0.0), r"share = 0.0: must be in \(0, 1\]"),
        (lambda: BuddyMoE(PAST, replacements=0), "replacements = 0"),
        (lambda: BuddyMoE(PAST, quantile=2.0), "quantile = 2.0"),
        (lambda: CachedBuddies(PAST, 0), "most = 0"),
        (lambda: SMoE(PAST, 0.0), "fraction = 0.0"),
    ],
)
def test_parameters_are_checked(make: Callable[[], RoutingPolicy], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_batch_is_rewritten_row_by_row() -> None:
    routing = routing_of([[0, 1, 2, 3]] * 2, [[0.5, 0.3, 0.15, 0.05], [0.25] * 4])
    ids, weights = rewritten(ColdDrop(1.0), routing, view_of(8, [], 2, (0, 1)))
    assert ids == [[0, 1, NO, NO], [0, 1, 2, 3]]
    assert np.allclose(np.array(weights).sum(axis=1), 1.0)
