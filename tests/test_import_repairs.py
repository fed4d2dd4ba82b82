from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from toy_requests import ORIGIN, drawn, made, notes, refused, routed

from traces.importers.routed import Origin
from traces.importers.told import NOTHING, Told
from traces.schema import DECODE, NO_EXPERT, PREFILL

ZEROS = replace(ORIGIN, zero_means_dense=True)


# -- dense layers ----------------------------------------------------------------------------------


def with_dense(dense: list[int], empty: int = 0, layers: int = 4) -> np.ndarray:
    ids = drawn(6, layers=layers)
    ids[:, dense] = empty
    return ids


@pytest.mark.parametrize(("origin", "empty"), [(ORIGIN, -1), (ZEROS, 0)])
def test_first_layers_without_experts_are_dense(origin: Origin, empty: int) -> None:
    ids = with_dense([0, 1], empty)
    trace = made(routed(ids), origin=origin)
    assert trace.meta.layer_indices == (2, 3)
    np.testing.assert_array_equal(trace.expert_ids, ids[:, 2:])
    assert "repaired: 2 dense layers were dropped, 0, 1" in notes(trace)


def test_told_layers_are_taken() -> None:
    ids = with_dense([0, 2])
    trace = made(routed(ids), told=Told(layer_indices=(1, 3)), origin=ZEROS)
    assert trace.meta.layer_indices == (1, 3)
    np.testing.assert_array_equal(trace.expert_ids, ids[:, [1, 3]])
    only_moe = made(routed(ids[:, [1, 3]]), told=Told(layer_indices=(1, 3)), origin=ZEROS)
    assert only_moe.meta.layer_indices == (1, 3)


def test_layers_that_lack_experts_are_refused() -> None:
    told = Told(layer_indices=(1, 2, 3))
    for ids, told_, message in (
        (
            with_dense([0, 2]),
            NOTHING,
            "layer 2 has no expert in any token, but layers before it have",
        ),
        (with_dense([3]), NOTHING, "layer 3 has no expert in any token, but layers before it"),
        (with_dense([0, 1, 2, 3]), NOTHING, "no layer has an expert in any token: nothing"),
        (
            with_dense([0, 2]),
            told,
            "layer 2 has no expert in any token: a pipeline stage is missing",
        ),
        (with_dense([]), told, "layer 0 has experts: must be one of the MoE layers"),
        (with_dense([0], layers=3)[:, :2], told, "has 2 layers: must be the 3 MoE layers, or all"),
        (with_dense([0], layers=3)[:, :2], Told(layer_indices=(0, 1)), "layer 0 has no expert"),
    ):
        assert message in refused(routed(ids), told=told_, origin=ZEROS)


def test_more_layers_than_the_model_has_are_refused() -> None:
    ids = with_dense([0])
    assert len(made(routed(ids), told=Told(num_hidden_layers=4), origin=ZEROS))
    told = Told(num_hidden_layers=3)
    assert "has 4 layers: must be at most 3, as you said" in refused(
        routed(ids), told=told, origin=ZEROS
    )


def test_what_a_file_states_of_top_k_is_compared() -> None:
    trace = made(routed(drawn(6)), origin=replace(ORIGIN, top_k=8))
    assert "warning: no token has more than 2 experts, the file states 8" in notes(trace)
    stated = replace(ORIGIN, top_k=1)
    assert "tokens have 2 experts: must be at most 1" in refused(routed(drawn(6)), origin=stated)


def test_zeros_of_top_1_may_be_expert_0() -> None:
    ids = drawn(6, layers=4, top_k=1)
    ids[:, 0] = 0
    assert "which with top_k 1 may be a dense layer or expert 0" in refused(
        routed(ids), origin=ZEROS
    )
    trace = made(routed(ids), told=Told(layer_indices=(1, 2, 3)), origin=ZEROS)
    assert trace.meta.layer_indices == (1, 2, 3)
    ids[0] = 0
    ids[0, 1] = 5
    assert len(made(routed(ids), told=Told(layer_indices=(1, 2, 3)), origin=ZEROS)) == 6


