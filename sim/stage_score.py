"""How well a stage detector finds the stages that a trace is annotated with.

A decode step at which any request processes the first token of an annotated stage is a *true* boundary.
A *found* boundary is right if there is a true one, not yet taken, at most ``tolerance`` decode steps
before it or at it; of several it takes the latest. A boundary found before the true one is wrong: a
detector reads no future, so it was luck.
"""

from __future__ import annotations

from sim.policies.detectors import StageChanges, num_decoded
from sim.types import StepInfo

TOLERANCE = 32
"""Decode steps (with one request: tokens) by which a boundary may be found late; a cue is a few words."""


class StageScore:
    """Counts boundaries, step by step.

    Attributes
    ----------
    num_true, num_found, num_right
        Boundaries annotated, found, and found right.
    """

    def __init__(self, tolerance: int = TOLERANCE) -> None:
        if tolerance < 0:
            raise ValueError(f"tolerance = {tolerance}: must be >= 0")
        self.tolerance = tolerance
        self.num_true = self.num_found = self.num_right = 0
        self._delays = self._place = 0
        self._open: list[int] = []  # true boundaries that nobody has found, by decode step
        self._changes = StageChanges()
        self._is_annotated = False

    def add(self, step: StepInfo, is_boundary: bool) -> None:
        """Count one step, and whether it was found to begin a stage."""
        self.num_found += is_boundary
        if step.stages is None:
            return
        self._is_annotated = True
        begun = self._changes.num_begun(step)
        if not num_decoded(step):
            return
        self._place += 1
        if begun:
            self.num_true += 1
            self._open.append(self._place)
        if is_boundary:
            self._match()

    def _match(self) -> None:
        """Let a found boundary take the latest open one, if it is near enough."""
        if self._open and self._place - self._open[-1] <= self.tolerance:
            self.num_right += 1
            self._delays += self._place - self._open.pop()
        else:
            self._open.clear()  # nobody can find those any more

    @property
    def precision(self) -> float | None:
        """Share of the found boundaries that are right; None without annotation, or if none was found."""
        known = self._is_annotated and self.num_found
        return self.num_right / self.num_found if known else None

    @property
    def recall(self) -> float | None:
        """Share of the true boundaries that were found; None where there is none."""
        return self.num_right / self.num_true if self.num_true else None

    @property
    def mean_delay(self) -> float | None:
        """Decode steps between a true boundary and its finding, on average; None if none was found."""
        return self._delays / self.num_right if self.num_right else None
