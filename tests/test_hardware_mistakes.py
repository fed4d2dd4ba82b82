"""Mistakes in the description of a model or machine are told in one line: file, field, value, rule."""

from __future__ import annotations

from typing import Any

import pytest

from hwmodels.errors import HardwareError
from hwmodels.machine import Machine, numeric_fields
from hwmodels.model_shape import ModelShape
from tests.round_hardware import read


def description() -> dict[str, Any]:
    return read("machine", "rtx4090")


EXAMPLES = {
    "gpu.rate_by_bits": [[4.25, 10**11]],
    "gpu.expert_table": [[10**6, 1, 10**5]],
    "cpu.rate_by_bits": [[2.5, 10**10]],
    "cpu.expert_table": [[10**6, 1, 10**5]],
}
"""Of figures that are null in the file."""


def test_a_rate_may_be_a_float() -> None:
    given = description()
    given["link"]["h2d_bytes_per_s"] = 50e9
    rate = Machine.from_mapping(given).link.h2d_bytes_per_s
    assert rate == 50_000_000_000
    assert isinstance(rate, int)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("gpu.memory_bytes", -5, "gpu.memory_bytes = -5: must be > 0"),
        ("gpu.memory_bytes", 0.5, "gpu.memory_bytes = 0.5: must be a whole number"),
        ("gpu.launch_ns", -1, "gpu.launch_ns = -1: must be >= 0"),
        ("link.h2d_bytes_per_s", 0, "link.h2d_bytes_per_s = 0: must be > 0"),
        ("link.h2d_bytes_per_s", float("nan"), "link.h2d_bytes_per_s = nan: must be finite"),
        ("link.h2d_bytes_per_s", float("inf"), "link.h2d_bytes_per_s = inf: must be finite"),
        ("link.h2d_bytes_per_s", 10**400, "must be <= 1e+18"),
        ("link.h2d_bytes_per_s", "fast", "= 'fast': must be a number, not str"),
        ("cpu.cores", True, "cpu.cores = True: must be a number, not bool"),
        ("cpu.cores", None, "cpu.cores = None: must be a number, not NoneType"),
        ("link.pinned", 1, "link.pinned = 1: must be true or false"),
        ("gpu.count", 0, "gpu.count = 0: must be > 0"),
        ("gpu.attention_floor_ns", -5, "must be >= 0"),
        ("link.duplex_ratio", 0.9, "link.duplex_ratio = 0.9: must be in [1, 2]"),
        ("link.duplex_ratio", 2.1, "must be in [1, 2]"),
        ("link.switch_bytes_per_s", 0, "must be > 0"),
        ("link.hop_ns", None, "link.hop_ns = None: must be a number, not NoneType"),
        ("cpu.dram_sharing", "fare", "must be 'proportional' or 'fair'; did you mean 'fair'?"),
        ("cpu.numa_nodes", 2, "cpu.numa_bytes_per_s = None: must be given with numa_nodes = 2"),
        ("storage.curve", None, "must be a list of rows [block_bytes, queue_depth, bytes_per_s]"),
        ("storage.curve", [], "= []: must be a list of rows"),
        ("storage.curve", [[1, 2, 3], 5], "storage.curve[1] = 5: must be [block_bytes, queue_d"),
        ("storage.curve", [[1, 2]], "storage.curve[0] = [1, 2]: must be [block_bytes, queue_"),
        ("storage.curve", [[0, 2, 3]], "storage.curve[0].block_bytes = 0: must be > 0"),
        ("storage.curve", [[1, 2, float("nan")]], "curve[0].bytes_per_s = nan: must be finite"),
        ("storage.curve", [[1, 2.5, 3]], "curve[0].queue_depth = 2.5: must be a whole number"),
        (
            "storage.curve",
            [[4, 1, 9], [4, 1, 8]],
            "storage.curve[1] = [4, 1, 8]: must come after [4, 1, 9]: rows ascend by block_bytes, q",
        ),
        ("storage.curve", [[4, 2, 9], [4, 1, 8]], "storage.curve[1] = [4, 1, 8]: must come after"),
        (
            "cpu.rate_by_bits",
            [[4.5, 9], [4.25, 8]],
            "must come after [4.5, 9]: rows ascend by bits",
        ),
        ("cpu.rate_by_bits", [[4.5, -9]], "cpu.rate_by_bits[0].bytes_per_s = -9: must be >"),
        ("cpu.expert_table", [[1, 1, 10**19]], "cpu.expert_table[0].ns = 1"),
        ("storage.setup_ns", -1, "must be >= 0"),
        ("gpu.name", "", "gpu.name = '': must be a text that is not empty"),
        ("gpu.memory_byte", 5, "unknown field; did you mean 'gpu.memory_bytes'?"),
        ("gpu.memory_drate", 1, "unknown field; did you mean 'gpu.memory_derate'?"),
        ("gpu.dram_derate", 1, "gpu.dram_derate = 1: unknown field"),
        ("gpu.memory_derate", 1.01, "gpu.memory_derate = 1.01: must be in (0, 1]"),
        ("gpu.matmul_derate", 0, "gpu.matmul_derate = 0: must be > 0"),
        ("link.rate_derate", -0.5, "link.rate_derate = -0.5: must be > 0"),
        ("cpu.dram_derate", None, "cpu.dram_derate = None: must be a number, not NoneType"),
        ("cpu.memory_derate", 2, "cpu.memory_derate = 2.0: must be in (0, 1]"),
    ],
)
def test_a_bad_figure_is_named(field: str, value: object, message: str) -> None:
    given = description()
    part, _, name = field.partition(".")
    given[part][name] = value
    with pytest.raises(HardwareError) as error:
        Machine.from_mapping(given, "machine/mine.yaml")
    assert str(error.value).startswith(f"machine/mine.yaml: {part}.")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "field",
    ["gpu.launch_ns", "link.pinned", "cpu.name", "storage.curve", "cpu", "name", "cpu.sources"],
)
def test_a_missing_field_is_named(field: str) -> None:
    given = description()
    part, _, name = field.partition(".")
    del (given[part] if name else given)[name or part]
    with pytest.raises(HardwareError, match=rf"^mine: {field}: missing, must be given$"):
        Machine.from_mapping(given, "mine")


