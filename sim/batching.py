"""Requests that decode, and which of them the next step runs where more are in memory than it holds.

The rule of a :class:`~sim.policies.base.BatchFormer` chooses, without one the longest waiting run first.
Nobody waits without end under a rule that has favourites: with ``max_wait_steps`` = m a request that
has been left out of m steps is due, and those that are due run first, the longest waiting before all
others. Of W requests in memory and a batch of B none then waits for more than

    m + (W - 2) // B steps, m >= 1;    (W - 1) // B steps, m = 0 or no rule at all,

for when it becomes due at most W - 2 others are ahead of it (one has run in the step before), and B of
them go in each step. A wait is counted in steps that decode: prompts that are steps of their own hold
all requests up alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from sim.policies.base import BatchFormer, Waiting
from sim.tiling import Request
from sim.types import ConfigError
from traces.schema import NO_EXPERT, Trace


class Active:
    """A request in memory, of whose rows ``done`` are processed.

    ``ran`` is the turn in which it was last in a batch, ``last_keys`` what :class:`Waiting` tells; None
    where nobody has asked since.
    """

    __slots__ = ("done", "last_keys", "num_prompt", "num_rows", "ran", "request_id", "rows")

    def __init__(self, request: Request) -> None:
        self.request_id = request.request_id
        self.rows = request.rows
        self.num_rows = len(request.rows)
        self.num_prompt = request.num_prompt
        self.done = self.ran = 0
        self.last_keys: int | None = None


class TokenKeys:
    """The experts of a trace's tokens as ints with a bit for each key, so that unions are cheap.

    Parameters
    ----------
    trace
        The recorded routing.
    requests
        Those of the run.
    """

    def __init__(self, trace: Trace, requests: Sequence[Request]) -> None:
        self._ids = trace.expert_ids
        self._num_experts = trace.meta.num_experts
        self._num_keys = trace.meta.num_layers * trace.meta.num_experts
        self._first = np.arange(trace.meta.num_layers)[:, None] * trace.meta.num_experts
        self._rows = {request.request_id: request.rows for request in requests}

    def of_row(self, row: int) -> int:
        """Return the keys that one row of the trace uses in all layers."""
        ids = self._ids[row]
        keys = ids + self._first
        if int(ids.max()) == NO_EXPERT:
            keys = keys[ids != NO_EXPERT]
        marks = np.zeros(self._num_keys, dtype=np.bool_)
        marks[keys] = True
        return int.from_bytes(np.packbits(marks, bitorder="little").tobytes(), "little")

    def of_token(self, request_id: int, place: int) -> int:
        """Return the keys of a request's token number ``place``: the future of one that waits for it."""
        return self.of_row(self._rows[request_id][place])


class Batch:
    """The requests that decode, in the order in which they last ran, the longest waiting first.

    Parameters
    ----------
    size
        Requests that one step runs at most.
    may_wait
        Whether more may decode at one time; False costs nothing.
    max_wait_steps
        See above; None: no bound.
    former, keys_of_row
        Who chooses, and what it may know of a row of the trace; without a former the longest waiting.
    """

    def __init__(
        self,
        size: int,
        may_wait: bool = False,
        max_wait_steps: int | None = None,
        former: BatchFormer | None = None,
        keys_of_row: Callable[[int], int] | None = None,
    ) -> None:
        self.members: list[Active] = []
        self.running: list[Active] = []
        self.running_ids: tuple[int, ...] = ()
        self._size = size
        self._may_wait = may_wait
        self._max_wait = max_wait_steps
        self._former = former
        self._keys_of_row = keys_of_row
        self._turn = 0

    def add(self, joined: Sequence[Active]) -> None:
        """Let requests decode from the next step on."""
        for one in joined:
            one.ran = self._turn
        self._set([*self.members, *joined])

    def drop_finished(self) -> list[Active]:
        """Let go of the requests that have no token left, and return them."""
        finished = [one for one in self.members if one.done == one.num_rows]
        if finished:
            self._set([one for one in self.members if one.done < one.num_rows])
        return finished

    def take_turn(self) -> tuple[tuple[int, int], ...]:
        """Choose ``running``; return (request_id, steps waited) of those that had been left out."""
        if not self._may_wait:
            return ()
        members, turn = self.members, self._turn
        chosen = members if len(members) <= self._size else self._choose()
        waited = tuple([(one.request_id, turn - one.ran) for one in chosen if one.ran < turn])
        self._turn = turn + 1
        for one in chosen:
            one.ran, one.last_keys = turn + 1, None
        if chosen is not members:
            self.members = [one for one in members if one.ran <= turn] + chosen
        self.running, self.running_ids = chosen, tuple([one.request_id for one in chosen])
        return waited

    def _set(self, members: list[Active]) -> None:
        self.members = members
        if not self._may_wait:
            self.running = members
            self.running_ids = tuple([one.request_id for one in members])

    def _choose(self) -> list[Active]:
        """Return who runs, the longest waiting first; members are in that order."""
        members, size, num_due = self.members, self._size, 0
        if self._former is None:
            return members[:size]
        if self._max_wait is not None:
            since = self._turn - self._max_wait
            while num_due < size and members[num_due].ran <= since:
                num_due += 1
            if num_due == size:
                return members[:size]
        told = [self._tell(one) for one in members]
        places = self._former.choose(told[num_due:], size - num_due, told[:num_due])
        places = _checked(self._former, places, len(members) - num_due, size - num_due, num_due)
        return members[:num_due] + [members[num_due + place] for place in sorted(places)]

    def _tell(self, one: Active) -> Waiting:
        if one.last_keys is None:
            assert self._keys_of_row is not None
            one.last_keys = self._keys_of_row(one.rows[one.done - 1]) if one.done else 0
        return Waiting(one.request_id, self._turn - one.ran, one.done, one.last_keys)


def _checked(
    former: BatchFormer, places: Sequence[int], count: int, size: int, num_due: int
) -> Sequence[int]:
    """Return a former's answer; ConfigError if it is none."""
    name = f"{type(former).__name__}.choose"
    if not isinstance(places, Iterable):
        raise ConfigError(f"{name} = {places}: must be a list of places")
    found = list(places)
    if not all(isinstance(place, int | np.integer) and 0 <= place < count for place in found):
        raise ConfigError(f"{name} = {found}: must be places in [0, {count})")
    if len(set(found)) < len(found):
        raise ConfigError(f"{name} = {found}: must name no place twice")
    if not (num_due > 0 or found) or len(found) > size:
        least = 0 if num_due else 1
        raise ConfigError(f"{name} = {found}: must be {least} to {size} places")
    return found


def rows_of(running: Sequence[Active]) -> NDArray[np.intp]:
    """Return the trace row that each of some requests processes next."""
    return np.array([one.rows[one.done] for one in running], dtype=np.intp)
