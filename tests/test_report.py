"""What a user is shown: tables that keep their digits, labels that tell runs apart, figures."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
from rich.console import Console

from sim import plots, report
from sim.labels import names, origin, varying


def row(
    policy: str = "lru", ratio: float = 0.25, speed: float = 123.456, **other: Any
) -> dict[str, Any]:
    return {
        "policy": policy, "oracle": policy.startswith("belady"), "lossy": False, "trace": "tiny",
        "model": "m", "machine": "box", "batch_size": 1, "cache_ratio": ratio,
        "tokens_per_s": speed, "tpot_ns_p50": 9_876_543, "hit_rate": 0.3456, "belady_gap": 0.0123,
        "h2d_bytes": 12_345_000_000, "gpu_share": 0.25, "link_stall_share": 0.75,
        "cpu_stall_share": 0.0, "bottleneck": "link", "total_ns": 10, "notes": [], "overrides": {},
        "provenance": {
            "trace_kind": "recorded", "priced_as": "m: 8 layers", "greenroom_version": "1",
        },
        **other,
    }  # fmt: skip


def printed(rows: list[dict[str, Any]], width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    report._print_table(console, rows)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


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
        "recorded trace tiny; priced as m: 8 layers; on b2 | box"
    )


def test_notes_name_the_policies_they_concern() -> None:
    noted = [row(notes=["look out"]), row("fifo"), row("belady")]
    assert report._notes(noted) == ["* knows the future.", "Note on lru: look out."]


def test_figures_show_what_the_rows_hold(tmp_path: Path) -> None:
    rows = [
        row(p, r, s) for p, r, s in [("lru", 0.1, 10.0), ("lru", 0.2, 20.0), ("belady", 0.1, 30.0)]
    ]
    figure = plots.throughput_by_cache(rows)
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    assert list(lines) == ["lru", "belady (oracle)"]
    assert list(lines["lru"].get_xdata()) == [10.0, 20.0]
    assert list(lines["lru"].get_ydata()) == [10.0, 20.0]
    bars = plots.stall_breakdown(rows).axes[0].patches
    widths = [bar.get_width() for bar in bars]  # type: ignore[attr-defined]
    assert sum(widths) == pytest.approx(1e3 / 10 + 1e3 / 30), "ms for a token, at the smaller size"
    assert len(widths) == 4, "nobody waits for the CPU, so that part is not drawn"
    plt.close("all")
    drawn = plots.plot_sweep(rows, tmp_path)
    assert [path.name for path in drawn] == ["throughput_by_cache.png", "stall_breakdown.png"]
    assert {path.suffix for path in tmp_path.iterdir()} == {".png", ".pdf"}


def test_policies_look_alike_in_every_figure() -> None:
    looks = [plots.look(policy) for policy in plots._LOOKS]
    assert len(set(looks)) == len(looks)
    assert plots.look("my_own") == plots.look("my_own")
