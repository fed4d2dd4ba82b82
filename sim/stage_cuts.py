"""Decoded texts cut into stages, and the same texts cut elsewhere for comparison.

A *cut* of a text of T tokens is an ascending row of places 0, ..., T: stage i holds the tokens from
place i to before place i + 1. Rows of many cuts may repeat T at their ends; what is between is empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.policies.detectors import num_decoded
from sim.stage_replay import Seen
from sim.types import ConfigError
from sim.workload import Workload

Cuts = NDArray[np.int64]
"""Places int64[num_cuts, num_stages + 1]."""


@dataclass(frozen=True, slots=True)
class StagedText:
    """What one request decodes, in stages.

    Attributes
    ----------
    rows
        Its rows of the trace in order, intp[num_tokens].
    cut
        int64[num_stages + 1].
    kinds
        The label of each stage, int64[num_stages]; -1 where none is known.
    """

    rows: NDArray[np.intp]
    cut: Cuts
    kinds: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each stage."""
        return np.diff(self.cut)


def annotated_texts(work: Workload) -> list[StagedText]:
    """Cut what each request decodes where its label changes; an unknown one (-1) continues the stage.

    Raises ConfigError where the trace has no annotated stages.
    """
    labels = work.trace.stage
    if labels is None:
        raise ConfigError(
            "the trace has no annotated stages (column stage), which the test needs; name a detector "
            "whose stages are to be tested: --by cues"
        )
    return [_by_labels(rows, labels[rows].astype(np.int64)) for rows in _decoded(work)]


def _by_labels(rows: NDArray[np.intp], labels: NDArray[np.int64]) -> StagedText:
    known = np.flatnonzero(labels >= 0)
    begins = known[1:][labels[known[1:]] != labels[known[:-1]]]
    first = labels[known[:1]] if len(known) else np.array([-1])
    return StagedText(rows, _closed(begins, len(rows)), np.concatenate([first, labels[begins]]))


def found_texts(work: Workload, steps: Iterable[Seen]) -> list[StagedText]:
    """Cut each request's text where a detector found a boundary while the request decoded.

    ``steps`` are those of the whole work, in order.
    """
    places: dict[int, list[int]] = {}
    decoded: dict[int, int] = {}
    for seen in steps:
        for served in seen.step.request_ids[: num_decoded(seen.step)]:
            place = decoded[served] = decoded.get(served, -1) + 1
            if seen.is_boundary and place:
                places.setdefault(served, []).append(place)
    texts = []
    for request in work.requests:
        rows = request.decode_rows
        if len(rows):
            cut = _closed(places.get(request.request_id, []), len(rows))
            texts.append(StagedText(rows, cut, np.full(len(cut) - 1, -1, np.int64)))
    return texts


def window_texts(texts: Sequence[StagedText], length: int) -> list[StagedText]:
    """Cut the texts into windows of ``length`` tokens; a window's kind is its number from 0."""
    cuts = [_closed(np.arange(length, len(text.rows), length), len(text.rows)) for text in texts]
    return [
        StagedText(text.rows, cut, np.arange(len(cut) - 1))
        for text, cut in zip(texts, cuts, strict=True)
    ]


def shuffled_cuts(text: StagedText, draws: int, rng: np.random.Generator) -> Cuts:
    """Return cuts whose stages have the text's lengths, in random order: int64[draws, num_stages + 1]."""
    lengths = rng.permuted(np.tile(text.lengths, (draws, 1)), axis=1)
    return np.concatenate([np.zeros((draws, 1), np.int64), lengths.cumsum(axis=1)], axis=1)


def shifted_cuts(text: StagedText, draws: int, rng: np.random.Generator) -> Cuts:
    """Return the text's cut moved around it by random numbers of tokens, int64[draws, num_stages + 2].

    The lengths and their order stay, but for the stage that then lies on both ends.
    """
    tokens = len(text.rows)
    offsets = rng.integers(0, tokens, (draws, 1))
    inner = np.sort((text.cut[:-1] + offsets) % tokens, axis=1)
    ends = np.zeros((draws, 1), np.int64), np.full((draws, 1), tokens, np.int64)
    return np.concatenate([ends[0], inner, ends[1]], axis=1)


def window_cuts(text: StagedText, length: int, draws: int, rng: np.random.Generator) -> Cuts:
    """Return cuts into windows of ``length`` tokens, the first of which is cut short at random."""
    tokens = len(text.rows)
    first = rng.integers(1, length + 1, (draws, 1))
    inner = first + length * np.arange(-(-tokens // length) + 1)
    ends = np.minimum(inner, tokens)
    return np.concatenate([np.zeros((draws, 1), np.int64), ends], axis=1)


def _decoded(work: Workload) -> list[NDArray[np.intp]]:
    return [request.decode_rows for request in work.requests if len(request.decode_rows)]


def _closed(begins: Sequence[int] | NDArray[np.int64], tokens: int) -> Cuts:
    """Return the cut with stages that begin at 0 and at these places."""
    return np.concatenate([[0], np.asarray(begins, np.int64), [tokens]]).astype(np.int64)
