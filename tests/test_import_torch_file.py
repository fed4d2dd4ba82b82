from __future__ import annotations

import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path, PosixPath

import numpy as np
import pytest
import torch

from traces.importers.torch_file import load_torch
from traces.schema import TraceError


class Runs:
    """What a pickle can do to who loads it."""

    def __reduce__(self):
        return Path.touch, (Path("touched-by-a-pickle"),)


def saved(path: Path, content: object) -> Path:
    torch.save(content, path)
    return path


def test_tensors_become_arrays_however_deep(tmp_path: Path) -> None:
    content = {
        "ids": torch.arange(6, dtype=torch.int32).reshape(2, 3),
        "list": [torch.ones(2, dtype=torch.bfloat16), None, "text", 1.5, True],
        "pair": (1, torch.zeros(1, dtype=torch.uint8)),
        "array": np.arange(4, dtype=np.int16),
        "ragged": np.array([np.arange(2), None], dtype=object),
        "parameter": torch.nn.Parameter(torch.ones(1)),
    }
    found = load_torch(saved(tmp_path / "a.pt", content))
    assert found["ids"].dtype == np.int32
    np.testing.assert_array_equal(found["ids"], [[0, 1, 2], [3, 4, 5]])
    assert found["list"][0].dtype == np.float32
    assert found["list"][1:] == [None, "text", 1.5, True]
    assert type(found["pair"]) is tuple
    assert found["pair"][1].dtype == np.uint8
    np.testing.assert_array_equal(found["array"], [0, 1, 2, 3])
    np.testing.assert_array_equal(found["ragged"][0], [0, 1])
    assert type(found["parameter"]) is np.ndarray


def test_arrays_that_numpy_1_pickled_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    content = pickle.dumps({"a": np.arange(3)}, protocol=2)
    older = content.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")
    assert older != content
    torch.save({"a": np.arange(3)}, path, _use_new_zipfile_serialization=False)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n"))
    assert path.read_bytes() != whole
    np.testing.assert_array_equal(load_torch(path)["a"], [0, 1, 2])


@pytest.mark.parametrize(
    "content",
    [
        {"a": Runs()},
        {"a": np.array([Runs()], dtype=object)},
        {"a": PosixPath("x")},
        [torch.ones(1), Runs],
    ],
)
def test_objects_are_refused_and_do_not_run(tmp_path: Path, monkeypatch, content) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TraceError, match=r"a\.pt: holds a Python object \(\S+\), which could run"):
        load_torch(saved(tmp_path / "a.pt", content))
    assert not Path("touched-by-a-pickle").exists()


def test_files_that_are_cut_or_none(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", {"a": torch.ones(100)})
    whole = path.read_bytes()
    for content in (b"", b"words\n", whole[:50], whole[:-40], pickle.dumps(Counter("a"))):
        path.write_bytes(content)
        with pytest.raises(TraceError, match=r"a\.pt: not a file of torch\.save") as error:
            load_torch(path)
        assert "\n" not in str(error.value)
    with pytest.raises(TraceError, match="Is a directory"):
        load_torch(tmp_path)
    with pytest.raises(TraceError, match="No such file or directory"):
        load_torch(tmp_path / "absent.pt")


def test_importers_load_no_torch() -> None:
    code = (
        "import sys, importlib, traces.importers.formats as f\n"
        "[importlib.import_module(f'traces.importers.{x.module}') for x in f.FORMATS]\n"
        "sys.exit('torch' in sys.modules or 'gguf' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
