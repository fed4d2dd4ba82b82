"""Local routing consistency: SRP and SCH of Liang et al., "Not All Models Suit Expert Offloading".

arXiv 2505.16056. Both look at segments of consecutive tokens. SRP asks how well the best fixed group of
experts predicts what a segment's tokens use; SCH asks what a cache hits that knows the segment.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from traces.locality_histograms import Histograms
from traces.schema import Trace, TraceMeta

_STRIDES = 4
"""Segments that overlap: one begins every quarter of a segment."""


@dataclass(frozen=True, slots=True)
class SegmentScores:
    """SRP and SCH of segments of one length.

    Attributes
    ----------
    length
        Tokens a segment.
    num_segments
        How many segments were looked at.
    srp
        float64[num_layers]. For each segment the group of all experts that at least ``p`` of its
        tokens use predicts the experts of each of its tokens; the F1 score of all predictions, at
        the best ``p`` (one for all segments). At 1 every token of a segment uses the same experts.
    group_ratio
        float64[num_layers]: mean size of the groups at that ``p``, over the experts a token uses.
    sch
        float64[num_layers, num_experts]: in column c - 1 the share of a segment's choices that the
        c experts it uses most make up, in the mean: the hit rate of the best fixed set of c experts
        a segment (SCH as first published; ``LookaheadCurve`` is the revised one).
    """

    length: int
    num_segments: int
    srp: NDArray[np.float64]
    group_ratio: NDArray[np.float64]
    sch: NDArray[np.float64]


class Segments:
    """Collects both scores, chunk by chunk.

    Parameters
    ----------
    meta
        The header of the trace.
    length
        Tokens a segment, >= 1; the authors use 4, 16, 64 and 256.
    phase
        Only rows of this phase; None: all.
    stride
        A segment begins every so many tokens of a request and must divide ``length``; None: a
        quarter of it. The authors' 1 costs more and gives the same mean.
    """

    def __init__(
        self, meta: TraceMeta, length: int, phase: int | None = None, stride: int | None = None
    ) -> None:
        self._stride = max(1, length // _STRIDES) if stride is None else stride
        while length % self._stride:
            self._stride -= 1
        self._parts = length // self._stride
        self._histograms = Histograms(meta, self._stride, self._parts - 1, phase)
        self._length, self._layers, self._experts = length, meta.num_layers, meta.num_experts
        # How often an expert is used by 0, 1, ... ``length`` tokens of a segment.
        self._uses = np.zeros((self._layers, length + 1), dtype=np.int64)
        self._sorted = np.zeros((self._layers, self._experts), dtype=np.int64)
        self._num_segments = 0

    def add(self, chunk: Trace) -> None:
        """Take the next rows of the trace."""
        for _, counts in self._histograms.cut(chunk):
            if len(counts) >= self._parts:
                sums = np.cumsum(counts, axis=0)
                segments = sums[self._parts - 1 :]
                segments[1:] -= sums[: -self._parts].copy()
                self._count(segments.astype(np.int16))

    def _count(self, segments: NDArray[np.int16]) -> None:
        """Take the histograms of segments, [num_segments, num_layers, num_experts]."""
        width = self._length + 1
        bins = segments + (np.arange(self._layers) * width)[:, None]
        self._uses += np.bincount(bins.ravel(), minlength=self._uses.size).reshape(-1, width)
        self._sorted += np.sort(segments, axis=2)[:, :, ::-1].sum(axis=0)
        self._num_segments += len(segments)

    def result(self) -> SegmentScores:
        """Return the scores so far; nan without a segment."""
        with np.errstate(invalid="ignore", divide="ignore"):
            srp, group = _best_f1(self._uses)
            choices = self._sorted.sum(axis=1, keepdims=True)
            tokens = self._num_segments * self._length
            sch = np.cumsum(self._sorted, axis=1) / choices
            return SegmentScores(
                self._length,
                self._num_segments,
                srp,
                group / self._num_segments / (choices[:, 0] / tokens),
                sch,
            )


def _best_f1(uses: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return by layer the best F1 over thresholds, and the experts predicted over all segments.

    ``uses`` int64[num_layers, length + 1] is how many (segment, expert) had so many of its tokens.
    """
    length = uses.shape[1] - 1
    right = np.cumsum((uses * np.arange(length + 1))[:, ::-1], axis=1)[:, ::-1]
    experts = np.cumsum(uses[:, ::-1], axis=1)[:, ::-1]
    f1 = 2 * right / (experts * length + right[:, :1])
    best = np.nanargmax(np.nan_to_num(f1), axis=1)
    layers = np.arange(len(uses))
    return f1[layers, best], experts[layers, best]
