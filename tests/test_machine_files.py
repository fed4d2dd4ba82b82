"""The bundled machines build, and their figures agree with each other."""

from __future__ import annotations

import pytest

from hwmodels.errors import HardwareError
from hwmodels.machine import CPU, GPU, Link, Machine, Storage
from tests.configs import options
from tests.round_hardware import read

PARTS = {"gpu": GPU, "link": Link, "cpu": CPU, "storage": Storage}
MACHINES = options("machine")


def machine(name: str) -> Machine:
    return Machine.from_mapping(read("machine", name), name)


def test_there_are_files() -> None:
    assert len(MACHINES) >= 10


@pytest.mark.parametrize("name", MACHINES)
def test_every_machine_builds(name: str) -> None:
    built = machine(name)
    cpu, link = built.cpu, built.link
    assert built.name == name
    assert cpu.threads_used <= 2 * cpu.cores
    assert cpu.memory_bytes_per_s <= cpu.dram_bytes_per_s
    assert built.device.graph_launch_ns <= built.device.launch_ns
    if link is not None:
        assert link.pageable_bytes_per_s <= link.pageable_host_bytes_per_s
        assert link.pageable_bytes_per_s <= link.h2d_bytes_per_s <= cpu.dram_bytes_per_s
        assert link.copy_gap_ns < link.copy_setup_ns
        assert built.device.count > 1 or link.switch_bytes_per_s is None


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("unified", {"jetson_agx_orin"}),
        ("cpu_only", {"phone_sd8gen3", "xeon4510_x2", "oneplus_15r"}),
        ("discrete", {"gh200", "rtx4090_x4", "a100_80_pcie", "laptop_pcie3_x8"}),
    ],
)
def test_kinds_of_machine(kind: str, names: set[str]) -> None:
    kinds = {name: machine(name).kind for name in MACHINES}
    assert names <= {name for name, found in kinds.items() if found == kind}


def test_a_cpu_alone_is_its_own_device() -> None:
    phone = machine("phone_sd8gen3")
    assert phone.device.memory_bytes == phone.cpu.memory_bytes
    assert phone.device.memory_bytes_per_s == phone.cpu.expert_bytes_per_s
    assert phone.device.matmul_flops == phone.cpu.matmul_flops // 2  # four of eight threads
    assert phone.device.kernel_floor_ns == phone.cpu.expert_setup_ns
    assert phone.device.launch_ns == 0
    assert machine("rtx4090").device is not None
    assert machine("rtx4090_x4").device.count == 4


def test_parts_may_be_left_out() -> None:
    whole = read("machine", "rtx4090")
    whole["gpu"]["memory_bytes"] = whole["cpu"]["memory_bytes"]  # without a link it is the same
    given = dict(whole)
    for part in ("storage", "link", "gpu"):
        del given[part]
        nothing = {**whole, **dict.fromkeys(set(PARTS) - set(given))}
        assert Machine.from_mapping(given) == Machine.from_mapping(nothing)
    assert Machine.from_mapping(given).kind == "cpu_only"


def test_without_a_link_there_is_one_memory() -> None:
    given = {**read("machine", "rtx4090"), "link": None}
    with pytest.raises(HardwareError, match=r"must be cpu\.memory_bytes = 103079215104 without"):
        Machine.from_mapping(given)
