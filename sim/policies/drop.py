"""Experts that are not computed at all: cold ones, unimportant ones. Decoded tokens only."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import ClassVar

from sim.policies.rewriter import Choice, TokenRewriter, dropped
from sim.types import NO_EXPERT, View

MIXTRAL_HESSIAN = (
    46.69, 17.3, 13.02, 7.641, 4.169, 2.23, 1.256, 0.8445, 0.6838, 0.5603, 0.5126, 0.478, 0.4454,
    0.4356, 0.3836, 0.3099, 0.2331, 0.1761, 0.1384, 0.1138, 0.1047, 0.09543, 0.08625, 0.07713,
    0.06938, 0.06109, 0.05025, 0.04256, 0.0335, 0.02527, 0.02068, 0.02295,
)  # fmt: skip
"""Sensitivity of the loss to each of Mixtral-8x7B's 32 layers (run.py of PKU-SEC-Lab/AdapMoE,
rounded to four digits)."""


class ColdDrop(TokenRewriter):
    """Drop a pick that is absent and weighs less than ``fraction`` of a uniform share (BigMoeOnEdge).

    Absent: neither on the GPU nor on its way. The uniform share is 1 / top-k of the token's weight.
    The heaviest pick always runs. Helldez/BigMoeOnEdge docs/expert-dropping.md; each token is judged
    by itself, as there.

    Parameters
    ----------
    fraction
        F in (0, 1].
    renormalise
        Whether the others take up the dropped weight (``drop_renorm`` there, on).
    """

    needs: ClassVar[tuple[str, ...]] = ("expert_weights",)

    def __init__(self, fraction: float = 0.75, renormalise: bool = True) -> None:
        if not 0.0 < fraction <= 1.0:
            raise ValueError(f"fraction = {fraction}: must be in (0, 1]")
        self.fraction = fraction
        self.renormalise = renormalise

    def choose(
        self, token: int, experts: list[int], weights: list[float] | None, view: View
    ) -> Choice | None:
        """Return the token without its light absent picks."""
        known = weighed(weights, self)
        least = self.fraction * sum(known) / len(known)
        least = min(least, max(known))
        light = [slot for slot in self.absent(experts) if known[slot] < least]
        return dropped(experts, known, light, self.renormalise) if light else None


class SensitivityDrop(TokenRewriter):
    """Drop the lightest picks where the layer bears it (AdapMoE, arXiv 2408.10284).

    In layer l the second of two picks is dropped when its normalised weight is below
    sqrt(threshold / hessian[l]), wherever it is; the other's weight becomes 1. For more than two picks
    (RECONSTRUCTION) as many of the lightest go as weigh less than that together.

    Parameters
    ----------
    threshold
        > 0; the repository's run.py has .005.
    hessian
        Sensitivity of each layer, > 0. None (RECONSTRUCTION): Mixtral's, stretched over the layers by
        relative depth.
    """

    needs: ClassVar[tuple[str, ...]] = ("expert_weights",)

    only_misses = False

    def __init__(
        self, num_layers: int, threshold: float = 0.005, hessian: Sequence[float] | None = None
    ) -> None:
        if not threshold > 0.0:
            raise ValueError(f"threshold = {threshold}: must be > 0")
        values = _stretched(MIXTRAL_HESSIAN, num_layers) if hessian is None else list(hessian)
        if len(values) != num_layers or not min(values) > 0.0:
            raise ValueError(f"hessian = {values}: must be {num_layers} numbers > 0, one a layer")
        self._bounds = [sqrt(threshold / value) for value in values]

    def choose(
        self, token: int, experts: list[int], weights: list[float] | None, view: View
    ) -> Choice | None:
        """Return the token without the picks that the layer can spare."""
        known = weighed(weights, self)
        used = [slot for slot, expert in enumerate(experts) if expert != NO_EXPERT]
        used.sort(key=known.__getitem__)
        room, spared = self._bounds[view.layer] * sum(known), list[int]()
        for slot in used[:-1]:
            room -= known[slot]
            if room <= 0.0:
                break
            spared.append(slot)
        return dropped(experts, known, spared, True) if spared else None


class SkipUnimportant(TokenRewriter):
    """Skip absent picks that come late in the order of weight (HOBBIT's skip alone, arXiv 2411.01433).

    With the picks in falling order of weight, an absent one is skipped if those before it hold more
    than ``skip_above`` of the token's weight. The weights of the others stay.

    Parameters
    ----------
    skip_above
        In [0, 1]; the paper has .9.
    """

    needs: ClassVar[tuple[str, ...]] = ("expert_weights",)

    def __init__(self, skip_above: float = 0.9) -> None:
        if not 0.0 <= skip_above <= 1.0:
            raise ValueError(f"skip_above = {skip_above}: must be in [0, 1]")
        self.skip_above = skip_above

    def choose(
        self, token: int, experts: list[int], weights: list[float] | None, view: View
    ) -> Choice | None:
        """Return the token without its late absent picks."""
        known, states = weighed(weights, self), self.states
        late = [
            slot
            for slot, before in before_each(experts, known)
            if before > self.skip_above and not states[experts[slot]]
        ]
        return dropped(experts, known, late, False) if late else None


def before_each(experts: Sequence[int], weights: Sequence[float]) -> list[tuple[int, float]]:
    """Return (slot, share of the weight before it) of the used slots in falling order of weight."""
    used = [slot for slot, expert in enumerate(experts) if expert != NO_EXPERT]
    used.sort(key=weights.__getitem__, reverse=True)  # equals stay in order
    total, found, before = sum(weights) or 1.0, list[tuple[int, float]](), 0.0
    for slot in used:
        found.append((slot, before / total))
        before += weights[slot]
    return found


def weighed(weights: list[float] | None, policy: TokenRewriter) -> list[float]:
    """Return a token's weights; ValueError if there are none."""
    if weights is None:
        raise ValueError(f"{type(policy).__name__}: the trace must have expert_weights")
    return weights


def _stretched(values: Sequence[float], num: int) -> list[float]:
    """Return ``num`` values by relative place among ``values``, linear in between."""
    if num == 1:
        return [values[0]]
    found = []
    for place in range(num):
        where = place * (len(values) - 1) / (num - 1)
        low = min(int(where), len(values) - 2)
        found.append(values[low] + (where - low) * (values[low + 1] - values[low]))
    return found
