"""The bundled descriptions build, are sourced and agree with what is published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hwmodels.errors import HardwareError
from hwmodels.machine import CPU, GPU, TRUST_CLASSES, Link, Machine, Storage
from hwmodels.model_shape import ModelShape
from tests.configs import options
from tests.round_hardware import read

ROOT = Path(__file__).resolve().parents[1]
MODELS = options("model")
PARTS = {"gpu": GPU, "link": Link, "cpu": CPU, "storage": Storage}
MACHINES = options("machine")

# published total parameters; M weights an expert; bank in GB and GB a token at bf16
PUBLISHED = {
    "olmoe_1b_7b": (6.9e9, 6.29, 12.9, 1.61),
    "qwen3_30b_a3b": (30.5e9, 4.72, 58.0, 3.62),
    "deepseek_v2_lite": (15.7e9, 8.65, 28.8, 2.70),
    "mixtral_8x7b": (46.7e9, 176.16, 90.2, 22.55),
    "gpt_oss_20b": (20.9e9, 24.88, 38.2, 4.78),
    "gpt_oss_120b": (116.8e9, 24.88, 229.3, 7.17),
}


def model(name: str, **changes: Any) -> ModelShape:
    return ModelShape.from_mapping({**read("model", name), **changes}, name)


def machine(name: str) -> Machine:
    return Machine.from_mapping(read("machine", name), name)


def is_choice(value: object) -> bool:
    return isinstance(value, str | bool)


def test_there_are_files() -> None:
    assert set(MODELS) == {*PUBLISHED, "tiny"}
    assert len(MACHINES) >= 10


@pytest.mark.parametrize("name", MODELS)
def test_every_model_builds_and_gives_all_fields(name: str) -> None:
    plain = read("model", name)
    assert ModelShape.from_mapping(plain, name).name == name
    assert set(plain) == set(ModelShape.__slots__) - {
        "priced_from",
        "low_bits",
    }  # each can be overridden


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


@pytest.mark.parametrize("name", MACHINES)
def test_every_figure_of_a_machine_is_given_and_sourced(name: str) -> None:
    """Read the file on its own, not through the code that refuses it.

    A figure that is null is there with a source too: else it could not be overridden on the command line.
    """
    plain = read("machine", name)
    figures = []
    for part, cls in PARTS.items():
        given = plain.get(part) or {}
        assert set(given) in (set(), set(cls.__slots__)), part
        figures += [f"{part}.{key}" for key, value in given.items() if not is_choice(value)]
    assert sorted(plain["sources"]) == sorted(figures)
    for field, text in plain["sources"].items():
        assert text[:3] in {f"{letter}: " for letter in TRUST_CLASSES}, field
        assert text[3:].strip(), field


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("unified", {"jetson_agx_orin"}),
        ("cpu_only", {"phone_sd8gen3", "xeon4510_x2"}),
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
        del given[part]  # their sources may stay
        nothing = {**whole, **dict.fromkeys(set(PARTS) - set(given))}
        assert Machine.from_mapping(given) == Machine.from_mapping(nothing)
    assert Machine.from_mapping(given).kind == "cpu_only"


@pytest.mark.parametrize("name", PUBLISHED)
def test_model_sizes_are_the_published_ones(name: str) -> None:
    total, expert, bank, token = PUBLISHED[name]
    shape = model(name, expert_bits=16)
    assert shape.total_params == pytest.approx(total, rel=0.01)
    assert shape.expert_params / 1e6 == pytest.approx(expert, abs=0.006)
    layers, size = shape.num_moe_layers, shape.expert_bytes(0) / 1e9
    assert layers * shape.num_experts * size == pytest.approx(bank, abs=0.06)
    assert layers * shape.top_k * size == pytest.approx(token, abs=0.006)


@pytest.mark.parametrize(
    ("name", "bits", "expert_bytes"),
    [
        ("qwen3_30b_a3b", 4.5, 2_654_208),  # as recorded from a Q4_K_M file
        ("gpt_oss_120b", None, 13_219_200),  # as recorded from an MXFP4 file
        ("gpt_oss_20b", None, 13_219_200),
    ],
)
def test_quantised_experts_have_their_recorded_bytes(
    name: str, bits: float | None, expert_bytes: int
) -> None:
    shape = model(name) if bits is None else model(name, expert_bits=bits)
    assert shape.expert_bytes(0) == expert_bytes


def test_the_tiny_model_is_the_bundled_checkpoint() -> None:
    config = json.loads((ROOT / "traces/tiny/checkpoint/config.json").read_text(encoding="utf-8"))
    shape = model("tiny")
    fields = {
        "num_hidden_layers": shape.num_moe_layers,
        "num_local_experts": shape.num_experts,
        "num_experts_per_tok": shape.top_k,
        "hidden_size": shape.hidden_size,
        "moe_intermediate_size": shape.expert_intermediate_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tie_embeddings,
    }
    assert {key: config[key] for key in fields} == fields
    assert config["dtype"] == "bfloat16"
    assert shape.expert_bits == 16


def test_without_a_link_there_is_one_memory() -> None:
    given = {**read("machine", "rtx4090"), "link": None}
    with pytest.raises(HardwareError, match=r"must be cpu\.memory_bytes = 103079215104 without"):
        Machine.from_mapping(given)
