"""Calibrations of rows whose truth is known: found again, and what is not known is said."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from hwmodels.predict import predict
from sim.calibrate import Calibrated, calibrate
from sim.calibrate_names import Options
from sim.calibrate_report import changes_of, error_summary, report_lines, row_records
from sim.calibrate_spec import known_specifications, read_specification
from sim.cases import Composed, case_of, compose_case
from sim.cli import main
from sim.interval import read_errors

BASE = ["machine=rtx4090", "engine=llama_cpp", "placement=cpu_layers"]
MODEL = ["model=gpt_oss_120b", *BASE]
TRUTH = {
    "machine/cpu/ryzen_7950x.memory_derate": 0.7,
    "machine/cpu/ryzen_7950x.handover_ns": 60_000,
    "engine/llama_cpp.dense_launches": 30,
}
BOUNDS: dict[str, Any] = {
    "machine/cpu/ryzen_7950x.memory_derate": {"bounds": [0.3, 1]},
    "machine/cpu/ryzen_7950x.handover_ns": {"bounds": [10_000, 500_000]},
    "engine/llama_cpp.dense_launches": {"bounds": [5, 60]},
}
CASES = [(model, n) for model in ("gpt_oss_120b", "qwen3_30b_a3b") for n in (0, 12, 24, 36)]
"""Experts of two sizes: with one, a layer's handover and bytes could not be told apart."""


