"""How slots are shared among layers: published formulas, exactness, and calibration."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from sim.policies.classic import LRU
from sim.policies.history import PastRequest
from sim.policies.sizing import AdapMoE, Even, FromLosses, MissCurves
from tests.cache_replay import contents, num_hits, run_of, skewed
from traces.schema import NO_EXPERT


class Past:
    """Calibration requests made in a test."""

    def __init__(self, *requests: PastRequest, num_experts: int = 8) -> None:
        self._requests = requests
        self.num_layers, self.top_k = requests[0].ids.shape[1:]
        self.num_experts = num_experts

    def popularity(self) -> np.ndarray:
        raise NotImplementedError

    def requests(self) -> Iterator[PastRequest]:
        return iter(self._requests)


def past(ids: np.ndarray, num_experts: int = 8, gates: np.ndarray | None = None) -> Past:
    ahead = {} if gates is None else {1: gates.astype(np.uint16)}
    return Past(PastRequest(ids.astype(np.uint16), 1, gates_ahead=ahead), num_experts=num_experts)


NOTHING = past(np.zeros((1, 2, 2)))


def test_even_gives_the_remainder_to_the_first() -> None:
    assert Even(3, 8).slots(11) == [4, 4, 3]
    assert Even(3, 4).slots(99) == [4, 4, 4]


@pytest.mark.parametrize(("b", "a"), [(0.0, 0.0), (0.25, 0.9), (1.0, 0.5)])
def test_adapmoe_has_the_published_loss_for_two_of_eight(b: float, a: float) -> None:
    sizing = AdapMoE(1, 8, 2, NOTHING, [a], b)
    for s in range(9):
        both, one = (8 - s) * (7 - s) / 56, 2 * (8 - s) * s / 56
        expected = b * (1 - s / 8) * (1 - a) + (1 - b) * (
            2 * both * (1 - a) + both * a + one * (1 - a)
        )
        assert sizing.losses[0, s] == pytest.approx(expected)


def test_adapmoe_for_three_of_five_counts_subsets() -> None:
    # 2 of 5 cached. Of the 10 sets of 3 experts, 3 lack one of theirs, 6 two, 1 three: 18 in all; a right
    # prefetch spares one in each.
    assert AdapMoE(1, 5, 3, NOTHING, [0.0]).losses[0, 2] == pytest.approx(1.8)
    assert AdapMoE(1, 5, 3, NOTHING, [1.0]).losses[0, 2] == pytest.approx(0.8)


def test_adapmoe_gives_more_to_layers_that_are_predicted_worse() -> None:
    assert list(AdapMoE(4, 8, 2, NOTHING, [0.8]).slots(16)) == [4, 4, 4, 4]
    first = AdapMoE(4, 8, 2, NOTHING, [0.0, 0.9, 0.9, 0.9]).slots(16)
    assert sum(first) == 16
    assert first[0] > max(first[1:])


def test_adapmoe_reads_a_list_of_another_length_by_depth() -> None:
    assert AdapMoE(4, 8, 2, NOTHING, [0.1, 0.2]).accuracy == [0.1, 0.1, 0.2, 0.2]
    assert AdapMoE(2, 8, 2, NOTHING, [0.1, 0.2, 0.3, 0.4]).accuracy == [0.1, 0.3]


def test_adapmoe_measures_how_often_the_early_gates_first_pick_is_right() -> None:
    # One prompt token, which does not count, then three; layer 1 uses 0 1, then 2 3, then 4 5.
    layers = [[[7, 6], [0, 1]], [[7, 6], [0, 1]], [[7, 6], [2, 3]], [[7, 6], [4, 5]]]
    gates = [[[5, 5], [9, 9]], [[1, 5], [9, 9]], [[2, 5], [9, 9]], [[6, 4], [9, 9]]]
    ids, early = np.array(layers), np.array(gates)
    early[:, 1] = NO_EXPERT
    assert AdapMoE(2, 8, 2, past(ids, gates=early)).accuracy == pytest.approx([0.0, 2 / 3])
    with pytest.raises(ValueError, match="accuracy: must be given, since the calibration trace"):
        AdapMoE(2, 8, 2, past(ids))


@pytest.mark.parametrize("seed", range(4))
def test_the_share_is_the_best_there_is(seed: int) -> None:
    losses = np.random.default_rng(seed).random((3, 6))  # not convex, so that greed would fail
    for num_slots in (0, 3, 7, 15, 20):
        least = min(2, num_slots // 3)
        shares = [s for s in product(range(least, 6), repeat=3) if sum(s) <= num_slots]
        found = FromLosses(losses, 2).slots(num_slots)
        value = sum(losses[layer, own] for layer, own in enumerate(found))
        assert tuple(found) in shares
        assert value == pytest.approx(min(sum(losses[range(3), list(s)]) for s in shares))


def test_miss_curves_are_those_of_an_lru_of_each_size() -> None:
    ids = skewed(8, 300, 2, 8, 1)
    losses = MissCurves(past(ids), 1).losses
    workload = run_of(ids, 8)
    for slots in range(1, 9):
        hits = num_hits(workload, contents(workload, LRU, slots))
        assert losses[:, slots].sum() * 300 == pytest.approx(600 - hits)
    assert losses[:, 0] == pytest.approx([1.0, 1.0])


def test_miss_curves_give_slots_to_the_layer_that_needs_them() -> None:
    # Layer 0 goes round 5 experts, which fewer slots than 5 never hit; layer 1 uses one all the time.
    ids = np.array([[[step % 5], [3]] for step in range(50)])
    assert list(MissCurves(past(ids), 1).slots(6)) == [5, 1]
    assert MissCurves(past(ids), 1).slots(4)[1] >= 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: AdapMoE(2, 8, 2, NOTHING, [1.5]),
            r"accuracy = \[1.5\]: must be numbers in \[0, 1\]",
        ),
        (lambda: AdapMoE(2, 8, 2, NOTHING, [0.5], 2.0), r"single = 2.0: must be in \[0, 1\]"),
        (lambda: MissCurves(NOTHING, 2, 0), "most_tokens = 0: must be >= 1"),
    ],
)
def test_bad_parameters_are_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()
