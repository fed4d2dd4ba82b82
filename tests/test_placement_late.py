"""Expert deferral, and DAOP's placement and routing: 8 experts a layer, keys are ``layer * 8 + expert``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sim.policies.daop import DAOPPlacement, DAOPRouting
from sim.policies.deferral import ExpertDeferral
from sim.types import NO_EXPERT, ExpertWork, LayerRouting, Phase, Service, View
from tests.placing import recorded, services, view_of
from tests.strategies import ConstantCosts

LOAD, BYPASS, CPU, DEFER = Service.LOAD, Service.BYPASS, Service.CPU, Service.DEFER


def ids_of(*tokens: list[int], layers: int = 8) -> NDArray[np.uint16]:
    """Return choices that are the same in every layer, [num_tokens, layers, top_k]."""
    return np.repeat(np.array(tokens, dtype=np.uint16)[:, None], layers, axis=1)


def place(policy: ExpertDeferral, routing: LayerRouting, tokens: int = 1) -> dict[int, Service]:
    """Return the services of an event of which nothing is on the GPU, by expert."""
    view = view_of(tokens=tokens)
    view.routing, view.layer = routing, routing.layer
    work = [ExpertWork(*pair) for pair in zip(routing.experts, routing.token_counts, strict=True)]
    found = policy.place(work, view)
    return {item.key % 8: service for item, service in zip(work, found, strict=True)}


# -- deferral --------------------------------------------------------------------------------------


def test_the_lightest_experts_come_late() -> None:
    weights = np.array([[[0.1, 0.4, 0.2, 0.3]]]).repeat(8, axis=1)
    routing = recorded(2, expert_ids=ids_of([5, 0, 7, 2]), expert_weights=weights)
    assert place(ExpertDeferral(2), routing) == {5: DEFER, 0: CPU, 7: DEFER, 2: CPU}
    assert place(ExpertDeferral(3), routing) == {5: DEFER, 0: CPU, 7: DEFER, 2: DEFER}
    assert set(place(ExpertDeferral(4), routing).values()) == {DEFER}
    assert set(place(ExpertDeferral(9), routing).values()) == {DEFER}


def test_without_weights_the_last_slots_come_late() -> None:
    routing = recorded(2, expert_ids=ids_of([5, 0, 7, 2]))
    assert place(ExpertDeferral(1), routing) == {5: CPU, 0: CPU, 7: CPU, 2: DEFER}


def test_an_expert_that_one_token_needs_now_is_late_for_none() -> None:
    # Heaviest of the first token: 1; of the second: 2. So only 3 and 4 may be late, though 2 is the
    # first token's lightest.
    weights = np.array([[0.6, 0.1, 0.3], [0.7, 0.2, 0.1]])[:, None].repeat(8, axis=1)
    routing = recorded(0, expert_ids=ids_of([1, 2, 3], [2, 3, 4]), expert_weights=weights)
    assert place(ExpertDeferral(2), routing, tokens=2) == {1: CPU, 2: CPU, 3: DEFER, 4: DEFER}
    assert place(ExpertDeferral(1), routing, tokens=2) == {1: CPU, 2: CPU, 3: CPU, 4: DEFER}


def test_long_prompts_are_streamed_instead() -> None:
    routing = recorded(0, expert_ids=ids_of(*[[1, 2]] * 5))
    assert set(place(ExpertDeferral(1, gpu_from_tokens=5), routing, 5).values()) == {BYPASS}
    assert set(place(ExpertDeferral(1, gpu_from_tokens=6), routing, 5).values()) == {CPU, DEFER}


def test_deferral_is_lossy_and_needs_something_to_defer() -> None:
    assert ExpertDeferral.lossy
    with pytest.raises(ValueError, match="num_deferred = 0: must be >= 1"):
        ExpertDeferral(0)
    with pytest.raises(ValueError, match="gpu_from_tokens = -1: must be >= 0"):
        ExpertDeferral(1, -1)


# -- DAOP's placement ------------------------------------------------------------------------------


def test_prompts_exchange_hot_for_cold_by_pairs() -> None:
    """Residents 0 (9 tokens), 1 (2), 2 (unused); missing 3 (1 token), 4 (20), 5 (9).

    By tokens: 4 against 2's 0, 5 against 1's 2, 3 against 0's 9. The last stays where it is: 1 token on the
    CPU is 40, a load 120.
    """
    view = view_of(
        ConstantCosts(cpu=40, load=100, gpu=20), Phase.PREFILL, tokens=20, resident=[0, 1, 2]
    )
    counts = {0: 9, 1: 2, 3: 1, 4: 20, 5: 9}
    assert services(DAOPPlacement(), view, counts) == [CPU, LOAD, LOAD]
    # 9 tokens must exceed factor * 2.
    assert services(DAOPPlacement(factor=4.5), view, counts) == [CPU, LOAD, BYPASS]


def test_no_more_are_exchanged_than_make_way() -> None:
    costs = ConstantCosts(cpu=1, load=100)
    view = view_of(costs, Phase.PREFILL, tokens=9, resident=[5, 6, 7])
    found = services(DAOPPlacement(), view, {0: 3, 1: 2, 2: 1, 3: 1, 4: 1})
    assert found == [LOAD, LOAD, LOAD, CPU, CPU]  # three to make way
    view = view_of(costs, Phase.PREFILL, tokens=9)
    assert services(DAOPPlacement(), view, {0: 3, 1: 2}) == [CPU, CPU]  # nobody to make way


def test_daop_prompts_by_its_own_figures() -> None:
    policy = DAOPPlacement(
        cpu_token_ns=5, load_ns=40
    )  # A100, Mixtral: 8 tokens cost 40 on either side
    view = view_of(phase=Phase.PREFILL, tokens=20)
    assert services(policy, view, {0: 7, 1: 8}) == [CPU, BYPASS]


@pytest.mark.parametrize(
    ("ahead", "layer", "service"), [(True, 4, CPU), (True, 5, DEFER), (False, 5, CPU)]
)
def test_daop_decodes_misses_on_the_cpu(ahead: bool, layer: int, service: Service) -> None:
    policy = DAOPPlacement(ahead=ahead)
    assert services(policy, view_of(resident=[layer * 8]), {layer * 8: 1, layer * 8 + 1: 1}) == [
        service
    ]


# -- DAOP's routing --------------------------------------------------------------------------------

POPULARITY = np.tile(np.array([1.0, 2, 3, 4, 5, 6, 7, 8]), (8, 1))


def rewritten(policy: DAOPRouting, view: View, routing: LayerRouting) -> list[int]:
    """Return the experts computed for the first token, by slot."""
    view.layer, view.event = routing.layer, view.event + 1
    made = policy.rewrite(routing, view)
    assert made.topk_ids is not None
    first: list[int] = made.topk_ids[0].tolist()
    return first


def walk(policy: DAOPRouting, view: View, **columns: Any) -> list[list[int]]:
    """Return what layers 0 to 7 compute."""
    return [rewritten(policy, view, recorded(layer, **columns)) for layer in range(8)]


def test_the_gate_before_chooses_from_the_first_layer_on() -> None:
    early = ids_of([1, 3])
    early[:, 5] = [6, 1]  # what layer 5 says of layer 6
    policy, view = DAOPRouting(POPULARITY, first_layer=5), view_of(resident=range(64))
    found = walk(policy, view, expert_ids=ids_of([0, 1]), next_gate_ids=early)
    # A pick that the router made too keeps its slot: of (1, 3) 1 stays in the second.
    assert found == [[0, 1]] * 5 + [[3, 1], [6, 1], [3, 1]]


def test_of_two_on_the_cpu_the_second_gives_way_to_the_best_on_the_gpu() -> None:
    columns: dict[str, Any] = {"expert_ids": ids_of([0, 1]), "next_gate_ids": ids_of([0, 1])}
    here = [layer * 8 + expert for layer in range(8) for expert in (2, 4)]
    policy = DAOPRouting(POPULARITY, first_layer=7)
    assert walk(policy, view_of(resident=here), **columns)[7] == [0, 4]  # 4 is more popular than 2
    policy = DAOPRouting(POPULARITY, first_layer=7)
    assert walk(policy, view_of(resident=[*here, 57]), **columns)[7] == [0, 1]  # 1 is on the GPU
    logits = np.tile(np.array([5.0, 4, 3, 0, 2, 0, 0, 0], dtype=np.float16), (1, 8, 1))
    policy = DAOPRouting(POPULARITY, first_layer=7)
    assert walk(policy, view_of(resident=here), **columns, router_logits=logits)[7] == [0, 2]
    policy = DAOPRouting(POPULARITY, first_layer=7)
    assert walk(policy, view_of(), **columns)[7] == [0, 1]  # nobody is on the GPU


def last_weights(**columns: Any) -> list[float]:
    """Return the weights of layer 7, whose experts 2 and 4 are on the GPU; 0 and 1 are picked."""
    policy, view = DAOPRouting(POPULARITY, first_layer=7), view_of(resident=[58, 60])
    weights = np.array([[[0.7, 0.2]]]).repeat(8, axis=1)
    base: dict[str, Any] = {"expert_ids": ids_of([0, 1]), "next_gate_ids": ids_of([0, 1])}
    base |= {"expert_weights": weights}
    made = None
    for layer in range(8):
        view.layer = layer
        made = policy.rewrite(recorded(layer, **base, **columns), view)
    assert made is not None
    assert made.topk_weights is not None
    found: list[float] = made.topk_weights[0].tolist()
    return found


def test_weights_keep_their_sum() -> None:
    assert last_weights() == pytest.approx([0.7, 0.2])  # by rank
    logits = np.tile(np.log([6.0, 4, 3, 1, 2, 1, 1, 1]), (1, 8, 1))
    assert last_weights(router_logits=logits) == pytest.approx([0.6, 0.3])  # 6 : 3 of 0.9


def test_prompts_keep_their_routing_and_a_new_step_forgets_the_last_layer() -> None:
    columns: dict[str, Any] = {"expert_ids": ids_of([0, 1]), "next_gate_ids": ids_of([2, 3])}
    policy, prompt = DAOPRouting(POPULARITY, first_layer=1), view_of(phase=Phase.PREFILL)
    routing = recorded(3, **columns)
    assert policy.rewrite(routing, prompt) is routing
    view = view_of(resident=range(64))
    assert walk(policy, view, **columns) == [[0, 1]] + [[2, 3]] * 7
    assert rewritten(policy, view, recorded(0, **columns)) == [0, 1]


def test_unused_slots_of_the_gate_before_are_dropped() -> None:
    early = ids_of([2, NO_EXPERT])
    policy, view = DAOPRouting(POPULARITY, first_layer=1), view_of(resident=range(64))
    assert walk(policy, view, expert_ids=ids_of([0, 1]), next_gate_ids=early)[1] == [2, NO_EXPERT]


def test_daop_is_lossy_and_asks_for_what_it_needs() -> None:
    assert DAOPRouting.lossy
    assert DAOPPlacement.lossy
    assert DAOPRouting.needs == ("next_gate_ids",)
    with pytest.raises(ValueError, match="first_layer = -1: must be >= 0"):
        DAOPRouting(POPULARITY, -1)
    with pytest.raises(ValueError, match=r"factor = 0.9: must be >= 1"):
        DAOPPlacement(0.9)
