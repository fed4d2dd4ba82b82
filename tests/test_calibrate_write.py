"""The files that a calibration writes: copies that name one another, beside files that stay as they are."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from hwmodels.predict import predict
from sim.calibrate import main
from sim.calibrate_names import Field, Options
from sim.calibrate_write import option_files
from sim.cases import case_of, compose_case
from sim.types import ConfigError
from tests.configs import CONF

MACHINE = "machine.cpu.memory_derate"
CPU = """defaults: [ryzen_7950x, _self_]
name: AMD Ryzen 9 7900X # begins with a bundled one
cores: 12
sources:
  cores: "M: 12 cores"
"""
DESK = """defaults: [gpu: rtx3090, cpu: ryzen_7900x, link: pcie4_x8, storage: null, _self_]
name: desk
"""
CHOSEN = {"model": "gpt_oss_120b", "engine": "llama_cpp", "placement": "cpu_layers"}
DERATE = 0.7


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder with a machine whose processor begins with a bundled one."""
    folder = tmp_path / "my_conf"
    (folder / "machine" / "cpu").mkdir(parents=True)
    (folder / "machine" / "cpu" / "ryzen_7900x.yaml").write_text(CPU)
    (folder / "machine" / "desk.yaml").write_text(DESK)
    return folder


def speed(folder: Path, machine: str, layers: int, *overrides: str) -> float:
    chosen = [f"{key}={value}" for key, value in CHOSEN.items()]
    more = [f"machine={machine}", f"placement.cpu_layers={layers}", *overrides]
    return predict(case_of(compose_case([*chosen, *more], [str(folder)]).config)).tokens_per_s


def specification(folder: Path, name: str = MACHINE, machine: str = "desk") -> Path:
    """Write rows of a machine whose processor reaches DERATE, and what asks for it."""
    rows = [
        {"id": n, "machine": machine, **CHOSEN, "overrides": [f"placement.cpu_layers={n}"],
         "value": speed(folder, machine, n, f"{MACHINE}={DERATE}")}
        for n in (12, 24, 36)
    ]  # fmt: skip
    given = {"rows": "rows.yaml", "parameters": {name: {"bounds": [0.3, 1]}}}
    (folder.parent / "rows.yaml").write_text(yaml.safe_dump(rows))
    path = folder.parent / "fit.yaml"
    path.write_text(yaml.safe_dump(given))
    return path


def calibrated(spec: Path, out: Path, *config_dirs: Path) -> int:
    named = [word for folder in config_dirs for word in ("--config-dir", str(folder))]
    flags = ["--no-leave-one-out", "--results", str(spec.parent / "res"), "--out", str(out)]
    return main([str(spec), *named, *flags])


@pytest.mark.parametrize("out", ["my_conf", "fits"])
def test_every_file_along_the_chain_is_copied_and_none_is_changed(own: Path, out: str) -> None:
    before = {path: path.read_bytes() for path in own.rglob("*.yaml")}
    folder = own.parent / out
    assert calibrated(specification(own), folder, own) == 0
    assert {path: path.read_bytes() for path in before} == before
    written = {str(path.relative_to(folder)) for path in folder.rglob("*_fitted.yaml")}
    parts = {f"machine/cpu/{name}_fitted.yaml" for name in ("ryzen_7900x", "ryzen_7950x")}
    assert written == {"machine/desk_fitted.yaml", *parts}
    desk = yaml.safe_load((folder / "machine/desk_fitted.yaml").read_text())
    assert desk["defaults"][1] == {"cpu": "ryzen_7900x_fitted"}
    cpu = yaml.safe_load((folder / "machine/cpu/ryzen_7900x_fitted.yaml").read_text())
    assert cpu["defaults"] == ["ryzen_7950x_fitted", "_self_"]
    assert cpu["cores"] == 12
    truth = speed(own, "desk", 24, f"{MACHINE}={DERATE}")
    assert speed(folder, "desk_fitted", 24) == pytest.approx(truth, rel=1e-3)
    assert speed(own, "desk", 24) != pytest.approx(truth, rel=0.01)


