"""The page of a held-out check."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.synth_report import match_page
from traces.synth_match import Match, Row


def row(measure: str, at: str, drawn: tuple[float, float], halves: tuple[float, float]) -> Row:
    return Row(measure, at, sum(halves) / 2, sum(drawn) / 2, halves, drawn)


def match() -> Match:
    return Match(
        rows=(row("reuse", "lag 1", (0.5, 0.42), (0.4, 0.5)),),
        ranks=(6, 7),
        tokens=900,
        least_gap=0.02,
        next_layer=(float("nan"), float("nan")),
        gap_mean=row("gap", "all sizes", (0.066, 0.066), (0.05, 0.07)),
        layers=(
            row("reuse", "layer 3", (0.3, 0.3), (0.3, 0.32)),
            row("reuse", "layer 4", (0.2, 0.22), (0.3, 0.3)),
            row("lru", "layer 3", (0.6, 0.6), (0.5, 0.5)),
            row("lru", "layer 4", (0.6, 0.6), (0.6, 0.6)),
        ),
    )


def test_a_half_alone_may_miss_where_the_mean_does_not() -> None:
    reuse = match().rows[0]
    assert reuse.error_ratio == pytest.approx(0.46 / 0.45 - 1)
    assert reuse.single_error_ratio == pytest.approx(0.25)
    assert replace(reuse, drawn=(0.4, 0.3)).single_error_ratio == pytest.approx(-0.4)


def test_the_page_has_the_area_and_the_layers_that_are_met_worst() -> None:
    lines = match_page(match(), "a.parquet").splitlines()
    found = {line[:42].strip(): line[42:].split() for line in lines}
    assert found["lag 1"] == ["0.4500", "0.4600", "+2.2%", "+25.0%", "22.2%"]
    area = found["all sizes (area between the curves)"]
    assert area == ["0.0600", "0.0660", "+10.0%", "+32.0%", "33.3%"]
    assert "worst of 2 layers" in found
    assert found["reuse at lag 1: layer 4"][2:] == ["-30.0%", "-33.3%", "0.0%"]
    assert found["LRU, 1/4 of the experts: layer 3"][2] == "+20.0%"


def test_without_layers_or_a_gap_the_page_does_without() -> None:
    page = match_page(replace(match(), layers=(), gap_mean=None), "a.parquet")
    assert "area" not in page
    assert "worst of 2 layers" not in page


def test_the_verdict_tells_the_mean_from_either_half() -> None:
    good = row("coherence", "window 32", (0.8, 0.8), (0.8, 0.81))
    bad = row("gap", "9 experts", (0.05, 0.05), (0.04, 0.04))
    page = match_page(replace(match(), rows=(*match().rows, good, bad)), "a.parquet")
    assert (
        "within 10 % in the mean of both halves: reuse (expert overlap, EOR); beyond it in one half: 1"
        in page
    )
    assert "within 10 %, either half by itself too: coherence" in page
    assert "MISSES: Belady gap (optimum less LRU): 1 of 1 figures (9 experts); one half: 1" in page
