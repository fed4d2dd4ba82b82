"""Find the MoE layers of a Hugging Face model: a router beside its experts.

Every MoE block of transformers v5 has a router (``gate`` or ``router``) beside its ``experts``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import nn

from traces.schema import TraceError

ROUTER_NAMES = ("gate", "router")
EXPERTS_NAMES = ("experts", "input_linear")
GROUPED_ROW_BYTES = 16
_LAYER_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@dataclass(frozen=True)
class MoeLayer:
    """One MoE layer of a model: its absolute layer index, its path, and its modules."""

    index: int
    path: str
    block: nn.Module
    router: nn.Module
    experts: nn.Module
    num_experts: int


def find_moe_layers(decoder: nn.Module) -> list[MoeLayer]:
    """Return the MoE layers of ``decoder`` in order; dense layers are left out.

    JetMoe's attention routes too; its experts are left out. Raises TraceError where there is no
    MoE block, or where the layers differ in their number of experts.
    """
    found: dict[int, MoeLayer] = {}
    for path, block in decoder.named_modules():
        number = _LAYER_NUMBER.search(path)
        children = dict(block.named_children())
        router = next((children[name] for name in ROUTER_NAMES if name in children), None)
        experts = next((children[name] for name in EXPERTS_NAMES if name in children), None)
        if number is None or router is None or experts is None or "attention" in path:
            continue
        index = int(number.group(1))
        found[index] = MoeLayer(index, path, block, router, experts, count_experts(experts, path))
    layers = [found[index] for index in sorted(found)]
    if not layers:
        raise TraceError(f"{type(decoder).__name__} has no MoE block (a router beside experts)")
    sizes = sorted({layer.num_experts for layer in layers})
    if len(sizes) > 1:
        raise TraceError(f"MoE layers with different numbers of experts are unsupported: {sizes}")
    return layers


def count_experts(experts: nn.Module, path: str) -> int:
    """Return how many experts have weights in a fused experts module.

    The smallest leading size counts: LongCat's identity experts own no ``down_proj``.
    """
    if isinstance(experts, nn.ModuleList):
        raise TraceError(f"{path}: experts in a ModuleList (transformers v4) are unsupported")
    sizes = [weights.shape[0] for weights in experts.parameters() if weights.ndim == 3]
    declared = getattr(experts, "num_experts", None)
    if not sizes and isinstance(declared, int):
        sizes = [declared]
    if not sizes:
        raise TraceError(f"{path}: cannot tell the number of experts")
    return min(sizes)


def fits_grouped_product(experts: nn.Module) -> bool:
    """Tell whether torch's grouped matrix product takes the experts: it wants rows of whole 16 bytes."""
    return not any(
        weights.shape[-1] * weights.element_size() % GROUPED_ROW_BYTES
        for weights in experts.parameters()
        if weights.ndim == 3
    )
