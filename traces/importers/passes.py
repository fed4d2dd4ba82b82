"""From the stream of an engine's forward passes, layer after layer of each, to requests.

llama.cpp's callbacks and patched engines write like that: a layer's rows of one pass together, the layers in
order, then the next pass. A pass of several tokens is a prompt or a part of one, a pass of one is decode.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from traces.importers.cells import EMPTY
from traces.importers.routed import Routed
from traces.trace import TraceError


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass.

    Attributes
    ----------
    expert_ids
        int32[num_tokens, num_layers, k]; ``EMPTY`` where a layer ran for the last tokens only.
    is_prompt
        Whether its tokens are of a prompt.
    begins
        Whether it is known to begin a request.
    """

    expert_ids: NDArray[np.int32]
    is_prompt: bool
    begins: bool = False

    def __len__(self) -> int:
        return len(self.expert_ids)


def passes_of(
    layer: NDArray[np.integer],
    ids: NDArray[np.int32],
    file: str,
    *,
    is_prompt: NDArray[np.bool_] | None = None,
    token: NDArray[np.integer] | None = None,
) -> tuple[list[Pass], tuple[int, ...], list[str]]:
    """Split rows [num_rows] and [num_rows, k] in file order into passes.

    ``is_prompt`` of the rows (without it, a pass of several tokens is a prompt's) and ``token``, their places
    in their request, are for sources that tell them. Returns the passes, the indices of the layers, and what
    was repaired: a last pass that broke off is dropped.

    Raises
    ------
    TraceError
        If passes differ in their layers, layers of a pass in their tokens (the last layer may have fewer:
        an engine computes it for the tokens that are sampled from), or there is one layer only, so that
        nothing parts the passes.
    """
    edges = np.concatenate([[0], np.flatnonzero(np.diff(layer)) + 1, [len(layer)]])
    ends = edges[1:].tolist()
    runs = list(zip(layer[edges[:-1]].tolist(), edges[:-1].tolist(), ends, strict=True))
    layers = tuple(sorted({run[0] for run in runs}))
    if len(layers) == 1:
        raise TraceError(
            f"{file}: has layer {layers[0]} only: nothing parts the tokens of one pass from the next"
        )
    found: list[Pass] = []
    for part in _split(runs):
        if [run[0] for run in part] != list(layers):
            if part[-1][2] == len(layer) and found:
                what = f"the last pass broke off at layer {part[-1][0]} and was dropped"
                return found, layers, [f"repaired: {what}"]
            _refuse_layers(part, layers, len(found), file)
        grid, first = _grid(part, ids, len(found), file), part[0][1]
        prompt = len(grid) > 1 if is_prompt is None else bool(is_prompt[first])
        found.append(Pass(grid, prompt, token is not None and token[first] == 0))
    return found, layers, []


_Run = tuple[int, int, int]  # layer, first row, row behind the last


def _split(runs: list[_Run]) -> list[list[_Run]]:
    """Begin a pass wherever a layer does not exceed the one before it."""
    parts: list[list[_Run]] = []
    for run in runs:
        if not parts or run[0] <= parts[-1][-1][0]:
            parts.append([])
        parts[-1].append(run)
    return parts


def _refuse_layers(part: list[_Run], layers: tuple[int, ...], place: int, file: str) -> None:
    absent = sorted({*layers} - {run[0] for run in part})
    raise TraceError(
        f"{file}: row {part[0][1]}: pass {place} lacks layer {absent[0]}: must have all of the "
        f"{len(layers)} layers that the file names"
    )


def _grid(part: list[_Run], ids: NDArray[np.int32], place: int, file: str) -> NDArray[np.int32]:
    num_tokens = part[0][2] - part[0][1]
    out = np.full((num_tokens, len(part), ids.shape[1]), EMPTY, dtype=np.int32)
    for at, (layer, start, stop) in enumerate(part):
        rows = stop - start
        if rows != num_tokens and not (at == len(part) - 1 and rows < num_tokens):
            rule = f"must be {num_tokens}, as layer {part[0][0]}"
            where = f"row {start}: layer {layer} has {rows} tokens in pass {place}"
            raise TraceError(f"{file}: {where}: {rule}")
        out[num_tokens - rows :, at] = ids[start:stop]
    return out


def requests_of(passes: list[Pass]) -> list[Routed]:
    """Join passes of one sequence after another to requests: a prompt, maybe in parts, then decode.

    A request begins with a prompt that comes after decode, and where a pass says so.
    """
    parts: list[list[Pass]] = []
    for one in passes:
        if not parts or one.begins or (one.is_prompt and not parts[-1][-1].is_prompt):
            parts.append([])
        parts[-1].append(one)
    return [_joined(part, f"request {number}") for number, part in enumerate(parts)]


def _joined(parts: list[Pass], name: str) -> Routed:
    ids = np.concatenate([part.expert_ids for part in parts])
    return Routed(name, ids, sum(len(part) for part in parts if part.is_prompt))


def without_flat_prompts(
    requests: list[Routed], passes: list[Pass], num_experts: int, file: str
) -> tuple[list[Routed], list[str]]:
    """Drop the prompts of requests if the passes hold whole rankings instead of each token's top-k.

    llama.cpp's ``ffn_moe_topk`` is a strided view of an argsort. Read flat, a pass of n tokens gives the
    first n * k entries of all rankings laid end to end: no expert twice in a ranking. One token gives its
    top-k, so that decode is right.

    Raises
    ------
    TraceError
        If nothing but such prompts is there.
    """
    if not _are_rankings(passes, num_experts):
        return requests, []
    kept = [one.without_first(one.num_prompt) for one in requests if len(one) > one.num_prompt]
    what = (
        "hold whole rankings of the experts, not the router's top-k (a strided view was read flat)"
    )
    if not kept:
        raise TraceError(f"{file}: the prompt rows {what}, and there is no decode")
    rows = sum(one.num_prompt for one in requests)
    return kept, [f"repaired: {rows} prompt rows were dropped: they {what}; decode rows are right"]


_LEAST_LOG_CHANCE = -20.0
"""Logarithm of the chance that real choices look like rankings, above which nothing is said of them."""


def _are_rankings(passes: list[Pass], num_experts: int) -> bool:
    """Tell whether no ranking that the passes would hold names an expert twice, which chance does not do."""
    log_chance = 0.0
    for one in passes:
        if len(one) == 1:
            continue
        num_layers, top_k = one.expert_ids.shape[1:]
        for layer in range(num_layers):
            flat = one.expert_ids[:, layer].reshape(-1)
            flat = flat[flat != EMPTY]
            for at in range(0, len(flat), num_experts):
                block = flat[at : at + num_experts]
                if len(np.unique(block)) < len(block):
                    return False
                named = np.arange(0, len(block), top_k)
                log_chance += top_k * float(np.log1p(-np.minimum(named / num_experts, 0.99)).sum())
    return log_chance < _LEAST_LOG_CHANCE
