"""The tokens of one layer on their way through its experts: gathered, computed, put back, combined."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from real.pairs import NOTHING, Groups, ManyTokens, OneToken, Packed, Scattered
from sim.types import NO_EXPERT

if TYPE_CHECKING:
    from real.experts import ExpertWeights
    from real.kernels import Kernels
    from sim.types import KeySpace, LayerRouting

Combine = Literal["by_slot", "by_expert"]


class LayerTokens:
    """Which tokens each expert of a layer serves, and what the experts made of them.

    A token that has an expert in two slots (which only a rewritten routing does) is computed once and
    counts in both. A dropped slot (NO_EXPERT) gives nothing.

    Parameters
    ----------
    hidden
        The layer's input, [num_tokens, hidden_size].
    routing
        What is computed.
    keys
        Names of experts.
    weights
        Weights by token and slot that the model's router gave, [num_tokens, top_k]; None: those of
        ``routing``, or 1 / top_k where there are none.
    packed
        Tokens are laid out expert by expert once, and back once; else every expert gathers and scatters.
    groups
        A partition of the tokens into micro-batches, which an expert computes one after another; None
        is one of all tokens.
    combine
        "by_slot": one sum over the slots, as the models' grouped code does; "by_expert": one after
        another by ascending key, rounded each time, as their eager code does. Bits are equal to theirs.
    rewritten
        ``routing`` is a policy's: its weights count, if it has any, even if ``weights`` are given.
    only
        Keys that count, all others being as dropped; None: all.
    """

    def __init__(
        self,
        hidden: Tensor,
        routing: LayerRouting,
        keys: KeySpace,
        weights: Tensor | None = None,
        packed: bool = False,
        groups: Groups | None = None,
        combine: Combine = "by_slot",
        *,
        rewritten: bool = False,
        only: Collection[int] | None = None,
    ) -> None:
        self.hidden = hidden = hidden.detach()
        self.num_pairs_done = 0
        self._by_expert = combine == "by_expert"
        self._pairs: OneToken | ManyTokens
        if len(hidden) == 1:
            self._pairs = OneToken(hidden, _chosen_by_one(routing, keys, only), self._by_expert)
        else:
            kind = Packed if packed else Scattered
            chosen = _chosen(routing, keys, len(hidden), only)
            self._pairs = kind(hidden, chosen, groups, self._by_expert)
        self._weights = _weights(hidden, routing, weights, rewritten, self._pairs.top_k)
        self._to_do = dict(self._pairs.num_pairs)

    # -- compute -----------------------------------------------------------------------------------

    def run(self, kernels: Kernels, key: int, weights: ExpertWeights) -> None:
        """Compute one expert, all micro-batches of its tokens one after another."""
        self._check_off(key)
        self._pairs.run(kernels, key, weights)

    def run_many(
        self, kernels: Kernels, keys: Sequence[int], stacked: ExpertWeights, slots: Sequence[int]
    ) -> None:
        """Compute experts that are ready together: ``keys[i]`` lies in slot ``slots[i]`` of ``stacked``."""
        for key in keys:
            self._check_off(key)
        if keys:
            self._pairs.run_many(kernels, sorted(zip(slots, keys, strict=True)), stacked)

    def rows(self, key: int) -> list[Tensor]:
        """Return an expert's tokens by micro-batch, [n, hidden_size] each, to be computed elsewhere."""
        return self._pairs.rows(key)

    def put(self, key: int, results: Sequence[Tensor]) -> None:
        """Take what was made elsewhere of :meth:`rows`, on the device of the layer's input."""
        self._check_off(key)
        self._pairs.put(key, results)

    # -- result ------------------------------------------------------------------------------------

    def done(self) -> None:
        """Raise RuntimeError unless each (token, chosen expert) was computed exactly once."""
        if self._to_do:
            raise RuntimeError(f"experts never computed: keys {sorted(self._to_do)}")

    def output(self) -> Tensor:
        """Return the layer's output, [num_tokens, hidden_size], in the dtype of its input."""
        self.done()
        if not self.num_pairs_done:
            return torch.zeros_like(self.hidden)
        made = self._pairs.made()  # [num_tokens, columns, hidden_size]
        weighted = made * self._pairs.in_columns(self._weights).unsqueeze(-1)
        if not self._by_expert:
            return weighted.sum(dim=1).to(self.hidden.dtype)
        total = torch.zeros_like(self.hidden)
        for column in weighted.to(self.hidden.dtype).unbind(1):
            total += column
        return total

    def _check_off(self, key: int) -> None:
        number = self._to_do.pop(key, None)
        if number is None:
            raise RuntimeError(f"key {key} is computed twice, or no token of this layer chose it")
        self.num_pairs_done += number


def _chosen(
    routing: LayerRouting, keys: KeySpace, num_tokens: int, only: Collection[int] | None
) -> NDArray[np.int64]:
    """Return the keys by token and slot, NOTHING for none, int64[num_tokens, top_k]."""
    ids = routing.topk_ids
    if ids is None:
        raise ValueError(f"layer {routing.layer}: this routing has no topk_ids")
    if len(ids) != num_tokens:
        raise ValueError(f"layer {routing.layer}: {len(ids)} tokens routed, {num_tokens} given")
    table = ids.astype(np.int64) + routing.layer * keys.num_experts
    low = routing.low_slots
    if low is not None:
        table += np.where(low, keys.low(0), 0)
    table[ids == NO_EXPERT] = NOTHING
    if only is not None:
        table[~np.isin(table, list(only))] = NOTHING
    return table


def _chosen_by_one(
    routing: LayerRouting, keys: KeySpace, only: Collection[int] | None
) -> list[int]:
    """Return the keys of a single token by slot, NOTHING for none."""
    rows, low = routing.id_rows(), routing.low_rows()
    if rows is None:  # one token's experts are its slots, in order
        chosen = list(routing.experts)
    elif len(rows) != 1:
        raise ValueError(f"layer {routing.layer}: {len(rows)} tokens routed, 1 given")
    else:
        first, apart = routing.layer * keys.num_experts, keys.low(0)
        chosen = [NOTHING if expert == NO_EXPERT else first + expert for expert in rows[0]]
        if low is not None:
            marked = zip(chosen, low[0], strict=True)
            chosen = [key + apart if mark and key != NOTHING else key for key, mark in marked]
    return chosen if only is None else [key if key in only else NOTHING for key in chosen]


def _weights(
    hidden: Tensor, routing: LayerRouting, weights: Tensor | None, rewritten: bool, top_k: int
) -> Tensor:
    """Return the weights that count, [num_tokens, top_k], on the device of ``hidden``."""
    if weights is None or rewritten:
        applied = routing.topk_weights
        if applied is not None:
            return torch.tensor(applied, dtype=torch.float32).to(hidden.device, non_blocking=True)
    if weights is not None:
        return weights.detach()
    return torch.full((len(hidden), top_k), 1 / top_k, device=hidden.device)
