"""Experts with random weights, of any shape and dtype: as fast to make as memory is to read.

All experts are windows of one pool of normal numbers, each beginning elsewhere, so that every expert
differs and none costs more than a copy. The pool's own numbers repeat after a prime, so that no two
rows of a matrix whose width is not a multiple of it are equal.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from real.experts import INT8_MAX, ExpertFormat, ExpertWeights, Part
from sim.types import ConfigError

PERIOD = 1048573
"""Numbers in the pool before it repeats: the largest prime below 2 ** 20."""
STEP = 514229
"""How far apart consecutive experts begin: coprime to the period, so all begin elsewhere."""
STD = 0.02
"""Spread of the weights, as models are initialised: far from denormals, and sums do not overflow."""
LARGEST = 5.0
"""Weights beyond so many spreads are cut off; int8 weights take this for their largest."""


class Synthetic:
    """Random experts of one shape.

    Parameters
    ----------
    num_layers, num_experts
        MoE layers, and experts in each; up to 1,048,573 experts in all.
    format
        Shape and dtype of each.
    seed
        Equal seeds give equal weights.
    """

    def __init__(
        self, num_layers: int, num_experts: int, format: ExpertFormat, seed: int = 0
    ) -> None:
        for name, value in (("num_layers", num_layers), ("num_experts", num_experts)):
            if value < 1:
                raise ConfigError(f"synthetic experts: {name} = {value}: must be at least 1")
        if num_layers * num_experts > PERIOD:
            raise ConfigError(
                f"synthetic experts: num_layers x num_experts = {num_layers * num_experts}: "
                f"must be at most {PERIOD}, or two would be equal"
            )
        self.num_layers = num_layers
        self.num_experts = num_experts
        self.format = format
        self.seed = seed
        self._pools = self._fill_pools()

    @property
    def source(self) -> dict[str, object]:
        """Say where the weights come from."""
        return {"kind": "synthetic", "seed": self.seed, "std": STD}

    def expert(self, layer: int, expert: int) -> ExpertWeights:
        """Return the weights of one expert: views of the pool, not to be written to."""
        key = layer * self.num_experts + expert
        tensors = {}
        for index, part in enumerate(self.format.parts):
            first = (key * STEP + index * (PERIOD // 7)) % PERIOD
            window = self._pools[part.name][first : first + prod(part.shape)]
            tensors[part.name] = window.view(part.shape)
        return ExpertWeights(**tensors)

    def _fill_pools(self) -> dict[str, Tensor]:
        """Return numbers enough for a window of each part that begins anywhere in the period."""
        generator = torch.Generator().manual_seed(self.seed)
        normal = torch.randn(PERIOD, generator=generator).clamp_(-LARGEST, LARGEST)
        pools: dict[tuple[str, torch.dtype], Tensor] = {}
        by_part = {}
        longest = max(prod(part.shape) for part in self.format.parts)
        for part in self.format.parts:
            kind = "scale" if part.name.endswith("_scale") else "weight"
            if (kind, part.dtype) not in pools:
                pools[kind, part.dtype] = _repeated(_values(normal, part, kind), PERIOD + longest)
            by_part[part.name] = pools[kind, part.dtype]
        return by_part


def _values(normal: Tensor, part: Part, kind: str) -> Tensor:
    """Return one period of numbers for a part: scales near their mean, and weights of the spread."""
    if kind == "scale":
        return STD * LARGEST / INT8_MAX * (1 + 0.05 * normal)
    if part.dtype == torch.int8:
        return (normal * (INT8_MAX / LARGEST)).round().to(torch.int8)
    return (normal * STD).to(part.dtype)


def _repeated(values: Tensor, length: int) -> Tensor:
    return values.repeat(-(-length // values.numel()))[:length].contiguous()
