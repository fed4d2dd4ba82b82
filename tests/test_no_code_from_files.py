"""No file of data runs code: which loaders there are, and what malicious files do to them: nothing."""

from __future__ import annotations

import ast
import builtins
import io
import os
import pickle
import struct
import subprocess
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign import small_trace
from reader_subjects import SUBJECTS

from sim.mistakes import explain
from sim.types import ConfigError
from traces.importers.npz_file import load_npz
from traces.importers.torch_pickle import load_pickle
from traces.store import write_trace
from traces.trace import TraceError

ROOT = Path(__file__).parents[1]
PACKAGES = ("sim", "traces", "hwmodels", "real", "conf")

# -- which loaders there are --------------------------------------------------------------------------

UNPICKLERS = {
    "traces/importers/npz_file.py": ["_ArraysOnly"],
    "traces/importers/torch_pickle.py": ["_StorageHead", "_Values"],
}
"""Classes that unpickle, each with a ``find_class`` of its own that knows names by a table."""
UNSAFE_MODULES = {
    "shelve",
    "marshal",
    "joblib",
    "dill",
    "cloudpickle",
    "jsonpickle",
    "imp",
    "runpy",
    "code",
}
MAY_IMPORT = {
    "sim/sweeps/slurm_engine.py": "submitit pickles between its own processes, in the sweep's own folder",
}
RUNNERS = {
    "eval",
    "exec",
    "compile",
    "execfile",
    "__import__",
    "read_pickle",
    "unsafe_load",
    "full_load",
}
SAFE_YAML = {
    "safe_load",
    "safe_dump",
    "dump",
    "YAMLError",
    "MarkedYAMLError",
    "SafeLoader",
    "CSafeLoader",
}
SAFE_YAML |= {
    "ScalarNode",
    "SafeDumper",
    "CSafeDumper",
    "Node",
    "MappingNode",
    "SequenceNode",
    "Mark",
}
SAFE_YAML |= {"__file__", "compose", "parse", "CollectionNode"}
SAFE_YAML |= {"AliasEvent", "ScalarEvent", "CollectionStartEvent", "CollectionEndEvent"}


def sources() -> Iterator[tuple[str, ast.Module]]:
    files = [file for name in PACKAGES for file in sorted((ROOT / name).rglob("*.py"))]
    for file in [*files, ROOT / "greenroom.py"]:
        if file.exists():
            yield file.relative_to(ROOT).as_posix(), ast.parse(file.read_text(encoding="utf-8"))


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Yield dotted names of what is called, and the call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def keyword(call: ast.Call, name: str) -> object:
    found = [k.value for k in call.keywords if k.arg == name]
    return found[0].value if found and isinstance(found[0], ast.Constant) else None


