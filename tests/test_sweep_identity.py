"""What makes a sweep another one: its points, what it reads, and the code that it runs through."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sim.sweeps import identity
from sim.sweeps.chunk import Point
from sim.sweeps.store import _changed

ROOT = Path(__file__).parents[1]
_RUN = """
import sys, tempfile
from pathlib import Path
from sim.point import run_point
from tests.configs import composed
words = ["workload.requests=[24,25]", "workload.length=[4,4]", "output.roofline=true", "output.what_if=true"]
run_point(composed("policy=saem", *words), Path(tempfile.mkdtemp()), [])
for name, module in sys.modules.items():
    if name.split(".")[0] in ("sim", "traces", "hwmodels") and getattr(module, "__file__", None):
        print(module.__file__)
"""


def test_the_code_that_counts_is_all_that_a_run_loads() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _RUN], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = {Path(line) for line in done.stdout.splitlines()}
    assert len(loaded) > 60
    left_out = {f.relative_to(ROOT).as_posix() for f in loaded - identity.own_files()}
    assert {name for name in left_out if not name.endswith("__init__.py")} == set()


def test_the_code_that_shows_results_does_not_count() -> None:
    names = {file.relative_to(ROOT).as_posix() for file in identity.own_files()}
    shown = ("sim/figures/gantt.py", "sim/html/", "sim/sweeps/", "sim/report.py")
    assert [name for name in names if name.startswith(shown)] == []
    assert not {name for name in names if name.endswith("_cli.py")}


def test_a_digest_of_points_tells_order_edits_and_bases_apart() -> None:
    bases = {0: {"cache": {"ratio": 0.5}}, 1: {"cache": {"ratio": 0.25}}}
    edit = ((("cache", "ratio"), 0.1),)
    one, two = Point(0, ("a=1",), 0), Point(1, ("a=2",), 1, edit)
    digests = {
        identity.digest_of_points(points, given)
        for points, given in (
            ([one, two], bases),
            ([two, one], bases),
            ([one], bases),
            ([one, Point(1, ("a=2",), 0, edit)], bases),
            ([one, Point(1, ("a=2",), 1)], bases),
            ([one, two], {**bases, 0: {"cache": {"ratio": 0.75}}}),
        )
    }
    assert len(digests) == 6


def test_the_content_of_files_counts_and_not_their_place(tmp_path: Path) -> None:
    trace = tmp_path / "t.parquet"
    base = {"trace": {"path": str(trace)}}
    path = str(trace)
    assert identity.digests_of_inputs([base], []) == {path: None}
    trace.write_bytes(b"one")
    first = identity.digests_of_inputs([base], [])
    trace.write_bytes(b"two")
    second = identity.digests_of_inputs([base], [])
    edited = Point(0, (), 0, ((("calibration", "trace"), str(trace)),))
    third = identity.digests_of_inputs([{"trace": {"path": "elsewhere"}}], [edited])
    trace.write_bytes(b"one")
    assert identity.digests_of_inputs([base], []) == first
    assert identity.digests_of_inputs([{"trace": {"path": "elsewhere"}}], [edited]) != third
    assert len({None, first[path], second[path]}) == 3


def test_a_file_that_was_missing_may_be_there_now_and_others_are_as_they_were() -> None:
    def changed(found: object) -> str:
        return _changed({"inputs": found}, {"inputs": {"a": "1", "b": "2"}})

    assert changed({"a": "1", "b": "2"}) == changed({"a": "1", "b": None}) == ""
    for other in ({"a": "1", "b": "3"}, {"a": "1"}, {"a": None, "b": "2", "c": None}, "1", None):
        assert "has changed" in changed(other)


def test_code_beside_a_users_module_counts_whatever_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "own_parts"
    package.mkdir()
    (package / "__init__.py").write_text("import own_side, json\n")
    (package / "policy.py").write_text("from . import (\n    near,\n)\nfrom own_later import x\n")
    for name in ("own_side", "own_later", "own_idle"):
        (tmp_path / f"{name}.py").write_text("x = 1\n")
    (package / "near.py").write_text("import sim.types as t\n")
    monkeypatch.syspath_prepend(tmp_path)
    bases = [{"policy": {"cache": {"_target_": "own_parts.policy.Mine"}}}]
    first = identity.digest_of_code(bases)
    assert identity.digest_of_code(bases) == first  # its modules are loaded by now
    (tmp_path / "own_idle.py").write_text("x = 2\n")
    assert identity.digest_of_code(bases) == first
    digests = {first}
    for file in ("own_parts/__init__.py", "own_parts/near.py", "own_side.py", "own_later.py"):
        (tmp_path / file).write_text((tmp_path / file).read_text() + "# changed\n")
        digests.add(identity.digest_of_code(bases))
    assert len(digests) == 5


def test_modules_count_however_they_are_named_and_wherever_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_swept.py").write_text("import json; import own_beside\n")
    (tmp_path / "own_beside.py").write_text("x = 1\n")
    with zipfile.ZipFile(tmp_path / "own.zip", "w") as archive:
        archive.writestr("own_zipped.py", "x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "own.zip")
    target = ("policy", "cache", "_target_")
    points = [Point(n, (), 0, ((target, f"own_{m}.A"),)) for n, m in enumerate(("swept", "zipped"))]
    digests = {identity.digest_of_code([{}]), identity.digest_of_code([{}], points)}
    for name in ("own_swept.py", "own_beside.py"):
        (tmp_path / name).write_text((tmp_path / name).read_text() + "# changed\n")
        digests.add(identity.digest_of_code([{}], points))
    with zipfile.ZipFile(tmp_path / "own.zip", "a") as archive:
        archive.writestr("other.py", "x = 2\n")
    assert len(digests | {identity.digest_of_code([{}], points)}) == 5
