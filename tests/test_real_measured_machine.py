"""Measured rows become the machine that they are of, and a command measures this one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hwmodels.engine import Engine
from hwmodels.machine import Machine
from hwmodels.microbench import Measurement
from real import measure_cli, measure_plan
from real.device import CPUDevice
from real.machine_facts import machine_facts
from real.measure import Measured
from real.measure_rows import ROW_COLUMNS, write_rows
from sim import cli
from sim.calibrate import main as calibrate
from sim.calibrate_curves import between_points
from sim.calibrate_machine import Made, make_machine
from sim.calibrate_spec import read_specification
from sim.cases import case_of, compose_case
from sim.types import ConfigError
from tests.measured_sizes import KIB, MIB, SMALL

torch.set_num_threads(1)

# -- from rows to a machine ------------------------------------------------------------------------


TRUTH = {
    "gpu": {"memory_bytes_per_s": 9 * 10**9, "matmul_flops": 60 * 10**9, "kernel_floor_ns": 9000,
            "launch_ns": 900, "attention_floor_ns": 20_000},
    "link": {"h2d_bytes_per_s": 6 * 10**9, "copy_setup_ns": 50_000, "copy_gap_ns": 12_000,
             "copy_issue_ns": 5000, "pinned": True},
    "cpu": {"memory_bytes_per_s": 14 * 10**9, "thread_bytes_per_s": 8 * 10**9, "threads_used": 1,
            "dram_bytes_per_s": 16 * 10**9, "matmul_flops": 80 * 10**9, "expert_setup_ns": 60_000,
            "handover_ns": 45_000, "launch_issue_ns": 800, "cores": 2},
    "storage": {"setup_ns": 90_000},
}  # fmt: skip
KNEE = {1: 1.0, 2: 1.1, 4: 1.9, 8: 2.0}
"""Kernels that no formula has: a step between two and four tokens."""


def truth() -> tuple[Machine, Engine]:
    config = compose_case(["machine=rtx4090"]).config
    parts = {
        name: {**config["machine"][name], **figures, "memory_derate": 1.0, "matmul_derate": 1.0}
        for name, figures in TRUTH.items()
    }
    for name in ("link", "storage"):
        del parts[name]["memory_derate"], parts[name]["matmul_derate"]
    parts["cpu"] |= {"dram_derate": 1.0, "decode_weights_per_s": None, "rate_by_bits": None,
                     "codebook_weights_per_s": None}  # fmt: skip
    curve = [
        [64 * KIB, 1, 4 * 10**8],
        [64 * KIB, 4, 9 * 10**8],
        [MIB, 1, 10**9],
        [MIB, 4, 16 * 10**8],
    ]
    parts["storage"]["curve"] = curve
    for part in parts.values():
        sources = dict.fromkeys((*part["sources"], *part), "I: a test")
        part["sources"] = {
            k: v for k, v in sources.items() if k not in ("name", "pinned", "sources")
        }
        part["sources"].pop("dram_sharing", None)
    machine = Machine.from_mapping({"name": "truth", **parts})
    return machine, Engine.from_mapping(config["engine"])


def true_rows() -> list[dict[str, Any]]:
    """Return rows as the cost model predicts them for a machine of known figures."""
    machine, engine = truth()
    sizes = (256 * KIB, 2 * MIB, 16 * MIB)
    heads = {"num_heads": 16, "num_kv_heads": 4, "head_dim": 128, "kv_bits": 32}
    wanted: list[dict[str, Any]] = [
        *({"kind": "gemv", "num_bytes": n, "bits": 32} for n in (16 * KIB, 4 * MIB, 32 * MIB)),
        {"kind": "gemm", "m": 256, "n": 2048, "k": 2048, "bits": 32},
        *({"kind": "attention", "kv_tokens": n, **heads} for n in (16, 4096)),
        {"kind": "launch", "mode": "stream", "count": 100},
        {"kind": "launch_issue", "count": 100},
        {"kind": "copy_issue", "count": 8},
        {"kind": "handover", "num_tokens": 1},
        *({"kind": "copy", "num_bytes": n, "queued": q} for n in sizes for q in (True, False)),
        *({"kind": "expert_cpu", "num_bytes": n, "bits": 32, "num_tokens": tokens, "threads": threads}
          for n in sizes for tokens in (1, 64) for threads in (1, 2)),
        *({"kind": "storage", "block_bytes": b, "queue_depth": d} for b in (64 * KIB, MIB) for d in (1, 4)),
        *({"kind": "storage_read", "num_bytes": n, "block_bytes": MIB, "queue_depth": 4}
          for n in (2 * MIB, 16 * MIB)),
    ]  # fmt: skip
    rows = [
        {
            **row,
            "value_ns": Measurement.from_mapping({**row, "value_ns": 1}, "").predict_ns(
                machine, engine
            ),
        }
        for row in wanted
    ]
    rows += [
        {"kind": "expert_gpu", "num_bytes": n, "bits": bits, "num_tokens": tokens,
         "value_ns": round(n / 9 * knee * (2 if bits == 16 else 1))}
        for bits in (32, 16) for n in sizes for tokens, knee in KNEE.items()
    ]  # fmt: skip
    rows += [{**r, "bits": 16} for r in rows if r["kind"] in ("expert_cpu", "gemv", "gemm")]
    rows += [{**r, "kv_bits": 16} for r in rows if r["kind"] == "attention"]
    slower = {"kind": "copy", "num_bytes": 16 * MIB, "queued": True, "beside": "kernels"}
    rows.append({**slower, "value_ns": 10**8})  # must not count for the rate
    return [{**row, "repeats": 21, "spread": 0.05} for row in rows]


def write_measured(folder: Path, rows: Sequence[Mapping[str, Any]], **setting: Any) -> Path:
    facts = machine_facts(CPUDevice()) | {"cores": 2}
    told = {"dtypes": ["float32", "bfloat16"], "activations": {"int8": "float32"}, "threads": 1,
            "cpu_threads": 1, "storage": {"capacity_bytes": 10**12, "device": "/dev/disk"}}  # fmt: skip
    summary = {"date": "2026-05-01", "machine": facts, "setting": told | setting, "slowdown": {}}
    written = write_rows(folder / "here.csv", rows, summary)
    assert [path.name for path in written] == ["here.csv", "here.json"]
    return written[0]


def made_of(rows: Path, out: Path, name: str = "here") -> Made:
    return make_machine(read_specification("measured", str(rows), name), out)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows of a known machine, and in ``conf`` what is made of them."""
    folder = tmp_path_factory.mktemp("whole")
    rows = write_measured(folder, true_rows())
    given = ["measured", "--rows", str(rows), "--machine", "here", "--out", str(folder / "conf")]
    assert calibrate([*given, "--results", str(folder / "res")]) == 0
    return folder


