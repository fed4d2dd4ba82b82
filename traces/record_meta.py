"""Describe a recorded model: the header of its trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from traces.record_hooks import ForwardRecord, MoeLayer
from traces.schema import NO_EXPERT, Provenance, TraceMeta

RECORDER = "greenroom traces.record"
RECORDER_VERSION = "1"
FIT_TOLERANCE = 0.02  # relative; logits are float16
FIT_SHARE = 0.9  # of the weights must fit: large logits lose more in float16
SHARED_NAMES = ("shared_expert", "shared_experts", "shared_mlp")
SHARED_COUNTS = (
    "n_shared_experts",
    "num_shared_experts",
    "moe_num_shared_experts",
    "num_shared_expert",
)


@dataclass(frozen=True)
class Scoring:
    """How a router turns logits into weights."""

    name: str  # softmax, sigmoid, sqrtsoftplus, or unknown
    normalized: bool  # whether a token's weights have the same sum everywhere
    weight_sum: float  # mean over tokens and layers


def measure_scoring(record: ForwardRecord) -> Scoring:
    """Find the scoring function that explains the weights of ``record`` (it needs logits).

    Weights are the scores of the chosen experts, times one constant, or a constant per token
    where they are renormalised. Measuring it needs no table of architectures.
    """
    logits = record.router_logits
    if logits is None:
        raise ValueError("record must have router_logits")
    exact = logits.astype(np.float64)
    shifted = np.exp(exact - exact.max(axis=-1, keepdims=True))
    scores = {
        "softmax": shifted / shifted.sum(axis=-1, keepdims=True),
        "sigmoid": 1 / (1 + np.exp(-exact)),
        "sqrtsoftplus": np.sqrt(np.logaddexp(0, exact)),
    }
    present = record.expert_ids != NO_EXPERT
    weights = record.expert_weights.astype(np.float64)
    sums = weights.sum(axis=-1)
    normalized = bool(present.all()) and _spread(sums, share=1.0) < FIT_TOLERANCE
    ids = np.where(present, record.expert_ids, 0).astype(np.int64)
    misfit = {
        name: _misfit(weights, np.take_along_axis(score, ids, axis=-1), present, normalized)
        for name, score in scores.items()
    }
    best = min(misfit, key=lambda name: misfit[name])
    name = best if misfit[best] < FIT_TOLERANCE else "unknown"
    return Scoring(name, normalized, float(sums.mean()))


def _spread(values: np.ndarray, share: float = FIT_SHARE) -> float:
    """Return how far a share of the values is from the median, relatively; 0 if there is none."""
    if not values.size:
        return 0.0
    middle = float(np.median(values))
    distance = np.quantile(np.abs(values - middle), share)
    return float(distance / max(abs(middle), 1e-12))


def _misfit(
    weights: np.ndarray, scores: np.ndarray, present: np.ndarray, normalized: bool
) -> float:
    """Return how far weights are from a constant times scores, relatively; all are [n, L, k]."""
    if normalized:
        scores = scores / scores.sum(axis=-1, keepdims=True)
    return _spread((weights / np.maximum(scores, 1e-12))[present])


def count_shared_experts(config: Any, layers: Sequence[MoeLayer]) -> int:
    """Return the number of shared experts of an MoE layer, 0 where its block has none."""
    children = {name for name, child in layers[-1].block.named_children() if child is not None}
    if not children & set(SHARED_NAMES):
        return 0
    counts = [getattr(config, name, None) for name in SHARED_COUNTS]
    return next((count for count in counts if isinstance(count, int) and count > 0), 1)


def expert_bytes(layer: MoeLayer) -> int:
    """Return the bytes of one routed expert: all parameters of the experts, divided by them.

    Parameters with more rows than experts (LongCat's identity experts) count by their row.
    """
    total = 0.0
    for module in (layer.experts, *_siblings(layer)):
        for weights in (*module.parameters(), *module.buffers()):
            owners = max(layer.num_experts, weights.shape[0] if weights.ndim == 3 else 0)
            total += weights.numel() * weights.element_size() / owners
    return round(total)


def _siblings(layer: MoeLayer) -> list[nn.Module]:
    """Return JetMoe's second expert module, which stands beside the first."""
    output = dict(layer.block.named_children()).get("output_linear")
    return [output] if output is not None and output is not layer.experts else []


def intermediate_size(config: Any, layer: MoeLayer) -> int | None:
    """Return the inner width of a routed expert, from its weights or else from the config."""
    down = getattr(layer.experts, "down_proj", None)
    if isinstance(down, torch.Tensor) and down.ndim == 3:
        return down.numel() // (down.shape[0] * int(config.hidden_size))
    names = (
        "moe_intermediate_size",
        "expert_ffn_hidden_size",
        "intermediate_size",
        "ffn_hidden_size",
    )
    owners = (config, getattr(config, "ffn_config", None))
    sizes = [getattr(owner, name, None) for owner in owners for name in names]
    return next((int(size) for size in sizes if isinstance(size, int)), None)


def model_name(model: nn.Module, name: str | None) -> str:
    """Return ``name``, or the last part of what the model was loaded from, or its type."""
    config = getattr(model, "config", None)
    loaded = getattr(config, "_name_or_path", "") or ""
    return name or Path(str(loaded)).name or str(getattr(config, "model_type", "unknown"))


def build_meta(
    model: Any,
    layers: Sequence[MoeLayer],
    probe: ForwardRecord,
    *,
    seed: int,
    sampling: Mapping[str, Any],
    stage_names: Sequence[str] = (),
    name: str | None = None,
    source: str | None = None,
    tokenizer: str | None = None,
    licence: str | None = None,
    notes: Sequence[str] = (),
) -> TraceMeta:
    """Return the header of a trace of ``model``.

    ``probe`` is one recorded forward with logits; it shows top_k and the scoring. No date and no
    path enter, so equal runs give equal bytes.
    """
    config = model.config.get_text_config(decoder=True)
    scoring = measure_scoring(probe)
    title = model_name(model, name)
    sizes = tuple(expert_bytes(layer) for layer in layers)
    return TraceMeta(
        model=title,
        num_layers=len(layers),
        num_experts=layers[0].num_experts,
        top_k=int(probe.expert_ids.shape[-1]),
        layer_indices=tuple(layer.index for layer in layers),
        num_shared_experts=count_shared_experts(config, layers),
        scoring=scoring.name,
        normalized=scoring.normalized,
        weight_semantics="applied",
        hidden_size=int(config.hidden_size),
        intermediate_size=intermediate_size(config, layers[-1]),
        expert_bytes=sizes,
        tokenizer=tokenizer,
        recorder=RECORDER,
        recorder_version=RECORDER_VERSION,
        seed=seed,
        sampling=dict(sampling),
        stage_names=tuple(stage_names),
        sorted_by_weight=True,
        notes=(*_notes(model, layers, scoring), *notes),
        licence=licence,
        provenance=Provenance(kind="recorded", source=source or title, detail=_detail(model)),
    )


def _detail(model: Any) -> str:
    parts = [
        f"transformers {transformers.__version__}",
        f"torch {torch.__version__}",
        f"class {type(model).__name__}",
        f"dtype {str(model.dtype).removeprefix('torch.')}",
        f"device {model.device.type}",
        f"experts {getattr(model.config, '_experts_implementation', None)}",
    ]
    return ", ".join(parts)


def _notes(model: Any, layers: Sequence[MoeLayer], scoring: Scoring) -> list[str]:
    notes = []
    if scoring.normalized and abs(scoring.weight_sum - 1) > FIT_TOLERANCE:
        notes.append(f"a token's weights sum to {scoring.weight_sum:.3g}, not 1")
    kind = str(getattr(model.config, "model_type", ""))
    if kind.startswith("gemma4"):
        notes.append("router_logits hold probabilities: this router returns no logits")
    if kind == "jetmoe":
        notes.append("attention experts are not recorded")
    if int(getattr(model.config, "zero_expert_num", 0) or 0):
        notes.append("identity experts are recorded as no expert, their weight as 0")
    return notes
