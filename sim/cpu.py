"""The host's cores as a pool of teams that compute experts where their weights lie."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from hwmodels.host_cost import CPUWork
from sim.clock import LOAD_ENDED, Clock, Event
from sim.sharing import Shares, Use


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
    on_end
        Told (key, team, begin_ns) when an expert has been computed.

    ``lost_ns`` adds up, for each team, the time lost to full memory.
    """

    def __init__(
        self,
        clock: Clock,
        shares: Shares,
        num_teams: int,
        node_of_key: Sequence[int],
        uses: Sequence[Sequence[Use]],
        on_end: Callable[[int, int, int], None],
    ) -> None:
        num_nodes = max(node_of_key, default=0) + 1
        self.busy_ns = 0
        self._clock = clock
        self._shares = shares
        self._node_of_key = node_of_key
        self._uses = uses
        self._on_end = on_end
        self._waiting: list[deque[tuple[int, CPUWork]]] = [deque() for _ in range(num_nodes)]
        self.lost_ns = [0] * (num_nodes * num_teams)
        self._idle = [
            deque(range(node * num_teams, (node + 1) * num_teams)) for node in range(num_nodes)
        ]

    def submit(self, key: int, work: CPUWork) -> None:
        """Queue one expert on its node."""
        node = self._node_of_key[key]
        self._waiting[node].append((key, work))
        self._start(node)

    def _start(self, node: int) -> None:
        while self._idle[node] and self._waiting[node]:
            team = self._idle[node].popleft()
            key, work = self._waiting[node].popleft()
            self._run(team, key, work)

    def _run(self, team: int, key: int, work: CPUWork) -> None:
        begin_ns = self._clock.now

        def set_up(_: Any) -> None:
            self._shares.start(work.num_bytes, work.bytes_per_s, self._uses[key], streamed)

        def streamed(lost_ns: int) -> None:
            self.lost_ns[team] += lost_ns
            left_ns = begin_ns + work.least_ns - self._clock.now
            if left_ns > 0:  # operations bind, not bytes
                self._clock.schedule(Event(done), LOAD_ENDED, left_ns)
            else:
                done(None)

        def done(_: Any) -> None:
            self.busy_ns += self._clock.now - begin_ns
            node = self._node_of_key[key]
            self._idle[node].append(team)
            self._on_end(key, team, begin_ns)
            self._start(node)

        if work.setup_ns:
            self._clock.schedule(Event(set_up), LOAD_ENDED, work.setup_ns)
        else:
            set_up(None)
