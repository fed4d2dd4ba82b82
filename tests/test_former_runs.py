"""Rules of who decodes together in whole configurations: what is refused, and what comes of them."""

from __future__ import annotations

from typing import Any

import pytest

from sim.build import build
from sim.policies.former import UnionFormer
from sim.simulate import simulate
from sim.types import ConfigError, LayerRouting, View
from tests.configs import composed

SMALL = ("workload.requests=[24,30]", "calibration.requests=[0,24]", "workload.batch_size=2")


class Learning(UnionFormer):
    """A rule that would learn from the run."""

    def observe(self, routing: LayerRouting, view: View) -> None:
        raise AssertionError


class Foreseeing(UnionFormer):
    """A rule that asks for what depends on its own choices."""

    oracle = True

    def __init__(self, next_use: Any) -> None:
        raise AssertionError


class Peeping(UnionFormer):
    """A rule that asks for the future without being marked."""

    def __init__(self, token_keys: Any) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Learning", "Learning.observe must not be overridden"),
        ("Foreseeing", "takes next_use, which depends on a former's own choices"),
        ("Peeping", "takes token_keys but is not marked oracle = True"),
    ],
)
def test_a_rule_that_cannot_be_replayed_is_refused(name: str, message: str) -> None:
    config = composed("policy=lru_union_former", *SMALL, "workload.waiting=4")
    config["policy"]["former"]["_target_"] = f"tests.test_former_runs.{name}"
    with pytest.raises(ConfigError, match=message):
        build(config)


def test_fewer_places_than_a_batch_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"workload.waiting = 1: must be >= workload.batch_size = 2"
    ):
        build(composed(*SMALL, "workload.waiting=1"))


def test_a_rule_without_a_choice_changes_nothing_and_says_so() -> None:
    plain, _ = simulate(composed(*SMALL, "policy=lru"))
    formed, _ = simulate(composed(*SMALL, "policy=lru_union_former"))
    assert formed["total_ns"] == plain["total_ns"]
    assert any("its former has no choice" in note for note in formed["notes"])


def test_a_run_has_the_steps_that_its_optimum_has_and_tells_what_waiting_cost() -> None:
    options = (*SMALL, "workload.waiting=4", "workload.max_wait_steps=3")
    rows = {
        name: simulate(composed(*options, f"policy={name}"))[0]
        for name in ("lru", "lru_union_former", "lru_union_oracle")
    }
    taking_turns, formed, oracle = rows.values()
    assert taking_turns["longest_wait_steps_max"] == (4 - 1) // 2
    assert 1 < formed["longest_wait_steps_max"] <= 3 + (4 - 2) // 2
    assert formed["wait_steps_mean"] > 0
    assert oracle["oracle"]
    assert not formed["oracle"]
    assert oracle["union_size"] < formed["union_size"] < taking_turns["union_size"]
    for row in rows.values():
        assert row["hit_rate"] <= row["belady_hit_rate"]
        assert row["pairs"] == taking_turns["pairs"]
        assert (row["waiting"], row["batch_size"]) == (4, 2)