def test_only_named_unpicklers_unpickle() -> None:
    found: dict[str, list[str]] = {}
    for source, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and any(
                "Unpickler" in ast.unparse(b) for b in node.bases
            ):
                found.setdefault(source, []).append(node.name)
                assert "find_class" in {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
        for name, _ in calls(tree):
            bad = name.startswith(
                ("pickle.load", "pickle.Unpickler", "pickle._Unpickler", "_pickle.")
            )
            assert not bad, f"{source}: {name}"
    assert {source: sorted(names) for source, names in found.items()} == UNPICKLERS


def test_no_module_that_loads_code_is_imported() -> None:
    for source, tree in sources():
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            tops = {name.partition(".")[0] for name in names}
            assert not tops & UNSAFE_MODULES, f"{source}: {tops}"
            if {"submitit"} & tops:
                assert source in MAY_IMPORT, f"{source}: {tops}"
            if "pickle" in tops:
                assert source in {*UNPICKLERS, "traces/importers/torch_file.py",
                                  "traces/importers/array_pickle.py"}  # fmt: skip


def test_torch_and_numpy_load_values_only() -> None:
    for source, tree in sources():
        for name, call in calls(tree):
            last = name.rpartition(".")[2]
            if name == "torch.load":
                assert keyword(call, "weights_only") is True, source
            if name in ("np.load", "numpy.load") or last == "read_array":
                assert keyword(call, "allow_pickle") is False, source
            if last == "from_pretrained":
                assert keyword(call, "trust_remote_code") in (None, False), source
            assert keyword(call, "allow_pickle") in (None, False), source


def test_nothing_is_evaluated_and_yaml_is_plain() -> None:
    for source, tree in sources():
        for name, call in calls(tree):
            is_method = name in ("re.compile", "torch.compile") or name.endswith(
                (".eval", ".compile")
            )
            assert is_method or name.rpartition(".")[2] not in RUNNERS, f"{source}: {name}"
            if name.rpartition(".")[2] in ("eval", "compile") and not name.startswith("re."):
                assert not call.args, f"{source}: {name}"  # model.eval()
            assert keyword(call, "shell") is not True, source
            if name == "yaml.load":
                assert len(call.args) + len(call.keywords) == 2, source  # which loaders: below
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "yaml":
                assert node.attr in {*SAFE_YAML, "load"}, f"{source}: yaml.{node.attr}"


def test_no_resolver_of_ours_and_no_data_through_omegaconf() -> None:
    """Configurations are composed by OmegaConf, which resolves ``${oc.env:...}``; data are not read by it."""
    loads = set()
    for source, tree in sources():
        for name, _ in calls(tree):
            assert "register_new_resolver" not in name, source
            assert "register_resolver" not in name, source
            if name == "OmegaConf.load":
                loads.add(source)
    assert loads <= {"sim/check_cli.py"}  # a policy's file is a configuration


# -- what malicious files do --------------------------------------------------------------------------

MARK = "attacked"


class Calls:
    """Pickles as a call of ``function`` with ``arguments``."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, state: Any = None) -> None:
        self.told = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.told


def _global(text: str) -> bytes:
    """A hand-written pickle: calls a dotted name of a module with one text."""
    module, name, argument = text.split(" ", 2)
    return f"c{module}\n{name}\n(V{argument}\ntR.".encode()


TOUCH = f"touch {MARK}"
ATTACKS: dict[str, object] = {
    "system": Calls(os.system, TOUCH),
    "eval": Calls(eval, f"open({MARK!r}, 'w')"),
    "exec": Calls(exec, f"open({MARK!r}, 'w')"),
    "open": Calls(open, MARK, "w"),
    "Popen": Calls(subprocess.Popen, ["touch", MARK]),
    "import": Calls(__import__, "antigravity"),
    "getattr": Calls(getattr, Calls(__import__, "os"), "system"),
    "map": Calls(map, os.system, [TOUCH]),
    "partial": Calls(__import__("functools").partial, os.system, TOUCH),
    "touch": Calls(Path.touch, Path(MARK)),
    "numpy load": Calls(np.load, MARK),
    "numpy save": Calls(np.save, MARK, np.zeros(2)),
    "numpy memmap": Calls(np.memmap, MARK, "u1", "w+", 0, (4,)),
    "numpy tofile": Calls(np.ndarray.tofile, np.zeros(2), MARK),
    "numpy fromfile": Calls(np.fromfile, "/etc/hostname"),
    "torch load": Calls(torch.load, MARK),
    "torch save": Calls(torch.save, 1, MARK),
    "torch storage": Calls(torch.storage._load_from_bytes, pickle.dumps(Calls(os.system, TOUCH))),
    "torch rebuild": Calls(
        torch._utils._rebuild_tensor_v2, Calls(os.system, TOUCH), 0, (1,), (1,), False, {}
    ),
    "torch wrapper": Calls(
        torch._utils._rebuild_wrapper_subclass, Calls(os.system, TOUCH), 1, 1, 1, 1, 1, 1
    ),
    "type": Calls(type, "X", (), {}),
    "class": os.system,
    "state": Calls(OrderedDict, state={"x": Calls(os.system, TOUCH)}),
    "key": {Calls(os.system, TOUCH): 1},
    "deep": [[{"a": (1, Calls(os.system, TOUCH))}]],
    "setattr": Calls(setattr, Calls(__import__, "builtins"), "open", 3),
    "loop": "made below",
    "laughs": "made below",
    "long memo": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "long text": b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"a.",
    "long frame": b"\x80\x04\x95" + struct.pack("<Q", 2**60) + b"N.",
    "by hand": _global(f"os system touch {MARK}"),
    "nested name": _global(f"traces.importers.npz_file os.system {MARK}"),
    "stack name": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x0etouch attacked\x85R.",
    "through us": _global(f"traces.importers.npz_file np.save {MARK}"),
    "extension": b"\x80\x02\x82\x01.",
    "state of a function": b"ctorch._utils\n_rebuild_tensor_v2\nN}V__doc__\nVx\ns\x86b.",
    "state of a class": b"cnumpy\nndarray\nN}V__doc__\nVx\ns\x86b.",
    "state of a maker": b"cnumpy._core.numeric\n_frombuffer\nN}Varray\nVx\ns\x86b.",
}
_loop: list[Any] = []
_loop.append(_loop)
ATTACKS["loop"] = _loop
_laughs: list[Any] = ["ha"] * 10
for _ in range(12):
    _laughs = [_laughs] * 10
ATTACKS["laughs"] = _laughs


class Dtype:
    """A dtype whose flags deny the objects in it: numpy would follow the array's bytes as pointers."""

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {"a": (np.dtype("O"), 0)}
        return np.dtype, ("V8", False, True), (3, "|", None, ("a",), fields, 8, 1, 0)


class Flags:
    def __reduce__(self) -> tuple[Any, ...]:
        return np.dtype, ("i8", False, True), (3, "<", None, None, None, -1, -1, 63)


def _array(kind: object, data: object, shape: tuple[int, ...] = (1,)) -> Calls:
    made = (np.ndarray, (0,), b"b")
    return Calls(np._core.multiarray._reconstruct, *made, state=(1, shape, kind, False, data))


WILD = struct.pack("<Q", 0x4141414141414141)
ATTACKS |= {
    "pointers": _array(Dtype(), WILD),
    "pointers deep": [np.arange(3), _array(Dtype(), WILD)],
    "objects of bytes": _array(np.dtype("O"), WILD),
    "wrong length": _array(np.dtype("i8"), WILD, (2**40,)),
    "negative": _array(np.dtype("i8"), WILD, (-1,)),
    "flags": _array(Flags(), "text"),
    "another class": Calls(np._core.multiarray._reconstruct, OrderedDict, (0,), b"b"),
}


def pickled(name: str) -> bytes:
    attack = ATTACKS[name]
    return attack if isinstance(attack, bytes) else pickle.dumps(attack)


def npz_with(path: Path, payload: bytes) -> Path:
    """An archive of which every array that some importer reads is the payload, as an object."""
    head = io.BytesIO()
    about = {"descr": "|O", "fortran_order": False, "shape": ()}
    np.lib.format.write_array_header_1_0(head, about)
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("experts", "meta", "routed_experts", "request_id", "expert_ids", "facts"):
            archive.writestr(f"{name}.npy", head.getvalue() + payload)
    return path


def npy_with(path: Path, payload: bytes) -> Path:
    head = io.BytesIO()
    about = {"descr": "|O", "fortran_order": False, "shape": (1,)}
    np.lib.format.write_array_header_1_0(head, about)
    path.write_bytes(head.getvalue() + payload)
    return path


def pt_with(path: Path, payload: bytes) -> Path:
    """What ``torch.save`` writes, with another pickle within."""
    torch.save({"records": 1}, path)
    with zipfile.ZipFile(path) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in held.items():
            archive.writestr(name, payload if name.endswith("data.pkl") else data)
    return path


def raw_with(path: Path, payload: bytes) -> Path:
    path.write_bytes(payload)
    return path


MAKERS = {".npz": npz_with, ".npy": npy_with, ".pt": pt_with, ".pkl": raw_with}
TAKERS = [name for name, subject in SUBJECTS.items() if Path(subject.file).suffix in MAKERS]


def attacked(name: str, path: Path, make: Callable[[Path, bytes], Path]) -> None:
    for attack in ATTACKS:
        make(path, pickled(attack))
        with pytest.raises((ValueError, ConfigError)) as caught:
            SUBJECTS[name].read(path)
        line = explain(caught.value)
        assert line is not None, (attack, caught.value)
        assert "\n" not in line
        assert [file.name for file in path.parent.iterdir()] in ([path.name], [path.name, "asked.json"],
                                                                 ["asked.json", path.name])  # fmt: skip


@pytest.mark.parametrize("name", TAKERS)
def test_no_importer_runs_what_a_file_asks_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before, opened = np.ndarray.__doc__, builtins.open
    path = tmp_path / SUBJECTS[name].file
    attacked(name, path, MAKERS[path.suffix])
    attacked(name, path, raw_with)
    assert np.ndarray.__doc__ == before
    assert builtins.open is opened
    path.unlink()
    SUBJECTS[name].make(path)
    SUBJECTS[name].read(path)  # and what they do to us is nothing, either


def test_every_format_that_may_hold_a_pickle_is_attacked() -> None:
    assert {Path(SUBJECTS[name].file).suffix for name in TAKERS} == {*MAKERS}
    assert len(TAKERS) >= 9


def test_plain_pickles_and_archives_are_read_all_the_same(tmp_path: Path) -> None:
    held: dict[str, Any] = {
        "list": [1, 2.5, "text", None, True],
        "array": np.arange(6, dtype=">i4").reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "objects": np.array([np.arange(2), None, "a"], dtype=object),
        "number": np.float32(1.5),
        "text": np.array(["ab", "c"]),
    }
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        if protocol < 3:
            held = {name: value for name, value in held.items() if name != "empty"}
        else:
            held["empty"] = np.zeros((0, 3), np.int16)
        for core in ("numpy._core", "numpy.core"):
            data = pickle.dumps(held, protocol)
            if protocol < 4:
                data = data.replace(b"cnumpy._core.", f"c{core}.".encode())
            found = load_npz(npz_with(tmp_path / "a.npz", data))["experts"]
            assert found["list"] == held["list"]
            for name in {"array", "fortran", "empty", "text"} & {*held}:
                np.testing.assert_array_equal(found[name], held[name])
                assert found[name].dtype == held[name].dtype
            assert found["objects"][0].tolist() == [0, 1]
            assert (found["number"], type(found["number"])) == (np.float32(1.5), np.float32)


def test_a_tensor_that_reaches_beyond_its_storage_is_refused(tmp_path: Path) -> None:
    storage = torch.arange(4.0).untyped_storage()
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.float32, _internal=True)
    for told in (
        (0, (5,), (1,)),
        (2, (3,), (1,)),
        (0, (2,), (-1,)),
        (0, (2**40,), (0,)),
        (-1, (1,), (1,)),
    ):
        call = Calls(torch._utils._rebuild_tensor_v2, typed, *told, False, OrderedDict())
        path = raw_with(tmp_path / "a.pkl", pickle.dumps(call))
        with pytest.raises(TraceError, match="does not fit its storage"):
            load_pickle(path)


