"""Figures of a run's events: lanes, uses and residency are those of the table, to the nanosecond."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.events import Kind, Lane
from sim.figures.boundaries import Boundaries, boundaries_of_run, draw_boundaries
from sim.figures.event_rows import (
    END,
    EXPERT,
    KIND,
    LANE,
    LAYER,
    START,
    STEP,
    check_window,
    moves_of_layer,
    spells,
    uses_of_layer,
)
from sim.figures.gantt import draw_gantt, gaps
from sim.figures.heatmap import binned, draw_heatmap, uses_of_run
from sim.figures.residency import draw_residency, is_held
from sim.figures.source import TRACE, NotDrawableError, Source, Wanted, open_source
from sim.figures.table import draw
from sim.plot_style import new_figure
from sim.result_tables import StoredTable
from sim.results import EVENTS, finish_run
from sim.simulate import simulate
from sim.types import ConfigError
from tests.configs import composed
from tests.doubles import Setup
from tests.test_laws import FEWER, any_run, every_setup


def run_folder(folder: Path, trace: Path, *overrides: str) -> Path:
    """Run a configuration with events; return its folder."""
    import yaml

    given = (f"trace.path={trace}", "output.events=true", "output.belady=false", *overrides)
    config = composed(*given)
    summary, _ = simulate(config, folder)
    finish_run(folder, {**summary, "overrides": {}}, yaml.safe_dump(config))
    return folder


@pytest.fixture(scope="module")
def saem(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """A run on the bundled trace, of one request, whose stages are found and annotated."""
    folder = tmp_path_factory.mktemp("saem")
    trace = Path(__file__).parents[1] / "traces" / "tiny" / "trace.parquet"
    return open_source(run_folder(folder, trace, "policy=saem", "workload.requests=[24,25]"))


@pytest.fixture(scope="module")
def lru(tmp_path_factory: pytest.TempPathFactory, small_trace_file: Path) -> Source:
    return open_source(run_folder(tmp_path_factory.mktemp("lru"), small_trace_file, "policy=lru"))


def rows_of(source: Source) -> np.ndarray:
    assert source.folder is not None
    return np.concatenate(list(StoredTable(source.folder / EVENTS)))


# -- residency -------------------------------------------------------------------------------------


@every_setup
@FEWER
@given(data=st.data())
def test_experts_that_enter_and_leave_are_those_in_the_cache(
    setup: Setup, data: st.DataObject
) -> None:
    """Replayed from the event table alone: nobody enters twice, and the end is the cache's own."""
    run = any_run(data, setup)
    keys = run.offloader.residency.keys
    there: set[int] = set()
    for row in run.rows:
        if row[LANE] != Lane.CACHE:
            continue
        is_low, expert = divmod(row[EXPERT], keys.num_experts)
        key = (row[LAYER] + is_low * keys.num_layers) * keys.num_experts + expert
        assert (key in there) == (row[KIND] == Kind.LEAVE)
        there.symmetric_difference_update({key})
    assert there == set(run.offloader.residency.resident())
    left = sum(row[KIND] == Kind.LEAVE for row in run.rows)
    assert left == sum(step["evictions"] for step in run.steps())


def test_spells_are_from_entering_to_leaving() -> None:
    enter, leave = int(Kind.ENTER), int(Kind.LEAVE)
    moves = np.zeros((5, 10), np.int64)
    moves[:, START] = [0, 10, 30, 50, 60]
    moves[:, KIND] = [enter, enter, leave, enter, leave]
    moves[:, EXPERT] = [7, 3, 7, 7, 3]
    held = spells(moves, 100)
    assert held == {7: [(0, 30), (50, 100)], 3: [(10, 60)]}
    assert [is_held(held, 7, at) for at in (0, 29, 30, 49, 50, 99)] == [1, 1, 0, 0, 1, 1]
    assert not is_held(held, 5, 10)


def test_residency_draws_the_spells_of_the_table(lru: Source) -> None:
    full, experts = draw_residency(lru, Wanted(layer=1)).axes
    scale = {"time (s)": 1e9, "time (ms)": 1e6}[experts.get_xlabel()]
    held = spells(moves_of_layer(lru, 1), int(lru.steps["end_ns"].max()))
    drawn = {}
    for bars in experts.collections:
        edges = [path.vertices for path in bars.get_paths()]
        drawn[int(str(bars.get_label()))] = [(v[:, 0].min(), v[:, 0].max()) for v in edges]
    assert set(drawn) == set(held)
    for expert, spans in held.items():
        assert np.allclose(np.array(drawn[expert]) * scale, spans, atol=1)
    most = max(float(np.max(line.get_ydata())) for line in full.get_lines()[:-1])
    assert most == pytest.approx(lru.run["cache_bytes"] / 1e9), "LRU fills its cache"


