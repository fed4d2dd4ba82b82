"""How many slots of GPU memory each layer gets."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

import numpy as np
from numpy.typing import NDArray

from sim.policies.base import SizingPolicy
from sim.policies.history import History
from sim.types import NO_EXPERT


class Even(SizingPolicy):
    """Give every layer as many slots as any other; a remainder goes to the first layers."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._num_layers = num_layers
        self._num_experts = num_experts

    def slots(self, num_slots: int) -> Sequence[int]:
        """Return the slots of each layer."""
        each, more = divmod(num_slots, self._num_layers)
        shares = [each + (layer < more) for layer in range(self._num_layers)]
        return [min(share, self._num_experts) for share in shares]


class FromLosses(SizingPolicy):
    """Share slots so that the summed loss of all layers is least, exactly, by dynamic programming.

    Parameters
    ----------
    losses
        Expected loads of a token in a layer with so many slots, float[num_layers, num_experts + 1].
    least
        Slots every layer gets, if there are as many, so that it holds the experts of one token.
    """

    def __init__(self, losses: NDArray[np.floating], least: int) -> None:
        self.losses = np.asarray(losses, dtype=np.float64)
        self._least = least

    def slots(self, num_slots: int) -> Sequence[int]:
        """Return the slots of each layer; of several best shares, the one with fewer in early layers."""
        num_layers, most = self.losses.shape[0], self.losses.shape[1] - 1
        least = min(self._least, num_slots // num_layers)
        spare = min(num_slots - least * num_layers, (most - least) * num_layers)
        best = np.zeros(spare + 1)  # least loss of the layers so far, by slots above ``least``
        choices = []
        for loss in self.losses[:, least:]:
            best, choice = _add_layer(best, loss)
            choices.append(choice)
        found = []
        for choice in reversed(choices):
            own = int(choice[spare])
            found.append(least + own)
            spare -= own
        return found[::-1]


class AdapMoE(FromLosses):
    """AdapMoE's share (arXiv 2408.10284): least expected loads, if any set of experts is as likely cached.

    A token that needs m experts that are absent waits for m loads, or m - 1 if the prefetch, which
    brings one expert and is right at a rate ``accuracy``, brought one of them. With s of E experts
    cached, m is hypergeometric. For E = 8 and k = 2 that is the published
    b (1 - s/8)(1 - a) + (1 - b) [2 (8-s)(7-s)/56 (1 - a) + (8-s)(7-s)/56 a + 2 (8-s)s/56 (1 - a)],
    b the share of tokens that use one expert only; the form for other E and k follows from the same
    reasoning. Layers differ by ``accuracy`` alone (and b): where they do not, the share is even.

    Parameters
    ----------
    num_layers, num_experts, top_k
        The model's.
    calibration
        Requests from which the accuracy of each layer is measured, where it is not given: how often
        the first that the gate of a layer picks on the input of the layer before is among what it
        chooses in the end. The first layer has no prefetch.
    accuracy
        Accuracy by layer, in [0, 1]; empty: measured. A list of another length than the trace has
        layers is read by relative depth.
    single
        Share b of tokens that use one expert, in [0, 1]. Without AdapMoE's dropping of second experts,
        which is lossy, there are none.
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        top_k: int,
        calibration: History,
        accuracy: Sequence[float] = (),
        single: float = 0.0,
    ) -> None:
        if not 0.0 <= single <= 1.0:
            raise ValueError(f"single = {single}: must be in [0, 1]")
        if not all(0.0 <= rate <= 1.0 for rate in accuracy):
            raise ValueError(f"accuracy = {list(accuracy)}: must be numbers in [0, 1], one a layer")
        given = list(accuracy) or _measured_accuracy(calibration)
        self.accuracy = [given[layer * len(given) // num_layers] for layer in range(num_layers)]
        losses = [
            [
                single * _expected_loads(slots, num_experts, 1, rate)
                + (1.0 - single) * _expected_loads(slots, num_experts, top_k, rate)
                for slots in range(num_experts + 1)
            ]
            for rate in self.accuracy
        ]
        super().__init__(np.array(losses), top_k)


class MissCurves(FromLosses):
    """Share slots by what an LRU of each size missed in each layer of the calibration requests.

    A use hits an LRU of s slots if the expert was among the last s distinct ones, so that one pass
    gives the misses of all sizes (Mattson 1970). Layers get slots where these save most loads; WiSP
    (arXiv 2606.21868) divides by the same marginal gain.

    Parameters
    ----------
    calibration
        The requests, as one run of tokens.
    top_k
        Experts a token uses in a layer; no layer gets fewer slots.
    most_tokens
        Tokens looked at, from the first, >= 1: a pass takes about half a millisecond a token.
    """

    def __init__(self, calibration: History, top_k: int, most_tokens: int = 4000) -> None:
        if most_tokens < 1:
            raise ValueError(f"most_tokens = {most_tokens}: must be >= 1")
        super().__init__(_lru_misses(calibration, most_tokens), top_k)


def _add_layer(
    best: NDArray[np.float64], loss: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """Add one layer: return the least loss by slots in all, and how many of them the layer takes."""
    total = np.full(len(best), np.inf)
    choice = np.zeros(len(best), dtype=np.intp)
    for own in range(min(len(loss), len(best))):
        candidate = best[: len(best) - own] + loss[own]
        better = candidate < total[own:] - 1e-12  # equal but for rounding: the fewer slots
        total[own:][better] = candidate[better]
        choice[own:][better] = own
    return total, choice


def _expected_loads(slots: int, num_experts: int, top_k: int, accuracy: float) -> float:
    """Return the loads that a token of ``top_k`` experts waits for: those absent, less a right prefetch."""
    absent = num_experts - slots
    none_absent = comb(slots, top_k) / comb(num_experts, top_k)
    return top_k * absent / num_experts - accuracy * (1.0 - none_absent)


def _measured_accuracy(calibration: History) -> list[float]:
    """Return how often the best pick of a layer's early gate is right, by layer; 0 for the first."""
    right = np.zeros(calibration.num_layers)
    asked = np.zeros(calibration.num_layers)
    for request in calibration.requests():
        early = request.gates_ahead.get(1)
        if early is None:
            raise ValueError(
                "accuracy: must be given, since the calibration trace has no next_gate_ids to measure it"
            )
        guess = early[request.num_prompt :, :-1, 0]
        chosen = request.ids[request.num_prompt :, 1:]
        used = guess != NO_EXPERT
        right[1:] += ((chosen == guess[..., None]).any(axis=2) & used).sum(axis=0)
        asked[1:] += used.sum(axis=0)
    return (right / np.maximum(asked, 1.0)).tolist()


def _lru_misses(calibration: History, most_tokens: int) -> NDArray[np.float64]:
    """Return misses a token by layer and LRU size, float64[num_layers, num_experts + 1]."""
    parts = [request.ids for request in calibration.requests()]
    ids = np.concatenate(parts)[:most_tokens]
    num_tokens, num_layers, _ = ids.shape
    found = np.empty((num_layers, calibration.num_experts + 1))
    for layer in range(num_layers):
        hits_from = np.bincount(_stack_distances(ids[:, layer]), minlength=found.shape[1])
        hits_from[0] = 0  # first uses, which no size hits
        found[layer] = np.count_nonzero(ids[:, layer] != NO_EXPERT) - hits_from.cumsum()
    return found / max(1, num_tokens)


def _stack_distances(ids: NDArray[np.integer]) -> list[int]:
    """Return for each use the least LRU size that still holds its expert, 0 for a first use."""
    order: list[int] = []  # by last use, the oldest first
    found = []
    for experts in ids.tolist():
        used = [expert for expert in experts if expert != NO_EXPERT]
        found += [len(order) - order.index(expert) if expert in order else 0 for expert in used]
        order = [expert for expert in order if expert not in used] + used
    return found
