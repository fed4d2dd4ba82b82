"""A stage cache that recognises a stage it has seen before; a variant beyond the published systems."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from sim.policies.stage import StageCache
from sim.types import LayerRouting, View


class StageMemory(StageCache):
    """StageCache that remembers finished stages and recognises one that returns. Not in the paper.

    Reasoning goes back and forth: after a check comes another step. Here the migration waits until
    ``probe_steps`` steps of the new stage have run. Their counts are compared, by cosine, with those of
    each remembered stage; the most similar one's counts are the scores, if it is at least
    ``advantage`` times as similar as the stage just finished. Else the scores are StageCache's. A stage
    that was recognised is merged into the one it was taken for, else it is remembered as new. Each pool
    judges by its own experts. A stage of fewer than ``probe_steps`` steps moves nothing.

    Parameters
    ----------
    popularity, memory, hysteresis, migrate_bytes
        As in :class:`StageCache`; ``memory`` is also what a stage keeps of itself when it returns.
    probe_steps
        Steps of a new stage that are looked at, >= 1.
    num_stages
        Stages that are remembered; of more, the one that was longest not met is forgotten.
    advantage
        Factor >= 1 by which a remembered stage must be more similar than the last.
    """

    def __init__(
        self,
        popularity: NDArray[np.floating],
        memory: float = 0.5,
        hysteresis: float = 1.05,
        migrate_bytes: int | None = None,
        probe_steps: int = 16,
        num_stages: int = 16,
        advantage: float = 1.05,
    ) -> None:
        super().__init__(popularity, memory, hysteresis, migrate_bytes)
        for name, value in (("probe_steps", probe_steps), ("num_stages", num_stages)):
            if value < 1:
                raise ValueError(f"{name} = {value}: must be >= 1")
        if not advantage >= 1.0:
            raise ValueError(f"advantage = {advantage}: must be >= 1")
        self.probe_steps = probe_steps
        self.num_stages = num_stages
        self.advantage = advantage
        self._known: list[dict[int, float]] = []  # the one met last at the end
        self._is_known = False  # the stage under way was taken for the last of them
        self._decides_at: int | None = None  # the step at which the migration is decided

    def observe(self, routing: LayerRouting, view: View) -> None:
        """Count the event's uses; decide when enough of a new stage has been seen."""
        super().observe(routing, view)
        if self._decides_at is not None and view.step.step >= self._decides_at:
            self._decides_at = None
            self.migrate(self._recognise(), view)

    def close_stage(self, view: View) -> None:
        """File the finished stage, and look at the new one before anything moves."""
        self._file(self._count)
        self._remember()
        self._decides_at = view.step.step + self.probe_steps

    def _file(self, count: Mapping[int, int]) -> None:
        old = self._known.pop() if self._is_known else {}
        merged = {key: self.memory * value for key, value in old.items()}
        for key, uses in count.items():
            merged[key] = merged.get(key, 0.0) + uses
        self._known = [*self._known, merged][-self.num_stages :]
        self._is_known = False

    def _recognise(self) -> Mapping[int, float]:
        """Return the scores: those of the remembered stage that the new one is, or StageCache's."""
        last = len(self._known) - 1
        alike = [_cosine(self._count, known) for known in self._known]
        best = max(range(len(alike)), key=lambda place: (alike[place], place))
        if best == last or alike[best] < self.advantage * alike[last]:
            return self._score
        self._known.append(self._known.pop(best))
        self._is_known = True
        return self._known[-1]


def _cosine(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Return the cosine of two counts by key; 0 if one of them is empty."""
    dot = sum(value * other.get(key, 0.0) for key, value in one.items())
    norms = sum(v * v for v in one.values()) * sum(v * v for v in other.values())
    return float(dot / norms**0.5) if norms else 0.0
