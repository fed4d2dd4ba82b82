"""``greenroom synth``: from a trace or a saved fit to a file, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import traces.tiny
from sim.synth_cli import main
from tests.synth_models import model
from traces.schema import PREFILL
from traces.store import read_trace, write_trace
from traces.synth_model import load_model


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "toy_fit.json"
    model().save(path)
    return path


def test_a_trace_of_a_named_model_from_a_fit(saved: Path, capsys) -> None:
    out = saved.with_name("big.parquet")
    words = f"--fit {saved} --model deepseek_v2_lite --out {out} --tokens 300 --prompt-tokens 40"
    assert main(f"{words} --output-tokens 100 --batch-size 2 --no-weights".split()) == 0
    trace = read_trace(out)
    meta = trace.meta
    assert (meta.num_layers, meta.num_experts, meta.top_k) == (26, 64, 6)
    assert meta.layer_indices[0] == 1  # a dense layer comes first
    assert meta.expert_bytes is not None
    assert meta.num_shared_experts == 2
    assert meta.provenance.kind == "synthetic"
    assert "recorded toy" in meta.provenance.source
    assert any(note.startswith("scaled") for note in meta.notes)
    assert len(trace) == 300
    assert (trace.phase[trace.request_id == 0] == PREFILL).sum() == 40
    told = capsys.readouterr()
    assert "SYNTHETIC, 300 tokens of 3 requests, 26 layers of 64 experts, top-6" in told.out
    assert "Scaled to 26 layers" in told.out
    assert told.out.splitlines()[-1].startswith(f"{out}: SYNTHETIC, "), "the last line says where"
    assert told.err == "greenroom synth: scaling to 26 layers of 64 experts\n"


def test_the_same_seed_writes_the_same_file(saved: Path) -> None:
    files = [saved.with_name(f"{name}.parquet") for name in "abc"]
    for file, seed in zip(files, (1, 1, 2), strict=True):
        assert main(f"--fit {saved} --out {file} --requests 2 --seed {seed}".split()) == 0
    one, same, other = (file.read_bytes() for file in files)
    assert one == same != other


def test_a_fit_is_made_checked_saved_and_used(tmp_path: Path, capsys) -> None:
    recorded = read_trace(
        Path(traces.tiny.__file__).parent / "trace.parquet", ["expert_weights", "stage"]
    )
    few = recorded.take(np.asarray(recorded.request_id) < 4)
    source, fit, out, report = (
        tmp_path / name for name in ("s.parquet", "f.json", "o.parquet", "r.json")
    )
    write_trace(source, few)
    words = f"--like {source} --save-fit {fit} --out {out} --report {report} --rank 6 --requests 3"
    assert main(words.split()) == 0
    told = capsys.readouterr()
    assert "Held-out check of the fit to s" in told.out
    assert "LRU hit rate, one token at a time" in told.out
    assert "held-out check, half 2 of 2" in told.err
    assert told.out.endswith(f"\nFit: {fit}\nCheck: {report}\n")
    assert load_model(fit).rank == 6
    assert {row["measure"] for row in json.loads(report.read_text())["rows"]} == {
        "reuse",
        "coherence",
        "lru",
        "gap",
    }
    found = read_trace(out)
    assert found.num_requests == 3
    assert found.meta.stage_names == few.meta.stage_names
    assert found.meta.model == "greenroom-tiny (synthetic)"
    best = found.expert_weights[:, :, 0].astype(float).mean()  # type: ignore[index]
    assert best == pytest.approx(few.expert_weights[:, :, 0].astype(float).mean(), rel=0.1)  # type: ignore[index]


def test_the_recording_is_never_written_over(tmp_path: Path, capsys) -> None:
    source = tmp_path / "mine.parquet"
    source.write_bytes(b"my only copy")
    assert main(f"--like {source} --out {tmp_path / '.' / 'mine.parquet'}".split()) == 2
    assert "must not be the file of --like" in capsys.readouterr().err
    assert source.read_bytes() == b"my only copy"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--like a.parquet --fit b.json", "--like and --fit: only one of them"),
        ("--fit b.json", "--fit without --out: there is nothing to do"),
        ("--fit b.json --out o.parquet", "b.json: No such file or directory"),
        ("--like nowhere.parquet", "nowhere.parquet: no such file"),
        (
            "--model deepsek_v3",
            "--model deepsek_v3: no such model; did you mean 'deepseek_v3'?",
        ),
        ("--out no/where/o.parquet", "--out no/where/o.parquet: no such folder: no/where"),
        ("--rank 0", "--rank 0: must be >= 1"),
        ("--seed -1", "--seed -1: must be >= 0"),
        ("--tokens 0", "--tokens 0: must be >= 1"),
        ("--requests -1", "--requests -1: must be >= 1"),
        ("--batch-size 0", "--batch-size 0: must be >= 1"),
        ("--no-check", "--no-check without --out or --save-fit: there is nothing to do"),
        ("--fit b.json --out o.parquet --save-fit c.json", "--save-fit and --fit: the fit is made"),
        ("--fit b.json --out o.parquet --rank 3", "--rank and --fit: the fit is made already"),
        ("--fit toy_fit.json --out o.pq", "--out is o.pq: must end in .parquet"),
        (
            "--fit toy_fit.json --out o.parquet --tokens 9000000000000000000",
            "o.parquet: 9e+18 rows of",
        ),
        (
            "--fit toy_fit.json --out o.parquet --requests 1000000000000000 --output-tokens 9",
            "GB left",
        ),
        ("--report r.json --no-check", "there would be nothing to report"),
        (
            "--fit toy_fit.json --out o.parquet --top-k 16",
            "top_k is 16: must lie in 1..15, below experts",
        ),
        ("--fit toy_fit.json --out o.parquet --experts 70000", "experts is 70000: must lie in"),
    ],
)
def test_mistakes_are_one_line(
    saved: Path, monkeypatch: pytest.MonkeyPatch, capsys, words: str, message: str
) -> None:
    monkeypatch.chdir(saved.parent)
    assert main(words.split()) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert told.err.count("\n") == 1
    assert told.err.startswith("greenroom synth: error: ")
    assert told.out == ""
    assert [file.name for file in saved.parent.iterdir()] == [saved.name]
