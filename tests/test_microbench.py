"""Microbenchmark rows: what is read, and that predictions are the cost model's, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hwmodels.bench_kinds import KINDS
from hwmodels.engine import Engine
from hwmodels.errors import HardwareError
from hwmodels.machine import Machine
from hwmodels.microbench import (
    COLUMNS,
    Measurement,
    expert_table,
    gpu_expert_table,
    storage_curve,
)
from sim.cases import compose_case


@pytest.fixture(scope="module")
def parts() -> tuple[Machine, Engine]:
    """A machine of round figures, from the files' own form."""
    config = compose_case(["machine=rtx4090"]).config
    machine = Machine.from_mapping(config["machine"])
    gpu, link, cpu, storage = machine.gpu, machine.link, machine.cpu, machine.storage
    assert gpu is not None
    assert link is not None
    assert storage is not None
    gpu = replace(
        gpu, memory_bytes_per_s=10**12, matmul_flops=10**14, kernel_floor_ns=2000, launch_ns=1000,
        graph_launch_ns=500, attention_floor_ns=8000, rate_by_bits=None,
    )  # fmt: skip
    link = replace(
        link, h2d_bytes_per_s=25 * 10**9, d2h_bytes_per_s=20 * 10**9, copy_setup_ns=10_000,
        pageable_bytes_per_s=8 * 10**9, copy_gap_ns=300, copy_issue_ns=2800,
    )  # fmt: skip
    cpu = replace(
        cpu, cores=16, threads_used=8, memory_bytes_per_s=64 * 10**9, thread_bytes_per_s=10**10,
        dram_bytes_per_s=64 * 10**9, matmul_flops=16 * 10**11, expert_setup_ns=7000, handover_ns=41_000,
        launch_issue_ns=5000, rate_by_bits=((2.0, 16 * 10**9), (4.0, 64 * 10**9)),
    )  # fmt: skip
    storage = replace(storage, setup_ns=50_000, curve=((65_536, 1, 10**9), (65_536, 4, 2 * 10**9)))
    machine = replace(machine, gpu=gpu, link=link, cpu=cpu, storage=storage)
    return machine, Engine.from_mapping(config["engine"])


@pytest.mark.parametrize(
    ("row", "expected_ns"),
    [
        ({"kind": "copy", "num_bytes": 10**6}, 10_000 + 40_000),  # 1 MB at 25 GB/s
        ({"kind": "copy", "num_bytes": 10**6, "queued": True}, 300 + 40_000),
        ({"kind": "copy", "num_bytes": 10**6, "direction": "d2h"}, 10_000 + 50_000),
        ({"kind": "copy", "num_bytes": 10**6, "pinned": False}, 10_000 + 125_000),
        ({"kind": "copy_issue", "count": 3}, 8400),
        # 6.4 MB by eight threads at 64 GB/s; two threads: 20 GB/s; three experts one after another
        ({"kind": "expert_cpu", "num_bytes": 6_400_000, "bits": 4, "threads": 8}, 7000 + 100_000),
        ({"kind": "expert_cpu", "num_bytes": 6_400_000, "bits": 4, "threads": 2}, 7000 + 320_000),
        (
            {"kind": "expert_cpu", "num_bytes": 6_400_000, "bits": 4, "threads": 8, "num_experts": 3},
            3 * 107_000,
        ),
        # 2 bits: decoding gives 16 GB/s by eight threads, half of it by four
        ({"kind": "expert_cpu", "num_bytes": 6_400_000, "bits": 2, "threads": 4}, 7000 + 800_000),
        # 12.8 M weights x 2 x 64 tokens = 1.64 TF at 0.8 TF/s of eight of sixteen cores
        (
            {"kind": "expert_cpu", "num_bytes": 6_400_000, "bits": 4, "threads": 8, "num_tokens": 64},
            2_048_000_000 / 1000,
        ),
        ({"kind": "handover"}, 41_000),
        # eight launches, gather and scatter among them; 50 MB at 1 TB/s
        ({"kind": "expert_gpu", "num_bytes": 50_000_000, "bits": 16}, 8000 + 50_000),
        # what runs beside it is not the formulas' business
        ({"kind": "copy", "num_bytes": 10**6, "beside": "kernels"}, 10_000 + 40_000),
        ({"kind": "gemv", "num_bytes": 50_000_000}, 1000 + 50_000),
        ({"kind": "gemv", "num_bytes": 1000}, 1000 + 2000),
        # 4096^3 x 2 = 137.4 GF at 100 TF/s
        ({"kind": "gemm", "m": 4096, "n": 4096, "k": 4096}, 1000 + 1_374_390),
        ({"kind": "launch", "mode": "stream", "count": 100}, 100_000),
        ({"kind": "launch", "mode": "graph", "count": 100}, 50_000),
        ({"kind": "launch_issue", "count": 2}, 10_000),
        # 8192 x 2 x 4 heads x 128 x 2 bytes = 16.8 MB at 1 TB/s
        (
            {"kind": "attention", "kv_tokens": 8192, "num_heads": 32, "num_kv_heads": 4, "head_dim": 128},
            8000 + 16_778,
        ),
        ({"kind": "storage", "block_bytes": 65_536, "queue_depth": 4}, 32_768),
        (
            {"kind": "storage_read", "num_bytes": 655_360, "block_bytes": 65_536, "queue_depth": 4},
            50_000 + 327_680,
        ),
    ],
)  # fmt: skip
def test_predictions_by_hand(
    parts: tuple[Machine, Engine], row: dict[str, Any], expected_ns: float
) -> None:
    measured = Measurement.from_mapping({**row, "value_ns": 1}, "row 1")
    assert measured.predict_ns(*parts) == pytest.approx(expected_ns, rel=1e-4)


