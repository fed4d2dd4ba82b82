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

    Decode steps are counted from 1.

    Attributes
    ----------
    num_steps
        Decode steps seen.
    true_steps, found_steps
        The decode steps of the boundaries that are annotated, and of those that were found.
    taken
        The true boundaries that were found right, in the order of their finding.
    delays
        Decode steps between each of these and its finding.
    """

    def __init__(self, tolerance: int = TOLERANCE) -> None:
        if tolerance < 0:
            raise ValueError(f"tolerance = {tolerance}: must be >= 0")
        self.tolerance = tolerance
        self.num_steps = 0
        self.true_steps: list[int] = []
        self.found_steps: list[int] = []
        self.taken: list[int] = []
        self.delays: list[int] = []
        self._open: list[int] = []  # true boundaries that nobody has found
        self._changes = StageChanges()
        self._is_annotated = False

    def add(self, step: StepInfo, is_boundary: bool) -> None:
        """Count one step, and whether it was found to begin a stage."""
        decoded = num_decoded(step)
        self.num_steps += decoded > 0
        if is_boundary:
            self.found_steps.append(self.num_steps)
        if step.stages is None:
            return
        self._is_annotated = True
        begun = self._changes.num_begun(step)
        if not decoded:
            return
        if begun:
            self._begin(self.num_steps)
        if is_boundary:
            self._match(self.num_steps)

    def held_against(self, found_steps: list[int]) -> StageScore:
        """Return the score that boundaries at other decode steps, ascending, would have in this run."""
        other = StageScore(self.tolerance)
        other._is_annotated, other.num_steps = self._is_annotated, self.num_steps
        other.found_steps = found_steps
        place, true = 0, self.true_steps
        for found in found_steps:
            while place < len(true) and true[place] <= found:
                other._begin(true[place])
                place += 1
            other._match(found)
        other.true_steps = true
        return other

    def _begin(self, step: int) -> None:
        self.true_steps.append(step)
        self._open.append(step)

    def _match(self, step: int) -> None:
        """Let a found boundary take the latest open one, if it is near enough."""
        if self._open and step - self._open[-1] <= self.tolerance:
            self.taken.append(self._open.pop())
            self.delays.append(step - self.taken[-1])
        else:
            self._open.clear()  # nobody can find those any more

    @property
    def num_true(self) -> int:
        """Boundaries annotated."""
        return len(self.true_steps)

    @property
    def num_found(self) -> int:
        """Boundaries found."""
        return len(self.found_steps)

    @property
    def num_right(self) -> int:
        """Boundaries found right."""
        return len(self.delays)

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
    def f1(self) -> float | None:
        """Harmonic mean of precision and recall; 0 if none was found, None where there is no true one."""
        both = self.num_found + self.num_true
        return 2 * self.num_right / both if self.num_true else None

    @property
    def mean_delay(self) -> float | None:
        """Decode steps between a true boundary and its finding, on average; None if none was found."""
        return sum(self.delays) / self.num_right if self.num_right else None
