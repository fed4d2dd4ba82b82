"""The shape of a Mixture-of-Experts transformer: what its parts weigh and how much they compute.

``layer`` counts MoE layers from 0. Layers before them that have a plain MLP (DeepSeek's first) are
*dense-only* layers. All sizes are int bytes, rounded up; biases and the norms inside attention are
left out (below 0.1 % of any bundled model).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hwmodels.attention_shape import AttentionShape
from hwmodels.errors import HardwareError
from hwmodels.fields import Numbers, Rule, check_rules, read_fields
from hwmodels.file_types import named_bits, scheme_bits
from hwmodels.quantisation import is_codebook
from hwmodels.units import weight_bytes

MLP_MATRICES = 3
"""Gate, up and down of a dense or shared MLP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape(AttentionShape):
    """A model's shape and precision; its attention is described by :class:`AttentionShape`.

    ``shared_intermediate_size`` is that of one shared expert. Bits are per weight with scales: 16 for
    bf16, 4.25 for MXFP4, about 4.5 for Q4. ``dense_bits`` is the precision of all that is not a routed
    expert, but for shared experts and LM head where ``shared_bits`` and ``head_bits`` are given. With
    ``expert_bits_by_layer``, one number a MoE layer, ``expert_bits`` is their mean.
    """

    name: str
    source: str
    num_moe_layers: int
    num_experts: int
    top_k: int
    expert_intermediate_size: int
    vocab_size: int
    tie_embeddings: bool
    expert_bits: float
    dense_bits: float
    expert_matrices: int = 3
    num_shared_experts: int = 0
    shared_intermediate_size: int = 0
    dense_intermediate_size: int = 0
    expert_bits_by_layer: Numbers | None = None
    expert_codebook: bool = False
    """Experts are indices into a codebook (IQ1 to IQ3), which CPUs decode slowly."""
    shared_bits: float | None = None
    head_bits: float | None = None
    priced_from: tuple[int, int, int] | None = None
    """MoE layers, experts and top-k of the model itself, if a trace's stand in their place."""
    low_bits: float | None = None
    """Bits a weight of second copies of all experts, where a policy keeps them."""

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], name: str = "model") -> ModelShape:
        """Build a shape from plain values as in ``conf/model/*.yaml``.

        ``name`` tells the file in messages; raises HardwareError for the first mistake. Bits may name a
        scheme, as ``Q4_K_M`` or ``bf16`` (:mod:`hwmodels.file_types`).
        """
        own, schemes = named_bits(mapping, name)
        if own.get("expert_bits_by_layer") is not None:
            own["expert_bits"] = 1  # their mean, once they are read
            schemes.pop("expert_bits", None)
        values = read_fields(
            cls, own, name, may_be_zero=_MAY_BE_ZERO, skip=("priced_from", "low_bits")
        )
        if by_layer := values.get("expert_bits_by_layer"):
            values["expert_bits"] = sum(by_layer) / len(by_layer)
        shape = cls(**values)
        check_rules(shape, name)
        for field, scheme in schemes.items():
            shape = replace(shape, **scheme_bits(shape, field, scheme))
        if "expert_bits" in schemes:
            shape = replace(shape, expert_codebook=is_codebook(schemes["expert_bits"]))
        return shape

    def rules(self) -> list[Rule]:
        """Return what fields demand of each other."""
        layers, moe, experts = self.num_layers, self.num_moe_layers, self.num_experts
        by_layer, shared = self.expert_bits_by_layer, self.num_shared_experts
        bits = ("expert_bits", "dense_bits", "shared_bits", "head_bits")
        return [
            ("num_moe_layers", moe <= layers, f"must be <= num_layers = {layers}"),
            ("top_k", self.top_k <= experts, f"must be <= num_experts = {experts}"),
            *self.attention_rules(),
            ("expert_bits_by_layer", max(by_layer or (1,)) <= 32, "must be numbers <= 32"),
            (
                "expert_bits_by_layer",
                len(by_layer or range(moe)) == moe,
                f"must have num_moe_layers = {moe} numbers",
            ),
            *((field, (getattr(self, field) or 1) <= 32, "must be <= 32") for field in bits),
            (
                "dense_intermediate_size",
                moe == layers or self.dense_intermediate_size > 0,
                f"must be > 0 where {layers - moe} layers have no experts",
            ),
            (
                "shared_intermediate_size",
                not shared or self.shared_intermediate_size > 0,
                f"must be > 0 with num_shared_experts = {shared}",
            ),
        ]

    # -- a trace's routing at this model's sizes ---------------------------------------------------

    def priced_as(self, num_layers: int, num_experts: int, top_k: int) -> ModelShape:
        """Return this model with a trace's MoE layers, experts and top-k at the same sizes a layer.

        Dense-only layers, embedding and head stay; bits by layer are cut, or repeated from the first
        on; kinds of attention keep their shares. The model's own counts are kept for
        :meth:`priced_note`; raises HardwareError if the counts are impossible.
        """
        if not 1 <= top_k <= num_experts or num_layers < 1:
            raise HardwareError(
                f"model/{self.name}: priced_as = {num_layers} layers, {num_experts} experts, "
                f"top-{top_k}: must be at least 1 layer and 1 <= top_k <= num_experts"
            )
        by_layer = self.expert_bits_by_layer
        if by_layer is not None:
            by_layer = tuple(by_layer[layer % len(by_layer)] for layer in range(num_layers))
        linear, windows = self.attention_of(num_layers + self.num_dense_only_layers)
        return replace(
            self,
            num_linear_layers=linear,
            num_window_layers=windows,
            expert_bits=sum(by_layer) / num_layers if by_layer else self.expert_bits,
            expert_bits_by_layer=by_layer,
            num_layers=num_layers + self.num_dense_only_layers,
            num_moe_layers=num_layers,
            num_experts=num_experts,
            top_k=top_k,
            priced_from=self.priced_from or (self.num_moe_layers, self.num_experts, self.top_k),
        )

    def priced_note(self) -> str:
        """Say how a trace's routing was priced, as ``qwen3_30b_a3b: 8 of 48 layers, 128 experts, top-8``."""
        layers, experts, top_k = self.priced_from or (
            self.num_moe_layers,
            self.num_experts,
            self.top_k,
        )
        return (
            f"{self.name}: {_count(self.num_moe_layers, layers)} layers, "
            f"{_count(self.num_experts, experts)} experts, top-{_count(self.top_k, top_k)}"
        )

    # -- parameters --------------------------------------------------------------------------------

    @property
    def num_dense_only_layers(self) -> int:
        """Number of layers with a plain MLP in place of experts."""
        return self.num_layers - self.num_moe_layers

    @property
    def expert_params(self) -> int:
        """Weights of one routed expert."""
        return self.expert_matrices * self.hidden_size * self.expert_intermediate_size

    @property
    def shared_params(self) -> int:
        """Weights of one layer's shared experts."""
        size = self.num_shared_experts * self.shared_intermediate_size
        return MLP_MATRICES * self.hidden_size * size

    @property
    def dense_params(self) -> int:
        """Weights of one MoE layer without its routed experts: attention, router, shared, two norms."""
        router = self.hidden_size * self.num_experts
        return self.attention_params + router + self.shared_params + 2 * self.hidden_size

    @property
    def dense_only_params(self) -> int:
        """Weights of one dense-only layer."""
        mlp = MLP_MATRICES * self.hidden_size * self.dense_intermediate_size
        return self.attention_params + mlp + 2 * self.hidden_size

    @property
    def head_params(self) -> int:
        """Weights of the LM head, which are those of the embedding where they are tied."""
        return self.vocab_size * self.hidden_size

    @property
    def total_params(self) -> int:
        """All weights of the model."""
        layer = self.dense_params + self.num_experts * self.expert_params
        ends = self.head_params * (1 if self.tie_embeddings else 2)
        return (
            self.num_moe_layers * layer + self.num_dense_only_layers * self.dense_only_params + ends
        )

    # -- bytes -------------------------------------------------------------------------------------

    @property
    def num_banks(self) -> int:
        """Number of sets of experts: one a MoE layer, and one more each where there are low copies."""
        return self.num_moe_layers * (1 if self.low_bits is None else 2)

    def expert_bytes(self, layer: int) -> int:
        """Return the bytes of one routed expert of MoE layer ``layer``; see :meth:`expert_bits_of`."""
        return weight_bytes(self.expert_params, self.expert_bits_of(layer))

    def expert_bits_of(self, layer: int) -> float:
        """Return the bits a weight of MoE layer ``layer``'s experts; num_moe_layers more: of low copies."""
        if self.low_bits is not None and self.num_moe_layers <= layer < self.num_banks:
            return self.low_bits
        self._check_layer(layer)
        return self.expert_bits_by_layer[layer] if self.expert_bits_by_layer else self.expert_bits

    @property
    def attention_bytes(self) -> int:
        """Bytes of one layer's attention weights."""
        return self._dense_bytes(self.attention_params)

    def dense_layer_bytes(self, layer: int) -> int:
        """Return the bytes of MoE layer ``layer`` without routed experts, the router included."""
        self._check_layer(layer)
        return self._moe_layer_bytes

    @property
    def dense_only_layer_bytes(self) -> int:
        """Bytes of one dense-only layer."""
        return self._dense_bytes(self.dense_only_params)

    @property
    def embedding_bytes(self) -> int:
        """Bytes of the token embedding, which is the head itself where they are tied."""
        return self.head_bytes if self.tie_embeddings else self._dense_bytes(self.head_params)

    @property
    def head_bytes(self) -> int:
        """Bytes a step reads for the LM head; a tied head takes no memory beside the embedding."""
        return weight_bytes(self.head_params, self.head_bits or self.dense_bits)

    def non_expert_bytes(self, num_layers: int) -> int:
        """Return the bytes of all but routed experts for ``num_layers`` MoE layers.

        Counts the dense-only layers, the embedding and an untied head in full.
        """
        layers = num_layers * self._moe_layer_bytes
        layers += self.num_dense_only_layers * self.dense_only_layer_bytes
        return layers + self.embedding_bytes + (0 if self.tie_embeddings else self.head_bytes)

    @property
    def total_bytes(self) -> int:
        """Bytes of all weights."""
        experts = sum(self.expert_bytes(layer) for layer in range(self.num_moe_layers))
        return self.non_expert_bytes(self.num_moe_layers) + self.num_experts * experts

    @property
    def active_params(self) -> int:
        """Weights that one token goes through: all but the routed experts not chosen and the embedding."""
        idle = self.num_moe_layers * (self.num_experts - self.top_k) * self.expert_params
        return self.total_params - idle - (0 if self.tie_embeddings else self.head_params)

    # -- operations --------------------------------------------------------------------------------

    @property
    def expert_flops_per_token(self) -> int:
        """Operations of one token in one expert: a multiplication and an addition a weight."""
        return 2 * self.expert_params

    @property
    def _moe_layer_bytes(self) -> int:
        if self.shared_bits is None:
            return self._dense_bytes(self.dense_params)
        shared = weight_bytes(self.shared_params, self.shared_bits)
        return self._dense_bytes(self.dense_params - self.shared_params) + shared

    def _dense_bytes(self, num_params: int) -> int:
        return weight_bytes(num_params, self.dense_bits)

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.num_moe_layers:
            raise ValueError(f"layer = {layer}: must be in [0, {self.num_moe_layers})")


_MAY_BE_ZERO = (
    "num_shared_experts",
    "shared_intermediate_size",
    "dense_intermediate_size",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_rope_head_dim",
    "v_head_dim",
    "num_linear_layers",
    "linear_params",
    "linear_state_bytes",
    "num_window_layers",
    "window_tokens",
)


def _count(used: int, own: int) -> str:
    """Return ``8``, ``8 of 48``, or ``61 (not 48)`` where a trace has more than the model."""
    if used == own:
        return str(used)
    return f"{used} of {own}" if used < own else f"{used} (not {own})"
