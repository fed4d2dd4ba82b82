from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from toy_requests import ORIGIN, drawn, made, notes, refused, routed, weights_of
from trace_samples import traces

from traces.importers.routed import Routed
from traces.importers.told import Told
from traces.schema import NO_EXPERT, PREFILL, Provenance, Trace
from traces.store import write_trace

# -- what is assembled -----------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(trace=traces())
def test_requests_of_a_trace_make_the_trace_again(trace: Trace) -> None:
    requests, order = [], []
    for number in np.unique(trace.request_id).tolist():
        rows = np.flatnonzero(trace.request_id == number)
        own = trace.take(rows)
        order.append(rows)
        columns = ("expert_weights", "token_id", "text", "step", "router_logits")
        requests.append(
            Routed(
                f"request {number}",
                own.expert_ids,
                int((own.phase == PREFILL).sum()),
                **{name: getattr(own, name) for name in columns},
            )
        )
    origin = replace(ORIGIN, num_experts=trace.meta.num_experts, weight_semantics="applied")
    alike = [len(r) > 1 and (r.expert_ids[1:] == r.expert_ids[0]).all() for r in requests]
    if alike[0] and requests[0].expert_ids[1:].size >= 8:
        return  # a warm-up, see below
    found = made(*requests, origin=origin)
    rows = np.concatenate(order)
    rows = rows[np.argsort(trace.step[rows], kind="stable")]
    for name in ("expert_ids", "position", "phase", "step", *columns):
        expected, value = getattr(trace.take(rows), name), getattr(found, name)
        if expected is None:
            assert value is None
        else:
            np.testing.assert_array_equal(value, expected, err_msg=name)
    assert (np.diff(found.step) >= 0).all()


def test_a_header_says_what_is_known(tmp_path: Path) -> None:
    told = Told(
        model="toy-moe", native_top_k=2, num_shared_experts=1, hidden_size=64, licence="MIT"
    )
    trace = made(routed(), routed(drawn(5, seed=1), name="request 1"), told=told)
    meta = trace.meta
    assert (meta.model, meta.num_layers, meta.num_experts, meta.top_k) == ("toy-moe", 3, 8, 2)
    assert (meta.num_shared_experts, meta.hidden_size, meta.licence) == (1, 64, "MIT")
    assert meta.provenance == Provenance("imported", "a.bin: toy file", "")
    assert (meta.weight_semantics, meta.sorted_by_weight, meta.scoring) == (
        "none",
        False,
        "unknown",
    )
    assert meta.notes == ()
    assert trace.request_id.tolist() == [0] * 6 + [1] * 5
    assert trace.phase.tolist() == [0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1]
    assert trace.step.tolist() == [0, 0, 1, 2, 3, 4, 5, 5, 6, 7, 8]
    assert trace.position.tolist() == [*range(6), *range(5)]
    write_trace(tmp_path / "a.parquet", trace)


def test_rows_lie_in_the_order_of_the_engines_steps() -> None:
    one = routed(step=np.array([0, 0, 2, 3, 5, 6]))
    other = routed(drawn(3, seed=1), name="request 1", prompt=1, step=np.array([1, 2, 3]))
    trace = made(one, other)
    assert trace.step.tolist() == [0, 0, 1, 2, 2, 3, 3, 5, 6]
    assert trace.request_id.tolist() == [0, 0, 1, 0, 1, 0, 1, 0, 0]
    for number, request in enumerate((one, other)):
        own = trace.take(trace.request_id == number)
        np.testing.assert_array_equal(own.expert_ids, request.expert_ids)


def test_weights_put_the_slots_in_order() -> None:
    ids = drawn(6)
    weights = weights_of(ids).copy()
    weights[2, 1] = [0.25, 0.75]
    trace = made(
        routed(ids, expert_weights=weights), origin=replace(ORIGIN, weight_semantics="applied")
    )
    assert trace.expert_ids[2, 1].tolist() == ids[2, 1, ::-1].tolist()
    assert trace.expert_weights is not None
    assert trace.expert_weights[2, 1].tolist() == [0.75, 0.25]
    assert (trace.meta.sorted_by_weight, trace.meta.normalized) == (True, True)
    assert "repaired: the slots of 1 token-layers were put in order of weight" in notes(trace)
    weights[0, 0] = [0.5, 0.25]
    origin = replace(ORIGIN, weight_semantics="applied")
    assert made(routed(ids, expert_weights=weights), origin=origin).meta.normalized is False


