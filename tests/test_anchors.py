"""Figures that others published about public traces, met by the simulator's own parts."""

from __future__ import annotations

import numpy as np
import pytest

from sim.lockstep import run_lockstep
from sim.metrics import summarise
from sim.offloader import Offloader
from sim.policies.base import CachePolicy, PolicySet
from sim.policies.classic import LFU, LRU
from sim.policies.oracle import Belady, NextUse
from sim.residency import Residency
from sim.types import KeySpace, LayerPlan
from sim.workload import Workload
from tests.public_data import routing_file
from tests.strategies import ConstantCosts
from traces.importers.experts_npz import read_experts_npz
from traces.importers.route_csv import read_route_csv, read_route_residency
from traces.schema import Trace

pytestmark = pytest.mark.public_data

MIB = 2**20

# A replay written apart: first 2000 tokens, every 4th layer, batch 1; hit rates of LRU, LFU, Belady.
PUBLISHED = {
    ("code", 8): (0.476, 0.430, 0.633),
    ("code", 16): (0.648, 0.604, 0.795),
    ("code", 32): (0.824, 0.774, 0.913),
    ("code", 64): (0.955, 0.935, 0.978),
    ("math", 8): (0.386, 0.325, 0.566),
    ("math", 16): (0.546, 0.495, 0.730),
    ("math", 32): (0.749, 0.695, 0.868),
    ("math", 64): (0.924, 0.917, 0.967),
}


def _every_fourth_layer(name: str) -> Workload:
    """The published replay runs straight through the file's contexts: one request."""
    trace = read_experts_npz(routing_file(f"qwen3-30b-a3b_{name}.npz"))
    ids = np.ascontiguousarray(trace.expert_ids[:2000, ::4])
    return Workload(_one_request(trace, ids))


def _one_request(trace: Trace, ids: np.ndarray) -> Trace:
    from dataclasses import replace

    rows, layers, _ = ids.shape
    meta = replace(trace.meta, num_layers=layers, layer_indices=tuple(range(layers)))
    return Trace(
        meta=meta,
        request_id=np.zeros(rows, np.int32),
        position=np.arange(rows, dtype=np.int32),
        phase=(np.arange(rows) > 0).astype(np.uint8),
        step=np.arange(rows, dtype=np.int32),
        expert_ids=ids,
    )


def _hit_rate(workload: Workload, slots: int, caches: list[CachePolicy]) -> float:
    layers = workload.num_layers
    keys = KeySpace(layers, workload.num_experts)
    residency = Residency(keys, [1] * layers, range(layers), [slots] * layers)
    offloader = Offloader(residency, PolicySet(caches), ConstantCosts(), staging_slots=10)
    return float(summarise(run_lockstep(workload, offloader).rows, [])["hit_rate"])


@pytest.mark.parametrize("name", ["code", "math"])
def test_hit_rates_by_cache_size(name: str) -> None:
    workload = _every_fourth_layer(name)
    layers = range(workload.num_layers)
    future = NextUse(r for step in workload.steps() for r in workload.routings(step))
    for slots in (8, 16, 32, 64):
        found = (
            _hit_rate(workload, slots, [LRU() for _ in layers]),
            _hit_rate(workload, slots, [LFU() for _ in layers]),
            _hit_rate(workload, slots, [Belady(future, bypass=True) for _ in layers]),
        )
        assert found == pytest.approx(PUBLISHED[name, slots], abs=0.005), (name, slots)


def _replay_phone(budget_bytes: int) -> tuple[float, np.ndarray]:
    """Replay the phone engine's run; return the hit rate and, for each decode row, whether it hit."""
    trace = read_route_csv(routing_file("qwen3-30b-a3b_q4km_k6.route.csv"))
    sizes = trace.meta.expert_bytes
    assert sizes is not None
    keys = KeySpace(trace.meta.num_layers, trace.meta.num_experts)
    residency = Residency(keys, sizes, [0] * keys.num_layers, [budget_bytes])
    offloader = Offloader(residency, PolicySet([LRU()]), ConstantCosts(), staging_slots=10)
    hits: list[bool] = []

    def note(plan: LayerPlan) -> None:
        if offloader.view.step.phase == 1:
            found = set(plan.resident)
            hits.extend(key in found for key in plan.routing.experts)

    counter = run_lockstep(Workload(trace), offloader, note)
    return float(summarise(counter.rows, [])["hit_rate"]), np.array(hits)


def test_the_phone_engines_lru_is_reproduced() -> None:
    rate, hits = _replay_phone(4000 * MIB)
    assert round(100 * rate, 1) == 74.9
    recorded = read_route_residency(routing_file("qwen3-30b-a3b_q4km_k6.route.csv"))
    decode = recorded[recorded["phase"] == 1]
    order = np.lexsort((decode["slot"], decode["layer"], decode["step"]))
    agree = int((decode["resident"][order].astype(bool) == hits).sum())
    assert len(hits) == 36864
    assert agree >= 36850


def test_a_global_lru_below_one_tokens_demand_never_hits() -> None:
    rate, hits = _replay_phone(500 * MIB)
    assert not hits.any()
    assert rate == 0.0
