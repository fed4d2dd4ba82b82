"""``greenroom advise``: what is tried, which is best and why, what does not fit, files, and mistakes."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from hwmodels.predict import predict
from sim.advise_cli import main
from sim.advise_plot import rising
from sim.cases import compose_case
from sim.frontier import best_by, best_of, frontier, loses_by, too_large
from tests.advising import found


def test_all_placements_of_an_engine_are_tried() -> None:
    points = found(quants=("Q4_K_M", "FP8"))
    assert {(p.engine, p.kind, p.quant) for p in points} == {
        ("llama_cpp", "gpu_only", "Q4_K_M"),
        ("llama_cpp", "cpu_layers", "Q4_K_M"),
        ("vllm_like", "gpu_only", "FP8"),
        ("vllm_like", "offload", "FP8"),
    }
    layers = [p.case.placement.cpu_layers for p in points if p.kind == "cpu_layers"]
    assert layers == list(range(1, 49))
    held = [128 * p.case.placement.gpu_ratio for p in points if p.kind == "offload"]
    assert len(held) >= 32
    assert all(number == round(number) for number in held)


def test_the_best_is_the_fastest_that_fits() -> None:
    points = found()
    best = best_of(points)
    assert best is not None
    assert best.has_room
    assert best.speed == max(p.speed for p in points if p.fits)
    assert all(p.bits >= 4 for p in points)
    assert best.found.gpu_bytes <= 25_769_803_776


def test_the_largest_cache_that_fits_is_among_them() -> None:
    """One more expert a layer would not fit: 128 experts of 9.4 MB a layer do not, 24 GB hold some."""
    cached = [p for p in found(quants=("BF16",)) if p.kind == "offload"]
    largest = max((p for p in cached if p.fits), key=lambda p: p.case.placement.gpu_ratio)
    room = 25_769_803_776 - largest.found.gpu_bytes
    a_row = 48 * largest.case.costs.shape.expert_bytes(0)
    assert 0 <= room < a_row


def test_nothing_beats_the_frontier() -> None:
    points = found()
    kept = frontier(points)
    assert best_of(points) in kept
    for point in points:
        if point.fits and point not in kept:
            assert any(
                k.speed >= point.speed
                and k.memory_bytes <= point.memory_bytes
                and k.bits >= point.bits
                for k in kept
            )
    for point in kept:
        beaten = [
            k
            for k in kept
            if k is not point
            and k.speed >= point.speed
            and k.memory_bytes <= point.memory_bytes
            and k.bits >= point.bits
        ]
        assert not beaten


def test_a_quality_floor_and_given_bits_bound_what_is_tried() -> None:
    assert min(p.bits for p in found(quality_floor=6.0)) >= 6
    assert min(p.bits for p in found(quality_floor=2.0)) < 3.5
    given = found("model.expert_bits=Q5_K_M")
    assert {p.quant for p in given} == {"as given"}


def test_what_a_runner_up_loses_by_adds_up() -> None:
    points = found()
    best = best_of(points)
    assert best is not None
    for point in best_by(points, "engine", "kind"):
        more_ns = sum(ns for _, ns in loses_by(point, best))
        less_ns = sum(ns for _, ns in loses_by(best, point))
        assert more_ns - less_ns == pytest.approx(point.found.tpot_ns - best.found.tpot_ns, abs=1)


def test_what_is_faster_but_does_not_fit_is_named() -> None:
    points = found("model=gpt_oss_120b")
    lacking = too_large(points)
    best = best_of(points)
    assert best is not None
    assert {p.engine for p in lacking} == {"llama_cpp", "vllm_like"}
    assert all(not p.fits and p.speed > best.speed for p in lacking)


def test_where_nothing_fits_the_smallest_is_named() -> None:
    points = found("machine.gpu.memory_bytes=1e9")
    assert best_of(points) is None
    assert frontier(points) == []
    smallest = too_large(points)
    assert min(p.memory_bytes for p in smallest) == min(p.memory_bytes for p in points)


def test_a_line_of_the_figure_only_rises() -> None:
    line = rising([p for p in found() if p.quant == "Q8_0"])
    assert [p.speed for p in line] == sorted(p.speed for p in line)
    assert [p.memory_bytes for p in line] == sorted(p.memory_bytes for p in line)


def test_a_point_is_what_predict_says() -> None:
    """The settings of a point, given to the other command's path, give the same speed."""
    point = next(p for p in found("model.expert_bits=Q4_K_M") if p.kind == "cpu_layers" and p.fits)
    from sim.cases import case_of

    overrides = [f"engine={point.engine}", "model.expert_bits=Q4_K_M", *point.settings.split()]
    assert predict(case_of(compose_case(overrides).config)).tokens_per_s == point.speed