def test_the_rows_of_a_known_machine_become_that_machine(whole: Path) -> None:
    out = whole / "conf"
    config = compose_case(["machine=here"], [str(out)]).config["machine"]
    for part, figures in TRUTH.items():
        for name, value in figures.items():
            if (part, name) not in (("cpu", "dram_bytes_per_s"), ("gpu", "step_overhead_ns")):
                assert config[part][name] == pytest.approx(value, rel=0.02), name
    assert config["gpu"]["expert_table"][:2] == [[256 * KIB, 1, 29_127], [256 * KIB, 2, 32_040]]
    assert config["storage"]["curve"][-1] == [MIB, 4, 1_600_000_000]
    sources = config["gpu"]["sources"]
    assert sources["expert_table"].startswith("X: measured, greenroom measure 0.1.0, 2026-05-01")
    assert "medians of 21 to 21 repeats" in sources["expert_table"]
    assert sources["launch_ns"].startswith("X: greenroom measure")
    assert sources["memory_bytes_per_s"].startswith(
        "F: fitted by greenroom calibrate measured to here.csv"
    )
    assert json.loads((whole / "res" / "calibration.json").read_text())["table"] == "here.csv"


def test_each_dtype_has_its_own_experts_and_they_are_what_was_measured(whole: Path) -> None:
    out = whole / "conf"
    named = {path.relative_to(out / "machine").as_posix() for path in out.rglob("*.yaml")}
    both = {
        f"{part}here{dtype}.yaml" for part in ("", "gpu/", "cpu/") for dtype in ("", "_bfloat16")
    }
    assert named == both | {"link/here.yaml", "storage/here.yaml"}
    for name, factor in (("here", 1), ("here_bfloat16", 2)):
        chosen = [f"machine={name}", "model=mixtral_8x7b", "engine=serial"]
        composed = compose_case(chosen, [str(out)])
        assert composed.choices["machine/link"] == "here"
        costs = case_of(composed.config).costs
        cheap = replace(
            costs.shape, hidden_size=1024, expert_intermediate_size=512, expert_bits=32.0
        )
        costs = type(costs)(replace(cheap, expert_bits=32 / 3), costs.machine, costs.engine)
        assert costs.shape.expert_bytes(0) == 2 * MIB
        for tokens, knee in KNEE.items():
            expected = round(2 * MIB / 9 * knee * factor)
            assert costs.expert_gpu_ns(0, tokens, packed=False) == pytest.approx(expected, abs=1)


def test_a_point_left_out_shows_where_straight_lines_are_wrong() -> None:
    assert between_points([(1, 1, 10), (1, 2, 20), (1, 4, 40)]) == pytest.approx(0)
    assert between_points([(1, 1, 10), (1, 2, 40), (1, 3, 30)]) == pytest.approx(0.5)
    assert between_points([(1, 1, 10), (1, 2, 40)]) is None


