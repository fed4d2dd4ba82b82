"""When experts are used next, for a cache that knows: looked for in events that wait to be replayed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from traces.locality_events import Block
from traces.schema import NO_EXPERT

HOLE = np.int32(2**31 - 1)
"""An empty place; larger than every value."""


class Step(NamedTuple):
    """One event: its time, int32[num_layers, width] values ascending by layer, and if it is counted."""

    now: int
    values: NDArray[np.int32]
    counted: bool


class Future:
    """Events in wait, and the values of the experts they use.

    A value is an expert's next use times ``num_experts`` plus the expert, so that values are distinct
    and sort by time; an expert that no waiting event uses has a value behind all of these. Times
    count from the first waiting event.

    Parameters
    ----------
    num_layers, num_experts
        The shape.
    lookahead_uses
        Uses that are kept in wait behind the event that is replayed.
    """

    def __init__(self, num_layers: int, num_experts: int, lookahead_uses: int) -> None:
        self._layers, self._experts = num_layers, num_experts
        self._lookahead_uses = lookahead_uses
        self._most_events = 2**29 // num_experts  # values fit in int32
        self._far = np.int32(2**30 // num_experts * num_experts)
        self._blocks: list[Block] = []
        self._replayed = 0  # events since the last renewal

    @property
    def num_waiting(self) -> int:
        """Number of events that wait."""
        return sum(map(len, self._blocks))

    @property
    def is_ready(self) -> bool:
        """Whether there are events whose future is known far enough."""
        if len(self._blocks) < 2:
            return False
        uses = sum(block.ids.size for block in self._blocks)
        return uses >= 2 * self._lookahead_uses or self.num_waiting >= self._most_events

    def append(self, block: Block) -> None:
        """Let events wait."""
        self._blocks.append(block)

    def play(self, values: NDArray[np.int32], whole: bool) -> Iterator[Step]:
        """Bring ``values`` of any shape [..., num_layers] up to date, in place, and yield events.

        All that wait where ``whole`` (nothing comes after), else those with enough behind them. After
        a step its experts' values are those that it brings.
        """
        known = values < self._far
        values[known] -= np.int32(self._replayed * self._experts)
        next_use, first_use = self._next_uses()
        self._renew(values, first_use)
        kept = 0 if whole else self._kept_blocks()
        blocks, self._blocks = self._blocks, self._blocks[len(self._blocks) - kept :]
        now = 0
        for block, values_of in zip(blocks[: len(blocks) - kept], next_use, strict=False):
            for event, counted in zip(values_of, block.counted, strict=True):
                yield Step(now, event, bool(counted))
                now += 1
        self._replayed = now

    def _kept_blocks(self) -> int:
        """Return how many blocks at the end stay in wait."""
        uses = 0
        for kept, block in enumerate(reversed(self._blocks)):
            if uses >= self._lookahead_uses:
                return kept
            uses += block.ids.size
        return len(self._blocks) - 1

    def _renew(self, values: NDArray[np.int32], first_use: NDArray[np.int32]) -> None:
        """Give experts of unknown future the first use that has come to be known."""
        *place, layer = np.nonzero((values >= self._far) & (values < HOLE))
        at = (*place, layer)
        values[at] = first_use[layer, values[at] - self._far]

    def _next_uses(self) -> tuple[list[NDArray[np.int32]], NDArray[np.int32]]:
        """Return values by block, sorted by layer, and those of each expert's first waiting use."""
        found = [np.empty(block.ids.shape, dtype=np.int32) for block in self._blocks]
        first = np.empty((self._layers, self._experts), dtype=np.int32)
        first[:] = self._far + np.arange(self._experts, dtype=np.int32)
        times = self._times()
        edges = np.cumsum([part[:, 0].size for part in found])[:-1]
        for layer in range(self._layers):
            ids = np.concatenate([block.ids[:, layer].ravel() for block in self._blocks])
            values = self._values(ids, times, first[layer])
            for part, own in zip(found, np.split(values, edges), strict=True):
                part[:, layer] = own.reshape(part[:, layer].shape)
        return [np.sort(part, axis=2) for part in found], first

    def _times(self) -> NDArray[np.int32]:
        """Return the time of each use of a layer, in file order."""
        widths = [np.full(len(block), block.ids.shape[2]) for block in self._blocks]
        return np.repeat(np.arange(self.num_waiting, dtype=np.int32), np.concatenate(widths))

    def _values(
        self, ids: NDArray[np.uint16], times: NDArray[np.int32], first: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """Return the values of one layer's uses after each; fill in ``first``."""
        order = np.argsort(ids, kind="stable")
        grouped, when = ids[order], times[order]
        again = grouped[1:] == grouped[:-1]
        values = np.empty(len(ids), dtype=np.int32)
        follows = np.full(len(ids), self._far, dtype=np.int32)
        follows[:-1][again] = when[1:][again] * np.int32(self._experts)
        values[order] = follows + grouped
        values[ids == NO_EXPERT] = HOLE
        starts = np.flatnonzero(np.concatenate([[True], ~again]))
        starts = starts[grouped[starts] != NO_EXPERT]
        first[grouped[starts]] = when[starts] * np.int32(self._experts) + grouped[starts]
        return values
