"""Distance to the limit, over experts so small that only the accounts matter, not the times."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from real.device import open_device
from real.limits import BARS, FEW_HEADS, ReadProbe, distance_to_limit
from real.rig import Tier, format_of_model
from real.store_file import FileStore, build_file
from real.synthetic import Synthetic
from real.validate_machine import first_guess, machine_of
from real.validate_parity import TINY
from real.validate_runs import Setting
from sim.composing import compose_config

OVERRIDES = (
    *("model=replay_moe", "engine=greenroom_cpu", *TINY),
    *("workload.requests=[24,26]", "workload.length=[2,6]"),
)


@pytest.fixture
def setting() -> Setting:
    torch.set_num_threads(1)
    form = format_of_model(compose_config("config", OVERRIDES)["model"], "float32")
    return Setting(Tier("storage"), 2, OVERRIDES, form, open_device("cpu"), 1, turn_steps=2)


@pytest.fixture
def store(setting: Setting, tmp_path: Path) -> FileStore:
    return FileStore(build_file(Synthetic(8, 32, setting.form, seed=1), tmp_path / "experts.bin"))


def test_each_run_is_held_against_its_own_bytes_and_kernels(
    setting: Setting, store: FileStore
) -> None:
    machine = machine_of(first_guess(), setting.device, setting.tier, 2, 1)
    with store:
        found = distance_to_limit(setting, store, machine)
    assert [one.bar for one in found] == [BARS["overlapped"], BARS["serial"]]
    for one in found:
        figures = re.search(r"= ([\d.]+) ms, kernels ([\d.]+) ms; Python \d+ us", one.note)
        assert figures is not None
        copies_ms, kernels_ms = float(figures[1]), float(figures[2])
        is_serial = "serial" in one.name
        limit_ms = copies_ms + kernels_ms if is_serial else max(copies_ms, kernels_ms)
        assert one.limit_ns / 1e6 == pytest.approx(limit_ms, abs=0.02)
        assert one.ratio == pytest.approx(one.measured_ns / one.limit_ns)
        assert one.is_met == (one.ratio <= one.bar)
    # Both read the same bytes: every expert of every step, for nothing is kept.
    assert len({one.note.split(" MB")[0] for one in found}) == 1
    assert FEW_HEADS


def test_the_probe_reads_whole_experts_and_ends_its_threads(
    setting: Setting, store: FileStore
) -> None:
    machine = machine_of(first_guess(), setting.device, setting.tier, 2, 1)
    with store:
        probe = ReadProbe(setting, store, machine)
        probe.run()
        probe.run()
        assert probe.reads.count == 16 * setting.form.slot_bytes
        assert probe.bytes_per_s > 0
        probe.close()
    assert setting.device.held_bytes == 0
