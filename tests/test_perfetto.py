"""The Perfetto timeline: what is in a window, and that the checker accepts it and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim.events import Counter, Kind, Lane
from sim.perfetto import Rows, check_window, write_timeline
from sim.types import ConfigError
from tests.perfetto_check import flows, lane_names, problems, read, slices_by_lane

GPU, H2D, CPU, STORAGE = Lane.GPU, Lane.H2D, Lane.CPU, Lane.STORAGE
ABOUT = {
    "policy": "lru",
    "trace": "toy",
    "machine": "box",
    "machine_kind": "discrete",
    "engine": "serial",
    "provenance": {"trace_kind": "synthetic", "priced_as": "m: 1 layer"},
}
RUN = "lru: synthetic trace toy; priced as m: 1 layer; on box; engine serial"

# start end lane unit kind step layer expert tokens bytes: two steps of one layer, on two GPUs. Expert 7
# is read, copied and used; 5 is prefetched in step 0 and used in step 1, while 6 is copied and never is.
EVENTS = [
    (0, 100, GPU, 0, Kind.DENSE, 0, 0, -1, 2, 0),
    (100, 150, GPU, 0, Kind.EXPERT, 0, 0, 3, 2, 0),
    (100, 160, GPU, 1, Kind.EXPERT, 0, 0, 4, 1, 0),
    (100, 400, STORAGE, 0, Kind.READ, 0, 0, 7, 0, 4096),
    (100, 300, H2D, 0, Kind.LOAD, 0, 0, 8, 0, 4096),
    (110, 310, CPU, 0, Kind.EXPERT, 0, 0, 9, 1, 0),
    (300, 340, GPU, 0, Kind.EXPERT, 0, 0, 8, 1, 0),
    (400, 600, H2D, 0, Kind.LOAD, 0, 0, 7, 0, 4096),
    (600, 640, GPU, 0, Kind.EXPERT, 0, 0, 7, 1, 0),
    (600, 800, H2D, 0, Kind.PREFETCH, 1, 0, 5, 0, 4096),
    (640, 700, GPU, 0, Kind.STEP, 0, -1, -1, 2, 0),
    (700, 800, GPU, 0, Kind.DENSE, 1, 0, -1, 1, 0),
    (800, 1000, H2D, 0, Kind.PREFETCH, 1, 0, 6, 0, 4096),
    (800, 850, GPU, 0, Kind.EXPERT, 1, 0, 5, 1, 0),
    (850, 900, GPU, 0, Kind.STEP, 1, -1, -1, 1, 0),
]
COUNTERS = [
    (0, Counter.CACHE_BYTES, 0, 4096),
    (0, Counter.QUEUE, 0, 1),
    (300, Counter.CACHE_BYTES, 0, 8192),
    (300, Counter.QUEUE, 0, 2),
    (300, Counter.QUEUE, 0, 0),
    (900, Counter.KV_BYTES, 0, 77),
]


def blocks(rows: list[tuple[int, ...]], size: int = 4) -> list[Rows]:
    """Return rows as a run's table hands them out."""
    return [np.array(rows[at : at + size]) for at in range(0, len(rows), size)]


def shown(folder: Path, rows: list[tuple[int, ...]] = EVENTS, **window: Any) -> Any:
    """Return the document of a window."""
    path = folder / "timeline.json"
    write_timeline(path, blocks(rows), blocks(COUNTERS), ABOUT, **window)
    return read(path)


def names(document: Any) -> dict[str, list[str]]:
    """Return what each lane shows, in order."""
    lanes = lane_names(document)
    return {
        lanes[lane]: [name for _, _, name in slices]
        for lane, slices in slices_by_lane(document).items()
    }


def test_every_row_is_a_slice_of_its_lane_and_the_checker_accepts_it(tmp_path: Path) -> None:
    document = shown(tmp_path)
    assert problems(document) == []
    assert names(document) == {
        "run / run": [RUN],
        "run / steps": ["step 0", "step 1"],
        "GPU / kernels of GPU 0": [
            "attention L0", "expert L0 e3 x2 tokens", "expert L0 e8", "expert L0 e7",
            "embedding and head", "attention L0", "expert L0 e5", "embedding and head",
        ],
        "GPU / kernels of GPU 1": ["expert L0 e4"],
        "host / CPU experts": ["expert L0 e9"],
        "links / host to GPU": [
            "load L0 e8", "load L0 e7", "prefetch L0 e5", "prefetch L0 e6",
        ],
        "storage / reads": ["read L0 e7"],
    }  # fmt: skip


