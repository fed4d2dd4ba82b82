"""What a user is shown: tables that keep their digits, labels that tell runs apart."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from sim import report
from sim.labels import names, origin, varying


def row(
    policy: str = "lru", ratio: float = 0.25, speed: float = 123.456, **other: Any
) -> dict[str, Any]:
    return {
        "policy": policy, "oracle": policy.startswith("belady"), "lossy": False, "trace": "tiny",
        "model": "m", "machine": "box", "machine_kind": "discrete", "engine": "overlapped",
        "batch_size": 1, "cache_ratio": ratio,
        "tokens_per_s": speed, "tpot_ns_p50": 9_876_543, "hit_rate": 0.3456, "belady_gap": 0.0123,
        "h2d_bytes": 12_345_000_000, "read_bytes": 0, "prefetch_useful_rate": None,
        "gpu_share": 0.25, "link_stall_share": 0.75,
        "storage_stall_share": 0.0, "dram_stall_share": 0.0, "host_stall_share": 0.0,
        "cpu_stall_share": 0.0, "bottleneck": "link", "total_ns": 10, "idle_ns": 0,
        "gpu_utilisation": 0.25, "h2d_utilisation": 0.75, "d2h_utilisation": 0.0,
        "cpu_utilisation": 0.0, "storage_utilisation": None, "dram_utilisation": 0.4,
        "requests": 7, "refused": 0, "prompt_tokens": 70, "output_tokens": 700,
        "ttft_ns_p50": 1_500_000, "gpu_bytes": 2_000_000_000, "cache_bytes": 1_000_000_000,
        "notes": [], "overrides": {},
        "provenance": {
            "trace_kind": "recorded", "priced_as": "m: 8 layers", "greenroom_version": "1",
        },
        **other,
    }  # fmt: skip


def printed(rows: list[dict[str, Any]], width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    report._print_table(console, rows)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def change(name: str, gain: float | None, note: str | None = None) -> dict[str, Any]:
    """Return a row of a what-if table."""
    found = None if gain is None else 100 * (1 + gain)
    return {
        "name": name, "tokens_per_s": found, "tokens_per_s_change": gain, "tpot_ns_p50": None,
        "tpot_change": None, "bottleneck": None if gain is None else "gpu", "note": note,
    }  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_a_narrow_table_loses_columns_never_digits(width: int) -> None:
    text = printed([row(), row("belady_bypass")], width)
    assert "…" not in text
    for kept in ("belady_bypass *", "25.0%", "123.5", "34.6%"):
        assert kept in text
    assert all(len(line) <= width for line in text.splitlines())
    assert ("Left out for want of width" in text) == (width < 150)


def test_rows_are_grouped_by_what_they_share_and_sorted_by_number() -> None:
    rows = [
        row(speed=1.0, batch_size=16),
        row(speed=3.0, batch_size=4),
        row("fifo", speed=5.0, batch_size=4),
    ]
    lines = [
        line for line in printed(rows, 200).splitlines() if "│ lru" in line or "│ fifo" in line
    ]
    assert [line.split("│")[1].strip() for line in lines] == ["fifo", "lru", "lru"]
    assert [line.split("│")[2].strip() for line in lines] == ["4", "4", "16"]


def test_an_overridden_setting_tells_runs_apart() -> None:
    rows = [row(overrides={"policy.cache.decay": decay}) for decay in ("0.5", "0.9")]
    assert varying(rows) == ["policy.cache.decay"]
    assert names(rows) == ["lru, decay 0.5", "lru, decay 0.9"]
    assert varying([row(ratio=0.1), row(ratio=0.2)]) == [], "these have a column of their own"


def test_the_origin_names_all_there_are() -> None:
    assert origin([row(), row(machine="b2")]) == (
        "recorded trace tiny; priced as m: 8 layers; on b2 | box; engine overlapped"
    )


def test_a_run_says_what_its_time_goes_to_and_what_binds() -> None:
    assert report._time_lines(row()) == [
        "Time: the GPU works 25.0% and waits for the link 75.0%.",
        "In use: GPU 25.0%, link to the GPU 75.0%, host memory 40.0%.",
        "Bottleneck: the link, for which the GPU waits 75.0% of the time; next, the GPU, which works "
        "25.0% of the time.",
    ]
    shares = {"gpu_share": 0.5, "link_stall_share": 0.0, "cpu_stall_share": 0.1}
    time, _, bottleneck = report._time_lines(
        row(**shares, storage_stall_share=0.3, host_stall_share=0.0004, idle_ns=1)
    )
    assert time == (
        "Time: the GPU works 50.0% and waits for storage 30.0%, experts on the CPU 10.0%; "
        "nothing to run 10.0%."
    )
    assert bottleneck == (
        "Bottleneck: the GPU, which works 50.0% of the time; next, storage, for which the GPU waits "
        "30.0% of the time."
    )
    phone = report._time_lines(row(machine_kind="cpu_only", gpu_share=0.9))
    assert phone[0] == "Time: the CPU works 90.0% and waits for the link 75.0%."
    assert phone[2].startswith("Bottleneck: the CPU, which works 90.0% of the time; next, ")
    assert report._time_lines(row(total_ns=0)) == [], "all requests were refused"


def test_refused_requests_are_told_apart() -> None:
    assert report.details(row())[0].startswith("7 requests, 70 prompt")
    assert report.details(row(requests=1))[0].startswith("1 request, 70 prompt")
    told = report.details(row(refused=2))[0]
    assert told.startswith("5 requests (2 more refused: they never fit), 70 prompt")


def test_rare_columns_are_there_only_where_they_say_something() -> None:
    rare = ("storage stall", "DRAM stall", "host stall", "refused")
    assert not any(name in printed([row(), row("fifo")], 250) for name in rare)
    some = printed([row(storage_stall_share=0.2), row("fifo", refused=3)], 250)
    assert [name for name in rare if name in some] == ["storage stall", "refused"]


def test_the_what_if_table_shows_gains_and_why_there_are_none() -> None:
    console = Console(file=io.StringIO(), width=120)
    rows = [change("link x2", 0.5), change("storage x2", None, "the machine has no storage")]
    console.print(report.what_if_table(row(what_if=rows)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    cells = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in text.splitlines()
        if "x2" in line
    ]
    assert cells == [
        ["link x2", "150.0", "+50.0%", "-", "gpu", ""],
        ["storage x2", "-", "-", "-", "-", "the machine has no storage"],
    ]


def test_a_machine_without_a_gpu_is_bound_by_its_cpu() -> None:
    phone = row(bottleneck="gpu", machine_kind="cpu_only", what_if=[change("CPU x2", 0.5)])
    console = Console(file=io.StringIO(), width=200)
    report._print_table(console, [phone])
    console.print(report.what_if_table(phone))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("│ cpu ") == 1, "then bound by"
    assert text.count(" cpu │") == 1, "bottleneck"
    assert " gpu" not in text


def test_notes_name_the_policies_they_concern() -> None:
    noted = [row(notes=["look out"]), row("fifo"), row("belady")]
    assert report.note_lines(noted) == ["* knows the future.", "Note on lru: look out."]


def test_distances_are_told_in_words() -> None:
    known = row(
        belady_hit_rate=0.5, gap_by_admission=0.1, gap_by_victim=-0.02,
        miss_rate=0.4, sequential_miss_rate=0.5,
    )  # fmt: skip
    assert report._distance_lines(known) == [
        "The optimum of this size hits 50.0%: of the distance +10.0 pp is whom to keep out, and -2.0 pp "
        "whom to drop.",
        "Misses 40.0% by layer; expert by expert they would be 50.0% (+25%).",
    ]
    assert report._distance_lines(row()) == []