def test_each_use_is_marked_in_the_cache_or_not(lru: Source) -> None:
    experts = draw_residency(lru, Wanted(layer=0)).axes[1]
    marks = {line.get_marker(): len(line.get_xdata()) for line in experts.get_lines()}
    uses = uses_of_layer(lru, 0)
    held = spells(moves_of_layer(lru, 0), int(lru.steps["end_ns"].max()))
    there = sum(is_held(held, int(row[EXPERT]), int(row[START])) for row in uses)
    assert (marks.get(".", 0), marks.get("x", 0)) == (there, len(uses) - there)


def test_a_table_without_moves_is_refused(lru: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    def old(table: StoredTable) -> Any:
        return (block[block[:, LANE] != Lane.CACHE] for block in original(table))

    original = StoredTable.__iter__
    monkeypatch.setattr(StoredTable, "__iter__", old)
    with pytest.raises(
        NotDrawableError, match=r"enter and leave the cache, which this events\.parquet"
    ):
        draw_residency(lru)


# -- uses ------------------------------------------------------------------------------------------


def test_the_heat_map_shows_the_experts_of_each_step(lru: Source) -> None:
    rows = rows_of(lru)
    own = rows[(rows[:, KIND] == Kind.EXPERT) & (rows[:, LAYER] == 1)]
    last = int(lru.steps["step"].max())
    used = uses_of_run(lru, 1, (0, last)).used
    assert {(int(s), int(e)) for e, s in np.argwhere(used)} == set(
        zip(own[:, STEP].tolist(), own[:, EXPERT].tolist(), strict=True)
    )
    image = draw_heatmap(lru, Wanted(layer=1)).axes[0].get_images()[0]
    assert np.array_equal(np.asarray(image.get_array()), used.astype(float))


def test_steps_that_share_a_column_are_means() -> None:
    used = np.array([[1, 0, 1, 1, 1], [0, 0, 0, 0, 1]], bool)
    shares, width = binned(used, 3)
    assert width == 2
    assert shares.tolist() == [[0.5, 1, 1], [0, 0, 1]]
    assert binned(used, 5)[0].tolist() == used.astype(float).tolist()


def test_boundaries_of_a_run_are_those_found_and_those_annotated(saem: Source) -> None:
    where = boundaries_of_run(saem)
    assert where.found is not None
    assert where.annotated is not None
    assert len(where.found) == saem.run["stages"]
    stages = saem.steps["stage"]
    assert all(stages[step] == stages[step - 1] + 1 for step in where.found.tolist())
    assert saem.run["stage_recall"] <= 1
    assert 0 < len(where.annotated) <= len(stages)
    figure = draw_heatmap(saem)
    words = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert words == ["stage begins, annotated", "stage found by saem"]


def test_without_its_trace_a_run_has_no_annotated_boundaries(saem: Source) -> None:
    run = {**saem.rows[0], "provenance": {**saem.rows[0]["provenance"], "trace_sha256": "another"}}
    where = boundaries_of_run(Source(saem.kind, [run], saem.folder))
    assert where.annotated is None
    assert where.found is not None


def test_only_boundaries_within_the_window_are_drawn() -> None:
    _, axes = new_figure(3, 2)
    where = Boundaries(np.array([1, 5, 9]), np.array([6]), "cues")
    handles = draw_boundaries(axes, where, (4, 8))
    at = [float(line.get_xdata()[0]) for line in axes.get_lines() if line.get_linestyle() != "None"]
    assert at == [5, 6]
    assert [str(handle.get_label()) for handle in handles] == [
        "stage begins, annotated", "stage found by cues",
    ]  # fmt: skip


def test_the_heat_map_of_a_trace_is_the_trace(small_trace: Any, small_trace_file: Path) -> None:
    source = Source(TRACE, trace=("small", str(small_trace_file)))
    request = int(small_trace.request_id[0])
    figure = draw("heatmap", source, Wanted(request=request, layer=1))
    image = np.asarray(figure.axes[0].get_images()[0].get_array())
    rows = np.flatnonzero((small_trace.request_id == request) & (small_trace.phase == 1))
    rows = rows[np.argsort(small_trace.position[rows])]
    assert image.shape[1] == len(rows)
    for token, row in enumerate(rows.tolist()):
        assert set(np.flatnonzero(image[:, token])) == set(small_trace.expert_ids[row, 1].tolist())
    with pytest.raises(ConfigError, match="--request 999: must be one that decodes"):
        draw("heatmap", source, Wanted(request=999))
    with pytest.raises(ConfigError, match="--layer 99: must be a layer of the trace, 0 to"):
        draw("heatmap", source, Wanted(layer=99))


# -- lanes -----------------------------------------------------------------------------------------


def test_a_gantt_has_a_bar_for_each_piece_of_work(lru: Source) -> None:
    (axes,) = draw_gantt(lru, Wanted(window=(1, 2))).axes
    steps, rows = lru.steps, rows_of(lru)
    begin_ns, end_ns = int(steps["start_ns"][1]), int(steps["end_ns"][2])
    inside = (rows[:, START] < end_ns) & (rows[:, END] > begin_ns) & (rows[:, LANE] != Lane.CACHE)
    bars = [c for c in axes.collections if c.get_label() not in ("waits", "")]
    assert sum(len(c.get_paths()) for c in bars) == int(inside.sum())
    loads = next(c for c in bars if c.get_label() == "load")
    drawn_ms = sum(np.ptp(path.vertices[:, 0]) for path in loads.get_paths())
    own = rows[inside & (rows[:, KIND] == Kind.LOAD)]
    scale = 1e6 if "ms" in axes.get_xlabel() else 1e3
    assert drawn_ms * scale == pytest.approx(float((own[:, END] - own[:, START]).sum()))


def test_what_is_not_work_of_the_gpu_is_waiting(lru: Source) -> None:
    (axes,) = draw_gantt(lru, Wanted(window=(1, 1))).axes
    steps, rows = lru.steps, rows_of(lru)
    span = int(steps["start_ns"][1]), int(steps["end_ns"][1])
    gpu = rows[(rows[:, LANE] == Lane.GPU) & (rows[:, START] < span[1]) & (rows[:, END] > span[0])]
    busy_ns = int((gpu[:, END] - gpu[:, START]).sum())
    idle_ns = sum(end - start for start, end in gaps(gpu, span))
    assert idle_ns == span[1] - span[0] - busy_ns, "lanes do one thing at a time"
    share = 100 * idle_ns / (span[1] - span[0])
    assert axes.get_yticklabels()[0].get_text() == f"GPU\nwaits {share:.0f}%"


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], [(0, 10)]),
        ([(0, 10)], []),
        ([(2, 4), (3, 6)], [(0, 2), (6, 10)]),
        ([(-5, 1), (9, 15)], [(1, 9)]),
    ],
)
def test_gaps_by_hand(spans: list[tuple[int, int]], expected: list[tuple[int, int]]) -> None:
    rows = np.zeros((len(spans), 10), np.int64)
    rows[:, [START, END]] = np.array(spans, np.int64).reshape(-1, 2)
    assert gaps(rows, (0, 10)) == expected


