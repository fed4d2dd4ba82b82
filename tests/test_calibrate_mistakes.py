"""What a user gets wrong is told in one line; what is written is whole, and only what must change does."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from hwmodels.errors import HardwareError
from sim.calibrate import calibrate, main
from sim.calibrate_edit import set_source, set_value
from sim.calibrate_names import Options
from sim.calibrate_report import changes_of, report_lines, row_records, write_report
from sim.calibrate_spec import read_specification
from sim.calibrate_write import option_files, write_files
from sim.types import ConfigError

DERATE = "machine/cpu/ryzen_7950x.memory_derate"
PARAMETERS = {DERATE: {"bounds": [0.1, 1]}}
EXPERT = {"kind": "expert_cpu", "bits": 4.5, "threads": 8}


def fit(folder: Path, given: Any, **more: Any) -> Any:
    text = given if isinstance(given, str) else yaml.safe_dump(given)
    (folder / "rows.yaml").write_text(text)
    spec: dict[str, Any] = {"rows": "rows.yaml", "machine": "rtx4090", "parameters": PARAMETERS}
    (folder / "fit.yaml").write_text(yaml.safe_dump({**spec, **more}))
    return calibrate(read_specification(str(folder / "fit.yaml")), Options())


def experts(*times_ns: float) -> list[dict[str, Any]]:
    return [{**EXPERT, "num_bytes": 10**6 * (i + 1), "value_ns": t} for i, t in enumerate(times_ns)]


HUGE = {"mean": 1e300, "sd": 5, "why": "x"}
GOOD = experts(30_000, 50_000)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"rows": None}, "rows: missing, must be given"),
        ({"rows": "none.csv"}, "none.csv: no such file"),
        ({"rows": "rows.txt"}, "rows.txt: must be a table with the ending .csv, .yaml or .parquet"),
        ({"colour": 1}, "colour: unknown key"),
        ({"losses": "linear"}, "losses: unknown key; did you mean 'loss'"),
        ({"loss": "huber"}, "loss = huber: must be linear or soft_l1"),
        ({"sigma": 0}, "sigma = 0: must be > 0"),
        ({"sigma": math.inf}, "sigma = inf: must be a finite number"),
        ({"sigma": 10**400}, "sigma = 10+: must be a finite number"),
        ({"rows": "loop.csv"}, "loop.csv: no such file"),
        ({"sigma": 1e-300}, "sigma = 1e-300: must be at most 1e.24 in size, and no nearer to 0"),
        (
            {"parameters": {DERATE: {"bounds": [0.1, 1], "scale": "log", "prior": HUGE}}},
            "prior.mean = 1e.300: must be at most 1e.24 in size",
        ),
        ({"parameters": {}}, "parameters: must map at least one name to its bounds"),
        ({"parameters": {DERATE: {}}}, "bounds = None: must be \\[low, high\\]"),
        ({"parameters": {DERATE: {"bounds": [1, 0.1]}}}, "must be \\[low, high\\], low < high"),
        ({"parameters": {DERATE: {"bounds": [0.1, 1], "start": 2}}}, "start = 2: must lie within"),
        ({"parameters": {DERATE: {"bounds": [0, 1], "scale": "log"}}}, "low = 0.0: .* log scale"),
        (
            {"parameters": {DERATE: {"bounds": [0.1, 1], "prior": {"mean": 1, "sd": 1}}}},
            "prior = .*: must have mean, sd and why",
        ),
        ({"parameters": {DERATE: {"bound": [0.1, 1]}}}, "bound: unknown key; did you mean 'bounds'"),
        ({"machine": "rtx4091"}, "machine = rtx4091: no such option; did you mean 'rtx4090'"),
        ({"machine": None}, "row 1: machine: missing, must be given"),
        ({"select": {"kid": "copy"}}, "select: kid: no such column; did you mean 'kind'"),
        ({"select": {"kind": "copy"}}, "select: leaves none of 2 rows"),
        ({"leave_out": "sourse"}, "leave_out: sourse: no such column"),
    ],
)  # fmt: skip
def test_a_specification_that_cannot_be(tmp_path: Path, more: Any, message: str) -> None:
    (tmp_path / "rows.txt").write_text("a table?")
    (tmp_path / "loop.csv").symlink_to(tmp_path / "loop.csv")
    with pytest.raises((ConfigError, HardwareError), match=message) as caught:
        fit(tmp_path, GOOD, **more)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("machine/cpu/ryzen_7950y.memory_derate", "no such option; did you mean 'ryzen_7950x'"),
        ("machine/cpus/ryzen_7950x.memory_derate", "machine/cpus: no such group; did you mean"),
        (
            "machine/cpu/ryzen_7950x.memory_rate",
            "machine/cpu/ryzen_7950x has no memory_rate; did you mean 'memory_derate'",
        ),
        ("machine/cpu/ryzen_7950x.name", "is AMD Ryzen 9 7950X, must be a number in its file"),
        ("machine.cpu.memory_derat", "no file sets .*; did you mean 'machine.cpu.memory_derate'"),
        ("memory_derate", "must be GROUP/OPTION.FIELD"),
        ("machine/gpu/rtx3090.launch_ns", "none of the 2 rows depends on any"),
    ],
)
def test_a_parameter_that_is_not_there(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(tmp_path, GOOD, parameters={name: {"bounds": [0.1, 1]}})


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "has no rows, must have at least one"),
        ("{", "rows.yaml: line 1: "),
        ("a text", "must be a list of rows"),
        (["text"], "row 1 = text: must be a mapping"),
        ([{"value_ns": 1}], "row 1: must have a kind"),
        ([{**GOOD[0], "kind": "expert_cp"}], "unknown kind; did you mean 'expert_cpu'"),
        ([{**GOOD[0], "value_ns": math.nan}], "value_ns = nan: must be a finite number"),
        ([{**GOOD[0], "id": 1}, {**GOOD[1], "id": 1}], "id = 1: must be that of one row only"),
        ([{"model": "qwen3_30b_a3b", "value": "nan"}], "value = nan: must be a number"),
        ([{**GOOD[0], "value_ns": 10**400}], "value_ns = 10+\\.\\.\\.: must be a number"),
        ([{"model": "qwen3_30b_a3b", "value": "[" * 9999}], r"value = \[+.*: must be a number"),
        ([{"model": "qwen3_30b_a3b", "value": [1e-300, 1]}], "must be a number from 1e-24 to 1e"),
        ([{"model": "qwen3_30b_a3b", "value": 10**200}], "must be a number from 1e-24 to 1e"),
        (
            [{"model": "qwen3_30b_a3b", "value": 1, "sigma": 10**400}],
            "sigma = 10+: must be a finite number > 0",
        ),
        ([{"model": "qwen3_30b_a3b", "value": [2, 1]}], "must be a number, or \\[low, high\\]"),
        ([{"model": "qwen3_30b", "value": 1}], "row 1: model = qwen3_30b: no such option; did you"),
        (
            [{"model": "qwen3_30b_a3b", "value": 1, "metric": "tokens_per_s"}],
            "no such metric; did you mean",
        ),
        (
            [{"model": "qwen3_30b_a3b", "value": 1, "overrides": ["work.tokens=1"]}],
            "row 1: work.tokens: unknown key",
        ),
    ],
)
def test_a_table_that_cannot_be(tmp_path: Path, rows: Any, message: str) -> None:
    with pytest.raises((ConfigError, HardwareError), match=message) as caught:
        fit(tmp_path, rows)
    assert "\n" not in str(caught.value)


def test_a_csv_that_is_cut_off(tmp_path: Path) -> None:
    text = "kind,num_bytes,bits,threads,value_ns\nexpert_cpu,1000000,4.5,8,30000\nexpert_cpu,20"
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(ConfigError, match="row 2: has 2 cells, must have 5; is the file cut off"):
        fit(tmp_path, GOOD, rows="rows.csv")


def test_parquet_is_read_and_one_that_is_cut_off_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(GOOD), path)
    found = fit(tmp_path, GOOD, rows="rows.parquet")
    assert [row.measured_ns for row in found.rows] == [30_000, 50_000]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=r"rows\.parquet: cannot be read as Parquet"):
        fit(tmp_path, GOOD, rows="rows.parquet")


def test_one_row_is_fitted_and_left_out_rests_on_the_prior(tmp_path: Path) -> None:
    found = fit(tmp_path, GOOD[:1])
    (record,) = row_records(found)
    assert abs(record["error"]) < 1e-4
    assert record["rests_on"] == [DERATE]


def test_the_command_tells_a_mistake_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["publishd"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "greenroom calibrate: error: calibration = publishd: no such calibration"
    )
    assert error.count("\n") == 1
    assert main(["microbench", "--rows", str(tmp_path / "none.csv"), "--machine", "rtx4090"]) == 2
    assert main([]) == 0
    assert "microbench" in capsys.readouterr().out


# -- tables in place of formulas -------------------------------------------------------------------


def test_experts_that_are_not_affine_become_a_table(tmp_path: Path) -> None:
    bent = experts(40_000, 45_000, 200_000, 210_000)
    more = {"machine/cpu/ryzen_7950x.expert_setup_ns": {"bounds": [100, 10**6]}}
    found = fit(tmp_path, bent, parameters={**PARAMETERS, **more})
    (table,) = found.tables
    assert table.field.name == "machine/cpu/ryzen_7950x.expert_table"
    assert table.value[0] == (1_000_000, 1, 40_000)
    assert set(table.without) == {DERATE, *more}
    assert [field.name for field in changes_of(found)] == [table.field.name]
    assert any("setup + bytes / rate misses" in line for line in report_lines(found, []))
    affine = fit(tmp_path, experts(30_000, 46_000, 62_000), parameters={**PARAMETERS, **more})
    assert affine.tables == []


def test_reads_alone_are_a_curve_and_the_file_holds_it(tmp_path: Path) -> None:
    reads = [
        {"kind": "storage", "block_bytes": b, "queue_depth": 1, "value": r, "unit": "gb_per_s"}
        for b, r in ((65_536, 0.5), (262_144, 1.0), (1_048_576, 2.0))
    ]
    found = fit(tmp_path, reads)
    write_report(found, tmp_path / "res")
    files = option_files(
        tmp_path, "mine", "fit", changes_of(found), [row.composed.choices for row in found.every],
        Options(),
    )  # fmt: skip
    write_files(files)
    written = yaml.safe_load((tmp_path / "machine/storage/nvme_e27t_mine.yaml").read_text())
    assert written["curve"][1] == [262_144, 1, 10**9]
    assert written["sources"]["curve"].startswith("X: measured (rows.yaml); 3 measured reads")
    whole = yaml.safe_load((tmp_path / "machine/rtx4090_mine.yaml").read_text())
    assert {"storage": "nvme_e27t_mine"} in whole["defaults"]


# -- files -----------------------------------------------------------------------------------------

TEXT = """# head
name: x
rate: 1_000 # a comment
table: null # none yet
rows:
  - [1, 2]
  - [3, 4]
