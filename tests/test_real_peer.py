"""The peer: accelerate's disk offload holds what it may, decodes the same tokens, leaves nothing behind."""

from __future__ import annotations

import errno
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from hwmodels.model_shape import ModelShape
from real import peer, peer_load
from real.errors import RealError
from real.page_cache import (
    drop_pages,
    load_pages,
    read_ahead_bytes,
    storage_bytes_read,
    write_through,
)
from real.peer import PROMPT_TOKENS, WAYS, open_peer, peer_config, time_peer
from sim.types import ConfigError
from tests.moe_models import build

pytest.importorskip("accelerate")

SHAPE = ModelShape(
    name="small",
    source="a test",
    num_layers=3,
    num_moe_layers=2,
    num_experts=8,
    top_k=2,
    hidden_size=64,
    num_attention_heads=4,
    num_kv_heads=2,
    head_dim=16,
    expert_intermediate_size=32,
    dense_intermediate_size=48,
    vocab_size=96,
    tie_embeddings=False,
    expert_bits=16,
    dense_bits=16,
    kv_bits=16,
)
MODULE_BYTES = 8 * SHAPE.expert_bytes(0)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def bytes_of(model: torch.nn.Module, part: str = "") -> int:
    return sum(p.nbytes for name, p in model.named_parameters() if part in name)


# -- what it decodes and holds ---------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "minimax_m2"])
def test_the_peer_decodes_what_the_model_decodes(name: str, way: str, tmp_path: Path) -> None:
    model = build(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    module_bytes = bytes_of(model, "layers.0.mlp.experts.")
    with open_peer(model, module_bytes, folder=tmp_path, way=way) as opened:
        opened.decode(5, 2, drop_cache=True)
        tokens = opened.tokens
        assert opened.held_bytes == module_bytes
        assert opened.held_bytes + opened.disk_bytes == bytes_of(model, ".experts.")
        assert opened.peak_bytes == bytes_of(model) - opened.disk_bytes + module_bytes
    expected = model.generate(
        tokens[:, :PROMPT_TOKENS],
        attention_mask=torch.ones_like(tokens[:, :PROMPT_TOKENS]),
        max_new_tokens=6,
        min_new_tokens=6,
        do_sample=False,
        eos_token_id=None,
    )
    assert tokens.tolist() == expected.tolist()
    assert list(tmp_path.iterdir()) == []
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())
    after = model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in {*before, *after})


@pytest.mark.parametrize(("num_held", "spare"), [(0, MODULE_BYTES - 1), (1, 0), (2, 1)])
def test_whole_modules_stay_in_memory_as_far_as_the_bytes_reach(
    num_held: int, spare: int, tmp_path: Path
) -> None:
    memory_bytes = num_held * MODULE_BYTES + spare
    result = time_peer(
        peer_config(SHAPE), memory_bytes, num_tokens=3, batch_size=1, folder=tmp_path
    )
    assert result.held_bytes == num_held * MODULE_BYTES
    assert result.disk_bytes == (2 - num_held) * MODULE_BYTES
    assert f"{num_held} of 2 experts modules held" in result.note
    assert result.cold is not None
    assert result.per_token_ns == result.cold.per_token_ns
    assert len(result.per_token_ns) == len(result.warm.per_token_ns) == 3
    assert result.tpot_ns == sorted(result.per_token_ns)[1]
    assert list(tmp_path.iterdir()) == []


def test_without_dropping_only_the_warm_run_is_timed(tmp_path: Path) -> None:
    with_config = peer_config(SHAPE)
    result = time_peer(
        with_config, 0, num_tokens=2, batch_size=3, folder=tmp_path, drop_cache=False
    )
    assert result.cold is None
    assert result.per_token_ns == result.warm.per_token_ns
    assert "page cache warm" in result.note


def test_a_cold_token_reads_the_storage_and_a_warm_one_does_not(tmp_path: Path) -> None:
    if storage_bytes_read() is None or read_ahead_bytes(tmp_path) is None:
        pytest.skip("no storage below the temporary folder, or its reads are not counted")
    shape = replace(SHAPE, hidden_size=512, expert_intermediate_size=256)
    module_bytes = 8 * shape.expert_bytes(0)
    with open_peer(peer_config(shape), 0, folder=tmp_path, way="dat") as opened:
        cold = opened.decode(4, 1, drop_cache=True).median_read_bytes
        warm = opened.decode(4, 1, drop_cache=False).median_read_bytes
    assert cold is not None
    assert 2 * module_bytes <= cold < 2.5 * module_bytes
    assert warm is not None
    assert warm < module_bytes // 10