@pytest.mark.parametrize("field", numeric_fields())
def test_every_figure_needs_its_source(field: str) -> None:
    given = description()
    part, _, name = field.partition(".")
    given[part].setdefault(name, None)
    if given[part][name] is None:
        given[part][name] = EXAMPLES.get(field, 1)
    given[part]["sources"].pop(name, None)
    with pytest.raises(HardwareError, match=rf"mine: {field} = \S.*: needs an entry '{name}'"):
        Machine.from_mapping(given, "mine")


def test_a_figure_at_its_default_needs_no_source() -> None:
    given = description()
    for field in ("gpu.count", "link.hop_ns", "cpu.dispatch_ns", "storage.page_cache_copies"):
        part, _, name = field.partition(".")
        del given[part][name], given[part]["sources"][name]
    built = Machine.from_mapping(given)
    assert (built.device.count, built.cpu.dispatch_ns) == (1, 0)


def test_a_link_needs_a_gpu() -> None:
    given = {**description(), "gpu": None}
    with pytest.raises(HardwareError, match=r"^mine: link = 'PCIe 4.0 x16': must be left out"):
        Machine.from_mapping(given, "mine")


@pytest.mark.parametrize("text", ["a data sheet", "Q: somewhere", "X:", "X: ", 5, None])
def test_a_source_has_a_trust_class(text: object) -> None:
    given = description()
    given["gpu"]["sources"]["launch_ns"] = text
    with pytest.raises(HardwareError, match=r"gpu.sources.launch_ns = .*must be 'LETTER: where"):
        Machine.from_mapping(given, "mine")


def test_a_source_of_no_figure_is_refused() -> None:
    given = description()
    given["gpu"]["sources"]["launch"] = "X: a stopwatch"
    with pytest.raises(HardwareError, match=r"did you mean 'gpu.sources.launch_ns'"):
        Machine.from_mapping(given, "mine")


@pytest.mark.parametrize("whole", [None, 3, [1]])
def test_a_description_is_a_mapping(whole: Any) -> None:
    with pytest.raises(HardwareError, match="must be a mapping"):
        Machine.from_mapping(whole)
    with pytest.raises(HardwareError, match="must be a mapping"):
        ModelShape.from_mapping(whole)
    with pytest.raises(HardwareError, match=r"gpu = .*must be a mapping"):
        Machine.from_mapping({**description(), "gpu": whole or 3})
    gpu = {**description()["gpu"], "sources": whole}
    with pytest.raises(HardwareError, match=r"gpu.sources = .*must map each"):
        Machine.from_mapping({**description(), "gpu": gpu})
    with pytest.raises(HardwareError, match=r"^mine: sources = .*: unknown field; known: cpu, gpu"):
        Machine.from_mapping({**description(), "sources": whole}, "mine")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 129}, "top_k = 129: must be <= num_experts = 128"),
        ({"num_moe_layers": 49}, "num_moe_layers = 49: must be <= num_layers = 48"),
        ({"num_moe_layers": 47}, "dense_intermediate_size = 0: must be > 0 where 1 layers"),
        ({"num_kv_heads": 3}, "num_kv_heads = 3: must divide num_attention_heads = 32"),
        ({"num_shared_experts": 1}, "shared_intermediate_size = 0: must be > 0"),
        ({"kv_lora_rank": 4}, "qk_rope_head_dim = 0: must be > 0 with latent attention"),
        ({"expert_bits": 0}, "expert_bits = 0: must be > 0"),
        ({"expert_bits": 64}, "expert_bits = 64.0: must be <= 32"),
        ({"expert_bits": "4.5"}, "expert_bits = '4.5': must be a number, not str"),
        ({"expert_bit": 4.5}, "unknown field; did you mean 'expert_bits'?"),
        ({"tie_embeddings": "no"}, "tie_embeddings = 'no': must be true or false"),
    ],
)
def test_a_bad_shape_is_named(change: dict[str, Any], message: str) -> None:
    plain = read("model", "qwen3_30b_a3b")
    with pytest.raises(HardwareError) as error:
        ModelShape.from_mapping({**plain, **change}, "model/mine.yaml")
    assert str(error.value).startswith("model/mine.yaml: ")
    assert message in str(error.value)
