"""Where one reasoning stage ends and the next begins: by cues, by annotation, by the clock.

SAEM (arXiv 2608.21614) finds stages by discourse cues in the decoded text; that much is public. The
guards on a stage's length, the rest after a cue and all other detectors are RECONSTRUCTION. Those that
watch the router are in sim/policies/drift.py.

A batch shares one resident set, so a boundary in any of its requests counts for all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from sim.policies.base import StageDetector
from sim.types import ConfigError, Phase, StepInfo

_TAIL_CHARS = 48
"""How much decoded text is remembered a request; longer than any cue."""
_REMEMBERED = 4096
"""Requests whose last words are remembered at least, so that one that sits out some steps goes on."""


def num_decoded(step: StepInfo) -> int:
    """Return how many of a step's tokens are decoded ones; these come first."""
    if step.phase == Phase.MIXED:
        return step.num_decoding
    return 0 if step.phase == Phase.PREFILL else step.num_tokens


class GuardedStageDetector(StageDetector):
    """Keeps the length of stages within bounds; what marks a boundary is a subclass's matter.

    Parameters
    ----------
    min_steps
        No boundary comes sooner than so many decode steps after the last.
    max_steps
        One is forced after so many; None: never.
    """

    def __init__(self, min_steps: int = 1, max_steps: int | None = None) -> None:
        if max_steps is not None and not 1 <= min_steps <= max_steps:
            raise ValueError(
                f"min_steps = {min_steps}: must be >= 1 and <= max_steps = {max_steps}"
            )
        if min_steps < 1:
            raise ValueError(f"min_steps = {min_steps}: must be >= 1")
        self.min_steps = min_steps
        self.max_steps = max_steps
        self._steps = 0

    def is_boundary(self, step: StepInfo) -> bool:
        """Return True when a mark has been seen, or a stage has lasted ``max_steps``; not in a prefill."""
        marked = self.is_marked(step)
        if step.phase == Phase.PREFILL:
            return False
        self._steps += 1
        forced = self.max_steps is not None and self._steps >= self.max_steps
        if forced or (marked and self._steps >= self.min_steps):
            self._steps = 0
            return True
        return False

    def is_marked(self, step: StepInfo) -> bool:
        """Tell whether the step looks like the first of a stage; called at every step, prefills too."""
        raise NotImplementedError


class CueStageDetector(GuardedStageDetector):
    """Find stage boundaries by discourse cues in the decoded text.

    The boundary comes with the token that completes the cue, so a little after the stage has begun.

    Parameters
    ----------
    cues
        Words or regular expressions, matched without regard to case.
    min_steps, max_steps
        Bounds on the length of a stage, in decode steps; RECONSTRUCTION (published systems: none given).
    refractory
        A cue does not count within so many tokens of the last one of its request that did ("Wait. But
        wait" is one change of mind); RECONSTRUCTION.
    sentence_start
        True: only just after the end of a line or sentence; False: at the start of any word.
    """

    def __init__(
        self,
        cues: Sequence[str],
        min_steps: int = 32,
        max_steps: int | None = 512,
        refractory: int = 0,
        sentence_start: bool = True,
    ) -> None:
        super().__init__(min_steps, max_steps)
        if refractory < 0:
            raise ValueError(f"refractory = {refractory}: must be >= 0")
        if isinstance(cues, str) or not cues or not all(isinstance(cue, str) for cue in cues):
            raise ValueError(f"cues = {cues}: must be a list of words, at least one")
        start = r"(?:^|\n\s*|[.!?]\s+)" if sentence_start else r"(?<!\w)"
        try:
            self._pattern = re.compile(rf"{start}(?:{'|'.join(cues)})(?=\W)", re.IGNORECASE)
        except re.error as error:
            raise ValueError(f"cues = {list(cues)}: not a regular expression ({error})") from None
        self.refractory = refractory
        self._tails: dict[int, tuple[str, int]] = {}  # and how many tokens ago a cue counted

    def is_marked(self, step: StepInfo) -> bool:
        """Add the step's pieces to their requests' tails; look for a cue whose end just came in sight."""
        decoded = num_decoded(step)
        if step.texts is None or not decoded:
            return False
        if len(self._tails) > _REMEMBERED:
            self._tails = {r: self._tails[r] for r in step.request_ids if r in self._tails}
        found = False
        for request, text in zip(step.request_ids[:decoded], step.texts[:decoded], strict=True):
            tail, since = self._tails.get(request, ("\n", self.refractory))
            tail = (tail + text)[-_TAIL_CHARS:]
            since += 1
            if since > self.refractory and self._ends_cue(tail, len(tail) - len(text)):
                found, since = True, 0
            self._tails[request] = tail, since
        return found

    def _ends_cue(self, tail: str, old: int) -> bool:
        """Tell whether the text from ``old`` on shows that a cue is over."""
        return any(cue.end() >= old for cue in self._pattern.finditer(tail))


class AnnotatedStageDetector(GuardedStageDetector):
    """Take the stages that the trace itself tells: what a perfect reader of the text would find.

    Needs a trace with annotated stages. It reads no future, only the label of the token processed.
    """

    needs: ClassVar[tuple[str, ...]] = ("stage",)

    def __init__(self, min_steps: int = 1, max_steps: int | None = None) -> None:
        super().__init__(min_steps, max_steps)
        self._changes = StageChanges()

    def is_marked(self, step: StepInfo) -> bool:
        """Tell whether a decoded token has another label than the token before it."""
        return self._changes.num_begun(step) > 0


class StageChanges:
    """Remembers each request's annotated stage; says where it changes."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}

    def num_begun(self, step: StepInfo) -> int:
        """Return how many decoded tokens begin an annotated stage; unknown labels (-1) change nothing.

        The first token that a request decodes begins one if its label differs from the prompt's last.
        """
        if step.stages is None:
            raise ConfigError(
                "policy.stages: the trace has no annotated stages (column stage), which this needs"
            )
        last, decoded, begun = self._last, num_decoded(step), 0
        if len(last) > _REMEMBERED:
            self._last = last = {r: last[r] for r in step.request_ids if r in last}
        for row, (request, stage) in enumerate(zip(step.request_ids, step.stages, strict=True)):
            if stage < 0:
                continue
            if row < decoded and last.get(request, stage) != stage:
                begun += 1
            last[request] = stage
        return begun


class FixedStageDetector(GuardedStageDetector):
    """End a stage every so many decode steps, whatever happens: what any real detector must beat.

    Parameters
    ----------
    steps
        Length of a stage in decode steps.
    """

    def __init__(self, steps: int = 128) -> None:
        if steps < 1:
            raise ValueError(f"steps = {steps}: must be >= 1")
        super().__init__(steps, steps)

    def is_marked(self, step: StepInfo) -> bool:
        """Return False: only the length ends a stage."""
        return False
