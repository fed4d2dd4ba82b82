"""From rows of one token and layer each, in whatever order a source wrote them, to requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from traces.importers.routed import Routed
from traces.trace import TraceError

EMPTY = -1
"""What stands for "no expert in this slot" before ids become unsigned."""


@dataclass(slots=True, kw_only=True)
class Cells:
    """Rows of a source, one a token and layer; ``num_cells`` of them in file order.

    Attributes
    ----------
    request
        int64[num_cells], numbers from 0 in order of appearance.
    token
        int64[num_cells], the token's place in its request as the source counts it.
    layer
        int64[num_cells], as the source counts it.
    expert_ids
        int32[num_cells, slots]; ``EMPTY`` where a slot holds no expert.
    expert_weights
        float32 like ``expert_ids``.
    router_logits
        float32[num_cells, num_experts].
    of_token
        Values [num_cells] that all layers of a token share, by name; those of a token's first row count.
    """

    request: NDArray[np.int64]
    token: NDArray[np.int64]
    layer: NDArray[np.int64]
    expert_ids: NDArray[np.int32]
    expert_weights: NDArray[np.float32] | None = None
    router_logits: NDArray[np.float32] | None = None
    of_token: dict[str, NDArray[np.int64]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pivoted:
    """One request of the cells: its routing, and what its tokens have beside it."""

    routed: Routed
    of_token: dict[str, NDArray[np.int64]]


def pivot(
    cells: Cells, file: str, name_of: Callable[[int], str]
) -> tuple[list[Pivoted], tuple[int, ...]]:
    """Return the requests in order of appearance, all tokens prompt yet, and the layers' indices.

    A layer that a token has no row for is empty there. ``name_of`` gives what errors call a request.

    Raises
    ------
    TraceError
        If a token has a layer twice, or a request lacks a token between others.
    """
    layers, layer = np.unique(cells.layer, return_inverse=True)
    lowest, span = int(cells.token.min()), int(np.ptp(cells.token)) + 1
    key = cells.request * span + (cells.token - lowest)
    _, first, row = np.unique(key, return_index=True, return_inverse=True)
    tokens = np.stack([cells.request[first], cells.token[first]], axis=1)
    _refuse_twice(cells, row * len(layers) + layer, file, name_of)
    _refuse_gaps(tokens, file, name_of)
    shape = (len(tokens), len(layers))
    ids = _scattered(cells.expert_ids, row, layer, shape, EMPTY)
    weights = _scattered(cells.expert_weights, row, layer, shape, 0)
    logits = _scattered(cells.router_logits, row, layer, shape, 0)
    of_token = {name: values[first] for name, values in cells.of_token.items()}
    found = []
    edges = [0, *(np.flatnonzero(np.diff(tokens[:, 0])) + 1).tolist(), len(tokens)]
    for start, stop in pairwise(edges):
        rows = slice(start, stop)
        assert ids is not None
        routed = Routed(
            name_of(int(tokens[start, 0])),
            ids[rows],
            stop - start,
            None if weights is None else weights[rows],
            router_logits=None if logits is None else logits[rows],
            first_position=int(tokens[start, 1]),
        )
        found.append(Pivoted(routed, {name: values[rows] for name, values in of_token.items()}))
    return found, tuple(layers.tolist())


def _scattered(
    values: NDArray | None,
    row: NDArray[np.intp],
    layer: NDArray[np.intp],
    shape: tuple[int, int],
    fill: int,
) -> NDArray | None:
    if values is None:
        return None
    out = np.full((*shape, values.shape[1]), fill, dtype=values.dtype)
    out[row, layer] = values
    return out


def _refuse_twice(
    cells: Cells, place: NDArray[np.integer], file: str, name_of: Callable[[int], str]
) -> None:
    _, first, count = np.unique(place, return_index=True, return_counts=True)
    if count.max() > 1:
        at = int(first[count > 1].min())
        where = f"token {cells.token[at]}, layer {cells.layer[at]}"
        raise TraceError(
            f"{file}: {name_of(int(cells.request[at]))}: {where} is there {int(count.max())} times: must be "
            "once (recordings joined into one file, or a counter that began anew?)"
        )


def _refuse_gaps(tokens: NDArray[np.int64], file: str, name_of: Callable[[int], str]) -> None:
    """``tokens`` are the sorted (request, token)."""
    steps = np.diff(tokens, axis=0)
    gap = np.flatnonzero((steps[:, 0] == 0) & (steps[:, 1] != 1))
    if len(gap):
        request, token = tokens[gap[0]].tolist()
        found = int(tokens[gap[0] + 1, 1])
        raise TraceError(
            f"{file}: {name_of(request)}: token {found} follows token {token}: must be {token + 1}"
        )
    if (tokens[:, 1] < 0).any():
        request, token = tokens[int(np.argmax(tokens[:, 1] < 0))].tolist()
        raise TraceError(f"{file}: {name_of(request)}: token is {token}: must be >= 0")


def padded(rows: Sequence[Sequence[float]], fill: float, dtype: type[np.generic]) -> NDArray:
    """Return lists of numbers as an array [len(rows), longest], ``fill`` behind the short ones."""
    lengths = np.array([len(row) for row in rows])
    width = int(lengths.max(initial=0))
    flat = np.array([value for row in rows for value in row], dtype=dtype)
    if (lengths == width).all():
        return flat.reshape(len(rows), width)
    out = np.full((len(rows), width), fill, dtype=dtype)
    out[np.arange(width) < lengths[:, None]] = flat
    return out


def codes(names: Sequence[object]) -> tuple[NDArray[np.int64], list[object]]:
    """Return the number of each name, from 0 in order of appearance, and the names by number."""
    numbers: dict[object, int] = {}
    found = np.fromiter((numbers.setdefault(name, len(numbers)) for name in names), dtype=np.int64)
    return found, list(numbers)


def top_of(
    probabilities: NDArray[np.floating], top_k: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return the ids of the ``top_k`` largest of each row, largest first, and their values."""
    order = np.argsort(-probabilities, axis=-1, kind="stable")[..., :top_k]
    values = np.take_along_axis(probabilities, order, -1)
    return order.astype(np.int32), values.astype(np.float32)
