"""A layer's tokens through its experts: the bits of the models' code, and each pair exactly once."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the real backend needs torch")
pytest.importorskip("transformers", reason="compares with its models")

from moe_experts import (  # noqa: E402  # noqa: E402  # noqa: E402
    DTYPES,
    EXPERTS,
    HIDDEN,
    KEYS,
    LAYER,
    TOP_K,
    experts_module,
    format_of,
    module_output,
    packed_slots,
    routing_of,
)

from real.kernels import Kernels  # noqa: E402
from real.tokens import LayerTokens  # noqa: E402
from sim.types import NO_EXPERT, LayerRouting  # noqa: E402

FIRST = LAYER * EXPERTS  # the key of the layer's expert 0


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- the same bits as the models -------------------------------------------------------------------


class Case(NamedTuple):
    kernels: Any
    format: Any
    slots: Any
    hidden: Any
    ids: Any
    weights: Any
    expected: dict[str, Any]


def model_case(kind: str, dtype: str, num_tokens: int, weight_dtype: Any) -> Case:
    module, format = experts_module(kind, dtype), format_of(kind, dtype)
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, HIDDEN, generator=generator).to(DTYPES[dtype])
    scores = torch.randn(num_tokens, EXPERTS, generator=generator).softmax(-1)
    weights, ids = scores.topk(TOP_K)
    weights = weights.to(weight_dtype or DTYPES[dtype])
    expected = {
        combine: module_output(module, how, hidden, ids, weights)
        for combine, how in (("by_expert", "eager"), ("by_slot", "grouped_mm"))
    }
    slots = packed_slots(module, format)
    return Case(Kernels(format, module._apply_gate), format, slots, hidden, ids, weights, expected)


def computed(case: Case, combine: Any, packed: bool, num_together: int) -> Any:
    routing = routing_of(case.ids)
    tokens = LayerTokens(case.hidden, routing, KEYS, case.weights, packed, None, combine)
    order = list(routing.experts)
    random.Random(num_together).shuffle(order)
    together, single = order[:num_together], order[num_together:]
    places = [key - FIRST for key in together]
    tokens.run_many(case.kernels, together, case.format.view(case.slots), places)
    for key in single:
        tokens.run(case.kernels, key, case.format.view(case.slots[key - FIRST]))
    tokens.done()
    assert tokens.num_pairs_done == case.ids.numel()
    return tokens.output()


@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
@pytest.mark.parametrize("num_tokens", [1, 3, 40])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_bits_are_those_of_the_model(
    kind: str, dtype: str, num_tokens: int, weight_dtype: Any
) -> None:
    case = model_case(kind, dtype, num_tokens, weight_dtype)
    for combine, expected in case.expected.items():
        for packed in (False, True):
            for num_together in (0, TOP_K):
                made = computed(case, combine, packed, num_together)
                assert made.dtype == expected.dtype
                if kind == "gpt_oss" and combine == "by_slot":  # one gate for all experts' rows
                    torch.testing.assert_close(made, expected)
                else:
                    assert torch.equal(made, expected), (combine, packed, num_together)


# -- exact sums: experts that multiply by a number of their own ------------------------------------


class Multiply:
    """Kernels whose expert is one number; whole numbers in float64 make every sum exact."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, Any]] = []

    def expert(self, weights: float, rows: Any) -> Any:
        self.calls.append((weights, rows[:, 0].tolist()))
        return rows * weights

    def experts(self, stacked: Any, slots: Any, rows: Any, counts: Any) -> Any:
        assert list(slots) == sorted(slots)
        parts = zip(slots, rows.split(list(counts)), strict=True)
        return torch.cat([self.expert(stacked[slot], part) for slot, part in parts])


def factor(key: int) -> float:
    return float(key * key + 1)


STACKED = [factor(key) for key in range(len(KEYS))]


