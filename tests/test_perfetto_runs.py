"""Timelines of true runs with every feature: the checker accepts each, and it shows what happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim.events import EVENT_COLUMNS, Kind
from sim.perfetto import TIMELINE, write_run_timeline
from sim.result_tables import StoredTable
from sim.results import EVENTS
from sim.simulate import simulate
from sim.types import ConfigError
from tests.configs import composed
from tests.perfetto_check import flows, lane_names, problems, read, slices_by_lane

FEW = "workload.requests=[2,4]"
CASES: dict[str, tuple[list[str], set[str]]] = {
    "demand": (["policy=lru"], {"kernels", "host to GPU"}),
    "CPU": (["policy=fiddler"], {"kernels", "CPU experts", "handover"}),
    "stages": (["policy=saem", "workload.batch_size=2"], {"kernels", "host to GPU"}),
    "oracle": (["policy=belady_bypass"], {"host to GPU"}),
    "chunks": (["policy=lru", "engine=chunked"], {"host to GPU"}),
    "groups": (["policy=lru", "engine=fused", "workload.batch_size=2"], {"host to GPU"}),
    "serial": (["policy=fiddler", "engine=serial"], {"CPU experts"}),
    "pageable": (["policy=lru", "machine.link.pinned=false"], {"host to GPU"}),
    "GPUs": (
        ["policy=lru", "machine=rtx4090_x4"],
        {"kernels of GPU 0", "kernels of GPU 3", "host to GPU 3"},
    ),
    "teams": (
        ["policy=fiddler", "engine.cpu_experts_at_once=2", "workload.batch_size=2"],
        {"CPU experts of team 0", "CPU experts of team 1"},
    ),
    "storage": (
        ["policy=lru", "cache.host_bytes=400000000"], {"reads", "host to GPU", "kernels"},
    ),
    "exclusive": (
        ["policy=lru", "cache.host_bytes=400000000", "engine.exclusive_host=true"],
        {"reads", "GPU to host"},
    ),
    "unified": (["policy=lru", "machine=jetson_agx_orin"], {"kernels", "reads"}),
    "phone": (["policy=lru", "machine=phone_sd8gen3"], {"kernels", "reads"}),
    "chunked prefill": (
        ["policy=lru", "workload.prefill_chunk=2", "workload.mixed=true", "workload.batch_size=2"],
        {"kernels"},
    ),
}  # fmt: skip


def ran(folder: Path, *overrides: str) -> tuple[dict[str, Any], Any]:
    """Return the configuration and the summary of a run into a folder."""
    config = composed(*overrides, "output.belady=false")
    summary, _ = simulate(config, folder)
    return config, summary


@pytest.mark.parametrize("name", CASES)
def test_the_timeline_of_a_run_is_good_and_shows_its_lanes(
    name: str, tmp_path: Path, small_trace_file: Path
) -> None:
    overrides, expected = CASES[name]
    trace = f"trace.path={small_trace_file}"
    config, summary = ran(tmp_path, trace, FEW, *overrides, "output.perfetto=[0,null]")
    write_run_timeline(tmp_path, config, summary)
    document = read(tmp_path / TIMELINE)
    assert problems(document) == []
    lanes = {lane.partition(" / ")[2] for lane in lane_names(document).values()}
    assert expected <= lanes, lanes
    rows = np.concatenate(list(StoredTable(tmp_path / EVENTS)))
    shown = sum(map(len, slices_by_lane(document).values()))
    lasting = int((rows[:, 1] > rows[:, 0]).sum())
    assert shown == lasting + 1 + summary["steps"], "every row that lasts, the run and its steps"


def test_each_demand_copy_leads_to_the_kernels_that_waited_for_it(
    tmp_path: Path, small_trace_file: Path
) -> None:
    trace = f"trace.path={small_trace_file}"
    config, summary = ran(tmp_path, trace, FEW, "policy=lru", "output.perfetto=[0,null]")
    write_run_timeline(tmp_path, config, summary)
    found = flows(read(tmp_path / TIMELINE))
    rows = np.concatenate(list(StoredTable(tmp_path / EVENTS)))
    kinds = rows[:, EVENT_COLUMNS.index("kind")]
    assert len(found) == int(np.isin(kinds, (Kind.LOAD, Kind.BYPASS)).sum()) > 0
    for source, target in found:
        kind, _, expert = source.partition(" ")
        assert kind in ("load", "bypass")
        assert target.removeprefix("expert ").partition(" x")[0] == expert


def test_a_window_of_a_run_shows_its_steps(tmp_path: Path, small_trace_file: Path) -> None:
    trace = f"trace.path={small_trace_file}"
    config, summary = ran(tmp_path, trace, "policy=lru", "output.perfetto=[3,5]")
    write_run_timeline(tmp_path, config, summary)
    document = read(tmp_path / TIMELINE)
    assert problems(document) == []
    steps = next(
        slices for lane, slices in slices_by_lane(document).items()
        if lane_names(document)[lane] == "run / steps"
    )  # fmt: skip
    assert [name for _, _, name in steps] == ["step 3", "step 4"]
    sampled = {event["name"] for event in document["traceEvents"] if event["ph"] == "C"}
    assert sampled == {"expert cache", "KV cache", "queue"}


def test_a_window_beyond_the_run_is_refused_before_it_or_noted_after_it(
    tmp_path: Path, small_trace_file: Path
) -> None:
    trace, window = f"trace.path={small_trace_file}", "output.perfetto=[5000,5001]"
    with pytest.raises(ConfigError, match="must begin at a step of the run, which has"):
        ran(tmp_path, trace, window)
    assert list(tmp_path.iterdir()) == []
    config, summary = ran(tmp_path, trace, FEW, "output.perfetto=[0,1]")
    config["output"]["perfetto"] = [5000, 5001]  # open arrivals do not tell their steps beforehand
    write_run_timeline(tmp_path, config, summary)
    assert "no timeline: output.perfetto = [5000, 5001]: must begin" in summary["notes"][-1]
    assert not (tmp_path / TIMELINE).exists()
