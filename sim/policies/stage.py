"""Reasoning stages: where they end, and a cache that changes only there.

The rules of SAEM (arXiv 2608.21614) are public in outline only: cues in the decoded text mark a
boundary; at a boundary the finished stage's activation counts choose, layer by layer, the new
resident set; experts migrate only then; the first set comes from offline calibration. What is added
here to make that a program (guards on a stage's length, the moving average, hysteresis) is a
RECONSTRUCTION and is a parameter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sim.policies.base import CachePolicy, Evictable, StageDetector
from sim.policies.classic import rank
from sim.types import LayerRouting, Phase, StepInfo, View

_TAIL_CHARS = 48
"""How much decoded text is remembered a request; longer than any cue."""


class CueStageDetector(StageDetector):
    """Find stage boundaries by discourse cues at the start of a sentence or line.

    A batch shares one resident set, so a cue in any of its requests counts, but no boundary comes
    sooner than ``min_steps`` decode steps after the last, and one is forced after ``max_steps``.

    Parameters
    ----------
    cues
        Words or regular expressions, matched without regard to case just after a line or sentence end.
    min_steps, max_steps
        Bounds on the length of a stage, in decode steps; RECONSTRUCTION (published systems: none given).
    """

    def __init__(self, cues: Sequence[str], min_steps: int = 32, max_steps: int = 512) -> None:
        if not 1 <= min_steps <= max_steps:
            raise ValueError(
                f"min_steps = {min_steps}: must be >= 1 and <= max_steps = {max_steps}"
            )
        if isinstance(cues, str) or not cues or not all(isinstance(cue, str) for cue in cues):
            raise ValueError(f"cues = {cues}: must be a list of words, at least one")
        start = r"(?:^|\n\s*|[.!?]\s+)"
        try:
            self._pattern = re.compile(rf"{start}(?:{'|'.join(cues)})(?=\W)", re.IGNORECASE)
        except re.error as error:
            raise ValueError(f"cues = {list(cues)}: not a regular expression ({error})") from None
        self.min_steps = min_steps
        self.max_steps = max_steps
        self._tails: dict[int, str] = {}
        self._steps = 0

    def is_boundary(self, step: StepInfo) -> bool:
        """Return True when a cue has just been completed, or a stage has lasted ``max_steps``."""
        if step.phase == Phase.PREFILL:
            return False
        self._steps += 1
        cue = self._saw_cue(step)
        if self._steps >= self.max_steps or (cue and self._steps >= self.min_steps):
            self._steps = 0
            return True
        return False

    def _saw_cue(self, step: StepInfo) -> bool:
        """Add the step's pieces to their requests' tails; look for a cue whose end just came in sight."""
        if step.texts is None:
            return False
        found = False
        tails: dict[int, str] = {}
        decoded = step.num_decoding if step.phase == Phase.MIXED else step.num_tokens
        pieces = zip(step.request_ids[:decoded], step.texts[:decoded], strict=True)
        for request, text in pieces:
            tail = (self._tails.get(request, "\n") + text)[-_TAIL_CHARS:]
            tails[request] = tail
            old = len(tail) - len(text)
            found = found or any(cue.end() >= old for cue in self._pattern.finditer(tail))
        self._tails = tails
        return found


class StageCache(CachePolicy):
    """Hold the experts of the finished stage; move experts only at a stage boundary.

    Inside a stage nothing enters the cache. At a boundary an expert's score becomes its count in the
    finished stage plus ``memory`` times its old score; the best-scored experts that are absent replace
    the worst-scored residents, pair by pair, while the newcomer's score exceeds ``hysteresis`` times
    the resident's. The replacements load at low priority.

    Parameters
    ----------
    popularity
        Uses of each expert in a calibration trace, float[num_layers, num_experts]; the first set.
    memory
        Weight of the past in the score, in [0, 1); RECONSTRUCTION.
    hysteresis
        Factor >= 1 by which a newcomer must beat a resident; 1.05 is the swap rule of DAOP's code.
    """

    needs_event_room = False

    def __init__(
        self,
        popularity: NDArray[np.floating],
        memory: float = 0.5,
        hysteresis: float = 1.05,
    ) -> None:
        if not 0.0 <= memory < 1.0:
            raise ValueError(f"memory = {memory}: must be in [0, 1)")
        if not hysteresis >= 1.0:
            raise ValueError(f"hysteresis = {hysteresis}: must be >= 1")
        self.memory = memory
        self.hysteresis = hysteresis
        self._popularity = np.asarray(popularity, dtype=np.float64).ravel()
        self._score = np.zeros_like(self._popularity)
        self._count = np.zeros_like(self._popularity)
        self._keys: Sequence[int] = ()
        self._members: set[int] = set()
        self._incoming: list[int] = []
        self._outgoing: list[int] = []
        self._stage = 0
        self._slots = 0

    def start(self, keys: Sequence[int], num_slots: int, view: View) -> None:
        """Learn the pool; scores start at zero, so that the first finished stage decides alone."""
        self._keys = keys
        self._slots = num_slots

    def preload(self, view: View) -> Sequence[int]:
        """Return the pool's keys by popularity in the calibration trace."""
        return rank(self._keys, self._popularity)

    def observe(self, routing: LayerRouting, view: View) -> None:
        """Close the stage at a boundary, then count the event's uses."""
        if view.stage != self._stage:
            self._stage = view.stage
            self._close_stage()
        for key, tokens in zip(routing.experts, routing.token_counts, strict=True):
            self._count[key] += tokens

    def admits(self, key: int, view: View) -> bool:
        """Refuse misses: experts migrate only at boundaries."""
        return False

    def wants(self, view: View) -> Sequence[int]:
        """Return what the last boundary decided to bring in and has not come yet."""
        return self._incoming

    def choose_victim(self, evictable: Evictable, view: View) -> int | None:
        """Return the worst-scored resident that the last boundary gave up; None if none is free."""
        for key in self._outgoing:
            if evictable(key):
                return key
        return None

    def give_up(self, evictable: Evictable, view: View) -> int | None:
        """Return the worst-scored member; before the first boundary, the least popular."""
        score, popularity = self._score, self._popularity
        return min(
            filter(evictable, self._members),
            key=lambda key: (score[key], popularity[key], -key),
            default=None,
        )

    def on_resize(self, num_slots: int, view: View) -> None:
        """Learn how many experts the next boundary may choose."""
        self._slots = num_slots

    def stale(self, queued: Sequence[int], view: View) -> Sequence[int]:
        """Return queued newcomers that a later boundary has decided against."""
        return [key for key in queued if key in self._outgoing]

    def on_insert(self, key: int, view: View) -> None:
        """Join the members."""
        self._members.add(key)
        if key in self._incoming:
            self._incoming.remove(key)

    def on_evict(self, key: int) -> None:
        """Leave the members."""
        self._members.discard(key)
        if key in self._outgoing:
            self._outgoing.remove(key)

    def _close_stage(self) -> None:
        """Rank the finished stage's experts and pair newcomers with the residents they replace."""
        keys = np.asarray(self._keys)
        self._score[keys] = self._count[keys] + self.memory * self._score[keys]
        self._count[keys] = 0.0
        score = self._score
        ranked = rank(self._keys, score)
        absent = [key for key in ranked if key not in self._members and score[key] > 0.0]
        worst = [key for key in reversed(ranked) if key in self._members]
        free = max(0, self._slots - len(self._members))
        incoming, outgoing = absent[:free], []
        for newcomer, resident in zip(absent[free:], worst, strict=False):
            if score[newcomer] <= self.hysteresis * score[resident]:
                break
            incoming.append(newcomer)
            outgoing.append(resident)
        self._incoming, self._outgoing = incoming, outgoing
