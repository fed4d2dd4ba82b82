"""What the list of policies says."""

from __future__ import annotations

import pytest

from sim.catalogue import catalogue, main
from tests.configs import options
from tests.policy_labels import ASSUMED, LOSSY, ORACLES, WANT_LOGITS


def test_every_policy_is_listed_and_says_what_it_is() -> None:
    entries = catalogue()
    assert [entry.name for entry in entries] == options("policy")
    assert [e.name for e in entries if not 15 < len(e.summary) < 330] == []


def test_labels_are_those_that_runs_bear() -> None:
    labels = {entry.name: entry.labels for entry in catalogue()}
    for mark, names in (
        ("knows the future", ORACLES),
        ("lossy", LOSSY),
        ("assumed accuracy", ASSUMED),
        ("needs router_logits", WANT_LOGITS),
    ):
        assert {name for name, found in labels.items() if mark in found} == names


def test_one_policy_is_shown_as_its_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fifo"]) == 0
    assert "_target_: sim.policies.classic.FIFO" in capsys.readouterr().out
    assert main(["fif0"]) == 2
    assert "no such policy; did you mean 'fifo'?" in capsys.readouterr().err


def test_the_list_shows_names_and_labels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("belady ") and "knows the future" in line for line in lines)
