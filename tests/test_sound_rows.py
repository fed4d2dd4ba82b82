"""Rows of results that were damaged, cut or written by another tool: one line, or read all the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sim.cli import main
from sim.results import write_sweep
from sim.sound_rows import sound_rows
from sim.types import ConfigError
from tests.report_rows import row


def written(folder: Path, one: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(one), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy": 3}, "has policy = 3: must be a name"),
        ({"policy": ""}, "has policy = '': must be a name"),
        ({"lossy": None}, "has lossy = None: must be true or false"),
        ({"cache_ratio": "x"}, "has cache_ratio = 'x': must be a number >= 0"),
        ({"cache_ratio": None}, "has cache_ratio = None: must be a number >= 0"),
        ({"tokens_per_s": -1.0}, "has tokens_per_s = -1.0: must be a number >= 0"),
        ({"tokens_per_s": float("nan")}, "has tokens_per_s = nan: must be a number >= 0"),
        ({"total_ns": float("inf")}, "has total_ns = inf: must be a number >= 0"),
        ({"batch_size": [1]}, "has batch_size = [1]: must be a number >= 0"),
        ({"host_stall_share": 1e308}, "has host_stall_share = 1e+308: must be a number >= 0"),
        ({"hit_rate": True}, "has hit_rate = True: must be a number >= 0"),
        ({"union_size": "x"}, "has union_size = 'x': must be a number >= 0"),
        ({"bottleneck": "moon"}, "has bottleneck = 'moon': must be one of gpu, link"),
        ({"provenance": None}, "has provenance = None: must be an object"),
        ({"provenance": {}}, "has no provenance.trace_kind"),
        ({"overrides": []}, "has overrides = []: must be an object"),
        ({"notes": "["}, "has notes = '[': must be a list"),
        ({"what_if": [1]}, "has an entry of what_if that is 1: must be an object"),
        ({"what_if": [{"name": "x"}]}, "has an entry of what_if that has no tokens_per_s"),
        ({"gap_by_victim": 0.1}, "has no gap_by_admission"),
        ({"route_kl": 0.1}, "has no substituted_slot_rate"),
        ({"kernels": 1}, "has no kernels_per_layer"),
    ],
)  # fmt: skip
def test_a_damaged_row_is_refused_in_one_line_by_figures_and_reports(
    change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path / "run", row() | change)
    for command in ("plot", "report"):
        assert main([command, str(folder)]) == 2
        out, err = capsys.readouterr()
        assert not out
        assert f"row 0 of the results {message}" in err
        assert err.count("\n") == 1
    assert sorted(path.name for path in folder.iterdir()) == ["summary.json"]


@pytest.mark.parametrize("name", [name for name in row() if name not in
                                  ("assumed", "baseline", "overrides", "belady_hit_rate")])  # fmt: skip
def test_what_every_row_has_must_be_there(name: str, tmp_path: Path) -> None:
    whole = row()
    assert sound_rows(written(tmp_path / "run", whole)) == [whole]
    cut = {key: value for key, value in whole.items() if key != name}
    with pytest.raises(ConfigError, match=f"row 0 of the results has no {name}$"):
        sound_rows(written(tmp_path / "run", cut))


def test_lists_that_another_tool_left_as_texts_are_lists_again(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    change = {"name": "link x2", "tokens_per_s": 2.0, "tokens_per_s_change": -0.5,
              "bottleneck": "gpu", "note": None}  # fmt: skip
    whole = row(notes=["a note"], what_if=[change])
    write_sweep(tmp_path, [whole])
    table = tmp_path / "results.parquet"
    pq.write_table(pq.read_table(table).replace_schema_metadata(None), table)
    (found,) = sound_rows(table)
    assert (found["notes"], found["what_if"]) == (["a note"], [change])
