"""Routing that prefers residents: rewrites of one token after another, computed by hand."""

from __future__ import annotations

from math import exp, log

import numpy as np
import pytest

from sim.policies.bonus import CECAR, Deadband, SigmaBias
from sim.policies.routing import CachePrior, CumulativeSum, MaxRank
from sim.types import KeySpace, LayerRouting, Phase, StepInfo
from tests.tokens import NO, Past, rewritten, routing_of, view_of

SCORES = [5.0, 4.0, 3.0, 2.5, 1.0, 0.0]


def softmax(scores: list[float], of: list[int], among: list[int] | None = None) -> list[float]:
    total = sum(exp(scores[e]) for e in (of if among is None else among))
    return [exp(scores[e]) / total for e in of]


class TestCachePrior:
    def test_a_resident_within_the_bonus_takes_the_slot_of_an_absent_pick(self) -> None:
        routing = routing_of([[0, 1, 2]], [softmax(SCORES, [0, 1, 2])], [SCORES])
        ids, weights = rewritten(CachePrior(0.2), routing, view_of(6, [3, 4]))
        # The spread is 5, so the bonus 1: 2.5 + 1 > 3, while expert 4 comes to 2 only.
        assert ids == [[0, 1, 3]]
        assert weights is not None
        assert weights[0] == pytest.approx(softmax(SCORES, [0, 1, 3]), rel=1e-5)

    def test_weights_that_are_not_normalised_stay_probabilities(self) -> None:
        every = list(range(6))
        routing = routing_of([[0, 1, 2]], [softmax(SCORES, [0, 1, 2], every)], [SCORES])
        policy = CachePrior(0.2, normalized=False)
        _, weights = rewritten(policy, routing, view_of(6, [3]))
        assert weights is not None
        assert weights[0] == pytest.approx(softmax(SCORES, [0, 1, 3], every), rel=1e-5)

    def test_sigmoid_weights_keep_their_ratio(self) -> None:
        values = [1.0 / (1.0 + exp(-z)) for z in SCORES]
        routing = routing_of([[0, 1, 2]], [values[:3]], [SCORES])
        policy = CachePrior(0.2, scoring="sigmoid", normalized=False)
        _, weights = rewritten(policy, routing, view_of(6, [3]))
        assert weights is not None
        assert weights[0] == pytest.approx([values[0], values[1], values[3]], rel=1e-5)

    def test_the_first_picks_are_safe_and_a_resident_pick_stays(self) -> None:
        routing = routing_of([[0, 1, 2]], None, [SCORES])
        assert rewritten(CachePrior(9.0, kept=2), routing, view_of(6, [3, 4, 5]))[0] == [[0, 1, 3]]
        assert rewritten(CachePrior(9.0, kept=0), routing, view_of(6, [3, 4, 5]))[0] == [[5, 4, 3]]
        assert rewritten(CachePrior(9.0, kept=0), routing, view_of(6, [0, 3]))[0] == [[0, 1, 3]]
        assert rewritten(CachePrior(0.0), routing, view_of(6, [3]))[0] == [[0, 1, 2]]

    def test_of_two_picks_only_the_first_is_safe(self) -> None:
        routing = routing_of([[0, 1]], None, [SCORES])
        assert rewritten(CachePrior(9.0, kept=2), routing, view_of(6, [2, 3]))[0] == [[0, 2]]

    @pytest.mark.parametrize(("third", "taken"), [(1.9922, True), (1.9, False)])
    def test_the_spread_is_a_running_mean_by_layer(self, third: float, taken: bool) -> None:
        policy, view = CachePrior(0.2), view_of(6, [3])
        rewritten(policy, routing_of([[0, 1, 2]], None, [SCORES]), view)  # spread 5
        wide = [7.0, 4.0, 3.0, third, 0.0, -3.0]  # 10: the mean is .99 * 5 + .01 * 10 = 5.05
        ids, _ = rewritten(policy, routing_of([[0, 1, 2]], None, [wide]), view)
        assert ids == [[0, 1, 3 if taken else 2]], "the bonus is 1.01: neither 1.0 nor 2.0"

    def test_prompts_are_left_alone(self) -> None:
        routing, view = routing_of([[0, 1, 2]], None, [SCORES]), view_of(6, [3])
        view.step = StepInfo(0, Phase.PREFILL, 1, num_decoding=0)
        assert CachePrior(0.2).rewrite(routing, view) is routing
        several = routing_of([[0, 1, 2]] * 2, None, [SCORES] * 2)
        view.step = StepInfo(0, Phase.MIXED, 2, num_decoding=1)
        assert rewritten(CachePrior(0.2), several, view)[0] == [[0, 1, 3], [0, 1, 2]]

    def test_a_trace_without_scores_is_refused(self) -> None:
        with pytest.raises(ValueError, match="router_logits"):
            CachePrior().rewrite(routing_of([[0, 1, 2]]), view_of(6))


