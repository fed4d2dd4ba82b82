"""The command as a user meets it: runs, sweeps, mistakes; every call is its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

REPO = Path(__file__).parents[1]
HEAVY = ("torch", "transformers", "pandas", "pyarrow", "matplotlib.pyplot")


def greenroom(
    *arguments: str, cwd: Path, module: str = "sim.cli", timeout: float = 120.0
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPO), "COLUMNS": "200"}
    environment.pop("HYDRA_FULL_ERROR", None)
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_run_leaves_its_files_and_says_where(tmp_path: Path, small_trace_file: Path) -> None:
    done = greenroom(
        "sim",
        "policy=lru",
        f"trace.path={small_trace_file}",
        "cache.ratio=0.25",
        "output.events=true",
        "hydra.run.dir=out",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    assert done.stdout.strip().splitlines()[-1].endswith("out")
    summary = json.loads((out / "summary.json").read_text())
    assert summary["policy"] == "lru"
    assert summary["cache_ratio"] == 0.25
    assert summary["provenance"]["trace_kind"] == "synthetic"
    assert "synthetic trace" in done.stdout
    steps = pq.read_table(out / "steps.parquet")
    assert steps.num_rows == summary["steps"]
    assert sum(steps["hits"].to_pylist()) == round(
        summary["hit_rate"] * sum(steps["accesses"].to_pylist())
    )
    assert pq.read_table(out / "requests.parquet").num_rows == summary["requests"]
    assert not [name for name in files_below(out) if ".tmp-" in name]
    events = pq.read_table(out / "events.parquet").to_pylist()
    copied = sum(row["num_bytes"] for row in events if row["lane"] == "h2d")
    assert copied == summary["h2d_bytes"] > 0
    assert "_target_: sim.policies.classic.LRU" in (out / "config.yaml").read_text()


def test_the_same_run_twice_is_the_same_bytes(tmp_path: Path, small_trace_file: Path) -> None:
    found = []
    for name in ("a", "b"):
        run = ("sim", "policy=saem", f"trace.path={small_trace_file}", f"hydra.run.dir={name}")
        assert greenroom(*run, "output.events=true", cwd=tmp_path).returncode == 0
        files = [
            f for f in files_below(tmp_path / name) if not f.startswith(".hydra") and "log" not in f
        ]
        found.append({f: (tmp_path / name / f).read_bytes() for f in files})
    assert found[0] == found[1]
    assert "steps.parquet" in found[0]


def test_a_sweep_makes_one_table_and_two_figures(tmp_path: Path, small_trace_file: Path) -> None:
    done = greenroom(
        "-m",
        "policy=lru,belady",
        "cache.ratio=0.25,0.5",
        f"trace.path={small_trace_file}",
        "hydra.sweep.dir=sweep",
        cwd=tmp_path,
        module="sim",
    )
    assert done.returncode == 0, done.stderr
    table = pq.read_table(tmp_path / "sweep" / "results.parquet").to_pylist()
    chosen = [(row["policy"], row["cache_ratio"]) for row in table]
    assert chosen == [("lru", 0.25), ("lru", 0.5), ("belady", 0.25), ("belady", 0.5)]
    assert {"results.csv", "stall_breakdown.png", "throughput_by_cache.pdf"} <= set(
        files_below(tmp_path / "sweep")
    )
    assert "belady *" in done.stdout
    assert done.stderr == "", "quiet where nobody watches"


def test_a_sweep_leaves_out_what_an_earlier_one_left(
    tmp_path: Path, small_trace_file: Path
) -> None:
    old = tmp_path / "sweep" / "7" / "summary.json"
    old.parent.mkdir(parents=True)
    old.write_text('{"policy": "stale"}')
    os.utime(old, (1e9, 1e9))
    arguments = ("-m", "policy=lru,fifo", f"trace.path={small_trace_file}", "hydra.sweep.dir=sweep")
    done = greenroom("sim", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    table = pq.read_table(tmp_path / "sweep" / "results.parquet").to_pylist()
    assert [row["policy"] for row in table] == ["lru", "fifo"]


def test_a_failing_point_is_told_and_the_others_are_kept(
    tmp_path: Path, small_trace_file: Path
) -> None:
    done = greenroom(
        "sim",
        "-m",
        "cache.ratio=0.25,1.01",
        f"trace.path={small_trace_file}",
        "hydra.sweep.dir=sweep",
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert "cache.ratio = 1.01: must be a number in [0, 1]" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(pq.read_table(tmp_path / "sweep" / "results.parquet")) == 1
    assert files_below(tmp_path / "sweep" / "1")[-1] == "error.json"
    assert "1 of 2 points failed" in done.stderr


def test_flags_and_overrides_come_in_any_order(tmp_path: Path, small_trace_file: Path) -> None:
    trace = f"trace.path={small_trace_file}"
    done = greenroom("sim", trace, "-m", "cache.ratio=0.25,0.5", "hydra.sweep.dir=s", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = greenroom("sim", "policy=lfu", "--cfg", "job", "-p", "policy.cache", cwd=tmp_path)
    assert "decay: 0.98" in shown.stdout


def test_a_defect_of_a_users_policy_shows_where_it_is(
    tmp_path: Path, small_trace_file: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "from sim.policies.classic import LRU\n"
        "class Broken(LRU):\n    def on_insert(self, key, view):\n        self.nope[key] = 1\n"
    )
    done = greenroom(
        "sim",
        "-m",
        f"trace.path={small_trace_file}",
        "policy.cache._target_=mine.Broken,sim.policies.classic.LRU",
        "hydra.sweep.dir=s",
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert "mine.py" in done.stderr
    assert "'Broken' object has no attribute 'nope'" in done.stderr
    assert "hydra" not in done.stderr.replace("hydra.", "")
    assert len(pq.read_table(tmp_path / "s" / "results.parquet")) == 1, "the other point is kept"


MISTAKES = [
    (["policy=lfu", "policy.cache.deca=1"], "did you mean 'policy.cache.decay'?"),
    (["trace=null"], "Config group override must be a string"),
    (["--cfg", "jbo"], "flag --cfg jbo: must be one of job, hydra, all"),
    (["policy=lru", "--config-dir"], "flag --config-dir: must be followed by a value"),
    (["--multrun"], "flag --multrun: no such flag; did you mean '--multirun'?"),
    (["polcy=lru"], "polcy: unknown key; did you mean 'policy'?"),
    (["--config-dir", "bad", "policy=broken"], "broken.yaml: line 2"),
    (["~output"], "output: missing, must be given"),
    (["machine.link.h2d_bytes_per_s=1"], "146 years"),
    (["policy=lrv"], "policy = lrv: no such option; did you mean 'lru'?"),
    (
        ["trace=a/b.parquet"],
        "trace = a/b.parquet: no such option; did you mean 'trace.path=a/b.parquet'?",
    ),
    (["cache.ratoi=0.5"], "cache.ratoi: unknown key; did you mean 'cache.ratio'?"),
    (["cache.ratio="], "cache.ratio"),
    (["trace.path=nowhere.parquet"], "nowhere.parquet"),
    (["trace.path=cut.parquet"], "cut.parquet"),
    (["trace.path=empty.parquet"], "empty.parquet"),
    (["trace=tinny"], "trace = tinny: no such option; did you mean 'tiny'?"),
    (["machine.link.h2d_bytes_per_s=-5"], "h2d_bytes_per_s"),
    (["~machine.gpu.launch_ns"], "launch_ns"),
    (["policy.cache._target_=sim.policies.classic.LRV"], "did you mean 'LRU'?"),
    (["cache.ratio=0.5", "cache.ratio"], "cache.ratio"),
    (["workload.arrivals=closd"], "there is no such file; did you mean 'closed'?"),
    (["workload.arrivals=late.csv"], "late.csv: line 3: arrival_s = soon: must be a number"),
    (["workload.arrivals=poisson"], "workload.rate_per_s = None: must be > 0"),
]


def spoil(source: Path, target: Path, row: int, values: list[int]) -> None:
    """Write a copy of a trace whose ``row`` has other experts, past all checks."""
    table = pq.read_table(source)
    ids = table["expert_ids"].to_pylist()
    ids[row][: len(values)] = values
    place = table.schema.get_field_index("expert_ids")
    field = table.schema.field(place)
    pq.write_table(table.set_column(place, field, pa.array(ids, field.type)), target)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([3, 16], "row 7: expert_ids[layer 0, slot 1] is 16: must be < num_experts 16"),
        ([3, 3], "row 7: expert_ids[layer 0, slot 1] is 3: is there twice"),
        ([65535, 65535], "row 7: expert_ids[layer 0] is 65535: the layer is missing"),
    ],
)
def test_a_spoilt_trace_is_refused_with_its_place(
    values: list[int], message: str, tmp_path: Path, small_trace_file: Path
) -> None:
    spoil(small_trace_file, tmp_path / "spoilt.parquet", 7, values)
    before = files_below(tmp_path)
    done = greenroom("sim", "trace.path=spoilt.parquet", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"greenroom sim: error: spoilt.parquet: {message}"), done.stderr
    assert done.stderr.count("\n") == 1
    assert files_below(tmp_path) == before


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=lambda x: " ".join(x)[:40])
def test_a_mistake_is_one_line_and_leaves_nothing(
    arguments: list[str], message: str, tmp_path: Path, small_trace_file: Path
) -> None:
    whole = small_trace_file.read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.parquet").write_bytes(b"")
    (tmp_path / "late.csv").write_text("arrival_s\n0.5\nsoon\n")
    (tmp_path / "bad" / "policy").mkdir(parents=True)
    (tmp_path / "bad" / "policy" / "broken.yaml").write_text("name: broken\n  scope: [\n")
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    done = greenroom("sim", f"trace.path={small_trace_file}", *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert done.stderr.startswith("greenroom sim: error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stdout == ""
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_an_unknown_command_names_the_nearest(tmp_path: Path) -> None:
    done = greenroom("simm", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "greenroom: error: command = simm: no such command; did you mean 'sim'?\n"


@pytest.mark.parametrize("arguments", ["--help", "policies lru", "simm"])
def test_a_reader_that_has_gone_is_no_error(arguments: str, tmp_path: Path) -> None:
    command = f"{sys.executable} -m sim.cli {arguments} | true; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == (2 if arguments == "simm" else 0)
    assert "Traceback" not in done.stderr


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, sim.run\n"
        "def stop(*_): raise KeyboardInterrupt\n"
        "sim.run._run_point = stop\n"
        "sys.exit(sim.run.main(['policy=lru']))"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, "greenroom sim: error: interrupted\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--help"], ["sim", "--help"], ["record", "--help"]])
def test_help_is_light(arguments: list[str], tmp_path: Path) -> None:
    code = (
        "import sys; from sim.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "greenroom" in done.stdout
    assert done.stderr.strip().endswith("[]")


def test_a_users_own_policy_needs_no_fork(tmp_path: Path, small_trace_file: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from sim.policies.classic import LRU\nclass MyCache(LRU):\n    pass\n"
    )
    (tmp_path / "conf" / "policy").mkdir(parents=True)
    (tmp_path / "conf" / "policy" / "mine.yaml").write_text(
        "name: mine\nscope: layer\ncache:\n  _target_: mine.MyCache\n"
    )
    done = greenroom(
        "sim", "--config-dir", "conf", "policy=mine", f"trace.path={small_trace_file}", cwd=tmp_path
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "mine" in done.stdout


@pytest.mark.parametrize("command", ["generate", "replay", "measure", "validate"])
def test_commands_with_weights_say_how_to_get_torch(command: str) -> None:
    code = (
        "import sys; sys.modules.update(torch=None, transformers=None); "
        f"from sim.cli import main; sys.exit(main([{command!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert "torch" in done.stderr
    assert "pip install" in done.stderr
    assert "Traceback" not in done.stderr
