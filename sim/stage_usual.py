"""The experts that a token usually uses: what its identity alone says of its routing.

The same words stand together in the same stage ("Step", digits), and the same word likes the same
experts. Taken away from what a token uses, this leaves what its context adds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_PRIOR_TOKENS = 8.0
"""A token seen n times elsewhere counts n / (n + 8), the layer's mean use the rest: rare ones tell little."""


class UsualUse:
    """How often each token id uses each expert of one layer, in the other texts.

    Parameters
    ----------
    token_ids
        Of each text, int[num_tokens]; an unknown id (-1) is an id like any other.
    """

    def __init__(self, token_ids: Sequence[NDArray[np.int32]]) -> None:
        _, inverse = np.unique(np.concatenate(token_ids), return_inverse=True)
        ends = np.cumsum([len(ids) for ids in token_ids])
        self._ids = np.split(inverse, ends[:-1])
        self._counts = np.bincount(inverse).astype(np.float32)
        self._sums = np.zeros((len(self._counts), 0), np.float32)

    def learn(self, layer: Sequence[NDArray[np.float32]]) -> None:
        """Take in a layer; of each text what its tokens use, float32[num_tokens, num_experts]."""
        self._sums = np.zeros((len(self._counts), layer[0].shape[1]), np.float32)
        for ids, uses in zip(self._ids, layer, strict=True):
            np.add.at(self._sums, ids, uses)

    def beyond(self, text: int, uses: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return what the tokens of a text use beyond what is usual elsewhere, like ``uses``."""
        found, own = np.unique(self._ids[text], return_inverse=True)
        sums = np.zeros((len(found), uses.shape[1]), np.float32)
        np.add.at(sums, own, uses)
        rest = self._sums[found] - sums
        seen = (self._counts[found] - np.bincount(own))[:, None]
        every, tokens = self._sums.sum(axis=0) - uses.sum(axis=0), self._counts.sum() - len(uses)
        mean = every / max(1.0, float(tokens))
        usual = (rest + _PRIOR_TOKENS * mean) / (seen + _PRIOR_TOKENS)
        return np.asarray(uses - usual[own], np.float32)
