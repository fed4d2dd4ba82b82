"""Headers of GGUF files, written by hand and by the library of the format."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from hwmodels.errors import HardwareError
from hwmodels.gguf_header import TYPES, read_gguf
from hwmodels.model_shape import ModelShape
from hwmodels.quantisation import FORMATS
from sim.cli import main

META = {
    "block_count": 2,
    "embedding_length": 256,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 64,
    "attention.value_length": 64,
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 512,
}
NUMBER = {name: number for number, name in TYPES.items()}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def pair(key: str, value: Any) -> bytes:
    if isinstance(value, str):
        return text(key) + struct.pack("<I", 8) + text(value)
    if isinstance(value, list):
        kind = 8 if isinstance(value[0], str) else 4
        items = b"".join(text(v) if kind == 8 else struct.pack("<I", v) for v in value)
        return text(key) + struct.pack("<IIQ", 9, kind, len(value)) + items
    return text(key) + struct.pack("<II", 4, value)


def layer_tensors(layer: int, down: str, base: str) -> list[tuple[str, tuple[int, ...], str]]:
    """Sizes as of META, innermost first."""
    at = f"blk.{layer}."
    return [
        (f"{at}ffn_gate_exps.weight", (256, 512, 4), base),
        (f"{at}ffn_up_exps.weight", (256, 512, 4), base),
        (f"{at}ffn_down_exps.weight", (512, 256, 4), down),
        (f"{at}ffn_gate_inp.weight", (256, 4), "F32"),
        (f"{at}attn_norm.weight", (256,), "F32"),
        (f"{at}ffn_norm.weight", (256,), "F32"),
        (f"{at}attn_q.weight", (256, 256), base),
        (f"{at}attn_k.weight", (256, 128), base),
        (f"{at}attn_v.weight", (256, 128), base),
        (f"{at}attn_output.weight", (256, 256), base),
    ]


ENDS = [("token_embd.weight", (256, 1000), "Q4_K"), ("output.weight", (256, 1000), "Q6_K")]


def gguf(tensors: list[tuple[str, tuple[int, ...], str]], **changes: Any) -> bytes:
    pairs = {"general.architecture": "own", "tokenizer.ggml.tokens": ["a", "b"]}
    pairs |= {f"own.{key}": value for key, value in {**META, **changes}.items()}
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs))
    body = b"".join(pair(key, value) for key, value in pairs.items())
    for name, shape, kind in tensors:
        body += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
        body += struct.pack("<IQ", NUMBER[kind], 0)
    return head + body


def made(capsys: pytest.CaptureFixture[str], *arguments: str) -> ModelShape:
    assert main(["model", *arguments]) == 0
    return ModelShape.from_mapping(yaml.safe_load(capsys.readouterr().out), "made")


# -- GGUF ------------------------------------------------------------------------------------------


def test_a_gguf_file_gives_bits_by_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.gguf"
    tensors = [*ENDS, *layer_tensors(0, "Q6_K", "Q4_K"), *layer_tensors(1, "Q4_K", "Q4_K")]
    file.write_bytes(gguf(tensors))
    shape = made(capsys, "from-gguf", str(file))
    assert (shape.name, shape.num_moe_layers, shape.num_experts, shape.top_k) == ("own", 2, 4, 2)
    assert (shape.vocab_size, shape.head_bits, shape.tie_embeddings) == (1000, 6.5625, False)
    assert shape.expert_bits_by_layer == (5.1875, 4.5)  # (4.5 + 4.5 + 6.5625) / 3
    assert [shape.expert_bytes(layer) for layer in (0, 1)] == [254_976, 221_184]
    attention, exact = 2 * 256 * 256 + 2 * 256 * 128, 256 * (4 + 2)
    dense_bytes = attention * 4.5 / 8 + exact * 4
    assert shape.dense_layer_bytes(0) == pytest.approx(dense_bytes, abs=1)


def test_all_parts_of_a_file_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = [[*ENDS, *layer_tensors(0, "Q4_K", "Q4_K")], layer_tensors(1, "Q4_K", "Q4_K")]
    files = [tmp_path / f"own-0000{i}-of-00002.gguf" for i in (1, 2)]
    for file, tensors in zip(files, parts, strict=True):
        file.write_bytes(gguf(tensors))
    shape = made(capsys, "from-gguf", str(files[1]))
    assert shape.expert_bits_by_layer is None
    assert shape.expert_bits == 4.5
    files[0].unlink()
    assert main(["model", "from-gguf", str(files[1])]) == 2
    assert f"{files[0]}: missing, a part of {files[1].name}" in capsys.readouterr().err


def test_a_missing_head_is_the_embedding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.gguf"
    tensors = [ENDS[0], *layer_tensors(0, "IQ5_K", "IQ4_K"), *layer_tensors(1, "IQ5_K", "IQ4_K")]
    file.write_bytes(gguf(tensors))
    shape = made(capsys, "from-gguf", str(file), "--name", "mine")
    assert (shape.name, shape.tie_embeddings, shape.head_bits) == ("mine", True, 4.5)
    assert shape.expert_bits == pytest.approx((4.5 + 4.5 + 5.5) / 3, abs=1e-6)


@pytest.mark.parametrize("cut", [3, 8, 20, 100, 400, 900])
def test_a_cut_file_is_one_line(
    cut: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cut.gguf"
    file.write_bytes(gguf([*ENDS, *layer_tensors(0, "Q4_K", "Q4_K")])[:cut])
    assert main(["model", "from-gguf", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"greenroom model from-gguf: error: {file}: ")
    assert "cut short" in error or "no GGUF file" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("tensors", "changes", "message"),
    [
        (
            [*ENDS, *layer_tensors(0, "Q4_K", "Q4_K"), *layer_tensors(1, "Q4_K", "Q4_K")],
            {"expert_count": 0},
            "num_experts = 0: must be",
        ),
        ([ENDS[1]], {}, "token_embd.weight or own.block_count: missing"),
        (layer_tensors(0, "Q4_K", "Q4_K") + ENDS, {}, "intermediate_size): missing, must be given"),
        (ENDS, {"feed_forward_length": 8}, "num_moe_layers = 0: must be > 0"),
        (ENDS, {"block_count": 2**31}, "own.block_count = 2147483648: must leave 1 to 4096"),
        (ENDS, {"nextn_predict_layers": [1]}, "own.nextn_predict_layers = [1]: must be a whole"),
        (ENDS, {"embedding_length": "x"}, "own.embedding_length = 'x': must be a whole number"),
        ([("token_embd.weight", (), "F32")], {}, "cut short or broken"),
    ],
)
def test_what_a_gguf_file_lacks_is_named(
    tensors: Any,
    changes: dict[str, Any],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "own.gguf"
    file.write_bytes(gguf(tensors, **changes))
    assert main(["model", "from-gguf", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"greenroom model from-gguf: error: {file}: ")
    assert message in error


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (b"GGUF" + struct.pack("<I", 1), "GGUF version = 1: must be 2 or 3"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 2**60), "cut short or broken"),
        (
            b"GGUF"
            + struct.pack("<IQQ", 3, 0, 1)
            + text("k")
            + struct.pack("<I", 9)
            + struct.pack("<IQ", 9, 1) * 9999,
            "cut short or broken",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text("w") + struct.pack("<IQIQ", 1, 8, 99, 0),
            "format 99",
        ),
    ],
)
def test_a_broken_gguf_file_is_refused(head: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "own.gguf"
    file.write_bytes(head)
    with pytest.raises(HardwareError, match=message):
        read_gguf(file)


def test_the_library_of_the_format_writes_what_is_read(tmp_path: Path) -> None:
    library = pytest.importorskip("gguf", reason="the gguf package is not installed")
    numbers = {kind.name: kind.value for kind in library.GGMLQuantizationType}
    assert {name: numbers[name] for name in TYPES.values() if name in numbers} == {
        name: number for name, number in NUMBER.items() if name in numbers
    }
    file = tmp_path / "own.gguf"
    writer = library.GGUFWriter(file, "own")
    writer.add_uint32("own.block_count", 2)
    writer.add_array("own.list", [1, 2, 3])
    writer.add_tensor("weights", np.zeros((3, 32), dtype=np.float16))
    packed = library.quants.quantize(
        np.ones((4, 64), np.float32), library.GGMLQuantizationType.Q8_0
    )
    writer.add_tensor("packed", packed, raw_dtype=library.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_gguf(file)
    assert header.metadata["own.list"] == [1, 2, 3]
    assert [(t.name, t.shape, t.bits) for t in header.tensors] == [
        ("weights", (32, 3), 96 * 16),
        ("packed", (64, 4), 256 * FORMATS["Q8_0"]),
    ]
