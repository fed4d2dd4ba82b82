from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from trace_samples import make_meta, make_trace

from traces.exporters import sglang_logical_count
from traces.importers import expert_load, imatrix, moe_infinity
from traces.importers.told import NOTHING, Told
from traces.schema import NO_EXPERT, TraceError


def uses(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 50, shape).astype(float)


# -- EPLB, SGLang, ktransformers -------------------------------------------------------------------


@pytest.mark.parametrize("key", expert_load.KEYS)
def test_loads_are_read_by_name(tmp_path: Path, key: str) -> None:
    loads = uses(4, 6)
    loads[0] = 0
    (tmp_path / "a.json").write_text(json.dumps({key: loads.tolist()}))
    torch.save({key: torch.from_numpy(loads)}, tmp_path / "a.pt")
    for name in ("a.json", "a.pt"):
        found = expert_load.read(tmp_path / name, Told(model="toy", licence="MIT"))
        np.testing.assert_array_equal(found.counts, loads[None, 1:])
        assert (found.layer_indices, found.unit, found.top_k) == ((1, 2, 3), "recording", None)
        assert (found.model, found.licence) == ("toy", "MIT")
        assert found.provenance.source == f"{name}: expert loads ({key})"
        assert found.provenance.kind == "imported"


def test_a_bare_array_of_loads_may_have_steps(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", uses(3, 2, 6))
    found = expert_load.read(tmp_path / "a.npy", NOTHING)
    assert (found.num_samples, found.num_layers, found.num_experts) == (3, 2, 6)
    assert (found.unit, found.layer_indices) == ("step", (0, 1))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"logical_counts": []},
            "has none of logical_count, weight, activation_freq; did you mean",
        ),
        ({"physical_to_logical_map": [[0, 1]]}, "holds a placement of experts"),
        ({"weight": [[1, 2], [3]]}, "weight is no array"),
        ({"weight": []}, "weight is float64(0,): must be numbers"),
        ({"weight": [[]]}, "weight is float64(1, 0): must be numbers"),
        ({"weight": [1, 2]}, "weight is int64(2,): must be numbers [layers, experts]"),
        ({"weight": [["a"]]}, "weight is <U1(1, 1): must be numbers"),
        ({"weight": [[1, -2]]}, "layer 0, expert 1 is -2: must be finite and >= 0"),
        ({"weight": [[1, float("nan")]]}, "layer 0, expert 1 is nan: must be finite"),
        ({"weight": [[0, 0], [0, 0]]}, "no layer has an expert in any token"),
        ({"weight": [[1, 2], [0, 0], [1, 2]]}, "layer 1 has no expert in any token, but layers"),
        ("words", "holds str: must be an array or a dict of one"),
    ],
)
def test_broken_loads_are_refused(tmp_path: Path, content, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(content))
    with pytest.raises(TraceError) as error:
        expert_load.read(path, NOTHING)
    assert message in str(error.value)
    assert str(error.value).startswith(f"{path}: ")


