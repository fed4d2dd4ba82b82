"""Several GPUs, and engines that overlap less, by hand.

The figures that hold unless a test says otherwise stand at the head of tests/hand.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from sim.hardware import Hardware
from sim.policies.base import PolicySet
from sim.policies.classic import LFU, OnDemand
from sim.types import Service
from tests.doubles import Preloaded, ScriptedPlacement, ScriptedPrefetch
from tests.hand import AMPLE, BYTE_A_NS, ByteCosts, HandRun, play
from tests.strategies import Token, only

BY_EXPERT = Hardware(gpu_of_key=(0, 1) * 4, home_of_layer=(0, 0), hop_ns=7)
"""Experts 0 and 2 on GPU 0, where attention is, 1 and 3 on GPU 1."""
BY_LAYER = Hardware(gpu_of_key=(0,) * 4 + (1,) * 4, home_of_layer=(0, 1), hop_ns=7)
"""Layer 0 on GPU 0, layer 1 on GPU 1."""


def sharing(hardware: Hardware, **capacities: int) -> Hardware:
    """Return the same with links of a byte a ns and what they share."""
    memory = replace(AMPLE, **capacities)  # type: ignore[arg-type]
    return replace(hardware, memory=memory, h2d_bytes_per_s=BYTE_A_NS, d2h_bytes_per_s=BYTE_A_NS)


def on_two(
    token: Token,
    held: Sequence[int],
    hardware: Hardware,
    costs: ByteCosts | None = None,
    **parts: Any,
) -> HandRun:
    """Run one token on two GPUs with a pool each, ``held`` in their memory."""
    policies = PolicySet([Preloaded(held), Preloaded(held)], **parts)
    return play([token], policies, costs, hardware, pool_of_key=hardware.gpu_of_key)


# -- two GPUs -------------------------------------------------------------------------------------


def test_gpus_that_share_a_layer_work_at_once_one_hop_away() -> None:
    done = on_two([[0, 1, 3], [2]], range(8), BY_EXPERT)
    assert done.unit_lines() == [
        "0 5 GPU0 DENSE 0 -1",
        "5 15 GPU0 EXPERT 0 0",
        "12 22 GPU1 EXPERT 0 1",  # activations come 7 later
        "22 32 GPU1 EXPERT 0 3",
        "39 44 GPU0 DENSE 1 -1",  # and results go 7 back
        "44 54 GPU0 EXPERT 1 2",  # GPU 1 has nothing to do, so no hop
        "54 57 GPU0 STEP -1 -1",
    ]
    assert done.stalls() == {"link": 7 + 7}
    assert done.steps()[0]["gpu_busy_ns"] == 57 - 14  # of GPU 1 in layer 0, the last to end
    assert done.tables.busy_ns["gpu"] == 57 - 14 + 10


def test_each_gpu_copies_over_its_own_link() -> None:
    done = on_two([[0, 1], [1]], [], BY_EXPERT)
    assert done.unit_lines() == [
        "0 5 GPU0 DENSE 0 -1",
        "5 105 H2D0 LOAD 0 0",
        "5 105 H2D1 LOAD 0 1",
        "105 115 GPU0 EXPERT 0 0",
        "105 115 GPU1 EXPERT 0 1",
        "122 127 GPU0 DENSE 1 -1",  # 115 + 7
        "127 227 H2D1 LOAD 1 1",
        "227 237 GPU1 EXPERT 1 1",
        "244 247 GPU0 STEP -1 -1",  # 237 + 7
    ]
    assert done.stalls() == {"link": (100 + 7) * 2}


def test_a_switch_gives_each_of_two_copies_half() -> None:
    done = on_two([[0, 1], [0]], [], sharing(BY_EXPERT, switch_bytes_per_s=BYTE_A_NS))
    assert done.unit_lines() == [
        "0 5 GPU0 DENSE 0 -1",
        "5 205 H2D0 LOAD 0 0",  # 0.5 bytes a ns
        "5 205 H2D1 LOAD 0 1",
        "205 215 GPU0 EXPERT 0 0",
        "205 215 GPU1 EXPERT 0 1",
        "222 227 GPU0 DENSE 1 -1",
        "227 327 H2D0 LOAD 1 0",  # alone: 1 byte a ns
        "327 337 GPU0 EXPERT 1 0",
        "337 340 GPU0 STEP -1 -1",
    ]
    assert done.stalls() == {"link": (222 - 5 - 10) + 100}


def test_each_gpu_has_its_own_staging_slots() -> None:
    policies = PolicySet([OnDemand(), OnDemand()])
    costs, pools = ByteCosts(gpu=30), BY_EXPERT.gpu_of_key
    token: Token = [[0, 1, 2], [0]]
    done = play([token], policies, costs, BY_EXPERT, pool_of_key=pools, staging_slots=1)
    assert done.unit_lines() == [
        "0 5 GPU0 DENSE 0 -1",
        "5 105 H2D0 BYPASS 0 0",
        "5 105 H2D1 BYPASS 0 1",  # into the slot of GPU 1
        "105 135 GPU0 EXPERT 0 0",
        "105 135 GPU1 EXPERT 0 1",
        "135 235 H2D0 BYPASS 0 2",  # waits for 0
        "235 265 GPU0 EXPERT 0 2",
        "265 270 GPU0 DENSE 1 -1",
        "270 370 H2D0 BYPASS 1 0",
        "370 400 GPU0 EXPERT 1 0",
        "400 403 GPU0 STEP -1 -1",
    ]
    assert done.stalls() == {"link": 100 + 100 + 100}


def test_layers_on_two_gpus_hop_between_them() -> None:
    done = on_two([[0], [0]], [0], BY_LAYER)
    assert done.unit_lines() == [
        "0 5 GPU0 DENSE 0 -1",
        "5 15 GPU0 EXPERT 0 0",
        "15 22 HANDOVER1 HOP 1 -1",
        "22 27 GPU1 DENSE 1 -1",
        "27 127 H2D1 LOAD 1 0",
        "127 137 GPU1 EXPERT 1 0",
        "137 144 HANDOVER0 HOP -1 -1",  # back to where the head is
        "144 147 GPU0 STEP -1 -1",
    ]
    assert done.stalls() == {"link": 7 + 7 + 100}


def test_a_prefetch_for_the_other_gpu_is_copied_beside_a_load() -> None:
    done = on_two([[1], [0]], [], BY_LAYER, prefetch=ScriptedPrefetch({0: [4]}))
    assert done.unit_lines() == [
        "0 5 GPU0 DENSE 0 -1",
        "5 105 H2D0 LOAD 0 1",
        "5 105 H2D1 PREFETCH 1 0",
        "105 115 GPU0 EXPERT 0 1",
        "115 122 HANDOVER1 HOP 1 -1",
        "122 127 GPU1 DENSE 1 -1",
        "127 137 GPU1 EXPERT 1 0",
        "137 144 HANDOVER0 HOP -1 -1",
        "144 147 GPU0 STEP -1 -1",
    ]
    assert (done.steps()[0]["hits"], done.stalls()) == (1, {"link": 7 + 100 + 7})


def test_activations_go_over_the_link_of_the_layers_own_gpu() -> None:
    placement = ScriptedPlacement({5: Service.CPU})
    hardware = sharing(BY_LAYER, duplex_bytes_per_s=3 * BYTE_A_NS // 2)
    done = on_two([[0], [1, 2]], [0], hardware, ByteCosts(activation=30), placement=placement)
    assert done.unit_lines()[3:] == [
        "22 27 GPU1 DENSE 1 -1",
        "27 137 H2D1 LOAD 1 2",  # 30 bytes at 0.75 a ns beside the activations, 70 at 1
        "27 67 HANDOVER0 HANDOVER 1 -1",
        "67 167 CPU0 EXPERT 1 1",
        "137 147 GPU1 EXPERT 1 2",
        "167 197 HANDOVER0 HANDOVER 1 -1",
        "197 204 HANDOVER0 HOP -1 -1",
        "204 207 GPU0 STEP -1 -1",
    ]
    assert done.stalls() == {"link": 7 + 7 + 110, "cpu": 204 - 154}


# -- engines that overlap less --------------------------------------------------------------------


def test_a_serial_engine_copies_first_and_then_computes() -> None:
    hardware = Hardware(copies_overlap=False)
    done = play([[[0, 1, 2], [0]]], only(Preloaded([0, 4])), hardware=hardware)
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",
        "5 105 H2D LOAD 0 1",
        "105 205 H2D LOAD 0 2",
        "205 215 GPU EXPERT 0 0",  # resident, but nothing runs before all are there
        "215 225 GPU EXPERT 0 1",
        "225 235 GPU EXPERT 0 2",
        "235 240 GPU DENSE 1 -1",
        "240 250 GPU EXPERT 1 0",
        "250 253 GPU STEP -1 -1",
    ]
    assert done.stalls() == {"link": 200}


def test_a_serial_engine_waits_for_its_prefetches_too() -> None:
    ahead, hardware = ScriptedPrefetch({0: [4]}), Hardware(copies_overlap=False)
    done = play([[[0, 1], [0]]], only(Preloaded([0]), prefetch=ahead), hardware=hardware)
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",
        "5 105 H2D LOAD 0 1",
        "105 115 GPU EXPERT 0 0",
        "105 205 H2D PREFETCH 1 0",
        "115 125 GPU EXPERT 0 1",
        "205 210 GPU DENSE 1 -1",
        "210 220 GPU EXPERT 1 0",
        "220 223 GPU STEP -1 -1",
    ]
    assert done.stalls() == {"link": (105 - 5) + (205 - 125)}


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_serial_engine_begins_on_the_cpu_when_the_gpu_has_done_its_part(is_shared: bool) -> None:
    hardware = Hardware(copies_overlap=False, cpu_overlaps=False)
    parts = {
        "placement": ScriptedPlacement({1: Service.CPU}),
        "prefetch": ScriptedPrefetch({0: [5]}),
    }
    policies = only(Preloaded([0, 4]), **parts)
    done = play([[[0, 1], [0]]], policies, None, sharing(hardware) if is_shared else hardware)
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",
        "5 15 GPU EXPERT 0 0",
        "5 105 H2D PREFETCH 1 1",
        "15 115 CPU EXPERT 0 1",
        "115 120 GPU DENSE 1 -1",
        "120 130 GPU EXPERT 1 0",
        "130 133 GPU STEP -1 -1",
    ]
    assert done.stalls() == {"cpu": 100}


def test_a_serial_engine_computes_early_when_its_slots_are_needed() -> None:
    hardware = Hardware(copies_overlap=False)
    done = play([[[0, 1, 2], [0]]], only(OnDemand()), hardware=hardware, staging_slots=2)
    assert done.lines()[1:7] == [
        "5 105 H2D BYPASS 0 0",
        "105 205 H2D BYPASS 0 1",
        "205 215 GPU EXPERT 0 0",
        "215 225 GPU EXPERT 0 1",
        "225 325 H2D BYPASS 0 2",  # and no copy runs beside kernels
        "325 335 GPU EXPERT 0 2",
    ]


def test_an_engine_in_order_holds_back_what_is_there() -> None:
    hardware = Hardware(in_order=True)
    done = play([[[0, 1, 2], [0]]], only(Preloaded([1, 4])), hardware=hardware)
    assert done.lines()[1:] == [
        "5 105 H2D LOAD 0 0",
        "105 115 GPU EXPERT 0 0",
        "105 205 H2D LOAD 0 2",
        "115 125 GPU EXPERT 0 1",  # resident, but second in the routing
        "205 215 GPU EXPERT 0 2",
        "215 220 GPU DENSE 1 -1",
        "220 230 GPU EXPERT 1 0",
        "230 233 GPU STEP -1 -1",
    ]
    assert done.stalls() == {"link": 100 + (205 - 125)}


def in_order(staging_slots: int) -> list[str]:
    """0 is first in the routing and its copy last: 1 and 2, which might stay, come before it."""
    policies = only(LFU(), placement=ScriptedPlacement({0: Service.BYPASS}))
    hardware = Hardware(in_order=True)
    done = play([[[0, 1, 2], [0]]], policies, None, hardware, slots=0, staging_slots=staging_slots)
    return done.lines()


def test_an_engine_in_order_leaves_it_when_its_only_slot_is_needed() -> None:
    assert in_order(staging_slots=1) == [
        "0 5 GPU DENSE 0 -1",
        "5 105 H2D BYPASS 0 1",
        "105 115 GPU EXPERT 0 1",  # held back for 0 until 2 needs its slot, at 105
        "115 215 H2D BYPASS 0 2",
        "215 225 GPU EXPERT 0 2",
        "225 325 H2D BYPASS 0 0",
        "325 335 GPU EXPERT 0 0",
        "335 340 GPU DENSE 1 -1",
        "340 440 H2D BYPASS 1 0",
        "440 450 GPU EXPERT 1 0",
        "450 453 GPU STEP -1 -1",
    ]


def test_a_slot_is_free_when_its_own_expert_has_been_computed() -> None:
    assert in_order(staging_slots=2)[1:7] == [
        "5 105 H2D BYPASS 0 1",
        "105 205 H2D BYPASS 0 2",
        "205 215 GPU EXPERT 0 1",  # 0 needs a slot
        "215 225 GPU EXPERT 0 2",
        "215 315 H2D BYPASS 0 0",  # that of 1
        "315 325 GPU EXPERT 0 0",
    ]
