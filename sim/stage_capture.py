"""Which experts should be in memory for a stage: what share of its uses would each rule have held?

Each rule names for each stage and layer the experts that somebody used most: in the other requests, in
their stages of the same kind, or in the stage before. The uses that fall on as many of them as a cache
has slots are held. Nothing is loaded within a stage, so this is the hit rate of a set fixed by stage.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.stage_inference import RESAMPLES, Floats, resamples
from sim.stage_kinds import Stages

RULES = ("all", "kind", "other", "before", "itself")
"""All stages of the other requests; those of the same kind; those of other kinds; the stage before in
the same request (the first stage: all); the stage itself, which nobody can know beforehand."""


@dataclass(frozen=True, slots=True)
class Capture:
    """The share of uses that each rule holds with ``slots`` experts a layer.

    ``gain`` is by how much the rule holds more than "all" does, with the bounds of its 95 % interval.
    """

    slots: int
    held: dict[str, float]
    gain: dict[str, tuple[float, float, float]]


def capture(stages: Stages, slots: int, rng: np.random.Generator) -> Capture:
    """Hold every stage against every rule."""
    texts = stages.num_texts
    uses = np.bincount(stages.text, stages.uses.sum(axis=(1, 2)), texts)
    held = {
        rule: np.bincount(stages.text, _held(stages, ranks, slots), texts)
        for rule, ranks in _rules(stages).items()
    }
    weights = resamples(texts, RESAMPLES, rng)
    gain = {}
    for rule in RULES[1:]:
        more = held[rule] - held["all"]
        low = high = float("nan")
        if len(weights):
            low, high = np.quantile((weights @ more) / (weights @ uses), [0.025, 0.975]).tolist()
        gain[rule] = (float(more.sum() / uses.sum()), low, high)
    shares = {rule: float(found.sum() / uses.sum()) for rule, found in held.items()}
    return Capture(slots, shares, gain)


def _held(stages: Stages, ranking: Floats, slots: int) -> Floats:
    """Return how many uses of each stage fall on its ``slots`` best ranked experts, float64[num_stages]."""
    best = np.argsort(-ranking, axis=2, kind="stable")[:, :, :slots]
    return np.asarray(np.take_along_axis(stages.uses, best, axis=2).sum(axis=(1, 2)))


def _rules(stages: Stages) -> dict[str, Floats]:
    """Return what each rule ranks the experts by, float64[num_stages, num_layers, num_experts] each."""
    uses, text = stages.uses, stages.text
    others = uses.sum(axis=0) - _summed(uses, text)[text]
    pair = text * (int(stages.kind.max()) + 1) + stages.kind
    same = _summed(uses, stages.kind)[stages.kind] - _summed(uses, pair)[pair]
    before = np.concatenate([others[:1], uses[:-1]])
    first = np.concatenate([[True], text[1:] != text[:-1]])
    before[first] = others[first]
    # A kind that no other request has teaches nothing: the rule falls back to all.
    known = same.sum(axis=(1, 2)) > 0
    kind = np.where(known[:, None, None], same, others)
    ranked = (others, kind, others - same, before, uses)
    return dict(zip(RULES, ranked, strict=True))


def _summed(uses: Floats, group: NDArray[np.int64]) -> Floats:
    """Return the uses by group, float64[num_groups, num_layers, num_experts]."""
    found = np.zeros((int(group.max()) + 1, *uses.shape[1:]))
    np.add.at(found, group, uses)
    return found
