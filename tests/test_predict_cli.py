"""``greenroom predict`` as a user meets it: one answer, many, a trace's use of experts, and mistakes."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from sim.predict_cli import combinations, main

HEAD = "id,engine,machine,complete,metric,error_fit,error_left_out,error_machine_left_out\n"


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Run the command and return its JSON."""
    assert main([*arguments, "--json", "-"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the command, which must refuse in one line; return the line."""
    assert main(list(arguments)) == 2
    seen = capsys.readouterr()
    lines = seen.err.strip().splitlines()
    assert len(lines) == 1, seen.err
    assert lines[0].startswith("greenroom predict: error: ")
    return lines[0]


def test_one_answer_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model.expert_bits=Q4_K_M", "placement.cpu_layers=24"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "24 of 48 layers' experts on the CPU",
        "time to first token (TTFT)",
        "critical path of a decode step",
        "Bottleneck: CPU: experts: the CPU reads experts at",
        "Bytes a decoded token: ",
        "Context: ",
        "GPU memory: ",
        "Expert use: qwen3_text",
        "What would help most: ",
    ):
        assert words in shown, words
    assert "DOES NOT FIT" not in shown


def test_the_figures_of_an_answer_hang_together(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "model.expert_bits=Q4_K_M", "placement=hybrid", "work.batch_size=4")
    decode, prefill = found["decode"], found["prefill"]
    assert decode["tokens_per_s"] == pytest.approx(4000 / decode["tpot_ms"])
    assert prefill["tokens_per_s"] == pytest.approx(512_000 / prefill["ttft_ms"])
    for stage, time in ((decode, "tpot_ms"), (prefill, "ttft_ms")):
        parts = found["decode_parts" if stage is decode else "prefill_parts"]
        assert sum(part["ms"] for part in parts) == pytest.approx(stage[time], rel=1e-3)
        assert sum(part["share"] for part in parts) == pytest.approx(1, rel=1e-3)
    for room in found["memory"].values():
        assert sum(room["uses"].values()) == room["needed"]
        assert room["fits"] is (room["needed"] <= room["have"])
    assert found["bottleneck"]["part"] == found["decode_parts"][0]["part"]
    assert found["used_alike_tokens_per_s"] < decode["tokens_per_s"]
    changes = [row["gain"] for row in found["gains"]]
    assert changes == sorted(changes, reverse=True)


def test_what_does_not_fit_is_said_loudly(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["placement=gpu_only"]) == 0
    shown = capsys.readouterr().out
    assert "DOES NOT FIT: GPU memory: 62.1 GB are needed, rtx4090 has 25.8" in shown
    assert "would fill the GPU memory there is" in shown
    assert main(["machine=phone_sd8gen3", "placement=offload"]) == 0
    assert "DOES NOT FIT: host memory" in capsys.readouterr().out


def test_a_context_beyond_memory_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "placement.cpu_layers=48", "work.context_tokens=1000000")
    assert found["memory"]["gpu"]["fits"] is False
    assert found["memory"]["gpu"]["uses"]["kv"] == 1_000_000 * 48 * 2 * 4 * 128 * 2


def test_an_interval_comes_from_the_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = [
        f"{n},llama_cpp,rtx4090,True,decode_tokens_per_s,0,{error},{2 * error}"
        for n, error in enumerate((-0.2, -0.1, 0.0, 0.25, 0.5))
    ]
    table = tmp_path / "errors.csv"
    table.write_text(HEAD + "\n".join(rows) + "\n")
    decode = told(capsys, "--errors", str(table))["decode"]
    low, high = decode["tokens_per_s_interval"]
    assert (low, high) == pytest.approx(
        (decode["tokens_per_s"] / 1.4, decode["tokens_per_s"] / 0.84)
    )
    assert decode["tpot_ms_interval"] == pytest.approx(
        [decode["tpot_ms"] * 0.84, decode["tpot_ms"] * 1.4]
    )
    changed = told(capsys, "--errors", str(table), "machine.cpu.threads_used=4")["decode"]
    assert "no fitted rows" in changed["interval_from"]
    assert "80%" in changed["interval_from"]


def test_one_memory_has_no_gpu_parts(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "machine=phone_sd8gen3", "placement=gpu_share")
    assert set(found["memory"]) == {"host"}
    assert not any("GPU" in part["part"] for part in found["decode_parts"])
    assert any("has one memory" in note for note in found["notes"])


def test_figures_nobody_measured_are_named_unless_given(capsys: pytest.CaptureFixture[str]) -> None:
    weak = {row["figure"] for row in told(capsys, "placement=gpu_only")["weak_figures"]}
    assert {"gpu.memory_bytes_per_s", "gpu.memory_derate"} <= weak
    assert "gpu.launch_ns" not in weak  # llama_cpp launches from a graph
    given = told(capsys, "placement=gpu_only", "machine.gpu.memory_derate=0.8")["weak_figures"]
    assert {row["figure"] for row in given} == weak - {"gpu.memory_derate"}


def test_a_trace_gives_the_use_of_experts(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "placement=offload", "--trace", "tiny")
    assert found["asked"]["names"]["usage"] == "trace tiny"
    assert "usage" not in found["asked"]["choices"]
    assert any("8 layers, 32 experts, top-4" in note for note in found["notes"])
    text = told(capsys, "placement=offload")
    assert found["decode"]["tokens_per_s"] != text["decode"]["tokens_per_s"]


def test_a_table_of_combinations(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    settings = ["machine=rtx3090,rtx4090", "placement.cpu_layers=0,48"]
    assert main(["-m", *settings, "--csv", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "no: gpu" in shown
    rows = list(csv.DictReader(file.open()))
    assert [row["overrides"] for row in rows] == [
        f"machine={machine} placement.cpu_layers={layers}"
        for machine in ("rtx3090", "rtx4090")
        for layers in (0, 48)
    ]
    assert float(rows[2]["decode.tokens_per_s"]) > float(rows[3]["decode.tokens_per_s"])


def test_a_combination_that_cannot_be_spoils_only_itself(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["-m", "placement.gpu_ratio=0.5,1.2"]) == 2
    seen = capsys.readouterr()
    assert "gpu_ratio = 1.2: must be in [0, 1]" in seen.err
    assert "bottleneck" in seen.out


def test_ranges_and_lists_are_combined() -> None:
    made = list(
        combinations(["model=tiny", "placement.cpu_layers=range(0,3)", "work.batch_size=1,2"])
    )
    assert len(made) == 6
    assert made[0] == ("model=tiny", "placement.cpu_layers=0", "work.batch_size=1")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["machine=rtx4091"], "did you mean 'rtx4090'?"),
        (["model.expert_bits=Q4_K_X"], "did you mean 'Q4_K_S'?"),
        (["placement.gpu_ratio=1.2"], "gpu_ratio = 1.2: must be in [0, 1]"),
        (["placement.cpu_layer=3"], "did you mean 'placement.cpu_layers'?"),
        (["work.context_tokens=0"], "work.context_tokens = 0: must be a whole number >= 1"),
        (["work.batch_size=1e10"], "at most 1e9"),
        (["machine.gpu.memory_bytes_per_s=0"], "must be > 0"),
        (["machine=rtx3090,rtx4090"], "several values: must be one; a list is written [a,b]; -m"),
        (["machine=null"], "machine=null: must name an option of the group machine"),
        (["machine/storage=null"], "to leave it out write machine.storage=null"),
        (["nonsense"], "nonsense"),
        (["--trace", "nowhere.parquet"], "nowhere.parquet: no such file"),
        (["--config-dir", "nowhere"], "--config-dir nowhere: no such folder"),
        (["--json", "nowhere/x.json"], "--json nowhere/x.json: no such folder: nowhere"),
        (["--errors", "nowhere.csv"], "nowhere.csv: No such file"),
        (
            ["machine=jetson_agx_orin", "machine.storage=null", "placement=offload"],
            "storage: missing",
        ),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert said in refused(capsys, *arguments)


def test_names_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(['model.name="[red]x[/nope]"', "machine.gpu.memory_bytes=1000"]) == 0
    shown = capsys.readouterr().out
    assert "[red]x[/nope]" in shown
    assert "DOES NOT FIT: GPU memory" in shown


def test_one_memory_reads_nothing_that_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "machine=jetson_agx_orin", "model.expert_bits=Q4_K_M")
    parts = {part["part"] for part in found["decode_parts"] + found["prefill_parts"]}
    assert not parts & {"storage", "CPU: experts", "handover to the CPU"}
    assert any("placement.cpu_layers means nothing" in note for note in found["notes"])
    always = told(capsys, "machine=jetson_agx_orin", "placement=gpu_share")
    assert "handover to the CPU" not in {part["part"] for part in always["decode_parts"]}


@pytest.mark.parametrize("name", ["my conf", "a,b", "q'\"x", "[x]"])
def test_a_folder_of_options_may_have_any_name(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name / "usage").mkdir(parents=True)
    (tmp_path / name / "usage" / "mine.yaml").write_text(
        "name: mine\nsource: 'stated'\ndistinct: null\nhits: null\n"
    )
    found = told(capsys, "--config-dir", str(tmp_path / name), "usage=mine")
    assert found["asked"]["names"]["usage"] == "mine"


def test_a_broken_table_of_errors_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "errors.csv"
    for content, words in (
        (HEAD.encode() + b"1,llama_cpp,rtx40", "line 2: must have a cell for each column"),
        (b"\xff\xfe", "cannot be read as CSV"),
    ):
        table.write_bytes(content)
        assert f"{table}: " in (line := refused(capsys, "--errors", str(table)))
        assert words in line
    assert f"{tmp_path}: Is a directory" in refused(capsys, "--json", str(tmp_path))
