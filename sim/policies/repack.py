"""How an event's tokens are laid out for the expert kernels."""

from __future__ import annotations

from sim.policies.base import RepackPolicy


class ExpertAligned(RepackPolicy):
    """Sort the event's tokens by expert once a layer (SAEM's expert-aligned repacking).

    Every expert then computes one contiguous block: its gather and scatter kernels go, and one
    permutation of the activations before and after the experts comes instead.
    """

    packed = True
