"""At a stage boundary, load what the new stage is expected to use most."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sim.policies.base import PrefetchPolicy
from sim.policies.classic import rank
from sim.policies.history import History
from sim.types import NO_EXPERT, LayerRouting, View


class StagePrefetch(PrefetchPolicy):
    """Load each layer's hot set when a new stage begins, over the events that follow.

    The new stage is expected to be like the one that has just ended. A layer's hot set is proposed at the
    event before that layer, until all of it has arrived or another boundary comes.

    Parameters
    ----------
    num_layers, num_experts
        Of the trace.
    width
        Experts of a layer's hot set, >= 1.
    """

    def __init__(self, num_layers: int, num_experts: int, width: int = 8) -> None:
        if width < 1:
            raise ValueError(f"width = {width}: must be >= 1")
        self.width = width
        self._num_keys = num_layers * num_experts
        self._count = np.zeros(self._num_keys)
        self._stage = 0
        self._hot: list[list[int]] = [[] for _ in range(num_layers)]

    def observe(self, routing: LayerRouting, view: View) -> None:
        """Close the stage at a boundary, then count the event's uses."""
        if view.stage != self._stage:
            self._stage = view.stage
            self._begin(view)
        for key, tokens in zip(routing.experts, routing.token_counts, strict=True):
            if key < self._num_keys:
                self._count[key] += tokens

    def propose(self, routing: LayerRouting, view: View) -> Sequence[int]:
        """Return what is still absent of the next layer's hot set."""
        hot = self._hot[(routing.layer + 1) % len(self._hot)]
        if not hot:
            return ()
        absent = [key for key in hot if not view.is_resident(key)]
        hot[:] = absent
        return absent

    def expected(self, view: View) -> NDArray[np.float64]:
        """Return how much the stage that begins is expected to use each expert, float64[num_keys]."""
        return self._count

    def _begin(self, view: View) -> None:
        """Choose the hot sets of the stage that begins."""
        scores = self.expected(view)
        for layer in range(len(self._hot)):
            ranked = rank(view.keys.layer_keys(layer), scores)[: self.width]
            self._hot[layer] = [key for key in ranked if scores[key] > 0.0]
        self._count = np.zeros(self._num_keys)


class AnnotatedStagePrefetch(StagePrefetch):
    """As StagePrefetch, but go by what the calibration requests used in a stage of the same name.

    The tokens' annotation tells which stage begins; one that the calibration does not have is expected to
    be like the one that has ended.

    Parameters
    ----------
    calibration
        Where the stages' hot sets come from; its stages must be annotated.
    width
        Experts of a layer's hot set, >= 1.
    """

    needs = ("stage",)

    def __init__(self, calibration: History, width: int = 8) -> None:
        super().__init__(calibration.num_layers, calibration.num_experts, width)
        self._of_stage = _uses_by_stage(calibration)

    def expected(self, view: View) -> NDArray[np.float64]:
        """Return the uses of the stage in the calibration, float64[num_keys]."""
        stages = view.step.stages
        return self._of_stage.get(stages[-1], self._count) if stages else self._count


def _uses_by_stage(calibration: History) -> dict[int, NDArray[np.float64]]:
    """Return the uses of each expert by annotated stage, float64[num_keys] each."""
    num_layers, num_experts = calibration.num_layers, calibration.num_experts
    found: dict[int, NDArray[np.float64]] = {}
    for past in calibration.requests():
        if past.stages is None:
            continue
        keys = past.ids.astype(np.int64) + np.arange(num_layers)[:, None] * num_experts
        used = past.ids != NO_EXPERT
        for stage in np.unique(past.stages).tolist():
            rows = past.stages == stage
            counts = np.bincount(keys[rows][used[rows]], minlength=num_layers * num_experts)
            found[stage] = found.get(stage, 0.0) + counts.astype(np.float64)
    return found
