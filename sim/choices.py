"""What is recorded of one step's tokens, as arrays or as plain lists, which are faster for few tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from traces.schema import NO_EXPERT, Trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.routing import LayerRouting
    from sim.types import KeySpace

Rows = list[list[Any]]
"""A table as lists, one a token; they may be shared, so nobody changes them."""
FEW_TOKENS = 64
"""Up to so many tokens plain lists are faster than arrays, and are kept for the step."""


class Choices:
    """What the routers said of one step's tokens in all layers; a column is read when it is asked for.

    Parameters
    ----------
    trace
        Where it is recorded.
    rows
        The step's tokens.
    order
        What puts an event's experts in order; None leaves them.
    """

    __slots__ = ("_columns", "_lists", "_rows", "_trace", "order")

    def __init__(
        self,
        trace: Trace,
        rows: slice | NDArray[np.intp],
        order: Callable[[LayerRouting], LayerRouting] | None = None,
    ) -> None:
        self.order = order
        self._trace = trace
        self._rows = rows
        self._columns: dict[str, NDArray[Any] | None] = {}
        self._lists: dict[str, list[Rows | None]] = {}  # by layer

    def column(self, name: str) -> NDArray[Any] | None:
        """Return the step's part of a trace column, [num_tokens, num_layers, ...]; None if not recorded."""
        if name not in self._columns:
            whole = getattr(self._trace, name)
            part = None if whole is None else whole[self._rows]
            if part is not None:
                part.flags.writeable = False  # policies read it
            self._columns[name] = part
        return self._columns[name]

    def rows(self, name: str, layer: int) -> Rows | None:
        """Return a layer's part of a column as lists, one a token; None if not recorded."""
        known = self._lists.get(name)
        if known is not None and (rows := known[layer]) is not None:
            return rows
        whole = self.column(name)
        if whole is None:
            return None
        if len(whole) == 1:  # all layers at one time
            known = self._lists[name] = [[row] for row in whole[0].tolist()]
            return known[layer]
        rows = whole[:, layer].tolist()
        if len(rows) <= FEW_TOKENS:
            if known is None:
                known = self._lists[name] = [None] * whole.shape[1]
            known[layer] = rows
        return rows


TableOrRows = NDArray[Any] | Rows
"""Either form of a table, by token."""


def as_array(table: TableOrRows | None, dtype: type) -> NDArray[Any] | None:
    """Return a table as an array; None for none."""
    return np.array(table, dtype=dtype) if isinstance(table, list) else table


def as_rows(table: TableOrRows | None) -> Rows | None:
    """Return a table as lists, one a token; None for none."""
    return table if table is None or isinstance(table, list) else table.tolist()


def used_keys(
    keys: KeySpace, layer: int, ids: TableOrRows, low: TableOrRows | None
) -> tuple[list[int], list[int]]:
    """Return the distinct keys of a layer's slots and how many tokens each serves."""
    if len(ids) > FEW_TOKENS:
        return _used_by_many(keys, layer, np.asarray(ids), None if low is None else np.asarray(low))
    first, apart = layer * keys.num_experts, keys.low(0)
    rows, marks = as_rows(ids), as_rows(low)
    assert rows is not None
    counts: dict[int, int] = {}
    for token, row in enumerate(rows):
        chosen = [first + expert for expert in row if expert != NO_EXPERT]
        if marks is not None:
            used = [mark for mark, e in zip(marks[token], row, strict=True) if e != NO_EXPERT]
            chosen = [k + apart if mark else k for k, mark in zip(chosen, used, strict=True)]
        if len(rows) == 1:  # in the router's order; two slots may have become the same expert
            chosen = list(dict.fromkeys(chosen))
            return chosen, [1] * len(chosen)
        for key in set(chosen):
            counts[key] = counts.get(key, 0) + 1
    experts = sorted(counts)
    return experts, [counts[key] for key in experts]


def _used_by_many(
    keys: KeySpace, layer: int, ids: NDArray[np.integer], low: NDArray[np.bool_] | None
) -> tuple[list[int], list[int]]:
    table = ids.astype(np.int64) + layer * keys.num_experts
    if low is not None:
        table += np.where(low, keys.low(0), 0)
    used = ids != NO_EXPERT
    flat = table[used]
    table[~used] = -1
    table.sort(axis=1)
    again = (table[:, 1:] == table[:, :-1]) & (table[:, 1:] >= 0)
    if again.any():  # a token that has an expert in two slots counts once
        flat = np.concatenate([table[:, 0], table[:, 1:][~again]])
        flat = flat[flat >= 0]
    found, counts = np.unique(flat, return_counts=True)
    return found.tolist(), counts.tolist()
