"""The reuse transform, and published figures of lossy routing on public traces."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from sim.ledger import LEDGER_COLUMNS
from sim.lockstep import run_lockstep
from sim.metrics import Totals
from sim.offloader import Offloader
from sim.policies.base import PolicySet
from sim.policies.classic import LRU
from sim.policies.drop import ColdDrop
from sim.policies.reuse import ReuseTransform
from sim.residency import Residency
from sim.tables import Table
from sim.types import ABSENT, NO_EXPERT, RESIDENT, KeySpace, LayerPlan, Phase, StepInfo, View
from sim.workload import Workload
from tests.public_data import routing_file
from tests.strategies import ConstantCosts
from tests.test_anchors import MIB, _one_request
from tests.tokens import rewritten, routing_of, view_of
from traces.importers.experts_npz import read_experts_npz
from traces.importers.route_csv import read_route_csv, read_route_residency


class TestReuse:
    def test_light_picks_give_way_until_the_running_mean_is_there(self) -> None:
        policy, view = ReuseTransform(target_eor=0.5), view_of(8)
        tokens = [
            ([0, 1], [0, 1]),  # nobody came before
            ([2, 3], [2, 0]),  # 0 weighed .7, 1 weighed .3
            ([2, 4], [2, 4]),  # (.5 + .5) / 2 is enough
            ([5, 6], [5, 2]),  # (1 + .5) / 3
            ([2, 5], [2, 5]),  # (1.5 + 1) / 4
            ([6, 7], [6, 7]),  # 2.5 / 5: a debt paid in advance
            ([0, 1], [0, 6]),
        ]
        for recorded, wanted in tokens:
            ids, weights = rewritten(policy, routing_of([recorded], [[0.7, 0.3]]), view)
            assert ids == [wanted], recorded
            assert weights == [pytest.approx([0.7, 0.3])]
        assert policy.eor()[1] == pytest.approx(3.0 / 6)
        # As recorded: 2 in the second and third tokens, 5 in the fourth and fifth.
        assert policy.eor()[0] == pytest.approx((0.5 + 0.5) / 6)

    def test_scores_rank_what_is_reused_and_give_its_weight(self) -> None:
        policy, view = ReuseTransform(target_eor=0.5), view_of(4)
        rewritten(policy, routing_of([[0, 1]], [[0.7, 0.3]], [[3.0, 2.0, 0.0, 0.0]]), view)
        token = routing_of([[2, 3]], [[0.75, 0.25]], [[0.0, 1.0, 4.0, 2.9]])
        ids, weights = rewritten(policy, token, view)
        assert ids == [[2, 1]]
        light = 0.75 * np.exp(1.0 - 4.0)
        assert weights == [pytest.approx([0.75 / (0.75 + light), light / (0.75 + light)])]

    def test_requests_do_not_mix(self) -> None:
        policy = ReuseTransform(target_eor=0.5)
        both = view_of(8, [], 2, (7, 9))
        rewritten(policy, routing_of([[0, 1], [2, 3]]), both)
        assert rewritten(policy, routing_of([[4, 5], [6, 7]]), both)[0] == [[4, 0], [6, 2]]
        assert rewritten(policy, routing_of([[1, 3]]), view_of(8, [], 1, (9,)))[0] == [[1, 6]]

    def test_a_gain_is_added_to_what_is_recorded(self) -> None:
        policy, view = ReuseTransform(delta_eor=0.0), view_of(8)
        for ids in ([0, 1], [1, 2], [3, 4], [4, 3], [5, 6]):
            assert rewritten(policy, routing_of([ids]), view)[0] == [ids]

    @pytest.mark.parametrize("name", ["delta_eor", "target_eor"])
    def test_parameters_are_checked(self, name: str) -> None:
        with pytest.raises(ValueError, match=rf"{name} = 1.5: must be in \[0, 1\]"):
            ReuseTransform(**{name: 1.5})


def _overlap(tokens: list[np.ndarray]) -> float:
    reused = [len({*a.tolist()} & {*b.tolist()}) / len(a) for a, b in pairwise(tokens)]
    return float(np.mean(reused))


@pytest.mark.public_data
@pytest.mark.parametrize("gain", [0.072, 0.2])
def test_the_transform_raises_the_overlap_of_real_routing_by_what_is_asked(gain: float) -> None:
    trace = read_experts_npz(routing_file("qwen3-30b-a3b_math.npz"))
    trace = _one_request(trace, np.ascontiguousarray(trace.expert_ids[:1000, 3::16]))
    keys = KeySpace(trace.meta.num_layers, trace.meta.num_experts)
    policy = ReuseTransform(gain)
    made: list[list[np.ndarray]] = [[] for _ in range(keys.num_layers)]

    def note(plan: LayerPlan) -> None:
        assert plan.routing.topk_ids is not None
        made[plan.routing.layer].append(plan.routing.topk_ids[-1])

    policies = PolicySet([LRU()], routing=policy)
    residency = Residency(keys, [1] * keys.num_layers, [0] * keys.num_layers, [48])
    ledger = Table(LEDGER_COLUMNS)
    run_lockstep(
        Workload(trace), Offloader(residency, policies, ConstantCosts(), 10), note, ledger=ledger
    )
    recorded = [_overlap(list(trace.expert_ids[1:, layer])) for layer in range(keys.num_layers)]
    raised = [_overlap(layer[1:]) for layer in made]
    assert np.mean(raised) - np.mean(recorded) == pytest.approx(gain, abs=0.005)
    assert policy.eor() == pytest.approx((np.mean(recorded), np.mean(raised)))
    totals = Totals()
    for block in ledger.blocks():
        totals.add_ledger(block)
    changed = totals.summary()["decode_substituted_slot_rate"]
    # A slot changed is a slot reused; but the token after might have reused what was there.
    assert gain - 0.005 <= changed <= 1.25 * gain


# Helldez/BigMoeOnEdge docs/expert-dropping.md: a replay of its Qwen3 trace at k = 6, over the residency
# that was recorded. F -> reads avoided, router weight discarded.
PUBLISHED = {1.0: (0.66, 0.095), 0.75: (0.37, 0.044)}


@pytest.mark.public_data
@pytest.mark.parametrize("fraction", PUBLISHED)
def test_cold_drop_avoids_the_reads_that_its_authors_say(fraction: float) -> None:
    path = routing_file("qwen3-30b-a3b_q4km_k6.route.csv")
    workload = Workload(read_route_csv(path))
    flags = read_route_residency(path)
    flags = flags[flags["phase"] == 1]
    flags = flags[np.lexsort((flags["slot"], flags["layer"], flags["step"]))]
    here = iter(flags["resident"].astype(bool).reshape(-1, 6).tolist())
    keys = KeySpace(workload.num_layers, workload.num_experts)
    residency = Residency(keys, [1] * keys.num_layers, [0] * keys.num_layers, [10**6])
    view = View(keys, ConstantCosts(), StepInfo(0, Phase.DECODE, 1), residency)
    policy, cold, avoided, mass, lost = ColdDrop(fraction), 0, 0, 0.0, 0.0
    for step in workload.steps():
        if step.info.phase != Phase.DECODE:
            continue
        view.step = step.info
        for routing in workload.routings(step):
            residents = next(here)
            for key, resident in zip(routing.experts, residents, strict=True):
                residency.state[key] = RESIDENT if resident else ABSENT
            view.layer = routing.layer
            ids, weights = policy.rewrite(routing, view).topk_ids, routing.topk_weights
            assert ids is not None
            assert weights is not None
            gone = ids[0] == NO_EXPERT
            cold += 6 - sum(residents)
            avoided += int(gone.sum())
            mass += float(weights[0].sum())
            lost += float(weights[0][gone].sum())
    assert (avoided / cold, lost / mass) == pytest.approx(PUBLISHED[fraction], abs=0.005)


@pytest.mark.public_data
def test_cold_drop_avoids_more_where_the_cache_feels_it() -> None:
    """As its authors saw on the device: dropping changes what is resident, and then there is more to drop."""
    trace = read_route_csv(routing_file("qwen3-30b-a3b_q4km_k6.route.csv"))
    keys = KeySpace(trace.meta.num_layers, trace.meta.num_experts)
    sizes = trace.meta.expert_bytes
    assert sizes is not None
    loads = []
    for routing in (None, ColdDrop(1.0)):
        residency = Residency(keys, sizes, [0] * keys.num_layers, [4000 * MIB])
        policies = PolicySet([LRU()], routing=routing)
        offloader = Offloader(residency, policies, ConstantCosts(), staging_slots=10)
        counter = run_lockstep(Workload(trace), offloader)
        names = counter.table.columns
        decode = [row for row in counter.rows if row[names.index("phase")] == Phase.DECODE]
        loads.append(sum(row[names.index("loads")] for row in decode))
    assert 1.0 - loads[1] / loads[0] == pytest.approx(0.729, abs=0.005)
