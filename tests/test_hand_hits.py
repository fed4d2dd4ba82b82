"""Hits, and prefetches under way, that run on the CPU, by hand.

The figures that hold unless a test says otherwise stand at the head of tests/hand.py; here there are 3
layers, of each of which the first expert (0, 4 and 8) is in GPU memory, and 1 as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from sim.hardware import Hardware
from sim.storage import Reading
from sim.types import Service
from tests.doubles import Preloaded, ScriptedEverywhere, ScriptedPrefetch
from tests.hand import AMPLE, BYTE_A_NS, FlatCurve, HandRun, play
from tests.strategies import only

ALONE = Hardware(h2d_bytes_per_s=BYTE_A_NS, d2h_bytes_per_s=BYTE_A_NS)
SHARED = replace(ALONE, memory=AMPLE)
READS = replace(SHARED, reading=Reading(FlatCurve(), 100, 1))
either = pytest.mark.parametrize("hardware", [ALONE, SHARED], ids=["alone", "shared"])


def everywhere(
    layers: Sequence[Sequence[int]],
    script: Mapping[int, Service],
    hardware: Hardware = ALONE,
    prefetch: Mapping[int, Sequence[int]] | None = None,
    **sizes: Any,
) -> HandRun:
    """Run one token under a placement that is asked about hits."""
    parts: dict[str, Any] = {"placement": ScriptedEverywhere(script)}
    parts |= {"prefetch": ScriptedPrefetch(prefetch or {})}
    parts |= {"host": Preloaded()} if "host_slots" in sizes else {}
    return play([layers], only(Preloaded([0, 1, 4, 8]), **parts), None, hardware, slots=12, **sizes)


@either
def test_a_hit_may_run_on_the_cpu_and_is_still_a_hit(hardware: Hardware) -> None:
    done = everywhere([[0, 1, 2], [0], [0]], {0: Service.CPU, 2: Service.CPU}, hardware)
    assert done.lines()[1:4] == [
        "5 15 GPU EXPERT 0 1",
        "5 105 CPU EXPERT 0 0",
        "105 205 CPU EXPERT 0 2",
    ]
    (row,) = done.steps()
    assert [row[name] for name in ("accesses", "hits", "hits_on_cpu", "on_cpu")] == [5, 4, 1, 1]
    assert done.offloader.residency.is_resident(0)


def test_a_hit_stays_where_host_memory_does_not_keep_what_is_on_the_gpu() -> None:
    sizes = {"host_slots": 12, "exclusive_host": True}
    done = everywhere([[0, 2], [0], [0]], {0: Service.CPU, 2: Service.CPU}, READS, **sizes)
    assert done.of_lane("CPU") == ["5 105 EXPERT 0 2"]
    assert done.steps()[0]["hits_on_cpu"] == 0


@either
@pytest.mark.parametrize("service", [Service.STAY, Service.CPU])
def test_a_prefetch_whose_expert_runs_on_the_cpu_goes_on_unawaited(
    hardware: Hardware, service: Service
) -> None:
    end_ns = {Service.STAY: 105 + 10, Service.CPU: 20 + 100}[service]
    done = everywhere([[0], [1], [0]], {5: service}, hardware, {0: [5]})
    (row,) = done.steps()
    on_cpu = int(service is Service.CPU)
    assert done.of_lane("H2D") == ["5 105 PREFETCH 1 1"]
    assert done.of_lane("GPU")[-3] == f"{end_ns} {end_ns + 5} DENSE 2 -1"
    assert [row[name] for name in ("hits", "late_hits", "on_cpu")] == [2, 1 - on_cpu, on_cpu]
    assert done.offloader.wasted_prefetch_bytes == 100 * on_cpu