# -- interpolations -----------------------------------------------------------------------------------


def test_data_files_are_not_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``${oc.env:...}`` in data is text; nobody's environment ends in a result or an error."""
    monkeypatch.setenv("SECRET_OF_THE_TEST", "opensesame")
    lure = "${oc.env:SECRET_OF_THE_TEST}"
    told = []
    for name in (
        "published rows",
        "rows yaml",
        "calibration",
        "rows csv",
        "arrivals",
        "synth fit",
        "summary",
    ):
        subject = SUBJECTS[name]
        folder = tmp_path / name.replace(" ", "_")
        path = folder / subject.file
        path.parent.mkdir(parents=True)
        subject.make(path)
        text = path.read_text()
        for old in ("qwen3_30b_a3b", "0.5", "toy", "tiny", "fused", "lru"):
            if old in text:
                path.write_text(text.replace(old, lure))
                try:
                    told.append(repr(subject.read(path)))
                except Exception as error:
                    told.append(str(explain(error)))
    assert len(told) > 7
    assert not any("opensesame" in text for text in told)
    assert any(lure in text for text in told)


def test_a_trace_s_header_is_not_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from configs import composed

    from sim.simulate import simulate

    monkeypatch.setenv("SECRET_OF_THE_TEST", "opensesame")
    write_trace(tmp_path / "a.parquet", small_trace(model="${oc.env:SECRET_OF_THE_TEST}"))
    config = composed(
        f"trace.path={tmp_path / 'a.parquet'}", "trace.name=mine", "output.belady=false"
    )
    found = repr(simulate(config))
    assert "opensesame" not in found
    assert "${oc.env:SECRET_OF_THE_TEST}" in found
