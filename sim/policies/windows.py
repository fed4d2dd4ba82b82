"""Two adjacent windows slide over what each request decodes: how far are they apart?

``recent`` holds the last ``short`` tokens, ``past`` the ``long`` ones before them. A request has a slot
of its own; many are advanced at one time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sim.types import NO_EXPERT

_FIRST_SLOTS = 4
DISTANCES = ("cosine", "jsd")


class Windows:
    """Counts tokens by slot; subclasses hold what is in the windows.

    Parameters
    ----------
    short, long
        Tokens in the recent and in the past window, >= 1 and >= ``short``.
    """

    def __init__(self, short: int, long: int) -> None:
        if not 1 <= short <= long:
            raise ValueError(f"short = {short}: must be >= 1 and <= long = {long}")
        self.short = short
        self.length = short + long
        self._count = np.zeros(_FIRST_SLOTS, dtype=np.int64)

    def clear(self, slot: int) -> None:
        """Begin anew with a slot, for another request."""
        while slot >= len(self._count):
            self._count = _doubled(self._count)
            self.grow()
        self._count[slot] = 0

    def add(self, slots: NDArray[np.intp], tokens: NDArray) -> NDArray[np.float64]:
        """Advance ``slots`` by one token each; return how far their windows are apart, float64[n].

        nan until the past window has as many tokens as the recent one.
        """
        count = self._count[slots]
        self.slide(slots, tokens, count)
        self._count[slots] = count + 1
        found = self.distances(slots)
        found[count + 1 < 2 * self.short] = np.nan
        return found

    def grow(self) -> None:
        """Make room for twice as many slots."""
        raise NotImplementedError

    def slide(self, slots: NDArray[np.intp], tokens: NDArray, count: NDArray[np.int64]) -> None:
        """Move ``tokens`` into the recent windows of ``slots``, which have seen ``count`` before."""
        raise NotImplementedError

    def distances(self, slots: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return the distance of the two windows of each of ``slots``."""
        raise NotImplementedError


class HistogramWindows(Windows):
    """Windows of expert counts by layer; tokens are choices int[n, num_layers, top_k].

    Parameters
    ----------
    shape
        (num_layers, num_experts, top_k).
    distance
        "cosine": mean over layers of 1 - cosine of the two histograms; "jsd": of the Jensen-Shannon
        divergence to base 2 of the two as shares. Both lie in [0, 1].
    """

    def __init__(
        self, shape: tuple[int, int, int], short: int, long: int, distance: str = "cosine"
    ) -> None:
        super().__init__(short, long)
        if distance not in DISTANCES:
            raise ValueError(f"distance = {distance}: must be {' or '.join(DISTANCES)}")
        layers, experts, top_k = shape
        self._jsd = distance == "jsd"
        self._layer = np.arange(layers)[:, None] * (experts + 1)  # the last bin: no expert
        self._ring = np.zeros((_FIRST_SLOTS, self.length, layers * top_k), dtype=np.int64)
        self._recent = np.zeros((_FIRST_SLOTS, layers, experts + 1), dtype=np.float32)
        self._past = np.zeros_like(self._recent)

    def grow(self) -> None:
        """Make room for twice as many slots."""
        self._ring = _doubled(self._ring)
        self._recent, self._past = _doubled(self._recent), _doubled(self._past)

    def clear(self, slot: int) -> None:
        """Begin anew with a slot."""
        super().clear(slot)
        self._recent[slot] = self._past[slot] = 0

    def slide(self, slots: NDArray[np.intp], tokens: NDArray, count: NDArray[np.int64]) -> None:
        """Count the new choices, and uncount those that leave the windows."""
        experts = self._recent.shape[2] - 1
        bins = np.where(tokens == NO_EXPERT, experts, tokens).astype(np.int64) + self._layer
        bins = bins.reshape(len(tokens), -1)
        width = self._recent[0].size
        first = slots[:, None] * width
        recent, past = self._recent.reshape(-1), self._past.reshape(-1)
        _add(recent, bins + first, 1)
        full = count >= self.short
        if full.any():
            moved = self._ring[slots[full], (count[full] - self.short) % self.length] + first[full]
            _add(recent, moved, -1)
            _add(past, moved, 1)
        full = count >= self.length
        if full.any():
            _add(past, self._ring[slots[full], count[full] % self.length] + first[full], -1)
        self._ring[slots, count % self.length] = bins

    def distances(self, slots: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return the mean over layers of the distance of the two histograms, float64[n]."""
        recent, past = self._recent[slots, :, :-1], self._past[slots, :, :-1]
        return 1 - coherence(recent, past) if not self._jsd else divergence(recent, past)


class MeanWindows(Windows):
    """Windows of one number a token, float[n]; their distance is that of the two means."""

    def __init__(self, short: int, long: int) -> None:
        super().__init__(short, long)
        self._ring = np.zeros((_FIRST_SLOTS, self.length))

    def grow(self) -> None:
        """Make room for twice as many slots."""
        self._ring = _doubled(self._ring)

    def slide(self, slots: NDArray[np.intp], tokens: NDArray, count: NDArray[np.int64]) -> None:
        """Put the new numbers into the rings."""
        self._ring[slots, count % self.length] = tokens

    def distances(self, slots: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return |mean of the recent window - mean of the past one|."""
        count = self._count[slots][:, None]
        age = (count - 1 - np.arange(self.length)) % self.length  # of each place in the ring
        recent = age < self.short
        past = ~recent & (age < count)
        values = self._ring[slots]
        old = (values * past).sum(axis=1) / np.maximum(past.sum(axis=1), 1)
        return np.abs((values * recent).sum(axis=1) / self.short - old)


def coherence(one: NDArray, other: NDArray) -> NDArray[np.float64]:
    """Return the mean over layers of the cosine of two histograms [..., num_layers, num_experts]."""
    dot = np.einsum("...le,...le->...l", one, other).astype(np.float64)
    norms = np.einsum("...le,...le->...l", one, one) * np.einsum("...le,...le->...l", other, other)
    return np.asarray((dot / np.sqrt(np.maximum(norms, 1e-12))).mean(axis=-1))


def divergence(one: NDArray, other: NDArray) -> NDArray[np.float64]:
    """Return the mean over layers of the Jensen-Shannon divergence, to base 2, of two histograms."""
    p = one / np.maximum(one.sum(axis=-1, keepdims=True), 1)
    q = other / np.maximum(other.sum(axis=-1, keepdims=True), 1)
    middle = np.maximum((p + q) / 2, 1e-12)
    sides = (side * np.log2(np.maximum(side, 1e-12) / middle) for side in (p, q))
    return np.asarray(sum(part.sum(axis=-1) for part in sides).mean(axis=-1) / 2, dtype=np.float64)


def _add(flat: NDArray[np.float32], bins: NDArray[np.int64], amount: int) -> None:
    """Add to each of the bins; they are distinct but for those of no expert, which nobody reads."""
    flat[bins.reshape(-1)] += amount


def _doubled(array: NDArray) -> NDArray:
    return np.concatenate([array, np.zeros_like(array)])
