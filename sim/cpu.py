"""The host's cores as a pool of teams that compute experts where their weights lie."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hwmodels.host_cost import CPUWork
from sim.clock import LOAD_ENDED, Clock, Event
from sim.sharing import Shares, Use

Done = Callable[[int, int, int, int], None]
"""Told (key, team, begin_ns, lost_ns) when an expert has been computed; see :meth:`CPUPool.submit`."""


class _Task(NamedTuple):
    """An expert that waits for a team."""

    key: int
    work: CPUWork
    order: int
    on_end: Done


class CPUPool:
    """Teams of threads, as many on each NUMA node; each computes one expert of its node at a time.

    Parameters
    ----------
    clock, shares
        The clock, and the capacities that weights come through.
    num_teams
        Teams a node.
    node_of_key, uses
        Where each expert's weights lie, and what reading them uses, [num_keys].
    """

    def __init__(
        self,
        clock: Clock,
        shares: Shares,
        num_teams: int,
        node_of_key: Sequence[int],
        uses: Sequence[Sequence[Use]],
    ) -> None:
        num_nodes = max(node_of_key, default=0) + 1
        self.busy_ns = 0
        self._clock = clock
        self._shares = shares
        self._node_of_key = node_of_key
        self._uses = uses
        self._waiting: list[deque[_Task]] = [deque() for _ in range(num_nodes)]
        self._idle = [
            deque(range(node * num_teams, (node + 1) * num_teams)) for node in range(num_nodes)
        ]

    def submit(self, key: int, work: CPUWork, order: int, on_end: Done) -> None:
        """Queue one expert on its node, behind all that wait there with the same or a lower ``order``.

        ``on_end`` is told the key, the team, when the team began and the time lost to full memory.
        """
        node = self._node_of_key[key]
        waiting = self._waiting[node]
        place = len(waiting)
        while place and waiting[place - 1].order > order:
            place -= 1
        waiting.insert(place, _Task(key, work, order, on_end))
        self._start(node)

    def _start(self, node: int) -> None:
        while self._idle[node] and self._waiting[node]:
            self._run(self._idle[node].popleft(), self._waiting[node].popleft())

    def _run(self, team: int, task: _Task) -> None:
        begin_ns, key, work = self._clock.now, task.key, task.work

        def set_up(_: Any) -> None:
            self._shares.start(work.num_bytes, work.bytes_per_s, self._uses[key], streamed)

        def streamed(lost_ns: int) -> None:
            left_ns = begin_ns + work.least_ns - self._clock.now
            if left_ns > 0:  # operations bind, not bytes
                self._clock.schedule(Event(lambda _: done(lost_ns)), LOAD_ENDED, left_ns)
            else:
                done(lost_ns)

        def done(lost_ns: int) -> None:
            self.busy_ns += self._clock.now - begin_ns
            node = self._node_of_key[key]
            self._idle[node].append(team)
            task.on_end(key, team, begin_ns, lost_ns)
            self._start(node)

        if work.setup_ns:
            self._clock.schedule(Event(set_up), LOAD_ENDED, work.setup_ns)
        else:
            set_up(None)
