"""A set of experts that prompts may change, and decoding does not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sim.policies.base import CachePolicy, Evictable
from sim.policies.classic import by_key, rank
from sim.types import LayerRouting, Phase, View


class PrefillSwap(CachePolicy):
    """Hold a calibrated set that changes only while a prompt is processed.

    After a layer's event in a prompt, each missing expert that was loaded is exchanged for the resident
    of its layer that served the fewest tokens, if it served more than ``factor`` times as many. What was
    given up serves its tokens of this prompt on the GPU before it goes. As many can be exchanged an
    event as there are staging slots to keep them in (``cache.staging_slots``).

    Parameters
    ----------
    popularity
        Uses of each expert in a calibration trace, float[num_layers, num_experts]; the first set.
    factor
        1.05 is DAOP's (ecolab-nus/DAOP); 1 takes the most used of a prompt.
    most
        Share of a layer's experts that may be exchanged an event; DAOP's is one half.
    min_tokens
        Tokens of a step from which it changes the set; KTransformers' dynamic update wants 1024 to 4096.
    """

    admits_after = True

    def __init__(
        self,
        popularity: NDArray[np.floating],
        factor: float = 1.05,
        most: float = 0.5,
        min_tokens: int = 1,
    ) -> None:
        if not factor >= 1.0:
            raise ValueError(f"factor = {factor}: must be >= 1")
        if not 0.0 < most <= 1.0:
            raise ValueError(f"most = {most}: must be in (0, 1]")
        if min_tokens < 1:
            raise ValueError(f"min_tokens = {min_tokens}: must be >= 1")
        self.factor = factor
        self.min_tokens = min_tokens
        self._num_experts = popularity.shape[1]
        self._most_swaps = int(most * self._num_experts)
        self._popularity = by_key(popularity)
        self._keys: Sequence[int] = ()
        self._members: dict[int, set[int]] = {}  # by layer
        self._given_up: list[int] = []
        self._shrinking = False
        self._tokens: dict[int, int] = {}
        self._newcomer: int | None = None
        self._swaps = 0

    def start(self, keys: Sequence[int], num_slots: int, view: View) -> None:
        """Learn the pool's keys."""
        self._keys = keys

    def preload(self, view: View) -> Sequence[int]:
        """Return the pool's keys by popularity, the first of equals first."""
        return rank(self._keys, self._popularity)

    def observe(self, routing: LayerRouting, view: View) -> None:
        """Count the tokens of a prompt's event; in other steps forget them."""
        self._newcomer, self._swaps = None, 0
        if view.step.phase == Phase.DECODE or view.step.num_tokens < self.min_tokens:
            self._tokens = {}
        else:
            self._tokens = dict(zip(routing.experts, routing.token_counts, strict=True))

    def admits(self, key: int, view: View) -> bool:
        """Admit only in a prompt."""
        return bool(self._tokens)

    def choose_victim(self, evictable: Evictable, view: View) -> int | None:
        """Return whom the newcomer replaces, or the newcomer; None where nobody has come."""
        key, tokens, popularity = self._newcomer, self._tokens, self._popularity
        if key is None:
            return None
        others = filter(evictable, self._members[key // self._num_experts] - {key})
        coldest = min(
            others, key=lambda other: (tokens.get(other, 0), popularity[other], other), default=key
        )
        if self._swaps >= self._most_swaps or tokens[key] <= self.factor * tokens.get(coldest, 0):
            return key
        self._swaps += 1
        return coldest

    def give_up(self, evictable: Evictable, view: View) -> int | None:
        """Return the least popular member."""
        everybody = [key for members in self._members.values() for key in members]
        self._shrinking = True
        return min(
            filter(evictable, everybody), key=lambda key: (self._popularity[key], key), default=None
        )

    def wants(self, view: View) -> Sequence[int]:
        """Return what memory that shrank took, to come back when there is room."""
        return self._given_up if view.step.phase == Phase.DECODE else ()

    def on_insert(self, key: int, view: View) -> None:
        """Join the members; in a prompt's event as the one that wants room."""
        self._members.setdefault(key // self._num_experts, set()).add(key)
        self._newcomer = key if key in self._tokens else None
        if key in self._given_up:
            self._given_up.remove(key)

    def on_evict(self, key: int) -> None:
        """Leave the members."""
        self._members[key // self._num_experts].discard(key)
        if self._shrinking:
            self._given_up.append(key)
            self._shrinking = False
