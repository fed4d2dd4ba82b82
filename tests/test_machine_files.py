"""The bundled descriptions build, are sourced and agree with what is published; bad ones are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from hwmodels.cost import CostModel
from hwmodels.errors import HardwareError
from hwmodels.machine import TRUST_CLASSES, Machine, numeric_fields
from hwmodels.model_shape import ModelShape

ROOT = Path(__file__).resolve().parents[1]
MODEL_FILES = sorted((ROOT / "conf/model").glob("*.yaml"))
MACHINE_FILES = sorted((ROOT / "conf/machine").glob("*.yaml"))

# published total parameters; M weights an expert; bank in GB and GB a token at bf16
PUBLISHED = {
    "olmoe_1b_7b": (6.9e9, 6.29, 12.9, 1.61),
    "qwen3_30b_a3b": (30.5e9, 4.72, 58.0, 3.62),
    "deepseek_v2_lite": (15.7e9, 8.65, 28.8, 2.70),
    "mixtral_8x7b": (46.7e9, 176.16, 90.2, 22.55),
    "gpt_oss_20b": (20.9e9, 24.88, 38.2, 4.78),
    "gpt_oss_120b": (116.8e9, 24.88, 229.3, 7.17),
}


def read(path: Path) -> dict[str, Any]:
    plain = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(plain, dict)
    return plain  # type: ignore[return-value]


def model(name: str, **changes: Any) -> ModelShape:
    return ModelShape.from_mapping({**read(ROOT / f"conf/model/{name}.yaml"), **changes}, name)


def machine(name: str) -> Machine:
    return Machine.from_mapping(read(ROOT / f"conf/machine/{name}.yaml"), name)


def test_there_are_files() -> None:
    assert {path.stem for path in MODEL_FILES} == {*PUBLISHED, "tiny"}
    assert len(MACHINE_FILES) >= 5


@pytest.mark.parametrize("path", MODEL_FILES, ids=lambda path: path.stem)
def test_every_model_builds_and_gives_all_fields(path: Path) -> None:
    plain = read(path)
    shape = ModelShape.from_mapping(plain, path.name)
    assert shape.name == path.stem
    assert set(plain) == set(ModelShape.__slots__) - {"priced_from"}  # each can be overridden


@pytest.mark.parametrize("path", MACHINE_FILES, ids=lambda path: path.stem)
def test_every_machine_builds(path: Path) -> None:
    built = Machine.from_mapping(read(path), path.name)
    assert built.name == path.stem
    assert built.cpu.threads_used <= 2 * built.cpu.cores
    assert built.link.pageable_bytes_per_s <= built.link.h2d_bytes_per_s


@pytest.mark.parametrize("path", MACHINE_FILES, ids=lambda path: path.stem)
def test_every_figure_of_a_machine_is_sourced(path: Path) -> None:
    """Read the file on its own, not through the code that refuses it."""
    plain = read(path)
    figures = [
        f"{part}.{field}"
        for part in ("gpu", "link", "cpu")
        for field, value in plain[part].items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    assert sorted(figures) == sorted(numeric_fields()) == sorted(plain["sources"])
    for field, text in plain["sources"].items():
        assert text[:3] in {f"{letter}: " for letter in TRUST_CLASSES}, field
        assert text[3:].strip(), field


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


# -- against measured rows -------------------------------------------------------------------------


def test_cpu_time_of_a_measured_row() -> None:
    """DeepSeek-V2-Lite IQ4_NL, all experts on a 7950X: 13.16 ms a token (the row fits the setup)."""
    costs = CostModel(model("deepseek_v2_lite", expert_bits=4.5), machine("rtx4090"))
    assert 26 * 6 * costs.expert_cpu_ns(0, 1) == pytest.approx(13.16e6, rel=0.03)


@pytest.mark.parametrize(("layers_on_cpu", "tokens_per_s"), [(24, 37.42), (30, 30.61)])
def test_decode_speed_of_measured_rows(layers_on_cpu: int, tokens_per_s: float) -> None:
    """gpt-oss-120b, some layers' experts on the CPU of rtx5090_ddr5; parts run one after another.

    The CPU rate is fitted to the difference of the two rows, so their level is the test.
    """
    costs = CostModel(model("gpt_oss_120b"), machine("rtx5090_ddr5"))
    time_ns = 36 * costs.dense_ns(1, 64) + costs.step_ns(1, 1)
    time_ns += (36 - layers_on_cpu) * 4 * costs.expert_gpu_ns(0, 1, False)
    time_ns += layers_on_cpu * (costs.handover_ns() + 4 * costs.expert_cpu_ns(0, 1))
    assert 1e9 / time_ns == pytest.approx(tokens_per_s, rel=0.1)


def test_a_pcie_3_link_is_the_slowest() -> None:
    shape = model("qwen3_30b_a3b")
    loads = {path.stem: CostModel(shape, machine(path.stem)).load_ns(0) for path in MACHINE_FILES}
    assert max(loads, key=loads.__getitem__) == "laptop_pcie3_x8"
    assert min(loads, key=loads.__getitem__) == "rtx5090_ddr5"


# -- what is refused -------------------------------------------------------------------------------


def description() -> dict[str, Any]:
    return read(ROOT / "conf/machine/rtx4090.yaml")


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
        ("gpu.name", "", "gpu.name = '': must be a text that is not empty"),
        ("gpu.memory_byte", 5, "unknown field; did you mean 'gpu.memory_bytes'?"),
    ],
)
def test_a_bad_figure_is_named(field: str, value: object, message: str) -> None:
    given = description()
    part, _, name = field.partition(".")
    given[part][name] = value
    with pytest.raises(HardwareError) as error:
        Machine.from_mapping(given, "machine/mine.yaml")
    assert str(error.value).startswith(f"machine/mine.yaml: {field} = ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("field", ["gpu.launch_ns", "link.pinned", "cpu.name", "gpu", "sources"])
def test_a_missing_field_is_named(field: str) -> None:
    given = description()
    part, _, name = field.partition(".")
    del (given[part] if name else given)[name or part]
    with pytest.raises(HardwareError, match=rf"^mine: {field}: missing, must be given$"):
        Machine.from_mapping(given, "mine")


@pytest.mark.parametrize("field", numeric_fields())
def test_every_figure_needs_its_source(field: str) -> None:
    given = description()
    del given["sources"][field]
    with pytest.raises(HardwareError, match=rf"mine: {field} = \d+: needs an entry"):
        Machine.from_mapping(given, "mine")


@pytest.mark.parametrize("text", ["a data sheet", "Q: somewhere", "X:", "X: ", 5, None])
def test_a_source_has_a_trust_class(text: object) -> None:
    given = description()
    given["sources"]["gpu.launch_ns"] = text
    with pytest.raises(HardwareError, match=r"sources\[gpu.launch_ns\].*must be 'LETTER: where"):
        Machine.from_mapping(given, "mine")


def test_a_source_of_no_figure_is_refused() -> None:
    given = description()
    given["sources"]["gpu.launch"] = "X: a stopwatch"
    with pytest.raises(HardwareError, match=r"did you mean 'gpu.launch_ns'"):
        Machine.from_mapping(given, "mine")


@pytest.mark.parametrize("whole", [None, 3, [1]])
def test_a_description_is_a_mapping(whole: Any) -> None:
    with pytest.raises(HardwareError, match="must be a mapping"):
        Machine.from_mapping(whole)
    with pytest.raises(HardwareError, match="must be a mapping"):
        ModelShape.from_mapping(whole)
    with pytest.raises(HardwareError, match=r"gpu = .*must be a mapping"):
        Machine.from_mapping({**description(), "gpu": whole})
    with pytest.raises(HardwareError, match=r"sources = .*must map each"):
        Machine.from_mapping({**description(), "sources": whole})


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
    plain = read(ROOT / "conf/model/qwen3_30b_a3b.yaml")
    with pytest.raises(HardwareError) as error:
        ModelShape.from_mapping({**plain, **change}, "model/mine.yaml")
    assert str(error.value).startswith("model/mine.yaml: ")
    assert message in str(error.value)
