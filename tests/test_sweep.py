"""A sweep runs all its points, each once, and says what came of them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from sim.html.source import open_source
from sim.results import read_rows
from sim.simulate import simulate
from sim.sweeps.beforehand import first_config
from sim.sweeps.chunk import Point
from sim.sweeps.coordinator import run_sweep
from sim.types import ConfigError
from tests.configs import composed
from tests.sweeping import about, contents, greenroom, points_of, results_in, user_folder

GRID = ("policy=lru,fifo", "cache.ratio=0.25,0.5,0.75")


@pytest.fixture(scope="module")
def swept(small_trace_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("swept") / "s"
    run_sweep(points_of(small_trace_file, *GRID, "sweep=serial", folder=folder))
    return folder


def test_each_point_is_what_a_run_of_its_own_gives(swept: Path, small_trace_file: Path) -> None:
    rows = read_rows(swept)
    assert [row["point"] for row in rows] == list(range(6))
    for row in rows:
        overrides = [f"{key}={value}" for key, value in row["overrides"].items()]
        assert f"trace.path={small_trace_file}" in overrides
        alone, _ = simulate(composed(*[word for word in overrides if "sweep." not in word]))
        assert {name: row[name] for name in alone} == json.loads(json.dumps(alone))


def test_the_table_holds_every_point_and_reads_as_the_summaries(swept: Path) -> None:
    rows = read_rows(swept / "results.parquet")
    for row in rows:
        summary = json.loads((swept / str(row["point"]) / "summary.json").read_text())
        assert row == {"point": row["point"], **summary}
    with (swept / "results.csv").open() as file:
        assert [int(line["point"]) for line in csv.DictReader(file)] == list(range(6))


def test_what_is_asked_for_beside_the_tables_is_left_without_them_too(
    small_trace_file: Path, tmp_path: Path
) -> None:
    asked = ("sweep=serial", "output.roofline=true", "output.what_if=true")
    outcome = run_sweep(points_of(small_trace_file, *asked, folder=tmp_path / "s"))
    assert not outcome.failed
    names = {file.name for file in (tmp_path / "s" / "0").iterdir()}
    assert names == {"summary.json", "roofline.csv", "whatif.csv"}


def test_a_point_alone_leaves_its_summary_and_with_tables_all_that_a_run_leaves(
    swept: Path, small_trace_file: Path, tmp_path: Path
) -> None:
    assert [file.name for file in (swept / "0").iterdir()] == ["summary.json"]
    words = points_of(
        small_trace_file, "cache.ratio=0.25,0.5", "sweep=serial", folder=tmp_path / "t"
    )
    run_sweep([*words, "sweep.tables=true"])
    names = {file.name for file in (tmp_path / "t" / "1").iterdir()}
    assert names == {"summary.json", "steps.parquet", "requests.parquet", "config.yaml"}
    summary = json.loads((tmp_path / "t" / "1" / "summary.json").read_text())
    steps = pq.read_table(tmp_path / "t" / "1" / "steps.parquet")
    assert len(steps) == summary["steps"]


@pytest.mark.parametrize(
    "words", [("sweep.workers=1",), ("sweep.workers=3", "sweep.chunk=1"), ("sweep.chunk=4",)]
)
def test_a_pool_of_any_size_leaves_the_same_bytes(
    swept: Path, small_trace_file: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    run_sweep(points_of(small_trace_file, *GRID, *words, folder=tmp_path / "s"))
    assert contents(tmp_path / "s") == contents(swept)


def test_a_point_that_fails_is_told_of_and_stops_no_other(
    small_trace_file: Path, tmp_path: Path
) -> None:
    user_folder(tmp_path)
    words = points_of(small_trace_file, "policy=lru,broken,fifo", "cache.ratio=0.25,7",
                      folder=tmp_path / "s")  # fmt: skip
    done = greenroom("sweep", "--config-dir", "my_conf", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout.splitlines()[-1] == f"Results: {tmp_path / 's'}"
    assert "4 of 6 points failed" in done.stderr
    assert "Traceback" not in done.stderr
    assert results_in(tmp_path / "s") == list(range(6))
    rows = read_rows(tmp_path / "s")
    assert [(row["point"], row["policy"]) for row in rows] == [(0, "lru"), (4, "fifo")]
    with (tmp_path / "s" / "errors.csv").open() as file:
        errors = {int(line["point"]): line for line in csv.DictReader(file)}
    assert set(errors) == {1, 2, 3, 5}
    assert "ZeroDivisionError: no good" in errors[2]["error"]
    assert "cache.ratio = 7: must be" in errors[5]["error"]
    assert "my_policies.py, line " in errors[2]["error"]
    assert errors[2]["kind"] == "mistake"
    assert errors[5]["kind"] == "mistake"


def test_a_worker_that_dies_loses_nothing_and_what_kills_it_is_found(
    small_trace_file: Path, tmp_path: Path
) -> None:
    user_folder(tmp_path)
    words = points_of(small_trace_file, "policy=lru,deadly,deadly_once,fifo", "cache.ratio=0.25,0.5",
                      "sweep.chunk=3", "sweep.workers=2", folder=tmp_path / "s")  # fmt: skip
    done = greenroom("sweep", "--config-dir", "my_conf", *words, cwd=tmp_path)
    failed = {row["point"]: row for row in _errors(tmp_path / "s")}
    assert set(failed) == {2, 3}, done.stderr
    assert failed[2]["error"] == "the worker died of it 3 times: killed by SIGKILL"
    assert failed[2]["kind"] == "crash"
    assert [row["policy"] for row in read_rows(tmp_path / "s")] == [
        *("lru", "lru", "deadly_once", "deadly_once", "fifo", "fifo")
    ]


def _errors(folder: Path) -> list[dict[str, object]]:
    files = sorted(folder.glob("*/error.json"), key=lambda file: int(file.parent.name))
    return [{"point": int(f.parent.name), **json.loads(f.read_text())} for f in files]


def test_mistakes_are_found_before_anything_is_written(
    small_trace_file: Path, tmp_path: Path
) -> None:
    for word, told in (
        ("policy=lru,fiffo", "policy = fiffo: no such option; did you mean 'fifo'?"),
        ("cache.ratoi=0.1", "cache.ratoi: unknown key; did you mean 'cache.ratio'?"),
        ("sweep.engine=poool", "sweep.engine = poool: must be"),
        ("sweep.workers=0", "sweep.workers = 0: must be a whole number >= 1"),
        ("sweep.partition=x", "sweep.partition"),
        ("cache.ratio", "cache.ratio: must be KEY=VALUE or GROUP=OPTION"),
    ):
        words = points_of(small_trace_file, word, folder=tmp_path / "s")
        done = greenroom("sweep", *words, cwd=tmp_path)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert line.startswith("greenroom sweep: error: ")
        assert told in line
        assert list(tmp_path.iterdir()) == []


def test_another_sweep_in_the_folder_is_not_mixed_with_this_one(
    small_trace_file: Path, tmp_path: Path
) -> None:
    words = points_of(
        small_trace_file, "cache.ratio=0.25,0.5", "sweep=serial", folder=tmp_path / "s"
    )
    run_sweep(words)
    before = contents(tmp_path / "s")
    other = [*words[1:], "cache.ratio=0.25,0.75,0.5"]
    with pytest.raises(ConfigError, match="holds another sweep: its points are others"):
        run_sweep(other)
    assert contents(tmp_path / "s") == before
    outcome = run_sweep([*other, "sweep.overwrite=true"])
    assert (len(outcome.rows), outcome.num_resumed) == (3, 0)


def test_the_usual_hydra_way_leaves_such_a_folder_alone(
    small_trace_file: Path, tmp_path: Path
) -> None:
    words = points_of(
        small_trace_file, "cache.ratio=0.25,0.5", "sweep=serial", folder=tmp_path / "s"
    )
    run_sweep(words)
    before = contents(tmp_path / "s")
    other = ("-m", "cache.ratio=0.75,0.1", f"trace.path={small_trace_file}")
    done = greenroom("sim", *other, f"hydra.sweep.dir={tmp_path / 's'}", cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "holds a sweep of `greenroom sweep`; give another folder" in line
    assert contents(tmp_path / "s") == before


def test_a_changed_trace_or_policy_makes_another_sweep(
    small_trace_file: Path, tmp_path: Path
) -> None:
    user_folder(tmp_path)
    trace = tmp_path / "t.parquet"
    trace.write_bytes(small_trace_file.read_bytes())
    words = ("sweep", "--config-dir", "my_conf", "policy=slow,lru", "policy.cache.seconds=0",
             "trace.path=t.parquet", "sweep=serial", "sweep.dir=s")  # fmt: skip
    first = greenroom(*words[:3], "policy=slow", *words[5:], cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    with (tmp_path / "my_policies.py").open("a") as file:
        file.write("\n# changed\n")
    changed = greenroom(*words[:3], "policy=slow", *words[5:], cwd=tmp_path)
    assert "the program, or the code of a policy, has changed" in changed.stderr
    assert about(tmp_path / "s")["arguments"][0] == "policy=slow"


def test_a_dry_run_tells_the_points_and_the_time_and_writes_nothing(
    small_trace_file: Path, tmp_path: Path
) -> None:
    words = points_of(small_trace_file, *GRID, "sweep.dry_run=true", folder=tmp_path / "s")
    done = greenroom("sweep", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "Points: 6"
    assert lines[1].startswith("First:  policy=lru cache.ratio=0.25 ")
    assert lines[2].startswith("Last:   policy=fifo cache.ratio=0.75 ")
    assert lines[3].startswith("Time:   about ")
    assert "from 6 points" in lines[3]
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_says_which_points_fail_and_does_not_count_their_time(
    small_trace_file: Path, tmp_path: Path
) -> None:
    words = points_of(small_trace_file, "policy=lru", "cache.ratio=0.25,1.5", "sweep.dry_run=true",
                      folder=tmp_path / "s")  # fmt: skip
    done = greenroom("sweep", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert "point 1 failed: policy=lru cache.ratio=1.5 " in done.stderr
    assert "1 of 2 points run for this failed" in done.stderr
    assert " +- " not in done.stdout  # one point is left, which tells no error


def test_the_configuration_that_points_share_is_kept(
    swept: Path, small_trace_file: Path, tmp_path: Path
) -> None:
    text = (swept / "config.yaml").read_text()
    told = [line for line in text.splitlines() if line.startswith("#")]
    assert told == [
        "# Resolved configuration of point 0 of 6. Varied:",
        "#   policy: lru, fifo",
        "#   cache.ratio: 0.25, 0.5, 0.75",
    ]
    path, belady = f"trace.path={small_trace_file}", "output.belady=false"
    assert yaml.safe_load(text) == composed("policy=lru", "cache.ratio=0.25", path, belady)
    shown = dict(open_source(swept).texts)
    assert text in shown.values()


def test_the_comment_of_a_configuration_is_one_line_a_key() -> None:
    bases = {0: {"policy": {"name": "a"}}}
    texts = [(f"a={n}", "b=1", *(["c='x\ny\u2028\x1b'"] if n == 3 else [])) for n in range(9)]
    points = [Point(n, text, 0) for n, text in enumerate(texts)]
    assert first_config(points, bases, 20).splitlines() == [
        "# Resolved configuration of point 0 of 20. Varied:",
        "#   a: 0, 1, 2, 3, 4, 5, 6, 7, ... (9 values)",
        "#   c: 'x y ?'",
        "# as far as the first 9 tell: the others follow from results",
        "policy:",
        "  name: a",
    ]
    assert "the one point." in first_config(points[:1], bases, 1)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("cache.ratio=2", r"cache\.ratio = 2: must be a number in \[0, 1\]"),
        ("machine.link.h2d_bytes_per_s=-1", r"machine/rtx4090: link\.h2d_bytes_per_s = -1"),
        ("trace.path=nowhere.parquet", r"nowhere\.parquet: no such file"),
        ("+workload.batch=2", r"workload\.batch: unknown key; did you mean 'batch_size'"),
    ],
)
def test_a_setting_that_no_point_can_run_with_is_refused_once_before_anything_is_written(
    small_trace_file: Path, tmp_path: Path, wrong: str, told: str
) -> None:
    words = points_of(small_trace_file, "policy=lru,fifo", folder=tmp_path / "s")
    with pytest.raises(ConfigError, match=told):
        run_sweep([*words, wrong])
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_value_among_right_ones_or_other_wrong_ones_is_its_points(
    small_trace_file: Path, tmp_path: Path
) -> None:
    words = points_of(small_trace_file, "sweep=serial", folder=tmp_path / "s")
    outcome = run_sweep(["cache.ratio=2,0.5", *words])
    assert [row["point"] for row in outcome.failed] == [0]
    outcome = run_sweep(["cache.ratio=2,3", *words, "sweep.overwrite=true"])
    assert [row["point"] for row in outcome.failed] == [0, 1]


def test_an_experiment_file_names_the_points(small_trace_file: Path, tmp_path: Path) -> None:
    words = points_of(small_trace_file, "+experiment=demo", "workload.requests=[2,4]",
                      "calibration.requests=[0,2]", folder=tmp_path / "s")  # fmt: skip
    outcome = run_sweep([*words, "policy=lru,fifo", "sweep=serial"])
    assert [(row["policy"], row["cache_ratio"]) for row in outcome.rows] == [
        (policy, ratio) for policy in ("lru", "fifo") for ratio in (0.125, 0.25, 0.375, 0.5)
    ]
