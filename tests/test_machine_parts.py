"""Every part file gives all figures with a source each; parts compose into machines on the command line."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import fields
from typing import Any

import pytest

from hwmodels.errors import HardwareError
from hwmodels.machine import CPU, DERATES, GPU, TRUST_CLASSES, Link, Machine, Storage
from sim.mistakes import explain
from tests.configs import composed, options
from tests.round_hardware import read

PARTS: dict[str, Any] = {"gpu": GPU, "link": Link, "cpu": CPU, "storage": Storage}
FILES = [(part, name) for part in PARTS for name in options(f"machine/{part}")]
MACHINES = options("machine")
OPTIONAL = {"release_bytes_per_s", "predict_ns", "router_ns"}
"""Figures of an engine on phones: given only where they were measured."""
NAMED = re.compile(
    r"[A-Za-z][\w.-]*/[A-Za-z][\w.-]+|\b[\w-]+\.(?:com|info|io|dev|ai|net)\b|#\d+|BigMoeOnEdge|blog|forum"
)
"""A repository, a site, a thread: what a figure of class S or X must say it is from."""


def figures(part: str) -> set[str]:
    """Return all that a file of a part gives beside its name and its sources."""
    return {f.name for f in fields(PARTS[part]) if f.name != "name"} | set(DERATES[part])


def complaints(part: str, plain: dict[str, Any], *, whole: bool = True) -> Iterator[str]:
    """Yield what is wrong with the figures and sources of a part; ``whole``: all must be there."""
    sources = plain["sources"]
    given = set(plain) - {"name", "sources"}
    if whole:
        yield from (f"{field}: not given" for field in figures(part) - given - OPTIONAL)
    yield from (f"{field}: unknown" for field in given - figures(part))
    for field in given:
        if isinstance(plain[field], str | bool):
            continue
        text = sources.get(field, "")
        letter, _, where = text.partition(": ")
        if letter not in TRUST_CLASSES or len(where.split()) < 2:
            yield f"{field}: no source with a class: {text!r}"
        elif letter in "SX" and not NAMED.search(where):
            yield f"{field}: class {letter} names no source: {text!r}"
    yield from (f"{field}: a source of nothing" for field in set(sources) - given)
    for derate in set(DERATES[part]) & given:
        if not 0 < plain[derate] <= 1:
            yield f"{derate}: {plain[derate]} is not in (0, 1]"


@pytest.mark.parametrize(("part", "name"), FILES)
def test_every_figure_of_a_part_is_given_and_sourced(part: str, name: str) -> None:
    """Read the file on its own, not through the code that refuses it.

    A figure that is null, and a derate of 1, are there too: else they could not be overridden.
    """
    assert list(complaints(part, read(f"machine/{part}", name))) == []


@pytest.mark.parametrize("name", MACHINES)
def test_every_figure_of_a_whole_machine_is_sourced(name: str) -> None:
    plain = read("machine", name)
    parts = {part: plain[part] for part in PARTS if plain.get(part)}
    assert {part: list(complaints(part, given)) for part, given in parts.items()} == {
        part: [] for part in parts
    }
    assert set(plain) <= {"name", *PARTS}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"launch_ns": "1640"}, "launch_ns: no source with a class: '1640'"),
        ({"launch_ns": "X: 1640"}, "launch_ns: no source with a class: 'X: 1640'"),
        ({"launch_ns": "Q: a data sheet"}, "launch_ns: no source with a class: 'Q: a data sheet'"),
        ({"launch_ns": "X: 1.64 us measured"}, "launch_ns: class X names no source"),
        ({"launch_ns": "S: 1008 GB/s"}, "launch_ns: class S names no source"),
        ({"launches": "X: (te42kyfo/gpu-benches)"}, "launches: a source of nothing"),
    ],
)
def test_a_tampered_source_is_found(change: dict[str, str], complaint: str) -> None:
    plain = read("machine/gpu", "rtx4090")
    plain["sources"] |= change
    (found,) = complaints("gpu", plain)
    assert found.startswith(complaint)


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("memory_derate", 1.2, "memory_derate: 1.2 is not in (0, 1]"),
        ("memory_derate", 0, "memory_derate: 0 is not in (0, 1]"),
        ("speed", 3, "speed: unknown"),
    ],
)
def test_a_tampered_figure_is_found(field: str, value: float, complaint: str) -> None:
    plain = read("machine/gpu", "rtx4090") | {field: value}
    assert complaint in list(complaints("gpu", plain))


def test_a_figure_without_source_is_found_and_refused() -> None:
    for part, name in (("gpu", "rtx4090"), ("cpu", "ryzen_7950x"), ("link", "pcie4_x16")):
        for field in figures(part) - OPTIONAL - {"pinned", "dram_sharing"}:
            whole = read("machine", "rtx4090")
            del whole[part]["sources"][field]
            assert [f.split(":")[0] for f in complaints(part, whole[part])] == [field], name
            if whole[part][field] is not None:
                with pytest.raises(HardwareError, match=f"{part}.{field} = .*: needs an entry"):
                    Machine.from_mapping(whole)


def part_machine(part: str, name: str) -> Machine:
    """Return a machine with this part: the usual one, or the module that shares its memory."""
    override = f"machine/{part}={name}"
    if name.startswith("jetson") and part in ("gpu", "cpu"):
        both = (f"machine/gpu={name}", f"machine/cpu={name}")
        return Machine.from_mapping(composed("machine=jetson_agx_orin", *both)["machine"])
    return Machine.from_mapping(composed(override)["machine"])


@pytest.mark.parametrize(("part", "name"), FILES)
def test_every_part_composes_into_a_machine(part: str, name: str) -> None:
    built = part_machine(part, name)
    plain = read(f"machine/{part}", name)
    made = getattr(built, part)
    assert made.name == plain["name"]
    for derate, rates in DERATES[part].items():
        for rate in rates:
            assert getattr(made, rate) == pytest.approx(plain[rate] * plain[derate], abs=1)
    cpu = built.cpu
    assert cpu.memory_bytes_per_s <= cpu.dram_bytes_per_s
    assert cpu.threads_used <= 2 * cpu.cores
    # A tenth over is what rounding a thread's rate up may come to.
    assert 0.9 * cpu.memory_bytes_per_s <= cpu.threads_used * cpu.thread_bytes_per_s
    assert built.device.graph_launch_ns <= built.device.launch_ns


def test_derates_are_applied_once() -> None:
    """Worked out by hand: 50 % of 900, 25 % of 400, 80 % of 20 and 10, 10 % of 1000 and 70 % of 100."""
    given = read("machine", "rtx4090")
    given["gpu"] |= {"memory_bytes_per_s": 900, "memory_derate": 0.5}
    given["gpu"] |= {"matmul_flops": 400, "matmul_derate": 0.25}
    given["link"] |= {"h2d_bytes_per_s": 20, "d2h_bytes_per_s": 10, "rate_derate": 0.8}
    given["cpu"] |= {"matmul_flops": 1000, "matmul_derate": 0.1}
    given["cpu"] |= {"dram_bytes_per_s": 100, "dram_derate": 0.7}
    given["cpu"] |= {"memory_bytes_per_s": 3, "memory_derate": 0.001}
    built = Machine.from_mapping(given)
    gpu, link, cpu = built.gpu, built.link, built.cpu
    assert gpu is not None
    assert link is not None
    assert (gpu.memory_bytes_per_s, gpu.matmul_flops) == (450, 100)
    assert (link.h2d_bytes_per_s, link.d2h_bytes_per_s) == (16, 8)
    assert (cpu.matmul_flops, cpu.dram_bytes_per_s) == (100, 70)
    assert cpu.memory_bytes_per_s == 1, "never 0"
    assert built.sources["gpu.memory_derate"].startswith("I: ")


def test_without_derates_the_rates_are_the_files() -> None:
    given = read("machine", "rtx4090")
    for part, derates in DERATES.items():
        for derate in derates:
            del given[part][derate]
    built = Machine.from_mapping(given)
    assert built.device.memory_bytes_per_s == 1_008_000_000_000


def test_parts_are_chosen_on_the_command_line() -> None:
    chosen = composed("machine=rtx4090", "machine/gpu=h100_sxm", "machine/cpu=epyc_9355")
    built = Machine.from_mapping(chosen["machine"])
    assert (built.device.name, built.cpu.cores) == ("NVIDIA H100 80GB SXM", 32)
    assert built.link == Machine.from_mapping(read("machine", "rtx4090")).link
    four = composed("machine=rtx4090_x4", "machine/gpu=rtx3090")
    assert four["machine"]["gpu"]["count"] == 4, "what the whole machine says of a part stays"
    assert composed("~machine/storage")["machine"].get("storage") is None
    added = composed("machine=gh200", "machine/storage=nvme_e27t", "machine.storage.setup_ns=5")
    assert added["machine"]["storage"]["setup_ns"] == 5


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("machine/gpu=rtx409", "machine/gpu = rtx409: no such option; did you mean 'rtx4090'?"),
        ("machine/cpu=epyc7742", "no such option; did you mean 'epyc_7742'?"),
        ("machine/gp=rtx4090", "machine/gp: unknown key; did you mean 'machine/gpu'?"),
        ("gpu=rtx3090", "gpu: unknown key; did you mean 'machine/gpu'?"),
        ("machine.gpu.memory_derat=1", "did you mean 'machine.gpu.memory_derate'?"),
        ("machine/cpu=grace machine.cpu.core=1", "did you mean 'machine.cpu.cores'?"),
    ],
)
def test_a_wrong_part_is_told_with_a_near_match(
    override: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["greenroom", "sim", *override.split()])
    with pytest.raises(Exception) as caught:  # noqa: PT011  # of Hydra's several kinds
        composed(*override.split())
    assert line in str(explain(caught.value))


def test_a_unified_module_needs_both_its_parts() -> None:
    alone = deepcopy(composed("machine=jetson_agx_orin", "machine/gpu=jetson_orin_nx")["machine"])
    with pytest.raises(HardwareError, match=r"gpu.memory_bytes = 17179869184: must be cpu.memory"):
        Machine.from_mapping(alone)