def test_slices_say_what_they_are_about(tmp_path: Path) -> None:
    document = shown(tmp_path)
    slices = {e["name"]: e for e in document["traceEvents"] if e["ph"] == "X"}
    load = slices["load L0 e7"]
    assert (load["ts"], load["dur"]) == (0.4, 0.2), "microseconds, to the nanosecond"
    assert load["args"] == {"step": 0, "layer": 0, "expert": 7, "bytes": 4096}
    assert slices["expert L0 e3 x2 tokens"]["args"]["tokens"] == 2
    assert slices[RUN]["args"] == ABOUT == document["otherData"]


def test_flows_lead_from_a_read_to_its_copy_and_from_a_copy_to_its_first_use(
    tmp_path: Path,
) -> None:
    assert sorted(flows(shown(tmp_path))) == [
        ("load L0 e7", "expert L0 e7"),
        ("load L0 e8", "expert L0 e8"),
        ("prefetch L0 e5", "expert L0 e5"),
        ("read L0 e7", "load L0 e7"),
    ]


def test_what_was_dropped_and_copied_again_leads_from_the_copy_that_was_used(
    tmp_path: Path,
) -> None:
    again = [
        (0, 10, H2D, 0, Kind.PREFETCH, 0, 0, 1, 0, 8),  # dropped before any use
        (20, 30, H2D, 0, Kind.LOAD, 0, 0, 1, 0, 8),
        (30, 40, GPU, 0, Kind.EXPERT, 0, 0, 1, 1, 0),
        (40, 50, GPU, 0, Kind.EXPERT, 0, 0, 1, 1, 0),
    ]
    assert flows(shown(tmp_path, again)) == [("load L0 e1", "expert L0 e1")]
    on_cpu = [
        (0, 10, STORAGE, 0, Kind.READ, 0, 0, 1, 0, 8),
        (10, 30, CPU, 0, Kind.EXPERT, 0, 0, 1, 1, 0),
    ]
    assert flows(shown(tmp_path, on_cpu)) == [("read L0 e1", "expert L0 e1")]
    chunks = [
        (0, 10, H2D, 0, Kind.LOAD, 0, 0, 1, 0, 8),
        (10, 20, H2D, 0, Kind.LOAD, 0, 0, 1, 0, 8),
        (20, 30, H2D, 0, Kind.LOAD, 0, 0, 1, 0, 8),
        (30, 40, GPU, 0, Kind.EXPERT, 0, 0, 1, 1, 0),
    ]
    assert len(flows(shown(tmp_path, chunks, chunks=3))) == 3, "a flow from each chunk"


def test_a_window_of_steps_holds_all_that_goes_on_in_their_time(tmp_path: Path) -> None:
    document = shown(tmp_path, steps=(1, 2))
    assert problems(document) == []
    assert names(document) == {
        "run / run": [RUN],
        "run / steps": ["step 1"],
        "GPU / kernels": ["attention L0", "expert L0 e5", "embedding and head"],
        "links / host to GPU": ["prefetch L0 e5", "prefetch L0 e6"],
    }
    samples = [e for e in document["traceEvents"] if e["ph"] == "C"]
    assert [(e["ts"], e["name"], e["args"]) for e in samples] == [
        (0.7, "expert cache", {"bytes": 8192}),
        (0.7, "queue", {"copies": 0}),
    ], "counters begin with what they were before"


def test_a_window_of_time_shows_what_reaches_into_it_in_full(tmp_path: Path) -> None:
    document = shown(tmp_path, span_ns=(310, 400))
    assert names(document)["storage / reads"] == ["read L0 e7"]
    assert names(document)["GPU / kernels"] == ["expert L0 e8"]
    assert "host / CPU experts" not in names(document), "ends as the window begins"
    assert "links / host to GPU" not in names(document), "begins as the window ends"