# -- ids -------------------------------------------------------------------------------------------


def test_padded_slots_are_cut_and_a_forced_top_k_is_told() -> None:
    ids = np.concatenate([drawn(6), np.full((6, 3, 3), -1, dtype=np.int32)], axis=2)
    trace = made(routed(ids), told=Told(native_top_k=4))
    assert trace.meta.top_k == 2
    assert "warning: top_k was forced from 4 to 2" in notes(trace)
    assert "top_k is 2: must be 4, as you said" in refused(routed(ids), told=Told(top_k=4))
    assert "top_k was forced" not in notes(made(routed(ids), told=Told(native_top_k=2)))


def test_unsigned_ids_have_no_expert_at_65535() -> None:
    ids = drawn(6).astype(np.uint16)
    ids[2, 1, 1] = NO_EXPERT
    assert made(routed(ids)).expert_ids[2, 1, 1] == NO_EXPERT
    weights = weights_of(ids)
    origin = replace(ORIGIN, weight_semantics="applied")
    trace = made(routed(ids, expert_weights=weights), origin=origin)
    assert trace.expert_weights is not None
    assert trace.expert_weights[2, 1].tolist() == [0.75, 0]


def test_ids_that_no_router_gives_are_refused() -> None:
    ids = drawn(6)
    wide, twice, parallel = ids.copy(), ids.copy(), ids.copy()
    wide[2, 1, 0], parallel[2, 1, 0], twice[4, 2, 1] = 11, 8, twice[4, 2, 0]
    for request, message in (
        (routed(wide), "request 0: row 2, layer 1, slot 0 is expert 11: must lie in 0..7"),
        (routed(parallel), "is expert 8: must lie in 0..7 (an expert-parallel run's mark"),
        (routed(twice), "row 4: expert_ids[layer 2, slot 1]"),
        (routed(ids.astype(float)), "request 0: ids are float64(6, 3, 2): must be integers"),
        (routed(ids[0]), "request 0: ids are int32(3, 2): must be integers [tokens, layers, k]"),
        (routed(ids[:0]), "no routing in it: a trace has at least one row"),
        (routed(drawn(6, top_k=5, experts=6) % 4), "top_k is 5: must be <= num_experts 4"),
        (routed(ids, step=np.array([0, 0, 1, 2, 1, 3])), "request 0: row 4 is of step 1: must not"),
    ):
        few = replace(ORIGIN, num_experts=4) if "num_experts 4" in message else ORIGIN
        assert message in refused(request, origin=few)


def test_requests_must_be_alike() -> None:
    for other, message in (
        (drawn(4, layers=2), "request 1: [layers, k] are (2, 2): must be (3, 2), as in request 0"),
        (drawn(4, top_k=3), "request 1: [layers, k] are (3, 3): must be (3, 2), as in request 0"),
    ):
        assert message in refused(routed(), routed(other, name="request 1"))
    tokens = routed(token_id=np.arange(6))
    message = "request 1: token_id is there or not: must be as in request 0"
    assert message in refused(tokens, routed(name="request 1"))
    assert "token_id has 5 rows: must have 6" in refused(routed(token_id=np.arange(5)))
    weights = weights_of(drawn(6))[..., :1]
    assert "expert_weights are (6, 3, 1): must be (6, 3, 2)" in refused(
        routed(expert_weights=weights)
    )


def test_the_number_of_experts_must_be_told_somewhere() -> None:
    silent = replace(ORIGIN, num_experts=None)
    message = "does not tell the number of experts: give --num-experts, --model or --config"
    assert message in refused(routed(), origin=silent)
    assert made(routed(), origin=silent, told=Told(num_experts=9)).meta.num_experts == 9
    assert "num_experts is 8: must be 9, as you said" in refused(routed(), told=Told(num_experts=9))
    wide = replace(ORIGIN, num_experts=NO_EXPERT)
    assert "the number of experts is 65535: must lie in 1..65534" in refused(routed(), origin=wide)
