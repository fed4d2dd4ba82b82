"""What gates do on held-out texts: how much is reused, how good the model still is, how even the load is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from real.remoe_gates import Gates, Judged
from real.remoe_texts import TextBatch
from traces.locality_caches import lru_curve
from traces.locality_reuse import overlap_by_lag
from traces.schema import DECODE, NO_EXPERT, Provenance, Trace, TraceMeta

LAGS = (1, 2, 4, 8, 16, 32)
"""Distances, in tokens, at which reuse is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateQuality:
    """Figures of one set of gates on held-out texts; per layer where a tuple is.

    Parameters
    ----------
    num_texts, num_tokens
        What it was measured on.
    num_experts, top_k
        Of a layer, and of a token.
    eor
        Mean of |E(t) & E(t - 1)| / k over all tokens with a predecessor, by layer.
    eor_by_lag
        The same, mean of the layers, at each of ``LAGS`` that a text is as long as.
    loss, answer_loss
        Cross entropy a token in nats: of the whole text, and of the answers alone.
    load_cv
        Standard deviation over mean of an expert's count, by layer.
    load_entropy
        Entropy of the experts' shares of the load over log E, by layer: 1 is even.
    gate_entropy
        Mean entropy of a token's distribution P over log E, by layer.
    trust
        Mean KL(P || P_ref) in nats, by layer.
    lru_hit_rate
        By slots a layer: mean over layers of hits, an LRU for each layer that is empty when a text begins.
    distinct
        Mean over texts of the experts a text visits, by layer; ``distinct_overall`` of all texts together.
    """

    num_texts: int
    num_tokens: int
    num_experts: int
    top_k: int
    eor: tuple[float, ...]
    eor_by_lag: dict[int, float]
    loss: float
    answer_loss: float
    load_cv: tuple[float, ...]
    load_entropy: tuple[float, ...]
    gate_entropy: tuple[float, ...]
    trust: tuple[float, ...]
    lru_hit_rate: dict[int, float]
    distinct: tuple[float, ...]
    distinct_overall: tuple[float, ...]

    @property
    def perplexity(self) -> float:
        """Exp of the loss of the whole text."""
        return math.exp(self.loss)

    @property
    def answer_perplexity(self) -> float:
        """Exp of the loss of the answers."""
        return math.exp(self.answer_loss)

    @property
    def mean_eor(self) -> float:
        """EOR at lag 1, mean of the layers."""
        return float(np.mean(self.eor))

    @property
    def eor_of_load(self) -> float:
        """EOR that tokens would have which chose by the experts' shares alone, mean of the layers.

        Experts are used with probabilities pi whose mean is k / E; two independent tokens share
        sum(pi^2) / k = k / E * (1 + CV^2) of them. What EOR exceeds it by is locality in time.
        """
        return self.top_k / self.num_experts * float(np.mean(1 + np.square(self.load_cv)))


@dataclass(slots=True)
class _Sums:
    """Running sums over batches."""

    loss: float = 0.0
    answer_loss: float = 0.0
    tokens: int = 0
    answers: int = 0
    rows: int = 0
    entropy: Any = 0.0  # [layers]
    trust: Any = 0.0  # [layers]


@torch.no_grad()
def measure_gates(
    model: Any, gates: Gates, batches: Sequence[TextBatch], slots: Sequence[int]
) -> GateQuality:
    """Return the figures of a model's gates; ``gates`` must be entered, with its reference.

    ``slots`` are the sizes a layer of the caches to report.
    """
    sums = _Sums()
    texts: list[NDArray[np.uint16]] = []
    for batch in batches:
        texts += _add(model, gates, batch, sums)
    trace = as_trace(texts, gates.num_experts)
    overlap = overlap_by_lag([trace], trace.meta, LAGS)
    counts = np.stack(
        [_counts(trace.expert_ids[:, slot], gates) for slot in range(trace.meta.num_layers)]
    )
    return GateQuality(
        num_texts=len(texts),
        num_tokens=sums.rows,
        num_experts=gates.num_experts,
        top_k=trace.meta.top_k,
        eor=_floats(overlap.rates[:, 0]),
        eor_by_lag={
            lag: rate
            for lag, rate in zip(LAGS, _floats(overlap.pooled), strict=True)
            if not math.isnan(rate)
        },
        loss=sums.loss / sums.tokens,
        answer_loss=sums.answer_loss / max(1, sums.answers),
        load_cv=_floats(counts.std(axis=1) / counts.mean(axis=1)),
        load_entropy=_floats(_entropy(counts)),
        gate_entropy=_floats(sums.entropy / sums.rows / math.log(gates.num_experts)),
        trust=_floats(sums.trust / sums.rows),
        lru_hit_rate=lru_hit_rates(texts, gates.num_experts, slots),
        distinct=_floats(np.mean([_distinct(text) for text in texts], axis=0)),
        distinct_overall=_floats((counts > 0).sum(axis=1)),
    )


