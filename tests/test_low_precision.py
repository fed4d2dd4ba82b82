"""Low-precision copies of experts by hand: keys, bytes, costs, and runs that use both copies.

In the runs a low copy has 40 bytes and takes 4 ns on the GPU; all else is as at the head of tests/hand.py.
Keys from 8 on are the low copies; an event row shows that of expert 1 as expert 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from sim.hardware import Hardware
from sim.policies.base import CachePolicy, PolicySet, RoutingPolicy
from sim.policies.classic import LFU, LRU, OnDemand
from sim.storage import Reading
from sim.types import ExpertKey, KeySpace, LayerRouting, Service, View
from sim.workload import Workload
from tests.doubles import Preloaded, ScriptedPlacement, ScriptedPrefetch, SplitTokens
from tests.hand import AMPLE, ByteCosts, FlatCurve, HandRun, play
from tests.round_hardware import BYTE_A_NS, costs, engine, shape
from tests.strategies import Token, make_trace

KEYS = KeySpace(2, 4, 2)


@dataclass(frozen=True)
class LowCosts(ByteCosts):
    """Low-precision copies, banks 2 and 3, have 40 bytes; kernels take a tenth of a nanosecond a byte."""

    grouped: bool = False

    @property
    def is_grouped(self) -> bool:
        return self.grouped

    def bytes_of(self, layer: int) -> int:
        return self.expert_bytes if layer < 2 else 40

    def expert_gpu_ns(self, layer: int, num_tokens: int, packed: bool) -> int:
        return self.bytes_of(layer) // 10 + self.gpu_token * num_tokens

    def experts_gpu_ns(self, layer: int, token_counts: Sequence[int], packed: bool) -> int:
        if self.grouped and token_counts:
            return self.expert_gpu_ns(layer, sum(token_counts), packed)
        return sum(self.expert_gpu_ns(layer, count, packed) for count in token_counts)


class ScriptedLow(RoutingPolicy):
    """Computes the (token, slot) pairs that the script names at each event in low precision."""

    def __init__(self, script: Mapping[int, Sequence[tuple[int, int]]]) -> None:
        self._script = script

    def rewrite(self, routing: LayerRouting, view: View) -> LayerRouting:
        ids = routing.topk_ids
        assert ids is not None
        low = np.zeros(ids.shape, dtype=bool)
        for token, slot in self._script.get(view.event, ()):
            low[token, slot] = True
        return routing.rewritten(view.keys, ids, routing.topk_weights, low)


def run(
    work: Workload | Sequence[Token],
    low: Mapping[int, Sequence[tuple[int, int]]],
    caches: Sequence[CachePolicy] | None = None,
    hardware: Hardware | None = None,
    charged: ByteCosts | None = None,
    parts: Mapping[str, Any] | None = None,
    **sizes: Any,
) -> HandRun:
    policies = PolicySet(caches or [LRU(), LRU()], routing=ScriptedLow(low), **(parts or {}))
    sizes = {"low_slots": 8, **sizes}
    return play(work, policies, charged or LowCosts(), hardware, **sizes)


# -- keys and costs --------------------------------------------------------------------------------


def test_low_copies_have_the_keys_after_all_others() -> None:
    assert (len(KEYS), KEYS.num_banks, len(KeySpace(2, 4))) == (16, 4, 8)
    assert (KEYS.low(5), KEYS.high(13), KEYS.high(5)) == (13, 5, 5)
    assert [KEYS.bank(key) for key in (0, 5, 8, 13)] == [0, 1, 2, 3]
    assert [KEYS.is_low(key) for key in (7, 8)] == [False, True]
    assert KEYS.unpack(13) == ExpertKey(layer=1, expert=1) == KEYS.unpack(5)
    assert list(KEYS.layer_keys(3)) == [12, 13, 14, 15]
    KEYS.check(15, "here")
    with pytest.raises(ValueError, match=r"here: key = 16: must be in \[0, 16\)"):
        KEYS.check(16, "here")
    with pytest.raises(ValueError, match=r"key = 8: must be in \[0, 8\)"):
        KeySpace(2, 4).check(8, "here")


def test_a_low_copy_costs_its_own_bytes() -> None:
    """600 weights of 2 bits are 150 bytes; setup 30, launches 3 * 7, CPU setup 100."""
    model = costs(shape(low_bits=2.0))
    assert [model.shape.expert_bytes(bank) for bank in range(4)] == [600, 600, 150, 150]
    assert [model.copy_ns(bank) for bank in range(4)] == [600, 600, 150, 150]
    assert (model.load_ns(1), model.load_ns(3)) == (630, 180)
    assert [model.expert_gpu_ns(bank, 1, True) for bank in (1, 3)] == [621, 171]
    assert [model.expert_cpu_ns(bank, 1) for bank in (0, 2)] == [700, 250]
    assert model.cpu_work(2, 1).num_bytes == 150
    with pytest.raises(ValueError, match=r"layer = 4: must be in \[0, 4\)"):
        model.load_ns(4)
    with pytest.raises(ValueError, match=r"layer = 2: must be in \[0, 2\)"):
        costs().load_ns(2)


def test_many_tokens_cost_a_low_copy_the_same_operations() -> None:
    """20 tokens of 1200 operations at ten a nanosecond: 2400 ns, more than either copy's bytes take."""
    model = costs(shape(low_bits=2.0))
    assert model.expert_gpu_ns(3, 20, True) == model.expert_gpu_ns(1, 20, True) == 21 + 2400
    assert model.expert_cpu_ns(3, 20) == model.expert_cpu_ns(1, 20) == 2400