def numbered(num_tokens: int) -> Any:
    """Return hidden states that are whole numbers: token i has i + 1 in front."""
    return torch.arange(num_tokens * 4, dtype=torch.float64).view(num_tokens, 4) // 4 + 1


def by_hand(hidden: Any, ids: Any, weights: Any, low: Any = None, only: Any = None) -> Any:
    total = torch.zeros_like(hidden)
    for token, row in enumerate(ids):
        for slot, expert in enumerate(row):
            if expert == NO_EXPERT:
                continue
            key = KEYS.key(LAYER, expert)
            key = KEYS.low(key) if low is not None and low[token][slot] else key
            if only is None or key in only:
                total[token] += weights[token][slot] * factor(key) * hidden[token]
    return total


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    num_tokens, top_k = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    shape = num_tokens, top_k
    table = st.lists(
        st.lists(st.sampled_from([*range(5), NO_EXPERT]), min_size=top_k, max_size=top_k),
        min_size=num_tokens,
        max_size=num_tokens,
    )
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    group_of = rng.integers(0, draw(st.integers(1, 3)), num_tokens)
    return {
        "ids": draw(table),
        "weights": rng.integers(1, 9, shape).tolist(),
        "low": (rng.random(shape) < 0.4).tolist() if draw(st.booleans()) else None,
        "groups": [np.flatnonzero(group_of == group) for group in np.unique(group_of)],
        "packed": draw(st.booleans()),
        "combine": draw(st.sampled_from(["by_slot", "by_expert"])),
        "num_together": draw(st.integers(0, 4)),
    }


@settings(max_examples=150, deadline=None)
@given(cases())
def test_every_pair_counts_once(case: dict[str, Any]) -> None:
    ids, low = np.array(case["ids"], dtype=np.uint16), case["low"]
    hidden, weights = numbered(len(ids)), torch.tensor(case["weights"], dtype=torch.float64)
    routing = routing_of(ids, None, None if low is None else np.array(low))
    kernels: Any = Multiply()
    tokens = LayerTokens(
        hidden, routing, KEYS, weights, case["packed"], case["groups"], case["combine"]
    )
    together = routing.experts[: case["num_together"]]
    tokens.run_many(kernels, together, STACKED, together)
    for key in routing.experts[case["num_together"] :]:
        tokens.run(kernels, key, STACKED[key])
    assert torch.equal(tokens.output(), by_hand(hidden, case["ids"], case["weights"], low))
    pairs = sorted((value, row) for value, rows in kernels.calls for row in rows)
    assert len(set(pairs)) == len(pairs) == tokens.num_pairs_done == sum(routing.token_counts)


def test_micro_batches_are_computed_one_after_another() -> None:
    ids, groups = [[0, 1], [1, 0], [0, 2], [2, 1]], [np.array([0, 3]), np.array([1, 2])]
    for packed in (False, True):
        kernels: Any = Multiply()
        hidden = numbered(4)
        tokens = LayerTokens(hidden, routing_of(ids), KEYS, None, packed, groups)
        for key in (FIRST, FIRST + 1, FIRST + 2):
            tokens.run(kernels, key, STACKED[key])
        rows = [(value, sorted(rows)) for value, rows in kernels.calls]
        zero, one, two = (factor(FIRST + expert) for expert in range(3))
        assert rows == [
            *((zero, [1]), (zero, [2, 3])),
            *((one, [1, 4]), (one, [2])),
            *((two, [4]), (two, [3])),
        ]