# -- the configuration -----------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "dtype"), [(16, torch.bfloat16), (32, torch.float32)])
def test_the_configuration_has_the_sizes_of_the_shape(bits: int, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM

    shape = replace(SHAPE, expert_bits=bits, dense_bits=bits)
    model = AutoModelForCausalLM.from_config(peer_config(shape), dtype=dtype)
    assert peer_config(shape).dtype == dtype
    assert bytes_of(model, ".experts.") == 2 * 8 * shape.expert_bytes(0)
    left_out = sum(bytes_of(model, norm) for norm in (".q_norm.", ".k_norm.", "model.norm."))
    assert bytes_of(model) - left_out == shape.total_bytes  # a shape knows no such norms


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kv_lora_rank": 16, "qk_rope_head_dim": 8}, "kv_lora_rank = 16"),
        ({"num_shared_experts": 1, "shared_intermediate_size": 8}, "num_shared_experts = 1"),
        ({"attention_gate": True}, "attention_gate = True"),
        ({"expert_matrices": 2}, "expert_matrices = 2"),
        ({"expert_bits": 4.25}, "expert_bits = 4.25"),
        ({"expert_bits": 24.0, "expert_bits_by_layer": (16, 32)}, "expert_bits = 24.0"),
        ({"v_head_dim": 8}, "v_head_dim = 8"),
    ],
)
def test_what_a_qwen3_moe_cannot_have_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"model/small: {field}: must be"):
        peer_config(replace(SHAPE, **changes))


# -- faults ----------------------------------------------------------------------------------------


def test_an_absent_accelerate_is_told_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ConfigError, match="pip install accelerate"):
        time_peer(peer_config(SHAPE), 0, num_tokens=1, batch_size=1, folder=tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_bytes": -1}, "memory_bytes = -1: must be >= 0"),
        ({"way": "mmap"}, "way = 'mmap': must be one of safetensors, dat"),
        ({"num_tokens": 0}, "num_tokens = 0"),
        ({"batch_size": 0}, "batch_size = 0"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    arguments = {"memory_bytes": 0, "num_tokens": 1, "batch_size": 1, **changes}
    with pytest.raises(ConfigError, match=message):
        time_peer(peer_config(SHAPE), folder=tmp_path, **arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_fused_experts_is_refused(tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 31, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    dense = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads))
    with pytest.raises(ConfigError, match="Qwen2ForCausalLM has no fused experts"):
        time_peer(dense, 0, num_tokens=1, batch_size=1, folder=tmp_path)


class Usage(NamedTuple):
    total: int = 1000
    used: int = 900
    free: int = 100


def test_too_little_room_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage())
    with pytest.raises(RealError, match=r"GB needed .* GB free"):
        time_peer(peer_config(SHAPE), 0, num_tokens=1, batch_size=1, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("code", "rule"), [(errno.ENOSPC, "no space left"), (errno.EIO, None)])
def test_a_file_system_that_fails_leaves_nothing_behind(
    code: int, rule: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(checkpoint: Path, offload: Path, *rest: Any) -> None:
        offload.mkdir()
        (offload / "half.safetensors").write_bytes(b"half")
        raise OSError(code, "of the device")

    monkeypatch.setattr(peer, "load_offloaded", fails)
    with pytest.raises(RealError if rule else OSError, match=rule or "of the device"):
        time_peer(peer_config(SHAPE), 0, num_tokens=1, batch_size=1, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_absent_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(RealError, match=r"absent: must be a folder to write to"):
        time_peer(peer_config(SHAPE), 0, num_tokens=1, batch_size=1, folder=tmp_path / "absent")


@pytest.mark.usefixtures("heeds_sigint")
@pytest.mark.parametrize("moment", ["_own_memory", "drop_pages"])
def test_ctrl_c_leaves_nothing_behind(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def interrupted(*args: Any) -> None:
        seen.append(len(list(tmp_path.rglob("*.safetensors"))))
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(peer if moment == "drop_pages" else peer_load, moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        time_peer(peer_config(SHAPE), 0, num_tokens=1, batch_size=1, folder=tmp_path)
    assert seen[0] > 0
    assert list(tmp_path.iterdir()) == []


# -- the page cache --------------------------------------------------------------------------------


def test_dropped_pages_are_read_from_storage_again(tmp_path: Path) -> None:
    if storage_bytes_read() is None or read_ahead_bytes(tmp_path) is None:
        pytest.skip("no storage below the temporary folder, or its reads are not counted")
    num_bytes = 4 << 20
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").write_bytes(b"x" * num_bytes)
    write_through(tmp_path)
    load_pages(tmp_path)
    assert _read_by_loading(tmp_path) == 0
    assert drop_pages(tmp_path)
    assert _read_by_loading(tmp_path) >= num_bytes


def _read_by_loading(folder: Path) -> int:
    before = storage_bytes_read() or 0
    load_pages(folder)
    return (storage_bytes_read() or 0) - before


@pytest.mark.cuda
def test_on_a_gpu_the_tokens_are_the_same(tmp_path: Path) -> None:
    model = build("qwen3_moe")
    tokens = []
    for device in ("cpu", "cuda:0"):
        with open_peer(model, 0, folder=tmp_path, device=device) as opened:
            opened.decode(4, 2, drop_cache=False)
            tokens.append(opened.tokens.cpu().tolist())
    assert tokens[0] == tokens[1]
