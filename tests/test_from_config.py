"""Model files made of the configurations of many classes, as the library itself writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hwmodels.errors import HardwareError
from hwmodels.hf_config import model_values
from hwmodels.model_shape import ModelShape
from hwmodels.model_yaml import ORDER
from sim.cli import main
from tests.round_hardware import read

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "traces/tiny/checkpoint/config.json"
MINE = {
    "model_type": "mine",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "vocab_size": 100,
}
CLASSES = {
    # class: layers, MoE, experts, top-k, expert size, shared experts and size, MLA rank, linear, windows
    "mixtral": (32, 32, 8, 2, 14336, 0, 0, 0, 0, 0),
    "qwen2_moe": (24, 24, 60, 4, 1408, 1, 5632, 0, 0, 0),
    "qwen3_moe": (24, 24, 128, 8, 768, 0, 0, 0, 0, 0),
    "qwen3_next": (48, 48, 512, 10, 512, 1, 512, 0, 36, 0),
    "qwen3_5_moe": (40, 40, 256, 8, 512, 1, 512, 0, 30, 0),
    "deepseek_v3": (61, 58, 256, 8, 2048, 1, 2048, 512, 0, 0),
    "olmoe": (16, 16, 64, 8, 2048, 0, 0, 0, 0, 0),  # a default, not the released 1024
    "phimoe": (32, 32, 16, 2, 6400, 0, 0, 0, 0, 0),
    "gpt_oss": (36, 36, 128, 4, 2880, 0, 0, 0, 0, 18),
    "llama4": (48, 48, 16, 1, 8192, 1, 8192, 0, 0, 36),
    "glm4_moe": (46, 45, 128, 8, 1408, 1, 1408, 0, 0, 0),
    "glm4_moe_lite": (47, 46, 64, 4, 1536, 1, 1536, 512, 0, 0),
    "kimi_k25": (61, 58, 256, 8, 2048, 1, 2048, 512, 0, 0),
    "ernie4_5_moe": (28, 27, 64, 6, 1536, 2, 1536, 0, 0, 0),
}


def shape_of(config: dict[str, Any]) -> ModelShape:
    return ModelShape.from_mapping(model_values(config, "mine", "config.json"), "config.json")


def default(kind: str) -> dict[str, Any]:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    values: dict[str, Any] = transformers.CONFIG_MAPPING[kind]().to_dict()
    return values


@pytest.mark.parametrize("kind", CLASSES)
def test_a_class_is_read_by_its_own_names(kind: str) -> None:
    made = shape_of(default(kind))
    assert CLASSES[kind] == (
        made.num_layers,
        made.num_moe_layers,
        made.num_experts,
        made.top_k,
        made.expert_intermediate_size,
        made.num_shared_experts,
        made.shared_intermediate_size,
        made.kv_lora_rank,
        made.num_linear_layers,
        made.num_window_layers,
    )


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("gpt_oss", "gpt_oss_120b"),
        ("mixtral", "mixtral_8x7b"),
        ("qwen3_next", "qwen3_next_80b_a3b"),
        ("glm4_moe_lite", "glm_4_7_flash"),
        ("ernie4_5_moe", "ernie_4_5_21b_a3b"),
    ],
)
def test_bundled_files_have_the_shape_of_their_class(kind: str, name: str) -> None:
    made, bundled = shape_of(default(kind)), ModelShape.from_mapping(read("model", name), name)
    assert made.total_params == bundled.total_params
    assert made.kv_bytes(10_000) == bundled.kv_bytes(10_000)


def test_the_tiny_models_config_gives_its_file() -> None:
    values = model_values(json.loads(TINY.read_text(encoding="utf-8")), "tiny", str(TINY))
    bundled = read("model", "tiny")
    assert {**values, "source": ""} == {**bundled, "source": ""}
    assert set(values) == set(ORDER)


# -- what classes say in other ways ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "num_dense"),
    [
        ({"first_k_dense_replace": 1}, 1),
        ({"mlp_layer_types": ["dense", "sparse", "sparse", "dense"]}, 2),
        ({"mlp_only_layers": [0, 3]}, 2),
        ({"decoder_sparse_step": 2}, 2),
        ({"moe_layer_freq": [0, 1, 1, 1]}, 1),
        ({"moe_layers": [1, 3]}, 2),
        ({"interleave_moe_layer_step": 2}, 2),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": -1}, 1),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": 2}, 2),
    ],
)
def test_dense_layers_are_told_in_many_ways(config: dict[str, Any], num_dense: int) -> None:
    made = shape_of({**MINE, "intermediate_size": 128, **config})
    assert made.num_dense_only_layers == num_dense
    assert made.dense_intermediate_size == 128


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"sliding_window": 16}, (4, 16)),
        ({"sliding_window": 16, "use_sliding_window": False}, (0, 0)),
        ({"sliding_window": None}, (0, 0)),
        ({"sliding_window": 4096, "max_position_embeddings": 4096}, (0, 0)),
        (
            {"sliding_window": 16, "layer_types": ["sliding_attention", *["full_attention"] * 3]},
            (1, 16),
        ),
        ({"attention_chunk_size": 32}, (3, 32)),
    ],
)
def test_windows_are_told_in_many_ways(config: dict[str, Any], windows: tuple[int, int]) -> None:
    made = shape_of({**MINE, **config})
    assert (made.num_window_layers, made.window_tokens) == windows


@pytest.mark.parametrize(
    ("given", "experts", "dense", "head"),
    [
        (None, 16, 16, None),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn"]}, 4.25, 16, None),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8.001953125, 8.001953125, 16),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4.15625, 4.15625, 16),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5, 4.5, 16),
        (
            {
                "quant_method": "compressed-tensors",
                "ignore": ["re:.*self_attn.*"],
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}},
            },
            4.5,
            16,
            None,
        ),
    ],
)
def test_stored_precision_is_read(
    given: dict[str, Any] | None, experts: float, dense: float, head: float | None
) -> None:
    made = shape_of({**MINE, "dtype": "bfloat16", "quantization_config": given})
    assert (made.expert_bits, made.dense_bits, made.head_bits) == (experts, dense, head)


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"]
)
def test_a_missing_key_is_named(key: str) -> None:
    config = {name: value for name, value in MINE.items() if name != key}
    with pytest.raises(HardwareError, match=rf"^config.json: {key}: missing, must be given$"):
        shape_of(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": None}, "num_experts (or num_local_experts, n_routed_experts, moe_num_ex"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size (or expert_intermediate_size)"),
        ({"first_k_dense_replace": 1}, "intermediate_size): missing, must be given"),
        ({"hidden_size": "wide"}, "hidden_size = 'wide': must be a whole number >= 0"),
        ({"num_experts_per_tok": 9}, "top_k = 9: must be <= num_experts = 8"),
        ({"linear_attn_config": {}}, "linear_attn_config: this kind of linear attention is not"),
        ({"dtype": "int3"}, "dtype = 'int3': must be one of float32, float16, bfloat16"),
        ({"quantization_config": {"quant_method": "own"}}, "quant_method = own: not known; say"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "quantization_config.bits = None: must",
        ),
    ],
)
def test_a_mistake_is_one_line(
    change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**MINE, **change}), encoding="utf-8")
    assert main(["model", "from-config", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"greenroom model from-config: error: {file}: ")
    assert message in error
    assert error.count("\n") == 1


# -- the command -----------------------------------------------------------------------------------


def test_a_file_is_written_and_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine.yaml"
    arguments = ["model", "from-config", str(TINY.parent), "--name", "mine", "--out", str(out)]
    assert main([*arguments, "--quant", "q8_0"]) == 0
    made = ModelShape.from_mapping(yaml.safe_load(out.read_text(encoding="utf-8")), "mine")
    assert made.name == "mine"
    assert made.source == "config.json of qwen3_moe, at q8_0"
    assert made.expert_bits == (8.5 + 8.5 + 16) / 3  # 48 weights a row are no whole blocks of 32
    assert made.head_bits == 8.5
    assert "8 layers, 32 experts, top-4" in capsys.readouterr().out


def test_a_stated_precision_gives_way_to_the_one_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    config = {**MINE, "quantization_config": {"quant_method": "own"}}
    file.write_text(json.dumps(config), encoding="utf-8")
    assert main(["model", "from-config", str(file), "--quant", "nvfp4"]) == 0
    made = yaml.safe_load(capsys.readouterr().out)
    assert (made["expert_bits"], made["dense_bits"]) == (4.5, 16)
    assert main(["model", "from-config", str(file), "--quant", "nvfp5"]) == 2
    assert "--quant = nvfp5: no such scheme; did you mean 'NVFP4'?" in capsys.readouterr().err


def test_models_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model"]) == 0
    listed = capsys.readouterr().out
    assert "glm_4_7_flash" in listed
    assert "36 layers linear" in listed
    assert main(["model", "tiny"]) == 0
    assert capsys.readouterr().out == (ROOT / "conf/model/tiny.yaml").read_text(encoding="utf-8")
    assert main(["model", "glm_4_7_flsh"]) == 2
    assert "did you mean 'glm_4_7_flash'?" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_no_json_is_one_line(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(text, encoding="utf-8")
    assert main(["model", "from-config", str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"greenroom model from-config: error: {file}: ")
    assert main(["model", "from-config", str(tmp_path / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**30}, "must be <= 4096"),
        ({"num_hidden_layers": 0}, "must be a whole number >= 1"),
        ({"moe_layer_start_index": 0, "moe_layer_interval": 0}, "must be a whole number >= 1"),
        ({"moe_layer_start_index": 0, "moe_layer_end_index": "x"}, "must be a whole number >= 0"),
        ({"linear_num_value_heads": 1, "full_attention_interval": 0}, "whole number >= 1"),
    ],
)
def test_counts_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(HardwareError, match=message):
        model_values({**MINE, **changes}, "mine", "config.json")


def test_what_is_left_alone_may_be_of_any_kind() -> None:
    for left in (3, "attn", ["self_attn"]):
        quantised = {"quant_method": "fp8", "ignore": left}
        values = model_values({**MINE, "quantization_config": quantised}, "mine", "config.json")
        assert values["dense_bits"] == (8 if left == 3 else 16)