@pytest.mark.parametrize(
    ("window", "message"),
    [
        (
            {"steps": (2, 5)},
            "output.perfetto = [2, 5]: must begin at a step of the run, which has 2",
        ),
        (
            {"steps": (9, None)},
            "output.perfetto = [9, null]: must begin at a step of the run, which has 2",
        ),
        ({"span_ns": (1000, 2000)}, "timeline: nothing happens from 1000 to 2000 ns"),
    ],
)
def test_an_empty_window_is_refused_and_leaves_nothing(
    window: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        shown(tmp_path, **window)
    assert str(caught.value) == message
    assert list(tmp_path.iterdir()) == []


def test_a_window_that_a_run_will_not_reach_is_known_before_it() -> None:
    config = {"output": {"perfetto": [5, None]}}
    with pytest.raises(ConfigError, match=r"output.perfetto = \[5, null\]: must begin at a step"):
        check_window(config, 5)
    for num_steps in (6, None):
        check_window(config, num_steps)
    check_window({"output": {"perfetto": None}}, 5)


def test_a_compressed_timeline_is_the_same_and_has_the_same_bytes_each_time(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.json.gz", "b.json.gz")]
    for path in paths:
        write_timeline(path, blocks(EVENTS), blocks(COUNTERS), ABOUT)
    assert read(paths[0]) == shown(tmp_path)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_late_times_keep_their_nanoseconds(tmp_path: Path) -> None:
    late = 10**15 + 1
    rows = [
        (late, late + 1, GPU, 0, Kind.DENSE, 0, 0, -1, 1, 0),
        (late + 1, late + 3, GPU, 0, Kind.STEP, 0, -1, -1, 1, 0),
    ]
    assert problems(shown(tmp_path, rows)) == []
    text = (tmp_path / "timeline.json").read_text()
    assert '"ts":1000000000000.001,"dur":0.001' in text


# -- the checker itself ----------------------------------------------------------------------------


def first(document: Any, phase: str) -> dict[str, Any]:
    return next(event for event in document["traceEvents"] if event["ph"] == phase)


def in_lane(document: Any, name: str) -> dict[str, Any]:
    return next(event for event in document["traceEvents"] if event["name"] == name)


def swap_last(document: Any) -> None:
    events = document["traceEvents"]
    events[-1], events[-2] = events[-2], events[-1]


BREAKS: list[tuple[Callable[[Any], Any], str | None]] = [
    (lambda d: d.pop("traceEvents"), "must be an object with a list traceEvents"),
    (lambda d: d["traceEvents"].append(7), "must be an object"),
    (lambda d: first(d, "X").update(ph="B"), "ph = B: must be one of"),
    (lambda d: first(d, "X").pop("dur"), "no dur"),
    (lambda d: first(d, "X").update(dur=-1), "dur = -1: must be a number >= 0"),
    (lambda d: first(d, "X").update(ts="0"), "ts = 0: must be a number >= 0"),
    (lambda d: first(d, "X").update(ts=0.0001), "ts = 0.0001: must be whole nanoseconds"),
    (lambda d: first(d, "X").update(tid="gpu"), "tid = gpu: must be a whole number"),
    (swap_last, "must not fall"),
    (lambda d: d["traceEvents"].remove(first(d, "M")), "pid 1: has no process_name"),
    (lambda d: in_lane(d, "thread_name").update(name="?"), "tid 11: has no thread_name"),
    (lambda d: in_lane(d, "expert L0 e3 x2 tokens").update(dur=0.201), "overlaps"),
    (lambda d: in_lane(d, "load L0 e8").update(dur=0.15), None),
    (lambda d: in_lane(d, "load L0 e8").update(dur=0.25), "goes back in time"),
    (lambda d: first(d, "f").update(bp="x"), "bp = x: must be e"),
    (lambda d: first(d, "f").update(ts=0.35, tid=2000), "its end lies in no slice"),
    (lambda d: d["traceEvents"].remove(first(d, "s")), "0 starts and 1 ends"),
    (lambda d: d["traceEvents"].remove(first(d, "f")), "1 starts and 0 ends"),
    (lambda d: first(d, "C").update(args={"bytes": -1}), "must be numbers >= 0"),
    (lambda d: first(d, "C").update(args={}), "must be numbers >= 0"),
]


@pytest.mark.parametrize(
    ("spoil", "message"), BREAKS, ids=lambda x: x[:30] if isinstance(x, str) else "spoil"
)
def test_the_checker_finds_each_kind_of_fault(
    spoil: Callable[[Any], Any], message: str | None, tmp_path: Path
) -> None:
    document = deepcopy(shown(tmp_path))
    spoil(document)
    found = problems(document)
    assert found == [] if message is None else any(message in line for line in found), found
