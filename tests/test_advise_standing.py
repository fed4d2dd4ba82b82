"""What ``greenroom advise`` says of its points: rows, hits, full memory, one precision, machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sim.advise import Point
from sim.advise_cli import main
from sim.advise_compare import changed, changes_of
from sim.advise_reserve import TOLERANCE, Reserve, left_words
from sim.advise_standing import (
    alike_speed,
    best_held,
    more_bits,
    rests_on_hits,
    rows_by_engine,
    rows_words,
)
from sim.frontier import best_by, best_of, fastest_of, level_of, ways_by_level
from sim.interval import Missed
from sim.predict_answer import used_alike
from sim.types import ConfigError
from tests.advising import found


def missed(engine: str, is_complete: bool = True, is_prefill: bool = False) -> Missed:
    """Return a published row of an engine."""
    return Missed(engine, "rtx4090", is_complete, is_prefill, 1.0, 1.0)


def advice_of(arguments: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run the command; return what it wrote."""
    assert main([*arguments, "--out", str(folder)]) == 0
    read: dict[str, Any] = json.loads((folder / "advice.json").read_text())
    return read


def test_only_complete_decode_rows_count() -> None:
    rows = [missed("a"), missed("a"), missed("a", is_complete=False), missed("b", is_prefill=True)]
    assert dict(rows_by_engine(rows)) == {"a": 2}
    assert dict(rows_by_engine(rows, "rtx4090")) == {"a": 2}
    assert dict(rows_by_engine(rows, "rtx3090")) == {}
    assert [rows_words(n, n // 2).partition(" row")[0] for n in (0, 1, 2)] == [
        "no complete published",
        "one complete published",
        "2 complete published",
    ]
    assert rows_words(1, 0).endswith("none on this machine")
    assert rows_words(2, 1).endswith("1 on this machine")


def test_only_a_partial_cache_rests_on_hits() -> None:
    points = found(quants=("Q4_K_M", "FP8"))
    for point in points:
        is_cache = point.kind == "offload" and point.case.placement.gpu_ratio > 0
        assert rests_on_hits(point) is is_cache
        assert (alike_speed(point) is not None) is is_cache
    cached = next(p for p in points if rests_on_hits(p))
    assert alike_speed(cached) == used_alike(cached.case) < cached.speed
    known = replace(cached.case.placement, hit_rate=0.9)
    assert not rests_on_hits(replace(cached, case=replace(cached.case, placement=known)))


def test_the_best_held_has_rows() -> None:
    points = found("model=gpt_oss_120b")
    best = best_of(points)
    assert best is not None
    assert best.engine == "vllm_like"
    held, _ = best_held(points, {"llama_cpp": 1})
    assert held is not None
    assert held.speed == max(p.speed for p in points if p.has_room and p.engine == "llama_cpp")
    assert best_held(points, {"vllm_like": 5})[0] is best
    few, _ = best_held(points, {"vllm_like": 4, "llama_cpp": 1})
    assert few is held  # four rows do not vouch for a hit rate


def test_without_rows_the_best_needs_no_hit_rate() -> None:
    held, words = best_held(found("model=gpt_oss_120b"), {})
    assert held is not None
    assert not rests_on_hits(held)
    assert words.startswith("None that fits is held")


def with_memory(point: Point, gpu_left: int, host_left: int) -> Point:
    """Return a point with so many bytes of its machine's memory left."""
    machine = point.case.costs.machine
    assert machine.gpu is not None
    filled = replace(
        point.found,
        gpu_bytes=machine.gpu.memory_bytes - gpu_left,
        host_bytes=machine.cpu.memory_bytes - host_left,
    )
    return replace(point, found=filled)


@pytest.mark.parametrize(
    ("gpu_left", "host_left", "word"),
    [
        (1_073_741_824, 4_000_000_000, "yes"),
        (1_073_741_823, 4_000_000_000, "barely"),
        (1_073_741_824, 3_999_999_999, "barely"),
        (0, 0, "barely"),
    ],
)
def test_nearly_full_memory_is_told(gpu_left: int, host_left: int, word: str) -> None:
    point = with_memory(found(quants=("FP8", "Q4_K_M"))[0], gpu_left, host_left)
    assert point.fit == word
    assert point.has_room is (word == "yes")
    told = left_words(one for one in point.left if not one.is_enough)
    assert ("GPU memory" in told) is (gpu_left < 1 << 30)
    assert ("host memory" in told) is (host_left < 4_000_000_000)
    assert replace(point, reserve=Reserve(0, 0)).fit == "yes"


def test_the_reserve_is_of_each_gpu() -> None:
    point = best_of(found("machine.gpu.count=2"))
    assert point is not None
    gpu = point.left[0]
    assert gpu.have_bytes == 2 * 25_769_803_776
    least = replace(point, reserve=Reserve(gpu.bytes // 2, 0)), Reserve(gpu.bytes // 2 + 1, 0)
    assert least[0].fit == "yes"
    assert replace(point, reserve=least[1]).fit == "barely"


def test_what_leaves_the_reserve_is_preferred_within_the_tolerance() -> None:
    """gpt-oss-120b on 24 GB: the fastest of each way fills the memory to the last expert."""
    points = found("model=gpt_oss_120b")
    for best in (best_of(points), *best_by(points, "engine", "kind")):
        assert best is not None
        assert best.fit == "yes"
        fastest = fastest_of([p for p in points if (p.engine, p.kind) == (best.engine, best.kind)])
        assert fastest is not None
        assert fastest.fit == "barely"
        assert (1 - TOLERANCE) * fastest.speed <= best.speed < fastest.speed
    assert best_of([p for p in points if p.fit != "yes"]) == fastest_of(points)
    carefree = [replace(p, reserve=Reserve(0, 0)) for p in points]
    assert best_of(carefree) == fastest_of(carefree)


def test_what_costs_more_than_the_tolerance_is_not_preferred() -> None:
    points = found("model=gpt_oss_120b")
    fastest = fastest_of(points)
    assert fastest is not None
    slower = [p for p in points if p.speed < (1 - TOLERANCE) * fastest.speed]
    assert any(p.has_room for p in slower)
    assert best_of([fastest, *slower]) is fastest


def test_the_largest_cache_that_leaves_the_reserve_is_tried() -> None:
    """Another expert a layer would take from the reserve."""
    reserve = Reserve(3_000_000_000)
    points = found("model=gpt_oss_120b", reserve=reserve)
    cached = [p for p in points if p.kind == "offload"]
    largest = max((p for p in cached if p.has_room), key=lambda p: p.case.placement.gpu_ratio)
    a_row = 36 * largest.case.costs.shape.expert_bytes(0)
    assert 3_000_000_000 <= largest.left[0].bytes < 3_000_000_000 + a_row


def test_the_verdict_tells_what_is_left_and_what_was_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wish = ["model=gpt_oss_120b", "--engines", "vllm_like"]
    advice = advice_of(wish, tmp_path)
    shown = capsys.readouterr().out
    best, fastest = advice["best"], advice["fastest_that_fits"]
    left = best["gpu_bytes_left"] / 1e9
    assert "Best (no published row near it): engine=vllm_like placement=offload" in shown
    assert f"; fits, with {left:.1f} of 25.8 GB of GPU memory and " in shown
    more = 100 * (fastest["tokens_per_s"] / best["tokens_per_s"] - 1)
    assert f"Faster by {more:.1f}%, but it fits barely, with 0.0 of 25.8 GB of GPU memory" in shown
    assert best["gpu_bytes_left"] >= advice["reserve"]["gpu_bytes"] == 1 << 30


def test_ways_are_compared_at_one_precision() -> None:
    points = found(quants=("Q4_K_M", "Q3_K_M", "FP8", "AWQ_INT4"), quality_floor=3.0)
    levels = ways_by_level(points)
    assert list(levels) == [8, 4, 3]
    assert {(p.engine, p.quant) for p in levels[4]} == {
        ("llama_cpp", "Q4_K_M"),
        ("vllm_like", "AWQ_INT4"),
    }
    assert {p.quant for p in levels[3]} == {"Q3_K_M"}
    for ways in levels.values():
        assert [p.speed for p in ways] == sorted((p.speed for p in ways), reverse=True)
        assert all(p.fits for p in ways)


def test_a_scheme_that_grows_is_not_the_one_compared() -> None:
    """Rows of 2880 weights do not divide into blocks of 256: Q4_K_M takes 6 bits of gpt-oss."""
    points = found("model=gpt_oss_120b", quants=("Q4_K_M", "MXFP4"))
    assert {level_of(p) for p in points} == {4}
    assert {(p.engine, p.quant) for p in ways_by_level(points)[4]} == {
        ("llama_cpp", "MXFP4"),
        ("vllm_like", "MXFP4"),
    }
    (note,) = more_bits(points, 4.25)
    assert note.startswith("Q4_K_M: would store experts with 6 bits a weight, more than the 4.25 ")
    assert more_bits(points, 16) == []


def test_changed_machines_are_split() -> None:
    assert changes_of("machine/gpu=rtx4090,machine=a,b") == [
        ("machine/gpu=rtx4090",),
        ("machine=a",),
        ("machine=b",),
    ]
    assert changes_of("machine/gpu=a machine/link=b,~machine/storage") == [
        ("machine/gpu=a", "machine/link=b"),
        ("~machine/storage",),
    ]
    curve = "machine.storage.curve=[[1,2,3],[4,5,6]]"
    assert changes_of(curve) == [(curve,)]
    for text in ("", "engine=a", "machine/gpu=", "machine", "machine=a,", "machine/gpu=a,,b"):
        with pytest.raises(ConfigError, match="--compare"):
            changes_of(text)


def test_a_change_replaces_what_was_said_of_the_part() -> None:
    said = ["machine=a", "machine/gpu=b", "machine.gpu.count=2", "machine.cpu.cores=8", "model=m"]
    assert changed(said, ["machine/gpu=c"]) == [
        *("machine=a", "machine.cpu.cores=8", "model=m"),
        "machine/gpu=c",
    ]
    assert changed(said, ["machine=d"]) == ["model=m", "machine=d"]
    assert changed(said, ["machine.gpu.count=4"])[-1] == "machine.gpu.count=4"
    assert "machine.gpu.count=2" not in changed(said, ["machine.gpu.count=4"])


def test_another_machine_is_what_asking_for_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wish = ["model=gpt_oss_120b", "--engines", "llama_cpp,vllm_like"]
    both = advice_of(
        ["machine=rtx3090", *wish, "--compare", "machine/gpu=rtx4090"], tmp_path / "both"
    )
    shown = capsys.readouterr().out
    other = advice_of(["machine=rtx3090", "machine/gpu=rtx4090", *wish], tmp_path / "other")
    as_is, as_is_held, best, held = both["compared"]
    assert as_is["tokens_per_s"] == both["best"]["tokens_per_s"]
    assert as_is_held["tokens_per_s"] == both["best_held"]["tokens_per_s"]
    assert best["tokens_per_s"] == other["best"]["tokens_per_s"]
    assert held["tokens_per_s"] == other["best_held"]["tokens_per_s"]
    assert best["gain"] == pytest.approx(best["tokens_per_s"] / as_is["tokens_per_s"] - 1)
    assert "On changed machines" in shown
    assert "no complete published row of this engine, and it rests on an assumed hit rate" in shown
    assert "Best of those held against published rows: engine=llama_cpp" in shown
    assert "used alike" in shown


def test_a_machine_on_which_nothing_fits_has_no_gain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wish = ["--engines", "llama_cpp", "--quant", "Q4_K_M"]
    change = "machine.gpu.memory_bytes=1_000_000_000"
    rows = advice_of([*wish, "--compare", change], tmp_path)["compared"]
    assert [row["gain"] for row in rows] == [None] * 4
    assert rows[2]["tokens_per_s"] is None
    assert f"{change}: nothing fits; of what needs least: GPU memory: " in capsys.readouterr().out


def test_a_growing_scheme_is_noted_in_the_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wish = ["model=gpt_oss_120b", "--engines", "llama_cpp", "--quant", "Q4_K_M"]
    (note,) = advice_of(wish, tmp_path)["notes"]
    assert note in capsys.readouterr().out
