"""Stage labels of a generated text, from the way its lines begin."""

from __future__ import annotations

import re

QUESTION, RESTATE, PLAN, STEP = "question", "restate", "plan", "step"
WAIT, CHECK, ANSWER = "wait", "check", "answer"
SOLUTION_STAGES = (RESTATE, PLAN, STEP, WAIT, CHECK, ANSWER)

# The order matters: a hedged step belongs to the wrong step that it announces.
_LINE_STARTS = (
    (re.compile(r"(Given|We know|Facts): "), RESTATE),
    (re.compile(r"(Plan|To do|Idea): "), PLAN),
    (re.compile(r"Step \d+: (maybe|perhaps|I guess)\b"), WAIT),
    (re.compile(r"Wait\b"), WAIT),
    (re.compile(r"Step \d+: "), STEP),
    (re.compile(r"(Check|Verify|Test): "), CHECK),
    (re.compile(r"(Answer|Result|Final): "), ANSWER),
)


def stage_of_line(line: str, previous: str) -> str:
    """Return the stage of one line; a line with no known beginning continues ``previous``."""
    for pattern, label in _LINE_STARTS:
        if pattern.match(line):
            return label
    return previous


def stage_of_positions(text: str) -> list[str]:
    """Return one stage label per character of ``text`` (question, newline, solution)."""
    labels: list[str] = []
    label = QUESTION
    for line in text.splitlines(keepends=True):
        label = stage_of_line(line, label)
        labels.extend([label] * len(line))
    return labels
