"""The pages of docs/ say what is there: every column, every experiment, every column of a trace."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from sim.events import Counter, Kind, Lane
from sim.league import Standing
from sim.metrics import LANES
from sim.requests import Outcome
from sim.simulate import simulate
from sim.whatif import WHAT_IF_COLUMNS
from tests.configs import composed
from traces.schema import COLUMNS, TraceMeta

ROOT = Path(__file__).parents[1]
METRICS = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
TRACES = (ROOT / "docs" / "traces.md").read_text(encoding="utf-8")
WORD = re.compile(r"`([a-z0-9_]+)`")


def section(title: str, text: str = METRICS) -> str:
    """Return what stands below a heading that begins with ``title``."""
    (found,) = [
        part for part in re.split(r"^## ", text, flags=re.MULTILINE) if part.startswith(title)
    ]
    return found


def defined(text: str) -> list[str]:
    """Return the names in the first column of a section's tables."""
    cells = re.findall(r"^\| ([^|]*) \|", text, re.MULTILINE)
    return [name for cell in cells for name in WORD.findall(cell)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Return a lossy run with all that can be asked for."""
    folder = tmp_path_factory.mktemp("run")
    config = composed(
        *("policy=buddymoe", "workload.requests=[24,26]", "workload.length=[8,16]"),
        *("output.events=true", "output.roofline=true", "output.sequential=true"),
    )
    summary, _ = simulate(config, folder)
    return summary, folder


def test_every_column_of_a_summary_is_defined_and_no_other(
    run: tuple[dict[str, Any], Path],
) -> None:
    summary, _ = run
    names = defined(section("Summary"))
    assert len(names) == len(set(names))
    assert set(names) - {"overrides", "what_if"} == set(summary)  # these two the command adds
    told = next(line for line in section("Summary").splitlines() if "| `provenance`" in line)
    assert set(WORD.findall(told)) - {"provenance"} == set(summary["provenance"])


@pytest.mark.parametrize("table", ["steps", "requests", "ledger", "events", "counters"])
def test_every_column_of_a_table_is_defined_and_no_other(
    run: tuple[dict[str, Any], Path], table: str
) -> None:
    _, folder = run
    names = pq.read_schema(folder / f"{table}.parquet").names
    assert sorted(defined(section(table.capitalize()))) == sorted(names)


def test_every_column_of_the_other_tables_is_defined(run: tuple[dict[str, Any], Path]) -> None:
    summary, _ = run
    assert set(defined(section("Roofline"))) == set(summary["roofline"][0]) > {"amount"}
    assert set(defined(section("What if"))) == set(WHAT_IF_COLUMNS)
    standing = {field.name for field in fields(Standing)} | {"baseline"}
    assert set(defined(section("League"))) == standing


def test_the_words_of_the_event_table_are_all_told() -> None:
    text = section("Events") + section("Counters") + section("Requests")
    for members in (Lane, Kind, Counter, Outcome):
        for member in members:
            assert f"`{member.name.lower()}`" in text, member
    assert all(f"`{lane}_utilisation`" in METRICS for lane in LANES)


def test_the_identities_that_the_page_states_hold(run: tuple[dict[str, Any], Path]) -> None:
    summary, folder = run
    steps = pq.read_table(folder / "steps.parquet").to_pandas()
    parts = ["hits", "late_hits", "loads", "bypasses", "on_cpu"]
    assert (steps[parts].sum(axis=1) == steps["accesses"]).all()
    spent = [name for name in steps if name.endswith("stall_ns")] + ["gpu_busy_ns"]
    assert (steps[spent].sum(axis=1) == steps["end_ns"] - steps["start_ns"]).all()
    shares = [value for name, value in summary.items() if name.endswith("_stall_share")]
    idle = summary["idle_ns"] / summary["total_ns"]
    assert sum(shares) + summary["gpu_share"] + idle == pytest.approx(1.0)
    rates = ("hit_rate", "late_hit_rate", "miss_rate")
    assert sum(summary[rate] for rate in rates) == pytest.approx(1.0)
    assert summary["inserts"] == summary["loads"] + summary["prefetches"] + summary["admissions"]


def test_every_column_and_header_key_of_a_trace_is_told() -> None:
    assert set(defined(section("Columns", TRACES))) == set(COLUMNS)
    keys = {field.name for field in fields(TraceMeta)}
    assert set(defined(section("Header", TRACES))) == keys


def test_the_citation_is_whole() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    cited = yaml.safe_load(text)
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert cited["cff-version"] == "1.2.0"
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{cited["version"]}"' in pyproject
    assert f'license = "{cited["license"]}"' in pyproject
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{cited['version']}]" in changes