def truth_as_overrides(truth: dict[str, float]) -> list[str]:
    """Return the truth as one would set it on the command line: another way than the calibration's."""
    keys = [
        name.partition("/")[0] if name.startswith("engine") else "machine.cpu" for name in truth
    ]
    fields = [name.rpartition(".")[2] for name in truth]
    return [f"{k}.{f}={v}" for k, f, v in zip(keys, fields, truth.values(), strict=True)]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Exact rows of a machine that differs from its file by TRUTH."""
    found = []
    for model, layers in CASES:
        own = [f"placement.cpu_layers={layers}"]
        chosen = [f"model={model}", *BASE]
        case = case_of(compose_case([*chosen, *own, *truth_as_overrides(TRUTH)]).config)
        row = dict(text.split("=") for text in chosen)
        speed = predict(case).tokens_per_s
        found.append({"id": f"{model[:3]}{layers}", **row, "overrides": own, "value": speed})
    return found


@pytest.fixture(autouse=True)
def _compose_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.calibrate_rows.compose_case", composed_once)


@cache
def composed_once(overrides: tuple[str, ...], config_dirs: tuple[str, ...]) -> Composed:
    return compose_case(overrides, config_dirs)


def run(folder: Path, rows: list[dict[str, Any]], parameters: Any, **more: Any) -> Calibrated:
    write(folder, rows, parameters, **more)
    spec = read_specification(str(folder / "fit.yaml"))
    return calibrate(spec, Options(), leave_out_by=[spec.leave_out])


def write(folder: Path, rows: Any, parameters: Any, **more: Any) -> Path:
    (folder / "rows.yaml").write_text(yaml.safe_dump(rows))
    spec = {"rows": "rows.yaml", "parameters": parameters, "sigma": 0.02, **more}
    (folder / "fit.yaml").write_text(yaml.safe_dump(spec))
    return folder / "fit.yaml"


def test_the_truth_is_found_again(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    found = run(tmp_path, rows, BOUNDS)
    assert found.fit is not None
    assert found.fit.values == pytest.approx(TRUTH, rel=0.01)
    assert found.fit.values["engine/llama_cpp.dense_launches"] == 30
    records = row_records(found)
    assert max(abs(record["error"]) for record in records) < 0.002
    assert [record["measured"] for record in records] == [row["value"] for row in rows]
    assert list(found.left_out) == ["row"]
    assert max(abs(record["left_out_error"]) for record in records) < 0.05


def test_noisy_rows_give_intervals_that_hold_the_truth(
    rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    noise = (1.01, 0.985, 1.02, 0.995, 0.98, 1.015, 1.0, 1.005)
    noisy = [{**row, "value": row["value"] * n} for row, n in zip(rows, noise, strict=True)]
    found = run(tmp_path, noisy, BOUNDS)
    for estimate in found.estimates:
        low, high = estimate.interval_95
        assert low <= TRUTH[estimate.parameter.name] <= high


def test_figures_that_only_count_together_are_named_together(
    rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    pair = ("machine/cpu/ryzen_7950x.memory_bytes_per_s", "machine/cpu/ryzen_7950x.memory_derate")
    prior = {"mean": 0.8, "sd": 0.2, "why": "a guess"}
    parameters = {
        **BOUNDS,
        pair[0]: {"bounds": [4e10, 7.5e10], "prior": {"mean": 6e10, "sd": 1e10, "why": "a guess"}},
        pair[1]: {"bounds": [0.3, 1], "prior": prior},
    }
    found = run(tmp_path, rows, parameters)
    assert found.fit is not None
    together = {frozenset(name for name, _ in d.moves) for d in found.fit.directions}
    assert frozenset(pair) in together
    lines = [line for line in report_lines(found, []) if "cannot tell these apart" in line]
    assert any(all(name in line for name in pair) for line in lines)


def test_a_figure_on_which_rows_hardly_depend_is_left_to_its_prior_and_said_to_be(
    rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    name = "machine/gpu/rtx4090.step_overhead_ns"
    prior = {"mean": 250_000, "sd": 10_000, "why": "a guess"}
    wish = {name: {"bounds": [1000, 10**7], "prior": prior}}
    found = run(tmp_path, rows, {**BOUNDS, **wish})
    assert found.fit is not None
    (estimate,) = [e for e in found.estimates if e.parameter.name == name]
    assert estimate.decided_by == "prior"
    assert estimate.value == pytest.approx(250_000, rel=0.05)
    source = next(text for field, (_, text) in changes_of(found).items() if field.name == name)
    assert "prior 2.5e+05 +- 1e+04 (a guess), decided by prior" in source


def test_a_figure_on_which_no_row_depends_stays_as_it_is(
    rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    other = {
        "machine/gpu/rtx3090.launch_ns": {"bounds": [100, 10**5]},
        "machine.link.copy_gap_ns": {"bounds": [100, 10**5]},
    }
    found = run(tmp_path, rows, {**BOUNDS, **other})
    names = ["machine/gpu/rtx3090.launch_ns", "machine/link/pcie4_x16.copy_gap_ns"]
    assert list(found.unused) == names
    assert not set(found.unused) & {field.name for field in changes_of(found)}


def test_a_value_that_a_row_overrides_is_not_fitted_to_it(
    rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    set_by_hand = [
        {**row, "overrides": [*row["overrides"], "machine.cpu.handover_ns=60000"]} for row in rows
    ]
    found = run(tmp_path, set_by_hand, BOUNDS)
    assert list(found.unused) == ["machine/cpu/ryzen_7950x.handover_ns"]


def test_rows_of_one_group_are_left_out_together(
    rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    marked = [{**row, "half": i % 2} for i, row in enumerate(rows)]
    together = run(tmp_path, marked, BOUNDS, leave_out="half")
    assert max(abs(row.residual) for row in together.left_out["half"]) < 0.05
    all_at_once = run(tmp_path, marked, BOUNDS, leave_out="machine")
    rests_on = {name for row in all_at_once.left_out["machine"] for name in row.rests_on}
    assert rests_on == set(BOUNDS)  # the files' values predict


def test_errors_are_written_for_intervals(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """Left out alone, each row is met; without its whole machine the files' own values predict."""
    path = write(tmp_path, [{**row, "value": row["value"] * 1.5} for row in rows], BOUNDS)
    errors, results = tmp_path / "errors.csv", str(tmp_path / "out")
    command = ["calibrate", str(path), "--errors", str(errors), "--results", results]
    assert main(command) == 0
    missed = read_errors(errors)
    assert len(missed) == len(rows)
    assert {each.machine for each in missed} == {row["machine"] for row in rows}
    alone = [abs(each.alone - 1) for each in missed if each.alone is not None]
    together = [abs(each.with_machine - 1) for each in missed if each.with_machine is not None]
    assert max(alone) < max(together)
    assert main([*command, "--no-leave-one-out"]) == 2


