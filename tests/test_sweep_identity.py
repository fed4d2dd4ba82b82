"""What makes a sweep another one: its points, what it reads, and the code that it runs through."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from sim.sweeps import identity
from sim.sweeps.chunk import Point

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
    absent = identity.digest_of_inputs([base], [])
    trace.write_bytes(b"one")
    first = identity.digest_of_inputs([base], [])
    trace.write_bytes(b"two")
    second = identity.digest_of_inputs([base], [])
    edited = Point(0, (), 0, ((("calibration", "trace"), str(trace)),))
    third = identity.digest_of_inputs([{"trace": {"path": "elsewhere"}}], [edited])
    trace.write_bytes(b"one")
    assert identity.digest_of_inputs([base], []) == first
    assert identity.digest_of_inputs([{"trace": {"path": "elsewhere"}}], [edited]) != third
    assert len({absent, first, second}) == 3
