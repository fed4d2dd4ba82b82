"""Do stages of one kind use the same experts in other requests? That is what a cache of stages needs.

Two tokens of two stages share p . q / top_k of their experts in the mean, p and q being how often the
stages' tokens use each: a product of means, so that a stage's length adds no noise to it. Stages of the
same request are never compared here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sim.stage_cuts import StagedText
from sim.stage_inference import RESAMPLES, Contrast, Floats, contrast, resamples
from traces.locality_requests import expert_uses
from traces.schema import Trace


@dataclass(frozen=True, slots=True)
class Stages:
    """All stages of some texts, one after another.

    Attributes
    ----------
    uses
        How often each expert is used, float64[num_stages, num_layers, num_experts].
    tokens
        int64[num_stages].
    kind, text
        Kind (from 0) and text of each stage, int64[num_stages].
    """

    uses: Floats
    tokens: NDArray[np.int64]
    kind: NDArray[np.int64]
    text: NDArray[np.int64]

    @property
    def num_texts(self) -> int:
        """Number of texts."""
        return int(self.text.max()) + 1


def stages_of(trace: Trace, texts: Sequence[StagedText]) -> Stages:
    """Count the uses of experts by stage."""
    counts = [
        expert_uses(trace.expert_ids[text.rows[first:last]], trace.meta.num_experts)
        for text in texts
        for first, last in pairwise(text.cut)
    ]
    kind = np.concatenate([text.kinds for text in texts])
    return Stages(
        uses=np.array(counts, np.float64),
        tokens=np.concatenate([text.lengths for text in texts]),
        kind=kind - min(0, kind.min()),  # what is of no known kind is a kind of its own
        text=np.repeat(np.arange(len(texts)), [len(text.kinds) for text in texts]),
    )


@dataclass(frozen=True, slots=True)
class KindContrast:
    """What tokens of different requests share, in stages of the same kind and of different kinds.

    ``same`` and ``different`` are means over layers; ``by_layer`` and ``overall`` their difference.
    Random cuts are here the same stages with their kinds shuffled within each request.
    """

    same: float
    different: float
    overall: Contrast
    by_layer: tuple[Contrast, ...]


def contrast_kinds(
    stages: Stages, top_k: int, draws: int, rng: np.random.Generator
) -> KindContrast:
    """Compare stages of the same kind with stages of different kinds, across requests."""
    shares = stages.uses / (stages.tokens[:, None, None] * np.sqrt(top_k))
    measure = _Measure(shares, stages)
    ones = np.ones(stages.num_texts)
    same, different = measure.sides(stages.kind, ones)
    null = [np.subtract(*measure.sides(kinds, ones)) for kinds in _shuffled(stages, draws, rng)]
    weights = resamples(stages.num_texts, RESAMPLES, rng)
    again = np.array([np.subtract(*measure.sides(stages.kind, row)) for row in weights])
    again = again.reshape(len(weights), shares.shape[1])
    value, by_draw = same - different, np.array(null)
    each = [contrast(float(v), again[:, i], by_draw[:, i]) for i, v in enumerate(value)]
    overall = contrast(float(value.mean()), again.mean(axis=1), by_draw.mean(axis=1))
    return KindContrast(float(same.mean()), float(different.mean()), overall, tuple(each))


class _Measure:
    """Sums of products over pairs of stages of different texts, without going through the pairs.

    The pairs of any texts are the square of the sum; those of one text are taken away again.
    """

    def __init__(self, shares: Floats, stages: Stages) -> None:
        self._shares, self._text = shares, stages.text
        self._num_kinds = int(stages.kind.max()) + 1
        blocks = [np.flatnonzero(stages.text == text) for text in range(stages.num_texts)]
        self._one = np.concatenate([np.repeat(block, len(block)) for block in blocks])
        self._other = np.concatenate([np.tile(block, len(block)) for block in blocks])
        own = [np.einsum("ile,jle->ijl", shares[block], shares[block]) for block in blocks]
        self._products = np.concatenate([block.reshape(-1, shares.shape[1]) for block in own])

    def sides(self, kind: NDArray[np.int64], weight: Floats) -> tuple[Floats, Floats]:
        """Return means by layer over pairs of the same kind and over those of different kinds.

        ``weight`` says how often each text counts, float64[num_texts].
        """
        of_stage = weight[self._text]
        member = (kind[:, None] == np.arange(self._num_kinds)) * of_stage[:, None]
        by_kind = np.tensordot(member.T, self._shares, axes=1)
        every = by_kind.sum(axis=0)
        own = of_stage[self._one] ** 2
        alike = own * (kind[self._one] == kind[self._other])
        same = (by_kind**2).sum(axis=(0, 2)) - alike @ self._products
        total = (every**2).sum(axis=1) - own @ self._products
        counts = member.sum(axis=0)
        num_same = (counts**2).sum() - alike.sum()
        num_all = counts.sum() ** 2 - own.sum()
        num_different = num_all - num_same
        none = np.full_like(same, np.nan)
        return (
            same / num_same if num_same else none,
            (total - same) / num_different if num_different else none,
        )


def _shuffled(stages: Stages, draws: int, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    """Yield the kinds, shuffled within each text."""
    for _ in range(draws):
        order = np.lexsort((rng.random(len(stages.kind)), stages.text))
        yield stages.kind[order]  # stages lie text by text, so that the order is one within texts


def unrelated_overlap(stages: Stages, top_k: int) -> float:
    """Return the share of its experts that a token has in common with one of another request, in the mean.

    Over all pairs of such tokens and all layers; nan where there is one request only.
    """
    texts, layers = stages.num_texts, stages.uses.shape[1]
    uses = np.zeros((texts, *stages.uses.shape[1:]))
    np.add.at(uses, stages.text, stages.uses)
    tokens = np.bincount(stages.text, stages.tokens, texts)
    pairs = tokens.sum() ** 2 - (tokens**2).sum()
    shared = (uses.sum(axis=0) ** 2).sum() - (uses**2).sum()
    return float(shared / (pairs * top_k * layers)) if pairs else float("nan")