def test_one_memory_is_filled_from_storage(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["machine=phone_sd8gen3", "model.expert_bits=Q4_K_M", "model.dense_bits=Q4_K_M"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    advice = json.loads((tmp_path / "advice.json").read_text())
    best, roomy = advice["best"], advice["fastest_with_reserve"]
    less = 100 * (1 - roomy["tokens_per_s"] / best["tokens_per_s"])
    assert less > 10  # so that it is not the best
    left = roomy["host_bytes_left"] / 1e9
    said = f"Slower by {less:.1f}%, but with {left:.1f} of 8.6 GB of host memory left: engine="
    assert said in capsys.readouterr().out
    assert best["engine"] == "phone_stream"
    assert best["settings"].startswith("placement=offload")
    assert best["host_bytes"] <= 8_589_934_592


def test_the_command_prints_and_writes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["model.expert_bits=Q8_0", "--engines", "llama_cpp", "--context", "4096"]
    assert main([*arguments, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert shown.strip().splitlines()[-1] == f"Results: {out}"
    for words in (
        "Best: engine=llama_cpp placement=cpu_layers",
        "Its bottleneck: ",
        "The best of each precision",
        "What memory brings",
        "Faster, but does not fit:",
        "4096 tokens of context",
    ):
        assert words in shown, words
    assert (out / "frontier.png").stat().st_size > 1000
    rows = list(csv.DictReader((out / "points.csv").open()))
    advice = json.loads((out / "advice.json").read_text())
    assert len(rows) == advice["points"] == 49
    assert float(rows[0]["tokens_per_s"]) == advice["fastest_that_fits"]["tokens_per_s"]
    assert sum(row["frontier"] == "True" for row in rows) == len(advice["frontier"])


def test_simulated_runs_stand_beside_the_closed_form(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["model.expert_bits=Q8_0", "--engines", "llama_cpp", "--simulate"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    assert "Simulated, the fastest first" in capsys.readouterr().out
    (run,) = json.loads((tmp_path / "advice.json").read_text())["simulated"]
    assert run["policy"] == "llama_cpp_n_cpu_moe"
    assert run["tokens_per_s"] == pytest.approx(run["predicted_tokens_per_s"], rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--quant", "Q4_K_X"], "--quant Q4_K_X: no such scheme; did you mean"),
        (["--quant", "Q8_0,,"], "must be names by commas"),
        (["--engines", "lama_cpp"], "did you mean 'llama_cpp'?"),
        (["--quality-floor", "33"], "must be in [0, 32]"),
        (["--reserve", "-1"], "--reserve -1: must be in [0, 1e+18] bytes"),
        (["--quality-floor", "20"], "nothing is left to try"),
        (["--context", "0"], "work.context_tokens = 0"),
        (["placement=offload"], "placement=offload: is what is searched"),
        (["placement.gpu_ratio=0.5"], "placement.gpu_ratio=0.5: is what is searched"),
        (["engine=llama_cpp"], "see --engines"),
        (["machine=rtx4091"], "did you mean 'rtx4090'?"),
        (["--sim-trace", "nowhere.parquet", "--simulate"], "nowhere.parquet: no such file"),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], said: str
) -> None:
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    seen = capsys.readouterr()
    assert len(seen.err.strip().splitlines()) == 1
    assert seen.err.startswith("greenroom advise: error: ")
    assert said in seen.err
    assert not (tmp_path / "out").exists()
