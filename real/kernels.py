"""What one expert computes: the same torch operations as the eager code of the models, so the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from real.grouped import can_group, grouped_experts
from real.int8 import int8_product

if TYPE_CHECKING:
    from real.experts import ExpertFormat, ExpertWeights

Activation = Callable[[Tensor], Tensor]
"""From what the first matrix gives, [n, 2 * intermediate] (or [n, intermediate]), to [n, intermediate]."""


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of the two halves of ``gate_up``, [n, 2 * I] -> [n, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


class Kernels:
    """Computes experts of one format.

    Parameters
    ----------
    format
        How the experts' weights lie: it tells matrices [out, in] from [in, out], and floats from int8.
    activation
        What stands between the two matrices; None is :func:`swiglu` for experts with a gate, else SiLU.
    grouped_on_cpu
        Group on the CPU too, as the models' grouped code does, at the price of the eager code's bits.
    """

    def __init__(
        self,
        format: ExpertFormat,
        activation: Activation | None = None,
        grouped_on_cpu: bool = False,
    ) -> None:
        self.format = format
        self.grouped_on_cpu = grouped_on_cpu
        if activation is None:
            activation = swiglu if format.has_gate else functional.silu
        self.activation = activation
        self._project = _projection(format)

    def expert(self, weights: ExpertWeights, rows: Tensor) -> Tensor:
        """Return what one expert makes of ``rows``, [n, hidden_size] -> [n, hidden_size].

        ``rows`` have the dtype of the matrices, or any float dtype if these are int8.
        """
        gate_up, down, gate_up_bias, down_bias, gate_up_scale, down_scale = weights
        inner = self.activation(self._project(rows, gate_up, gate_up_bias, gate_up_scale))
        return self._project(inner, down, down_bias, down_scale)

    def experts(
        self, stacked: ExpertWeights, slots: Sequence[int], rows: Tensor, counts: Sequence[int]
    ) -> Tensor:
        """Return what several experts make of their rows, [sum of counts, H] -> the same shape.

        ``stacked`` holds the tensors of all slots, [slots, ...] each; rows are sorted by slot:
        ``counts[i]`` > 0 rows belong to ``slots[i]``, and slots ascend. Two grouped products where
        device, dtype and slots suit them (:func:`real.grouped.can_group`), else expert by expert.
        """
        if can_group(self.format, rows, slots, self.grouped_on_cpu):
            return grouped_experts(self.format, self.activation, stacked, slots, rows, counts)
        parts = rows.split(list(counts))
        work = zip(slots, parts, strict=True)
        return torch.cat([self.expert(_of_slot(stacked, slot), part) for slot, part in work])


def _of_slot(stacked: ExpertWeights, slot: int) -> ExpertWeights:
    parts = stacked._asdict().items()
    return type(stacked)(**{name: part[slot] for name, part in parts if part is not None})


# -- one matrix: (rows, matrix, bias, scale) -> result -------------------------------------------------

_Projection = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]


def _projection(format: ExpertFormat) -> _Projection:
    """Return what multiplies rows with a matrix of a format."""
    if format.dtype == "int8":
        return _scaled_transposed if format.is_transposed else _scaled
    return _transposed if format.is_transposed else _plain


def _plain(rows: Tensor, matrix: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
    return functional.linear(rows, matrix, bias)


def _transposed(rows: Tensor, matrix: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
    # Not one fused operation: the models' eager code rounds the product before it adds the bias.
    product = rows @ matrix
    return product if bias is None else product + bias


def _scaled(rows: Tensor, matrix: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
    assert scale is not None
    product = int8_product(rows, matrix, scale)
    return product if bias is None else product + bias.to(product.dtype)


def _scaled_transposed(
    rows: Tensor, matrix: Tensor, bias: Tensor | None, scale: Tensor | None
) -> Tensor:
    assert scale is not None
    product = int8_product(rows, matrix, scale, is_transposed=True)
    return product if bias is None else product + bias.to(product.dtype)
