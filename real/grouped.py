"""Experts whose weights lie in slots of one arena, computed together by grouped matrix products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from real.experts import ExpertFormat, ExpertWeights

ALIGNMENT_BYTES = 16
"""A grouped product takes rows that begin at multiples of this."""
MAX_GROUPS = 1023
"""A grouped product on CUDA takes no more matrices than this, unused ones in between counted."""
MAX_SPREAD = 4
"""On the CPU an unused slot in between costs a fourth of what grouping saves for a used one (measured:
2.7 us against 9 to 13 us), so slots may lie so many times apart."""


def can_group(
    format: ExpertFormat, rows: Tensor, slots: Sequence[int], on_cpu: bool = False
) -> bool:
    """Tell whether grouped products take ``rows`` and experts of a format in ``slots``, and pay.

    A GPU without a kernel of its own would compute group by group and wait for each group's size. The
    CPU does compute group by group: that saves calls, but the activation sees the rows of all experts
    at once, and may round a few of them otherwise than expert by expert; so ``on_cpu`` has to ask for it.
    """
    if format.dtype == "int8" or len(slots) < 2 or not hasattr(functional, "grouped_mm"):
        return False
    widths = format.hidden_size, format.intermediate_size, format.gate_up_rows
    if any(width * rows.element_size() % ALIGNMENT_BYTES for width in widths):
        return False
    spread = slots[-1] - slots[0] + 1
    if rows.is_cpu:
        return on_cpu and spread <= MAX_SPREAD * len(slots)
    return rows.dtype == torch.bfloat16 and spread <= MAX_GROUPS and _has_kernel(rows.device)


@cache
def _has_kernel(device: torch.device) -> bool:
    """Tell whether a device has a grouped kernel: Hopper and the first Blackwell GPUs do."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


def grouped_experts(
    format: ExpertFormat,
    activation: Callable[[Tensor], Tensor],
    stacked: ExpertWeights,
    slots: Sequence[int],
    rows: Tensor,
    counts: Sequence[int],
) -> Tensor:
    """Return what the experts in ``slots`` make of their rows (see :meth:`real.kernels.Kernels.experts`)."""
    first, device = slots[0], rows.device
    sizes = [0] * (slots[-1] - first + 1)
    for slot, count in zip(slots, counts, strict=True):
        sizes[slot - first] = count
    ends = torch.tensor(list(accumulate(sizes)), dtype=torch.int32).to(device, non_blocking=True)
    used = slice(first, first + len(sizes))
    of_row: Tensor | None = None
    if format.has_bias:
        of_row = (
            torch.tensor(slots)
            .repeat_interleave(torch.tensor(counts))
            .to(device, non_blocking=True)
        )

    def product(source: Tensor, matrices: Tensor, biases: Tensor | None) -> Tensor:
        right = matrices[used] if format.is_transposed else matrices[used].transpose(-2, -1)
        made = functional.grouped_mm(source, right, offs=ends)
        return made if biases is None or of_row is None else made + biases[of_row]

    inner = activation(product(rows, stacked.gate_up, stacked.gate_up_bias))
    return product(inner.contiguous(), stacked.down, stacked.down_bias)
