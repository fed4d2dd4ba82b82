"""The conformance suite itself: policies that break a rule are found out, and told which."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim.check_cli import main
from sim.conformance import (
    CHECKS,
    NotAsked,
    Violation,
    counts_alike_with_and_without_time,
    does_not_know_the_future,
    findings,
    has_no_more_hits_than_the_optimum,
    lives_with_less_memory,
    runs_twice_alike,
    says_so_when_it_changes_the_answer,
)
from sim.policies.base import CachePolicy, Evictable, PlacementPolicy, RoutingPolicy
from sim.policies.classic import LRU
from sim.policies.oracle import Belady, NextUse
from sim.types import ConfigError, ExpertWork, LayerRouting, Service, View
from tests.configs import composed


class Moody(PlacementPolicy):
    """Remembers earlier runs of the same process."""

    calls = 0

    def place(self, work: Sequence[ExpertWork], view: View) -> Sequence[Service]:
        Moody.calls += 1
        return [Service.CPU if Moody.calls % 7 == 0 else Service.LOAD for _ in work]


class ClockWatcher(LRU):
    """Decides by the time of day."""

    def admits(self, key: int, view: View) -> bool:
        return view.now_ns % 2 == 0


class Peeker(CachePolicy):
    """Counts uses in the whole trace, that of the run included, behind the back of the builder."""

    def __init__(self, calibration: Any) -> None:
        self._ids = calibration.trace.expert_ids
        self._members: set[int] = set()

    def choose_victim(self, evictable: Evictable, view: View) -> int | None:
        def uses(key: int) -> int:
            layer, expert = view.keys.unpack(key)
            return int(np.count_nonzero(self._ids[:, layer] == expert))

        return min(filter(evictable, self._members), key=lambda k: (uses(k), k), default=None)

    def on_insert(self, key: int, view: View) -> None:
        self._members.add(key)

    def on_evict(self, key: int) -> None:
        self._members.discard(key)


class Sly(RoutingPolicy):
    """Drops an expert and does not say so."""

    lossy = False

    def rewrite(self, routing: LayerRouting, view: View) -> LayerRouting:
        return routing.reordered(routing.experts[1:], routing.token_counts[1:])


class Forewarned(Belady):
    """Belady with another name."""

    def __init__(self, next_use: NextUse) -> None:
        super().__init__(next_use, bypass=True, warm=True)


class Stubborn(LRU):
    """Never lets go, not even of what must go."""

    def choose_victim(self, evictable: Evictable, view: View) -> int | None:
        return None


class Broken(LRU):
    """Has a mistake in it."""

    def on_insert(self, key: int, view: View) -> None:
        raise KeyError("no such thing")


class Misspelt(LRU):
    """Nobody calls its method."""

    def on_inserted(self, key: int, view: View) -> None:
        raise AssertionError


def config_of(role: str, kind: type, **settings: Any) -> dict[str, Any]:
    """Return a configuration of LRU with one role taken by a class of this file."""
    config = composed("policy=lru")
    target = f"{kind.__module__}.{kind.__qualname__}"
    config["policy"] |= {"name": "mine", role: {"_target_": target, **settings}}
    return config


@pytest.mark.parametrize(
    ("check", "role", "kind", "message"),
    [
        (runs_twice_alike, "placement", Moody, "two runs of the same configuration differ"),
        (counts_alike_with_and_without_time, "cache", ClockWatcher, "with and without time differ"),
        (does_not_know_the_future, "cache", Peeker, "of runs that differ only later differ"),
        (says_so_when_it_changes_the_answer, "routing", Sly, "must be marked lossy = True"),
    ],
)
def test_a_policy_that_breaks_a_rule_is_found_out(
    check: Callable[[Any], str], role: str, kind: type, message: str
) -> None:
    with pytest.raises(Violation, match=message):
        check(config_of(role, kind))


def test_lru_keeps_every_rule() -> None:
    found = list(findings(composed("policy=lru")))
    assert [finding.verdict for finding in found] == ["ok"] * len(CHECKS)


def test_an_oracle_reaches_the_optimum_and_is_not_asked_about_the_future() -> None:
    config = config_of("cache", Forewarned)
    with pytest.raises(NotAsked, match="says that it knows the future"):
        does_not_know_the_future(config)
    said = has_no_more_hits_than_the_optimum(config)
    hits, best = (float(part.split()[-1]) for part in said.split(","))
    assert 0 <= best - hits < 0.05  # it has fewer staging slots than the optimum


def test_a_cache_that_never_lets_go_is_told_so() -> None:
    with pytest.raises(ValueError, match="names nobody though memory must be freed"):
        lives_with_less_memory(config_of("cache", Stubborn))


def test_a_policy_that_crashes_fails_where_it_does() -> None:
    (found,) = findings(config_of("cache", Broken))
    assert found.verdict == "fails"
    assert "KeyError: 'no such thing'" in found.detail
    assert "test_conformance.py" in found.detail.partition(" in on_insert:")[0]


def test_a_misspelt_hook_is_no_hook() -> None:
    with pytest.raises(
        ConfigError, match=r"Misspelt\.on_inserted: no such hook; did you mean 'on_insert'"
    ):
        list(findings(config_of("cache", Misspelt)))


# -- the command -----------------------------------------------------------------------------------

MODULE = '''
"""A user's policy."""

from sim.policies.classic import LRU


class Keeper(LRU):
    def __init__(self, generosity: int = 1) -> None:
        super().__init__()
        self.generosity = generosity
'''
YAML = """
name: mine
scope: layer
cache:
  _target_: my_policies_of_the_test.Keeper
  generosity: 2
"""


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a user's: conf/policy/mine.yaml, and the module beside conf."""
    (tmp_path / "conf" / "policy").mkdir(parents=True)
    (tmp_path / "conf" / "policy" / "mine.yaml").write_text(YAML)
    (tmp_path / "my_policies_of_the_test.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_policies_of_the_test", raising=False)
    return tmp_path


def test_a_policy_from_outside_is_checked(
    outside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(outside / "conf" / "policy" / "mine.yaml")]) == 0
    out = capsys.readouterr().out
    assert "policy mine on trace tiny" in out
    assert out.count("\n  ok ") == len(CHECKS)
    assert out.splitlines()[-1] == "mine keeps every rule that concerns it."


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.yaml"], "policy = nowhere.yaml: no such file"),
        (["lrv"], "policy = lrv: no such option; did you mean 'lru'?"),
        (["lru", "+policy.cache.size=3"], "size: sim.policies.classic.LRU has no such parameter"),
        (["lru", "cache.rato=0.5"], "cache.rato"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