def test_files_that_hold_no_loads(tmp_path: Path) -> None:
    for name, content, message in (
        ("a.json", "{", "not JSON: Expecting"),
        ("a.npy", "words", r"not a whole \.npy file"),
        ("a.pt", "words", r"not a file of torch\.save"),
        ("a.txt", "1 2", r"ends in '\.txt': must be \.json, \.npy or \.pt"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(TraceError, match=message):
            expert_load.read(tmp_path / name, NOTHING)
    with pytest.raises(TraceError, match="No such file or directory"):
        expert_load.read(tmp_path / "absent.json", NOTHING)
    np.save(tmp_path / "b.npy", uses(2, 6))
    with pytest.raises(TraceError, match="num_experts is 6: must be 8, as you said"):
        expert_load.read(tmp_path / "b.npy", Told(num_experts=8))


def test_loads_that_were_balanced_by_force_are_told(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.full((2, 6), 100.0))
    assert "used alike" in "\n".join(expert_load.read(tmp_path / "a.npy", NOTHING).notes)
    np.save(tmp_path / "a.npy", np.full((2, 6), 100.0) + np.arange(6))
    assert "used alike" not in "\n".join(expert_load.read(tmp_path / "a.npy", NOTHING).notes)


def test_a_trace_is_exported_and_read_back(tmp_path: Path) -> None:
    trace = make_trace(make_meta(num_layers=3, num_experts=6, incomplete_layers=(2,)))
    trace.expert_ids[trace.phase == 0, 2] = NO_EXPERT
    out = tmp_path / "a.json"
    chunks = [trace.take(slice(0, 4)), trace.take(slice(4, None))]
    notes = sglang_logical_count.write(iter(chunks), out)
    written = np.array(json.loads(out.read_text())["logical_count"])
    assert written.shape == (4, 6)  # layer 0 is dense
    for layer in range(3):
        ids = trace.expert_ids[:, layer]
        expected = [int((ids == expert).sum()) for expert in range(6)]
        assert written[layer + 1].tolist() == expected
    assert not written[0].any()
    assert any("prompt tokens lack the last layer" in note for note in notes)
    assert any("synthetic" in note for note in notes)
    found = expert_load.read(out, NOTHING)
    np.testing.assert_array_equal(found.counts[0], written[1:])
    assert found.layer_indices == trace.meta.layer_indices
    with pytest.raises(TraceError, match="there are no rows to count"):
        sglang_logical_count.write(iter(()), out)
    with pytest.raises(TraceError, match="No such file or directory"):
        sglang_logical_count.write(iter(chunks), tmp_path / "absent" / "a.json")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.json"]


# -- MoE-Infinity ----------------------------------------------------------------------------------


def test_activation_matrices_without_a_sequence_are_dropped(tmp_path: Path) -> None:
    matrices = uses(5, 3, 6).astype(np.float32)
    matrices[3:] = 0  # places of the collection that no sequence took
    np.save(tmp_path / "a.npy", matrices)
    found = moe_infinity.read(tmp_path / "a.npy", Told(model="toy"))
    np.testing.assert_array_equal(found.counts, matrices[:3])
    assert found.unit == "sequence"
    assert "repaired: 2 of 5 samples without any use were dropped" in found.notes


def test_files_that_hold_no_matrices(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    for content, message in (
        (uses(3, 6), r"holds float64\(3, 6\): must be floats \[sequences, layers, experts\]"),
        (np.zeros((2, 3, 6)), "no layer has an expert in any token"),
        (np.full((1, 1, 1), "x"), r"holds <U1\(1, 1, 1\): must be floats"),
        (np.array([None]), r"not a whole \.npy file of numbers: Object arrays"),
    ):
        np.save(path, content)
        with pytest.raises(TraceError, match=message):
            moe_infinity.read(path, NOTHING)
    with pytest.raises(TraceError, match=r"absent\.npy: No such file"):
        moe_infinity.read(tmp_path / "absent.npy", NOTHING)


# -- imatrix ---------------------------------------------------------------------------------------


def write_imatrix(
    path: Path, counts: dict[str, np.ndarray], chunks: int = 2, size: int = 8
) -> Path:
    writer = GGUFWriter(path, "imatrix")
    writer.add_array("imatrix.datasets", ["/data/wiki.txt"])
    writer.add_uint32("imatrix.chunk_count", chunks)
    writer.add_uint32("imatrix.chunk_size", size)
    for name, values in counts.items():
        experts = len(values)
        writer.add_tensor(f"{name}.in_sum2", np.ones((experts, 4), dtype=np.float32))
        writer.add_tensor(f"{name}.counts", values.astype(np.float32).reshape(experts, 1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def routed_counts(tokens: int, top_k: int, experts: int = 6, seed: int = 0) -> np.ndarray:
    chosen = np.random.default_rng(seed).random((tokens, experts)).argsort(axis=1)[:, :top_k]
    return np.bincount(chosen.ravel(), minlength=experts)


def expert_tensors(layers=(1, 2, 3), tokens: int = 16) -> dict[str, np.ndarray]:
    tensors = {"blk.0.ffn_gate.weight": np.array([tokens]), "output.weight": np.array([tokens])}
    for layer in layers:
        counts = routed_counts(tokens, 2, seed=layer)
        for kind in ("gate", "up", "down"):
            tensors[f"blk.{layer}.ffn_{kind}_exps.weight"] = counts
    return tensors


def test_an_imatrix_gives_the_uses_of_experts(tmp_path: Path) -> None:
    tensors = expert_tensors()
    tensors["blk.3.ffn_gate_exps.weight"] = routed_counts(2, 2)  # only tokens with an output
    found = imatrix.read(write_imatrix(tmp_path / "a.gguf", tensors), Told(native_top_k=4))
    assert (found.layer_indices, found.num_samples, found.top_k) == ((1, 2, 3), 1, 2)
    for place, layer in enumerate(found.layer_indices):
        expected = tensors[f"blk.{layer}.ffn_gate_exps.weight"]
        np.testing.assert_array_equal(found.counts[0, place], expected)
    assert found.provenance.detail == "wiki.txt"
    assert "warning: top_k was forced from 4 to 2" in found.notes


def test_an_imatrix_of_half_the_layers_is_told(tmp_path: Path) -> None:
    path = write_imatrix(tmp_path / "a.gguf", expert_tensors(), chunks=0)
    found = imatrix.read(path, Told(layer_indices=(1, 2, 3, 4), top_k=2))
    assert "warning: only 3 of the 4 MoE layers are in the file" in found.notes
    assert found.top_k == 2
    with pytest.raises(TraceError, match="layer 1 has experts: must be one of the MoE layers"):
        imatrix.read(path, Told(layer_indices=(2, 3)))


def test_imatrices_without_uses_are_refused(tmp_path: Path) -> None:
    older = {f"blk.{i}.ffn_up_exps.weight": np.full(6, 40) for i in (1, 2)}
    uneven = {f"blk.{i}.ffn_up_exps.weight": np.arange(1, 4 + i) for i in (1, 2)}
    for tensors, message in (
        (older, "every expert of a layer has the same count: made of an older imatrix"),
        (uneven, r"layers of \[4, 5\] experts: must be of one size"),
        ({"blk.0.ffn_up.weight": np.array([9])}, r"no tensor blk\.\*\.ffn_\*_exps"),
    ):
        with pytest.raises(TraceError, match=message):
            imatrix.read(write_imatrix(tmp_path / "a.gguf", tensors), NOTHING)
    whole = write_imatrix(tmp_path / "a.gguf", expert_tensors()).read_bytes()
    for content, message in (
        (b"\x03\x00\x00\x00old", "must be GGUF"),
        (b"", "begins with b''"),
        (whole[:60], "not a whole GGUF file"),
        (whole[:-300], "not a whole GGUF file"),
    ):
        (tmp_path / "cut.gguf").write_bytes(content)
        with pytest.raises(TraceError, match=message) as error:
            imatrix.read(tmp_path / "cut.gguf", NOTHING)
        assert "\n" not in str(error.value)
    with pytest.raises(TraceError, match="No such file or directory"):
        imatrix.read(tmp_path / "absent.gguf", NOTHING)