def test_a_machine_that_begins_with_another_gets_its_copy_too(own: Path) -> None:
    (own / "machine" / "desk2.yaml").write_text("defaults: [desk, _self_]\nname: desk2\n")
    assert calibrated(specification(own, machine="desk2"), own, own) == 0
    truth = speed(own, "desk2", 24, f"{MACHINE}={DERATE}")
    assert speed(own, "desk2_fitted", 24) == pytest.approx(truth, rel=1e-3)
    first = yaml.safe_load((own / "machine/desk2_fitted.yaml").read_text())
    assert first["defaults"] == ["desk_fitted", "_self_"]
    assert first["name"] == "desk2_fitted"


def test_a_fit_is_written_over_its_own_earlier_copies(own: Path) -> None:
    spec = specification(own)
    assert calibrated(spec, own, own) == 0
    once = {path: path.read_bytes() for path in own.rglob("*.yaml")}
    assert calibrated(spec, own, own) == 0
    assert {path: path.read_bytes() for path in own.rglob("*.yaml")} == once


def test_a_folder_of_fits_and_one_of_machines_work_together(own: Path) -> None:
    fits = own.parent / "fits"
    (own / "machine" / "link").mkdir()
    shutil.copy(CONF / "machine/link/pcie4_x8.yaml", own / "machine/link/mine.yaml")
    assert calibrated(specification(own), fits, own) == 0
    both = ["machine=desk_fitted", "machine/link=mine"]
    composed = compose_case(both, [str(fits), str(own)])
    assert composed.choices["machine/cpu"] == "ryzen_7900x_fitted"
    assert composed.choices["machine/link"] == "mine"
    spec = specification(own)
    spec.write_text(spec.read_text().replace(MACHINE, "machine/cpu/ryzen_7950x.memory_derate"))
    assert calibrated(spec, fits, fits, own) == 0


def test_a_field_that_an_option_has_from_another_is_named_by_that(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = specification(own, "machine/cpu/ryzen_7900x.memory_derate")
    assert calibrated(spec, own, own) == 2
    assert capsys.readouterr().err.endswith(
        "machine/cpu/ryzen_7900x does not set memory_derate, machine/cpu/ryzen_7950x does: name that, or "
        "machine.cpu.memory_derate\n"
    )


CHANGE: dict[Any, Any] = {Field("engine", "llama_cpp", ("dense_launches",)): (33, "F: fitted")}


def test_only_what_comes_with_greenroom_changes_in_place_where_it_lies(tmp_path: Path) -> None:
    (path,) = option_files(CONF, "fitted", "fit", CHANGE, [], Options())
    assert path == CONF / "engine" / "llama_cpp.yaml"
    (tmp_path / "engine").mkdir()
    shutil.copy(path, tmp_path / "engine" / "mine.yaml")
    own: Any = {Field("engine", "mine", ("dense_launches",)): (33, "F: fitted")}
    written = option_files(tmp_path, "fitted", "fit", own, [], Options([str(tmp_path)]))
    assert list(written) == [tmp_path / "engine" / "mine_fitted.yaml"]


@pytest.mark.parametrize(
    ("suffix", "rule"),
    [("fitted", "was not written by"), ("2025", "is the name of an option that comes with")],
)
def test_a_copy_neither_overwrites_nor_is_hidden(tmp_path: Path, suffix: str, rule: str) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "llama_cpp_fitted.yaml").write_text("name: of another hand\n")
    with pytest.raises(ConfigError, match=rule):
        option_files(tmp_path, suffix, "fit", CHANGE, [], Options())


def test_a_row_cannot_have_folders_of_its_own(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = specification(own)
    rows = yaml.safe_load((own.parent / "rows.yaml").read_text())
    rows[0]["overrides"].append(f"hydra.searchpath=[{own}]")
    (own.parent / "rows.yaml").write_text(yaml.safe_dump(rows))
    assert calibrated(spec, own, own) == 2
    assert "must be given for all rows, as --config-dir DIR" in capsys.readouterr().err
