"""The folder of results: made before minutes are spent, and gone if nothing came of the run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the real backend needs torch")

from real import validate, validate_cli
from real.result_folder import result_folder
from sim.types import ConfigError


def test_what_was_made_goes_with_an_error_unless_something_is_in_it(tmp_path: Path) -> None:
    def fails(folder: Path, writes: bool = False) -> None:
        with result_folder(folder, make=True) as made:
            assert made.is_dir()
            if writes:
                (made / "rows.csv").write_text("1")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fails(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    with pytest.raises(KeyboardInterrupt):
        fails(tmp_path / "mine")
    with pytest.raises(KeyboardInterrupt):
        fails(tmp_path / "kept", writes=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "mine"]


def test_a_folder_that_takes_no_files_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with (
        pytest.raises(ConfigError, match="must be a folder that can be written to"),
        result_folder(tmp_path / "a", make=True),
    ):
        pytest.fail("nothing may run")
    assert list(tmp_path.iterdir()) == []


def test_a_validation_does_not_measure_what_it_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(validate, "validate", lambda *_: pytest.fail("nothing may run"))
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "x"):
        assert validate_cli.main(["--out", str(out)]) == 2
        error = capsys.readouterr().err
        assert str(out) in error
        assert error.count("\n") == 1
    assert validate_cli.main(["--out", str(tmp_path / "new"), "--tiers", "rma"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
