"""Where a model's weights lie and who computes missing experts: what a prediction without a trace needs.

A simulation gets the same from its policy and cache; the names are those of the engines' options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hwmodels.fields import Rule, check_rules, read_fields
from hwmodels.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class Placement:
    """A placement (``conf/placement/*.yaml``).

    MoE layers are of two kinds: in the first ``cpu_layers`` all experts stay in host memory, where the
    CPU computes them; the others hold ``gpu_ratio`` of their experts in GPU memory.
    """

    name: str
    cpu_layers: int | None
    """Layers, from the first on, whose experts the CPU computes (llama.cpp: --n-cpu-moe); None: all."""
    gpu_ratio: float
    """Share of the other layers' experts that GPU memory holds, in each layer."""
    misses: str = field(metadata={"choices": ("load", "cpu", "split")})
    """Who computes the rest: the GPU after a load, the CPU where they lie, or both so as to end together."""
    held: str = field(metadata={"choices": ("recent", "fixed")})
    """Those experts are the ones used last (a cache), or a fixed set that ignores use."""
    hit_rate: float | None
    """Share of the experts used that are in GPU memory, where it was measured; None: from the usage."""
    handover: str = field(metadata={"choices": ("used", "always")})
    """A layer hands over to the CPU if it uses an expert there, or always (a graph that is fixed)."""
    upload_tokens: int | None
    """With so many new tokens the CPU's experts are copied to the GPU instead; None: never."""
    host_ratio: float
    """Share of the experts outside GPU memory that are in host memory; the rest is read from storage."""
    pinned: bool | None
    """Whether copies come from pinned host memory; None: as the machine's link says."""

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], name: str = "placement") -> Placement:
        """Build a placement from plain values; raises HardwareError for the first mistake."""
        placement = cls(**read_fields(cls, mapping, name, may_be_zero=_MAY_BE_ZERO))
        check_rules(placement, name)
        return placement

    def rules(self) -> list[Rule]:
        """Return what must hold of each field."""
        return [
            ("gpu_ratio", self.gpu_ratio <= 1, "must be in [0, 1]"),
            ("host_ratio", self.host_ratio <= 1, "must be in [0, 1]"),
            ("hit_rate", self.hit_rate is None or self.hit_rate <= 1, "must be in [0, 1]"),
        ]

    def num_cpu_layers(self, shape: ModelShape) -> int:
        """Return how many of a model's MoE layers have all experts on the CPU."""
        wanted = shape.num_moe_layers if self.cpu_layers is None else self.cpu_layers
        return min(wanted, shape.num_moe_layers)

    def gpu_expert_bytes(self, shape: ModelShape) -> int:
        """Return the bytes of experts in GPU memory."""
        layers = range(self.num_cpu_layers(shape), shape.num_moe_layers)
        held = round(self.gpu_ratio * shape.num_experts)
        return sum(held * shape.expert_bytes(layer) for layer in layers)


_MAY_BE_ZERO = ("cpu_layers", "gpu_ratio", "hit_rate", "host_ratio")
