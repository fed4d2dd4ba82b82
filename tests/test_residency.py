"""Residency: states, bytes, pins and pools, and what it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.residency import ABSENT, LOADING, QUEUED, RESIDENT, Residency, ResidencyError
from sim.types import ConfigError, ExpertKey, KeySpace
from tests.strategies import LAW


def memory(capacity: int = 30, layer_bytes: tuple[int, int] = (10, 10)) -> Residency:
    """Return one pool for 2 layers x 4 experts; it holds three experts of 10 bytes."""
    return Residency(KeySpace(2, 4), layer_bytes, [0, 0], [capacity])


def bring(residency: Residency, *keys: int) -> None:
    for key in keys:
        residency.reserve(key)
        residency.start(key)
        residency.complete(key)


def test_a_key_is_layer_times_experts_plus_expert() -> None:
    keys = KeySpace(2, 4)
    assert keys.key(1, 3) == 7
    assert keys.unpack(7) == ExpertKey(layer=1, expert=3)
    assert list(keys.layer_keys(1)) == [4, 5, 6, 7]
    assert len(keys) == 8


def test_a_load_goes_through_every_state_and_holds_its_bytes_from_the_first() -> None:
    residency = memory()
    assert (residency.state[5], residency.used_bytes(0)) == (ABSENT, 0)
    residency.reserve(5)
    assert (residency.state[5], residency.used_bytes(0)) == (QUEUED, 10)
    assert residency.is_loading(5)
    residency.start(5)
    assert residency.state[5] == LOADING
    assert residency.is_loading(5)
    residency.complete(5)
    assert residency.state[5] == RESIDENT
    assert residency.is_resident(5)
    assert not residency.is_loading(5)
    assert list(residency.resident()) == [5]
    assert residency.evict(5) == 10
    assert (residency.state[5], residency.used_bytes(0)) == (ABSENT, 0)


@pytest.mark.parametrize("key_state", [QUEUED, LOADING, RESIDENT])
def test_a_key_cannot_be_reserved_twice(key_state: int) -> None:
    residency = memory()
    residency.reserve(5)
    if key_state >= LOADING:
        residency.start(5)
    if key_state >= RESIDENT:
        residency.complete(5)
    with pytest.raises(ResidencyError, match=r"layer=1, expert=1.*queued twice"):
        residency.reserve(5)
    assert residency.used_bytes(0) == 10


def test_what_does_not_fit_is_refused_with_the_bytes_that_lack() -> None:
    residency = memory(capacity=25)
    bring(residency, 0, 1)
    with pytest.raises(ResidencyError, match="5 bytes too many"):
        residency.reserve(2)
    assert residency.shortage_bytes(2) == 5
    assert (residency.state[2], residency.used_bytes(0)) == (ABSENT, 20)


def test_a_load_starts_only_from_the_queue_and_ends_only_when_started() -> None:
    residency = memory()
    with pytest.raises(ResidencyError, match="without being queued"):
        residency.start(1)
    residency.reserve(1)
    with pytest.raises(ResidencyError, match="without having started"):
        residency.complete(1)


def test_what_is_absent_loading_in_use_or_kept_is_not_evicted() -> None:
    residency = memory(capacity=40)
    bring(residency, 0, 1, 2)
    residency.reserve(3)
    residency.pin_for_good(0)
    residency.pin([1])
    for key in (0, 1, 3, 7):
        assert not residency.evictable(key)
        with pytest.raises(ResidencyError, match="may not be evicted"):
            residency.evict(key)
    assert residency.evictable(2)
    residency.unpin()
    assert residency.evictable(1)
    assert not residency.evictable(0), "kept for good"


def test_protect_replaces_the_keys_of_the_event_before() -> None:
    residency = Residency(KeySpace(1, 40), [1], [0], [40])
    bring(residency, *range(40))
    residency.pin([0, 1])
    residency.pin(list(range(20)))  # long enough to be kept as a set
    assert [key for key in range(40) if not residency.evictable(key)] == list(range(20))
    residency.pin([39])
    assert residency.evictable(0)
    assert not residency.evictable(39)


def test_a_pool_a_layer_keeps_its_own_bytes() -> None:
    residency = Residency(KeySpace(2, 4), [10, 20], [0, 1], [20, 20])
    bring(residency, 0, 4)
    assert [residency.used_bytes(pool) for pool in (0, 1)] == [10, 20]
    assert [residency.free_bytes(layer) for layer in (0, 1)] == [10, 0]
    assert [residency.shortage_bytes(key) for key in (1, 5)] == [0, 20]
    assert [residency.expert_bytes(key) for key in (1, 5)] == [10, 20]


@pytest.mark.parametrize(("layer_bytes", "pools"), [([10], [0, 0]), ([10, 10], [0])])
def test_sizes_and_pools_must_be_given_for_each_layer(
    layer_bytes: list[int], pools: list[int]
) -> None:
    with pytest.raises(ConfigError, match="must have 2 entries"):
        Residency(KeySpace(2, 4), layer_bytes, pools, [30])


@LAW
@given(
    st.lists(
        st.tuples(st.sampled_from(["reserve", "start", "complete", "evict"]), st.integers(0, 7))
    )
)
def test_used_bytes_are_those_of_all_that_is_not_absent_and_never_exceed_capacity(
    calls: list[tuple[str, int]],
) -> None:
    residency = Residency(KeySpace(2, 4), [10, 15], [0, 0], [40])
    for call, key in calls:
        before = bytes(residency.state)
        try:
            getattr(residency, call)(key)
        except ResidencyError:
            assert bytes(residency.state) == before, "a refusal changes nothing"
        sizes = [residency.expert_bytes(key) for key in range(8) if residency.state[key]]
        assert residency.used_bytes(0) == sum(sizes) <= 40