def test_a_low_copy_is_read_at_the_rate_of_its_bits() -> None:
    """A quarter of the rate below 4 bits: 150 bytes take as long as 600 in full precision."""
    by_bits = ((2.0, BYTE_A_NS // 4), (8.0, BYTE_A_NS))
    model = costs(shape(low_bits=2.0), gpu_rate_by_bits=by_bits)
    assert model.expert_gpu_ns(2, 1, True) == 21 + 600 == model.expert_gpu_ns(0, 1, True)


def test_grouped_kernels_of_low_copies_read_their_own_bytes() -> None:
    model = costs(shape(low_bits=2.0), engine(kernels="grouped"))
    assert model.experts_gpu_ns(2, (1, 1), True) == model.experts_gpu_ns(0, (1, 1), True) - 900


# -- runs ------------------------------------------------------------------------------------------


def test_an_event_loads_one_expert_in_each_precision() -> None:
    done = run([[[0, 1], [0]]], {0: [(0, 1)]})
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",
        "5 105 H2D LOAD 0 0",
        "105 115 GPU EXPERT 0 0",
        "105 145 H2D LOAD 0 5",  # 40 bytes
        "145 149 GPU EXPERT 0 5",  # 4 ns
        "149 154 GPU DENSE 1 -1",
        "154 254 H2D LOAD 1 0",
        "254 264 GPU EXPERT 1 0",
        "264 267 GPU STEP -1 -1",
    ]
    assert (done.plans[0].loads, done.plans[0].recorded.experts) == ([0, 9], [0, 1])
    assert done.steps()[0]["demand_bytes"] == 100 + 40 + 100
    residency = done.offloader.residency
    assert list(residency.resident()) == [0, 4, 9]
    assert [residency.used_bytes(pool) for pool in (0, 1)] == [200, 40]


def test_each_precision_has_its_own_pool_and_hits_there() -> None:
    """One slot each; the second token finds expert 0 in full precision and the third in low."""
    tokens = [[[0], [0]], [[0], [0]], [[0], [0]]]
    low = {0: [(0, 0)], 2: [], 4: [(0, 0)]}
    done = run(tokens, low, slots=1, low_slots=1)
    first = [plan for plan in done.plans if plan.routing.layer == 0]
    assert [list(plan.routing.experts) for plan in first] == [[8], [0], [8]]
    assert [list(plan.resident) for plan in first] == [[], [], [8]]
    assert [list(plan.evicts) for plan in done.plans] == [[], [], [4], [0], [], []]


def test_low_copies_take_turns_in_staging_slots_and_the_cpu_reads_their_bytes() -> None:
    placement = ScriptedPlacement({10: Service.CPU})
    done = run(
        [[[0, 1, 2], [0]]],
        {0: [(0, 1), (0, 2)]},
        [OnDemand(), OnDemand()],
        parts={"placement": placement},
        staging_slots=1,
    )
    assert done.lines()[:6] == [
        "0 5 GPU DENSE 0 -1",
        "5 105 H2D BYPASS 0 0",
        "5 45 CPU EXPERT 0 6",  # 40 bytes
        "105 115 GPU EXPERT 0 0",
        "115 155 H2D BYPASS 0 5",  # when expert 0 has been computed
        "155 159 GPU EXPERT 0 5",
    ]


def test_experts_that_are_ready_together_run_as_a_set_of_kernels_for_each_precision() -> None:
    """A set takes a tenth of its experts' bytes once and 2 ns a token: 10 + 2 * 2, then 4 + 2."""
    charged = LowCosts(gpu_token=2, grouped=True)
    caches = [Preloaded([0, 1, 4]), Preloaded([10])]
    done = run([[[0, 1, 2], [0]]], {0: [(0, 2)]}, caches, charged=charged)
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",
        "5 12 GPU EXPERT 0 0",
        "12 19 GPU EXPERT 0 1",
        "19 25 GPU EXPERT 0 6",
        "25 30 GPU DENSE 1 -1",
        "30 42 GPU EXPERT 1 0",
        "42 45 GPU STEP -1 -1",
    ]


