"""Refuses recordings that no router can have produced, whatever format they come in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from traces.schema import TraceError

# Below these, a partition may well be chance (4 experts, top-2: one pair of rows in six).
_LEAST_ROWS_A_RANKING = 3
_LEAST_RANKINGS = 16


def refuse_rankings(
    ids: NDArray[np.integer] | Sequence[NDArray[np.integer]], num_experts: int, name: str
) -> None:
    """Refuse ids that are whole rankings laid end to end.

    llama.cpp's ``ffn_moe_topk`` is a strided view of an argsort; read flat, it gives the full
    ranking of token 0, then of token 1, and so on: every ``num_experts`` ids name each expert
    once, and a cache looks hopeless. ``ids`` is [num_layers, num_tokens, top_k], the tokens of one
    forward pass or of several, all of it present; or a sequence of such, each of which began a pass,
    with as many layers and slots.
    """
    parts = [ids] if isinstance(ids, np.ndarray) else list(ids)
    if not parts or num_experts < _LEAST_ROWS_A_RANKING * parts[0].shape[2]:
        return
    whole, rankings = 0, 0
    for part in parts:
        num_layers, num_tokens, top_k = part.shape
        per_layer = num_tokens * top_k // num_experts
        flat = part.reshape(num_layers, -1)[:, : per_layer * num_experts]
        blocks = np.sort(flat.reshape(num_layers, per_layer, num_experts), axis=-1)
        whole += int((blocks == np.arange(num_experts)).all(axis=-1).sum())
        rankings += num_layers * per_layer
    if rankings >= _LEAST_RANKINGS and whole > rankings / 2:
        raise TraceError(
            f"{name}: {whole / rankings:.0%} of the runs of {num_experts} ids name every expert once: "
            "the file holds whole argsort rows, not the router's top-k (a strided view was read flat)"
        )
