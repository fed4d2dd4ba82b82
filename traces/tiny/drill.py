"""Drills: step lines on unrelated numbers, which show the model many sums per text.

A problem holds about three sums among 470 characters, too few to learn every sum soon; a drill
holds about fifteen, in the words of the problems' own steps.
"""

from __future__ import annotations

import re

import numpy as np

from traces.tiny.data import LARGEST, Operation, apply, write_step
from traces.tiny.stages import STEP, WAIT, stage_of_line

DRILL_CHARACTERS = 440
_RESULT = re.compile(r"= (\d+\.)$")


def _sum(rng: np.random.Generator) -> tuple[int, Operation]:
    """Draw a left operand and an operation as the problems have them, evenly over the range."""
    sign = "++++----*/"[int(rng.integers(10))]
    a, b = int(rng.integers(2, 10)), int(rng.integers(2, 10))
    if sign in "*/":
        return (a, (sign, b)) if sign == "*" else (a * b, (sign, b))
    while True:
        left, operand = int(rng.integers(1, LARGEST + 1)), int(rng.integers(1, 10))
        if 1 <= apply(left, sign, operand) <= LARGEST:
            return left, (sign, operand)


def sample_drill(rng: np.random.Generator) -> str:
    """Return lines of steps 1, 2, 3, 4, 1, ... whose numbers do not depend on each other."""
    lines: list[str] = []
    while sum(map(len, lines)) < DRILL_CHARACTERS:
        left, operation = _sum(rng)
        lines.append(write_step(rng, len(lines) % 4 + 1, left, operation))
    return "\n".join(lines)


def result_spans(text: str) -> list[tuple[int, int]]:
    """Return the (start, end) of every result, with its full stop, that a step must compute.

    The results of hedged steps are wrong on purpose, and those of a check are copies: both are
    left out.
    """
    spans, start = [], 0
    for line in text.split("\n"):
        found = _RESULT.search(line)
        hedged = line.startswith("Step") and stage_of_line(line, "") == WAIT
        if found and not hedged and stage_of_line(line, "") in (STEP, WAIT):
            spans.append((start + found.start(1), start + found.end(1)))
        start += len(line) + 1
    return spans
