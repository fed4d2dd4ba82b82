"""Predictions for a machine of the user's own: mistakes, where its figures are from, quantised weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hwmodels.file_types import quantised
from hwmodels.model_shape import ModelShape
from sim.cases import compose_case
from sim.cli import main

DESK = """
defaults: [gpu: rtx3090, cpu: ryzen_7950x, link: pcie4_x8, storage: null, _self_]
name: desk
cpu:
  handover_ns: 40_000
  sources: {handover_ns: "%s"}
"""


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder of options with one machine."""
    (tmp_path / "my_conf" / "machine").mkdir(parents=True)
    desk = tmp_path / "my_conf" / "machine" / "desk.yaml"
    desk.write_text(DESK % "F: fitted by greenroom calibrate mine to rows.csv, 3 rows")
    return str(tmp_path / "my_conf")


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Run ``greenroom predict`` and return its JSON."""
    assert main(["predict", *arguments, "--json", "-"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("command", ["predict", "sim", "advise"])
@pytest.mark.parametrize(
    ("override", "near"),
    [("expert_bits=8", "model.expert_bits"), ("machine.cpu.handover=1", "machine.cpu.handover_ns")],
)
@pytest.mark.parametrize("machine", ["desk", "dexk"])
def test_a_mistyped_key_is_one_line_beside_a_machine_of_ones_own(
    command: str, override: str, near: str, machine: str, folder: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    arguments = [command, "--config-dir", folder, f"machine={machine}", override]
    monkeypatch.setattr(sys, "argv", ["greenroom", *arguments])
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"greenroom {command}: error: ")
    said = f"did you mean {near!r}?" if machine == "desk" else "machine = dexk: no such option"
    assert said in line


def test_a_machine_that_cannot_be_composed_leaves_the_default_keys(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the words of the command line are taken for, a key is found."""
    monkeypatch.setattr(sys, "argv", ["greenroom", "predict", "machine=desk"])
    assert main(["predict", "--config-dir", folder, "machine=desk", "expert_bits=8"]) == 2
    assert "did you mean 'model.expert_bits'?" in capsys.readouterr().err


def test_figures_that_the_user_fitted_are_said_to_be_so(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = told(capsys, "--config-dir", folder, "machine=desk")
    assert "a calibration of your own" in found["decode"]["interval_from"]
    (Path(folder) / "machine" / "desk.yaml").write_text(DESK % "X: measured")
    plain = told(capsys, "--config-dir", folder, "machine=desk")
    assert "this machine has no fitted rows" in plain["decode"]["interval_from"]
    assert plain["decode"]["tokens_per_s_interval"] == found["decode"]["tokens_per_s_interval"]


# -- experts used alike ----------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["hybrid", "offload"])
def test_use_alike_is_said_to_be_the_worst_for_a_cache(
    placement: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", f"placement={placement}", "usage=uniform"]) == 0
    shown = capsys.readouterr().out
    assert "Experts are taken to be used alike, the worst for a cache." in shown
    assert "does not hang on it" not in shown
    assert main(["predict", f"placement={placement}"]) == 0
    assert "If all experts were used alike: " in capsys.readouterr().out


def test_without_a_cache_one_token_does_not_hang_on_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "placement.cpu_layers=12", "usage=uniform"]) == 0
    assert "does not hang on it" in capsys.readouterr().out
    assert told(capsys, "placement.cpu_layers=12", "work.batch_size=2")["hangs_on_use"] is True


# -- quantised weights -----------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["Q4_K_M", "IQ2_XXS", "FP8", "MXFP4"])
@pytest.mark.parametrize("model", ["qwen3_30b_a3b", "deepseek_v2_lite", "gpt_oss_120b"])
def test_quant_is_the_scheme_that_advise_tries(scheme: str, model: str) -> None:
    from argparse import Namespace

    from sim.predict_cli import ask, with_quant

    options = Namespace(config_dirs=[], trace=None)
    asked = with_quant(ask([f"model={model}"], options), scheme)
    own = ModelShape.from_mapping(compose_case([f"model={model}"]).config["model"])
    made, wanted = ModelShape.from_mapping(asked.composed.config["model"]), quantised(own, scheme)
    assert made == wanted
    assert made.expert_codebook is (scheme == "IQ2_XXS")


def test_quant_is_what_its_fields_are_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    fields = [f"model.{field}=Q4_K_M" for field in ("expert_bits", "dense_bits", "head_bits")]
    short, long = told(capsys, "--quant", "Q4_K_M"), told(capsys, *fields)
    assert short["decode"] == long["decode"]
    assert short["memory"] == long["memory"]
    kept = told(capsys, "--quant", "Q4_K_M", "model.dense_bits=16")
    assert kept["decode"] == told(capsys, fields[0], fields[2])["decode"]
    own = told(capsys, "--quant", "Q4_K_M", "model.expert_bits=8")
    assert own["asked"]["expert_bits"] == 8
    assert own["asked"]["dense_bits"] == short["asked"]["dense_bits"]


def test_an_unknown_scheme_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--quant", "Q4_K_X"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "--quant Q4_K_X: no such scheme; did you mean 'Q4_K" in line


def test_a_whole_number_is_shown_without_a_fraction(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "-m", "machine.cpu.memory_bytes_per_s=68.6e9,80e9"]) == 0
    shown = capsys.readouterr().out
    assert "68600000000 " in shown
    assert "68600000000.0" not in shown
