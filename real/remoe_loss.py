"""What ReMoE trains its gates with (arXiv 2605.27081): stay close to the old gates, and reuse experts.

Works on log-probabilities of one MoE layer, ``log_p`` [batch, time, experts], and on ``real`` [batch, time],
true for tokens that are no padding (which is on the right, so that neighbours are neighbours). All terms are
scalars in nats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

TINY = 1e-8
"""Keeps the logarithm of the reuse mass finite, as in the paper."""
SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus")
TERMS = ("reuse", "smooth", "lag", "window")
"""The locality terms, in the order of the paper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossWeights:
    """How much each term counts: CE + trust * Trust + alpha(t) * (reuse * Reuse + ... + window * Window).

    alpha(t) = min(1, t / warm_up_steps). The paper's weights are in an appendix that was not to be had; the
    defaults of conf/remoe.yaml are a reconstruction.
    """

    trust: float
    reuse: float
    smooth: float
    lag: float
    window: float
    lags: tuple[int, ...]  # in tokens
    window_tokens: int

    def scaled(self, factor: float) -> LossWeights:
        """Return the same with all locality terms multiplied, for a sweep of the frontier."""
        terms = {name: getattr(self, name) * factor for name in TERMS}
        return LossWeights(
            trust=self.trust, lags=self.lags, window_tokens=self.window_tokens, **terms
        )


def log_probabilities(logits: Tensor, scoring: str) -> Tensor:
    """Return the log of a router's distribution over experts, float32 [..., E], from its logits.

    ``softmax``: of all logits (also where only the top-k are normalised: the order is the same).
    ``sigmoid`` and ``sqrtsoftplus``: scores, which are each expert's by itself, divided by their sum.
    """
    logits = logits.float()
    if scoring == "softmax":
        return torch.log_softmax(logits, dim=-1)
    if scoring == "sigmoid":
        scores = torch.nn.functional.logsigmoid(logits)
    elif scoring == "sqrtsoftplus":
        scores = 0.5 * torch.log(torch.nn.functional.softplus(logits))
    else:
        raise ValueError(f"scoring is {scoring!r}: must be one of {', '.join(SCORINGS)}")
    return torch.log_softmax(scores, dim=-1)


def trust(log_p: Tensor, log_reference: Tensor, real: Tensor) -> Tensor:
    """Return the mean over real tokens of KL(P || sg(P_ref)); no gradient reaches the reference."""
    apart = log_p - log_reference.detach()
    return _mean((log_p.exp() * apart).sum(dim=-1), real)


def reuse(log_p: Tensor, chosen: Tensor, real: Tensor) -> Tensor:
    """Return -log(rho + 1e-8); rho: a sequence's mean mass on the experts of the token before, over k.

    ``chosen`` [batch, time, k] are the ids that the router picked; no gradient passes them. Averaged over
    the sequences that have two tokens.
    """
    pairs = real[:, 1:] & real[:, :-1]
    mass = log_p[:, 1:].exp().gather(2, chosen[:, :-1]).sum(dim=-1) / chosen.shape[-1]
    counts = pairs.sum(dim=1)
    rho = (mass * pairs).sum(dim=1) / counts.clamp(min=1)
    return _mean(-torch.log(rho + TINY), counts > 0)


def smooth(log_p: Tensor, real: Tensor, lag: int = 1) -> Tensor:
    """Return the mean symmetric KL of distributions ``lag`` tokens apart; gradients through both.

    Symmetric: half of KL(P || Q) + KL(Q || P). 0 where no sequence is as long.
    """
    now, before = log_p[:, lag:], log_p[:, :-lag]
    apart = 0.5 * ((now.exp() - before.exp()) * (now - before)).sum(dim=-1)
    return _mean(apart, real[:, lag:] & real[:, :-lag])


def lagged(log_p: Tensor, real: Tensor, lags: tuple[int, ...]) -> Tensor:
    """Return ``smooth`` averaged over the lags."""
    return torch.stack([smooth(log_p, real, lag) for lag in lags]).mean()


def window(log_p: Tensor, real: Tensor, tokens: int) -> Tensor:
    """Return the mean entropy of the mean distribution of windows: low where a window needs few experts.

    Windows follow one another from a sequence's start; one that is not full of real tokens is left out.
    """
    count = log_p.shape[1] // tokens
    shape = (log_p.shape[0], count, tokens)
    inside = log_p[:, : count * tokens].exp().view(*shape, log_p.shape[-1])
    full = real[:, : count * tokens].view(shape).all(dim=2)
    mean = inside.mean(dim=2)
    entropy = -(mean * torch.log(mean + TINY)).sum(dim=-1)
    return _mean(entropy, full)


def locality(
    log_p: Tensor, chosen: Tensor, real: Tensor, weights: LossWeights
) -> dict[str, Tensor]:
    """Return the locality terms of one layer by name, unweighted; those that count nothing are left out."""
    terms = {
        "reuse": lambda: reuse(log_p, chosen, real),
        "smooth": lambda: smooth(log_p, real),
        "lag": lambda: lagged(log_p, real, weights.lags),
        "window": lambda: window(log_p, real, weights.window_tokens),
    }
    return {name: terms[name]() for name in TERMS if getattr(weights, name)}


def weighted(terms: Mapping[str, Tensor], weights: LossWeights) -> Tensor:
    """Return the sum of the terms, each by its weight; 0 for none."""
    return sum((getattr(weights, name) * term for name, term in terms.items()), torch.zeros(()))


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    """Return the mean of the values that count; 0, with a gradient of 0, if none does."""
    return (values * counted).sum() / counted.sum().clamp(min=1)
