"""Damaged counters and recordings give a result or an error of one line, whatever stands in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang_engine import Engine, Job, per_pass
from test_import_counts import expert_tensors, write_imatrix
from test_import_megatron_counts import lines_of, whole

from traces.importers import expert_load, imatrix, megatron_counts, moe_infinity, sglang_recorder
from traces.importers.formats import Reader
from traces.importers.told import Told
from traces.schema import TraceError

TOLD = Told(num_experts=8)
ODD = (None, -1, 2**40, 1e300, float("nan"), "x", True, [], {}, [[]], [[1], [2, 3]], [None])
SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def _engine() -> Engine:
    return Engine([Job(5, 4), Job(11, 3), Job(3, 6, arrival=4)], experts=8, mixed=True)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


RECORDS = [{k: _plain(v) for k, v in record.items()} for record in _engine().run()]
DUMPS: dict[str, tuple[Reader, str, Any]] = {
    "per_token": (sglang_recorder.read, "a.pt", RECORDS),
    "per_pass": (sglang_recorder.read, "a.pt", per_pass(RECORDS)),
    "stat": (sglang_recorder.read, "a.pt", np.ones((3, 3, 8)).tolist()),
    "loads": (expert_load.read, "a.json", np.arange(24).reshape(3, 8).tolist()),
    "megatron": (megatron_counts.read, "a.jsonl", lines_of(whole()[0])),
}


def _damaged(value: Any, draw) -> Any:
    """A copy of which one value, somewhere within, is gone or another."""
    if isinstance(value, dict | list) and value and draw(st.integers(0, 9)):
        copy = dict(value) if isinstance(value, dict) else list(value)
        key = draw(st.sampled_from(list(copy))) if isinstance(copy, dict) else 0
        if isinstance(copy, list):
            key = draw(st.integers(0, len(copy) - 1))
        copy[key] = _damaged(copy[key], draw)
        return copy
    return draw(st.sampled_from(ODD))


def _tensor(value: Any) -> Any:
    """A tensor, as the recorder has it, where a list still makes one."""
    try:
        return torch.tensor(value, dtype=torch.int32)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return value


def _save(path: Path, kind: str, content: Any) -> None:
    if kind == "megatron":
        lines = content if isinstance(content, list) else [content]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    elif kind == "loads":
        path.write_text(json.dumps({"logical_count": content}))
    elif kind == "stat":
        torch.save({"rank": 0, "logical_count": _tensor(content)}, path)
    else:
        names = ("topk_ids_of_layer", "global_physical_count")
        for record in content if isinstance(content, list) else ():
            if isinstance(record, dict):
                record |= {name: _tensor(record[name]) for name in names if name in record}
        table = torch.arange(8).repeat(3, 1)
        torch.save({"records": content, "last_physical_to_logical_map": table}, path)


def _read(read: Reader, path: Path) -> None:
    message = f"{path}: "
    try:
        read(path, TOLD)
    except TraceError as error:
        message = str(error)
    assert message.startswith(str(path))
    assert "\n" not in message
    assert len(message) < 2 * len(str(path)) + 400


@pytest.mark.parametrize("kind", DUMPS)
@SETTINGS
@given(data=st.data())
def test_damaged_values(tmp_path: Path, kind: str, data) -> None:
    read, name, content = DUMPS[kind]
    _save(tmp_path / name, kind, json.loads(json.dumps(content)))
    read(tmp_path / name, TOLD)
    _save(tmp_path / name, kind, _damaged(json.loads(json.dumps(content)), data.draw))
    _read(read, tmp_path / name)


@pytest.mark.parametrize("kind", ["gguf", "npy", "pt"])
@SETTINGS
@given(data=st.data())
def test_damaged_bytes(tmp_path: Path, kind: str, data) -> None:
    path = tmp_path / f"a.{kind}"
    if kind == "gguf":
        write_imatrix(path, expert_tensors())
    elif kind == "npy":
        np.save(path, np.ones((3, 3, 8)))
    else:
        torch.save({"rank": 0, "logical_count": torch.ones(3, 3, 8)}, path)
    content = bytearray(path.read_bytes())
    for _ in range(3):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(len(content) // 2, len(content)))])
    readers = {"gguf": imatrix.read, "npy": moe_infinity.read, "pt": sglang_recorder.read}
    _read(readers[kind], path)