# -- what cannot be drawn --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wanted", "message"),
    [
        ("gantt", {"window": (500_000, 500_001)}, "must begin at a step of the run, which has"),
        (
            "gantt",
            {"window": (3, 2)},
            "--window 3 2: must be two steps, the first >= 0 and <= the last",
        ),
        ("residency", {"layer": 77}, "--layer 77: must be a layer of the run, 0 to"),
        ("heatmap", {"layer": -1}, "--layer -1: must be a layer of the run, 0 to"),
        ("heatmap", {"request": 12345}, "--request 12345: must be one of the run's: "),
    ],
)
def test_what_is_not_there_is_said(
    lru: Source, name: str, wanted: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        draw(name, lru, Wanted(**wanted))
    assert message in str(caught.value)


def test_a_run_without_events_says_how_to_get_them(lru: Source) -> None:
    for name in ("gantt", "heatmap", "residency"):
        with pytest.raises(
            NotDrawableError, match=r"needs events\.parquet in the .*output\.events=true"
        ):
            draw(name, Source(lru.kind, lru.rows, Path("nowhere")))


def test_requests_of_a_batch_are_not_told_apart(lru: Source) -> None:
    source = Source(lru.kind, [{**lru.rows[0], "batch_size": 2}], lru.folder)
    with pytest.raises(NotDrawableError, match=r"needs workload\.batch_size=1 for --request"):
        draw("residency", source, Wanted(request=0))


def test_a_window_ends_with_the_run() -> None:
    assert check_window((3, 900), 10) == (3, 9)