last: [[5, 6]]
cpu:
  setup: 0.5
  sources: {setup: "I: so"}
"""


@pytest.mark.parametrize(
    ("at", "value", "old", "new"),
    [
        (("rate",), 61_000, "rate: 1_000 #", "rate: 61_000 #"),
        (("cpu", "setup"), 1.0, "setup: 0.5", "setup: 1.0"),
        (("rows", 1, 0), 7, "- [3, 4]", "- [7, 4]"),
        (("last", 0, 1), 70_000, "[[5, 6]]", "[[5, 70_000]]"),
        (("rows",), ((8, 9),), "rows:\n  - [1, 2]\n  - [3, 4]", "rows:\n  - [8, 9]"),
        (("table",), ((8, 9),), "table: null #", "table:\n  - [8, 9] #"),
    ],
)
def test_only_the_value_changes(at: Any, value: Any, old: str, new: str) -> None:
    assert set_value(TEXT, at, value) == TEXT.replace(old, new)


def test_a_source_goes_beside_the_value_or_above_it_once() -> None:
    text = set_source(TEXT, ("cpu", "setup"), "F: fitted")
    assert text == TEXT.replace('"I: so"', '"F: fitted"')
    first = set_source(TEXT, ("rate",), "F: fitted by greenroom calibrate one", False)
    assert "# head\nname: x\n# F: fitted by greenroom calibrate one\nrate: 1_000" in first
    second = set_source(first, ("rate",), "F: fitted by greenroom calibrate two", False)
    assert second == first.replace("calibrate one", "calibrate two")


def test_what_is_not_there_is_put_in() -> None:
    text = set_source(set_value(TEXT, ("gpu", "rate"), 7), ("gpu", "rate"), "F: fitted")
    assert text == TEXT + 'gpu:\n  rate: 7\n  sources:\n    rate: "F: fitted"\n'
    beside = set_source(set_value(TEXT, ("cpu", "rate"), 7), ("cpu", "rate"), "F: fitted")
    assert yaml.safe_load(beside)["cpu"] == {
        "setup": 0.5, "rate": 7, "sources": {"setup": "I: so", "rate": "F: fitted"},
    }  # fmt: skip


def test_a_run_that_is_stopped_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_files({tmp_path / "engine" / "a.yaml": "name: a\n"})
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_without_a_fit_there_are_no_errors_to_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reads of storage become the curve as they are."""
    read = {"kind": "storage", "block_bytes": 4096, "queue_depth": 1, "value_ns": 80_000}
    assert fit(tmp_path, [read]).fit is None
    errors, results = tmp_path / "errors.csv", tmp_path / "results"
    words = [str(tmp_path / "fit.yaml"), "--errors", str(errors), "--results", str(results)]
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "greenroom calibrate: error: --errors: without a fit there are none. "
        "All rows are of kind storage: there is nothing to fit."
    )
    assert not errors.exists()
    assert not results.exists()


@pytest.mark.parametrize("flag", ["--out", "--results", "--errors"])
def test_where_nothing_can_be_written_nothing_is_fitted(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sim.calibrate.calibrate", None)  # minutes, for the published rows
    wrong = tmp_path if flag == "--errors" else tmp_path / "file"
    (tmp_path / "file").touch()
    assert main(["published", flag, str(wrong)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"greenroom calibrate: error: {flag} is {wrong}: is a f")
