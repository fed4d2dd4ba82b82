"""The copy engine: two priorities, pieces, what can be dropped, and what happens when things go wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from queue import Queue
from threading import Semaphore, Thread, enumerate
from time import sleep

import pytest
import torch

from real.copies import Copy, CopyEngine
from real.errors import RealError
from sim.events import Kind

torch.set_num_threads(1)

PIECE_BYTES = 4
PATIENCE_S = 20  # after which a test that hangs fails


class Gated:
    """A carrier whose pieces end only when they are let go; tells which have begun, in order."""

    def __init__(self, num_workers: int = 1, num_ahead: int = 0) -> None:
        self.num_workers, self.num_ahead = num_workers, num_ahead
        self.begun: Queue[tuple[int, int]] = Queue()
        self.faults: dict[int, BaseException] = {}
        self.num_closed = 0
        self._may_end = Semaphore(0)

    def pieces(self, copy: Copy) -> Sequence[tuple[int, int]]:
        return [(offset, PIECE_BYTES) for offset in range(0, copy.num_bytes, PIECE_BYTES)]

    def carry(self, copy: Copy, offset: int, size: int) -> None:
        self.begun.put((copy.key, offset // PIECE_BYTES))
        assert self._may_end.acquire(timeout=PATIENCE_S)
        if copy.key in self.faults:
            raise self.faults[copy.key]

    def close(self) -> None:
        self.num_closed += 1

    def let_go(self, count: int) -> None:
        self._may_end.release(count)

    def next_begun(self, count: int) -> list[tuple[int, int]]:
        return [self.begun.get(timeout=PATIENCE_S) for _ in range(count)]


def copy_of(key: int, pieces: int = 1, kind: Kind = Kind.LOAD) -> Copy:
    return Copy(key, kind, torch.zeros(pieces * PIECE_BYTES, dtype=torch.uint8))


def ahead(key: int, pieces: int = 1) -> Copy:
    return copy_of(key, pieces, Kind.PREFETCH)


def our_threads() -> list[str]:
    return [thread.name for thread in enumerate() if thread.name.startswith("copies-")]


@pytest.fixture(autouse=True)
def _no_threads_are_left() -> Iterator[None]:
    assert not our_threads()
    yield
    assert not our_threads()


def drain(engine: CopyEngine) -> list[Copy]:
    """Wait for all that is under way."""
    found = []
    while engine.num_under_way or engine.has_news:
        found += engine.wait()
    return found


def message_of(function: Callable[[], object]) -> str:
    """Return what a function's RuntimeError says."""
    with pytest.raises(RuntimeError) as caught:
        function()
    return str(caught.value)


# -- order -----------------------------------------------------------------------------------------------


def test_what_somebody_waits_for_goes_ahead_at_the_edge_of_a_piece() -> None:
    carrier = Gated()
    with CopyEngine(carrier) as engine:
        engine.submit(ahead(1, pieces=3))
        assert carrier.next_begun(1) == [(1, 0)]
        engine.submit(ahead(2))
        engine.submit(copy_of(3, pieces=2))
        engine.submit(copy_of(4, kind=Kind.BYPASS))
        carrier.let_go(7)
        assert carrier.next_begun(6) == [(3, 0), (3, 1), (4, 0), (1, 1), (1, 2), (2, 0)]
        arrived = drain(engine)
        assert [copy.key for copy in arrived] == [3, 4, 1, 2]
        assert [copy.key for copy in engine.take_started()] == [1, 3, 4, 2]
        assert all(copy.queued_ns <= copy.begin_ns <= copy.end_ns for copy in arrived)
        assert [copy.end_ns for copy in arrived] == sorted(copy.end_ns for copy in arrived)
        assert engine.take_started() == engine.take_arrived() == []


def test_a_promoted_copy_goes_ahead_of_those_that_nobody_waits_for() -> None:
    carrier = Gated()
    with CopyEngine(carrier) as engine:
        engine.submit(ahead(1, pieces=2))
        for key in (2, 3, 4):
            engine.submit(ahead(key))
        carrier.next_begun(1)
        for key in (3, 3, 1):  # 1 has begun: its other piece is meant
            engine.promote(key)
        carrier.let_go(5)
        assert carrier.next_begun(4) == [(3, 0), (1, 1), (2, 0), (4, 0)]
        assert [copy.awaited for copy in drain(engine)] == [True, True, False, False]


def test_a_copy_whose_last_piece_is_under_way_can_be_promoted() -> None:
    carrier = Gated()
    with CopyEngine(carrier) as engine:
        engine.submit(ahead(1))
        carrier.next_begun(1)
        engine.promote(1)
        carrier.let_go(1)
        assert [copy.awaited for copy in drain(engine)] == [True]
        assert not engine.queue_length


