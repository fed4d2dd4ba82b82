"""One conformance suite over every file of conf/policy; ``greenroom check-policy`` runs the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sim.build import build
from sim.conformance import CHECKS, NotAsked, short_run
from tests.configs import options
from tests.policy_labels import ASSUMED, LOSSY, ORACLES, WANT_LOGITS, config_of


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("policy", options("policy"))
def test_every_policy_keeps_every_rule(policy: str, check: Callable[[Any], str]) -> None:
    try:
        assert check(config_of(policy))
    except NotAsked as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("policy", options("policy"))
def test_labels_say_who_knows_the_future_and_who_changes_the_answer(policy: str) -> None:
    policies = build(short_run(config_of(policy))).offloader.policies
    found = (policies.oracle, policies.lossy, policies.assumed)
    assert found == (policy in ORACLES, policy in LOSSY, policy in ASSUMED)


def test_the_labels_name_policies_that_exist() -> None:
    assert set(options("policy")) >= ORACLES | LOSSY | ASSUMED | WANT_LOGITS


@pytest.mark.parametrize("policy", options("policy"))
def test_every_file_bears_its_name(policy: str) -> None:
    assert config_of(policy)["policy"]["name"] == policy
