"""``greenroom import``: what a user gives and gets."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from sim.cli import main
from traces.counts import is_counts, read_counts
from traces.importers.formats import FORMATS
from traces.store import read_trace


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An `experts` archive of 2 layers, 40 tokens, top-2 of 8."""
    rng = np.random.default_rng(5)
    ids = np.stack([[rng.permutation(8)[:2] for _ in range(40)] for _ in range(2)])
    path = tmp_path / "toy.npz"
    meta = {"model": "toy", "num_experts": 8, "n_moe_layers": 2, "top_k": 2}
    np.savez(path, experts=ids.astype(np.int16), meta=json.dumps(meta))
    return path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config.json of four layers, of which every second one routes."""
    path = tmp_path / "config.json"
    values = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 4,
        "decoder_sparse_step": 2,
        "num_experts": 8,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 32,
        "intermediate_size": 64,
        "hidden_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
    }
    path.write_text(json.dumps(values))
    return path


def test_every_format_has_a_reader_and_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import"]) == 0
    listed = capsys.readouterr().out
    for known in FORMATS:
        module = import_module(f"traces.importers.{known.module}")
        assert callable(module.read), known.name
        assert f"{known.name} " in listed
    assert len({known.name for known in FORMATS}) == len(FORMATS)


def test_a_config_tells_layers_shape_and_that_k_was_forced(
    archive: Path, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.parquet"
    command = ["import", "experts-npz", str(archive), "--config", str(config), "--out", str(out)]
    assert main([*command, "--context-tokens", "20", "--licence", "MIT"]) == 0
    told = capsys.readouterr()
    assert told.out == f"{out}: 40 rows of 2 requests, qwen3_moe, 2 layers, top-2 of 8 experts\n"
    assert "forced from 4 to 2" in told.err
    meta = read_trace(out).meta
    assert meta.layer_indices == (1, 3)
    assert (meta.hidden_size, meta.intermediate_size, meta.licence) == (48, 32, "MIT")


def test_counts_are_not_called_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "load.json", tmp_path / "load.parquet"
    source.write_text(json.dumps({"logical_count": [[3, 1, 0, 4], [1, 1, 1, 5]]}))
    assert (
        main(
            ["import", "eplb", str(source), "--out", str(out), "--model", "x", "--num-experts", "4"]
        )
        == 0
    )
    assert "expert counts" in capsys.readouterr().out
    assert is_counts(out)
    assert read_counts(out).counts.sum() == 16
    assert main(["sim", f"trace.path={out}"]) == 2
    said = capsys.readouterr().err
    assert "expert counts" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["expert-npz", "{archive}"],
            "format 'expert-npz': no such format; did you mean 'experts-npz'?",
        ),
        (["experts-npz"], "PATH is missing"),
        (["experts-npz", "{archive}x"], "no such file"),
        (["experts-npz", "{archive}", "--model", "qwen3_30b_a3"], "did you mean 'qwen3_30b_a3b'?"),
        (
            ["experts-npz", "{archive}", "--num-experts", "9"],
            "num_experts is 8: must be 9, as you said",
        ),
        (["experts-npz", "{archive}", "--layers", "5-3"], "must be ascending"),
        (["experts-npz", "{archive}", "--top-k", "0"], "top_k is 0: must be >= 1"),
        (["experts-npz", "{archive}", "--config", "{archive}"], "no JSON"),
        (["experts-npz", "{archive}", "--out", "{archive}"], "must not be the file to import"),
        (["experts-npz", "{archive}", "--out", "no/x.parquet"], "the folder no does not exist"),
        (["experts-npz", "{archive}", "--out", "x.csv"], "--out is x.csv: must end in .parquet"),
        (["experts-npz", "{archive}", "--prompt-tokens", "3"], "goes with other formats"),
        (["mpt", "{archive}", "--context-tokens", "3"], "goes with other formats, not mpt"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], said: str, archive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", *(word.replace("{archive}", str(archive)) for word in words)]) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert len(told.err.splitlines()) == 1
    assert archive.stat().st_size > 0


def test_nothing_is_overwritten_unasked(
    archive: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["import", "experts-npz", str(archive)]
    assert main(command) == 0
    assert main(command) == 2
    assert "toy.parquet: is there already: must be a new file" in capsys.readouterr().err
    assert main([*command, "--out", "toy.parquet"]) == 0