def test_a_machine_without_storage_or_with_too_few_rows(tmp_path: Path) -> None:
    rows = [row for row in true_rows() if not row["kind"].startswith("storage")]
    alone = {"storage": None, "dtypes": ["float32"]}
    made = made_of(write_measured(tmp_path, rows, **alone), tmp_path / "conf")
    texts = {
        path.relative_to(tmp_path / "conf").as_posix(): text for path, text in made.files.items()
    }
    assert {"storage": None} in yaml.safe_load(texts["machine/here.yaml"])["defaults"]
    assert "machine/storage/here.yaml" not in texts
    assert made.misses["here"].keys() >= {"gemv", "copy", "attention", "handover"}
    assert max(worst for _, worst in made.misses["here"].values()) < 0.05
    without = write_measured(tmp_path, [row for row in rows if row["kind"] != "handover"])
    with pytest.raises(ConfigError, match=r"no row of kind handover, which cpu\.handover_ns needs"):
        made_of(without, tmp_path / "conf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda p: p.with_suffix(".json").unlink(),
            "here.json: no such file; must lie beside the rows",
        ),
        (lambda p: p.with_suffix(".json").write_text("{}"), "is not what greenroom measure writes"),
        (
            lambda p: p.write_text("kind,bits\n"),
            "has no row of kind expert_gpu; measure for longer",
        ),
    ],
)
def test_rows_that_no_machine_can_be_made_of(
    tmp_path: Path, change: Callable[[Path], Any], message: str
) -> None:
    rows = write_measured(tmp_path, true_rows()[:4])
    change(rows)
    with pytest.raises(ConfigError, match=message) as caught:
        made_of(rows, tmp_path / "conf")
    assert "\n" not in str(caught.value)


def test_a_name_or_a_file_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    rows = write_measured(tmp_path, true_rows())
    for name, rule in (("rtx4090", "comes with Greenroom"), ("a-b", "must be letters, digits")):
        with pytest.raises(ConfigError, match=rule):
            made_of(rows, tmp_path, name)
    own = tmp_path / "machine" / "here.yaml"
    own.parent.mkdir()
    own.write_text("name: by hand\n")
    with pytest.raises(ConfigError, match="was not written by greenroom measure"):
        made_of(rows, tmp_path)
    assert own.read_text() == "name: by hand\n"


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dtypes", "float31"], "--dtypes float31: must be of float32, "),
        (["--threads", "0"], "--threads 0: must be in [1, "),
        (["--cpu-threads", "100000"], "--cpu-threads 100000: must be in [1, "),
        (["--seed", "-1"], "--seed -1: must be >= 0"),
        (["--seconds", "0"], "--seconds 0: must be in [1, 86400]"),
        (["--name", "rtx4090"], "machine = rtx4090: is the name of an option that comes with"),
        (["--scratch", "nowhere"], "--scratch nowhere: no such folder"),
        (["--device", "gpu"], "device = gpu: must be auto, cpu, cuda"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_left(
    flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert measure_cli.main(["--out", "conf", *flags]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("greenroom measure: error: ")
    assert message in said
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_is_told_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conf").write_text("mine")
    assert measure_cli.main(["--out", str(tmp_path / "conf"), "--no-storage"]) == 2
    assert "conf: must be a folder, and is a file" in capsys.readouterr().err
    assert (tmp_path / "conf").read_text() == "mine"


def test_ctrl_c_before_anything_was_kept_is_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = Measured([], {})
    cut.was_cut = True
    monkeypatch.setattr(measure_cli, "_measure", lambda *_: cut)
    given = ["measure", "--out", str(tmp_path / "conf"), "--no-storage", "--device", "cpu"]
    assert cli.main(given) == 130
    assert "interrupted" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_from_the_command_to_a_prediction_for_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = machine_facts(CPUDevice()) | {"cache_bytes": MIB}
    monkeypatch.setattr("real.machine_facts.machine_facts", lambda device: facts)
    monkeypatch.setattr(measure_plan, "QUICK", SMALL)
    out, scratch = tmp_path / "conf", tmp_path / "scratch"
    scratch.mkdir()
    flags = ["--out", str(out), "--name", "box", "--quick", "--seconds", "1", "--device", "cpu"]
    assert measure_cli.main([*flags, "--scratch", str(scratch), "--dtypes", "float32"]) == 0
    assert list(scratch.iterdir()) == []
    header = (out / "box.csv").read_text().splitlines()[0].split(",")
    assert set(header) <= set(ROW_COLUMNS)
    summary = json.loads((out / "box.json").read_text())
    assert summary["machine"]["cpu"] == facts["cpu"]
    assert summary["rounds"] >= 1
    assert "kernels_beside_copies" in summary["slowdown"]
    assert "Use: greenroom sim --config-dir" in capsys.readouterr().out
    chosen = ["predict", "--config-dir", str(out), "machine=box", "model=olmoe_1b_7b"]
    assert cli.main([*chosen, "engine=serial", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)