def test_ranges_and_prompts(tmp_path: Path) -> None:
    own = [*MODEL, "placement.cpu_layers=36", "work.prompt_tokens=100"]
    prediction = predict(case_of(compose_case(own).config))
    row: dict[str, Any] = dict(text.split("=") for text in MODEL)
    row["overrides"] = own[4:]
    speed = prediction.prefill_tokens_per_s
    both = [
        {**row, "id": "a", "metric": "prefill_tokens_per_s", "value": [speed / 1.1, speed * 1.1]},
        {**row, "id": "b", "metric": "ttft_s", "value": prediction.ttft_ns / 1e9},
        {**row, "id": "c", "metric": "tpot_s", "value": prediction.tpot_ns / 1e9},
    ]
    found = run(tmp_path, both, {"machine/cpu/ryzen_7950x.memory_derate": {"bounds": [0.1, 1]}})
    assert [record["error"] for record in row_records(found)] == pytest.approx([0] * 3, abs=1e-4)
    assert found.rows[0].sigma == pytest.approx((0.02**2 + 0.0953**2) ** 0.5, rel=1e-3)


def test_errors_are_summed_up_by_median_and_worst() -> None:
    records = [{"row": n, "error": e} for n, e in (("a", 0.1), ("b", -0.3), ("c", 0.02))]
    assert error_summary(records, "error") == {"median": 0.1, "worst": 0.3, "worst_row": "b"}
    assert error_summary([{"row": "a", "error": None}], "error") is None


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    done = [sys.executable, "-m", "sim.cli", "calibrate", *arguments]
    return subprocess.run(done, cwd=cwd, capture_output=True, text=True, check=False)


def test_the_command_reports_and_writes_files_that_can_be_used(
    rows: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    spec = write(tmp_path, rows, BOUNDS)
    done = command(str(spec), "--out", "mine", "--results", "res", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Error of rows left out: median" in done.stdout
    summary = json.loads((tmp_path / "res" / "calibration.json").read_text())
    assert summary["errors"]["fit"]["worst"] < 0.002
    assert [row["row"] for row in summary["rows"]] == [row["id"] for row in rows]
    assert (tmp_path / "res" / "rows.csv").read_text().count("\n") == len(rows) + 1
    assert (tmp_path / "res" / "parameters.csv").read_text().startswith("parameter,value,")
    mine = ["model=gpt_oss_120b", "machine=rtx4090_fitted", "engine=llama_cpp_fitted"]
    composed = compose_case([*mine, "placement=cpu_layers"], [str(tmp_path / "mine")])
    case_of(composed.config)  # every source is in the right form
    assert composed.choices["machine/cpu"] == "ryzen_7950x_fitted"
    assert composed.config["machine"]["cpu"]["memory_derate"] == pytest.approx(0.7, rel=0.01)
    assert composed.config["engine"]["dense_launches"] == 30
    source = composed.config["machine"]["cpu"]["sources"]["handover_ns"]
    assert source.startswith(
        "F: fitted by greenroom calibrate fit to rows.yaml, rows: gpt12, gpt24, gpt36, qwe12"
    )
    again = command(str(spec), "--out", "mine", "--results", "two", cwd=tmp_path)
    assert again.returncode == 0
    for name in ("calibration.json", "rows.csv", "parameters.csv"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "res" / name).read_bytes()


@pytest.mark.parametrize("name", known_specifications())
def test_the_calibrations_that_come_with_it_can_be_read(name: str) -> None:
    rows = None if name == "published" else "pyproject.toml"
    spec = read_specification(name, rows and str(Path(__file__).parents[1] / rows))
    assert spec.wishes
    assert all(wish.prior_mean is None or wish.why for wish in spec.wishes)