def test_only_what_has_not_begun_can_be_dropped() -> None:
    carrier = Gated()
    with CopyEngine(carrier) as engine:
        engine.submit(ahead(1, pieces=2))
        carrier.next_begun(1)
        for copy in (ahead(2), copy_of(3), ahead(4)):
            engine.submit(copy)
        assert [engine.cancel(key) for key in (1, 2, 2, 3, 9)] == [False, True, False, True, False]
        engine.submit(copy_of(2))  # what was dropped may come again
        carrier.let_go(4)
        assert [copy.key for copy in drain(engine)] == [2, 1, 4]
        assert carrier.next_begun(3) == [(2, 0), (1, 1), (4, 0)]


def test_nothing_begins_while_the_engine_is_held() -> None:
    carrier = Gated()
    carrier.let_go(9)
    with CopyEngine(carrier) as engine:
        with engine.held():
            first, second, dropped = ahead(1), copy_of(2), ahead(3)
            for copy in (first, second, dropped):
                engine.submit(copy)
            sleep(0.005)  # a worker has time to do wrong
            assert carrier.begun.empty()
            assert first.begin_ns == second.begin_ns == -1
            assert engine.cancel(3)
        assert [copy.key for copy in drain(engine)] == [2, 1]
        assert dropped.begin_ns == -1


def test_pieces_go_beside_one_another_where_there_are_several_workers() -> None:
    carrier = Gated(num_workers=3)
    with CopyEngine(carrier) as engine:
        with engine.held():
            engine.submit(ahead(2, pieces=2))
            engine.submit(copy_of(1, pieces=2))
        assert sorted(carrier.next_begun(3)) == [(1, 0), (1, 1), (2, 0)]
        assert engine.queue_length == 1
        carrier.let_go(4)
        assert carrier.next_begun(1) == [(2, 1)]
        arrived = drain(engine)
        assert sorted(copy.key for copy in arrived) == [1, 2]
        assert [copy.end_ns for copy in arrived] == sorted(copy.end_ns for copy in arrived)


def test_a_second_thread_asks_ahead_for_what_is_waited_for_only() -> None:
    carrier = Gated(num_ahead=1)
    with CopyEngine(carrier) as engine:
        engine.submit(ahead(1, pieces=2))
        carrier.next_begun(1)
        behind = copy_of(2)
        engine.submit(behind)
        assert carrier.next_begun(1) == [(2, 0)]
        asked_ns = behind.begin_ns
        carrier.let_go(1)
        assert carrier.begun.empty(), "the other piece of 1 would be in the way"
        carrier.let_go(2)
        found = {copy.key: copy for copy in drain(engine)}
        assert behind.begin_ns >= asked_ns
        assert found[1].end_ns >= found[2].begin_ns


# -- faults and the end ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [RealError("a bad sector"), KeyboardInterrupt(), MemoryError()])
def test_what_a_copy_fails_with_is_raised_by_who_waits(fault: BaseException) -> None:
    carrier = Gated()
    carrier.faults[1] = fault
    with CopyEngine(carrier) as engine:
        engine.submit(copy_of(1))
        engine.submit(copy_of(2))
        carrier.let_go(2)
        with pytest.raises(type(fault)) as caught:
            engine.wait()
        assert caught.value is fault
        while engine.num_under_way:
            sleep(0.0005)  # its thread has survived


def test_nobody_waits_for_nothing() -> None:
    with CopyEngine(Gated()) as engine, pytest.raises(RuntimeError, match="nothing is under way"):
        engine.wait()


def test_closing_drops_what_waits_and_lets_the_piece_under_way_end() -> None:
    carrier = Gated()
    engine = CopyEngine(carrier)
    copies = [copy_of(1, pieces=2), copy_of(2), ahead(3)]
    for copy in copies:
        engine.submit(copy)
    carrier.next_begun(1)
    told: list[str] = []
    waiting = Thread(target=lambda: told.append(message_of(engine.wait)))
    waiting.start()
    sleep(0.01)  # so that it does wait
    closing = Thread(target=engine.close)
    closing.start()
    waiting.join(PATIENCE_S)
    assert told == ["nothing is under way that could come"]
    assert closing.is_alive(), "a piece is being written to memory that is not free yet"
    carrier.let_go(1)
    closing.join(PATIENCE_S)
    assert not our_threads()
    assert carrier.begun.empty()
    assert [copy.end_ns for copy in copies] == [-1, -1, -1]
    engine.close()
    assert carrier.num_closed == 1
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit(copy_of(4))


def test_a_copy_whose_last_piece_is_under_way_comes_though_the_engine_closes() -> None:
    carrier = Gated()
    engine = CopyEngine(carrier)
    engine.submit(copy_of(1))
    carrier.next_begun(1)
    closing = Thread(target=engine.close)
    closing.start()
    carrier.let_go(1)
    assert [copy.key for copy in engine.wait()] == [1]
    closing.join(PATIENCE_S)
