"""Forward passes of a batching engine that names no requests, and what can be told of requests from them.

A pass is the rows of all requests that ran together, packed: whole prompts, then a token of each running
request. Order alone links the rows of one pass to the next, and nothing says which request left when a batch
becomes smaller.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from traces.importers.cells import Cells
from traces.importers.passes import passes_of
from traces.importers.routed import Routed
from traces.trace import TraceError

_PROMPT_SHARE = 4
"""A pass with more than so many times the rows of the next one is a prompt's, for a batch shrinks slowly."""

LEAST_WARM_UP = 16
"""Equal rows, one after another, that are taken for a warm-up on one token."""


@dataclass(frozen=True, slots=True)
class RowPass:
    """One pass: ids int32[num_tokens, num_layers, k] and, if there are, weights like them."""

    expert_ids: NDArray[np.int32]
    expert_weights: NDArray[np.float32] | None

    def __len__(self) -> int:
        return len(self.expert_ids)


def is_running(cells: Cells) -> bool:
    """Tell whether each request counts its tokens on, over the whole file, so that they can be believed.

    Not so where a (request, token, layer) comes again, and where most requests have one token: then a request
    is a call.
    """
    key = np.stack([cells.request, cells.token, cells.layer], axis=1)
    if len(np.unique(key, axis=0)) < len(key):
        return False
    tokens = np.bincount(np.unique(key[:, :2], axis=0)[:, 0])
    return len(tokens) == 1 or float((tokens == 1).mean()) <= 0.5


def passes_of_rows(cells: Cells, file: str) -> tuple[list[RowPass], tuple[int, ...]]:
    """Split the rows into passes, which begin where the token does not count on.

    Raises
    ------
    TraceError
        If the layers of a pass differ in their tokens, or a pass does not begin with token 0.
    """
    layers = np.unique(cells.layer)
    if len(layers) == 1:
        grids: list[NDArray[np.integer]] = [rows[:, None] for rows in _restarts(cells, file)]
    else:
        index = np.arange(len(cells.layer), dtype=np.int32)[:, None]
        found, _, _ = passes_of(cells.layer, index, file)
        grids = [one.expert_ids[:, :, 0] for one in found]
        if any((grid < 0).any() for grid in grids):
            raise TraceError(f"{file}: the last layer has fewer tokens than the others in a pass")
    weights = cells.expert_weights
    passes = [
        RowPass(cells.expert_ids[grid], None if weights is None else weights[grid])
        for grid in grids
    ]
    return passes, tuple(layers.tolist())


def _restarts(cells: Cells, file: str) -> list[NDArray[np.intp]]:
    """Return the rows of each pass of a file with one layer."""
    counts_on = (np.diff(cells.token) == 1) & (np.diff(cells.request) == 0)
    starts = np.flatnonzero(np.append(True, ~counts_on))
    wrong = starts[cells.token[starts] != 0]
    if len(wrong):
        at = int(wrong[0])
        raise TraceError(
            f"{file}: route {at}: token_idx is {cells.token[at]}: must count on, or begin a pass with 0"
        )
    return np.split(np.arange(len(cells.token)), starts[1:])


def requests_of_passes(passes: list[RowPass]) -> tuple[list[Routed], list[str]]:
    """Return requests as far as the passes tell them, and notes of what they do not.

    A prompt's pass of a batch is one request; each row of the passes behind it begins one, which goes on
    while the batch keeps its size. A batch of one continues the prompt before it.
    """
    kept = [one for one in passes if not _is_warm_up(one)]
    if not kept:
        return [_prompt(one, step) for step, one in enumerate(passes)], []
    requests: list[Routed] = []
    after_prompt = False
    for start, stop, is_prompt in _stretches(kept):
        steps = np.arange(start, stop)
        if is_prompt:
            requests.append(_prompt(kept[start], start))
        elif after_prompt and len(kept[start]) == 1:
            requests[-1] = _continued(requests[-1], kept[start:stop], steps)
        else:
            requests += _lanes(kept[start:stop], steps)
        after_prompt = is_prompt
    notes = ["a step is a forward pass, as recorded"]
    if len(kept) < len(passes):
        rows = sum(map(len, passes)) - sum(map(len, kept))
        what = f"({len(passes) - len(kept)} passes of equal rows)"
        notes.append(f"repaired: {rows} warm-up rows were dropped {what}")
    if any(len(one) > 1 for one in kept[1:]):
        notes.append(
            "warning: the source names no requests: rows of a batch are linked by their order; prompts of a "
            "pass are run together, and where a batch changes its size requests begin anew"
        )
    return requests, notes


def _is_warm_up(one: RowPass) -> bool:
    """Tell whether a pass ran on one token over and over: an engine's profiling, at each start of it."""
    ids = one.expert_ids
    return len(one) >= LEAST_WARM_UP and bool((ids == ids[0]).all())


def _stretches(passes: list[RowPass]) -> list[tuple[int, int, bool]]:
    """Return (first pass, end, is it a prompt's): one prompt's, or decode as long as it keeps its size."""
    sizes = [0, *map(len, passes), 0]
    found: list[tuple[int, int, bool]] = []
    for at, size in enumerate(sizes[1:-1]):
        before, after = sizes[at], sizes[at + 2]
        is_prompt = size > 1 and (size > before or (after > 0 and size > _PROMPT_SHARE * after))
        if not is_prompt and found and not found[-1][2] and size == before:
            found[-1] = (found[-1][0], at + 1, False)
        else:
            found.append((at, at + 1, is_prompt))
    return found


def _prompt(one: RowPass, step: int) -> Routed:
    return Routed(
        f"pass {step}",
        one.expert_ids,
        len(one),
        one.expert_weights,
        step=np.full(len(one), step),
    )


def _continued(prompt: Routed, passes: list[RowPass], steps: NDArray[np.intp]) -> Routed:
    lane = _lanes(passes, steps)[0]
    weights = lane.expert_weights
    if weights is not None and prompt.expert_weights is not None:
        weights = np.concatenate([prompt.expert_weights, weights])
    return Routed(
        prompt.name,
        np.concatenate([prompt.expert_ids, lane.expert_ids]),
        prompt.num_prompt,
        weights,
        step=np.concatenate([np.asarray(prompt.step), steps]),
    )


def _lanes(passes: list[RowPass], steps: NDArray[np.intp]) -> list[Routed]:
    """Return a request a row of passes of one size."""
    ids = np.stack([one.expert_ids for one in passes])
    given = [one.expert_weights for one in passes]
    weights = None if given[0] is None else np.stack([part for part in given if part is not None])
    return [
        Routed(
            f"row {row} of passes {steps[0]} to {steps[-1]}",
            ids[:, row],
            0,
            None if weights is None else weights[:, row],
            step=steps,
        )
        for row in range(ids.shape[1])
    ]
