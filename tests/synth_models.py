"""Small models of routing, made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from traces.synth_model import SynthModel
from traces.synth_scores import SPAN_TOKENS
from traces.synth_stages import StageChain


def chain(num_stages: int = 2, stay_tokens: float = 30.0) -> StageChain:
    """Stages in a row, then the end."""
    follows = np.zeros((num_stages, num_stages + 1))
    follows[np.arange(num_stages), np.arange(1, num_stages + 1)] = 1
    lasts = np.full((num_stages, 9), stay_tokens)
    return StageChain(np.eye(num_stages)[0], follows, lasts)


def model(**changes: Any) -> SynthModel:
    """Three layers of 16 experts, top-2, two stages; correlations fall with each lag."""
    values: dict[str, Any] = {
        "num_layers": 3,
        "num_experts": 16,
        "top_k": 2,
        "stage_names": ("think", "speak"),
        "stages_told": True,
        "rank": 5,
        "coupling": 0.5,
        "seed": 3,
        "lengths_tokens": np.array([[10, 50], [20, 100]]),
        "prefill_chain": chain(),
        "decode_chain": chain(),
        **changes,
    }
    layers, experts = values["num_layers"], values["num_experts"]
    stages = len(values["stage_names"])
    rng = np.random.default_rng(1)
    defaults: dict[str, Any] = {
        "source": {
            "model": "toy",
            "kind": "recorded",
            "name": "by hand",
            "tokens": 180,
            "requests": 2,
            "shape": [layers, experts, values["top_k"]],
            "licence": "CC0-1.0",
            "has_weights": True,
        },
        "offsets": 0.5 * rng.standard_normal((stages, layers, experts)).astype(np.float32),
        "classes": np.broadcast_to(np.arange(experts) % 2, (layers, experts)),
        "correlations": np.broadcast_to(
            np.array([0.8, 0.9])[:, None] ** np.arange(SPAN_TOKENS), (layers, 2, SPAN_TOKENS)
        ),
        "stays": np.full((layers, 2), 0.1),
        "sharpness": np.full(layers, 2.0),
    }
    return SynthModel(**{**defaults, **values})
