"""What stage caching over fixed windows does on public traces, against the project's own earlier replay.

Qwen3-30B-A3B, batch 1, the first 2048 tokens, every 6th layer, 16 slots a layer,
"stages" of 128 tokens. Which 8 of 48 layers, and how its LRU breaks ties, that replay does not say: with
every 6th layer all cosines agree to three digits, and LRU comes out up to .005 lower.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from numpy.typing import NDArray

from sim.coherence import histogram, likeness, windows
from sim.lockstep import run_lockstep
from sim.metrics import summarise
from sim.offloader import Offloader
from sim.policies.base import CachePolicy, PolicySet
from sim.policies.classic import LRU, Static
from sim.policies.detectors import FixedStageDetector
from sim.policies.stage import StageCache, StageOracle
from sim.residency import Residency
from sim.stage_replay import stage_uses
from sim.types import KeySpace
from sim.workload import Workload
from tests.public_data import routing_file
from tests.strategies import ConstantCosts
from tests.test_anchors import _one_request
from traces.importers.experts_npz import read_experts_npz

pytestmark = pytest.mark.public_data

TOKENS, EXPERTS, SLOTS, WINDOW = 2048, 128, 16, 128

# hit rate, inserts per layer and token
PUBLISHED = {
    "math": {
        "lru": (0.561, 3.51),
        "static": (0.495, 0.0),
        "stage": (0.485, 0.04),
        "average": (0.494, 0.02),
        "oracle": (0.571, 0.04),
    },
    "code": {
        "lru": (0.660, 2.72),
        "static": (0.600, 0.0),
        "stage": (0.608, 0.04),
        "average": (0.615, 0.02),
        "oracle": (0.690, 0.03),
    },
}
COHERENCE = {
    "math": {64: (0.789, 0.572), 128: (0.868, 0.651), 256: (0.906, 0.680)},
    "code": {64: (0.886, 0.693), 128: (0.888, 0.706), 256: (0.906, 0.722)},
}


def _layers(name: str) -> tuple[Workload, NDArray[np.uint16], NDArray[np.float64]]:
    """The replayed part of every 6th layer, its choices, and the uses of each expert later on."""
    trace = read_experts_npz(routing_file(f"qwen3-30b-a3b_{name}.npz"))
    ids = np.ascontiguousarray(trace.expert_ids[:, ::6])
    later = histogram(ids[TOKENS:], EXPERTS)
    return Workload(_one_request(trace, ids[:TOKENS])), ids[:TOKENS], later


def _replay(work: Workload, make: Callable[[], CachePolicy]) -> tuple[float, float]:
    """Hit rate and inserts per layer and token, every migration done at once."""
    layers = work.num_layers
    keys = KeySpace(layers, EXPERTS)
    residency = Residency(keys, [1] * layers, range(layers), [SLOTS] * layers)
    policies = PolicySet([make() for _ in range(layers)], stages=FixedStageDetector(WINDOW))
    offloader = Offloader(residency, policies, ConstantCosts(), 10, prefetch_limit=SLOTS * layers)
    row = summarise(run_lockstep(work, offloader).rows, [])
    inserts = row["loads"] + row["prefetches"] + row["admissions"]
    return float(row["hit_rate"]), inserts / (TOKENS * layers)


def _as_popularity(uses: Mapping[int, int], layers: int) -> NDArray[np.float64]:
    found = np.zeros(layers * EXPERTS)
    found[list(uses)] = list(uses.values())
    return found.reshape(layers, EXPERTS)


@pytest.mark.parametrize("name", ["math", "code"])
def test_stage_caching_loses_hits_to_lru_and_moves_far_fewer_experts(name: str) -> None:
    work, _, later = _layers(name)
    uses = stage_uses(FixedStageDetector(WINDOW), [work])
    assert len(uses) == TOKENS // WINDOW
    first = _as_popularity(uses[0], work.num_layers)
    makers: dict[str, Callable[[], CachePolicy]] = {
        "lru": LRU,
        "static": lambda: Static(later),
        "stage": lambda: StageCache(later, memory=0.0, hysteresis=1.0),
        "average": lambda: StageCache(later, memory=0.5, hysteresis=1.05),
        # The published oracle knows the first stage too; ours begins with the calibrated set.
        "oracle": lambda: StageOracle(first, uses, hysteresis=1.0),
    }
    found = {kind: _replay(work, make) for kind, make in makers.items()}
    for kind, (hit_rate, inserts) in PUBLISHED[name].items():
        # What "later text" the static set was calibrated on is not said: here all of it.
        tolerance = 0.012 if kind == "static" else 0.005
        assert found[kind][0] == pytest.approx(hit_rate, abs=tolerance), kind
        assert found[kind][1] == pytest.approx(inserts, rel=0.02, abs=0.005), kind
    assert found["lru"][1] / found["stage"][1] > 70
    assert found["stage"][0] < found["average"][0] < found["lru"][0]
    assert found["lru"][0] < found["oracle"][0]


@pytest.mark.parametrize("name", ["math", "code"])
def test_our_oracle_begins_with_the_calibrated_set(name: str) -> None:
    work, _, later = _layers(name)
    uses = stage_uses(FixedStageDetector(WINDOW), [work])
    hit_rate, _ = _replay(work, lambda: StageOracle(later, uses))
    assert hit_rate == pytest.approx({"math": 0.565, "code": 0.678}[name], abs=0.001)
    assert hit_rate > _replay(work, lambda: StageCache(later))[0] + 0.05


@pytest.mark.parametrize("name", ["math", "code"])
@pytest.mark.parametrize("length", [64, 128, 256])
def test_coherence_of_adjacent_windows(name: str, length: int) -> None:
    _, ids, _ = _layers(name)
    found = likeness([windows(ids, length)], EXPERTS, top=16)
    assert found.num_pairs == TOKENS // length - 1
    assert found.cosine == pytest.approx(COHERENCE[name][length][0], abs=0.0006)
    assert found.overlap == pytest.approx(COHERENCE[name][length][1], abs=0.0025)  # ties
