"""A step's choices as plain lists and as arrays: two forms of the same tables."""

from __future__ import annotations

import numpy as np
import pytest

from sim.choices import FEW_TOKENS, Choices
from sim.types import NO_EXPERT, KeySpace, LayerRouting
from tests.tokens import routing_of
from traces.schema import Trace

KEYS = KeySpace(2, 4, num_copies=2)
NO = NO_EXPERT


def rewritten(ids: list[list[int]], low: list[list[bool]] | None = None) -> LayerRouting:
    weights = [[0.1] * len(row) for row in ids]
    return LayerRouting(1, (), ()).rewritten(KEYS, ids, weights, low)


class Recorded(Choices):
    """Columns given by name instead of a trace's."""

    def __init__(self, **columns: np.ndarray) -> None:
        super().__init__(object.__new__(Trace), slice(0, 1))
        self._columns = {"router_logits": None, "expert_weights": None, **columns}


@pytest.mark.parametrize("num_tokens", [1, 2, FEW_TOKENS + 1])
def test_lists_of_a_layer_are_what_its_arrays_hold(num_tokens: int) -> None:
    ids = np.arange(num_tokens * 2 * 3, dtype=np.uint16).reshape(num_tokens, 2, 3)
    choices = Recorded(expert_ids=ids, router_logits=ids / np.float16(8), next_gate_ids=ids)
    for layer in (0, 1):
        routing = LayerRouting(layer, (), (), choices)
        assert routing.num_rows == num_tokens
        assert routing.has_scores
        assert routing.id_rows() == ids[:, layer].tolist()
        assert routing.score_row(num_tokens - 1) == (ids[-1, layer] / 8).tolist()
        assert routing.weight_rows() is None
        assert routing.low_rows() is None
    assert LayerRouting(0, (), (), choices).early_rows(1) == ids[:, 0].tolist()
    assert LayerRouting(0, (), (), choices).early_rows(4) is None, "distances are 1 to 3"
    assert LayerRouting(1, (), (), choices).early_rows(1) is None, "no layer follows"


def test_what_is_not_recorded_is_none() -> None:
    routing = LayerRouting(0, (), ())
    assert routing.num_rows == 0
    assert not routing.has_scores
    assert routing.id_rows() is routing.weight_rows() is routing.score_row(0) is None
    assert routing.early_rows() is None


def test_lists_of_a_rewritten_routing_become_arrays_when_asked_for() -> None:
    made = rewritten([[3, NO], [0, 3]], [[True, False], [False, False]])
    assert made.id_rows() == [[3, NO], [0, 3]]
    assert made.topk_ids is not None
    assert made.topk_ids.dtype == np.uint16
    assert made.topk_ids.tolist() == [[3, NO], [0, 3]]
    assert made.low_slots is not None
    assert made.low_slots.tolist() == made.low_rows()
    assert made.weight_rows() == [[float(np.float32(0.1))] * 2] * 2, "in single precision"


def test_keys_of_several_tokens_are_counted_once_a_token() -> None:
    made = rewritten([[3, 3], [0, 3], [NO, 1]])
    assert (made.experts, made.token_counts) == ([4, 5, 7], [1, 1, 2])
    low = rewritten([[3, 3], [0, 3]], [[True, False], [True, False]])
    assert (low.experts, low.token_counts) == ([7, 12, 15], [2, 1, 1])


def test_keys_of_one_token_keep_their_order() -> None:
    made = rewritten([[3, 0, 3, NO]])
    assert (made.experts, made.token_counts) == ([7, 4], [1, 1])


@pytest.mark.parametrize("is_marked", [False, True])
def test_many_tokens_are_counted_as_few_are(is_marked: bool) -> None:
    rng = np.random.default_rng(0)
    ids = rng.choice([0, 1, 2, 3, NO], size=(FEW_TOKENS + 1, 3)).tolist()
    low = (rng.random((FEW_TOKENS + 1, 3)) < 0.5).tolist() if is_marked else None
    many = rewritten(ids, low)
    counts: dict[int, int] = {}
    for token, row in enumerate(ids):  # token by token, which is the path of one
        for key in rewritten([row], low and [low[token]]).experts:
            counts[key] = counts.get(key, 0) + 1
    assert dict(zip(many.experts, many.token_counts, strict=True)) == counts
    assert list(many.experts) == sorted(counts)


def test_two_slots_with_one_expert_add_up_their_mass() -> None:
    routing = routing_of([[1, 1, 2]], [[0.25, 0.5, 0.25]])
    assert routing.masses(4) == {1: 0.75, 2: 0.25}
