"""How a model uses its experts, in curves: how many some tokens touch, and how often a cache hits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hwmodels.curves import linear
from hwmodels.fields import Rows, Rule, check_rules, read_fields
from hwmodels.model_shape import ModelShape

_PER_MILLE = 1000


@dataclass(frozen=True, slots=True)
class Usage:
    """Use of experts (``conf/usage/*.yaml``), the same in all layers.

    All curves are in thousandths, so that they suit models of any number of experts. Without one, experts
    are used alike and independently of each other: n tokens then touch 1 - (1 - k/E)^n of them, and a cache
    hits as often as its share of the experts.
    """

    name: str
    source: str
    distinct: Rows | None = field(metadata={"columns": ("visits", "share")})
    """Thousandths of visits an expert (tokens * top_k / experts) -> thousandths of the experts touched.

    By consecutive tokens of one text, as a prompt has them.
    """
    hits: Rows | None = field(metadata={"columns": ("ratio", "rate")})
    """Thousandths of the experts that a cache holds -> thousandths of the uses that hit, batch of one."""
    apart: Rows | None = field(default=None, metadata={"columns": ("visits", "share")})
    """As ``distinct``, by one token each of so many texts, as a batch decodes them; None: as ``distinct``."""

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], name: str = "usage") -> Usage:
        """Build it from plain values; raises HardwareError for the first mistake."""
        usage = cls(**read_fields(cls, mapping, name))
        check_rules(usage, name)
        return usage

    def rules(self) -> list[Rule]:
        """Return what must hold of the curves."""
        return [
            (name, all(row[-1] <= _PER_MILLE for row in curve or ()), "must be thousandths <= 1000")
            for name, curve in _curves(self)
        ]

    def distinct_experts(
        self, shape: ModelShape, num_tokens: int, are_apart: bool = False
    ) -> float:
        """Return how many experts of a layer ``num_tokens`` tokens use, in the mean; at least top_k.

        ``are_apart``: the tokens are of different texts, and share fewer experts.
        """
        experts, top_k = shape.num_experts, shape.top_k
        if num_tokens <= 1:
            return float(top_k if num_tokens else 0)
        curve = self.apart if are_apart and self.apart is not None else self.distinct
        if curve is None:
            used = experts * (1 - (1 - top_k / experts) ** num_tokens)
        else:
            used = experts * _share(curve, num_tokens * top_k / experts)
        return float(min(max(used, top_k), experts, num_tokens * top_k))

    def hit_rate(self, ratio: float) -> float:
        """Return the share of uses that hit a cache that holds ``ratio`` of a layer's experts."""
        if self.hits is None or not 0 < ratio < 1:
            return ratio
        points = [(0.0, 0.0), *((float(x), float(y)) for x, y in self.hits)]
        if points[-1][0] < _PER_MILLE:
            points.append((float(_PER_MILLE), float(_PER_MILLE)))
        return float(linear(points, ratio * _PER_MILLE)) / _PER_MILLE


def _curves(usage: Usage) -> list[tuple[str, Rows | None]]:
    return [("distinct", usage.distinct), ("hits", usage.hits), ("apart", usage.apart)]


def _share(curve: Rows, visits: float) -> float:
    """Return the share of experts touched: on the curve; before its first point, in proportion."""
    points = [(float(x), y / _PER_MILLE) for x, y in curve]
    per_mille = visits * _PER_MILLE
    if per_mille < points[0][0]:
        return points[0][1] * per_mille / points[0][0]
    logs = [(math.log(x), y) for x, y in points]
    return float(linear(logs, math.log(per_mille)))
