"""The verdict of a report: what it says of rows made by hand, and that every number is of the rows."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_rows import row

from sim.html.contest import TIE, contests
from sim.html.verdict import verdict_of
from sim.types import ConfigError

Row = dict[str, Any]


def sweep(**speeds: Sequence[float | None]) -> list[Row]:
    """Return a row a policy and speed, at cache sizes of 10%, 20%, ..."""
    return [
        row(name, speed, (number + 1) / 10)
        for name, own in speeds.items()
        for number, speed in enumerate(own)
    ]


def test_a_winner_in_all_settings_leads_the_baseline_and_the_next() -> None:
    found = verdict_of(sweep(lru=[100.0, 100.0], saem=[150.0, 160.0], fifo=[90.0, 80.0]))
    mean = math.sqrt(1.5 * 1.6)
    assert found.sentence == (
        f"saem is the fastest of 3 lossless policies in both settings: 150.0 to 160.0 tokens/s and "
        f"{mean:.2f}x lru's (1.50x to 1.60x); it is bound by the link, for which the GPU waits 75.0% of "
        "the time."
    )
    assert found.notes == ()


def test_the_next_is_named_where_it_is_not_the_baseline() -> None:
    sentence = verdict_of(sweep(lru=[100.0], saem=[150.0], fifo=[120.0])).sentence
    assert "150.0 tokens/s, 1.50x lru's and 1.25x the next, fifo's;" in sentence
    asked = verdict_of(sweep(lru=[100.0], saem=[150.0], fifo=[120.0]), "fifo").sentence
    assert "150.0 tokens/s and 1.25x fifo's;" in asked


def test_the_baseline_may_win() -> None:
    sentence = verdict_of(sweep(lru=[100.0], saem=[80.0])).sentence
    assert sentence.startswith(
        "lru, the baseline, is the fastest of 2 lossless policies: 100.0 tokens/s"
    )
    assert "1.25x the next, saem's" in sentence


def test_a_lead_in_the_mean_says_where_it_does_not_hold() -> None:
    found = verdict_of(sweep(lru=[100.0, 100.0, 100.0], saem=[300.0, 100.5, 90.0]))
    assert (
        "in the mean of 3 settings, and in 1 of them (tied in 1 more, slower in 1)"
        in found.sentence
    )
    assert found.notes[0] == "Faster than saem: lru at cache 30% (1.11x)."
    assert "called a tie" in found.notes[1]


def test_exact_ties_are_told_from_near_ones() -> None:
    exact = verdict_of(sweep(lru=[100.0, 50.0], saem=[100.0, 50.0])).sentence
    assert exact.startswith(
        "Both lossless policies tie (exactly) in the mean of 2 settings: 50.0 to 100.0"
    )
    near = verdict_of(sweep(lru=[100.0], saem=[100.5], fifo=[50.0])).sentence
    assert near.startswith(
        "saem and lru tie (within 1%) as the fastest of 3 lossless policies: 100.5 tokens/s"
    )
    assert "2.01x the next, fifo's" in near


def test_oracles_play_a_game_of_their_own() -> None:
    found = verdict_of(sweep(lru=[100.0, 100.0], saem=[150.0, 150.0], belady=[300.0, 140.0]))
    assert found.sentence.startswith("saem is the fastest of 2 lossless policies in both settings")
    assert found.notes == (
        "belady, which knows the future, is faster than the fastest lossless policy in 1 of 2 settings, by "
        "2.00x.",
    )
    slower = verdict_of(sweep(lru=[100.0], saem=[150.0], belady=[90.0]))
    assert slower.notes == ("No oracle is faster than the fastest lossless policy: 0.60x at most.",)


def test_oracles_alone_are_called_that() -> None:
    sole = verdict_of(sweep(belady=[100.0, 200.0])).sentence
    assert sole.startswith(
        "belady, which knows the future, makes 100.0 tokens/s (cache 10%) to 200.0"
    )
    many = verdict_of(sweep(belady=[100.0] * 3, belady_bypass=[200.0] * 3)).sentence
    assert "of 2 oracles, which know the future, in all 3 settings: 200.0" in many
    two = verdict_of(sweep(belady=[100.0], belady_bypass=[200.0])).sentence
    assert two.startswith("belady_bypass is the fastest of 2 oracles, which know the future: 200.0")


def test_a_lossy_policy_that_wins_is_not_the_winner() -> None:
    rows = sweep(lru=[100.0, 100.0], saem=[150.0, 150.0], lossy=[300.0, 300.0])
    for one in rows[-2:]:
        one["substituted_mass_rate"] = 0.125
    found = verdict_of(rows)
    assert found.sentence.startswith("saem is the fastest of 2 lossless policies")
    assert found.notes == (
        "lossy, which changes the model's answer (12.5% of what the router chose), is faster than every "
        "lossless policy in 2 of 2 settings, by 2.00x.",
    )
    slow = verdict_of(sweep(lru=[100.0], saem=[150.0], lossy=[120.0]))
    assert slow.notes == (
        "No lossy policy is faster than the lossless ones: 0.80x their fastest at most.",
    )


def test_one_policy_says_how_its_speed_changes() -> None:
    found = verdict_of(sweep(lru=[100.0, 250.0]))
    assert found.sentence == (
        "lru makes 100.0 tokens/s (cache 10%) to 250.0 (cache 20%), which is 2.50x; it is bound by the link, "
        "for which the GPU waits 75.0% of the time."
    )
    beside = verdict_of(sweep(lru=[100.0, 250.0], belady=[100.0, 250.0])).sentence
    assert beside.startswith("lru, the only lossless policy, makes 100.0")


def test_a_single_run_is_described() -> None:
    sentence = verdict_of([row("lru", 123.46)]).sentence
    assert sentence.startswith(
        "lru makes 123.5 tokens/s (TPOT p50 8.10 ms) for m on box with 25.0%"
    )
    gpu = verdict_of([row("lru", 100.0, link=0.25)]).sentence
    assert gpu.endswith("it is bound by the GPU itself, which works 75.0% of the time.")
    phone = verdict_of([row("lru", 100.0, link=0.25, machine_kind="cpu_only")]).sentence
    assert "bound by the CPU itself" in phone


def test_nothing_served_is_no_winner() -> None:
    found = verdict_of(sweep(lru=[None, None], saem=[None, None]))
    assert found.sentence.startswith("Nothing could be served: all 4 runs refused every request")
    some = verdict_of(sweep(lru=[100.0, None], saem=[120.0, None]))
    assert some.notes[-1] == "2 of 4 runs refused every request and have no speed."
    assert "saem is the fastest of 2" in some.sentence


def test_policies_that_ran_apart_are_compared_where_all_ran_or_not_at_all() -> None:
    part = verdict_of(sweep(lru=[100.0, 100.0, 100.0], saem=[150.0, 150.0, None]))
    assert "in both settings" in part.sentence
    assert "Compared are the 2 of 3 settings in which saem and lru all ran." in part.notes
    apart = [row("lru", 100.0, 0.1), row("saem", 150.0, 0.2), row("fifo", 90.0, 0.3)]
    sentence = verdict_of(apart).sentence
    assert sentence.startswith(
        "The fastest lossless one of 3 runs is saem at cache 20%: 150.0 tokens/s"
    )
    assert sentence.endswith(
        "policies are not compared, for no two of a class ran in the same settings."
    )


def test_causes_that_differ_are_counted() -> None:
    rows = sweep(lru=[100.0, 100.0], saem=[150.0, 150.0])
    rows[-1] |= {"bottleneck": "gpu", "gpu_share": 0.6, "link_stall_share": 0.4}
    assert (
        "it is bound by the GPU itself in 1 and the link in 1 of 2 settings."
        in verdict_of(rows).sentence
    )


def test_a_baseline_that_did_not_run_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="--baseline lur: must be a policy that ran"):
        verdict_of(sweep(lru=[1.0], saem=[2.0]), "lur")


def test_variants_of_a_policy_are_told_apart() -> None:
    rows = [
        row("lfu", 100.0 + 50 * n, overrides={"policy.cache.decay": d})
        for n, d in enumerate(("0.5", "0.9"))
    ]
    assert verdict_of(rows).sentence.startswith(
        "lfu decay=0.9 is the fastest of 2 lossless policies"
    )


# -- laws ------------------------------------------------------------------------------------------

_SPEEDS = st.floats(1.0, 1000.0).map(lambda speed: round(speed, 1))
_NAMES = ("lru", "saem", "fifo")
_TABLES = st.integers(1, 4).flatmap(
    lambda count: st.fixed_dictionaries(
        {name: st.lists(_SPEEDS, min_size=count, max_size=count) for name in _NAMES}
    )
)


@settings(max_examples=150, deadline=None)
@given(_TABLES)
def test_every_number_of_the_sentence_is_of_the_rows(speeds: dict[str, list[float]]) -> None:
    sentence = verdict_of(sweep(**speeds)).sentence
    count = len(speeds["lru"])
    known = {f"{speed:.1f}" for own in speeds.values() for speed in own}
    for one, other in [*combinations(_NAMES, 2), *combinations(reversed(_NAMES), 2)]:
        ratios = [a / b for a, b in zip(speeds[one], speeds[other], strict=True)]
        mean = math.prod(ratios) ** (1 / count)
        known |= {f"{ratio:.2f}x" for ratio in (mean, min(ratios), max(ratios))}
    known |= {"75.0%", f"{TIE:.0%}", *map(str, range(5))}
    assert set(re.findall(r"\d+(?:\.\d+)?[x%]?", sentence)) <= known


@settings(max_examples=150, deadline=None)
@given(_TABLES)
def test_the_leader_has_the_largest_mean_and_all_means_all(speeds: dict[str, list[float]]) -> None:
    sentence = verdict_of(sweep(**speeds)).sentence
    contest = contests(sweep(**speeds))["lossless"]
    count = len(speeds["lru"])
    means = {name: math.prod(own) ** (1 / count) for name, own in speeds.items()}
    best = max(means.values())
    assert means[contest.leaders[0]] == pytest.approx(best)
    close = {name for name, mean in means.items() if mean >= (1 - TIE) * best * (1 - 1e-12)}
    assert set(contest.leaders) <= close
    if (" in all " in sentence or " in both " in sentence) and count > 1:
        leader = contest.leaders[0]
        for place in range(count):
            fastest = max(own[place] for own in speeds.values())
            assert speeds[leader][place] >= (1 - TIE) * fastest * (1 - 1e-12)
