"""Tables of whole numbers that need not be held in memory: rows gather in blocks, blocks pass on.

Knows nothing of files or metrics: a *sink* is any callable that takes a block, int64[rows, columns].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from struct import Struct

import numpy as np
from numpy.typing import NDArray

Block = NDArray[np.int64]
"""Rows of a table, int64[rows, columns]."""


class Table:
    """Rows of ints under named columns.

    Parameters
    ----------
    columns
        Their names.
    sink
        Is handed every full block, and the last one at :meth:`close`; the table then keeps none of
        them. None: the table keeps all.
    block_rows
        Rows of a block, >= 1; a sink sees blocks of exactly this size, but for the last.
    """

    __slots__ = ("_block_bytes", "_blocks", "_pack", "_pending", "_sink", "columns")

    def __init__(
        self,
        columns: Sequence[str],
        sink: Callable[[Block], None] | None = None,
        block_rows: int = 4096,
    ) -> None:
        self.columns = tuple(columns)
        self._sink = sink
        self._blocks: list[Block] = []
        # Packing a row costs half of what it costs numpy to take in a tuple.
        row = Struct(f"={len(self.columns)}q")
        self._pack = row.pack
        self._block_bytes = block_rows * row.size
        self._pending = bytearray()

    def append(self, row: tuple[int, ...]) -> None:
        """Add a row, one int a column; struct.error if that is not so, or one has over 64 bits."""
        self._pending += self._pack(*row)
        if len(self._pending) >= self._block_bytes:
            self._pass_on()

    def close(self) -> None:
        """Pass on the rows that still wait; a sink has then seen all."""
        if self._pending:
            self._pass_on()

    def blocks(self) -> Iterator[Block]:
        """Yield all rows in blocks; only of a table that keeps them (it has no sink)."""
        if self._sink is not None:
            raise ValueError("this table has passed its rows on to a sink: read them there")
        yield from self._blocks
        if self._pending:
            yield self._to_block(bytes(self._pending))

    @property
    def rows(self) -> list[tuple[int, ...]]:
        """All rows, as tuples; only of a table that keeps them (it has no sink)."""
        return [tuple(row) for block in self.blocks() for row in block.tolist()]

    def _pass_on(self) -> None:
        block, self._pending = self._to_block(self._pending), bytearray()
        if self._sink is None:
            self._blocks.append(block)
        else:
            self._sink(block)

    def _to_block(self, packed: bytes | bytearray) -> Block:
        return np.frombuffer(packed, dtype=np.int64).reshape(-1, len(self.columns))
