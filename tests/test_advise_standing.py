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
from sim.advise_standing import (
    alike_speed,
    best_held,
    fit_word,
    more_bits,
    rests_on_hits,
    rows_by_engine,
    rows_words,
    spare_words,
)
from sim.frontier import best_of, level_of, ways_by_level
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
    assert [rows_words(n).partition(" row")[0] for n in (0, 1, 2)] == [
        "no complete published",
        "one complete published",
        "2 complete published",
    ]


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
    assert held.speed == max(p.speed for p in points if p.fits and p.engine == "llama_cpp")
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
        (800_000_000, 4_100_000_000, "yes"),  # 3 % of 25.77 GB are 0.773
        (770_000_000, 4_100_000_000, "barely"),
        (800_000_000, 3_900_000_000, "barely"),
        (0, 0, "barely"),
    ],
)
def test_nearly_full_memory_is_told(gpu_left: int, host_left: int, word: str) -> None:
    point = with_memory(found(quants=("FP8", "Q4_K_M"))[0], gpu_left, host_left)
    assert fit_word(point) == word
    told = " ".join(spare_words(point.found))
    assert ("GPU memory" in told) is (gpu_left < 773_000_000)
    assert ("host memory" in told) is (host_left < 4_000_000_000)


def test_half_a_gigabyte_counts_on_small_gpus() -> None:
    """3 % of 8 GB are 0.24 GB."""
    point = best_of(found("machine.gpu.memory_bytes=8_000_000_000"))
    assert point is not None
    assert fit_word(with_memory(point, 450_000_000, 10**10)) == "barely"
    assert fit_word(with_memory(point, 550_000_000, 10**10)) == "yes"


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