def as_trace(texts: Sequence[NDArray[np.uint16]], num_experts: int) -> Trace:
    """Return texts, ids [tokens, layers, k] each, as a trace of one request a text, for its statistics."""
    lengths = [len(ids) for ids in texts]
    ids = np.concatenate(texts)
    meta = TraceMeta(
        model="held-out texts",
        num_layers=ids.shape[1],
        num_experts=num_experts,
        top_k=ids.shape[2],
        layer_indices=tuple(range(ids.shape[1])),
        provenance=Provenance("recorded", "greenroom remoe", "forced texts"),
    )
    return Trace(
        meta,
        request_id=np.repeat(np.arange(len(texts), dtype=np.int32), lengths),
        position=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        phase=np.full(len(ids), DECODE, dtype=np.uint8),
        step=np.arange(len(ids), dtype=np.int32),
        expert_ids=ids,
    )


def lru_hit_rates(
    texts: Sequence[NDArray[np.uint16]], num_experts: int, slots: Sequence[int]
) -> dict[int, float]:
    """Return by size the share of a token's experts that its layer's LRU holds, all layers together.

    Each text begins with empty caches: requests are isolated, as in the paper's Proposition 3.1. A size above
    ``num_experts`` holds all.
    """
    hits, uses = np.zeros(num_experts, dtype=np.int64), 0
    for ids in texts:
        trace = as_trace([ids], num_experts)
        curve = lru_curve([trace], trace.meta, events="token")
        hits += curve.hits.sum(axis=0)
        uses += int(curve.uses.sum())
    return {size: float(hits[min(size, num_experts) - 1] / max(1, uses)) for size in slots}


def _add(model: Any, gates: Gates, batch: TextBatch, sums: _Sums) -> list[NDArray[np.uint16]]:
    """Add a batch to the sums; return the ids [tokens, layers, k] of each of its texts."""
    ids, real = batch.ids.to(model.device), batch.real.to(model.device)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    each = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    ).view(len(ids), -1)
    counted, answer = real[:, 1:], batch.answer.to(model.device)
    sums.loss += float(each[counted].sum())
    sums.answer_loss += float(each[answer].sum())
    sums.tokens += int(counted.sum())
    sums.answers += int(answer.sum())
    sums.rows += int(real.sum())
    judged = gates.take()
    flat = real.flatten()
    sums.entropy = sums.entropy + np.array([_token_entropy(item, flat) for item in judged])
    sums.trust = sums.trust + np.array([_token_trust(item, flat) for item in judged])
    chosen = torch.stack([item.chosen for item in judged], dim=1).cpu()
    chosen = chosen.masked_fill(chosen >= gates.num_experts, NO_EXPERT)  # experts without weights
    chosen = chosen.view(*batch.real.shape, *chosen.shape[1:])
    rows = zip(chosen, batch.real, strict=True)
    return [row[keep].numpy().astype(np.uint16) for row, keep in rows]


def _counts(ids: NDArray[np.uint16], gates: Gates) -> NDArray[np.int64]:
    """Return how often each expert of a layer is chosen."""
    chosen = ids[ids != NO_EXPERT]
    return np.bincount(chosen, minlength=gates.num_experts)


def _token_entropy(judged: Judged, real: Tensor) -> float:
    return float(-(judged.log_p.exp() * judged.log_p).sum(dim=1)[real].sum())


def _token_trust(judged: Judged, real: Tensor) -> float:
    if judged.log_reference is None:
        return 0.0
    apart = judged.log_p - judged.log_reference
    return float((judged.log_p.exp() * apart).sum(dim=1)[real].sum())


def _entropy(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the entropy of shares by row over that of even ones, for counts [layers, experts]."""
    shares = counts / counts.sum(axis=1, keepdims=True)
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    even = math.log(counts.shape[1])
    found: NDArray[np.float64] = -(shares * logs).sum(axis=1) / even
    return found


def _distinct(ids: NDArray[np.uint16]) -> NDArray[np.int64]:
    """Return how many experts a text visits in each layer."""
    visited = [np.unique(ids[:, layer]) for layer in range(ids.shape[1])]
    return np.array([int((experts != NO_EXPERT).sum()) for experts in visited])


def _floats(values: Any) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
