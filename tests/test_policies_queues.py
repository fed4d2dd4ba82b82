"""SLRU, ARC and S3-FIFO against the published algorithms written down plainly, one use an event."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sim.policies.adaptive import ARC, S3FIFO, SLRU
from sim.policies.base import CachePolicy
from tests.cache_replay import Contents, contents, one_layer, run_of, skewed
from tests.test_policies_unit import make_view

NUM_EXPERTS = 14


def uses(seed: int, number: int = 1200) -> list[int]:
    """Return one expert an event; popularity drifts, so that old ones fall out of favour."""
    return [int(e) for e in skewed(seed, number, 1, NUM_EXPERTS, 1)[:, 0, 0]]


def agree(
    make: Callable[[], CachePolicy], model: Callable[[list[int], int], Contents], slots: int
) -> None:
    for seed in range(3):
        sequence = uses(seed)
        found = contents(one_layer([[key] for key in sequence], NUM_EXPERTS), make, slots)
        assert found == model(sequence, slots)


# -- ARC -----------------------------------------------------------------------------------------


def arc_of_the_paper(sequence: list[int], c: int) -> Contents:
    """Cases I to IV of Megiddo and Modha, figure 4; lists have their oldest first."""
    t1: list[int] = []
    t2: list[int] = []
    b1: list[int] = []
    b2: list[int] = []
    p = 0.0
    found = []

    def replace(x: int) -> None:
        if t1 and (len(t1) > p or (x in b2 and len(t1) == p)):
            b1.append(t1.pop(0))
        else:
            b2.append(t2.pop(0))

    for x in sequence:
        if x in t1 or x in t2:
            (t1 if x in t1 else t2).remove(x)
            t2.append(x)
        elif x in b1:
            p = min(float(c), p + max(1.0, len(b2) / len(b1)))
            replace(x)
            b1.remove(x)
            t2.append(x)
        elif x in b2:
            p = max(0.0, p - max(1.0, len(b1) / len(b2)))
            replace(x)
            b2.remove(x)
            t2.append(x)
        else:
            if len(t1) + len(b1) == c:
                if len(t1) < c:
                    b1.pop(0)
                    replace(x)
                else:
                    t1.pop(0)
            elif len(t1) + len(t2) + len(b1) + len(b2) >= c:
                if len(t1) + len(t2) + len(b1) + len(b2) == 2 * c:
                    b2.pop(0)
                replace(x)
            t1.append(x)
        found.append(frozenset(t1 + t2))
    return found


@pytest.mark.parametrize("slots", [1, 2, 4, 7])
def test_arc_is_that_of_the_paper(slots: int) -> None:
    agree(ARC, arc_of_the_paper, slots)


def test_arc_moves_its_target_by_all_ghosts_of_an_event_before_it_makes_room() -> None:
    # 2 slots. 0, 1 used twice each; then 2 and 3 pass: T1 = 3, T2 = 1 after 0 has gone to B2, 2 to B1.
    sequence = [[0], [0], [1], [1], [2], [3], [2]]
    found = contents(one_layer(sequence, 4), ARC, 2)
    assert found[4:] == [{1, 2}, {1, 3}, {2, 3}]
    # The last event misses B1's ghost: the target is 1, T1 = {3} does not exceed it, so 1 of T2 goes.


# -- S3-FIFO --------------------------------------------------------------------------------------


def s3fifo_of_the_paper(sequence: list[int], capacity: int, share: float) -> Contents:
    """Algorithm 1 of Yang et al. with queues as lists, the oldest first, and one victim at a time."""
    small: list[int] = []
    main: list[int] = []
    ghosts: list[int] = []
    freq: dict[int, int] = {}
    small_target = max(1, int(share * capacity))
    found = []

    def evict() -> None:
        while True:
            if len(small) >= small_target:
                tail = small.pop(0)
                if freq[tail] > 1:
                    main.append(tail)
                    continue
                ghosts.append(tail)
                if len(ghosts) > max(1, capacity - small_target):
                    ghosts.pop(0)
                return
            if not main:
                small.pop(0)
                return
            tail = main.pop(0)
            if freq[tail] == 0:
                return
            main.append(tail)
            freq[tail] -= 1

    for x in sequence:
        if x in small or x in main:
            freq[x] = min(freq[x] + 1, 3)
        else:
            if len(small) + len(main) == capacity:
                evict()
            freq[x] = 0
            if x in ghosts:
                ghosts.remove(x)
                main.append(x)
            else:
                small.append(x)
        found.append(frozenset(small + main))
    return found


@pytest.mark.parametrize(("slots", "share"), [(2, 0.1), (4, 0.1), (7, 0.1), (7, 0.5)])
def test_s3fifo_is_that_of_the_paper(slots: int, share: float) -> None:
    agree(lambda: S3FIFO(share), lambda seq, c: s3fifo_of_the_paper(seq, c, share), slots)


# -- SLRU -----------------------------------------------------------------------------------------


def slru(sequence: list[int], slots: int, second_miss: bool) -> Contents:
    """Two lists and a list of first misses, the oldest first."""
    probation: list[int] = []
    protected: list[int] = []
    missed: list[int] = []
    found = []
    for x in sequence:
        if x in protected:
            protected.remove(x)
            protected.append(x)
        elif x in probation:
            probation.remove(x)
            protected.append(x)
            if len(protected) > max(1, int(slots * 0.8)):
                probation.append(protected.pop(0))
        elif len(probation) + len(protected) < slots:
            probation.append(x)
        elif second_miss and x not in missed:
            missed.append(x)
            del missed[:-slots]
        else:
            if x in missed:
                missed.remove(x)
            (probation or protected).pop(0)
            probation.append(x)
        found.append(frozenset(probation + protected))
    return found


@pytest.mark.parametrize("second_miss", [False, True])
@pytest.mark.parametrize("slots", [2, 5, 8])
def test_slru_is_two_lists(slots: int, second_miss: bool) -> None:
    agree(lambda: SLRU(second_miss=second_miss), lambda seq, c: slru(seq, c, second_miss), slots)


def test_slru_admits_what_it_missed_before_and_forgets_old_misses() -> None:
    events = [[0], [1], [2], [3], [2], [4], [3]]
    # Full after 1. First misses 2, 3 are bypassed; 2 again is admitted. Two are remembered: 3 and 4.
    found = contents(one_layer(events, 6), SLRU, 2)
    assert found == [{0}, {0, 1}, {0, 1}, {0, 1}, {1, 2}, {1, 2}, {2, 3}]
    short = contents(one_layer(events, 6), lambda: SLRU(memory=0.5), 2)
    assert short == [{0}, {0, 1}, {0, 1}, {0, 1}, {0, 1}, {0, 1}, {0, 1}]  # one: always another


# -- all ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [SLRU, ARC, S3FIFO])
def test_queues_pass_over_what_may_not_go(make: Callable[[], CachePolicy]) -> None:
    policy = make()
    policy.start(range(8), 4, make_view())
    view = make_view()
    for key in range(4):
        policy.on_insert(key, view)
    policy.on_hit([2], view)
    assert policy.choose_victim(lambda key: key == 2, view) == 2
    assert policy.choose_victim(lambda key: key == 3, view) == 3
    assert policy.choose_victim(lambda key: False, view) is None


@pytest.mark.parametrize("make", [SLRU, ARC, S3FIFO])
def test_queues_hold_what_fits_when_events_are_large(make: Callable[[], CachePolicy]) -> None:
    workload = run_of(skewed(2, 400, 2, NUM_EXPERTS, 4), NUM_EXPERTS, 2)
    for is_global in (False, True):
        found = contents(workload, make, 9, is_global)
        assert max(map(len, found)) <= (9 if is_global else 18)
        assert len(found[-1]) == (9 if is_global else 18)


@pytest.mark.parametrize("make", [SLRU, ARC, S3FIFO])
def test_queues_live_on_when_their_pool_shrinks(make: Callable[[], CachePolicy]) -> None:
    policy = make()
    policy.start(range(8), 6, make_view())
    view = make_view()
    for key in range(6):
        policy.on_insert(key, view)
        policy.on_hit([key], view)
    policy.on_resize(2, view)
    left = set(range(6))
    while len(left) > 2:
        victim = policy.give_up(lambda key: key in left, view)
        assert victim in left
        policy.on_evict(victim)
        left.remove(victim)
    policy.on_hit(sorted(left), view)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SLRU(1.0), r"protected = 1.0: must be in \(0, 1\)"),
        (lambda: SLRU(memory=0.0), "memory = 0.0: must be > 0"),
        (lambda: S3FIFO(0.0), r"small = 0.0: must be in \(0, 1\)"),
    ],
)
def test_bad_parameters_are_refused(make: Callable[[], CachePolicy], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
