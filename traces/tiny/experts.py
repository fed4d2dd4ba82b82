"""Sorted expert computation for training on a CPU: one small matrix product per expert.

Registered with transformers as the experts implementation ``greenroom_sorted``. It gives the
same result as the library's ``eager`` one (up to float order) with far fewer calls, because the
backward pass is written by hand and reuses the sorted buffers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

IMPLEMENTATION = "greenroom_sorted"


def _grouped(rows: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
    """Multiply each expert's slice of ``rows`` (S, A) by its ``weights`` (E, A, B): (S, B)."""
    out = rows.new_empty(rows.shape[0], weights.shape[2])
    start = 0
    for expert, count in enumerate(counts):
        if count:
            stop = start + count
            torch.mm(rows[start:stop], weights[expert], out=out[start:stop])
            start = stop
    return out


def _grouped_weight_grad(left: Tensor, right: Tensor, counts: list[int]) -> Tensor:
    """Sum of outer products per expert, from (S, A) and (S, B): (E, A, B)."""
    out = left.new_zeros(len(counts), left.shape[1], right.shape[1])
    start = 0
    for expert, count in enumerate(counts):
        if count:
            stop = start + count
            torch.mm(left[start:stop].t(), right[start:stop], out=out[expert])
            start = stop
    return out


class SortedExperts(torch.autograd.Function):
    """Gated expert MLPs over tokens (T, H) with top-k ids and weights (T, K): (T, H)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, scores: Tensor
    ) -> Tensor:
        """Sort the T*K (token, expert) pairs by expert, multiply, and scatter back."""
        k, flat = ids.shape[1], ids.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=gate_up.shape[0]).tolist()
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel(), device=order.device)
        rows = x.index_select(0, order // k)
        pre = _grouped(rows, gate_up.transpose(1, 2), counts)
        gate, up = pre.chunk(2, dim=1)
        weight = scores.reshape(-1, 1).index_select(0, order)
        # The routing weight is applied to the narrow hidden layer: the product is linear in it.
        hidden = nn.functional.silu(gate) * up
        pairs = _grouped(hidden * weight, down.transpose(1, 2), counts)
        ctx.save_for_backward(rows, pre, hidden, weight, gate_up, down, order, place)
        ctx.counts, ctx.k = counts, k
        return pairs.index_select(0, place).view(-1, k, x.shape[1]).sum(dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for the tokens, both weight tensors and the routing weights."""
        rows, pre, hidden, weight, gate_up, down, order, place = ctx.saved_tensors
        gate, up = pre.chunk(2, dim=1)
        d_pairs = grads[0].index_select(0, order // ctx.k)
        wanted = ctx.needs_input_grad  # frozen experts want none: fine-tuning only the routers
        d_down = _grouped_weight_grad(d_pairs, hidden * weight, ctx.counts) if wanted[2] else None
        d_weighted = _grouped(d_pairs, down, ctx.counts)
        d_scores = (d_weighted * hidden).sum(dim=1).index_select(0, place).view(-1, ctx.k)
        d_hidden = d_weighted * weight
        sigmoid = torch.sigmoid(gate)
        d_silu = sigmoid * (1 + gate * (1 - sigmoid))
        d_pre = torch.cat([d_hidden * up * d_silu, d_hidden * gate * sigmoid], dim=1)
        d_gate_up = _grouped_weight_grad(d_pre, rows, ctx.counts) if wanted[1] else None
        d_rows = _grouped(d_pre, gate_up, ctx.counts).index_select(0, place)
        d_x = d_rows.view(-1, ctx.k, rows.shape[1]).sum(dim=1)
        return d_x, d_gate_up, d_down, None, d_scores


def sorted_experts_forward(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Adapter with the signature that transformers gives its experts functions."""
    result: Tensor = SortedExperts.apply(
        hidden_states, module.gate_up_proj, module.down_proj, top_k_index, top_k_weights
    )
    return result


def register() -> str:
    """Make the implementation known to transformers and return its name."""
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, sorted_experts_forward)
    return IMPLEMENTATION
