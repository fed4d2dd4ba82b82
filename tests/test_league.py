"""The league table: who is compared with whom, and what the numbers are."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from rich.console import Console

from sim import labels
from sim.league import league
from sim.report_league import print_league, write_league
from tests.test_report import row


def rows() -> list[dict]:
    """Two cache sizes: b is twice, then eight times as fast as lru; c half as fast in one of them."""
    return [
        row("lru", 0.25, 10.0, h2d_bytes=100), row("lru", 0.5, 20.0, h2d_bytes=100),
        row("b", 0.25, 20.0, h2d_bytes=50), row("b", 0.5, 160.0, h2d_bytes=200),
        row("c", 0.5, 10.0, hit_rate=0.1, h2d_bytes=0),
    ]  # fmt: skip


def test_means_are_geometric_and_bounds_are_bounds() -> None:
    baseline, (first, second, third) = league(rows())
    assert baseline == "lru"
    assert (first.policy, first.mean, first.worst, first.best) == ("b", pytest.approx(4.0), 2, 8)
    assert (first.settings, first.wins) == (2, 2)
    assert first.moved == pytest.approx(1.0)  # half, then twice
    assert (second.policy, second.mean, second.wins) == ("lru", pytest.approx(1.0), 0)
    assert (third.policy, third.mean, third.settings) == ("c", pytest.approx(0.5), 1)
    assert third.moved is None
    assert third.hit_rate == 0.1


def test_those_that_play_another_game_stand_apart_however_fast() -> None:
    others = [
        row("belady", 0.25, 1000.0), row("belady", 0.5, 1000.0),
        row("dial", 0.25, 900.0, assumed=True), row("dial", 0.5, 900.0, assumed=True),
        row("drops", 0.25, 999.0, lossy=True, dropped_mass_rate=0.04, substituted_mass_rate=0.01),
        row("drops", 0.5, 999.0, lossy=True, dropped_mass_rate=0.02, substituted_mass_rate=None),
    ]  # fmt: skip
    _, standings = league(rows() + others)
    assert [s.policy for s in standings] == ["b", "lru", "c", "drops", "belady", "dial"]
    assert [s.kind for s in standings][3:] == ["lossy", "oracle", "oracle"]
    assert standings[0].wins == 2
    assert standings[3].given_up == pytest.approx((0.05 + 0.02) / 2)
    assert standings[0].given_up is None


def test_another_baseline() -> None:
    baseline, standings = league(rows(), "b")
    assert baseline == "b"
    assert standings[0].policy == "b"
    assert standings[0].mean == pytest.approx(1.0)
    assert {s.policy: s.mean for s in standings}["lru"] == pytest.approx(0.25)


@pytest.mark.parametrize("few", [rows()[:4], rows()[2:], rows()[1::2]])
def test_no_league_without_baseline_rivals_or_settings(few: list[dict]) -> None:
    assert league(few) == ("", [])


def test_a_policys_own_parameters_make_it_another() -> None:
    decays = [
        row("lfu", ratio, speed, overrides={"policy.cache.decay": decay})
        for decay, speed in (("0.9", 11.0), ("1", 12.0))
        for ratio in (0.25, 0.5)
    ]
    base = [row("lru", ratio, 10.0) for ratio in (0.25, 0.5)]
    _, standings = league(decays + base, "lru")
    assert [s.policy for s in standings] == ["lfu decay=1", "lfu decay=0.9", "lru"]


def test_the_file_shows_every_standing(tmp_path: Path) -> None:
    baseline, standings = league(rows())
    with write_league(tmp_path, baseline, standings).open(encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert [(line["policy"], line["baseline"]) for line in found] == [
        ("b", "lru"), ("lru", "lru"), ("c", "lru"),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["recorded", "synthetic"])
def test_the_league_of_a_synthetic_trace_says_so(kind: str) -> None:
    runs = [one | {"provenance": one["provenance"] | {"trace_kind": kind}} for one in rows()]
    console = Console(file=io.StringIO(), width=200)
    print_league(console, runs, *league(runs))
    assert ("League (a SYNTHETIC trace), speed" in console.file.getvalue()) == (kind == "synthetic")


def test_wins_are_of_a_policy_with_its_parameters_and_shared_by_equals() -> None:
    speeds = {("0.5", 0.25): 20.0, ("0.5", 0.5): 20.0, ("0.9", 0.25): 30.0, ("0.9", 0.5): 20.0}
    decays = [
        row("lfu", ratio, speed, overrides={"policy.cache.decay": decay})
        for (decay, ratio), speed in speeds.items()
    ]
    base = [row("lru", ratio, 10.0) for ratio in (0.25, 0.5)]
    _, standings = league(decays + base, "lru")
    assert {standing.policy: standing.wins for standing in standings} == {
        "lfu decay=0.9": 2, "lfu decay=0.5": 1, "lru": 0,
    }  # fmt: skip


def test_a_parameter_that_some_policies_do_not_set_does_not_rename_them() -> None:
    decayed = row("b", 0.25, 30.0, overrides={"policy.cache.decay": "0.9"})
    baseline, standings = league([*rows(), decayed])
    assert baseline == "lru"
    assert {one.policy for one in standings} == {"b decay=0.9", "b", "lru", "c"}


def test_parameters_of_two_parts_with_one_name_are_told_apart() -> None:
    cache, stages = {"policy.cache.memory": "0.4"}, {"policy.stages.memory": "0.4"}
    both = [
        row("b", ratio, speed, overrides=overrides)
        for ratio in (0.25, 0.5)
        for speed, overrides in ((30.0, cache), (50.0, stages))
    ]
    _, standings = league(rows() + both)
    assert [s.policy for s in standings][:2] == ["b", "b stages.memory=0.4"]
    assert {s.policy: s.settings for s in standings}["b cache.memory=0.4"] == 2
    names = labels.names(both)
    assert names[:2] == ["b, cache.memory 0.4", "b, stages.memory 0.4"]
