"""Experts out of Hugging Face folders: bit for bit those of the loaded model, or a clear error."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import moe_models
import pytest
import torch
from safetensors.torch import load_file, save_file

from real.checkpoint import CheckpointExperts, ModuleExperts, experts_modules
from real.device import open_device
from real.errors import RealError
from real.shards import Shards
from real.store import build_ram, with_low_copies
from real.store_file import FileStore, build_file
from sim.types import ConfigError

torch.set_num_threads(1)

BUNDLED = Path(__file__).parents[1] / "traces" / "tiny" / "checkpoint"
OTHER_SEAM = {"jetmoe", "dbrx"}  # their experts are not behind the one seam of transformers


def saved(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    model = moe_models.build(name).to(dtype)
    model.save_pretrained(folder, max_shard_size="20KB")
    return model


def of(model: Any) -> ModuleExperts:
    return ModuleExperts([module for _, module in experts_modules(model)])


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    saved("qwen3_moe", folder)
    return folder


@pytest.fixture
def broken(qwen: Path, tmp_path: Path) -> Path:
    """Return a copy of a sharded checkpoint, to be broken."""
    return Path(shutil.copytree(qwen, tmp_path / "broken"))


def shard_of(folder: Path, tensor: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / index["weight_map"][tensor]


def change(folder: Path, tensor: str, value: torch.Tensor | None) -> Path:
    """Write one tensor of a checkpoint anew, or leave it out."""
    file = shard_of(folder, tensor)
    tensors = load_file(file)
    if value is None:
        del tensors[tensor]
    else:
        tensors[tensor] = value
    save_file(tensors, file)
    return file


@pytest.mark.parametrize("name", sorted(set(moe_models.ARCHITECTURES) - OTHER_SEAM))
def test_a_folder_holds_what_the_loaded_model_has(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path, torch.float32 if name == "mixtral" else torch.bfloat16)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    modules = [module for _, module in experts_modules(model)]
    with CheckpointExperts(tmp_path) as read:
        source = of(model)
        assert read.format == source.format
        assert (read.num_layers, read.num_experts) == (len(modules), 8)
        with build_ram(read, open_device("cpu")) as store:
            for key in range(len(store.keys)):
                layer, expert = store.keys.unpack(key)
                view = store.format_of(key).view(store.bytes_of(key))
                module = modules[layer]
                first = "gate_up_proj" if read.format.has_gate else "up_proj"
                assert torch.equal(view.gate_up, getattr(module, first)[expert])
                assert torch.equal(view.down, module.down_proj[expert])
                if read.format.has_bias:
                    assert view.gate_up_bias is not None
                    assert view.down_bias is not None
                    assert torch.equal(view.gate_up_bias, module.gate_up_proj_bias[expert])
                    assert torch.equal(view.down_bias, module.down_proj_bias[expert])


def test_layouts_are_those_of_the_families(tmp_path: Path) -> None:
    oss = of(moe_models.build("gpt_oss")).format
    assert (oss.is_transposed, oss.has_bias, oss.has_gate) == (True, True, True)
    nemotron = of(moe_models.build("nemotron_h")).format
    assert (nemotron.is_transposed, nemotron.has_bias, nemotron.has_gate) == (False, False, False)


def test_only_moe_layers_count(qwen: Path) -> None:
    with CheckpointExperts(qwen) as source:
        assert source.layer_indices == (0, 2)  # layer 1 is dense
        assert source.source["model_type"] == "qwen3_moe"
        assert source.source["folder"] == qwen.name


def test_layers_that_predict_further_tokens_are_left_out(broken: Path) -> None:
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with CheckpointExperts(broken) as source:
        assert source.layer_indices == (0,)


def test_the_bundled_checkpoint_is_read() -> None:
    weights = load_file(BUNDLED / "model.safetensors")
    with CheckpointExperts(BUNDLED) as source:
        assert (source.num_layers, source.num_experts) == (8, 32)
        assert (source.format.hidden_size, source.format.intermediate_size) == (128, 48)
        assert source.format.dtype == "bfloat16"
        name = "model.layers.5.mlp.experts.17"
        gate, up, down = (weights[f"{name}.{p}_proj.weight"] for p in ("gate", "up", "down"))
        expert = source.expert(5, 17)
        assert torch.equal(expert.gate_up, torch.cat([gate, up]))
        assert torch.equal(expert.down, down)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_a_store_may_hold_another_dtype(dtype: str, qwen: Path, tmp_path: Path) -> None:
    with CheckpointExperts(qwen, dtype) as source:
        assert source.format.dtype == dtype
        path = build_file(source, tmp_path / "experts.bin")
        with FileStore(path) as file, build_ram(source, open_device("cpu")) as memory:
            assert file.source == {**source.source}
            view = source.format.view(memory.bytes_of(9))
            exact = source.expert(1, 1).down.float()
            if dtype == "int8":
                assert view.down_scale is not None
                assert source.format.compute_dtype == torch.bfloat16
                error = (view.down.float() * view.down_scale[:, None] - exact).abs()
                assert (error <= view.down_scale[:, None] / 2 * 1.001).all()
            else:
                assert torch.allclose(view.down.float(), exact, atol=1e-7, rtol=1e-3)


def test_low_copies_come_from_a_checkpoint_as_well(qwen: Path) -> None:
    with CheckpointExperts(qwen) as source:
        store = build_ram(with_low_copies(source, "int8"), open_device("cpu"))
        assert [format.dtype for format in store.formats] == ["bfloat16"] * 2 + ["int8"] * 2


# -- faults ------------------------------------------------------------------------------------------

TENSOR = "model.layers.2.mlp.experts.3.up_proj.weight"


def read_all(folder: Path) -> None:
    with CheckpointExperts(folder) as source:
        build_ram(source, open_device("cpu"))


@pytest.mark.parametrize("left", [0, 5, 300, -1])
def test_a_truncated_shard_is_named(broken: Path, left: int) -> None:
    file = shard_of(broken, TENSOR)
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.truncate(left % size)
    with pytest.raises(RealError, match=f"{file.name}: .*cut"):
        read_all(broken)


def test_a_shard_that_is_cut_while_it_is_read_is_a_short_read(broken: Path) -> None:
    with CheckpointExperts(broken) as source:
        with shard_of(broken, TENSOR).open("r+b") as opened:
            opened.truncate(1000)
        with pytest.raises(RealError, match="short read"):
            build_ram(source, open_device("cpu"))


@pytest.mark.parametrize(
    ("offset", "data"), [(8, b"["), (30, b"\xff\xff"), (0, b"\xff\xff\xff\xff\0"), (0, b"\3")]
)
def test_a_shard_with_a_damaged_head_is_named(broken: Path, offset: int, data: bytes) -> None:
    file = shard_of(broken, TENSOR)
    with file.open("r+b") as opened:
        opened.seek(offset)
        opened.write(data)
    with pytest.raises(RealError, match=f"{file.name}: its head"):
        read_all(broken)


@pytest.mark.parametrize(("name", "odd"), [("shape", [float("inf")]), ("data_offsets", [0, 16.0])])
def test_a_head_with_other_than_whole_numbers_is_damaged(
    name: str, odd: list[float], tmp_path: Path
) -> None:
    head = {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], name: odd}}
    text = json.dumps(head).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(16)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(RealError, match=r"model\.safetensors: its head is damaged: a has bytes 0"):
        Shards(tmp_path)


def test_a_shard_of_random_bytes_is_found_corrupt(broken: Path) -> None:
    file = shard_of(broken, TENSOR)
    data = bytearray(file.read_bytes())
    head = 8 + int.from_bytes(data[:8], "little")
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (len(data) - head,), dtype=torch.uint8, generator=generator)
    file.write_bytes(data[:head] + noise.numpy().tobytes())
    with pytest.raises(RealError, match=rf"{file.name}: .*values that are not finite"):
        read_all(broken)


def test_a_missing_shard_is_named(broken: Path) -> None:
    file = shard_of(broken, TENSOR)
    file.unlink()
    with pytest.raises(RealError, match=f"{file.name}: cannot open: No such file"):
        read_all(broken)


def test_a_tensor_that_the_index_promises_is_missing(broken: Path) -> None:
    file = change(broken, TENSOR, None)
    with pytest.raises(RealError, match=f"{file.name}: {TENSOR}: missing, though the index"):
        read_all(broken)


def test_a_tensor_that_nothing_names_is_missing(broken: Path) -> None:
    change(broken, TENSOR, None)
    index = broken / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    del said["weight_map"][TENSOR]
    index.write_text(json.dumps(said))
    with pytest.raises(RealError, match="layer 2, expert 3: its up tensor is missing"):
        read_all(broken)


@pytest.mark.parametrize(
    "value", [torch.zeros(15, 32, dtype=torch.bfloat16), torch.zeros(16, 32, dtype=torch.float32)]
)
def test_a_tensor_of_another_shape_or_type_is_named(broken: Path, value: torch.Tensor) -> None:
    file = change(broken, TENSOR, value)
    with pytest.raises(RealError, match=rf"{file.name}: {TENSOR}: is .* must be torch.bfloat16"):
        read_all(broken)


@pytest.mark.parametrize("shape", [(16,), (1, 16, 32)])
def test_a_tensor_of_other_dimensions_is_named(broken: Path, shape: tuple[int, ...]) -> None:
    file = change(broken, TENSOR, torch.zeros(shape, dtype=torch.bfloat16))
    with pytest.raises(RealError, match=f"{file.name}: {TENSOR}: .* must have 2 dimensions"):
        read_all(broken)


def test_matrices_that_do_not_fit_are_named(broken: Path) -> None:
    name = "model.layers.0.mlp.experts.0.down_proj.weight"
    change(broken, name, torch.zeros(32, 15, dtype=torch.bfloat16))
    with pytest.raises(RealError, match=r"shapes \[32, 32\] and \[32, 15\] .* do not fit"):
        read_all(broken)


def test_quantised_experts_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    name = "model.layers.0.mlp.experts.gate_up_proj_blocks"
    save_file({name: torch.zeros(2, 4, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"{name}: the experts are quantised: must be F32"):
        read_all(tmp_path)
    tensors = {
        f"model.layers.0.mlp.experts.0.{part}_proj.weight": torch.zeros(4, 4).to(
            torch.float8_e4m3fn
        )
        for part in ("gate", "up", "down")
    }
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="is F8_E4M3: must be F32, BF16 or F16"):
        read_all(tmp_path)


def test_a_folder_without_a_model_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(RealError, match="no such folder"):
        read_all(tmp_path / "nowhere")
    with pytest.raises(RealError, match=r"no \*\.safetensors file"):
        read_all(tmp_path)
    save_file({"model.norm.weight": torch.zeros(4)}, tmp_path / "model.safetensors")
    with pytest.raises(RealError, match=r"config\.json: cannot read: No such file"):
        read_all(tmp_path)
    (tmp_path / "config.json").write_text("not json")
    with pytest.raises(RealError, match=r"config\.json: is no JSON"):
        read_all(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="has no experts by a name that is known"):
        read_all(tmp_path)


def test_a_model_without_experts_is_told_of() -> None:
    with pytest.raises(ConfigError, match="it has no experts modules"):
        of(torch.nn.Linear(2, 2))
