"""A measured run beside a simulated one in one trace: names, times from one beginning, lanes of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from real.replay_cli import main
from real.side_by_side import SIDE_BY_SIDE, Side, write_side_by_side
from sim.events import EVENT_COLUMNS
from sim.perfetto import write_timeline
from sim.result_tables import StoredTable
from sim.results import COUNTERS, EVENTS
from sim.simulate import simulate
from sim.types import ConfigError
from tests.configs import composed
from tests.perfetto_check import flows, lane_names, problems, read, slices_by_lane

FEW = ("model=tiny", "workload.requests=[24,26]", "workload.length=[4,6]", "output.belady=false")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Side]:
    """Two simulated runs of one configuration on machines of different speed stand for the two sides."""
    sides = []
    for name, machine in (("real", "laptop_pcie3_x8"), ("simulated", "rtx5090_9950x3d")):
        folder = tmp_path_factory.mktemp(name)
        config = composed(
            *FEW, "policy=prefetch_perfect", f"machine={machine}", "output.events=true"
        )
        summary, _ = simulate(config, folder)
        sides.append(Side(name, folder, summary))
    return sides


def both(path: Path, sides: list[Side], steps: tuple[int, int | None]) -> Any:
    write_side_by_side(path, sides, steps)
    document = read(path)
    assert problems(document) == []
    return document


def alone(path: Path, side: Side, steps: tuple[int, int | None]) -> Any:
    events, counters = (StoredTable(side.folder / name) for name in (EVENTS, COUNTERS))
    write_timeline(path, events, counters, side.about, steps=steps)
    return read(path)


def own(document: Any, name: str) -> list[tuple[str, list[Any]]]:
    """Return the lanes of one side by name, with their slices."""
    lanes, slices = lane_names(document), slices_by_lane(document)
    found = [(title, slices.get(lane, [])) for lane, title in lanes.items()]
    return sorted((title, rows) for title, rows in found if title.startswith(f"{name}: "))


def first_step_ns(document: Any, name: str) -> int:
    return min(
        start
        for title, rows in own(document, name)
        if title.endswith("/ steps")
        for start, *_ in rows
    )


@pytest.mark.parametrize("steps", [(0, 3), (5, 8), (2, None)])
def test_both_begin_at_the_same_moment_and_keep_their_times(
    steps: tuple[int, int | None], two: list[Side], tmp_path: Path
) -> None:
    document = both(tmp_path / "both.json.gz", two, steps)
    begins = {first_step_ns(document, side.name) for side in two}
    assert len(begins) == 1
    every = [row for side in two for _, rows in own(document, side.name) for row in rows]
    assert min(start for start, *_ in every) == 0
    for side in two:
        single = alone(tmp_path / f"{side.name}.json", side, steps)
        assert len(flows(single)) > 0
        named = slices_by_lane(single)
        spans = sorted(
            (end - start, title) for rows in named.values() for start, end, title in rows
        )
        shown = [row for _, rows in own(document, side.name) for row in rows]
        assert sorted((end - start, title) for start, end, title in shown) == spans
    counts = [len(flows(alone(tmp_path / f"{side.name}.json", side, steps))) for side in two]
    assert len(flows(document)) == sum(counts)


def test_sides_share_no_number(two: list[Side], tmp_path: Path) -> None:
    events = both(tmp_path / "both.json.gz", two, (0, 3))["traceEvents"]
    names = {
        e["pid"]: e["args"]["name"].partition(":")[0] for e in events if e["name"] == "process_name"
    }
    assert set(names.values()) == {"real", "simulated"}
    for key in ("tid", "id"):
        owners: dict[Any, set[str]] = {}
        for event in events:
            if key in event:
                assert isinstance(event[key], int)  # the UI drops what is no number
                owners.setdefault(event[key], set()).add(names[event["pid"]])
        assert owners
        assert all(len(sides) == 1 for sides in owners.values())


def test_the_same_runs_give_the_same_bytes(two: list[Side], tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_side_by_side(tmp_path / f"{name}.json.gz", two, (0, 3))
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


def test_steps_that_no_run_has_are_named_and_leave_no_file(two: list[Side], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must begin at a step of the run"):
        write_side_by_side(tmp_path / "both.json.gz", two, (500, None))
    assert list(tmp_path.iterdir()) == []


# -- of actual runs --------------------------------------------------------------------------------

RUNS = {
    "storage": [
        "real.tier=storage",
        "engine.storage_queue_depth=4",
        "engine.storage_block_bytes=4096",
    ],
    "link": ["real.tier=link", "real.link_setup_ns=1000", "policy=prefetch_perfect"],
    "host": ["real.tier=ram", "policy=fiddler", "workload.batch_size=2"],
    "grouped": ["real.tier=ram", "engine.kernels=grouped", "workload.batch_size=2"],
    "serial": ["real.tier=ram", "engine=serial", "policy=lru"],
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_and_its_prediction_are_good_side_by_side(name: str, tmp_path: Path) -> None:
    more = ["real.device=cpu", "real.threads=1", "real.sim=true", "output.perfetto=[1,4]"]
    assert main([*FEW, *more, *RUNS[name], "--out", str(tmp_path)]) == 0
    document = read(tmp_path / SIDE_BY_SIDE)
    assert problems(document) == []
    assert first_step_ns(document, "real") == first_step_ns(document, "simulated")
    processes = {title.partition(" /")[0] for title in lane_names(document).values()}
    assert {"real: CPU", "simulated: GPU"} <= processes
    assert json.loads((tmp_path / "summary.json").read_text())["notes"]
    rows = np.concatenate(list(StoredTable(tmp_path / EVENTS)))
    start, end, lane, unit = (
        EVENT_COLUMNS.index(c) for c in ("start_ns", "end_ns", "lane", "unit")
    )
    for of_lane in np.unique(rows[:, [lane, unit]], axis=0):
        mine = rows[(rows[:, [lane, unit]] == of_lane).all(axis=1)]
        mine = mine[np.lexsort((mine[:, end], mine[:, start]))]
        assert (mine[:, start] <= mine[:, end]).all()
        assert (mine[1:, start] >= mine[:-1, end]).all(), f"lane {of_lane} does two things at once"