def test_rows_that_are_computed_elsewhere() -> None:
    ids = [[0, 1], [1, 2], [0, 2]]
    groups = [np.array([0]), np.array([1, 2])]
    for packed in (False, True):
        tokens = LayerTokens(numbered(3), routing_of(ids), KEYS, None, packed, groups)
        for key in (FIRST + 2, FIRST, FIRST + 1):
            tokens.put(key, [rows * factor(key) for rows in tokens.rows(key)])
        assert torch.equal(tokens.output(), by_hand(numbered(3), ids, [[0.5, 0.5]] * 3))


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_a_part_of_the_experts_now_and_the_others_later(num_tokens: int) -> None:
    ids = [[0, 1, 2], [2, 1, 0], [3, 0, 1]][:num_tokens]
    weights, hidden, parts = [[2, 3, 4]] * num_tokens, numbered(num_tokens), []
    for only in ({FIRST, FIRST + 3}, {FIRST + 1, FIRST + 2}):
        tokens = LayerTokens(
            hidden, routing_of(ids), KEYS, torch.tensor(weights, dtype=torch.float64), only=only
        )
        for key in only & set(routing_of(ids).experts):
            tokens.run(Multiply(), key, STACKED[key])
        parts.append(tokens.output())
        assert torch.equal(parts[-1], by_hand(hidden, ids, weights, only=only))
    assert torch.equal(sum(parts), by_hand(hidden, ids, weights))


# -- whose weights count ---------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_whose_weights_count(num_tokens: int) -> None:
    ids, hidden = [[0, 1]] * num_tokens, numbered(num_tokens)
    own, live = [[2.0, 4.0]] * num_tokens, [[8.0, 16.0]] * num_tokens
    given_live = torch.tensor(live, dtype=torch.float64)
    plain, weighted = routing_of(ids), routing_of(ids, np.array(own, dtype=np.float16))
    for routing, weights, rewritten, expected in (
        (plain, None, False, [[0.5, 0.5]] * num_tokens),
        (weighted, None, False, own),
        (weighted, given_live, False, live),
        (weighted, given_live, True, own),
        (plain, given_live, True, live),
    ):
        tokens = LayerTokens(hidden, routing, KEYS, weights, rewritten=rewritten)
        for key in routing.experts:
            tokens.run(Multiply(), key, STACKED[key])
        assert torch.equal(tokens.output(), by_hand(hidden, ids, expected))


def test_one_token_needs_no_recorded_slots() -> None:
    tokens = LayerTokens(numbered(1), LayerRouting(LAYER, [FIRST + 4, FIRST], [1, 1]), KEYS)
    for key in (FIRST, FIRST + 4):
        tokens.run(Multiply(), key, STACKED[key])
    assert torch.equal(tokens.output(), by_hand(numbered(1), [[4, 0]], [[0.5, 0.5]]))
    with pytest.raises(ValueError, match="topk_ids"):
        LayerTokens(numbered(2), LayerRouting(LAYER, [FIRST], [2]), KEYS)


# -- the law ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_an_expert_runs_once_and_only_if_it_was_chosen(num_tokens: int) -> None:
    routing = routing_of([[0, 1]] * num_tokens)
    tokens = LayerTokens(numbered(num_tokens), routing, KEYS)
    run: Any = tokens.run
    with pytest.raises(RuntimeError, match=f"key {FIRST + 7}"):
        run(Multiply(), FIRST + 7, 1.0)
    run(Multiply(), FIRST, 1.0)
    with pytest.raises(RuntimeError, match="twice"):
        run(Multiply(), FIRST, 1.0)
    with pytest.raises(RuntimeError, match=rf"never computed: keys \[{FIRST + 1}\]"):
        tokens.done()
    with pytest.raises(RuntimeError, match="never computed"):
        tokens.output()


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_nothing_is_left_of_a_layer_without_experts(num_tokens: int) -> None:
    tokens = LayerTokens(numbered(num_tokens), routing_of([[NO_EXPERT] * 2] * num_tokens), KEYS)
    tokens.done()
    assert torch.equal(tokens.output(), torch.zeros(num_tokens, 4, dtype=torch.float64))


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_tokens_and_routing_are_of_one_size(num_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"2 tokens routed, {num_tokens} given"):
        LayerTokens(numbered(num_tokens), routing_of([[0, 1], [1, 2]]), KEYS)
