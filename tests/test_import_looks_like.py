"""A wrong format's name is answered with the right one, where the file's first bytes tell it."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign import META, choices, export, lattice_lines, mpt, routes, small_trace, write_lines

from sim.cli import main
from traces.importers.formats import FORMATS
from traces.importers.looks_like import looks_like
from traces.store import write_trace

IDS = choices(20)


def _npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def _pt(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _lines(*lines: Any) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


STREAM = [
    np.array([layer, 20, 4, *IDS[:, layer].reshape(-1)], dtype="<i4").tobytes()
    for layer in range(3)
]
SAMPLES = {
    "experts-npz": _npz(experts=IDS, meta="{}"),
    "route-csv": b"# route_trace v1\n# model=x\n",
    "sglang-recorder": _pt({"records": [], "last_physical_to_logical_map": torch.ones(2, 3)}),
    "routed-experts": _npy(IDS),
    "routed-experts ": _lines({"text": "a", "meta_info": {"routed_experts": "AAAA"}}),
    "rl-tensors": _pt({"samples": [{"rollout_routed_experts": torch.ones(2, 3, 4)}]}),
    "moe-balance": _npz(request_id="a", routed_experts=IDS),
    "moe-balance ": _lines({"layer": 3, "batch_id": 0, "topk_experts": [[1, 2]]}),
    "megatron-trace": _lines({"step": 0, "layer": 1, "num_tokens": 1, "top_indices": [[0, 3]]}),
    "megatron-counts": _lines({"iter": 0, "block": "decoder", "layer": 0, "tpe": [[1, 2]]}),
    "moe-policylang": _lines({"num_experts": 4, "records_full_softmax": False}, {"p": 0}),
    "moe-trace-csv": b"0,3\n0,5\n1,2\n",
    "moe-trace-bin": b"".join(STREAM),
    "finemoe": pickle.dumps({"a": {"matrix": None, "iters": []}}),
    "vllm-patch": _lines(META, *routes(IDS[:, 0])),
    "lattice": _lines(*lattice_lines(IDS)),
    "imp": json.dumps({"top_k": 4, "trace": [[0, 1, 2, 3, 4]]}).encode(),
    "mpt": mpt(IDS),
    "eplb": json.dumps({"logical_count": [[1, 2], [3, 4]]}, indent=1).encode(),
    "moe-infinity": _npy(np.ones((2, 3, 4))),
    "imatrix": b"GGUF\3\0\0\0",
}


def test_every_format_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    for name, content in SAMPLES.items():
        (tmp_path / "file").write_bytes(content)
        assert looks_like(tmp_path / "file") == name.strip()
    assert {name.strip() for name in SAMPLES} == {known.name for known in FORMATS}
    export("moe-policylang", small_trace(), tmp_path / "a.parquet")
    assert looks_like(tmp_path / "a.parquet") == "moe-policylang"


def test_nothing_is_guessed_of_other_files(tmp_path: Path) -> None:
    others = (b"", b"words\n", b"\x93NUMPY", b"PK\3\4", b"PAR1", b'{"a": 1}', b"\xff" * 99)
    for content in (*others, IDS.astype("<i4").tobytes()):
        (tmp_path / "file").write_bytes(content)
        assert looks_like(tmp_path / "file") is None
    assert looks_like(tmp_path / "absent") is None


def test_a_folder_looks_like_what_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "a_readme").write_text("words\n")
    (tmp_path / "b").write_bytes(SAMPLES["mpt"])
    assert looks_like(tmp_path) == "mpt"
    (tmp_path / "c").write_bytes(SAMPLES["route-csv"])
    assert looks_like(tmp_path) is None


@pytest.mark.parametrize("name", [known.name for known in FORMATS])
def test_a_wrong_name_is_answered_with_the_right_one(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = "imatrix" if name != "imatrix" else "mpt"
    (tmp_path / "file").write_bytes(SAMPLES[name])
    out = str(tmp_path / "out.parquet")
    assert main(["import", wrong, str(tmp_path / "file"), "--out", out]) == 2
    told = capsys.readouterr().err
    assert told.endswith(f"; it looks like {name}\n")
    assert len(told.splitlines()) == 1


def test_a_file_without_a_format_and_a_trace_of_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lines(tmp_path / "a.jsonl", lattice_lines(IDS))
    assert main(["import", str(path)]) == 2
    assert "FORMAT goes before it; it looks like lattice" in capsys.readouterr().err
    write_trace(tmp_path / "b.parquet", small_trace())
    command = ["import", "moe-policylang", str(tmp_path / "b.parquet")]
    assert main([*command, "--out", str(tmp_path / "c.parquet")]) == 2
    assert "it is a trace of Greenroom already" in capsys.readouterr().err


def test_ids_are_no_activation_matrices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.npy").write_bytes(SAMPLES["routed-experts"])
    assert main(["import", "moe-infinity", str(tmp_path / "a.npy")]) == 2
    told = capsys.readouterr().err
    assert "must be floats [sequences, layers, experts]; it looks like routed-experts" in told
