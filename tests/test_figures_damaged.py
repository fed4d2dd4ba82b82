"""Tables of a run that were cut, emptied or swapped: a figure of them says which one, in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sim.figures.boundaries import work_of
from sim.figures.source import Wanted, open_source
from sim.figures.table import draw
from sim.results import COUNTERS, EVENTS, REQUESTS, STEPS
from sim.types import ConfigError
from tests.test_figures_runs import run_folder

VALIDATED = Path(__file__).parents[1] / "docs" / "validation" / "xeon_2_cores"


@pytest.fixture(scope="module")
def lru(tmp_path_factory: pytest.TempPathFactory, small_trace_file: Path) -> Path:
    return run_folder(tmp_path_factory.mktemp("lru"), small_trace_file, "policy=lru")


def _nothing(table: Any) -> Any:
    return table.slice(0, 0)


def _foreign(table: Any) -> Any:
    import pyarrow as pa

    return pa.table({"a": [1, 2]})


def _words(table: Any) -> Any:
    import pyarrow as pa

    return pa.table({name: ["x"] * table.num_rows for name in table.column_names})


def _nulls(table: Any) -> Any:
    import pyarrow as pa

    kinds = {name: table.schema.field(name).type for name in table.column_names}
    return pa.table({name: pa.nulls(table.num_rows, kind) for name, kind in kinds.items()})


def _second_half(table: Any) -> Any:
    return table.slice(table.num_rows // 2)


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        *((STEPS, damage) for damage in (_nothing, _foreign, _words, _nulls)),
        *((REQUESTS, damage) for damage in (_nothing, _foreign, _words, _nulls)),
        *((EVENTS, damage) for damage in (_foreign, _words, _nulls, _second_half)),
        *((COUNTERS, damage) for damage in (_foreign, _words, _nulls)),
    ],
)
def test_damaged_tables_are_told_of(
    file: str, damage: Callable[[Any], Any], lru: Path, tmp_path: Path
) -> None:
    import pyarrow.parquet as pq

    folder = tmp_path / "run"
    shutil.copytree(lru, folder)
    pq.write_table(damage(pq.read_table(folder / file)), folder / file)
    with pytest.raises(ConfigError, match=file):
        draw("residency", open_source(folder), Wanted(request=1))


@pytest.mark.parametrize("trace", [3, {"path": 3}, {"path": "/absent"}, {}])
def test_a_damaged_configuration_of_a_run_costs_no_more_than_its_boundaries(
    trace: Any, lru: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(lru, folder)
    (folder / "config.yaml").write_text(json.dumps({"trace": trace}))
    assert work_of(open_source(folder)) is None


def test_aliases_that_stand_for_more_than_memory_are_refused(lru: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(lru, folder)
    lists = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
    (folder / "config.yaml").write_text(f"a0: &a0 [x]\n{lists}trace: {{path: *a11}}\n")
    with pytest.raises(ConfigError, match=r"config\.yaml: its aliases"):
        work_of(open_source(folder))


@pytest.mark.parametrize("name", ["tier", "policy", "measured_ns", "noise", "batch_size"])
def test_a_damaged_validation_is_told_of(name: str, tmp_path: Path) -> None:
    whole = json.loads((VALIDATED / "validation.json").read_text())
    for damage in ({}, {name: None}):
        runs = [{k: v for k, v in run.items() if k != name} | damage for run in whole["runs"]]
        (tmp_path / "validation.json").write_text(json.dumps(whole | {"runs": runs}))
        with pytest.raises(ConfigError, match="is no validation table, or one that is damaged"):
            draw("predicted_by_measured", open_source(tmp_path))