def test_a_table_of_experts_does_not_hide_the_formula(parts: tuple[Machine, Engine]) -> None:
    machine, engine = parts
    assert machine.gpu is not None
    table = replace(
        machine,
        cpu=replace(machine.cpu, expert_table=((1, 1, 5),)),
        gpu=replace(machine.gpu, expert_table=((1, 1, 5),)),
    )
    cpu = {"kind": "expert_cpu", "num_bytes": 6_400_000, "bits": 4, "threads": 8, "value_ns": 1}
    for row in (cpu, {"kind": "gemv", "num_bytes": 6_400_000, "value_ns": 1}):
        measured = Measurement.from_mapping(row, "row 1")
        assert measured.predict_ns(table, engine) == measured.predict_ns(machine, engine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_depends_on_its_own_part_of_the_machine_only(
    parts: tuple[Machine, Engine], kind: str
) -> None:
    machine, engine = parts
    other = Machine.from_mapping(compose_case(["machine=laptop_pcie3_x8"]).config["machine"])
    assert other.link is not None
    others = {
        "gpu": other.gpu,
        "link": replace(other.link, copy_issue_ns=7),
        "cpu": replace(other.cpu, launch_issue_ns=7),
        "storage": replace(machine.storage, setup_ns=7, curve=((1, 1, 1000),)),  # type: ignore[type-var]
    }
    given = {
        "num_bytes": 10**6,
        "bits": 16,
        "threads": 4,
        "m": 64,
        "n": 64,
        "k": 64,
        "mode": "stream",
    }
    given |= {"block_bytes": 65_536, "queue_depth": 1, "kv_tokens": 100, "num_heads": 4}
    given |= {"num_kv_heads": 4, "head_dim": 64}
    row = {"kind": kind, **{k: v for k, v in given.items() if k in KINDS[kind].arguments}}
    measured = Measurement.from_mapping({**row, "value_ns": 1}, "row")
    before = measured.predict_ns(machine, engine)
    changed = {
        part
        for part, instead in others.items()
        if measured.predict_ns(replace(machine, **{part: instead}), engine) != before
    }
    assert changed == {KINDS[kind].part}


def test_texts_as_in_csv_and_plain_values_read_alike() -> None:
    plain = {"kind": "copy", "num_bytes": 10**6, "pinned": True, "queued": False, "value_ns": 5e4}
    text = {key: str(value) for key, value in plain.items()} | {"m": "", "n": None}
    assert Measurement.from_mapping(text, "row 1") == Measurement.from_mapping(plain, "row 1")


@pytest.mark.parametrize(
    ("value", "unit", "expected_ns"),
    [
        (40, "us", 40_000),
        (25, "gb_per_s", 40_000),
        (25e9, "bytes_per_s", 40_000),
        (1, "ms", 1_000_000),
    ],
)
def test_units(value: float, unit: str, expected_ns: float) -> None:
    row = {"kind": "copy", "num_bytes": 10**6, "value": value, "unit": unit}
    assert Measurement.from_mapping(row, "row 1").value_ns == pytest.approx(expected_ns)


def test_operations_as_a_rate() -> None:
    row = {"kind": "gemm", "m": 1000, "n": 1000, "k": 1000, "value": 2, "unit": "TFLOPS"}
    assert Measurement.from_mapping(row, "row 1").value_ns == pytest.approx(1_000_000)


def test_the_error_of_a_mean_falls_with_the_root_of_repeats() -> None:
    row = {"kind": "handover", "value_ns": 1, "repeats": 25, "spread": 0.1}
    assert Measurement.from_mapping(row, "row 1").error == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"value_ns": 1}, "row 7: kind: missing"),
        (
            {"kind": "expert_npu", "value_ns": 1},
            "kind = 'expert_npu': unknown kind; did you mean 'expert_",
        ),
        ({"kind": "zzz", "value_ns": 1}, "unknown kind; known: copy, "),
        ({"kind": "copy", "value_ns": 1}, "num_bytes of kind copy: missing"),
        ({"kind": "handover", "value_ns": "nan"}, "value_ns = 'nan': must be a finite number"),
        ({"kind": "handover", "value_ns": 0}, "value_ns = 0: must be > 0"),
        ({"kind": "handover", "value_ns": "fast"}, "value_ns = 'fast': must be a number"),
        ({"kind": "handover"}, "value_ns, or value and unit: missing"),
        ({"kind": "handover", "value": 1}, "unit: missing"),
        (
            {"kind": "handover", "value": 1, "unit": "gb_per_s"},
            "unit = 'gb_per_s': must be one of ns, us, ms, s$",
        ),
        ({"kind": "handover", "value": 1, "value_ns": 1}, "must not be given beside value_ns"),
        (
            {"kind": "handover", "value_ns": 1, "bits": 4},
            "bits = 4: unknown field; known: num_tokens",
        ),
        (
            {"kind": "copy", "num_bytes": 1, "value_ns": 1, "direction": "up"},
            "direction = 'up': must be h2d or d2h",
        ),
        (
            {"kind": "copy", "num_bytes": 1.5, "value_ns": 1},
            "num_bytes = 1.5: must be a whole number",
        ),
        (
            {"kind": "copy", "num_bytes": 1, "value_ns": 1, "pinned": "maybe"},
            "must be true or false",
        ),
        ({"kind": "handover", "value_ns": 1, "spread": -1}, "spread = -1: must be >= 0"),
    ],
)
def test_a_row_that_cannot_be_is_refused_in_one_line(row: dict[str, Any], message: str) -> None:
    with pytest.raises(HardwareError, match=message) as caught:
        Measurement.from_mapping(row, "row 7")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("row 7: ")


