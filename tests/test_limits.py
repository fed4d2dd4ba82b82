"""What is said to hold the CPU's experts back: which figure caps their rate, on the round machine."""

from __future__ import annotations

from typing import Any

import pytest

from hwmodels.layer_time import CPU_EXPERTS
from hwmodels.placement import Placement
from hwmodels.predict import Case, predict
from hwmodels.usage import Usage
from sim.limits import limit_words
from tests.round_hardware import costs, engine, read, shape

FAST = {
    "cpu_memory_bytes_per_s": 4 * 10**9,
    "cpu_thread_bytes_per_s": 10**10,
    "cpu_dram_bytes_per_s": 10**10,
    "cpu_expert_setup_ns": 0,
    "cpu_matmul_flops": 10**15,
}
"""Host memory gives 4 GB/s, which nothing else of the CPU holds back."""


def words(**changes: Any) -> str:
    made = costs(shape(), engine(cpu_setups="expert"), **{**FAST, **changes})
    placement = Placement.from_mapping({**read("placement", "gpu_only"), "cpu_layers": 2})
    case = Case(made, placement, Usage("uniform", "stated", None, None), 8, 8)
    return limit_words(predict(case), CPU_EXPERTS)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "at 4 of 4 GB/s"),
        (
            {"cpu_dram_bytes_per_s": 2 * 10**9},
            "at 2 of 2 GB/s, the most that cpu.dram_bytes_per_s lets all readers have",
        ),
        (
            {"cpu_threads_used": 1, "cpu_thread_bytes_per_s": 3 * 10**9},
            "at 3 of 3 GB/s, the most of 1 thread (cpu.threads_used x cpu.thread_bytes_per_s)",
        ),
        (
            {"cpu_rate_by_bits": ((8.5, 10**9), (16.0, 4 * 10**9))},
            "at 1 of 4 GB/s: decoding 8-bit weights holds the cores, not memory (cpu.rate_by_bits)",
        ),
        (
            {"cpu_decode_weights_per_s": 10**9},
            "at 1 of 4 GB/s: decoding 8-bit weights holds the cores, not memory "
            "(cpu.decode_weights_per_s)",
        ),
    ],
)
def test_the_figure_that_caps_the_cpu_is_named(changes: dict[str, Any], said: str) -> None:
    assert words(**changes) == f"the CPU reads experts {said}"


def test_teams_of_threads_are_not_taken_for_decoding() -> None:
    """Two teams of one thread of 1 GB/s each: 2 GB/s of the threads' 2, and no decoding in it."""
    changes = {**FAST, "cpu_threads_used": 2, "cpu_thread_bytes_per_s": 10**9}
    made = costs(shape(), engine(cpu_setups="expert", cpu_experts_at_once=2), **changes)
    placement = Placement.from_mapping({**read("placement", "gpu_only"), "cpu_layers": 2})
    case = Case(made, placement, Usage("uniform", "stated", None, None), 8, 8)
    said = limit_words(predict(case), CPU_EXPERTS)
    assert "at 2 of 2 GB/s, the most of 2 threads" in said
    assert "decoding" not in said