def test_a_batch_may_use_both_copies_of_an_expert() -> None:
    """Of three tokens of a prompt two compute expert 1 in full precision and one in low."""
    prompt = [[[1], [0]]] * 3
    work = Workload(make_trace([(prompt, [])], 4))
    caches = [Preloaded([1, 4]), Preloaded([9])]
    done = run(work, {0: [(1, 0)]}, caches, charged=LowCosts(gpu_token=1))
    (plan, _) = done.plans
    assert dict(zip(plan.routing.experts, plan.routing.token_counts, strict=True)) == {1: 2, 9: 1}
    assert done.lines()[1:3] == ["5 17 GPU EXPERT 0 1", "17 22 GPU EXPERT 0 5"]
    assert plan.routing.token_ids(1, is_low=False).tolist() == [0, 2]
    assert plan.routing.token_ids(1, is_low=True).tolist() == [1]
    assert plan.routing.token_ids(1).tolist() == [0, 1, 2]


def test_micro_batches_have_only_the_tokens_of_a_precision() -> None:
    """Groups are tokens (0, 2) and (1,): the first has the full copy's tokens, the other the low one's."""
    work = Workload(make_trace([([[[1], [0]]] * 3, [])], 4))
    caches = [Preloaded([1, 4]), Preloaded([9])]
    charged, parts = LowCosts(gpu_token=1, grouped=True), {"repack": SplitTokens()}
    done = run(work, {0: [(1, 0)]}, caches, charged=charged, parts=parts)
    assert done.lines()[1:3] == ["5 17 GPU EXPERT 0 1", "17 22 GPU EXPERT 0 5"]


def test_a_low_copy_is_prefetched_by_its_own_key() -> None:
    done = run(
        [[[0], [0]]],
        {1: [(0, 0)]},
        [Preloaded([0]), LRU()],
        parts={"prefetch": ScriptedPrefetch({0: [12]})},
    )
    assert done.lines()[1:4] == [
        "5 15 GPU EXPERT 0 0",
        "5 45 H2D PREFETCH 1 4",
        "15 20 GPU DENSE 1 -1",
    ]
    assert done.plans[1].late == [12]
    assert done.steps()[0]["prefetch_bytes"] == 40


def test_a_staged_low_copy_that_stays_takes_a_slot_of_its_own_pool() -> None:
    done = run([[[1], [0]]], {0: [(0, 0)]}, [LFU(), LFU()], slots=0, low_slots=1)
    assert list(done.offloader.residency.resident()) == [9]


def test_pageable_copies_stage_the_bytes_of_their_precision() -> None:
    hardware = Hardware(staging_ns=(70, 70, 28, 28))
    done = run([[[1, 0], [0]]], {0: [(0, 0)]}, [OnDemand(), OnDemand()], hardware)
    assert [line for line in done.lines() if "H2D" in line][:2] == [
        "5 45 H2D BYPASS 0 5",
        "45 145 H2D BYPASS 0 0",
    ]
    # The host stages 28 ns from 5 on, then 70 from 45 on; in layer 1 it stages 70 again.
    assert done.offloader.residency.layer_bytes == [100, 100, 40, 40]


def test_host_memory_above_storage_holds_either_copy_and_reads_its_bytes() -> None:
    """Of 1600 bytes of both copies a host memory of 300 holds a few; the low copy of expert 3 is read."""
    reading = Reading(FlatCurve(), block_bytes=1000, queue_depth=1, setup_ns=0)
    hardware = Hardware(memory=AMPLE, reading=reading, h2d_bytes_per_s=BYTE_A_NS)
    done = run([[[3], [0]]], {0: [(0, 0)]}, None, hardware, parts={"host": LRU()}, host_slots=3)
    assert done.offloader.host is not None
    assert done.lines()[:4] == [
        "0 5 GPU DENSE 0 -1",
        "5 45 STORAGE READ 0 7",
        "45 85 H2D LOAD 0 7",
        "85 89 GPU EXPERT 0 7",
    ]
    assert done.steps()[0]["read_bytes"] == 40
    assert done.offloader.host.residency.is_resident(11)
