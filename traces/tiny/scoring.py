"""Judge a generated solution: its final number, its form, and the sums on the way."""

from __future__ import annotations

import re
from collections.abc import Iterator

from traces.tiny.data import Problem, apply
from traces.tiny.stages import ANSWER, CHECK, PLAN, RESTATE, STEP, WAIT, stage_of_line

_ANSWER = re.compile(r"(?:Answer|Result|Final): \D*(\d+) \w+\.")
_SUM = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
# One letter per stage; a solution has every part once, in order, and any number of steps.
_LETTERS = {RESTATE: "r", PLAN: "p", STEP: "s", WAIT: "w", CHECK: "c", ANSWER: "a"}
_FORM = re.compile(r"rp(s|w)+ca")


def final_number(solution: str) -> int | None:
    """Return the number of the last line if that is an answer line, else None."""
    match = _ANSWER.fullmatch(solution.rpartition("\n")[2])
    return int(match[1]) if match else None


def exact_share(problems: list[Problem], solutions: list[str]) -> float:
    """Return the share of solutions whose final number is right."""
    right = [
        final_number(solution) == problem.answer
        for problem, solution in zip(problems, solutions, strict=True)
    ]
    return sum(right) / len(right)


def sums(line: str) -> Iterator[tuple[str, bool]]:
    """Yield every ``a sign b = c`` of a line, and whether it is right."""
    for left, sign, operand, result in _SUM.findall(line):
        try:
            right = apply(int(left), sign, int(operand)) == int(result)
        except (ValueError, ZeroDivisionError):
            right = False  # a division with a rest, or by zero
        yield f"{left} {sign} {operand} = {result}", right


def is_hedged(line: str) -> bool:
    """Tell whether a line announces, by a hedge word, a step that may be wrong."""
    return line.startswith("Step") and stage_of_line(line, "") == WAIT


def unhedged_sums_right(solution: str) -> bool:
    """Tell whether every sum outside the hedged steps is right."""
    lines = [line for line in solution.split("\n") if not is_hedged(line)]
    return all(right for line in lines for _, right in sums(line))


def in_form(solution: str) -> bool:
    """Tell whether the stages are all there, in order, and the text ends with its answer."""
    labels = [stage_of_line(line, "") for line in solution.split("\n")]
    letters = "".join(_LETTERS.get(label, "?") for label in labels)
    return bool(_FORM.fullmatch(letters)) and final_number(solution) is not None