class TestMaxRank:
    SCORES = (8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0)

    @pytest.mark.parametrize(
        ("resident", "slots"),
        [
            ([4, 5, 7], [0, 1, 4, 5]),
            ([5], [0, 1, 2, 5]),  # the router's third goes on where residents do not suffice
            ([3, 5], [0, 1, 5, 3]),  # a resident pick keeps its slot
            ([6, 7], [0, 1, 2, 3]),  # out of the window
            ([2, 3, 4], [0, 1, 2, 3]),
        ],
    )
    def test_residents_in_the_window_come_after_the_first_picks(
        self, resident: list[int], slots: list[int]
    ) -> None:
        routing = routing_of([[0, 1, 2, 3]], None, [self.SCORES])
        assert rewritten(MaxRank(2, 6), routing, view_of(8, resident))[0] == [slots]

    def test_alpha_scales_substitutes_before_sums_are_restored(self) -> None:
        scores = [log(p) for p in (0.4, 0.3, 0.2, 0.1)]
        routing = routing_of([[0, 1]], [[4 / 7, 3 / 7]], [scores])
        _, weights = rewritten(MaxRank(1, 3, alpha=0.5), routing, view_of(4, [2]))
        assert weights is not None
        assert weights[0] == pytest.approx([0.8, 0.2], abs=1e-3), ".4 to .5 * .2"

    @pytest.mark.parametrize(("mass", "slots"), [(0.75, [0, 2]), (0.69, [0, 1]), (1.0, [0, 2])])
    def test_a_cumulative_sum_sets_the_window(self, mass: float, slots: list[int]) -> None:
        scores = [log(p) for p in (0.4, 0.3, 0.1, 0.09, 0.07, 0.04)]
        routing = routing_of([[0, 1]], None, [scores])
        # .4 + .3 reach .69 with two ranks; .75 takes a third.
        assert rewritten(CumulativeSum(mass), routing, view_of(6, [2, 3]))[0] == [slots]


class TestBonuses:
    def test_the_deadband_wants_a_clear_gain(self) -> None:
        routing = routing_of([[0, 1]], None, [[3.0, 2.0, 1.5, 0.0]])
        assert rewritten(Deadband(1.0), routing, view_of(4, [2]))[0] == [[0, 2]]
        assert rewritten(Deadband(0.5), routing, view_of(4, [2]))[0] == [[0, 1]], "equal: it stays"
        assert rewritten(Deadband(9.0), routing, view_of(4, [2, 3]))[0] == [[2, 3][::-1]]

    def test_cecar_favours_the_young_and_drops_absent_experts_of_high_rank(self) -> None:
        scores = [4.0, 3.0, 2.0, 1.9, 0.0, 0.5]
        routing = routing_of([[0, 1, 2]], [[0.5, 0.3, 0.2]], [scores])
        for executed, slots in ((2, [0, 1, 5]), (1, [0, NO, 5])):
            policy, view = CECAR(executed), view_of(6, [3, 5])
            for used in (3, 5):  # 3 is the oldest: no bonus; 5 the youngest: z(1) - z(3) = 2
                policy.observe(routing_of([[used]], num_experts=6), view)
            ids, weights = rewritten(policy, routing, view)
            assert ids == [slots]
            assert weights is not None
            shares = softmax(scores, [0, 1, 5])  # .5 : .3 as recorded, .5 * e^-3.5 for expert 5
            total = 0.8 + 0.5 * exp(-3.5)
            assert weights[0][0] == pytest.approx(0.5 / total, rel=1e-4)
            assert (weights[0][1] == 0.0) == (executed == 1)
            assert shares[2] < 0.1

    @pytest.mark.parametrize(
        ("mode", "slots"), [("warm", [0, 3]), ("cache", [0, 2]), ("hybrid", [0, 2])]
    )
    def test_strata_biases_by_the_spread_of_scores(self, mode: str, slots: list[int]) -> None:
        # Scores 0 and 2 have a standard deviation of 1, in every token of the calibration.
        past = Past([[0, 1]] * 2, 4, logits=[[0.0, 2.0, 0.0, 2.0]] * 2)
        policy = SigmaBias(1.0, past, mode, window=2)
        view = view_of(4, [2])
        policy.observe(routing_of([[3, 2]], num_experts=4), view)
        policy.observe(routing_of([[3, 3]], num_experts=4), view)
        policy.observe(routing_of([[3, 3]], num_experts=4), view)  # 2 is no longer warm
        scores = [3.0, 2.0, 1.6, 1.55] if mode != "warm" else [3.0, 2.0, 1.6, 1.5]
        ids, _ = rewritten(policy, routing_of([[0, 1]], None, [scores]), view)
        assert ids == [slots]


class TestTwoSlotsOfOneExpert:
    KEYS = KeySpace(2, 8, 2)

    def routing(
        self,
        ids: list[list[int]],
        weights: list[list[float]] | None = None,
        low: list[list[bool]] | None = None,
    ) -> LayerRouting:
        shares = None if weights is None else np.array(weights, np.float32)
        marks = None if low is None else np.array(low)
        return LayerRouting(1, (), ()).rewritten(self.KEYS, np.array(ids, np.uint16), shares, marks)

    @pytest.mark.parametrize("others", [[], [[6, 2, NO]]])
    def test_a_token_needs_the_expert_once(self, others: list[list[int]]) -> None:
        made = self.routing([[5, 2, 5], *others])
        counts = dict(zip(made.experts, made.token_counts, strict=True))
        assert counts == ({13: 1, 10: 2, 14: 1} if others else {13: 1, 10: 1})
        assert len(made.experts) == len(counts)

    @pytest.mark.parametrize("others", [[], [[5, 2, NO]]])
    def test_its_copies_of_either_precision_are_two(self, others: list[list[int]]) -> None:
        low = [[True, False, False], [False] * 3][: 1 + len(others)]
        made = self.routing([[5, 5, 5], *others], low=low)
        counts = dict(zip(made.experts, made.token_counts, strict=True))
        assert counts == ({29: 1, 13: 2, 10: 1} if others else {29: 1, 13: 1})

    def test_it_has_the_mass_of_both(self) -> None:
        made = self.routing([[5, 2, 5]], [[0.5, 0.25, 0.125]])
        assert made.masses(8) == {13: 0.625, 10: 0.25}
