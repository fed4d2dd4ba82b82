"""Sets of experts as bits: overlap and union of many rows at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from traces.schema import NO_EXPERT

_BITS = 16
_POPULATION = np.array([word.bit_count() for word in range(2**_BITS)], dtype=np.uint8)


def bit_sets(ids: NDArray[np.uint16], num_experts: int) -> NDArray[np.uint16]:
    """Return the set of each row and layer, uint16[num_rows, num_layers, num_words].

    ``ids`` is uint16[num_rows, num_layers, top_k]; expert e is bit e % 16 of word e // 16.
    """
    words = np.zeros((*ids.shape[:2], -(-num_experts // _BITS)), dtype=np.uint16)
    bit = np.left_shift(np.uint16(1), ids % _BITS)
    bit[ids == NO_EXPERT] = 0
    word = np.minimum(ids // _BITS, words.shape[2] - 1)[..., None]
    for slot in range(ids.shape[2]):
        at = word[:, :, slot]
        held = np.take_along_axis(words, at, axis=2)
        np.put_along_axis(words, at, held | bit[:, :, slot, None], axis=2)
    return words


def sizes(sets: NDArray[np.uint16]) -> NDArray[np.int64]:
    """Return the number of experts in each set [..., num_words], int64[...]."""
    return np.asarray(_POPULATION[sets].sum(axis=-1, dtype=np.int64))
