"""Headers of safetensors files, written by hand and by the library of the format."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from hwmodels.model_shape import ModelShape
from hwmodels.safetensors_header import read_safetensors
from sim.cli import main

ROOT = Path(__file__).resolve().parents[1]
CONFIG = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "vocab_size": 10,
    "quantization_config": {"quant_method": "own"},
}
SIZES = {
    "model.embed_tokens.weight": 64 * 10 * 2,
    "lm_head.weight": 64 * 10 * 2,
    "model.layers.0.self_attn.q_proj.weight": 64 * 64 * 2,
    "model.layers.0.self_attn.o_proj.weight": 64 * 64 * 2,
    "model.layers.0.self_attn.k_proj.weight": 64 * 32 * 2,
    "model.layers.0.self_attn.v_proj.weight": 64 * 32 * 2,
    "model.layers.0.mlp.gate.weight": 64 * 2 * 2,
    "model.layers.0.input_layernorm.weight": 64 * 2,
    "model.layers.0.post_attention_layernorm.weight": 64 * 2,
    "model.layers.0.mlp.experts.gate_up_proj_blocks": 2 * 2 * 64 * 32 // 2,  # 4 bits
    "model.layers.0.mlp.experts.gate_up_proj_scales": 2 * 2 * 64 * 32 // 32,  # a byte for 32
    "model.layers.0.mlp.experts.down_proj_blocks": 2 * 64 * 32 // 2,
    "model.layers.0.mlp.experts.down_proj_scales": 2 * 64 * 32 // 32,
    "model.layers.1.mlp.experts.down_proj": 999,  # predicts a second token
    "model.visual.layers.0.weight": 999,
}


def made(capsys: pytest.CaptureFixture[str], *arguments: str) -> ModelShape:
    assert main(["model", *arguments]) == 0
    return ModelShape.from_mapping(yaml.safe_load(capsys.readouterr().out), "made")


def safetensors(sizes: dict[str, int]) -> bytes:
    place, entries = 0, {"__metadata__": {"format": "pt"}}
    for name, size in sizes.items():
        entries[name] = {"dtype": "U8", "shape": [size], "data_offsets": [place, place + size]}  # type: ignore[dict-item]
        place += size
    head = json.dumps(entries).encode()
    return len(head).to_bytes(8, "little") + head


def test_packed_experts_give_their_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    halves = list(SIZES.items())[:7], list(SIZES.items())[7:]
    for number, half in enumerate(halves):
        (tmp_path / f"part{number}.safetensors").write_bytes(safetensors(dict(half)))
    index = tmp_path / "model.safetensors.index.json"
    places = {name: f"part{int(i >= 7)}.safetensors" for i, name in enumerate(SIZES)}
    index.write_text(json.dumps({"weight_map": places}), encoding="utf-8")
    for path in (tmp_path, index):
        shape = made(capsys, "from-safetensors", str(path), "--name", "mine")
        assert (shape.expert_bits, shape.dense_bits, shape.head_bits) == (4.25, 16, 16)
        assert not shape.tie_embeddings
    (tmp_path / "part1.safetensors").unlink()
    assert main(["model", "from-safetensors", str(tmp_path)]) == 2
    assert "part1.safetensors: missing, a part of" in capsys.readouterr().err


def test_the_bundled_checkpoint_is_its_own_model_file(capsys: pytest.CaptureFixture[str]) -> None:
    """Norms of queries and keys, which the shape leaves out, are in its dense bits."""
    shape = made(capsys, "from-safetensors", str(ROOT / "traces/tiny/checkpoint"))
    assert (shape.expert_bits, shape.head_bits, shape.tie_embeddings) == (16, 16, True)
    dense = 2 * 128 * 4 * 32 + 2 * 128 * 2 * 32 + 128 * 32 + 2 * 128
    assert shape.dense_bits == pytest.approx(16 * (dense + 2 * 32) / dense, abs=1e-6)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "its header has 0 bytes"),
        (b"\xff" * 20, "no safetensors file: its header has 18446744073709551615 bytes"),
        ((40).to_bytes(8, "little") + b"{}", "cut short: its header has 40 bytes, 2 are there"),
        ((2).to_bytes(8, "little") + b"[]", "its header is not understood"),
        ((2).to_bytes(8, "little") + b"{}", "0 layers have expert tensors, but the model has 1"),
        ((9).to_bytes(8, "little") + b'{"w": {}}', "its header is not understood"),
    ],
)
def test_a_broken_safetensors_file_is_one_line(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    assert main(["model", "from-safetensors", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"greenroom model from-safetensors: error: {file}: ")
    assert message in error


def test_the_library_of_safetensors_writes_what_is_read(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    file = tmp_path / "own.safetensors"
    library.save_file({"w": np.zeros((3, 5), np.float16)}, file, {"format": "np"})
    (tensor,) = read_safetensors(tmp_path)
    assert (tensor.name, tensor.shape, tensor.bits) == ("w", (3, 5), 15 * 16)


@pytest.mark.parametrize("place", ["[5, 2]", "[0, 1e400]", "[0, " + "9" * 400 + "]", "[0.5, 1]"])
def test_a_place_that_cannot_be_is_refused(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for text in (f'{{"w": {{"shape": [1], "data_offsets": {place}}}}}', "[" * 100_000):
        head = text.encode()
        (tmp_path / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)
        assert main(["model", "from-safetensors", str(tmp_path)]) == 2
        assert "its header is not understood" in capsys.readouterr().err