def test_layers_that_a_file_names_are_compared_with_the_told_ones() -> None:
    origin = replace(ORIGIN, layer_indices=(1, 3, 5))
    assert made(routed(), origin=origin).meta.layer_indices == (1, 3, 5)
    trace = made(routed(), origin=origin, told=Told(layer_indices=(1, 3, 5, 7)))
    assert trace.meta.layer_indices == (1, 3, 5)
    assert "warning: only 3 of the 4 MoE layers are in the file" in notes(trace)
    message = refused(routed(), origin=origin, told=Told(layer_indices=(1, 2, 5)))
    assert "layer 3 has experts: must be one of the MoE layers that were told" in message
    ids = drawn(6)
    ids[:, 1] = -1
    assert "layer 1 has no expert in any token" in refused(routed(ids), origin=origin)


# -- rows ------------------------------------------------------------------------------------------


def test_first_rows_without_routing_are_dropped() -> None:
    ids = drawn(6)
    ids[:2] = 0
    trace = made(routed(ids, prompt=3), origin=ZEROS)
    assert (len(trace), trace.position.tolist()) == (4, [2, 3, 4, 5])
    assert trace.phase.tolist() == [PREFILL, DECODE, DECODE, DECODE]
    assert "repaired: 2 first rows without routing were dropped" in notes(trace)
    ids[4] = 0
    assert "row 4 has no expert in any layer, but rows before it have" in refused(
        routed(ids), origin=ZEROS
    )
    nothing = routed(np.full((3, 3, 2), -1), name="request 1")
    assert made(routed(), nothing).num_requests == 1


def test_a_cell_of_zeros_is_an_unfilled_buffer() -> None:
    ids = drawn(6)
    ids[3, 1] = 0
    message = "request 0: row 3, MoE layer 1 is 0 in every slot: the engine's buffer was not filled"
    assert message in refused(routed(ids), origin=ZEROS)


def test_warm_up_requests_are_dropped() -> None:
    ids = np.repeat(drawn(1), 5, axis=0)
    trace = made(routed(ids, name="warm-up"), routed(name="request 1"))
    assert (len(trace), trace.num_requests, trace.request_id[0]) == (6, 1, 0)
    assert "repaired: 5 warm-up rows were dropped (1 first requests" in notes(trace)
    assert "only a warm-up was recorded" in refused(routed(ids))
    later = made(routed(), routed(ids, name="request 1"))
    assert later.num_requests == 2  # a text of one word, perhaps
    assert len(made(routed(ids[:2]), routed(name="request 1"))) == 8  # chance, perhaps


def test_a_prompt_may_lack_the_last_layer() -> None:
    ids = drawn(6)
    ids[:1, 2] = -1
    trace = made(routed(ids))
    assert trace.meta.incomplete_layers == (2,)
    assert trace.expert_ids[0, 2].tolist() == [NO_EXPERT] * 2
    assert "prompt rows lack the last layer" in notes(trace)
    ids[:1, 1] = -1
    assert "row 0: expert_ids[layer 1] is 65535: the layer is missing" in refused(routed(ids))
    ids = drawn(6)
    ids[3, 2] = -1
    assert "row 3: expert_ids[layer 2] is 65535: the layer is missing" in refused(routed(ids))


# -- what no router gives ---------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(32,), (11, 13, 9, 10)])
def test_whole_rankings_are_refused_request_by_request(lengths: tuple[int, ...]) -> None:
    requests = []
    for number, tokens in enumerate(lengths):
        rng = np.random.default_rng(number)
        rankings = rng.random((3, tokens, 8)).argsort(axis=-1)  # read flat, they fill the ids
        flat = rankings.reshape(3, -1)[:, : tokens * 2].reshape(3, tokens, 2).transpose(1, 0, 2)
        ids = np.concatenate([flat, drawn(40, seed=number)])
        requests.append(routed(ids, prompt=tokens, name=f"request {number}"))
    assert "100% of the runs of 8 ids name every expert once" in refused(*requests)


def test_routing_that_looks_random_is_told() -> None:
    noise = np.random.default_rng(0).random((100, 3, 8)).argsort(axis=-1)[..., :2]
    assert "warning: adjacent tokens share" in notes(made(routed(noise)))
    assert "adjacent" not in notes(made(routed(drawn(100))))
    assert "adjacent" not in notes(made(routed(noise[:60])))  # too few to tell
