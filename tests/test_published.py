"""Published rows: read, predicted as they are, compared, and drawn."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from hwmodels.predict import predict
from sim.cases import case_of, compose_case
from sim.cli import main
from sim.figures.published import look_of, published_figure
from sim.interval import Interval
from sim.published import Outcome, Sizes, Unseen, bundled_rows, far_off, outcomes, summaries
from sim.published_cli import TABLE, print_outcomes, write_csv

ROW: dict[str, Any] = {
    "id": "a", "model": "qwen3_30b_a3b", "machine": "rtx4090", "engine": "fused",
    "placement": "cpu_layers", "overrides": ["placement.cpu_layers=12"], "value": 50.0,
}  # fmt: skip
OVERRIDES = [
    "model=qwen3_30b_a3b", "machine=rtx4090", "engine=fused", "placement=cpu_layers",
    "placement.cpu_layers=12",
]  # fmt: skip


def table(folder: Path, *rows: Mapping[str, Any]) -> Path:
    path = folder / "rows.yaml"
    path.write_text(yaml.safe_dump({"rows": [dict(row) for row in rows]}))
    return path


def errors(folder: Path, rows: Sequence[Sequence[object]]) -> None:
    columns = ("id", "engine", "machine", "complete", "metric", "error_fit", "error_left_out",
               "error_machine_left_out")  # fmt: skip
    with (folder / "errors.csv").open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])


def outcome(name: str = "a", speed: float = 100.0, **changes: Any) -> Outcome:
    """Return a row that was published at 100 tokens/s."""
    values: dict[str, Any] = {
        "name": name, "model": "m", "machine": "box", "engine": "llama_cpp",
        "metric": "decode_tokens_per_s", "unit": "tokens/s", "low": 100.0, "high": 100.0,
        "predicted": speed, "published_ns": 1e7, "predicted_ns": 1e9 / speed, "tokens": 1,
        "complete": True, "bottleneck": "CPU: experts", "problems": (), "note": "", "missing": "",
        "unseen": Unseen(), "interval": Interval(None, None, ""),
    }  # fmt: skip
    return Outcome(**{**values, **changes})


# -- predicting ------------------------------------------------------------------------------------


def test_every_metric_is_of_the_same_prediction(tmp_path: Path) -> None:
    prediction = predict(case_of(compose_case(OVERRIDES).config))
    rows = table(
        tmp_path,
        {**ROW, "value": [40, 90]},
        {**ROW, "id": "b", "metric": "tpot_s", "value": 0.02},
        {**ROW, "id": "c", "metric": "prefill_tokens_per_s", "value": 512.0},
        {**ROW, "id": "d", "metric": "ttft_s", "value": 1.0, "complete": False},
    )
    decode, tpot, prefill, ttft = outcomes(rows)
    assert decode.predicted == pytest.approx(prediction.tokens_per_s)
    assert tpot.predicted == pytest.approx(prediction.tpot_ns / 1e9)
    assert prefill.predicted == pytest.approx(prediction.prefill_tokens_per_s)
    assert ttft.predicted == pytest.approx(prediction.ttft_ns / 1e9)
    assert decode.bottleneck == prediction.bottleneck
    # A range counts as its geometric mean, 60; errors are of speed, whatever the unit.
    assert decode.error == pytest.approx(prediction.tokens_per_s / 60 - 1)
    assert tpot.error == pytest.approx(prediction.tokens_per_s / 50 - 1)
    assert prefill.error == pytest.approx(ttft.error)  # 512 tokens in a second
    assert [found.is_prompt for found in (decode, tpot, prefill, ttft)] == [
        False,
        False,
        True,
        True,
    ]
    assert [found.complete for found in (decode, tpot, prefill, ttft)] == [True, True, True, False]


def test_speeds_are_tokens_a_second_whatever_was_published(tmp_path: Path) -> None:
    rows = table(tmp_path, {**ROW, "metric": "tpot_s", "value": [0.01, 0.04]})
    low, high, predicted = outcomes(rows)[0].speeds
    assert (low, high) == (pytest.approx(25), pytest.approx(100))
    assert predicted == pytest.approx(1 / outcomes(rows)[0].predicted)


def test_some_rows_only(tmp_path: Path) -> None:
    rows = table(tmp_path, ROW, {**ROW, "id": "b"})
    assert [found.name for found in outcomes(rows, ["b"])] == ["b"]


def test_the_rows_that_come_with_it_can_all_be_predicted() -> None:
    found = outcomes(bundled_rows())
    assert len(found) >= 30
    assert len({row.engine for row in found}) >= 4
    assert all(row.predicted_ns > 0 for row in found)


# -- errors of fits --------------------------------------------------------------------------------


def test_left_out_errors_are_read_and_those_of_times_turned_round(tmp_path: Path) -> None:
    rows = table(tmp_path, ROW, {**ROW, "id": "t", "metric": "tpot_s", "value": 0.02})
    errors(
        tmp_path,
        [
            ("a", "fused", "rtx4090", True, "decode_tokens_per_s", 0.01, 0.1, ""),
            ("t", "fused", "rtx4090", True, "tpot_s", 0.01, 0.25, -0.5),
        ],
    )
    decode, tpot = outcomes(rows)
    assert decode.unseen == Unseen(pytest.approx(0.1), None)
    assert tpot.unseen == Unseen(pytest.approx(-0.2), pytest.approx(1.0))
    assert decode.is_within is None  # two rows say too little for an interval


def test_what_was_published_may_lie_within_the_interval() -> None:
    interval = Interval(0.8, 1.1, "")
    assert outcome(speed=100, interval=interval).is_within is True
    assert outcome(speed=124, interval=interval).is_within is True  # 99.2 to 136
    assert outcome(speed=126, interval=interval).is_within is False
    assert outcome(speed=90, interval=interval).is_within is False
    assert outcome(speed=90, interval=interval, low=98.0).is_within is True  # its range does


@pytest.mark.parametrize("text", ["-1", "much", "nan"])
def test_an_error_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    rows = table(tmp_path, ROW)
    errors(tmp_path, [("a", "fused", "rtx4090", True, "decode_tokens_per_s", 0, text, "")])
    assert main(["published", "--rows", str(rows), "--out", str(tmp_path)]) == 2


# -- what comes of it ------------------------------------------------------------------------------


def test_medians_and_worst_by_hand() -> None:
    found = [
        outcome("a", 110), outcome("b", 95), outcome("c", 130, complete=False),
        outcome("d", 50, metric="ttft_s"), outcome("f", 80, engine="llama_cpp_2025"),
        outcome("e", 98, engine="imp", unseen=Unseen(-0.3, 0.4)),
        outcome("g", 90, engine="imp_tuned", unseen=Unseen(0.1)),
    ]  # fmt: skip
    by_name = {summary.name: summary for summary in summaries(found)}
    assert list(by_name) == [
        *("llama_cpp", "llama_cpp *", "imp", "imp_tuned"),
        *("complete decode rows", "prompts", "all rows"),
    ]

    def sizes(count: int, middle: float, worst: float) -> Sizes:
        return Sizes(count, pytest.approx(middle), pytest.approx(worst))

    assert by_name["llama_cpp"].fitted == sizes(3, 0.1, 0.2)  # a, b and the variant f
    assert by_name["llama_cpp *"].fitted == sizes(1, 0.3, 0.3)
    assert by_name["prompts"].fitted == sizes(1, 0.5, 0.5)
    assert by_name["complete decode rows"].fitted == sizes(5, 0.1, 0.2)
    assert by_name["all rows"].left_out == sizes(2, 0.2, 0.3)  # those that have one
    assert by_name["all rows"].machine_left_out == sizes(1, 0.4, 0.4)
    assert by_name["prompts"].left_out == Sizes(0, None, None)


def test_the_summary_says_how_many_rows_have_a_left_out_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_outcomes([outcome("a", 110, unseen=Unseen(0.2, 0.3)), outcome("b", 95)])
    shown = capsys.readouterr().out
    assert "machine left out: median" in shown
    assert "20.0% (of 1)" in shown
    assert "30.0% (of 1)" in shown
    assert "7.5%" in shown


def test_far_off_rows_are_complete_decode_rows_beyond_a_fifth() -> None:
    found = [
        outcome("near", 119), outcome("far", 121), outcome("slow", 79),
        outcome("unknown", 200, complete=False), outcome("prompt", 200, metric="ttft_s"),
    ]  # fmt: skip
    assert [row.name for row in far_off(found)] == ["far", "slow"]


def test_what_a_far_row_lacks_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    print_outcomes([outcome("7", 150, missing="a cold page cache"), outcome("8", 50)])
    told = capsys.readouterr().out
    assert "7: +50.0%: a cold page cache" in told
    assert "8: -50.0%: not known" in told


def test_the_command_writes_table_and_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = table(tmp_path, ROW, {**ROW, "id": "b", "metric": "ttft_s", "value": 1, "note": "cold"})
    assert main(["published", "--rows", str(rows), "--out", str(tmp_path / "new" / "out")]) == 0
    told = capsys.readouterr().out
    assert "qwen3_30b_a3b" in told
    assert "cold" in told
    for suffix in (".png", ".pdf"):
        assert (tmp_path / "new" / "out" / f"predicted_vs_published{suffix}").stat().st_size > 1000
    with (tmp_path / "new" / "out" / TABLE).open() as file:
        assert [row["id"] for row in csv.DictReader(file)] == ["a", "b"]


def test_a_file_of_outcomes_keeps_units_and_errors(tmp_path: Path) -> None:
    write_csv(tmp_path / "x.csv", [outcome("a", 110, unseen=Unseen(0.2), problems=("too big",))])
    with (tmp_path / "x.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (row["unit"], row["problems"], row["error_machine_left_out"]) == (
        "tokens/s",
        "too big",
        "",
    )
    assert (float(row["error"]), float(row["error_left_out"])) == (pytest.approx(0.1), 0.2)


# -- mistakes --------------------------------------------------------------------------------------

MISTAKES = {
    "unknown key": ({"vlaue": 3}, "a: vlaue: unknown key; did you mean 'value'?"),
    "no value": ({"value": None}, "a: value: missing, must be given"),
    "not a number": ({"value": "fast"}, "a: value = fast: must be a number"),
    "range": ({"value": [3, 1]}, "a: value = [3, 1]: must be a number, or [low, high]"),
    "metric": ({"metric": "decode"}, "a: metric = decode: no such metric"),
    "machine": (
        {"machine": "rtx409"},
        "a: machine = rtx409: no such option; did you mean 'rtx4090'?",
    ),
    "override": ({"overrides": ["placement.cpu_layer=1"]}, "a: placement.cpu_layer: unknown key"),
    "figure": ({"overrides": ["placement.gpu_ratio=2"]}, "gpu_ratio = 2"),
    "no id": ({"id": None}, "row 1: id: missing, must be given"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, words = MISTAKES[name]
    rows = table(tmp_path, {**ROW, **change})
    assert main(["published", "--rows", str(rows), "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert len(told.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_rows_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["published", "--rows", str(tmp_path / "no.yaml")]) == 2
    assert "no.yaml: no such file" in capsys.readouterr().err
    rows = table(tmp_path, ROW, {**ROW, "id": "row25"})
    assert main(["published", "--rows", str(rows), "--only", "row26"]) == 2
    assert "--only row26: no such row; did you mean 'row25'?" in capsys.readouterr().err


# -- the figure ------------------------------------------------------------------------------------


def test_the_figure_tells_prompts_ranges_and_what_is_beyond_its_edge() -> None:
    found = [
        outcome("a", 110, unseen=Unseen(0.2, 0.3), interval=Interval(0.9, 1.1, "")),
        outcome("p", 900, metric="prefill_tokens_per_s", engine="imp", high=120.0),
    ]
    figure = published_figure(found)
    speeds, by_row, close = figure.axes
    labels = [label.get_text() for label in by_row.get_yticklabels()]
    assert labels == ["m  a", "m  p"]
    assert any(text.get_text() == "+800%" for text in by_row.texts)
    low, high = speeds.get_xlim()
    assert low < 100 < 900 < high
    assert close.get_ylabel() == "% of 1 decode rows"


def test_engines_are_told_apart_without_colour() -> None:
    engines = ("llama_cpp", "ik_llama", "ktransformers", "imp", "freetoken", "phone_stream")
    assert len({look_of(engine)[1] for engine in engines}) == len(engines)
    assert look_of("my_engine") == look_of("my_engine")


def test_a_table_without_rows_and_a_folder_that_is_not_there_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "rows.csv"
    table.write_text("id,model,machine,engine,value\n")
    assert main(["published", "--rows", str(table), "--out", str(tmp_path)]) == 2
    assert f"{table}: has no rows, must have at least one" in capsys.readouterr().err
    for command in (["published"], ["calibrate", "published"]):
        assert main([*command, "--config-dir", str(tmp_path / "none")]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert lines[0].endswith(f"--config-dir {tmp_path / 'none'}: no such folder")