def test_a_part_that_the_machine_lacks_is_named(parts: tuple[Machine, Engine]) -> None:
    machine, engine = parts
    measured = Measurement.from_mapping({"kind": "copy", "num_bytes": 1, "value_ns": 1}, "row 1")
    with pytest.raises(HardwareError, match="link: missing, must be given where rows measure it"):
        measured.predict_ns(replace(machine, link=None), engine)


def test_tables_have_medians_and_only_experts_by_all_threads() -> None:
    def expert(num_bytes: int, tokens: int, threads: int, value_ns: float) -> Measurement:
        row = {"kind": "expert_cpu", "num_bytes": num_bytes, "bits": 4, "num_tokens": tokens}
        return Measurement.from_mapping(
            {**row, "threads": threads, "num_experts": 2, "value_ns": value_ns}, "row"
        )

    rows = [
        expert(200, 1, 8, 60),
        expert(100, 1, 8, 20),
        expert(100, 1, 8, 40),
        expert(100, 1, 8, 90),
    ]
    rows.append(expert(100, 1, 4, 1))
    assert expert_table(rows, 8) == ((100, 1, 20), (200, 1, 30))
    assert expert_table(rows, 16) == ()


def test_a_table_of_the_device_has_experts_that_nothing_ran_beside() -> None:
    row = {"kind": "expert_gpu", "num_bytes": 100, "bits": 16, "num_tokens": 2}
    times = [{"value_ns": 30}, {"value_ns": 20}, {"value_ns": 99, "beside": "copies"}]
    rows = [Measurement.from_mapping({**row, **time}, "row") for time in times]
    assert gpu_expert_table(rows) == ((100, 2, 25),)
    with pytest.raises(
        HardwareError, match="beside = 'copy': must be nothing or kernels or copies"
    ):
        Measurement.from_mapping({**row, "value_ns": 1, "beside": "copy"}, "row")


def test_a_storage_curve_is_rates_in_order() -> None:
    def read(block: int, depth: int, rate: float) -> Measurement:
        row = {"kind": "storage", "block_bytes": block, "queue_depth": depth}
        return Measurement.from_mapping({**row, "value": rate, "unit": "gb_per_s"}, "row")

    rows = [read(262_144, 1, 1.06), read(65_536, 4, 1.05), read(65_536, 1, 0.49)]
    assert storage_curve(rows) == (
        (65_536, 1, 490_000_000), (65_536, 4, 1_050_000_000), (262_144, 1, 1_060_000_000),
    )  # fmt: skip


def test_columns_are_named_once() -> None:
    assert len(set(COLUMNS)) == len(COLUMNS)
    assert {"kind", "value_ns", "num_bytes", "threads", "queue_depth"} <= set(COLUMNS)
