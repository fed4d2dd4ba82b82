"""Scores of experts as a stationary Gaussian process, and the choices that follow from them.

A router scores an expert by the product of its weights with a hidden state. So does this model: each
layer sees a hidden state of a few dimensions, a Gaussian process over the tokens of a request, and an
expert's score is its offset (by stage) plus the state along the expert's own direction. The ``top_k``
highest scores are the choice. Nothing is fed back, so that a trace of any length has the statistics of
its first thousand tokens.

A state is the sum of a part that stays over the request and a part that moves. Classes of experts see
the state at their own pace: the same noise goes through a filter for each class. The moving part is drawn
in blocks: each block of ``BLOCK_TOKENS`` follows from the one before by the conditional distribution of
a Gaussian vector, so that correlations are exact inside two neighbouring blocks, whatever they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK_TOKENS = 64
SPAN_TOKENS = 2 * BLOCK_TOKENS
"""Lags whose correlation is given, 0 included."""
_LEAST_SPECTRUM = 1e-3


def choose(scores: NDArray[np.float32], top_k: int) -> NDArray[np.uint16]:
    """Return the ``top_k`` experts of highest score, best first: uint16[..., top_k] of [..., num_experts]."""
    num_experts = scores.shape[-1]
    best = np.argpartition(scores, num_experts - top_k, axis=-1)[..., num_experts - top_k :]
    order = np.argsort(-np.take_along_axis(scores, best, axis=-1), axis=-1, kind="stable")
    return np.take_along_axis(best, order, axis=-1).astype(np.uint16)


def chosen_sets(scores: NDArray[np.float32], top_k: int) -> NDArray[np.bool_]:
    """Return which experts have the ``top_k`` highest scores, bool[..., num_experts]; equals all count.

    Much faster than ``choose``, and the same where no two scores are equal.
    """
    place = scores.shape[-1] - top_k
    bar = np.partition(scores, place, axis=-1)[..., place, None]
    return np.asarray(scores >= bar)


def directions(
    shape: tuple[int, int], rank: int, seed: int, layers: Sequence[int] | None = None
) -> NDArray[np.float32]:
    """Return each expert's direction, float32[num_layers, rank, num_experts], of unit length.

    ``shape`` is (num_layers, num_experts). Each layer's draw depends on the seed and its own index,
    so that ``layers`` (None: all) gives those of some layers only.
    """
    num_layers, num_experts = shape
    drawn = np.empty((num_layers, rank, num_experts), dtype=np.float32)
    for place, layer in enumerate(range(num_layers) if layers is None else layers):
        rng = np.random.default_rng([seed, layer, rank])
        drawn[place] = rng.standard_normal((rank, num_experts))
    return drawn / np.sqrt((drawn**2).sum(axis=1, keepdims=True))


@dataclass(frozen=True, slots=True)
class Filters:
    """What turns white noise into blocks of the moving part, float32[..., BLOCK, BLOCK] each.

    The first block is ``first @ noise``, each other one ``carry @ block before + fresh @ noise``.
    """

    first: NDArray[np.float32]
    carry: NDArray[np.float32]
    fresh: NDArray[np.float32]


def filters(correlations: NDArray[np.float64]) -> Filters:
    """Return the filters of autocovariances float64[..., SPAN_TOKENS]; lag 0 is the variance."""
    lags = np.abs(np.subtract.outer(np.arange(SPAN_TOKENS), np.arange(SPAN_TOKENS)))
    whole = possible(correlations)[..., lags]
    now = whole[..., :BLOCK_TOKENS, :BLOCK_TOKENS]
    across = whole[..., BLOCK_TOKENS:, :BLOCK_TOKENS]
    carry = across @ np.linalg.inv(now)
    rest = now - carry @ across.swapaxes(-1, -2)
    rest += 1e-9 * np.eye(BLOCK_TOKENS)
    parts = (np.linalg.cholesky(now), carry, np.linalg.cholesky(rest))
    return Filters(*(part.astype(np.float32) for part in parts))


def possible(correlations: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the nearest autocovariances that a process can have: those without negative power.

    The covariances are continued as an even, periodic sequence whose power spectrum is cut off at a
    small positive value; the variance stays as it was.
    """
    mirrored = correlations[..., :0:-1]
    even = np.concatenate([correlations, correlations[..., -1:], mirrored], axis=-1)
    variance = correlations[..., :1]
    power = np.maximum(np.fft.rfft(even, axis=-1).real, _LEAST_SPECTRUM * variance)
    mended = np.fft.irfft(power, n=even.shape[-1], axis=-1)[..., : correlations.shape[-1]]
    return np.asarray(mended * (variance / mended[..., :1]))


class States:
    """Draws the hidden states of one request, block by block.

    Parameters
    ----------
    blocks
        The filters of the moving part, by layer and class.
    stays
        float[num_layers, num_classes]: the share of the variance that is the same over a request.
    rank
        Dimensions of a state.
    coupling
        Share of the variance that all layers have in common, in [0, 1].
    rng
        Drawn from; a request has its own, so that its states do not depend on others'.
    """

    def __init__(
        self,
        blocks: Filters,
        stays: NDArray[np.float64],
        rank: int,
        coupling: float,
        rng: np.random.Generator,
    ) -> None:
        self._blocks, self._rank, self._rng = blocks, rank, rng
        self._common, self._own = np.float32(np.sqrt(coupling)), np.float32(np.sqrt(1 - coupling))
        self._num_layers = len(stays)
        share = np.sqrt(stays)[..., None, None].astype(np.float32)
        self._base = self._noise(1)[:, None] * share
        self._before: NDArray[np.float32] | None = None

    def next(self) -> NDArray[np.float32]:
        """Return the states of the next tokens, float32[num_layers, num_classes, BLOCK_TOKENS, rank]."""
        noise = self._noise(BLOCK_TOKENS)[:, None]  # the same for all classes
        if self._before is None:
            moving = self._blocks.first @ noise
        else:
            moving = self._blocks.carry @ self._before + self._blocks.fresh @ noise
        self._before = moving
        return np.asarray(moving + self._base)

    def _noise(self, num_tokens: int) -> NDArray[np.float32]:
        """Draw white noise of unit variance, part of which the layers share."""
        shape = (num_tokens, self._rank)
        common = self._rng.standard_normal(shape, dtype=np.float32)
        own = self._rng.standard_normal((self._num_layers, *shape), dtype=np.float32)
        return np.asarray(self._common * common + self._own * own)
